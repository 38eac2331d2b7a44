"""What is lost in silence, and what a reader of torch.amp asks: the examples of public reports, with their cures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from test_diagnose import chain, linear, rows
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, to_float
from mpkit.diagnose import diagnose, preflight, watch_loop
from mpkit.diagnose.precision import Call, ModuleLoss, module_losses

Y = torch.arange(64) % 3


def wide_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.float(), y)


# --- inside an autocast region


def test_inside_autocast_a_module_kept_in_float32_is_the_cure_in_torchs_words() -> None:
    parts = {"big": linear(8, gain=300), "norm": nn.LayerNorm(8), "last": linear()}
    network = Written(lambda m, x: m.last(m.norm(m.big(x))), **parts)
    batch = rows()[0] * 300, rows()[1]
    with torch.autocast("cpu", torch.float16):
        report = diagnose(network, batch, wide_loss, level=None)
    assert (report.verdict, report.module) == ("forward_overflow", "big")
    assert [(cure.kind, cure.what) for cure in report.cures] == [("autocast", "big"), ("bfloat16", "")]
    assert "torch.autocast(device_type, enabled=False)" in str(report)
    whole = network.big.forward

    def big(x: Tensor) -> Tensor:  # as the report says
        with torch.autocast("cpu", enabled=False):
            return whole(x.float())

    network.big.forward = big  # type: ignore[method-assign]
    with torch.autocast("cpu", torch.float16):
        assert diagnose(network, batch, wide_loss, level=None, scale=1.0).verdict == "healthy"
        assert "torch.autocast" in str(diagnose(network, batch, wide_loss, level=None, scale=1.0))


@pytest.mark.parametrize("product", [torch.matmul, lambda q, k: torch.einsum("bik,bkj->bij", q, k)])
@pytest.mark.parametrize("level", ["O2", None])
def test_attention_scores_that_are_scaled_too_late(level: str | None, product: Any) -> None:
    def attention(m: Any, x: Tensor) -> Tensor:
        scores = product(m.query(x), m.key(x).transpose(1, 2)) * 0.01
        return m.last((scores.softmax(-1) @ x).mean(1))

    network = Written(attention, query=linear(8), key=linear(8), last=linear())
    batch = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)) * 400, rows()[1]
    with torch.autocast("cpu", torch.float16, enabled=level is None):
        report = diagnose(network, batch, wide_loss, level=level)
    assert (report.verdict, report.operation) == ("forward_overflow", "bmm")
    assert "(q * scale) @ k" in report.advice[0]
    assert "scaled_dot_product_attention" in report.advice[0]
    assert "bfloat16" in {cure.kind for cure in report.cures}


# --- lost in the forward pass


def before_last(function: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    part = function if isinstance(function, nn.Module) else Op(function)
    return Written(lambda m, x: m.last(m.part(first(x))), part=part, last=linear())


LOST = {
    "mul": lambda x: x * 1e-9 + (x[:0] * 2).sum(),  # and once of nothing
    "softmax": lambda x: (x * 60).softmax(-1),
    "div": lambda x: x / 1e9,
    "exp": lambda x: (-x.abs() - 40).exp(),
}


@pytest.mark.parametrize("operation", LOST)
def test_gradients_that_no_scale_brings_back_name_the_operation(operation: str) -> None:
    network = before_last(LOST[operation], lambda x: x + (x * 0 - 200).exp())  # which is 0 in float32 too
    report = diagnose(network, rows(), F.cross_entropy)
    assert (report.verdict, report.module, report.operation) == ("lost_in_forward", "part", operation), str(report)
    assert [cure.kind for cure in report.cures] == ["bfloat16"]
    assert report.lost_at_best > 0.05
    assert "no scale helps" in report.advice[0]
    assert "raise it" not in str(report)


def test_numbers_that_a_cast_makes_zero_name_the_cast() -> None:
    report = diagnose(linear(), (rows()[0] * 1e-9, rows()[1]), F.cross_entropy, level="O1")
    assert (report.verdict, report.operation) == ("lost_in_forward", "cast to float16"), str(report)


# --- lost digits


class Table(nn.Module):
    """Angles of positions, as a rotary embedding makes them."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("inv", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16))

    def forward(self, position: Tensor) -> Tensor:
        return position[:, None] @ self.inv[None] if self.product else position[:, None] * self.inv


