"""The parts of the boosts by themselves, where their answers turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpkit.boost.dim_reduce import DimReduce


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
