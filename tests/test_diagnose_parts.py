"""The parts of diagnose by themselves, where their answers turn: words, recommended scales, stale scales, own norms."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded import trace_of
from torch import Tensor, nn

from mpkit.casting import cast_like
from mpkit.diagnose import diagnose, recommend, recommend_recipe, stale_scales
from mpkit.diagnose.own_norms import own_norms
from mpkit.diagnose.report import Report, power
from mpkit.diagnose.run import _lost
from mpkit.diagnose.stale import _flushed_reasons, stale_operands
from mpkit.diagnose.watch import Event, Operand, Watch, _operation, _storage
from mpkit.formats import FP16
from mpkit.record import AmaxTrace, Ranges
from mpkit.replay import ceilings

_static = importlib.import_module("mpkit.diagnose.recommend")._static  # the package has a function of that name

# --- a report in words


def report(verdict: str, **given: Any) -> Report:
    fields = {
        "phase": "forward", "module": "a.b", "operation": "mul", "gradient_of": "", "operands": (), "max_scale": 8.0,
        "lost": 0.1, "lost_at_scale": 0.2, "loss": 1.0, "low_loss": math.inf, "scale": 2.0**16, "level": "O2",
        "dtype": "float16",
    }  # fmt: skip
    return Report(verdict, **(fields | given))


LEVEL = "The level is O2 in float16. Your loss scale is 2^16 = 65536."
SCALES = f"{LEVEL} The largest scale that works is 2^3 = 8."
LOST = "Of the gradient values, 10.0 % are lost to zero at scale 1"
BORN = "The first inf or NaN was born in the forward pass of module a.b, in the operation mul."


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        (report("scale_too_high"), [BORN, SCALES, f"{LOST}, and 20.0 % at 2^16 = 65536."]),
        (report("forward_overflow", lost_at_scale=math.nan), [BORN, SCALES, f"{LOST}."]),
        (report("gradient_overflow", lost=math.nan, operation=""), [SCALES]),
        (
            report("gradient_overflow", lost=math.nan, operation="", level="as it is"),
            [SCALES.replace("The level is O2 in", "The network was tried as it is, in")],
        ),
        (
            report("forward_overflow", max_scale=None, lost=math.nan),
            [BORN, f"{LEVEL} No loss scale works."],
        ),
        (report("model_non_finite"), [BORN]),
        (report("bad_data"), ["They are in a.b."]),
        (report("weights_non_finite"), ["They are in a.b."]),
        (
            report("stale_scale", overshoot=3.0, lost=math.nan),
            ["Values were clipped in a.b. The worst one is 3 times too large for its scale.", SCALES],
        ),
    ],
    ids=lambda v: v.verdict if isinstance(v, Report) else "",
)
def test_a_report_tells_what_belongs_to_its_verdict(told: Report, lines: list[str]) -> None:
    found = [line.strip() for line in str(told).splitlines()[1:]]
    assert [line for line in found if not line.startswith("->")] == lines


@pytest.mark.parametrize(
    ("operand", "words"),
    [
        (Operand(torch.float32, (64, 10), 0.0, 1e5, 0), "a float32 tensor of 64x10 with values from 0 to 1e+05"),
        (
            Operand(torch.float16, (9,), -1.5, 2, 4),
            "a float16 tensor of 9 with values from -1.5 to 2; 4 are not finite",
        ),
        (Operand(torch.int64, (2, 3), 0.0, 9.0, 0), "an int64 tensor of 2x3 with values from 0 to 9"),
        (Operand(torch.float16, (2, 2), math.nan, math.nan, 4), "a float16 tensor of 2x2 without a finite value"),
        (Operand(torch.float32, (), 0.5, 0.5, 0), "one float32 value, 0.5"),
        (Operand(torch.float32, (), math.nan, math.nan, 1), "one float32 value, which is not finite"),
    ],
)
def test_what_went_in_is_told_in_words(operand: Operand, words: str) -> None:
    assert str(operand) == words
    lines = str(report("forward_overflow", operands=(operand, operand))).splitlines()
    assert lines[2:4] == [f"  Into it went {words}."] * 2


@pytest.mark.parametrize(
    ("told", "first", "count"),
    [
        (report("healthy", lost_at_scale=0.05), "", 0),
        (report("healthy", lost_at_scale=0.051), "5.1 % of the gradient values are lost at this scale: raise it up", 1),
        (report("healthy", lost_at_scale=0.051, max_scale=None), "5.1 % of the gradient values are lost at this", 1),
        (report("scale_too_high"), "lower the scale to 2^3 = 8 or below", 2),
        (report("forward_overflow", operation="add"), "neither float32 for a module, nor", 2),
        (report("forward_overflow", operation="mul"), "a product grows", 3),
        (report("forward_overflow", operation="mul", gradient_of="exp"), "an exp of a large number", 3),
        (report("gradient_overflow", operation="add"), "a scale of 2^3 = 8 would fit", 2),
        (report("gradient_overflow", operation="add", max_scale=None), "divide the loss", 1),
        (report("model_non_finite", operation="log_softmax_backward"), "a softmax over inf", 2),
        (report("model_non_finite", operation="add"), "repair the model first", 1),
        (report("model_non_finite", operation="weight_norm_interface"), "a row of zeros has no direction", 2),
        (report("bad_data", operation=""), "drop or repair", 1),
        (report("weights_non_finite", operation=""), "go back to the last good checkpoint", 2),
        (report("stale_scale", operation=""), "a current scale follows", 3),
    ],
)
def test_advice_goes_with_the_verdict(told: Report, first: str, count: int) -> None:
    assert len(told.advice) == count
    assert not count or told.advice[0].startswith(first)
    assert told.verdict == "stale_scale" or told.overshoot == 1.0


def test_a_hidden_overflow_is_told_apart_from_one_that_shows() -> None:
    assert "turns the inf into a number" in report("forward_overflow", low_loss=1.0).advice[-1]
    assert "lowering the loss scale" in report("forward_overflow").advice[-1]
    assert [power(v) for v in (0.0, 1.0, 3.0, -8.0, math.inf)] == ["0", "2^0 = 1", "3", "-8", "inf"]


# --- recommended scales


def test_the_static_scale_is_the_largest_of_those_that_lose_least() -> None:
    """Against native casts of the gradients themselves, scale by scale."""
    generator = torch.Generator().manual_seed(5)
    for spread in (12.0, 30.0, 44.0):
        exponents = -spread * torch.rand(40, 60, generator=generator)
        gradients = torch.exp2(exponents + 6 * torch.randn(40, 1, generator=generator))
        trace = trace_of(list(gradients))
        scaled = gradients.double()[..., None] * torch.exp2(torch.arange(-14.0, 25.0))
        skipped = scaled.half().isinf().any(1).numpy()
        zeroed = (scaled.half() == 0).double().mean((0, 1)).numpy()
        lost = 1 - (1 - skipped.mean(0)) * (1 - zeroed)
        best = np.flatnonzero(lost <= lost.min() + 0.002)[-1]
        assert _static(trace, ceilings(trace, FP16)) == pytest.approx((2.0 ** (best - 14), zeroed[best]), abs=0.01)


@pytest.mark.parametrize(
    ("tops", "scale"),
    [
        ([2.0**10], 2.0**10),  # a scale at the ceiling fits
        ([2.0**-14], 2.0**-14),  # the smallest that is tried
        ([2.0**-15], 2.0**24),  # none fits: the largest
        ([2.0**30], 2.0**24),
        ([-1.0, -1.0], 2.0**24),
        ([2.0**10] * 399 + [2.0**9], 2.0**9),  # one step in 400 is too many, one in 1000 is not
        ([2.0**10] * 999 + [2.0**9], 2.0**10),
        ([2.0**10] * 3 + [2.0**-10], 2.0**-10),  # 20 bits below what is usual are looked at, 21 are not
        ([2.0**10] * 3 + [2.0**-11], 2.0**10),
        ([0.5, 0.5, 2.0**30], 0.5),  # what is usual is the median
        ([2.0**4, -1.0, -1.0, -1.0], 2.0**4),  # of the steps that have a ceiling
    ],
)
def test_the_static_scale_at_its_edges(tops: list[float], scale: float) -> None:
    assert _static(trace_of([torch.ones(4)]), np.array(tops)) == (scale, 0.0)


@pytest.mark.parametrize(("tiny", "dtype"), [(4, "fp16"), (5, "fp16"), (6, "bf16")])
def test_bf16_is_advised_where_more_than_a_twentieth_is_lost(tiny: int, dtype: str) -> None:
    gradient = torch.cat([torch.ones(100 - tiny), torch.full((tiny,), 2.0**-45)])
    advice = recommend(trace_of([gradient] * 8))
    assert advice.dtype == dtype
    said = "static scale 32768, or dynamic from 32768 with factor 2" if dtype == "fp16" else "no loss scale needed"
    assert str(advice).startswith(f"train in {dtype}: {said}")


def test_without_a_finite_step_the_scale_must_have_come_down_to_1() -> None:
    bad = [torch.full((3,), torch.inf)] * 4
    assert recommend(trace_of(bad, scale=1.0)).dtype == "bf16"
    for scale in (1.5, 2.0):
        with pytest.raises(ValueError, match="the ceiling is not known yet"):
            recommend(trace_of(bad, scale=scale))


def test_steps_whose_gradients_are_all_zero_say_nothing_about_a_scale() -> None:
    with pytest.raises(ValueError, match="all gradients of the 4 recorded steps are zero"):
        recommend(trace_of([torch.zeros(3)] * 4))
    some = [torch.full((3,), 2.0**-10), *[torch.zeros(3)] * 3]
    assert recommend(trace_of(some)).static == recommend(trace_of(some[:1] * 4)).static == 2.0**24
    half = [torch.zeros(3), torch.full((3,), torch.inf)] * 4  # no histogram shows how large the gradients were
    assert recommend(trace_of(half, scale=8.0)).static == 4.0


# --- stale scales


@pytest.mark.parametrize(("last", "stale"), [(1 + 2.0**-22, False), (1 + 3 * 2.0**-23, True)])
def test_one_last_bit_is_no_clipping(last: float, stale: bool) -> None:
    trace = AmaxTrace(("a.input",), np.array([[1.0], [1.0], [last]], dtype=np.float32))
    assert bool(stale_scales(trace)) == stale


def test_a_recipe_is_recommended_for_a_history_of_1024_steps() -> None:
    amax = np.ones((1026, 1), dtype=np.float32)
    amax[[0, -1]] = 8  # the first has just been forgotten when the last comes
    assert recommend_recipe(AmaxTrace(("a.input",), amax))[0] == "te_current"
    assert recommend_recipe(AmaxTrace(("a.input",), np.delete(amax, 1, 0)))[0] == "te_hybrid_delayed"


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize(("factor", "stale"), [(1.3, []), (1.9, ["2.input"]), (3.0, ["2.input", "0.input"])])
def test_operands_are_stale_from_twice_what_a_scale_holds(factor: float, stale: list[str]) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 4, bias=False), Square(), nn.Linear(4, 2)
    network = cast_like(nn.Sequential(*layers), "te_hybrid_delayed")
    x = torch.randn(6, 8)
    for _ in range(3):
        network(x).sum().backward()
        with torch.no_grad():
            for layer in layers[::2]:
                layer.weight.add_(0)  # the step is over
    found = stale_operands(network, lambda: network(x * factor))
    assert list(found) == stale  # the worst first
    assert found.get("0.input", 3.0) == pytest.approx(3.0, rel=1e-5)
    assert stale_operands(nn.Linear(2, 2), lambda: None) == {}


@pytest.mark.parametrize(("factor", "stale"), [(2.0, True), (2 - 2.0**-10, False)])
def test_twice_what_a_scale_holds_is_stale(factor: float, stale: bool) -> None:
    """An amax of 1 has a scale without rounding, so the quotient is exact."""
    network = cast_like(nn.Sequential(nn.Linear(8, 4)), "te_hybrid_delayed")
    x = torch.ones(6, 8)
    for _ in range(2):
        network(x).sum().backward()
        with torch.no_grad():
            network[0].weight.add_(0)  # the step is over
    assert ("0.input" in stale_operands(network, lambda: network(x * factor))) == stale


def spread(*shares: int) -> Any:
    """Activations of 100 values each of which so many lie 30 powers of two below the others; None: all are zero."""
    counts = np.zeros((2, len(shares), 32), dtype=np.uint32)
    counts[:, :, 0], counts[:, :, 30] = shares, 100 - np.array(shares)
    zero = np.array(shares) == 100
    counts[:, zero] = 0
    whole = np.zeros((2, len(shares)), dtype=np.int64)
    part = Ranges(
        names=tuple(str(share) for share in shares),
        size=np.full(len(shares), 100),
        step=np.arange(2),
        lowest=-30,
        counts=counts,
        zeros=whole + 100 * zero,
        nonfinite=whole,
        largest=np.where(zero, 0.0, 1.5).astype(np.float32) + np.float32(0) * whole.astype(np.float32),
    )
    trace = trace_of([torch.ones(1)] * 2)
    return type(trace)(**(vars(trace) | {"activations": part}))


@pytest.mark.parametrize(
    ("shares", "told"),
    [((4, 5), []), ((6,), ["6"]), ((20, 100, 50, 30, 6), ["50", "30", "20"]), ((100,), [])],
)
def test_the_three_activations_that_lose_most_are_told(shares: tuple[int, ...], told: list[str]) -> None:
    assert [reason.split()[3] for reason in _flushed_reasons(spread(*shares))] == told


# --- norms that ask for float32 themselves


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() * 2


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) ** 2


class Narrowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float16).mean()


class Told(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sum(x, dtype=torch.float32)


class Rooted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.type(torch.float32).sqrt()


class OfAnother(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()

    def clone(self, x: Tensor) -> Tensor:
        return x.float().mean()


class Helped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.clone(x)

    def clone(self, x: Tensor) -> Tensor:
        return x.float().mean()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Widened, False),
        (Squared, True),
        (Narrowed, False),
        (Told, True),
        (Rooted, True),
        (OfAnother, False),
        (Helped, True),
    ],
)
def test_a_norm_of_ones_own_is_one_that_widens_and_adds_up_or_takes_roots(kind: type[nn.Module], found: bool) -> None:
    assert list(own_norms(kind(), ())) == [("the network", kind.__name__)] * found
    assert list(own_norms(nn.Sequential(nn.ReLU(), kind(), kind()), ())) == [("1", kind.__name__)] * found
    assert list(own_norms(kind(), (kind,))) == []


def test_the_run_in_float32_is_one_without_a_scale() -> None:
    """A gradient of more than half of what float32 holds is finite there, and with a scale of 2 it is not."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 2.0**-120)
    x = torch.full((1, 1), 1.5 * 2.0**127)
    assert diagnose(net, x, lambda y: y.sum(), level="O0", scale=1.0).verdict == "healthy"
    assert diagnose(net, x, lambda y: y.sum(), level="O0", scale=2.0).verdict == "scale_too_high"


