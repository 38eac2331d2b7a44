"""The ledger: rows, casts, counts, bytes kept for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_casting import NETWORKS, made, tensors
from torch import Tensor, nn

from mpkit.casting import LEVELS, auto_mixed_precision, ledger
from mpkit.formats import E4M3FN, FP16


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
    assert [(c.module, c.tensor, c.source, c.target, c.elements) for c in book.casts[:3]] == [
        ("0.0", "activation", wide, "bfloat16", 20),
        ("0.0", "0.0.weight", wide, "bfloat16", 12),
        ("0.0", "0.0.bias", wide, "bfloat16", 3),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETWORKS)
def test_watching_changes_no_number_and_leaves_nothing(name: str, level: str) -> None:
    network, args, kwargs = made(name)
    auto_mixed_precision(network.eval(), level, torch.bfloat16)
    want = tensors(network(*args, **kwargs))
    for count in (False, True):
        with ledger(network, count=count) as book:
            got = tensors(network(*args, **kwargs))
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        assert book.rows
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert all(torch.equal(a, b) for a, b in zip(tensors(network(*args, **kwargs)), want))


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

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    x = torch.tensor([2.0**-26, 2.0**-13, 1.0, 300.0, 7e4])
    # cast: 2**-26 flushes, 7e4 overflows; product: (2**-13)**2 = 2**-26 flushes, 9e4 overflows
    network = auto_mixed_precision(Scale(), "O3")
    with ledger(network, count=True) as book:
        network(x)
    (entry, *_), (row,) = book.casts, book.rows
    assert (entry.operation, entry.flushed, entry.overflowed) == ("", 1, 1)
    assert (row.flushed, row.overflowed) == (1, 1)

    with ledger(auto_mixed_precision(Scale(), "O3", FP16), count=True) as emulated:
        emulated.network(x)
    assert (emulated.casts[0].flushed, emulated.casts[0].overflowed) == (1, 1)
    assert (emulated.rows[0].flushed, emulated.rows[0].overflowed) == (1, 1)


@pytest.mark.parametrize(("value", "lost"), [(1.0, (0, 0)), (2.0**-26, (1, 0)), (7e4, (0, 1))])
def test_an_operation_counts_what_its_own_casts_lose(value: float, lost: tuple[int, int]) -> None:
    network = auto_mixed_precision(nn.Linear(2, 1, bias=False), "O1", torch.float16)
    torch.nn.init.ones_(network.weight)
    with ledger(network, count=True) as book:
        network(torch.tensor([[value, 0.0]]))
    (row,) = book.rows
    assert row.casts > 0
    assert (row.flushed, row.overflowed) == lost


def test_without_counting_there_are_no_counts() -> None:
    network = auto_mixed_precision(nn.Linear(2, 2), "O2")
    with ledger(network) as book:
        network(torch.ones(1, 2))
    assert book.rows[0].flushed is None
    assert book.casts[0].overflowed is None


def test_low_levels_keep_about_half_the_activations() -> None:
    bytes_at = {}
    for level in LEVELS:
        network = auto_mixed_precision(nn.Sequential(*[nn.Linear(64, 64), nn.ReLU()] * 4), level, torch.bfloat16)
        with ledger(network) as book:
            network(torch.randn(32, 64))
        bytes_at[level] = book.measured_bytes
    assert bytes_at["O2"] == bytes_at["O3"]
    assert bytes_at["O2"] <= 0.55 * bytes_at["O0"]
    assert bytes_at["O1"] > bytes_at["O2"]  # relu's 16-bit result and the next layer's 16-bit input are two tensors


def test_an_emulated_format_counts_its_own_bits() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "O2", E4M3FN)
    with ledger(network) as book:
        network(torch.ones(2, 4))
    assert [(row.output, row.bytes) for row in book.rows] == [(("e4m3fn",), 16), (("e4m3fn",), 16)]


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
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    net = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2), Fails()), "O2")
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
