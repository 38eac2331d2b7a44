"""Questions of lesson 20."""

from mpkit.check import Question
from mpkit.experiment.statistics import more_seeds
from mpkit.explorers.own_experiment import recorded


def _worse() -> list[str]:
    verdicts = recorded().summary("accuracy")["verdict"]
    return [str(cell) for cell in verdicts.index if verdicts[cell] == "worse"]


def _half() -> float:
    """Seeds for a difference of 0.1 and of 0.05 spreads, in the ratio of large numbers."""
    large, small = more_seeds(0.2, 1.0, 2), more_seeds(0.1, 1.0, 2)
    assert large is not None
    assert small is not None
    return float(round((small + 2) / (large + 2)))


QUESTIONS = {
    "worse": Question(
        "Which settings of the recorded experiment are worse than float32, with the correction for seven comparisons? "
        "Give a list of the cells' names, in the order of the table.",
        _worse,
        "{truth}: for all others nothing is shown, neither a difference nor that there is none.",
        "Read the column verdict, which needs p_holm below 0.05, not the sign of the difference.",
        ((lambda v: isinstance(v, list) and len(v) > 3, "Most of these differences may be chance: read the verdict."),),
    ),
    "half": Question(
        "You want to see a difference half as large. About how many times as many seeds does it take?",
        _half,
        "{truth:g} times: an interval shrinks with the square root of the number of seeds.",
        "Half of the width of an interval needs how many more runs? The width goes with 1 / sqrt(n).",
        ((2, "Twice as many seeds make the interval narrower by 1.4 only."),),
        rel=1e-6,
    ),
    "chance": Question(
        "Twenty settings that change nothing are compared at 5 % each, without a correction. What is the chance that "
        "at least one of them looks different? (a number from 0 to 1)",
        lambda: 1 - 0.95**20,
        "{truth:.2f}: rather likely than not.",
        "First take the chance that none of the twenty does: 0.95 to the power of twenty.",
        ((0.05, "That is the chance for one comparison."), (1.0, "That is how many to expect in the mean.")),
        rel=0.02,
    ),
    "interval": Question(
        "The interval of a difference goes from -0.3 to +1.9. Is the setting better, worse, or not distinguishable?",
        lambda: "not distinguishable",
        "{truth}: 0 lies inside, so the data fit no difference as well as one of almost 2 points.",
        "Does the interval contain 0?",
        (("better", "The middle is above 0, but the interval goes on to the other side."),),
    ),
}
