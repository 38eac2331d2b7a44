"""Block formats beside the golden data: exact arithmetic by fractions, shapes, dims, dtypes, devices, bad input."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from mpkit.blocks import (
    BLOCK_FORMATS,
    E8M0,
    FP8_128X128,
    INT8,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXINT8,
    NVFP4,
    BlockFormat,
    IntFormat,
    hadamard,
    quantize_blocks,
    round_with_bits,
)
from mpkit.casting import cast_like
from mpkit.casting.products import recipe_linear, recipe_rule
from mpkit.casting.recipe import RECIPES
from mpkit.formats import BF16, E2M1, E4M3FN, FP16, FP32, FloatFormat
from mpkit.rounding import round_to, rounding_error, ulp

MX = [fmt for fmt in BLOCK_FORMATS.values() if fmt.name.startswith("mxfp")]
RULES = ("floor", "ceil", "even", "rceil")
NATIVE = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m2": ml_dtypes.float6_e3m2fn}
NATIVE |= {"e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exponent(value: Fraction) -> int:
    """The e with 2**e <= value < 2**(e + 1), by integers alone."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def expected_byte(amax: float, fmt: BlockFormat, rule: str) -> int:
    """The rule of the specification, in exact arithmetic; 255 where a carry leaves float32."""
    if amax == 0:
        return 0
    a, e = Fraction(amax), max(exponent(Fraction(amax)), -127)  # a subnormal float32 counts as exponent field 0
    normal = amax >= 2.0**-126
    if rule == "ceil":
        e += (a != Fraction(2) ** e) if normal else 1
    if rule == "even":
        step = Fraction(2) ** (max(exponent(a), -126) - fmt.element.fraction_bits)
        up = math.floor(a / step + Fraction(1, 2)) * step
        e = exponent(up) if up >= Fraction(2) ** -126 else -127
        if e >= 128:
            return 255
    if rule == "rceil":  # the smallest power whose multiple of the largest element holds the maximum
        e = -127
        while Fraction(fmt.element.max) * Fraction(2) ** e < a:
            e += 1
        return e + 127
    return min(max(e + 127 - fmt.element.max_exponent, 0), 254)


@given(values=st.lists(finite, min_size=1, max_size=32), fmt=st.sampled_from(MX), rule=st.sampled_from(RULES))
def test_scales_follow_the_rule_in_exact_arithmetic(fmt, rule, values):
    amax = max(map(abs, values))
    if rule != "rceil" or amax > 2.0**-100:  # the smallest scale of all holds less
        q = quantize_blocks(torch.tensor(values), replace(fmt, scale_rounding=rule))
        assert q.scale_codes().tolist() == [expected_byte(amax, fmt, rule)]


@given(values=st.lists(finite, min_size=1, max_size=32), fmt=st.sampled_from(MX), rule=st.sampled_from(RULES))
def test_elements_are_ml_dtypes_casts_of_the_scaled_values(fmt, rule, values):
    x = torch.tensor(values)
    q = quantize_blocks(x, replace(fmt, scale_rounding=rule))
    if q.scales.isnan().any():
        assert q.dequantize().isnan().all()
        return
    scaled = x.double().numpy() / q.scales.double().numpy()
    scaled = np.clip(scaled, -fmt.element.max, fmt.element.max)
    np.testing.assert_array_equal(q.elements.numpy(), scaled.astype(NATIVE[fmt.element.name]).astype(np.float32))
    assert np.array_equal(q.elements.signbit().numpy(), np.signbit(scaled))  # -0.0 and what is flushed keep their sign


