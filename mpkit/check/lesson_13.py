"""Questions of lesson 13."""

from functools import cache

import torch
from torch import nn

from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.group_scale import batches, deep_sigmoid, surviving, train_step
from mpkit.formats import E5M2


def _without_the_middle(scales: list[float]) -> float:
    """What the gradient of the input is multiplied by when the marker between the two groups was forgotten."""
    manager = GroupLossScaleManager(scales, [[nn.Parameter(torch.zeros(1))] for _ in scales])
    x = torch.ones(1, requires_grad=True)
    manager(manager(x, 0, 1), 2, 3).backward()
    assert x.grad is not None
    return float(x.grad)


def _marker(before: float, after: float) -> float:
    manager = GroupLossScaleManager([before, after], [[nn.Parameter(torch.zeros(1))] for _ in range(2)])
    x = torch.ones(1, requires_grad=True)
    manager(x, 1, 2).backward()
    assert x.grad is not None
    return float(x.grad)


def _after(overflows: int) -> float:
    weight = nn.Parameter(torch.zeros(1))
    manager = GroupLossScaleManager(1024.0, [[weight]])
    for _ in range(overflows):
        weight.grad = torch.tensor([torch.inf])
        manager.unscale_and_update_()
    return round(float(manager.scales[0]))


QUESTIONS = {
    "marker": Question(
        "Group 1 has the scale 1024, group 2 has 16. With which number does the marker between them multiply the "
        "gradient?",
        lambda: _marker(1024.0, 16.0),
        "The gradient comes with the scale 16 and must go on with the scale 1024: times 1024 / 16.",
        "Backwards the gradient comes from group 2 and goes on to group 1.",
        ((1 / 64, "Mind the direction: in the backward pass the gradient goes from group 2 to group 1."),),
    ),
    "input": Question(
        "In the same network somebody forgot this marker, the one between group 1 and group 2. With which number is "
        "the gradient of the network's input multiplied now?",
        lambda: _without_the_middle([1024.0, 16.0]),
        "The last marker multiplies by 16, and the first divides by 1024: 16 / 1024 = 1/64. So the gradients of "
        "group 1 and of all before it are 64 times too small.",
        "Two markers are left: the one after group 2 multiplies by 16 / 1, the one before group 1 by 1 / 1024.",
        (
            (1, "That is so with all three markers."),
            (64, "That is what the forgotten marker would have multiplied by."),
        ),
    ),
    "two": Question(
        "A group has the scale 1024, and it overflows in two steps. What is its scale then?",
        lambda: _after(2),
        "Each overflow divides the scale by the square root of 2, so two overflows halve it.",
        "One overflow divides by the square root of 2.",
        ((256, "That would hold if one overflow halved, as with most loss scalers."),),
        rel=1e-6,  # the manager's own scale, in float32, is right too
    ),
}


@cache
def _fate() -> str:
    """What one scale for all groups leaves of group 1, after the 60 steps of the lesson."""
    true, one = deep_sigmoid(3), deep_sigmoid(3, "one scale", E5M2, scale=2.0**18)
    one.manager.growth = 2 ** (1 / 4)
    data = batches(60)
    train_step(true, *data[-1])
    for batch in data:
        train_step(one, *batch)
    share = surviving(one, true)[0]
    return "b" if share < 0.5 else "c"


def _marked() -> list[tuple[tuple[float, list[float], int, int], float]]:
    found = []
    for gradient, scales, i, j in ((2.0, [1024.0, 16.0], 1, 2), (1.0, [1024.0, 16.0], 0, 1), (3.0, [8.0, 64.0], 2, 3)):
        manager = GroupLossScaleManager(scales, [[nn.Parameter(torch.ones(1))] for _ in scales])
        x = torch.ones(1, requires_grad=True)
        (manager(x, i, j) * gradient).sum().backward()
        assert x.grad is not None
        found.append(((gradient, [1.0, *scales, 1.0], i, j), x.grad.item()))
    return found


PREDICTIONS = {
    "fate": Prediction(
        "One dynamic loss scale for all groups, in E5M2. What happens to the gradient values of group 1?",
        (
            ("They overflow.", "Group 1 has the smallest gradients: it is the last one to overflow."),
            (
                "Most of them are rounded to zero.",
                "The scale can be only as large as group 4 allows, and that is far too small for group 1.",
            ),
            (
                "Nothing: a dynamic scale finds a value that fits all.",
                "It finds the largest scale at which nothing overflows. No single scale fits groups so far apart.",
            ),
        ),
        _fate,
    ),
}

TASK = Task(
    "the function gets a gradient, the table of scales S (with a 1 at both ends), and the numbers i and j of a marker. "
    "It returns the gradient that the marker hands on in the backward pass.",
    _marked,
    "A gradient always carries the scale of the group that it is in.",
    "It comes with the scale of group j and must leave with the scale of group i.",
)
