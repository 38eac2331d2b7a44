"""Sparse operands, and sparse gradients, at every level, with and without a ledger: the numbers of dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, ledger
from mpkit.casting.calls import lost_values
from mpkit.formats import E5M2

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

LEVELS = ("O0", "O1", "O2", "O3", "auto")
# Each number is near to one of E5M2, and every sum of products of those is one of E5M2 again: no tie, which the last
# bit of a sum would decide, and another bit on another machine.
DENSE = torch.tensor([[0.0, 1.53, 0.0, 2.01], [1.07, 0.0, 0.0, 2.9]])
WEIGHT = torch.tensor([[1.02, 0.51, 0.49], [2.05, 0.98, -1.02], [0.3, -0.7, 0.2], [1.03, 0.52, 1.53]])
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w: torch.mm(x, w),
    "@": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(torch.ones(2, 3), x, w),
    "to_dense": lambda x, w: x.to_dense() @ w,
    "scaled": lambda x, w: (x * 2.0) @ w,
}


class Product(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(WEIGHT.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


def trained(network: nn.Module, x: Tensor, watched: bool) -> list[Tensor]:
    x = x.clone().requires_grad_(x.is_floating_point())
    if watched:
        with ledger(network, count=True) as book:
            out = network(x)
        assert book.measured_bytes >= 0
        assert book.rows
    else:
        out = network(x)
    out.float().sum().backward()
    grads = [p.grad for p in network.parameters()] + ([x.grad] if x.grad is not None else [])
    return [out.detach(), *(g.to_dense() for g in grads if g is not None)]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("level", LEVELS)
def test_sparse_operands_give_the_numbers_of_dense_ones(level: str, layout: str) -> None:
    for name, call in CALLS.items():
        if layout == "to_sparse_csr" and name == "scaled":
            continue  # torch has no such gradient
        for watched in (False, True):
            network = auto_mixed_precision(Product(call), level, E5M2)
            want = trained(auto_mixed_precision(Product(call), level, E5M2), DENSE, False)
            got = trained(network, getattr(DENSE, layout)(), watched)
            places = DENSE != 0  # a sparse operand may have gradients where it has values only
            assert len(got) == len(want) == 3
            for a, b in zip(got[:2], want[:2]):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # another order of float32 sums
            torch.testing.assert_close(got[2][places], want[2][places], rtol=1e-6, atol=1e-6)


def test_a_native_cast_of_a_sparse_operand_has_a_gradient() -> None:
    call = CALLS["@"]
    want = trained(auto_mixed_precision(Product(call), "O1", torch.bfloat16), DENSE, False)
    for watched in (False, True):
        got = trained(auto_mixed_precision(Product(call), "O1", torch.bfloat16), DENSE.to_sparse(), watched)
        torch.testing.assert_close(got[1], want[1], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E5M2], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_tables_with_sparse_gradients_learn_what_dense_ones_learn(level: str, dtype: Any) -> None:
    rows = torch.tensor([[0, 1], [1, 3]])

    def made(sparse: bool, bag: bool) -> nn.Module:
        torch.manual_seed(1)
        table: nn.Module = (
            nn.EmbeddingBag(4, 3, mode="sum", sparse=sparse) if bag else nn.Embedding(4, 3, sparse=sparse)
        )
        return auto_mixed_precision(table, level, dtype)

    for bag in (True, False):
        for watched in (False, True):
            got, want = (trained(made(sparse, bag), rows, watched) for sparse in (True, False))
            for a, b in zip(got, want):
                assert torch.equal(a, b)


def test_a_call_by_keyword_is_the_same() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return F.embedding_bag(input=x, weight=w, mode="sum", sparse=True)

    rows = torch.tensor([[0, 1], [1, 3]])
    network = auto_mixed_precision(Product(call), "O3", E5M2)
    out, grad = trained(network, rows, False)
    rounded = auto_mixed_precision(Product(lambda x, w: w * 1.0), "O3", E5M2)(rows).detach()
    assert torch.equal(grad, torch.tensor([[1.0], [2.0], [0.0], [1.0]]).expand(4, 3))
    torch.testing.assert_close(out, torch.stack([rounded[0] + rounded[1], rounded[1] + rounded[3]]), rtol=0.25, atol=0)


def test_values_at_other_places_are_not_compared() -> None:
    wide = torch.tensor([1e-30, 0.0, 1e30]).to_sparse()
    assert lost_values(wide, wide.half()) == (1, 1)
    assert lost_values(wide, torch.tensor([0.0, 1.0, 0.0]).to_sparse()) == (0, 0)
