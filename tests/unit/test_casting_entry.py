"""Other methods than forward, and threads that a forward starts: at the level inside `within`, else as without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
from support import Op
from torch import Tensor, nn

from mpkit.casting import (
    amp_level,
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    get_black_list,
    to_float,
    within,
)
from mpkit.formats import BF16

X = torch.rand(3, 4)
W = torch.rand(4, 4)


class Several(nn.Module):
    """Entry points other than forward, and one that computes in a thread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.rand(4, 4))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) @ W)

    def penalty(self) -> Tensor:
        return ((self.weight - W) ** 2).sum() + self.weight.norm() + (self.inner.weight.T @ self.weight).abs().sum()

    def forward(self, x: Tensor, *, threaded: bool = False) -> Tensor:
        found: list[Tensor] = []

        def work() -> None:
            with within(self):
                found.append(self.encode(x))

        if threaded:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            found.append(self.encode(x))
        return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, BF16], ids=["native", "emulated"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_another_entry_point_and_a_thread_compute_at_the_level_within_it(level: str, dtype: Any) -> None:
    network = auto_mixed_precision(Several(), level, dtype)
    want = network(X)
    assert torch.equal(network(X, threaded=True), want)
    with within(network):
        got = network.encode(X)
    assert torch.equal(got.float(), want)
    got.float().sum().backward()
    grad = network.inner.weight.grad.clone()
    network.zero_grad()
    network(X).sum().backward()
    assert torch.equal(network.inner.weight.grad, grad)
    assert torch.equal(X @ W, torch.mm(X, W))  # nothing is cast outside


@pytest.mark.parametrize(
    "put",
    [
        *[lambda n, x=x: auto_mixed_precision(n, x, torch.bfloat16) for x in ("O1", "O2", "O3", "auto")],
        lambda n: cast_like(n, "torch_autocast"),
        lambda n: custom_mixed_precision(n, white_list=[torch.matmul]),
        lambda n: to_float(n, torch.bfloat16),
    ],
)
def test_what_a_method_computes_with_parameters_alone_is_as_without_a_level(put: Callable[[nn.Module], Any]) -> None:
    network = Several()
    want = network.penalty()
    put(network)
    network(X)
    assert torch.equal(network.penalty(), want)


def test_norms_that_a_black_list_leaves_out_are_logged() -> None:
    with TestCase().assertLogs("mpkit") as told:
        custom_mixed_precision(nn.Linear(2, 2), black_list=[nn.LayerNorm])
    named = [record.args[0] for record in told.records]  # type: ignore[index]
    assert named == [kind.__name__ for kind in get_black_list() if kind is not nn.LayerNorm]


def test_within_is_for_modules_at_a_level() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"), within(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="no level"), within(nn.Linear(2, 2)):
        pass
    for network in (
        to_float(nn.Linear(2, 2), torch.float16),
        cast_like(nn.Linear(2, 2), "keras_mixed_float16"),
        custom_mixed_precision(nn.Linear(2, 2), black_list=[nn.LayerNorm]),
    ):
        with within(network):
            assert (network.weight * 1.0).dtype is torch.float16
    assert amp_level(network) == ""


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_what_is_no_tensor_is_refused_by_torch_itself(level: str) -> None:
    for layer in (nn.Linear(2, 2), nn.ReLU(), nn.Conv1d(2, 2, 1)):
        network = auto_mixed_precision(nn.Sequential(layer, nn.ReLU()), level, torch.bfloat16)
        for nothing in (None, [1.0, 2.0]):
            with pytest.raises(TypeError, match="Tensor"):
                network(nothing)

    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("of one's own")

    with pytest.raises(RuntimeError, match=r"^of one's own$"):
        auto_mixed_precision(Op(fails), level)(torch.ones(1))


def test_within_a_level_no_autocast_rules_and_where_a_recipe_says_nothing_it_goes_on() -> None:
    layer = to_float(nn.Linear(1, 1, bias=False), torch.float32)
    nn.init.constant_(layer.weight, 300.0)
    with torch.no_grad(), torch.autocast("cpu", torch.float16), within(layer):
        assert float(torch.full((1, 1), 300.0) @ layer.weight) == 90000
    network = nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    network.forward = lambda x: (network["head"](x), x @ x.T, network["body"](x))  # type: ignore[method-assign]
    cast_like(network, "mxfp8", keep="head")
    with torch.autocast("cpu", torch.bfloat16):
        head, product, body = network(torch.randn(4, 32))
    assert (head.dtype, product.dtype, body.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
