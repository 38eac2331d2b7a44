"""Questions of lesson 07."""

from __future__ import annotations

import math

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.optimizers import first_adam_step
from mpkit.formats import FP16
from mpkit.optimizers import SGD


def _least_gradient() -> int:
    """The smallest power of two, as an exponent, whose v float16 does not round to 0 in Adam's first step."""
    return min(e for e in range(-20, 0) if float(first_adam_step(torch.tensor(2.0**e), 1e-8, FP16).moment2) > 0)


def _without_master() -> float:
    weight = torch.ones((), dtype=torch.float16)
    for _ in range(100):
        weight = weight - 1e-4
    return weight.item()


QUESTIONS = {
    "square": Question(
        "A gradient is a power of two, 2^n, and Adam's beta2 is 0.999. What is the smallest n with which float16 "
        "stores v as a number above 0 after the first step?",
        _least_gradient,
        "v is 0.001 x 2^-14 = 6.1e-08 there. With half this gradient it is a quarter of that, and rounds to 0.",
        "v is 0.001 times the square of the gradient, and float16 rounds all up to 2^-25 = 2.98e-08 to 0.",
        (
            (-8, "Then v is 0.001 x 2^-16 = 1.5e-08: it rounds to 0."),
            (-6, "There v is above 0, but a smaller gradient will do."),
            (-12, "There the square itself is above 0. But v takes only 0.001 of it."),
            (2.0**-7, "That is the gradient itself. The question asks for n, its exponent."),
        ),
    ),
    "lost": Question(
        "A float16 weight of 1 has no master copy. A hundred updates each take 0.0001 off it. What is it afterwards?",
        _without_master,
        "It is still {truth:g}. Below 1 the numbers of float16 are 0.0005 apart, so every sum is rounded back to 1.",
        "How far is the next float16 number below 1, and to which of the two is 0.9999 nearer?",
        ((0.99, "That is what a float32 master copy would hold."),),
    ),
    "factor": Question(
        "sens is 2^12, and the optimizer's loss_scale is 2^8 by mistake. How many times too long is one SGD step?",
        lambda: 2.0**12 / 2.0**8,
        "The gradient arrives multiplied by sens and is divided by loss_scale: 2^12 / 2^8, {truth:g} times.",
        "What multiplies the gradient, and what divides it?",
        (
            (2.0**12, "That would be so if the optimizer divided by nothing."),
            (2.0**-4, "sens is the larger one, so the steps are too long."),
            (4, "That is the exponent: 2^12 / 2^8 is 2^4."),
        ),
    ),
}


def _first_step() -> str:
    size = float(first_adam_step(torch.tensor([1e-3]), 1e-8, FP16).size)
    return "c" if not math.isfinite(size) else "a" if abs(size - 1) < 0.01 else "b"


def _mastered() -> list[tuple[tuple[float, float, float, float], tuple[float, float]]]:
    found = []
    for master, gradient, scale, rate in (
        (1.0, 0.75, 1024.0, 2.0**-12),  # float16 shows the second update only because the first was kept
        (0.75, -0.25, 64.0, 0.5 + 2.0**-12),  # a rate that float16 does not hold
        (1.0, 2.0, 1.0, 0.25),
        (2.0**-8, 2.0**-26, 2.0**16, 0.5),  # float16 holds the scaled gradient, not the true one
    ):
        parameter = torch.nn.Parameter(torch.tensor([master], dtype=torch.float16))
        optimizer = SGD([parameter], rate, loss_scale=scale)
        for _ in range(2):  # the second step starts from a master copy that the float16 weight may not show
            parameter.grad = torch.tensor([gradient * scale], dtype=torch.float16)
            optimizer.step()
            before, master = master, optimizer.state[parameter]["master"].item()
            found.append(((before, gradient * scale, scale, rate), (master, parameter.item())))
    return found


PREDICTIONS = {
    "step": Prediction(
        "A gradient is 0.001, eps is 1e-8, and m, v and eps are kept in float16. How long is Adam's first step?",
        (
            (
                "As long as the learning rate, as in float32.",
                "It should be. But v holds the square of the gradient, and that is far smaller than the gradient.",
            ),
            (
                "A little too long or too short, because of rounding.",
                "Rounding alone would do that. Here v is not rounded a little: it becomes 0.",
            ),
            (
                "Infinite.",
                "v is too small for float16, and so is eps. Both are 0, and the step is m / 0.",
            ),
        ),
        _first_step,
    ),
}

TASK = Task(
    "the function gets the float32 master copy of a weight, its scaled gradient, the loss scale and the learning rate. "
    "It returns two numbers: the new master copy, and the float16 weight that the network computes with.",
    _mastered,
    "The master copy collects what the float16 weight cannot show yet.",
    "Divide the gradient by the scale, take rate x gradient off the master copy, and round only the second result.",
)