def rotary(product: bool = True) -> nn.Module:
    return Written(lambda m, x: m.last(m.table(x).sin()), table=Table(product), last=linear())


def far(first: int = 65536) -> tuple[Tensor, Tensor]:
    return first + torch.arange(64.0), Y


@pytest.mark.parametrize("level", ["O1", "auto", None])
def test_positions_that_fall_together_name_the_table_and_its_cure(level: str | None) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=level is None):
        report = diagnose(rotary(), far(), wide_loss, level=level, dtype=torch.bfloat16)
    assert (report.verdict, report.module) == ("precision_lost", "table")
    (loss,) = [loss for loss in report.modules if loss.module == "table"]
    assert (loss.rows, loss.rows_float32) == (1, 64)
    assert "1 of 64 distinct rows" in str(report)
    assert [(cure.kind, cure.what) for cure in report.cures] == [("autocast" if level is None else "keep", "table")]
    if level is not None:
        cured = auto_mixed_precision(rotary(), level, torch.bfloat16)
        to_float(cured.table, torch.float32)
        assert diagnose(cured, far(), wide_loss, level=None, dtype=torch.bfloat16).verdict == "healthy"


BF16 = {"dtype": torch.bfloat16}
SHARES = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)), Y
SILENT: list[tuple[str, Callable[[], nn.Module], Any, str, dict[str, Any]]] = [
    ("a table at O2", lambda: rotary(False), far(), "table", BF16),
    ("a table in float16", rotary, far(60000), "table", {"level": "O1"}),
    ("an index in 16 bits", lambda: before_last(nn.Embedding(4000, 8), Tensor.long), far(3000), "part", {}),
    ("a difference of large numbers", lambda: before_last(lambda x: x - 100, lambda x: x + 100), SHARES, "part", BF16),
    ("one minus almost one", lambda: before_last(lambda x: 1 - (1 - x.abs() * 1e-3)), SHARES, "part", BF16),
    ("an angle of thousands", lambda: before_last(lambda x: (x * 5000).sin()), SHARES, "part", {}),
]


@pytest.mark.parametrize(("name", "make", "batch", "module", "options"), SILENT, ids=[row[0] for row in SILENT])
def test_the_first_module_that_loses_its_digits_is_named(name, make, batch, module, options) -> None:
    report = diagnose(make(), batch, wide_loss, scale=1.0, **options)
    assert (report.verdict, report.module) == ("precision_lost", module), str(report)
    assert "relative error" in str(report)


def test_many_rows_of_few_shares_are_no_loss() -> None:
    network = nn.Sequential(linear(2), nn.Softmax(-1), nn.Linear(2, 3))
    assert diagnose(network, (torch.randn(2048, 8), torch.arange(2048) % 3), wide_loss, **BF16).verdict == "healthy"


def test_running_statistics_beyond_the_format_are_named() -> None:
    network = nn.Sequential(linear(8), nn.BatchNorm1d(8), linear()).half()
    x = (torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 6000).half()
    report = diagnose(network, (x, Y), wide_loss, level=None, scale=1.0)
    assert (report.verdict, report.module) == ("precision_lost", "buffer 1.running_var")
    assert diagnose(network, (x / 100, Y), wide_loss, level=None, scale=1.0).verdict == "healthy"


