"""The ledger: rows, casts, counts, bytes kept for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Op, Written
from test_casting import made
from torch import Tensor, nn

from mpkit.casting import RECIPES, Recipe, auto_mixed_precision, cast_like, ledger
from mpkit.casting import Cast as CastTo
from mpkit.casting.products import recipe_linear
from mpkit.casting.recipe import OperandRow
from mpkit.formats import E4M3FN, FP16, get_format


def test_rows_come_in_order_with_paths_and_precisions() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2, bias=False))
    auto_mixed_precision(network, "O1", torch.bfloat16)
    with ledger(network) as book:
        network(torch.randn(5, 4))
    got = [(r.module, r.operation, r.inputs, r.compute, r.output, r.shape, r.bytes, r.casts) for r in book.rows]
    wide = "float32"
    assert got == [
        ("0.0", "linear", (wide,) * 3, "bfloat16", (wide,), (5, 3), 60, 4),
        ("0.1", "tanh", (wide,), wide, (wide,), (5, 3), 60, 0),
        ("1", "linear", (wide,) * 2, "bfloat16", (wide,), (5, 2), 40, 3),
    ]
    assert {c.operation for c in book.casts} == {"linear"}
    assert (book.results, book.rows[0].flushed) == ([], None)
    assert [(c.module, c.tensor, c.source, c.target, c.elements) for c in book.casts[:3]] == [
        ("0.0", "activation", wide, "bfloat16", 20),
        ("0.0", "0.0.weight", wide, "bfloat16", 12),
        ("0.0", "0.0.bias", wide, "bfloat16", 3),
    ]


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2), (FP16, 2), (E4M3FN, 1)], ids=str)
def test_what_is_kept_for_the_backward_pass_counts_once_in_its_precision_and_no_weight(dtype: Any, size: int) -> None:
    layer = nn.Linear(4, 4, bias=False)
    network = Written(lambda m, x: torch.tanh(m.layer(x) + m.layer(x) + x @ m.layer.weight.T), layer=layer)
    if dtype is not None:
        auto_mixed_precision(network, "O2", dtype)
    with ledger(network) as book:
        network(torch.ones(3, 4, requires_grad=True))
    assert [row.saved for row in book.rows if row.saved] == [12 * size] * 2  # the input, and what tanh gives
    assert book.measured_bytes == 24 * size
    assert str(book).endswith(f"kept for the backward pass, bytes: {24 * size}")


def test_operations_outside_the_network_are_not_its_own() -> None:
    network = nn.Linear(2, 2)
    with ledger(network) as book:
        x = torch.ones(1, 2) * 2
        network(x).sum().backward()
        network(x)
    assert [row.operation for row in book.rows] == ["linear", "linear"]


def test_attention_is_shown_operation_by_operation() -> None:
    network, args, _ = made("attention")
    with ledger(auto_mixed_precision(network, "O1")) as book:
        network(*args, need_weights=True)
    computed = {row.operation: row.compute for row in book.rows}
    assert computed["linear"] == computed["bmm"] == "float16"
    assert computed["softmax"] == "float32"


def test_counts_of_flushed_and_overflowed_values() -> None:
    """Worked by hand in float16: smallest subnormal 2**-24 (half of it rounds to 0), largest 65504."""

    x = torch.tensor([2.0**-26, -(2.0**-27), 2.0**-13, -(2.0**-13), 1.0, 300.0, 7e4])
    # cast: two flush, 7e4 overflows; product: (2**-13)**2 = 2**-26 flushes twice, 9e4 overflows
    for dtype in (torch.float16, FP16):
        with ledger(auto_mixed_precision(Op(lambda x: x * x), "O3", dtype), count=True) as book:
            book.network(x)
        (entry, *_), (row,) = book.casts, book.rows
        assert (entry.flushed, entry.overflowed, row.flushed, row.overflowed) == (2, 1, 2, 1)
        assert entry.operation == ""
    layer = nn.Linear(1, 1)
    nn.utils.vector_to_parameters(torch.full((2,), 6e4), layer.parameters())
    with ledger(auto_mixed_precision(layer, "O3"), count=True) as book:
        layer(torch.ones(1, 1))
    assert book.rows[0].overflowed == 1  # where the bias is added, a part of the operation


def test_counting_leaves_the_statistics_of_a_float64_norm_alone() -> None:
    norm, twin, x = nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).double(), torch.eye(2, dtype=torch.float64)
    with ledger(norm, count=True):
        norm(x)
    twin(x)
    assert torch.equal(norm.running_mean, twin.running_mean)


def test_an_emulated_format_counts_its_own_bits() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "O2", E4M3FN)
    with ledger(network) as book:
        network(torch.ones(2, 4))
    assert [(row.output, row.bytes) for row in book.rows] == [(("e4m3fn",), 16), (("e4m3fn",), 16)]
    half_bytes = auto_mixed_precision(Op(torch.tanh), "O2", get_format("e2m1"))
    with ledger(half_bytes) as book:
        half_bytes(torch.ones(3))
    assert [row.bytes for row in book.rows] == [2]  # twelve bits


@pytest.mark.parametrize(("recipe", "element"), [("te_current", "e4m3fn"), ("mxfp8", "e4m3fn"), ("nvfp4", "e2m1")])
def test_every_open_ledger_is_told_what_a_recipe_multiplies(recipe: str, element: str) -> None:
    network = cast_like(nn.Sequential(nn.Linear(32, 32)), recipe)
    with ledger(network) as one, ledger(network) as two, ledger(network) as three:
        network(torch.ones(32, 32))
    for book in (one, two, three):
        assert [(row.operation, row.compute) for row in book.rows] == [("linear", element)]
    for x, weight in ((torch.ones(2, 3), torch.ones(4, 2)), (torch.ones(2, 3), torch.ones(3))):
        with pytest.raises(ValueError, match="must agree"):
            recipe_linear(x, weight, RECIPES[recipe])


def test_frames_have_one_line_per_row() -> None:
    network = auto_mixed_precision(nn.Linear(2, 2), "O1")
    with ledger(network) as book:
        network(torch.ones(1, 2))
    frame: Any = book.to_frame()
    assert list(frame.operation) == ["linear"]
    assert list(frame.columns[:3]) == ["module", "operation", "inputs"]
    assert len(book.to_frame(type(book.casts[0]))) == len(book.casts) == 4
    with ledger(network) as empty:
        pass
    assert list(empty.to_frame().columns) == list(frame.columns)


def test_an_error_in_a_module_leaves_its_path_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    net = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2), Op(fails)), "O2")
    with ledger(net) as log:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                net(torch.ones(1, 2))
        torch.ones(2) + 1  # outside of every module
    assert [row.module for row in log.rows] == ["0", "0"]


def test_an_open_ledger_is_not_opened_again() -> None:
    network = auto_mixed_precision(nn.Linear(2, 2), "O2")
    book = ledger(network)
    with book, pytest.raises(RuntimeError, match="open already"), book:
        pass
    assert not network._forward_hooks
    with book:
        network(torch.ones(1, 2))
    assert len(book.rows) == 1


def test_a_ledger_watches_tensors_without_memory() -> None:
    network = nn.Linear(3, 2, device="meta")
    with ledger(network) as book:
        network(torch.ones(1, 3, device="meta"))
    assert [row.compute for row in book.rows] == ["float32"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_copies_or_describes_is_no_row_and_a_conversion_is_one() -> None:
    network = Op(lambda x: (torch.zeros_like(x.clone()) + x).half().to_sparse_csr())
    with ledger(network, keep=True) as book:
        network(torch.eye(2))
    assert [row.operation for row in book.rows] == ["add", "half", "to_sparse_csr"]
    assert book.results[-1].tolist() == [1.0, 1.0]  # what a sparse tensor stores


def test_an_operand_in_high_precision_has_a_row_with_scale_1() -> None:
    network = cast_like(nn.Linear(4, 4, bias=False), Recipe("input alone", fprop_input=CastTo(E4M3FN)))
    with ledger(network) as book:
        network(torch.ones(2, 4))
    assert book.operands[1] == OperandRow("", "fprop", "weight", "high precision", 1.0, 1.0, 0.0, 0.0)