PAIRS = replace(NVFP4, name="pairs of rows", block=(2, 4))


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS.values(), PAIRS], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (2, 33, 40), (0, 5), (4, 0), (130, 131)])
def test_a_ragged_block_is_one_filled_up_with_zeros(fmt, dim, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = quantize_blocks(x, fmt, dim)
    assert q.elements.shape == q.dequantize().shape == x.shape
    other = dim ^ 1  # -1 <-> -2
    rows, columns = fmt.block
    want = [*shape[:-2], 0, 0]
    want[dim], want[other] = -(-shape[dim] // columns), -(-shape[other] // rows)
    assert q.scales.shape == tuple(want)
    full = [*shape[:-2], 0, 0]
    full[dim], full[other] = want[dim] * columns, want[other] * rows
    padded = x.new_zeros(full)
    inside = tuple(slice(0, size) for size in shape)
    padded[inside] = x
    p = quantize_blocks(padded, fmt, dim)
    assert torch.equal(p.scales, q.scales)
    assert torch.equal(p.dequantize()[inside], q.dequantize())


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_a_dim_is_the_last_of_the_transposed(fmt):
    x = torch.randn(40, 3, 50, generator=torch.Generator().manual_seed(0))
    dims = (1, 2) if fmt.block[0] > 1 else (0, 1, 2)
    for dim in dims:
        q, moved = quantize_blocks(x, fmt, dim), quantize_blocks(x.transpose(dim, 2), fmt)
        if fmt.block[0] > 1 or dim:
            assert torch.equal(q.dequantize(), moved.dequantize().transpose(dim, 2))
        assert torch.equal(q.dequantize(), quantize_blocks(x, fmt, dim - 3).dequantize())
        assert q.dequantize().is_contiguous() or dim < 2


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_every_float_dtype_and_device(fmt):
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = x.to(dtype)
        q = quantize_blocks(low, fmt)
        assert q.dequantize().dtype is dtype
        assert torch.equal(q.elements, quantize_blocks(low.float(), fmt).elements)
    meta = quantize_blocks(x.to("meta"), fmt)
    assert meta.dequantize().shape == x.shape
    assert meta.scales.is_meta  # nothing was read on the host


@given(values=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=32), rule=st.sampled_from(RULES[:3]))
# a tie, and beside a tie, which it would be in float32
@example(values=[256.0, 1 + 2.0**-4, math.nextafter(1 + 2.0**-4, 2)], rule="floor")
def test_float64_is_rounded_once(values, rule):
    x = torch.tensor(values, dtype=torch.float64)
    q = quantize_blocks(x, replace(MXFP8_E4M3, scale_rounding=rule))
    amax = float(x.abs().max())
    if amax > 2.0**-100:
        assert q.scale_codes().item() == expected_byte(amax, MXFP8_E4M3, rule)
        scaled = x / q.scales.double()
        assert torch.equal(q.elements.double(), round_to(scaled, E4M3FN, overflow="saturate"))


@pytest.mark.parametrize("large", [100, 70_001])
@pytest.mark.parametrize("fmt", [f for f in BLOCK_FORMATS.values() if not f.tensor_scale], ids=str)
def test_pieces_of_a_large_tensor_are_quantised_alike(fmt, large):
    x = torch.randn(3, large, generator=torch.Generator().manual_seed(1))
    x *= torch.linspace(-40, 40, large).exp2()
    whole = quantize_blocks(x, fmt)
    step = fmt.block[1] * 10
    for start in range(0, large, large // 2 // step * step or large):
        part = quantize_blocks(x[:, start : start + step], fmt)
        assert torch.equal(part.dequantize(), whole.dequantize()[:, start : start + step])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_an_mx_block_nan_and_its_neighbours_not(value):
    x = torch.ones(3, 64)
    x[1, 40] = value
    for fmt in MX:
        y = quantize_blocks(x, fmt).dequantize()
        assert y[1, 32:].isnan().all()
        assert y.isnan().sum() == 32


def test_not_finite_elements_in_nvfp4_and_fp8_blocks_as_hardware_has_them():
    x = torch.tensor([[0.25, math.nan, 0.5, -0.25]])
    four = quantize_blocks(x, NVFP4)
    assert four.tensor_amax == 0.5  # the maximum drops NaN
    assert four.codes()[0].tolist()[1] == 7
    eight = quantize_blocks(x, BLOCK_FORMATS["fp8_1x128"])
    assert eight.dequantize().isnan().tolist() == [[False, True, False, False]]


def test_a_zero_block_is_zero_in_every_format():
    for fmt in BLOCK_FORMATS.values():
        q = quantize_blocks(torch.tensor([[0.0, -0.0] * 32]), fmt)
        assert torch.equal(q.dequantize(), torch.zeros(1, 64))
        if fmt.element is not INT8:
            assert q.dequantize().signbit().tolist() == [[False, True] * 32]


def test_stochastic_elements_are_the_two_neighbours_and_right_on_average():
    x = torch.full((64, 1024), 2.7)
    x[:, ::32] = 6.0
    fmt = replace(MXFP4, scale_rounding="rceil")
    q = quantize_blocks(x, fmt, mode="stochastic", generator=torch.Generator().manual_seed(3))
    rest = q.dequantize()[x != 6]
    assert set(rest.tolist()) == {2.0, 3.0}
    assert abs(rest.mean().item() - 2.7) < 3 * 0.46 / math.sqrt(rest.numel())  # sqrt(0.7 * 0.3) = 0.46
    again = quantize_blocks(x, fmt, mode="stochastic", generator=torch.Generator().manual_seed(3))
    assert torch.equal(again.elements, q.elements)


@given(y=st.floats(-10, 10, width=32), r=st.integers(0, 255))
def test_rounding_with_bits_is_the_formula_in_exact_arithmetic(y, r):
    magnitude = abs(np.float32(y))
    gap = 2.0 if magnitude >= 4 else 1.0 if magnitude >= 2 else 0.5
    moved = np.float32(magnitude + np.float32(r / 256 * gap))
    want = max(v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6) if v <= moved)
    got = round_with_bits(torch.tensor([y]), E2M1, torch.tensor([r], dtype=torch.uint8))
    assert got.abs().item() == want
    assert bool(got.signbit()) == bool(np.signbit(np.float32(y)))


def test_formats_are_data():
    assert pickle.loads(pickle.dumps(NVFP4)) == copy.deepcopy(NVFP4) == NVFP4
    assert E8M0.values().tolist() == [2.0**e for e in range(-127, 128)]
    native = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(E8M0.values().numpy(), native)
    assert INT8.rounded(torch.tensor([1.999, -2.5, 1.5 / 64, 2.5 / 64])).tolist() == [127 / 64, -2.0, 2 / 64, 2 / 64]
    assert BlockFormat("mine", E2M1, (1, 16), E4M3FN, tensor_scale=True).scale_rounding == "te"
    assert MXFP6_E2M3.bits_per_element == 6.25
    assert (E8M0.has_inf, E8M0.has_nan, E8M0.min_normal, E8M0.max) == (False, True, 2.0**-127, 2.0**127)
    even = BlockFormat("tie", E2M1, (1, 16), E4M3FN, "4over6_mae_256", tensor_scale=True)
    assert quantize_blocks(6 * torch.eye(1, 16), even).elements.max() == 6.0  # 4 of a larger scale is as near


def test_compiled_and_eager_agree():
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(5))
    for fmt in (MXFP4, NVFP4):
        compiled = torch.compile(lambda t, f=fmt: quantize_blocks(t, f).dequantize(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), quantize_blocks(x, fmt).dequantize())