ROWS = 1 + torch.arange(8)[:, None] * 2.0**-10  # different, but by little
TO_2, TO_3, TO_4 = ROWS[[0] * 4 + [1] * 4], ROWS[[0] * 4 + [1, 1, 2, 2]], ROWS[[0, 0, 1, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize(
    ("given", "made", "step", "lost"),  # each in float32 and below; an error of more than 0.1 is much
    [
        ([[1.0]] * 2, ([[8.0]], [[9.0]]), 0.0, True),
        ([[1.0]] * 2, ([[16.0]], [[17.0]]), 0.0, False),
        ([[1.0]] * 2, ([[2.0]], [[3.0]]), 2.0**-5, False),  # not in a format whose step is a 16th of it
        ([[1.0]] * 2, ([[64.0]], [[97.0]]), 2.0**-5, True),
        (([[8.0]], [[9.0]]), ([[2.0]], [[3.0]]), 0.0, False),  # nor where a quarter had come in
        (([[8.0]], [[9.0]]), ([[64.0]], [[97.0]]), 0.0, True),
        ([[1e4]] * 2, ([[1.0]], [[2.0]]), 0.0, False),  # nor of what is left of much larger numbers
        ([[1e4]] * 2, ([[1.5]], [[3.0]]), 0.0, True),
        ([[1.0]] * 2, ([[0.0]], [[1.0]]), 0.0, False),  # nothing has no digits
        ([ROWS] * 2, (ROWS, TO_2), 0.0, True),  # a quarter of eight rows is left
        ([ROWS] * 2, (ROWS, TO_3), 0.0, False),
        ([ROWS] * 2, (ROWS[:7], ROWS[[0] * 7]), 0.0, False),
        ((ROWS, TO_4), (ROWS, TO_2), 0.0, True),  # half of them had come in
        ((ROWS, TO_3), (ROWS, TO_2), 0.0, False),
    ],
)
def test_a_module_that_loses_more_than_it_must_and_more_than_came_in(given, made, step, lost) -> None:
    full, low = ([Call("m", nn.Linear, *([torch.as_tensor(t[i])] for t in (given, made)))] for i in (0, 1))
    assert (module_losses(full, low, step)[1] is not None) == lost


def test_losses_of_modules_are_told_in_order_and_the_first_that_lost_by_itself() -> None:
    def calls(*made: float) -> list[Call]:
        kinds = (nn.Dropout, nn.Linear, nn.Linear, nn.Linear)
        return [Call(name, kind, [], [torch.tensor([m])]) for name, kind, m in zip("abcd", kinds, made)]

    full, low = calls(1.0, math.nan, 2.0, 1.0), calls(9.0, 1.0, 3.0, 2.0)
    want = tuple(ModuleLoss(name, error, 0, 0) for name, error in (("a", 8.0), ("c", 0.5), ("d", 1.0)))
    assert module_losses(full, low, 0.0) == (want, want[1])
    assert module_losses(full, low[:3], 0.0) == ((), None)
    both = [Call("m", nn.Linear, [], made) for made in ([ROWS, ROWS[:2]], [TO_2, ROWS[[0, 0]]])]
    assert module_losses(both[:1], both[1:], 0.0)[0][0].rows_float32 == 8  # of several outputs the one that lost most
    told = [str(ModuleLoss("a", 0.25, rows, 4)) for rows in (1, 4)]
    assert told == ["a: relative error 0.25, 1 of 4 distinct rows", "a: relative error 0.25"]


# --- before anything else


def test_gradients_that_were_never_cleared_come_first() -> None:
    network = chain(nn.ReLU())
    network.first.weight.grad = torch.full_like(network.first.weight, math.nan)
    report = diagnose(network, rows(), F.cross_entropy)
    assert (report.verdict, report.module) == ("gradients_non_finite", "first.weight")
    assert "zero_grad()" in report.advice[0]
    assert network.first.weight.grad.isnan().all()
    over = chain(lambda x: (x * 0 + 300) ** 2)
    over.first.weight.grad = torch.full_like(over.first.weight, math.inf)
    assert "forward_overflow in fault" in str(diagnose(over, rows(), F.cross_entropy))


def test_a_sharded_network_is_told_to_come_before_it_is_sharded() -> None:
    """Really sharded, on one process; its loop can be watched."""
    fsdp, mesh = pytest.importorskip("torch.distributed.fsdp"), pytest.importorskip("torch.distributed.device_mesh")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        network = chain(nn.ReLU())
        fsdp.fully_shard(network, mesh=mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"before fully_shard\(network\)"):
            diagnose(network, rows(), F.cross_entropy)
        optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
        assert preflight(network, optimizer, "torch_autocast") == []
        for mistake, calls in ((None, [optimizer.zero_grad]), ("not_cleared", [])):
            with watch_loop(network, optimizer) as seen:
                for _ in range(2):
                    for call in calls:
                        call()
                    F.cross_entropy(network(rows()[0]), rows()[1]).backward()
                    optimizer.step()
            assert [found.mistake for found in seen.findings] == [mistake] * (mistake is not None)
    finally:
        torch.distributed.destroy_process_group()
