"""Rounding beside native casts, ml_dtypes and exact fractions: every format, mode and rule of overflow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    EXACT_MODES,
    ML_DTYPES,
    SPECIAL,
    agree,
    beside_every_tie,
    cast,
    exactly,
    formats,
    mismatches,
    near_the_grid,
    random_patterns,
)
from support import tries

from mpkit.blocks import BLOCK_FORMATS, quantize_blocks
from mpkit.formats import BF16, E2M1, E4M3FN, E5M2, FP16, FP32, FP64, TF32, FloatFormat, get_format
from mpkit.rounding import OVERFLOWS, quantize, round_to, rounding_error

ALL = [*ML_DTYPES, TF32, FP32, FP64, get_format("e4m7"), get_format("e6m21"), get_format("e7m22"), get_format("e8m1")]


def named(fmt: FloatFormat) -> str:
    return fmt.name


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=named)
def test_nearest_even_is_the_cast_of_ml_dtypes_at_and_beside_every_tie(fmt):
    x = torch.cat([beside_every_tie(fmt), random_patterns(200_000, seed=7)])
    assert mismatches(round_to(x, fmt), cast(x, fmt)) == 0


@pytest.mark.parametrize("fmt", [FP16, BF16, E5M2], ids=named)
def test_a_format_of_ones_own_rounds_as_the_native_one(fmt):
    own = FloatFormat("own", fmt.exponent_bits, fmt.fraction_bits)
    x = torch.cat([beside_every_tie(fmt), random_patterns(100_000, seed=8)])
    assert mismatches(round_to(x, own), x.to(fmt.torch_dtype).float()) == 0


def test_float64_rounds_once():
    rng = np.random.default_rng(3)
    bits = rng.integers(-(2**63), 2**63 - 1, 100_000, dtype=np.int64).view(np.float64)
    near = rng.standard_normal(100_000) * 2.0 ** rng.integers(-160, 140, 100_000)
    tie_of_ties = 1 + 2.0**-11 + 2.0**-40  # by way of float32 it would become 1
    x = torch.from_numpy(np.concatenate([bits, near, [2.0**-150, 2.0**128, -0.0, np.inf, np.nan, tie_of_ties]]))
    assert mismatches(round_to(x, FP32), x.float().double()) == 0
    with np.errstate(over="ignore"):
        assert mismatches(round_to(x, FP16), torch.from_numpy(x.numpy().astype(np.float16).astype(np.float64))) == 0
    assert mismatches(round_to(x, FP64), x) == 0


def test_tf32_keeps_the_upper_19_bits():
    x = torch.cat([random_patterns(200_000, seed=9), SPECIAL])
    bits = x.numpy().view(np.uint32).astype(np.int64)
    want = torch.from_numpy(((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).astype(np.uint32).view(np.float32))
    assert mismatches(round_to(x, TF32), torch.where(x.isnan(), torch.nan, want)) == 0


@given(
    near_the_grid() | st.tuples(formats, st.floats()),
    st.sampled_from(EXACT_MODES),
    st.sampled_from(OVERFLOWS),
    st.sampled_from([torch.float32, torch.float64]),
)
@tries(6)
def test_every_mode_is_exact(case, mode, overflow, dtype):
    fmt, value = case
    x = torch.tensor([value], dtype=dtype)
    assert agree(round_to(x, fmt, mode, overflow=overflow).item(), exactly(x.item(), fmt, mode, overflow))


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize("fmt", ALL, ids=named)
def test_every_mode_and_overflow_rule_around_the_ends(fmt, mode, overflow):
    ends = [0.5, 1.5, 2.5, fmt.min_normal / fmt.min_subnormal - 0.5]
    top = fmt.max * np.array([1 - fmt.eps / 4, 1 - fmt.eps / 2, 1])
    step = 2.0 ** (fmt.max_exponent - fmt.fraction_bits)
    with np.errstate(over="ignore"):
        top = [*top, *(fmt.max + step * np.array([0.25, 0.5, 0.75, 1, 2]))]
    values = torch.tensor([*(end * fmt.min_subnormal for end in ends), *top, *SPECIAL.tolist()], dtype=torch.float64)
    for x in (values, -values, values.float(), -values.float()):
        got = round_to(x, fmt, mode, overflow=overflow)
        limit = torch.finfo(x.dtype).max if overflow == "saturate" else np.inf  # FP64's max is no float32
        for value, result in zip(x.tolist(), got.tolist()):
            assert agree(result, float(np.clip(exactly(value, fmt, mode, overflow), -limit, limit)))


@pytest.mark.parametrize("fmt", [FP16, E4M3FN, E2M1, get_format("e4m7")], ids=named)
def test_rounding_by_chance_is_right_on_average(fmt):
    """Up with the probability of the part that is cut off: the mean errs by at most three standard errors."""
    n, low = 40_000, fmt.min_normal
    for part in (0.1, 0.5, 0.9):
        x = torch.full((n,), low + part * fmt.min_subnormal)
        up = (round_to(x, fmt, "stochastic", generator=torch.Generator().manual_seed(1)) > low).float().mean()
        assert abs(float(up) - part) < 3 * math.sqrt(part * (1 - part) / n)


def test_out_and_gradients():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = torch.empty(1000)
    assert round_to(x.detach(), E5M2, out=out) is out
    assert mismatches(out, x.detach().to(torch.float8_e5m2).float()) == 0
    y = quantize(x, E5M2, E4M3FN)
    y.backward(torch.full((1000,), 1.03))
    assert mismatches(y.detach(), out) == 0
    assert set(x.grad.tolist()) == {1.0}  # the gradient is rounded to its own format: 1.03 lies between 1 and 1.125
    error = rounding_error(x.detach(), E5M2).double()
    torch.testing.assert_close(error.abs(), (out.double() - x.detach().double()).abs(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("fmt", ALL, ids=named)
def test_patterns_and_values_are_the_same_thing(fmt):
    if fmt.bits > 16:
        values = torch.tensor([0.0, fmt.min_subnormal, fmt.min_normal, 1.0, 1 + fmt.eps, fmt.max], dtype=torch.float64)
        assert torch.equal(fmt.decode(fmt.encode(values)).double(), values)
        return
    patterns = torch.arange(2**fmt.bits)
    values = fmt.decode(patterns)
    number = ~values.isnan()
    assert torch.equal(fmt.encode(values)[number].long(), patterns[number])
    assert set(values[values.isfinite()].tolist()) == set(fmt.values().tolist())
    assert (fmt.max, fmt.min_subnormal) == (float(fmt.values().max()), float(fmt.values()[fmt.values() > 0].min()))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_block_holds_elements_times_its_scale(name):
    fmt = BLOCK_FORMATS[name]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-16, 16)[:, None]
    q = quantize_blocks(x, fmt)
    known = getattr(fmt.element, "values", None)
    if known is not None:
        assert set(q.elements.float().unique().tolist()) <= set(fmt.element.values().tolist())
    blocks = [-(-n // size) for n, size in zip(x.shape, fmt.block)]
    assert list(q.scales.shape) == blocks
    wide = q.scales.float().repeat_interleave(fmt.block[0], 0)[: len(x)].repeat_interleave(fmt.block[1], 1)
    whole = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    want = q.elements.float() * wide[:, : x.shape[1]] * whole
    torch.testing.assert_close(q.dequantize().float(), want, rtol=2.0**-22, atol=0)
