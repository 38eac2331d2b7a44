"""Questions of lesson 09."""

from statistics import median

from mpkit.boost import AutoBoost, LessBN
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.networks import resnet34


def _active() -> list[str]:
    return sorted(AutoBoost("O2").active)


def _removed() -> int:
    return len(LessBN(resnet34(width=4)).report.removed)


def _reached() -> bool:
    from mpkit.explorers.boost import measured

    return next(row["ratio"] for row in measured()["speed"] if row["contender"] == "O1") >= 1.2


QUESTIONS = {
    "active": Question(
        "Which algorithms run at boost_level O2 in one process? A sorted list of names.",
        _active,
        "adasum has nothing to merge in one process, so O2 does what O1 does.",
        "Print AutoBoost('O2') and read the line of what is active.",
        ((["adasum", "grad_freeze", "less_bn"], "adasum is asked for; look at what is listed as inactive, and why."),),
    ),
    "removed": Question(
        "A ResNet-34 has 36 BatchNorms: stem, 16 blocks of two, and three shortcuts. How many does LessBN remove?",
        _removed,
        "One inner BatchNorm of each of the 16 blocks, and the three of the shortcuts.",
        "In every block the BatchNorm next to the addition stays. Which ones go?",
        ((16, "And the BatchNorms of the three projection shortcuts?"), (32, "One BatchNorm of each block stays.")),
    ),
    "mode": Question(
        "In which mode are the algorithm switches of the section `boost` read?",
        lambda: "manual",
        "In auto they are ignored, and print(boost) says so.",
        "Set a switch in the view above and try each mode.",
        (("auto", "In auto the level alone decides; see what is listed as inactive."),),
    ),
    "promise": Question(
        "Did O1 reach the promised 20 % more speed in the stored CPU measurement: True or False?",
        _reached,
        "Read from the benchmark file: {truth}. How far it goes depends on how much time BatchNorm takes.",
        "Look at the row O1 in the table of speed-ups.",
    ),
}


def _alone() -> str:
    try:
        return "b" if AutoBoost("O2").active == AutoBoost("O1").active else "a"
    except (TypeError, ValueError):
        return "c"


def _ratios() -> list[tuple[tuple[list[float], list[float]], float]]:
    rounds = [([2.0, 2.2, 2.1], [1.0, 2.0, 1.0]), ([1.0, 1.0, 9.0], [1.0, 0.5, 1.0]), ([3.0], [2.0])]
    return [((off, on), median(a / b for a, b in zip(off, on))) for off, on in rounds]


PREDICTIONS = {
    "alone": Prediction(
        "O2 asks for one algorithm more than O1. You train in one process. What do you expect?",
        (
            (
                "O2 is faster than O1.",
                "The one algorithm more is AdaSum, which merges the updates of several processes.",
            ),
            (
                "O2 does exactly what O1 does.",
                "AdaSum merges the updates of several processes; alone there is nothing to merge.",
            ),
            ("O2 fails.", "It does not fail. It lists AdaSum as inactive, with the reason."),
        ),
        _alone,
    ),
}

TASK = Task(
    "the function gets the seconds of a step without boost (a list, one for each round of the measurement) and those "
    "with boost, of the same rounds, and returns how many times faster the boost is: the median over the rounds of "
    "the ratio.",
    _ratios,
    "Round by round, so that a busy machine slows both sides; the median, so that one bad round does not count.",
    "Divide within each round first, then take the median of the ratios.",
)
