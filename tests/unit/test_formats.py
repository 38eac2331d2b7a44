"""Formats against the dtypes of numpy, ml_dtypes and torch: every pattern, every extreme, and exact fractions."""

import math
import pickle
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import Domain, Signedness, format_info_p3109
from hypothesis import given
from hypothesis import strategies as st
from oracles import ML_DTYPES

from mpkit.formats import (
    BF16,
    E2M1,
    E3M2,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    FP64,
    OTHER_FORMATS,
    FloatFormat,
    get_format,
    p3109,
)
from mpkit.rounding import round_to, ulp

SMALL = sorted(ML_DTYPES, key=lambda fmt: fmt.name)
NAMED = list(FORMATS.values())


def named(fmt: FloatFormat) -> str:
    return fmt.name


def every_pattern(fmt: FloatFormat) -> tuple[torch.Tensor, np.ndarray]:
    """All patterns as int64, and their values by numpy or ml_dtypes as float32."""
    patterns = np.arange(2**fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
    return torch.from_numpy(patterns.astype(np.int64)), patterns.view(ML_DTYPES[fmt]).astype(np.float32)


def same(got: torch.Tensor, want: np.ndarray) -> bool:
    """Equal bit for bit; any NaN equals any NaN."""
    ours = got.numpy()
    number = ~np.isnan(want)
    return bool(
        ours.dtype == want.dtype
        and np.array_equal(np.isnan(ours), ~number)
        and np.array_equal(ours[number], want[number])
        and np.array_equal(np.signbit(ours[number]), np.signbit(want[number]))
    )


@pytest.mark.parametrize("fmt", SMALL, ids=named)
def test_every_pattern_decodes_as_ml_dtypes_does(fmt):
    patterns, want = every_pattern(fmt)
    assert same(fmt.decode(patterns), want)


P3109 = [
    (bits, precision, signed, extended)
    for bits in (*range(3, 11), 15)
    for signed in (True, False)
    for extended in (True, False)
    for precision in range(1, bits + (not signed))
    if bits - signed - precision < 8
]


@pytest.mark.parametrize("layout", P3109, ids=str)
def test_every_pattern_of_ieee_p3109(layout):
    bits, precision, signed, extended = layout
    fmt = p3109(*layout)
    signedness = Signedness.Signed if signed else Signedness.Unsigned
    info = format_info_p3109(bits, precision, signedness, Domain.Extended if extended else Domain.Finite)
    every = range(0, 2**bits, 1 if bits < 15 else 61)
    want = np.array([gfloat.decode_float(info, code).fval for code in every], np.float32)
    patterns = torch.tensor(every)
    assert (fmt.values().diff() > 0).all()
    assert same(fmt.decode(patterns), want)
    assert (fmt.max, fmt.min_subnormal, fmt.bias) == (info.max, info.smallest_subnormal, info.bias)
    assert torch.equal(fmt.encode(torch.from_numpy(want)), patterns)  # there is one NaN, so also its pattern
    found = [f.kind if f.value is None else float(f.value) for f in map(fmt.fields, every)]
    assert found == [v if math.isfinite(v) else str(abs(v)) for v in want.tolist()]
    assert get_format(fmt.name) == fmt


@pytest.mark.parametrize(("fmt", "ints", "floats"), [(FP32, np.uint32, np.float32), (FP64, np.int64, np.float64)])
def test_wide_formats_are_the_machine_s_own(fmt, ints, floats):
    info, rng = np.iinfo(ints), np.random.default_rng(0)
    bits = rng.integers(info.min, info.max, 100_000, dtype=ints, endpoint=True)
    subnormal = bits & ints((1 << fmt.fraction_bits) - 1)
    bits = np.concatenate([bits, subnormal])
    values = bits.view(floats)
    assert same(fmt.decode(torch.from_numpy(bits.astype(np.int64))), values)
    number = ~np.isnan(values)
    assert np.array_equal(fmt.encode(torch.from_numpy(values[number])).numpy(), bits[number].astype(np.int64))


@pytest.mark.parametrize("fmt", [*ML_DTYPES, FP32, FP64], ids=named)
def test_extremes_are_those_of_ml_dtypes(fmt):
    info = ml_dtypes.finfo((ML_DTYPES | {FP32: np.float32, FP64: np.float64})[fmt])
    assert (fmt.max, fmt.min_normal) == (float(info.max), float(info.smallest_normal))
    assert (fmt.min_subnormal, fmt.eps) == (float(info.smallest_subnormal), float(info.eps))
    assert (fmt.exponent_bits, fmt.fraction_bits, fmt.bits) == (info.nexp, info.nmant, info.bits)


@pytest.mark.parametrize("fmt", SMALL, ids=named)
def test_fields_of_every_pattern(fmt):
    patterns, values = every_pattern(fmt)
    for pattern, value in list(zip(patterns.tolist(), values.tolist()))[:: 1 if fmt.bits < 16 else 97]:
        sign, exponent, fraction, kind, exact = fmt.fields(pattern)
        assert (sign << fmt.fraction_bits + fmt.exponent_bits) + (exponent << fmt.fraction_bits) + fraction == pattern
        if kind in ("inf", "nan"):
            assert exact is None
            assert str(abs(value)) == kind
        else:
            assert exact == Fraction(value)
            assert kind == ("zero" if value == 0 else "subnormal" if abs(value) < fmt.min_normal else "normal")


def test_the_first_and_the_last_pattern_of_a_wide_format():
    for fmt in (FP32, FP64):
        assert fmt.fields(0) == (0, 0, 0, "zero", Fraction(0))
        last = fmt.fields(2**fmt.bits - 1)
        assert (last.sign, last.kind, last.fraction) == (1, "nan", 2**fmt.fraction_bits - 1)
        for pattern in (2**fmt.bits, -(2**64) - 1):
            with pytest.raises(ValueError, match="patterns of"):
                fmt.fields(pattern)
    assert FP64.fields(-1) == FP64.fields(2**64 - 1)


def test_fields_keep_what_float64_could_not_hold_apart():
    assert FP64.fields(1).value == Fraction(1, 2**1074)
    assert FP64.fields(2**63) == FP64.fields(-(2**63)) == (1, 0, 0, "zero", 0)
    assert FP64.fields(0x7FF0_0000_0000_0001).kind == "nan"


@pytest.mark.parametrize("exponent_bits", range(2, 9))
@pytest.mark.parametrize("fraction_bits", [1, 2, 7, 15, 23])
def test_built_formats_follow_ieee_754(exponent_bits, fraction_bits):
    fmt = get_format(f"e{exponent_bits}m{fraction_bits}")
    if fmt in (E3M2, E2M1):
        fmt = FloatFormat("own", exponent_bits, fraction_bits)
    emax = 2 ** (exponent_bits - 1) - 1  # IEEE 754-2019, 3.3: emin = 1 - emax, and the bias is emax
    assert (fmt.bias, fmt.max_exponent, fmt.min_exponent) == (emax, emax, 1 - emax)
    assert Fraction(fmt.max) == Fraction(2) ** emax * (2 - Fraction(2) ** -fraction_bits)
    assert Fraction(fmt.min_subnormal) == Fraction(2) ** (1 - emax - fraction_bits)
    top = fmt.encode(torch.tensor([fmt.max, torch.inf]))
    assert top[1] == top[0] + 1
    assert fmt.decode(top).tolist() == [fmt.max, torch.inf]


@given(st.integers(2, 8), st.integers(1, 23), st.sampled_from(["ieee", "nan", "none"]), st.data())
def test_encode_undoes_decode_in_any_format(exponent_bits, fraction_bits, specials, data):
    fmt = FloatFormat("own", exponent_bits, fraction_bits, "ieee" if exponent_bits == 8 else specials)
    patterns = torch.tensor(data.draw(st.lists(st.integers(0, 2**fmt.bits - 1), min_size=1)))
    values = fmt.decode(patterns)
    for pattern, value in zip(patterns.tolist(), values.tolist()):
        exact = fmt.fields(pattern).value
        assert exact is None or exact == Fraction(value)
    number = ~values.isnan()
    assert torch.equal(fmt.encode(values[number]), patterns[number])


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.bits < 64], ids=lambda f: f.name)
def test_thresholds_are_where_rounding_changes(fmt):
    zero, edge = fmt.zero_up_to, fmt.overflow_edge
    around = [zero, math.nextafter(zero, 1.0), math.nextafter(edge, 0.0), edge, math.nextafter(edge, math.inf)]
    x = torch.tensor(around, dtype=torch.float64)
    tie = math.inf if fmt.edge_overflows else fmt.max
    assert round_to(x, fmt, overflow="inf").tolist() == [0.0, fmt.min_subnormal, fmt.max, tie, math.inf]
    for value in (0.0, fmt.min_subnormal, fmt.min_normal, 1.0, 1.75, -2.0, fmt.max):
        assert fmt.ulp(value) == float(ulp(torch.tensor(value, dtype=torch.float64), fmt))
    assert 2.0**fmt.min_subnormal_exponent == fmt.min_subnormal


