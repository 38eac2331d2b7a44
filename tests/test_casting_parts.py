"""The parts of casting by themselves, where their answers turn: what a rule leaves alone, and what a format binds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, custom_mixed_precision
from mpkit.formats import E5M2

BIT = 2.0**-12  # beside 1 it is in float32, and in no narrower format


class Apply(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


class Listed(Apply):
    """A class to stand on a white list."""


def grown(x: Tensor) -> Tensor:
    return x.relu().add_(BIT)


@pytest.mark.parametrize(
    ("cast", "after"),
    [
        (lambda net: custom_mixed_precision(net, white_list=[Listed], dtype=E5M2), 1 + BIT),
        (lambda net: auto_mixed_precision(net, "O3", E5M2), 1.0),
    ],
    ids=["white list", "O3"],
)
def test_what_only_moves_values_gives_float32_in_a_listed_module_and_the_format_at_o3(cast: Any, after: float) -> None:
    """The result of `relu` decides what the sum written into it is rounded to."""
    assert cast(Listed(grown))(torch.ones(1)).item() == after


@pytest.mark.parametrize(("listed", "after"), [([F.relu], 1.0), ([torch.tanh], 1 + BIT)])
def test_relu_in_place_computes_in_low_where_relu_is_listed(listed: list[Any], after: float) -> None:
    x = torch.tensor([1 + BIT, -1.0])
    y = custom_mixed_precision(Apply(torch.relu_), white_list=listed, dtype=torch.bfloat16)(x)
    assert y is x
    assert x.tolist() == [after, 0.0]


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O2", torch.bfloat16), ("O3", torch.bfloat16)])
def test_a_module_without_an_operation_casts_its_input_where_the_level_does(level: str, dtype: torch.dtype) -> None:
    seen = []
    net = nn.Sequential(nn.Identity(), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wide = torch.ones(1)  # no argument of the network, which would be cast on its way in
    outer = Apply(lambda x: net[1](net[0](wide)))
    outer.net = net
    auto_mixed_precision(outer, level, torch.bfloat16)(torch.ones(1))
    assert seen == [dtype]


def test_a_sparse_tensor_made_from_another_is_bound_to_the_format_by_itself() -> None:
    """It has no one block of memory, so no write into the other is a write into it."""

    def thrice(x: Tensor) -> Tensor:
        first = x * 1
        second = first.neg()
        first.mul_(2)
        return second.mul_(1.1).mul_(1.1).to_dense()  # each rounded to 1, where 1.21 by itself rounds to 1.25

    assert auto_mixed_precision(Apply(thrice), "O3", E5M2)(torch.eye(2).to_sparse()).tolist() == [[-1, 0], [0, -1]]