DENSE = {round_to: [FP16], ulp: [FP16], rounding_error: [FP16], quantize_blocks: [MXFP4], hadamard: []}


def test_bad_input_is_refused_with_the_way_out():
    x, bits, sparse = torch.randn(4, 32), torch.zeros(4, 32, dtype=torch.uint8), torch.eye(3).to_sparse()
    for wrong, error, words in (
        (lambda: quantize_blocks(x, MXFP4, 2), ValueError, "dim must lie"),
        (lambda: quantize_blocks(torch.tensor(1.0), MXFP4), ValueError, "dim must"),
        (lambda: quantize_blocks(torch.randn(5), FP8_128X128), ValueError, "last two dims"),
        (lambda: quantize_blocks(torch.randn(5), BlockFormat("b", E2M1, (2, 16))), ValueError, "last two dims"),
        (lambda: quantize_blocks(torch.randn(5, 5, 5), FP8_128X128, 0), ValueError, "reshape it"),
        (lambda: quantize_blocks(x, MXFP4, bits=bits), ValueError, "stochastic"),
        (lambda: quantize_blocks(x, MXFP4, mode="stochastic", bits=[1]), TypeError, "uint8"),
        (lambda: round_with_bits(x, E2M1, bits.int()), TypeError, "uint8"),
        (lambda: BlockFormat("b", E2M1, (1, 2, 16)), TypeError, "two ints"),
        (lambda: quantize_blocks(x, MXINT8, mode="stochastic"), ValueError, "nearest even"),
        (lambda: quantize_blocks(x, MXINT8, mode="stochastic", bits=bits), ValueError, "bits are for"),
        (lambda: BlockFormat("b", FP16), ValueError, "at most 8 bits"),
        (lambda: BlockFormat("b", E2M1, (0, 32)), ValueError, "at least one row"),
        (lambda: BlockFormat("b", E2M1, scale=FP16), ValueError, "E8M0, E4M3FN or FP32"),
        (lambda: BlockFormat("b", E2M1, scale_rounding="nearest"), ValueError, "'floor' or 'ceil'"),
        (lambda: BlockFormat("b", E2M1, scale=FP32, tensor_scale=True), ValueError, "short of range"),
        (lambda: BlockFormat("b", E2M1, (1, 16), E4M3FN, "4over6_mae_256"), ValueError, "tensor_scale=True"),
        (lambda: E8M0.encode(torch.tensor([3.0])), ValueError, "powers of two"),
        (lambda: hadamard(x, 3), ValueError, "dim must lie"),
        (lambda: round_with_bits(x, FloatFormat("odd", 8, 16), bits), ValueError, "at most 15 fraction bits, odd has"),
        *((lambda f=f: f.decode(torch.tensor([0, 256])), ValueError, f"patterns of {f.name}") for f in (E8M0, INT8)),
        *((lambda v=v: INT8.encode(torch.tensor([0.5, v])), ValueError, "not a value of") for v in (2, -3, math.nan)),
        *((lambda b=b: IntFormat("x", *b), ValueError, "bits must be") for b in ((1, 0), (25, 6), (8, 9), (8, -1))),
        *(
            (lambda call=call: call(sparse, *DENSE[call]), TypeError, r"need a dense tensor, got a sparse_\w+ one")
            for call in DENSE
        ),
    ):
        with pytest.raises(error, match=words):
            wrong()


