"""Questions of lesson 16."""

import math

import numpy as np
import torch

from mpkit.casting import auto_mixed_precision
from mpkit.check import Question
from mpkit.check.task import Task
from mpkit.formats import FP32
from mpkit.optimizers import SGD
from mpkit.policies import naive_loss_ratio
from mpkit.scalers import all_finite


def _steps_to_zero() -> int:
    scale, steps = 1.0, 0
    while scale >= 2.0**-24:
        scale, steps = naive_loss_ratio(scale, 10.0), steps + 1
    return steps


def _dampening() -> float:
    parameter = torch.nn.Parameter(torch.ones(1))
    return float(SGD([parameter], 0.1, 0.9, 1e-4).param_groups[0]["dampening"])


def _verdicts() -> list[bool]:
    """Statement by statement, each computed."""
    gradient = torch.tensor([1.5e-3, -0.0123, 2.0]).half()
    vanished = torch.full((4,), 1e-9).half()
    unscaled_late = torch.tensor([1.0]) / torch.tensor(math.inf)
    network = auto_mixed_precision(torch.nn.Linear(2, 2), "O3")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], 0.1)
    weight.grad = torch.full((2,), math.inf)
    finite = all_finite([weight.grad])
    if finite:
        optimizer.step()
    other = torch.nn.Linear(2, 2)
    return [
        float(FP32.max) == 1.7e38,
        torch.equal((gradient * 1024) / 1024, gradient),
        float(np.float16(0.00006666666)) == 0.000067,
        not all_finite([vanished]),
        bool(all_finite([unscaled_late])) == bool(all_finite([torch.tensor([math.inf])])),
        bool(torch.tensor(3e38).bfloat16().isfinite()),
        {p.dtype for p in network.parameters()} == {torch.float16},
        any(p is q for p in other.parameters() for q in optimizer.param_groups[0]["params"]),
        SGD([weight], 0.1, 0.9, 1e-4).param_groups[0]["weight_decay"] == 1e-4,
        torch.equal(weight.detach(), torch.ones(2)),
        naive_loss_ratio(1.0, 2.3) >= 1.0,
    ]


QUESTIONS = {
    "verdicts": Question(
        "Which of the eleven statements are true? A list of eleven times True or False.",
        _verdicts,
        "All eleven verdicts are right. The sections below compute each of them.",
        "At least one verdict is wrong. Run the sections below, then judge again.",
        (
            (
                lambda v: not isinstance(v, list | tuple) or len(v) != 11 or {type(one) for one in v} != {bool},
                "Give a list of eleven times True or False.",
            ),
            ([False] * 11, "Some of the statements are true."),
        ),
    ),
    "max": Question(
        "What is the largest finite float32? (four digits are enough)",
        lambda: FP32.max,
        "{truth:.8g} = (2 - 2^-23) * 2^127.",
        "The largest power of two is 2^127, and the largest fraction almost doubles it.",
        ((2.0**127, "That is 2^127, half of the right number: the fraction is missing."),),
        rel=1e-3,
    ),
    "half": Question(
        "Which float16 is nearest to 0.00006666666? (five digits)",
        lambda: float(np.float16(0.00006666666)),
        "{truth:.6g}: the number is rounded, as nearly every number is. Nothing overflows.",
        "Ask numpy or torch. Near this number the values of float16 lie 2^-24 apart.",
        ((0.000067, "float16 rounds to 11 binary digits, not to two decimal digits."),),
        rel=1e-5,
    ),
    "position": Question(
        "SGD(params, 0.1, 0.9, 1e-4): what is the dampening of this optimizer?",
        _dampening,
        "The third number is the dampening, and weight decay stays 0. Name your arguments.",
        "Read the signature: learning_rate, momentum, dampening, weight_decay.",
        ((0.0, "The dampening would be 0 if the last argument had been written as weight_decay=1e-4."),),
    ),
    "steps": Question(
        "Under the rule 'loss > scale: scale *= 0.9', from scale 1 with a loss of 10: after how many steps is the "
        "scale below the smallest float16, 2^-24?",
        _steps_to_zero,
        "{truth} steps. A dynamic rule that halves the scale needs 25 overflows in a row for that.",
        "Find the smallest n with 0.9^n < 2^-24.",
    ),
}

PREDICTIONS: dict[str, object] = {}  # its eleven statements are judged at the start, by `check.answer`


def _lost() -> list[tuple[tuple[list[float]], float]]:
    found = []
    for gradients in ([1.0, 1e-9, 0.0, 2e-8], [1e-3, 3e-8], [0.0, 0.0], [1e-12, -1e-12], [-1.0, 2.0**-25, 3.0, 1e-3]):
        values = np.array(gradients)
        gone = (values != 0) & (values.astype(np.float16) == 0)
        found.append(((gradients,), float(gone.mean())))
    return found


TASK = Task(
    "all_finite cannot see an underflow. Write a function that can: it gets a list of gradients and returns the share "
    "of them that are not zero but become zero in float16. All magnitudes up to 2^-25 become zero.",
    _lost,
    "It is a share of all values. Those that were zero before are not lost.",
    "Count the values v with v != 0 and abs(v) <= 2**-25, and divide by the number of all values.",
)
