"""Questions of lesson 09."""

from statistics import median

from mpkit.boost import AutoBoost, LessBN
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.networks import resnet34


def _active() -> list[str]:
    switches = {"mode": "manual", "less_bn": True, "adasum": True, "grad_accumulation": True}
    return sorted(AutoBoost("O0", {"boost": switches, "grad_accumulation": {"grad_accumulation_step": 4}}).active)


def _frozen_in_auto() -> bool:
    return "grad_freeze" in AutoBoost("O1", {"boost": {"mode": "auto", "grad_freeze": False}}).active


def _removed() -> int:
    return len(LessBN(resnet34(width=4)).report.removed)


def _saved() -> float:
    from mpkit.explorers.boost import measured

    return 1 - 1 / next(row["ratio"] for row in measured()["speed"] if row["contender"] == "O1 tuned")


QUESTIONS = {
    "active": Question(
        "boost_level is O0 and the mode is manual. The switches less_bn, adasum and grad_accumulation are on, and "
        "grad_accumulation_step is 4. Which algorithms run in one process? A list of names.",
        _active,
        "In mode manual the switches decide, not the level. adasum has nothing to merge in one process.",
        "Print AutoBoost('O0', {'boost': {'mode': 'manual', ...}, 'grad_accumulation': {...}}) with these switches.",
        (
            (
                ["adasum", "grad_accumulation", "less_bn"],
                "adasum is asked for; look at what is listed as inactive, and why.",
            ),
            ([], "At O0 nothing runs in mode auto. Does the level decide in mode manual?"),
        ),
    ),
    "removed": Question(
        "A ResNet-34 has 36 BatchNorms. How many of them does O1 remove?",
        _removed,
        "{truth} of 36. Lesson 10 asks which ones they are.",
        "Import resnet34 from mpkit.networks. Give it to `network_auto_process_train` as above, with an optimizer of "
        "its own: the report tells the number.",
        ((11, "That is the number for a ResNet-18."),),
    ),
    "mode": Question(
        "boost_level is O1, and the section `boost` is {'mode': 'auto', 'grad_freeze': False}. Does freezing run? True "
        "or False.",
        _frozen_in_auto,
        "In mode auto the level alone decides, and O1 freezes. print(boost) lists the switch as inactive.",
        "Make an AutoBoost with this section and print it.",
        ((False, "That would be so in mode manual. What decides in mode auto?"),),
    ),
    "saved": Question(
        "In the stored CPU measurement O1 tuned has a speed-up of about 1.30. Which share of the time of a step does "
        "it save?",
        _saved,
        "1 - 1/1.30, {truth:.0%}. A speed-up of 1.30 means 30 % more steps in the same time, not 30 % less time.",
        "A step takes 1/1.30 of the time that it took without boost.",
        ((0.3, "That is how many more steps there are in the same time."),),
        rel=0.03,
    ),
}


def _alone() -> str:
    try:
        return "b" if AutoBoost("O2").active == AutoBoost("O1").active else "a"
    except (TypeError, ValueError):
        return "c"


def _ratios() -> list[tuple[tuple[list[float], list[float]], float]]:
    rounds = [([2.0, 2.2, 2.1], [1.0, 2.0, 1.0]), ([1.0, 1.0, 9.0], [1.0, 0.5, 1.0]), ([3.0], [2.0])]
    rounds += [([4.0, 1.0, 2.0], [1.0, 2.0, 0.5])]  # sorted, or each with all others, they give another ratio
    rounds += [([1.0, 2.0, 3.0, 6.0], [1.0, 1.0, 1.0, 1.0])]  # an even number: the mean of the two in the middle
    return [((off, on), median(a / b for a, b in zip(off, on))) for off, on in rounds]


PREDICTIONS = {
    "alone": Prediction(
        "O2 asks for one algorithm more than O1. You train in one process. What do you expect?",
        (
            (
                "O2 is faster than O1.",
                "The additional algorithm is AdaSum, which merges the updates of several processes.",
            ),
            (
                "O2 does exactly what O1 does.",
                "AdaSum merges the updates of several processes. One process alone has nothing to merge.",
            ),
            ("O2 fails.", "It does not fail. It lists AdaSum as inactive, with the reason."),
        ),
        _alone,
    ),
}

TASK = Task(
    "the function gets two lists of seconds per step: without boost, and with boost. Both have one entry for each "
    "round of the measurement. It returns how many times faster the boost is: the median of the ratios of the rounds.",
    _ratios,
    "In each round a busy machine slows both sides alike. And the median ignores one bad round.",
    "Divide within each round first, then take the median of the ratios. Of an even number of ratios it is the mean of "
    "the two in the middle.",
)
