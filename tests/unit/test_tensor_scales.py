"""Replay of tensor-scale policies, the recorder of amaxes, and what is read from them."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from mpkit.casting import Cast, cast_like, ledger, uniform
from mpkit.diagnose import recommend_recipe, stale_scales
from mpkit.diagnose.words import said as words
from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import (
    TENSOR_SCALE_PRESETS,
    TensorScalePolicy,
    advance,
    initial_tensor_scale,
    stack_tensor_scales,
    tensor_scale_preset,
)
from mpkit.record import AmaxRecorder, AmaxTrace
from mpkit.replay import replay_tensor_scales, sweep_tensor_scales
from mpkit.scalers import TensorScaler

FLOAT32_MAX = torch.finfo(torch.float32).max


def series(kind: str, steps: int = 200) -> np.ndarray:
    random = np.random.default_rng(7)
    values = np.exp(np.cumsum(random.normal(size=steps) * 0.3)).astype(np.float32)
    special = {"zeros": 0.0, "inf": math.inf, "nan": math.nan, "tiny": 1e-42}
    for value in special.values() if kind == "mixed" else [special[kind]] if kind in special else []:
        values[random.integers(0, steps, steps // 10)] = value
    if kind == "none":
        values[:] = 0
    return values


def policies() -> list[TensorScalePolicy]:
    some = [
        tensor_scale_preset(name, element, history_len=length, margin=margin, most_recent=recent)
        for name in ("te_delayed", "te_delayed_unfused")
        for element in (E4M3FN, E5M2)
        for length in (1, 2, 3, 16, 37, 1024)
        for margin in (0, 3)
        for recent in (False, True)
    ]
    return [*some, *TENSOR_SCALE_PRESETS.values(), tensor_scale_preset("te_delayed", power_of_two=True)]


@pytest.mark.parametrize("kind", ["plain", "zeros", "inf", "nan", "tiny", "mixed", "none"])
def test_replay_is_the_rule_step_by_step_bit_for_bit(kind):
    amax, rows = series(kind), policies()
    replayed = replay_tensor_scales(amax, rows, scales=True)
    vector = stack_tensor_scales(rows)
    state, used = initial_tensor_scale(vector), []
    for value in amax:
        before = state
        state = advance(vector, state, torch.tensor(value))
        used.append(torch.where(torch.as_tensor(vector.delayed), before.scale, state.scale))
    want = torch.stack(used, 1).numpy()
    np.testing.assert_array_equal(replayed.scales, want)
    limit = np.array([p.element_max for p in rows], dtype=np.float32)[:, None]
    with np.errstate(all="ignore"):
        over = amax * want > limit * np.float32(1 + 2.0**-22)
    np.testing.assert_array_equal(replayed.clipped, over.sum(1))
    np.testing.assert_array_equal(replayed.first, np.where(over.any(1), over.argmax(1), -1))


@pytest.mark.parametrize("name", [n for n, p in TENSOR_SCALE_PRESETS.items() if not p.delayed])
def test_a_current_scale_is_the_largest_that_fits(name):
    """In exact fractions: 448 / amax rounded once to float32; the largest power of two not above that."""
    policy = TENSOR_SCALE_PRESETS[name]
    assert policy.power_of_two == (name in ("torchao_rowwise", "te_blockwise"))
    assert policy.double == name.startswith("torchao")
    for amax in (1.0, 448.0, 449.0, 0.3, 1e-3, 2.0**-20 * 1.1, 1e30):
        amax = float(np.float32(amax))
        got = advance(policy, initial_tensor_scale(policy), amax).scale
        want = float(np.float32(448.0 / amax))  # a double of two float32 rounds to float32 as the fraction does
        if policy.power_of_two:
            assert Fraction(got) <= Fraction(want) < 2 * Fraction(got)
            assert math.frexp(got)[0] == 0.5
        else:
            assert got == want
    for amax, plain, double in ((0.0, 1.0, 448e12), (1e-20, None, 448e12), (math.inf, 1.0, 0.0)):
        want = double if policy.double else plain
        got = advance(policy, initial_tensor_scale(policy), amax).scale
        if want and policy.power_of_two and want > 1:
            want = 2.0 ** math.floor(math.log2(want))
        assert want is None or got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("name", "scale"), [("te_delayed", 112.0), ("te_delayed_unfused", 448.0)])
def test_a_step_without_an_amax_counts_in_one_preset_and_not_in_the_other(name, scale):
    policy = tensor_scale_preset(name, amax_history_len=2)
    state = initial_tensor_scale(policy)
    for amax in (4.0, 0.0, 0.0, 1.0):
        state = advance(policy, state, amax)
    assert state.scale == scale


@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("margin", (-126, 126), (-127, 127)), ("history_len", (1,), (0,)), ("amax_floor", (0.0,), (-1e-9,)),
        ("element_max", (1e-30, FLOAT32_MAX), (0.0, math.nextafter(FLOAT32_MAX, math.inf))),
    ],
)  # fmt: skip
def test_a_policy_has_its_ends(name, fine, wrong):
    for value in fine:
        assert getattr(TensorScalePolicy(**{name: value}), name) == pytest.approx(value)
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            TensorScalePolicy(**{name: value})


@pytest.mark.parametrize("kind", ["plain", "zeros", "none"])
def test_unused_bits_are_the_mean_distance_of_exponents(kind):
    """By frexp, over the steps that are neither zero nor clipped; clipped means beyond the last bit of the limit."""
    amax, rows = series(kind), [tensor_scale_preset("te_delayed", history_len=n) for n in (1, 16)]
    done = replay_tensor_scales(amax, [*rows, TENSOR_SCALE_PRESETS["te_current"]], scales=True)
    for i, used in enumerate(done.scales):
        products = [float(np.float32(a * s)) for a, s in zip(amax, used)]
        left = [9 - math.frexp(p)[1] for p in products if 0 < p <= 448 * (1 + 2.0**-22)]  # 448 is 0.875 * 2**9
        assert done.unused_bits[i] == pytest.approx(np.mean(left) if left else 0.0, abs=1e-12)
        assert done.worst[i] == pytest.approx(max(products) / 448)


def test_recorded_amaxes_give_the_scales_that_a_recipe_trains_with():
    policy = tensor_scale_preset("te_delayed", amax_history_len=3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    cast_like(net, uniform("short", Cast(E4M3FN, "tensor", policy)))
    recorder = AmaxRecorder(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        with ledger(net) as log:
            net(torch.randn(4, 16) * 1.4**step).square().sum().backward()
        optimizer.step()
        recorder.end_step()
        seen.append({f"{r.module}.{r.operand}": r.scale_max for r in log.operands})
    recorder.close()
    trace = recorder.trace()
    assert len(trace) == 6
    for name, amax in trace.series().items():
        scales = replay_tensor_scales(amax, [policy], scales=True).scales
        assert [row[name] for row in seen] == scales[0].tolist()


def test_the_tensor_with_a_stale_scale_is_named():
    amax = np.ones((10, 3), dtype=np.float32)
    amax[6, 1], amax[7, 2] = 50, 4
    trace = AmaxTrace(("a.input", "b.grad", "c.weight"), amax)
    found = [(s.tensor, s.steps, s.first, s.overshoot) for s in stale_scales(trace)]
    assert found == [("b.grad", 1, 6, 50.0), ("c.weight", 1, 7, 4.0)]
    said = partial(words, "stale")
    worst = said("scale", tensor="b.grad", steps=1, first=6, overshoot=50.0)
    assert recommend_recipe(trace) == ("te_current", (said("some", count=2, tensors=3), worst))
    for steps in (10, 1):
        reasons = said("none", tensors=1, steps=max(steps - 1, 1))
        assert recommend_recipe(AmaxTrace(("a.input",), amax[:steps, :1])) == ("te_hybrid_delayed", (reasons,))
    assert stale_scales(trace, margin=6) == []


TE = TENSOR_SCALE_PRESETS["te_delayed"]


WIDEST = TensorScalePolicy(element_max=FLOAT32_MAX)


@pytest.mark.parametrize(
    ("policy", "amax", "clipped"),
    [(TE, 448 + bits * 2.0**-15, bits > 4) for bits in (0, 4, 5)] + [(WIDEST, FLOAT32_MAX, 0), (WIDEST, math.inf, 1)],
)
def test_the_last_bits_of_a_product_are_no_clipping(policy, amax, clipped):
    """A first step is cast with scale 1; 448 (1 + 2^-22), rounded to float32, is 448 and four of its last bits."""
    done = replay_tensor_scales([amax], [policy])
    assert (done.clipped.tolist(), done.unused_bits.tolist()) == ([clipped], [0.0])


def test_a_sweep_tells_the_settings_that_differ_and_the_length_of_a_history():
    frame = sweep_tensor_scales({"a": [1.0], "b": [2.0]}, history_len=[2], margin=(0, 1), algorithm=["max"])
    told = ["tensor", "history_len", "margin", "policy", "clipped", "first", "worst", "unused_bits"]
    assert ([*frame], frame["tensor"].tolist()) == (told, ["a", "a", "b", "b"])
    assert len(sweep_tensor_scales([1.0], history_len=[2, 4])) == 3  # the most recent needs no second length


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: replay_tensor_scales([0.0, -1.0], [TE]), ValueError, "at step 1"),
        (lambda: replay_tensor_scales([], [TE]), ValueError, "amax"),
        (lambda: replay_tensor_scales([1.0], []), TypeError, "at least one"),
        (lambda: sweep_tensor_scales([1.0], history_len=16), TypeError, "history_len must be a list"),
        (lambda: sweep_tensor_scales([1.0], margin=16), TypeError, "margin must be a list"),
        (lambda: sweep_tensor_scales([1.0], algorithm="max"), TypeError, "algorithm must be a list"),
        (lambda: tensor_scale_preset("te"), ValueError, "te_delayed"),
        (lambda: tensor_scale_preset("te_delayed", length=3), TypeError, "length"),
        (lambda: tensor_scale_preset("te_delayed", amax_compute_algo="mean"), ValueError, "most_recent"),
        (lambda: advance(TE, initial_tensor_scale(TE), -1.0), ValueError, r"\[0, inf\]"),
        (lambda: TE[0], TypeError, "one policy"),
        (lambda: TensorScalePolicy(2.0**-150), ValueError, "element_max"),
        (lambda: stack_tensor_scales([]), ValueError, "at least one"),
        (lambda: TensorScaler(TENSOR_SCALE_PRESETS["te_current"]), ValueError, "no state"),
    ],
)
def test_bad_input_is_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        wrong()