# --- what is watched


BORN = Event(0, "exp", "a", "forward", "", frozenset({"inf"}), (), (), (), False)


@pytest.mark.parametrize(
    "other",
    [
        {"phase": "backward"},
        {"parents": (0,)},
        {"leaves": ("the input",)},
        {"meant": True},
        {"kinds": frozenset({"-inf"})},
    ],
    ids=str,
)
def test_only_what_a_forward_makes_of_finite_numbers_is_hidden(other: dict[str, Any]) -> None:
    """The first event is of another kind, the second is one."""
    watch = Watch(nn.Identity(), {})
    watch.events += [replace(BORN, **other), replace(BORN, index=1)]
    assert watch.hidden() == watch.events[1]


def rounding_event(index: int, operation: str, *parents: int) -> Event:
    return Event(index, operation, "a", "forward", "", frozenset({"inf"}), (), parents, (), False)


@pytest.mark.parametrize(
    ("operations", "born"),
    [
        (["mul"], 0),
        (["round to fp16"], None),  # a step inside a rounding, whose result was finite
        (["round to fp16", "mul"], 0),
        (["round to fp16", "round to fp16", "mul"], 0),  # used through another step of the rounding
        (["round to fp16", "round to fp16"], None),
    ],
)
def test_an_infinity_inside_a_rounding_counts_once_an_operation_used_it(operations: list[str], born: Any) -> None:
    watch = Watch(nn.Identity(), {})
    watch.events += [rounding_event(i, name, *range(i)[-1:]) for i, name in enumerate(operations)]
    found = watch.hidden()
    assert found == (None if born is None else watch.events[born])


