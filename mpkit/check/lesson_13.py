"""Questions of lesson 13."""

import torch
from torch import nn

from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.check import Question


def _at_the_input(scales: list[float]) -> float:
    """What the gradient of the input is multiplied by when markers enclose two groups that do nothing."""
    manager = GroupLossScaleManager(scales, [[nn.Parameter(torch.zeros(1))] for _ in scales])
    x = torch.ones(1, requires_grad=True)
    manager(manager(manager(x, 0, 1), 1, 2), 2, 3).backward()
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
        "Group 1 has the scale 1024, group 2 has 16. By what does the marker between them multiply the gradient?",
        lambda: _marker(1024.0, 16.0),
        "It comes with 16 and must go on with 1024: times 1024 / 16.",
        "Backwards the gradient comes from group 2 and goes on to group 1.",
        ((1 / 64, "Mind the direction: in the backward pass the gradient goes from group 2 to group 1."),),
    ),
    "input": Question(
        "And by what is the gradient of the network's input multiplied in the end?",
        lambda: _at_the_input([1024.0, 16.0]),
        "The last marker multiplies by 16, the middle one by 64, the first divides by 1024: nothing is left over.",
        "Multiply what all three markers do: times 16, times 1024 / 16, and the first one, from 1024 back to 1.",
    ),
    "two": Question(
        "A group's scale is 1024. It overflows in two steps. What is its scale then?",
        lambda: _after(2),
        "Each overflow divides by the square root of 2, so two of them halve.",
        "One overflow divides by the square root of 2.",
        ((256, "That would hold if one overflow halved, as with most loss scalers."),),
    ),
}