def test_the_scale_of_a_block_never_comes_from_a_logarithm():
    powers = torch.tensor([2.0**e for e in range(-100, 127)])
    below = torch.nextafter(powers, torch.zeros(()))  # float32 log2 gives these the exponent of the power
    q = quantize_blocks(below[:, None], MXFP8_E4M3)
    assert q.scale_codes()[:, 0].tolist() == [e - 1 + 127 - 8 for e in range(-100, 127)]


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_the_default_device_is_not_asked(fmt: BlockFormat) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    wanted = quantize_blocks(x, fmt)
    with torch.device("meta"):
        assert E8M0.values()[-1].item() == 2.0**127
        got = quantize_blocks(x, fmt)
        assert torch.equal(got.dequantize(), wanted.dequantize())
        assert torch.equal(got.elements, wanted.elements)
        assert torch.equal(got.scale_codes(), wanted.scale_codes())


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_a_block_of_float64_too_small_for_a_finite_scale_is_that_of_float32(fmt: BlockFormat) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 1e-37
    x[:, :32] *= 1e-3
    assert torch.equal(quantize_blocks(x.double(), fmt).scales, quantize_blocks(x, fmt).scales)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_copied_formats_and_recipes_cast_alike(again):
    x = torch.randn(16, 256) * torch.logspace(-3, 3, 16)[:, None]
    for fmt in (*MX, MXINT8, BlockFormat("te", E4M3FN, (1, 128), E8M0, "te")):
        assert torch.equal(quantize_blocks(x, fmt).dequantize(), quantize_blocks(x, again(fmt)).dequantize())
    for recipe in RECIPES.values():
        for (key, cast), (_, other) in zip(recipe.casts(), again(recipe).casts()):
            if cast is not None and other is not None and cast.rounding != "stochastic":
                scale = torch.tensor(2.0) if cast.delayed else None
                assert torch.equal(cast(x, 1, scale).values, other(x, 1, scale).values), (recipe.name, key)