def test_names():
    for fmt in (*NAMED, *OTHER_FORMATS.values()):
        assert get_format(fmt.name) is get_format(fmt.name.upper()) is fmt
        assert len(fmt.source) > 20
    for name, fmt in (("e5m10", FP16), ("e8m7", BF16), ("e8m23", FP32), ("e3m2", E3M2)):
        assert get_format(name) is fmt
    assert get_format("e4m3") != E4M3FN
    assert get_format("e04m07") == get_format("E4M7")
    assert get_format("binary8p3") == p3109(8, 3)
    assert pickle.loads(pickle.dumps(E4M3FN)) == E4M3FN
    assert repr(FP16) == "FloatFormat(fp16: 1+5+10 bits)"


def test_default_overflow_rules_are_the_formats_own():
    assert [f.overflow for f in (FP16, E5M2, E4M3FN, E2M1)] == ["inf", "inf", "nan", "saturate"]


UNKNOWN = ("", "e9m3", "e1m3", "e5m0", "e5m24", "fp8", "e5m10x", "m10e5")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_format(16), TypeError, "asked for by its name"),
        *((lambda n=n: get_format(n), ValueError, r"no format is called|need 2 to 8 exponent bits") for n in UNKNOWN),
        (lambda: FloatFormat("x", 11, 51), ValueError, "FP64's 11 and 52"),
        (lambda: FloatFormat("x", 5, 2, "fn"), ValueError, "specials must be"),
        (lambda: FloatFormat("x", 5, 2, bias=200), ValueError, "beyond float32"),
        (lambda: FloatFormat("x", 1, 0, "nuz"), ValueError, "no number but zero"),
        (lambda: FloatFormat("x", 5, 2, bias=149), ValueError, r"2\*\*-150 to 2\*\*-119, beyond float32"),
        (lambda: FloatFormat("x", 8, 7, "nan"), ValueError, r"2\*\*-133 to 2\*\*128, beyond float32"),
        (lambda: p3109(16, 3), ValueError, "3 to 15 bits"),
        (lambda: p3109(8, 8), ValueError, "precision must be at most 7"),
        (lambda: FP32.values(), ValueError, "too many to list"),
        (lambda: FP16.decode(torch.tensor([1.0])), TypeError, "a tensor of integers, got torch.float32"),
        (lambda: FP16.decode(torch.tensor([-1], dtype=torch.int16)), ValueError, "mask them with & 0xffff"),
        (lambda: FP16.encode(torch.tensor([1.0]).half()), TypeError, r"call x\.float"),
        (lambda: FP16.encode(torch.tensor([1.0, 0.1])), ValueError, "not a value of fp16; call round_to"),
        (lambda: FP16.encode(2.0**-25), ValueError, "not a value of fp16"),
        (lambda: FP16.encode(10**400), ValueError, r"10{19}\.\.\. is not a value of fp16, whose largest is 65504.0"),
        (lambda: E4M3FN.encode(torch.tensor(torch.inf)), ValueError, "not a value of e4m3fn"),
        (lambda: E2M1.encode(torch.tensor(torch.nan)), ValueError, "not a value of e2m1"),
        (lambda: FP16.fields(65536), ValueError, "are 0 to 0xffff, got 0x10000"),
    ],
)
def test_errors_say_what_was_needed(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_shapes_and_empty_tensors():
    x = torch.tensor([[1.0, -0.0], [2.0, 4.0]])
    assert FP16.encode(x.t()).tolist() == [[0x3C00, 0x4000], [0x8000, 0x4400]]
    assert [fmt.encode(math.nan) for fmt in (FP16, BF16, E5M2)] == [0x7E00, 0x7FC0, 0x7E]  # the quiet one
    assert FP16.encode(torch.empty(0, 3)).shape == FP16.decode(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert FP16.encode(1).shape == ()
    assert [get_format(name).encode(-0.0) for name in ("e4m3fnuz", "binary8p3u")] == [0, 0]  # there is one zero
    assert (one := FloatFormat("x", 1, 0, "none")).values().tolist() == [-2.0, 0.0, 2.0**one.max_exponent]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", SMALL, ids=named)
def test_cuda_gives_the_same_patterns_and_values(fmt):
    patterns, values = every_pattern(fmt)
    assert same(fmt.decode(patterns.cuda()).cpu(), values)
    finite = torch.from_numpy(values)[torch.from_numpy(np.isfinite(values))]
    assert torch.equal(fmt.encode(finite.cuda()).cpu(), fmt.encode(finite))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_the_gap_around_what_is_beyond_a_format_is_that_of_its_largest_value(fmt):
    for x in (math.inf, -math.inf, 2.0**1023, -fmt.max, 10**400, -(10**400)):
        assert fmt.ulp(x) == fmt.ulp(fmt.max)
    assert math.isnan(fmt.ulp(math.nan))
