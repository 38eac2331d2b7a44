"""Questions of lesson 10."""

import torch

from mpkit.boost import GradientFreeze, LessBN
from mpkit.boost.grad_freeze import expected_saving
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.networks import resnet18
from mpkit.optimizers import centralized


def _frozen() -> int:
    args = 10, 1, 0.6, 500
    return sum(v > 0 for v in GradientFreeze(*args).generate_freeze_index_sequence(*args))


def _last_entry() -> float:
    return float(centralized(torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]]))[1, 2])


QUESTIONS = {
    "share": Question(
        "GradientFreeze(10, 1, 0.6, 500): on how many of the 500 steps is something frozen?",
        _frozen,
        "freeze_p is the share of steps without freezing, whatever its name says.",
        "Count the steps of a strategy whose index is not 0.",
        ((300, "That is what the name freeze_p promises. These are the steps with index 0."),),
    ),
    "stages": Question(
        "21 stages, 10 groups, index 3: how many stages are frozen?",
        lambda: 3 * (21 // 10),
        "Each index adds one stride of 21 // 10 = 2 stages.",
        "The stride is the number of stages divided by the number of groups, rounded down.",
        ((3, "The index counts groups, not stages."),),
    ),
    "saving": Question(
        "10 stages of equal cost, 10 groups, type 1, 70 % full steps: which share of the backward work is saved?",
        lambda: expected_saving([1.0] * 10, 10, 1, 0.7),
        "0.3 of the steps freeze, and they freeze on average (10 + 1) / (3 * 10) of the network.",
        "On a frozen step the index is on average (G + 1) / 3; and how many steps are frozen?",
        ((0.3, "That would be so if a frozen step saved everything."),),
        rel=0.02,
    ),
    "entry": Question(
        "The gradient of a weight matrix has two rows, one for each output: [1, 5, 3] and [2, 2, 8]. What becomes of "
        "its last entry, the 8, with centralization?",
        _last_entry,
        "Every entry of the second row loses the mean of this row, which is 4.",
        "From each row its own mean is subtracted.",
        (
            (4.5, "That would be so with one mean for the whole matrix. Each output has its own."),
            (-4, "Mind the sign: the mean is subtracted from the entry."),
        ),
    ),
}


def _frozen_share() -> str:
    frozen = sum(
        index > 0 for index in GradientFreeze(10, 1, 0.7, 1000).generate_freeze_index_sequence(10, 1, 0.7, 1000)
    )
    return "a" if abs(frozen - 700) < 50 else "b" if abs(frozen - 300) < 50 else "c"


def _kept_place() -> str:
    kept = LessBN(resnet18(width=4)).report.kept
    block = " ".join(name for name in kept if name.startswith("layer2.0."))
    return {"layer2.0.bn1": "a", "layer2.0.bn2": "b"}.get(block, "c")


def _centred() -> list[tuple[tuple[list[list[float]]], list[list[float]]]]:
    gradients = ([[1.0, 3.0], [2.0, 6.0]], [[0.5, 0.5, 2.0]], [[1.0], [-1.0]], [[1.0, 2.0], [-0.5, 0.25]])
    return [((g,), centralized(torch.tensor(g, dtype=torch.float64), 1).tolist()) for g in gradients]


PREDICTIONS = {
    "share": Prediction(
        'The third argument of GradientFreeze(10, 1, 0.7, 1000) is called freeze_p, "the probability of freezing". On '
        "how many of the 1000 steps is something frozen?",
        (
            ("About 700.", "So the name says. The code does the opposite."),
            ("About 300.", "freeze_p is the share of steps without freezing; in mpkit it is also full_step_fraction."),
            ("All of them.", "Some steps are full steps, so that the first layers go on learning."),
        ),
        _frozen_share,
    ),
    "rule": Prediction(
        "In a block with a shortcut, which BatchNorms does LessBN keep?",
        (
            (
                "The first one, which sees what enters the block.",
                "In the next picture the first BatchNorm of a frame has a cross: it is removed.",
            ),
            (
                "The last one, next to the addition of block and shortcut.",
                "It limits the size of the sum, and so the inputs of the next block. The others are removed.",
            ),
            (
                "All but that of the shortcut.",
                "The BatchNorm of the shortcut goes, but others go too: only one of the block stays.",
            ),
        ),
        _kept_place,
    ),
}

TASK = Task(
    "the function gets the gradient of a weight matrix: a list of rows, one row for each output. It returns the "
    "centralized gradient: from every row the mean of this row is subtracted.",
    _centred,
    "Each row now sums to 0: this is the whole algorithm of gradient centralization.",
    "One mean for each row, not one for the whole matrix.",
)