def test_a_saved_network_computes_the_same_where_its_recipe_was_never_used():
    torch.manual_seed(0)
    x, net = torch.randn(8, 64), cast_like(nn.Linear(64, 32), "mxfp8")
    saved, want = pickle.dumps(net), net(x)
    recipe_rule.cache_clear()  # as in another process: no equal recipe stands ready
    assert torch.equal(pickle.loads(saved)(x), want)


def test_an_integer_format_has_24_bits_at_most_and_may_have_none_before_its_point():
    assert IntFormat("int24", 24, 24).max == 0.5 - 2.0**-24


@pytest.mark.parametrize("element", [INT8, IntFormat("int2", 2, 0), FloatFormat("e2m1i", 2, 1)], ids=lambda e: e.name)
def test_a_scale_below_the_normal_numbers_is_no_zero(element: FloatFormat | IntFormat):
    """The largest element over the largest float32 is subnormal; its power of two is 2**-127 and not 0."""
    fmt = BlockFormat("x", element, (1, 32), E8M0, "te")
    q = quantize_blocks(torch.full((32,), torch.finfo(torch.float32).max), fmt)
    assert q.scale_codes().tolist() == [254]
    assert q.elements.tolist() == [min(element.max, 2.0)] * 32


def test_hardware_rounding_knows_every_gap():
    """Against fractions: floor of |y| / gap + bits / 256, for subnormals of a format with 8 exponent bits too."""
    y = torch.tensor([1e-40, 3e-41, -1e-39, 1.17e-38, 2.0**-126, 1.0, -2.7, 3.39e38])
    for fmt, bits in product((BF16, FloatFormat("e8m15", 8, 15)), (0, 1, 77, 255)):
        got = round_with_bits(y, fmt, torch.full(y.shape, bits, dtype=torch.uint8))
        gaps = [Fraction(fmt.ulp(v)) for v in y.tolist()]
        down = [(abs(Fraction(v)) + Fraction(bits, 256) * g) // g * g for v, g in zip(y.tolist(), gaps)]
        assert got.tolist() == [math.copysign(min(fmt.max, float(w)), v) for w, v in zip(down, y.tolist())]


def test_a_recipe_takes_float_tensors_of_any_size():
    for recipe in (RECIPES["te_current"], RECIPES["mxfp8"]):
        with pytest.raises(TypeError, match="x and weight must be float tensors"):
            recipe_linear(torch.ones(4, 32, dtype=torch.int32), torch.ones(16, 32), recipe)
        for rows, features, outputs in ((4, 0, 16), (4, 32, 0), (0, 32, 16)):
            both = torch.ones(rows, features, requires_grad=True), torch.ones(outputs, features, requires_grad=True)
            y = recipe_linear(*both, recipe)
            y.sum().backward()
            assert y.shape == (rows, outputs)
            assert not any(made.any() for made in (y, *(x.grad for x in both)))