@pytest.mark.parametrize(("to", "words"), [(torch.float16, "cast to float16"), (torch.float32, "copy")])
def test_a_copy_into_another_dtype_is_a_cast(to: torch.dtype, words: str) -> None:
    assert _operation(torch.ops.aten.copy_.default, (torch.zeros(2, dtype=to), torch.zeros(2)), {}) == words
    assert _operation(torch.ops.aten._to_copy.default, (torch.zeros(2),), {"dtype": to}).startswith("cast to")
    assert _operation(torch.ops.aten._to_copy.default, (torch.zeros(2),), {}) == "copy"


def test_a_share_that_is_lost_is_of_the_gradients_that_both_runs_have() -> None:
    """A branch that depends on the values may leave a parameter out of one of them."""
    one, none = torch.tensor([1.0, 2.0, 0.0, 4.0]), torch.tensor([0.0, 2.0, 0.0, 4.0])
    full = SimpleNamespace(gradients=[one, None, one, None])
    assert _lost(full, [none, one, None, None]) == pytest.approx(1 / 3)  # type: ignore[arg-type]
    assert math.isnan(_lost(full, [None, one, None, None]))  # type: ignore[arg-type]
    assert math.isnan(_lost(full, [one, None, one / 0, None]))  # type: ignore[arg-type]
    assert _lost(SimpleNamespace(gradients=[torch.zeros(2)]), [torch.zeros(2)]) == 0.0  # type: ignore[arg-type]


def test_where_numbers_came_from_goes_through_the_integers_of_a_rounding_alone() -> None:
    watch = Watch(nn.Identity(), {})
    source, bits, other, number = torch.ones(1), torch.ones(1, dtype=torch.int32), torch.ones(1), 3
    watch._made[_storage(source)] = came = (0, "mul")  # type: ignore[assignment]
    watch._carry((source, number), (bits, other, number))
    assert watch._made == {_storage(source): came, _storage(bits): came}
    watch._carry((other,), (bits, source))
    assert watch._made == {_storage(source): came}  # the integers are others now
