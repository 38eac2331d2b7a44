"""Questions of lesson 16."""

import math

import numpy as np
import torch

from mpkit.casting import auto_mixed_precision
from mpkit.check import Question
from mpkit.check.task import Task
from mpkit.formats import E5M2, FP32
from mpkit.optimizers import SGD
from mpkit.policies import naive_loss_ratio
from mpkit.scalers import all_finite


def _steps_to_zero() -> int:
    scale, steps = 8.0, 0
    while scale >= 2.0**-24:
        scale, steps = naive_loss_ratio(scale, 10.0), steps + 1
    return steps


def _factor() -> float:
    parameter = torch.nn.Parameter(torch.ones(1))
    return 1 - float(SGD([parameter], 0.1, 0.9, 0.2).param_groups[0]["dampening"])


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
        "E5M2 has five exponent bits, as float16 has, and two fraction bits. What is its largest finite number?",
        lambda: E5M2.max,
        "{truth:g} = (2 - 2^-2) * 2^15.",
        "The largest power of two is 2^15, as in float16. Which fraction comes with it?",
        (
            (2.0**15, "That is the largest power of two without the fraction: the mistake of statement 1."),
            (65504, "That is float16, which has ten fraction bits."),
        ),
    ),
    "half": Question(
        "Which float16 is nearest to 0.00008? (five digits)",
        lambda: float(np.float16(0.00008)),
        "{truth:.6g}: the number is rounded, as nearly every number is. Nothing overflows.",
        "Ask numpy or torch. Near this number the values of float16 lie 2^-24 apart.",
        ((0.00008, "float16 keeps 11 binary digits, and 0.00008 needs more."),),
        rel=1e-5,
    ),
    "position": Question(
        "An optimizer is SGD(params, 0.1, 0.9, 0.2). From the second step on, by which factor is a gradient multiplied "
        "before it is added to the momentum?",
        _factor,
        "The third number is the dampening, so the factor is 1 - 0.2 = {truth:g}. Weight decay stays 0. Name your "
        "arguments.",
        "Read the signature: learning_rate, momentum, dampening, weight_decay.",
        (
            (1.0, "The factor would be 1 if the last argument had been written as weight_decay=0.2."),
            (0.2, "That is the dampening. The factor is 1 minus it."),
            (0.9, "That is the momentum. It multiplies what was collected before, not the new gradient."),
        ),
    ),
    "steps": Question(
        "Under the rule 'loss > scale: scale *= 0.9', from scale 8 with a loss of 10: after how many steps is the "
        "scale below the smallest float16, 2^-24?",
        _steps_to_zero,
        "{truth} steps. A dynamic rule that halves the scale needs 28 overflows in a row for that.",
        "Find the smallest n with 8 * 0.9^n < 2^-24.",
        ((158, "From scale 1 it takes so many steps. Here the scale starts at 8."),),
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
