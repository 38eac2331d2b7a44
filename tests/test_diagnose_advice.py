"""Advice that works: every advice of diagnose, preflight and recommend is followed, and the fault is gone."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from test_diagnose import FAULTS, Fault, Op, chain, diagnose, rows, with_weight
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, to_float
from mpkit.diagnose.cure import Cure, cures
from mpkit.diagnose.report import _HINTS
from mpkit.diagnose.run import _with_cure
from mpkit.diagnose.watch import _operand
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, FloatFormat, get_format

recommending = importlib.import_module("mpkit.diagnose.recommend")  # the package has a function of that name

OVERFLOWS = [fault for fault in FAULTS if fault.verdict in ("forward_overflow", "gradient_overflow")]
GONE = ("healthy", "scale_too_high")  # the loss scale is another matter


@pytest.mark.parametrize("fault", OVERFLOWS, ids=lambda fault: fault.name)
def test_every_cure_of_an_overflow_works_when_it_is_followed(fault: Fault) -> None:
    options: dict[str, Any] = {"scale": 2.0**8, "level": "O2"} | dict(fault.options)
    report = diagnose(fault.network(), fault.batch(), fault.loss, **options)
    assert report.cures, str(report)
    for cure in report.cures:
        assert str(cure) in str(report)
        network, loss, given = fault.network(), fault.loss, dict(options)
        if cure.kind == "keep":
            # as the advice says, after the level: level=None asks about the network as it is
            auto_mixed_precision(network, options["level"], options.get("dtype", torch.float16))
            to_float(network.get_submodule(cure.what), torch.float32)
            given["level"] = None
        elif cure.kind == "level":
            given["level"] = cure.what
        elif cure.kind == "bfloat16":
            given["dtype"] = BF16 if isinstance(given.get("dtype"), FloatFormat) else torch.bfloat16
        after = diagnose(network, fault.batch(), loss, **given)
        assert after.verdict in GONE or after.module != report.module, (str(cure), str(after))
        if fault.verdict == "forward_overflow":
            assert after.verdict in GONE, (str(cure), str(after))


TOO_HIGH = [fault for fault in FAULTS if fault.verdict in ("scale_too_high", "gradient_overflow")]


@pytest.mark.parametrize("fault", TOO_HIGH, ids=lambda fault: fault.name)
def test_the_scale_that_is_advised_fits(fault: Fault) -> None:
    options: dict[str, Any] = {"scale": 2.0**8} | dict(fault.options)
    torch.manual_seed(0)  # the weights: the scale is that of one network and one batch
    report = diagnose(fault.network(), fault.batch(), fault.loss, **options)
    assert report.max_scale is not None
    torch.manual_seed(0)
    after = diagnose(fault.network(), fault.batch(), fault.loss, **(options | {"scale": report.max_scale}))
    assert after.verdict == "healthy"
    assert any(f"{report.max_scale:.10g}" in advice for advice in report.advice)


def test_a_smaller_loss_ends_an_overflow_of_the_gradients() -> None:
    fault = next(fault for fault in FAULTS if fault.verdict == "gradient_overflow")
    report = diagnose(fault.network(), fault.batch(), fault.loss, scale=1.0)
    assert "divide the loss" in report.advice[-1]
    after = diagnose(fault.network(), fault.batch(), lambda out, y: fault.loss(out, y) / 1e7, scale=1.0)
    assert after.verdict == "healthy"


def test_a_loss_outside_of_the_network_is_advised_to_compute_in_float32() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    torch.manual_seed(0)
    network, loss = Scores(), lambda out: (out * 0 + 300).square().mean()
    batch = torch.rand(4, 8)
    report = diagnose(network, batch, loss, level="auto", scale=1.0)
    assert (report.verdict, report.module) == ("forward_overflow", "(loss function)")
    assert [cure.kind for cure in report.cures] == ["loss", "bfloat16"]
    assert diagnose(network, batch, lambda out: loss(out.float()), level="auto", scale=1.0).verdict == "healthy"


def test_lost_gradients_come_back_at_the_scale_that_is_advised() -> None:
    network, batch = chain(nn.ReLU()), rows()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * 2.0**-20

    report = diagnose(network, batch, loss, scale=1.0)
    assert "raise it" in report.advice[0]
    after = diagnose(network, batch, loss, scale=report.max_scale)
    assert after.verdict == "healthy"
    assert after.lost_at_scale < 0.01 < 0.05 < report.lost_at_scale


# Each hint of an operation: the fault it is given for, and the same network with the hint followed.
HINTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "log": (lambda x: torch.log(x * 0), lambda x: torch.log(x * 0 + 1e-3)),
    "div": (lambda x: x * 0 / (x * 0).abs(), lambda x: x * 0 / ((x * 0).abs() + 1e-3)),
    "exp": (lambda x: (x * 0 + 12).exp(), lambda x: (x * 0 + 12 - (x * 0 + 12).amax()).exp()),
    "softmax": (
        lambda x: (x * 0).masked_fill(torch.ones_like(x, dtype=torch.bool), -math.inf).softmax(-1),
        lambda x: (x * 0).masked_fill(torch.arange(8) > 0, -math.inf).softmax(-1),
    ),
    "sqrt": (lambda x: (x * 0).sqrt(), lambda x: (x * 0 + 1e-3).sqrt()),
    "rsqrt": (
        lambda x: (x * 0) * ((x * 0).var(-1, keepdim=True) + 1e-9).rsqrt(),
        lambda x: (x * 0) * ((x * 0).var(-1, keepdim=True) + 1e-3).rsqrt(),
    ),
    "sum": (lambda x: x + torch.ones(70_000).to(x).sum() * 1e-6, lambda x: x + torch.ones(70_000).to(x).mean() * 0.07),
    "pow": (lambda x: (x * 0 + 300) ** 2, lambda x: ((x * 0 + 300) / 256) ** 2),
    "mul": (lambda x: (x * 0 + 300) * (x * 0 + 300) / 300, lambda x: (x * 0 + 300) / 300 * (x * 0 + 300)),
}


@pytest.mark.parametrize("key", sorted({*_HINTS} - {"weight_norm"}))
def test_the_hint_for_an_operation_ends_its_fault(key: str) -> None:
    fault, mended = HINTED[key]
    report = diagnose(chain(Op(fault)), rows(), F.cross_entropy, scale=1.0)
    assert report.advice[0] == _HINTS[key], str(report)
    assert diagnose(chain(Op(mended)), rows(), F.cross_entropy, scale=1.0).verdict == "healthy"


def test_a_row_of_zeros_has_a_direction_once_it_has_other_values() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "weight norm of a zero row")
    assert diagnose(fault.network(), fault.batch(), fault.loss).advice[0] == _HINTS["weight_norm"]
    mended = with_weight(fault.network(), "0.parametrizations.weight.original1", lambda w: w[2].fill_(1.0))
    assert diagnose(mended, fault.batch(), fault.loss, scale=1.0).verdict == "healthy"


def test_bad_data_and_weights_are_well_once_repaired() -> None:
    for fault in FAULTS:
        if fault.verdict == "bad_data":
            repaired = tuple(t.nan_to_num(0.5, 0.5, 0.5) if t.is_floating_point() else t for t in fault.batch())
            assert diagnose(fault.network(), repaired, fault.loss, scale=1.0).verdict == "healthy", fault.name
        elif fault.verdict == "weights_non_finite":
            network = copy.deepcopy(fault.network())
            with torch.no_grad():
                for tensor in (*network.parameters(), *network.buffers()):
                    tensor.nan_to_num_(0.5, 0.5, 0.5) if tensor.is_floating_point() else None
            assert diagnose(network, fault.batch(), fault.loss, scale=1.0).verdict == "healthy", fault.name


# --- an infinity that a constant brings in ----------------------------------------------------------------------------


class BringsIn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e-6, torch.full_like(x, math.inf), x)


@pytest.mark.parametrize("after", [nn.Linear(8, 8), Op(lambda x: x * 0), nn.LayerNorm(8)])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "auto"])
def test_an_infinity_of_a_constant_is_named_where_it_arises(level: str, after: nn.Module) -> None:
    network = nn.Sequential(nn.Linear(8, 8), BringsIn(), after, nn.Linear(8, 3))
    report = diagnose(network, rows(), F.cross_entropy, level=level)
    assert (report.verdict, report.module) == ("model_non_finite", "1")
    assert report.operation in ("full_like", "fill", "where")


# --- the parts of an answer


@pytest.mark.parametrize(
    ("works", "kinds"),
    [
        (lambda cure: True, {"keep": "a.b", "bfloat16": ""}),  # a module kept in float32 is the smaller change
        (lambda cure: cure.kind != "keep", {"level": "O1", "bfloat16": ""}),
        (lambda cure: cure.what in ("a", "auto"), {"keep": "a"}),
        (lambda cure: cure.what == "auto", {"level": "auto"}),
        (lambda cure: False, {}),
    ],
)
def test_a_level_is_a_cure_where_no_module_kept_in_float32_is(works: Callable[[Cure], bool], kinds: Any) -> None:
    assert {cure.kind: cure.what for cure in cures("a.b", "O2", works)} == kinds


def test_a_cure_is_tried_at_scale_1() -> None:
    network, (x, y) = chain(), rows()
    run = _with_cure(Cure("level", "O0"), network, (x, y), F.cross_entropy, "O2", torch.float16)
    assert run is not None
    want = torch.autograd.grad(F.cross_entropy(network(x), y), list(network.parameters()))
    assert run.loss == F.cross_entropy(network(x), y).item()
    for grad, exact in zip(run.gradients, want, strict=True):
        torch.testing.assert_close(grad, exact)


def test_an_operand_is_told_by_its_finite_values() -> None:
    told = _operand(torch.tensor([[1.0, -3.0], [torch.inf, torch.nan]]))
    assert (told.shape, told.low, told.high, told.nonfinite) == ((2, 2), -3.0, 1.0, 2)
    one = _operand(torch.tensor(-torch.inf))
    assert (one.shape, math.isnan(one.low), math.isnan(one.high), one.nonfinite) == ((), True, True, 1)


def test_three_activations_that_leave_float16_are_enough() -> None:
    largest = np.array([[1.0, 1e5, 1e5, 2.0, 1e5, np.nan], [1.0, 1.0, 1e5, 65504.0, 1e5, 1.0]])
    trace: Any = SimpleNamespace(
        loss=np.ones(2), step=np.arange(2), activations=SimpleNamespace(largest=largest, names=list("abcdef"))
    )
    assert recommending._forward_reasons(trace) == [
        f"the output of module {name} left the range of float16" for name in "bce"
    ]


@pytest.mark.parametrize(
    ("steps", "windows"),
    [(4, [2, 5, 10]), (40, [2, 5, 10, 20]), (5000, [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000])],
)
def test_windows_up_to_half_of_the_run_are_tried(
    steps: int, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def replayed(trace: Any, policies: list[Any], **kwargs: Any) -> pd.DataFrame:
        tried.extend(policies)
        return pd.DataFrame({"policy": [1, 0], "skipped": [3, 4]})

    monkeypatch.setattr(recommending, "replay", replayed)
    trace: Any = range(steps)
    best, skipped = recommending._best_policy(trace, 2.0**10)
    assert [policy.growth_interval for policy in tried] == windows
    assert {(p.init_scale, p.min_scale, p.max_scale) for p in tried} == {(2.0**10, 2.0**-14, 2.0**24)}
    assert (best, skipped) == (tried[1], 3)


class Masked(nn.Module):
    """Causal attention that masks with `low`."""

    def __init__(self, low: float) -> None:
        super().__init__()
        self.low, self.qkv, self.out = low, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x)
        future = torch.ones(5, 5, dtype=torch.bool).triu(1)
        scores = (q @ q.transpose(-1, -2)).masked_fill(future, self.low)
        return self.out((scores.softmax(-1) @ q).mean(1))


@pytest.mark.filterwarnings("ignore:masked_fill is given -inf:RuntimeWarning")
def test_a_mask_of_infinities_in_a_format_without_them_is_named_with_the_way_out() -> None:
    batch, loss = (torch.linspace(-1, 1, 160).reshape(4, 5, 8), torch.tensor([0, 1, 2, 0])), nn.CrossEntropyLoss()

    def asked(low: float) -> Any:
        torch.manual_seed(0)
        return diagnose(Masked(low), batch, loss, level="O2", dtype=E4M3FN, scale=2.0**4)

    report = asked(-math.inf)
    assert report.verdict == "forward_overflow"
    assert report.advice[0].startswith(
        "e4m3fn has no infinity: the -inf of a mask becomes NaN in it, so mask with minus"
    )
    assert asked(-E4M3FN.max).verdict in GONE


@pytest.mark.parametrize("fmt", [FP16, E5M2, E4M3FN, get_format("e4m7")], ids=lambda fmt: fmt.name)
def test_what_went_into_a_rounding_is_what_was_rounded_and_no_number_of_the_emulation(fmt: FloatFormat) -> None:
    x = torch.tensor([[2.0, -1.0], [0.5, 1.5]]) * fmt.max
    network = nn.Sequential(nn.Identity(), nn.Linear(2, 2, bias=False))
    network[1].weight.data.copy_(torch.eye(2))
    report = diagnose(network, (x, torch.zeros(2, dtype=torch.long)), nn.CrossEntropyLoss(), level="O2", dtype=fmt)
    assert report.operation == f"round to {fmt.name}"
    assert report.operands == (_operand(x),)
