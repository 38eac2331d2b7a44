"""Questions of lesson 20."""

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.experiment.statistics import more_seeds, paired
from mpkit.explorers.own_experiment import recorded


def _told(metric: str, verdict: str) -> list[str]:
    """The cells of the recorded experiment with this verdict."""
    verdicts = recorded().summary(metric)["verdict"]
    return [str(cell) for cell in verdicts.index if verdicts[cell] == verdict]


def _half() -> float:
    """Seeds for a difference of 0.1 and of 0.05 spreads, in the ratio of large numbers."""
    large, small = more_seeds(0.2, 1.0, 2), more_seeds(0.1, 1.0, 2)
    assert large is not None
    assert small is not None
    return float(round((small + 2) / (large + 2)))


QUESTIONS = {
    "better": Question(
        "The runs also stored final_loss, the mean loss of the last epoch. Which settings are better than float32 in "
        'results.summary("final_loss")? Give a list of the names of the cells.',
        lambda: _told("final_loss", "better"),
        "{truth}: a smaller loss is better. In the accuracy this setting was not distinguishable from float32.",
        "Read the column verdict, not the sign of the difference. A verdict needs p_holm below 0.05.",
        (
            (
                lambda v: v == _told("final_loss", "worse"),
                "Their loss is larger than that of float32, so they are worse.",
            ),
            (
                lambda v: isinstance(v, list) and len(v) > 2,
                "Some of these differences may be chance: read the column verdict.",
            ),
        ),
    ),
    "half": Question(
        "You want to show a difference that is half as large. By which factor do you need more seeds?",
        _half,
        "{truth:g} times as many seeds: the width of an interval is proportional to 1 / sqrt(number of seeds).",
        "The interval must be half as wide. Its width is proportional to 1 / sqrt(n).",
        ((2, "With twice as many seeds the interval is narrower by a factor of 1.4 only."),),
        rel=1e-6,
    ),
    "chance": Question(
        "Twenty settings that change nothing are compared at 5 % each, without a correction. What is the chance that "
        "at least one of them looks different? (a number from 0 to 1)",
        lambda: 1 - 0.95**20,
        "{truth:.2f}: more likely than not.",
        "First compute the chance that none of the twenty looks different: 0.95 to the power of 20.",
        (
            (0.05, "That is the chance for one comparison."),
            (0.95**20, "That is the chance that none of the twenty looks different."),
            (100 * (1 - 0.95**20), "That is percent. A number from 0 to 1 is asked for."),
            (1.0, "That is the mean number of settings that look different, not a chance."),
        ),
        rel=0.02,
    ),
    "interval": Question(
        "The interval of a difference goes from -0.3 to +1.9. Is the setting better, worse, or not distinguishable?",
        lambda: "not distinguishable",
        "{truth}: 0 lies inside. The data agree with no difference, and also with a difference of almost 2 points.",
        "Does the interval contain 0?",
        (("better", "The middle of the interval is above 0, but its lower end is below 0."),),
    ),
}


def _differs() -> str:
    worse = _told("accuracy", "worse")
    return "b" if worse == ["e5m1 O2, scaled"] else "c" if not worse else "a"


def _intervals() -> list[tuple[tuple[list[float], list[float]], tuple[float, float]]]:
    base = [88.0, 90.0, 91.0, 89.0, 92.0]
    others = ([87.0, 90.0, 90.5, 88.0, 91.0], [88.5, 89.0, 92.0, 90.0, 91.0], [80.0, 81.0, 84.0, 82.0, 83.0])
    found = []
    for other in others:
        told = paired([b - a for a, b in zip(base, other)])
        found.append(((base, other), (told.low, told.high)))
    return found


PREDICTIONS = {
    "differs": Prediction(
        "For which of the seven other settings do the ten seeds show that its accuracy differs from that of float32?",
        (
            (
                "All of them: fewer bits always cost something.",
                "They may cost something, but too little to be seen beside the differences between seeds.",
            ),
            (
                "Only the format with one fraction bit.",
                "Chance does not explain its difference, even after the correction for seven comparisons.",
            ),
            (
                "None: the spread between seeds is larger than any difference.",
                "One difference is so large that the pairs by seed show it.",
            ),
        ),
        _differs,
    ),
}

TASK = Task(
    "the function gets the accuracies of the baseline and of another setting for the same five seeds (two lists), and "
    "returns the 95 % interval of the mean paired difference, a pair (low, high). For five pairs it is the mean "
    "difference ± 2.7764 x the standard deviation of the differences / sqrt(5).",
    _intervals,
    "What a seed does to both settings alike cancels in each difference.",
    "Take the five differences (other minus baseline) first; statistics.stdev divides by n - 1.",
    rel=1e-3,  # 2.776, as tables have it, is right too
)
