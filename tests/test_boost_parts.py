"""The parts of the boosts by themselves, where their answers turn."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn

from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.grad_freeze.stages import stage_costs
from mpkit.boost.group_loss_scale import GroupLossScaleManager


class Bare(torch.optim.Optimizer):
    """An optimizer of somebody's own, with the options that it has."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),  # no rate is rate 1, no momentum and no decay are none
        ({"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}, True),
        ({"lr": 2.0}, False),
        ({"momentum": 0.5}, False),
        ({"weight_decay": 0.5}, False),
        ({"lr": 1.0, "betas": (0.9, 0.99)}, False),
    ],
    ids=str,
)
def test_dim_reduce_takes_whatever_applies_the_move_as_it_is(options: dict[str, Any], taken: bool) -> None:
    net = nn.Linear(2, 1, bias=False)
    made = lambda: DimReduce(net, Bare([net.weight], options), [net.weight], torch.eye(2), n_components=2)  # noqa: E731
    if taken:
        assert made().rho == 0.55
        return
    with pytest.raises(ValueError, match="needs plain SGD with lr 1"):
        made()


def test_what_freezing_a_stage_saves_in_multiply_adds() -> None:
    """Its own weight gradient and the input gradient of the layer after it, of one sample."""
    dense = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for batch in (1, 5):
        assert stage_costs(dense, torch.ones(batch, 3)) == [3 * 4 + 4 * 2, 4 * 2]
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 5))
    assert stage_costs(image, torch.ones(2, 1, 5, 5)) == [3 * 3 * 18 + 18 * 5, 18 * 5]  # 3 x 3 places


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"growth": 1.0}, None),
        ({"growth": 1 - 2.0**-20}, ValueError),
        ({"shrink": 2.0**-20}, None),
        ({"shrink": 0.0}, ValueError),
        ({"shrink": 1.0}, ValueError),
        ({"min_scale": 4.0, "max_scale": 4.0}, None),
        ({"min_scale": 0.0}, None),
        ({"min_scale": 4.5, "max_scale": 4.25}, ValueError),
        ({"max_scale": math.inf}, None),
        ({"max_scale": Decimal("Infinity")}, TypeError),
    ],
    ids=str,
)
def test_the_bounds_of_a_group_scale_at_their_edges(options: dict[str, Any], error: type[Exception] | None) -> None:
    if error is None:
        assert GroupLossScaleManager(4.0, **options).get_loss_scale() == 4.0
        return
    with pytest.raises(error, match=r"need|must"):
        GroupLossScaleManager(4.0, **options)
