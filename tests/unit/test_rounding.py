"""Rounding against native casts and ml_dtypes at and beside every tie, and against exact fractions in every mode."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from gfloat import RoundMode, round_float
from gfloat.formats import Domain, Signedness, format_info_p3109
from oracles import EXACT_MODES, ML_DTYPES, beside_every_tie, exactly, mismatches, random_patterns
from torch.utils._python_dispatch import TorchDispatchMode

from mpkit.formats import BF16, E2M1, E3M2, E4M3FN, E5M2, FP16, FP32, FP64, TF32, FloatFormat, get_format, p3109
from mpkit.rounding import BLOCK, MODES, OVERFLOWS, TOLD, quantize, round_to, ulp

SMALL = list(ML_DTYPES)
ALL = [*SMALL, TF32, FP32, FP64, get_format("e4m7"), get_format("e6m21"), get_format("e7m22"), get_format("e8m1")]


def named(value) -> str:
    return getattr(value, "name", str(value))


# nearest even, against what we did not write


@pytest.mark.parametrize("mode", EXACT_MODES)
@pytest.mark.parametrize(
    "fmt", [FP16, E5M2, E4M3FN, E2M1, E3M2, TF32, BF16, get_format("e6m20"), FloatFormat("own", 8, 23)], ids=named
)
def test_the_fast_way_equals_the_float64_way_on_random_bit_patterns(fmt, mode):
    x = random_patterns(100_000, seed=10)
    x = x[x.abs() <= fmt.max]  # a block with one value beyond goes the long way
    assert mismatches(round_to(x, fmt, mode), round_to(x.double(), fmt, mode).float()) == 0


@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, E5M2], ids=str)
def test_out_may_overlap_x(fmt):
    whole = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    x, out = whole[: 2 * BLOCK], whole[BLOCK:]
    want = round_to(x.clone(), fmt)
    assert torch.equal(round_to(x, fmt, out=out), want)
    for side in (3, math.isqrt(3 * BLOCK)):
        square = torch.arange(float(side**2)).remainder(997).view(side, side) / 7
        want = round_to(square.clone(), fmt)
        assert torch.equal(round_to(square, fmt, out=square.t()), want)


GFLOAT_MODES = {
    "nearest_even": RoundMode.TiesToEven, "nearest_away": RoundMode.TiesToAway, "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive, "down": RoundMode.TowardNegative,
}  # fmt: skip
LAYOUTS = [*((8, p) for p in range(1, 8)), (8, 8), (3, 1), (3, 2), (4, 2), (5, 5), (6, 3), (11, 4), (15, 9)]


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ieee_p3109_in_every_mode_and_overflow_rule(layout, signed, extended):
    if layout[1] > layout[0] - signed:
        return
    fmt = p3109(*layout, signed=signed, extended=extended)
    info = format_info_p3109(
        *layout, Signedness.Signed if signed else Signedness.Unsigned, Domain.Extended if extended else Domain.Finite
    )
    x = beside_every_tie(fmt) if fmt.bits < 15 else beside_every_tie(fmt)[::29]
    x = x if signed else x[x >= 0]
    for mode, theirs in GFLOAT_MODES.items():
        own, most = (torch.tensor([round_float(info, v, theirs, sat) for v in x.tolist()]) for sat in (False, True))
        beyond = (own != most) & ~x.isnan()
        for overflow in OVERFLOWS:
            instead = {"inf": torch.copysign(torch.full_like(x, torch.inf), x), "nan": torch.full_like(x, torch.nan)}
            want = torch.where(beyond, instead.get(overflow, most), most)
            for dtype in (torch.float32, torch.float64):
                got = round_to(x.to(dtype), fmt, mode, overflow=overflow)
                assert mismatches(got, want.to(dtype)) == 0, (mode, overflow)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_below_zero_is_beyond_an_unsigned_format(mode):
    fmt, x = p3109(8, 4, signed=False), torch.tensor([-1.0, -torch.inf, -0.0])
    assert round_to(x, fmt, mode, overflow="saturate").tolist() == [0.0, 0.0, 0.0]
    minus_one, minus_inf, zero = round_to(x, fmt, mode).tolist()
    assert math.isnan(minus_inf)
    assert math.isnan(minus_one) or (mode in ("toward_zero", "up") and minus_one == 0.0)
    assert math.copysign(1.0, zero) == 1.0


def test_each_rounding_is_told_once():
    told = []
    token = TOLD.set(lambda x, fmt, rounded: told.append((x.tolist(), fmt, rounded.tolist())))
    try:
        x = torch.tensor([1.125, 70000.0])
        round_to(x, E5M2, out=x)
        quantize(x, E4M3FN)
    finally:
        TOLD.reset(token)
    assert told[0] == ([1.125, 70000.0], E5M2, [1.0, math.inf])
    assert [fmt for _, fmt, _ in told] == [E5M2, E4M3FN]


# stochastic


@pytest.mark.parametrize("fmt", ALL, ids=named)
def test_stochastic_rounding_keeps_values_signs_nan_and_overflow(fmt):
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    want = torch.tensor([exactly(v, fmt, "toward_zero", fmt.overflow) for v in x.tolist()])
    assert mismatches(round_to(x, fmt, "stochastic"), want) == 0
    if fmt.bits <= 16:
        grid = torch.cat([fmt.values(), torch.tensor([-0.0] * fmt.has_minus_zero)])
        assert mismatches(round_to(grid, fmt, "stochastic"), grid) == 0
        tiny = torch.full((1000,), -fmt.min_subnormal / 2)
        assert not fmt.has_minus_zero or round_to(tiny, fmt, "stochastic").signbit().all()


@pytest.mark.parametrize("fmt", [FP16, BF16, E5M2, E4M3FN, TF32, E2M1, get_format("e6m21")], ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
def test_stochastic_rounding_has_the_right_mean(fmt, dtype):
    """Between subnormals, around 1 and below the largest value; the share that goes up is the exact distance."""
    draws, generator = 100_000, torch.Generator().manual_seed(11)
    places = [(fmt.min_subnormal, 0.5), (fmt.min_subnormal, 1.25), (-fmt.min_subnormal, 2.9), (fmt.min_subnormal, 0.01)]
    places += [(fmt.eps, 1 / fmt.eps + p) for p in (0.001, 0.25, 0.9)] + [(-fmt.eps, 1 / fmt.eps + 0.5)]
    gap = 2.0 ** (fmt.max_exponent - fmt.fraction_bits)
    for value, start in [*((unit * p, 0.0) for unit, p in places), *((-gap * p, fmt.max) for p in (0.25, 0.7))]:
        x = torch.full((draws,), start + value, dtype=dtype)
        below, above = (round_to(x[:1], fmt, mode).item() for mode in ("down", "up"))
        got = round_to(x, fmt, "stochastic", generator=generator)
        ups = int((got == above).sum())
        if below == above:  # the point is a value of the format in float32
            assert ups == draws
            continue
        assert ups + int((got == below).sum()) == draws
        share = float((Fraction(x[0].item()) - Fraction(below)) / (Fraction(above) - Fraction(below)))
        assert abs(ups - draws * share) <= 4 * math.sqrt(draws * share * (1 - share)), (x[0].item(), ups, share)


def test_stochastic_overflow_is_as_likely_as_the_distance_says():
    halfway = torch.full((100_000,), 464.0)  # between 448 and where 480 would be
    share = round_to(halfway, E4M3FN, "stochastic", generator=torch.Generator().manual_seed(1)).isnan().double().mean()
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(100_000)


def test_stochastic_rounding_with_a_generator_leaves_the_global_one_alone():
    x, state = torch.randn(1001), torch.get_rng_state()
    seeds = (round_to(x, FP16, "stochastic", generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    assert not torch.equal(*seeds)
    assert round_to(x.double(), FP64, "stochastic").equal(x.double())  # nothing is left to chance
    round_to(x, FP16, "stochastic", generator=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())


# shapes, strides, out


@pytest.mark.parametrize("fmt", [FP16, TF32, E4M3FN, FP64], ids=named)
@pytest.mark.parametrize("mode", MODES)
def test_any_shape_and_stride(mode, fmt):
    x = torch.randn(60, 100, generator=torch.Generator().manual_seed(0)) * 100
    squares = x.reshape(4, 15, 10, 10).contiguous(memory_format=torch.channels_last)
    for view in (x.t(), x[::2, 1::3], x[:, :1].expand(-1, 5), x[0, 0], x[:0], squares, x.flatten()[1:]):
        kept, got = view.clone(), round_to(view, fmt, mode, generator=torch.Generator().manual_seed(4))
        assert (got.shape, got.dtype) == (view.shape, view.dtype)
        assert torch.equal(view, kept)
        assert got.stride() == torch.empty_like(view).stride()
        if mode != "stochastic":
            assert torch.equal(got, round_to(view.clone(memory_format=torch.contiguous_format), fmt, mode))
        out = torch.empty(*view.shape, 2).select(-1, 1)
        assert round_to(view, fmt, mode, out=out, generator=torch.Generator().manual_seed(4)) is out
        assert torch.equal(out, got)


@pytest.mark.parametrize("fmt", ALL, ids=named)
def test_blocks_leave_no_seams(fmt):
    block = BLOCK * torch.get_num_threads()
    size = 3 * block + 77
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    got = round_to(x, fmt)
    for start in (0, block - 50, 2 * block - 50, size - 100):
        part = slice(start, start + 100)
        assert torch.equal(got[part], round_to(x[part].clone(), fmt))


class NewStorages(TorchDispatchMode):
    """Sizes in bytes of all storages that operations create."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read on the host"
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.sizes[func] = max(self.sizes.get(func, 0), result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [FP16, TF32, E4M3FN, get_format("e7m22")], ids=named)
def test_with_out_there_is_little_extra_memory_and_no_host_read(fmt, mode, in_place):
    x = torch.randn(4 * BLOCK * torch.get_num_threads())
    out = x if in_place else torch.empty_like(x)
    with NewStorages() as new:
        round_to(x, fmt, mode, out=out)
    assert new.sizes
    # a block in float64; a handful live at a time
    assert max(new.sizes.values()) <= 8 * BLOCK * torch.get_num_threads()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: round_to(x.half(), FP16), TypeError, r"got torch.float16; call x.float\(\) first"),
        (lambda x: round_to(x, FP16, "nearest"), ValueError, "mode must be 'nearest_even'"),
        (lambda x: round_to(x, FP16, overflow="clip"), ValueError, "overflow must be 'inf'"),
        (lambda x: round_to(x, FP16, out=x.double()), TypeError, "out must be like x"),
        (lambda x: round_to(x, FP16, out=x[:1]), TypeError, "out must be like x"),
        (lambda x: round_to(x.numpy(), FP16), TypeError, r"got ndarray; torch.as_tensor\(x\) makes one"),
        (lambda x: ulp(x.half(), FP16), TypeError, "got torch.float16"),
    ],
)
def test_errors_say_what_was_needed(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(3))


# training through it


def test_quantize_hands_mode_and_overflow_to_both_ways():
    x = torch.tensor([1e6], requires_grad=True)
    y = quantize(x, FP16, E5M2, "up", "saturate")
    y.backward(torch.tensor([1e9]))
    assert (y.item(), x.grad.item()) == (65504.0, 57344.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it first meets a jvp
def test_quantize_in_transforms_rounds_the_tangent_to_the_gradients_format():
    x, t = torch.tensor([1.0001, 3.0]), torch.tensor([1.1, 1e9])
    for grad_fmt, want in ((None, t), (E5M2, torch.tensor([1.0, torch.inf]))):
        value, tangent = torch.func.jvp(lambda x, g=grad_fmt: quantize(x, FP16, g), (x,), (t,))
        assert torch.equal(value, round_to(x, FP16))
        assert torch.equal(tangent, want)
    rows = torch.tensor([[1.0001, 3.0], [2.0002, 5.0001], [7.0, 0.3]])
    columns = torch.func.vmap(lambda column: quantize(column, FP16), in_dims=1)(rows)
    assert torch.equal(columns, round_to(rows, FP16).T)


def test_quantize_can_be_differentiated_twice():
    x = torch.tensor([3.0], requires_grad=True)
    (first,) = torch.autograd.grad(quantize(x, FP16, FP16) ** 2, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (6.0, 2.0)


def test_round_to_writes_into_a_parameter_and_stops_the_gradient():
    p = torch.nn.Parameter(torch.tensor([1.0001]))
    assert not round_to(p, FP16).requires_grad
    assert round_to(p, FP16, out=p) is p
    assert p.item() == 1.0
    assert p.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [FP16, TF32, FloatFormat("never used before", 4, 3, "nan")], ids=named)
def test_compiled_as_one_graph_it_gives_the_same_bits(fmt):
    x = torch.cat([beside_every_tie(E4M3FN), random_patterns(1000, seed=1)])
    for mode in ("nearest_even", "down"):
        compiled = torch.compile(lambda t, mode=mode: round_to(t, fmt, mode), fullgraph=True, backend="aot_eager")
        assert mismatches(compiled(x), round_to(x, fmt, mode)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("fmt", ALL, ids=named)
def test_cuda_gives_the_same_bits(fmt, dtype):
    x = torch.cat([beside_every_tie(E5M2), random_patterns(200_000, seed=2)]).to(dtype)
    for mode, overflow in itertools.product(EXACT_MODES, OVERFLOWS):
        got = round_to(x.cuda(), fmt, mode, overflow=overflow).cpu()
        assert mismatches(got, round_to(x, fmt, mode, overflow=overflow)) == 0


@pytest.mark.gpu
def test_stochastic_rounding_on_cuda_has_the_right_mean_and_repeats():
    x = torch.full((1_000_000,), 1 + 0.25 * FP16.eps, device="cuda")
    pair = [round_to(x, FP16, "stochastic", generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
    assert torch.equal(*pair)
    ups = float((pair[0] > 1).double().mean())
    assert abs(ups - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1e6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [9, 2**13 + 1, 2**16 + 7, 200_001])
def test_a_seed_draws_the_same_with_any_number_of_threads(count, dtype):
    x = random_patterns(count, seed=3).nan_to_num(0.0).to(dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for some in (1, 2, 4):
            torch.set_num_threads(some)
            generator = torch.Generator().manual_seed(5)
            found.append(round_to(x, FP16, "stochastic", generator=generator))
            found[-1] = torch.cat([found[-1], torch.rand(1, generator=generator, dtype=dtype)])  # and it goes on alike
    finally:
        torch.set_num_threads(threads)
    assert mismatches(found[0], found[1]) == mismatches(found[0], found[2]) == 0


@pytest.mark.parametrize("fmt", [E4M3FN, BF16, TF32, FP16, FP32], ids=named)
@pytest.mark.parametrize("mode", MODES)
def test_a_view_that_stands_for_negated_memory_is_rounded_as_its_values(mode, fmt):
    x = torch.linspace(-400, 440, 31)
    seeds = [torch.Generator().manual_seed(3) for _ in range(3)]
    wanted = round_to(x, fmt, mode, generator=seeds[0])
    negated = (-x).clone()
    assert torch.equal(round_to(torch._neg_view(negated), fmt, mode, generator=seeds[1]), wanted)
    out = torch._neg_view(torch.empty_like(x))
    assert round_to(x, fmt, mode, generator=seeds[2], out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in tracing
@pytest.mark.parametrize(("fmt", "overflow"), [(E4M3FN, None), (E2M1, "inf"), (BF16, "nan"), (FP16, "inf")])
def test_compiled_rounding_takes_a_transposed_tensor(fmt, overflow):
    x = torch.linspace(-500, 70000, 12).reshape(3, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: quantize(x.T, fmt, fmt, overflow=overflow), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), quantize(x.T, fmt, fmt, overflow=overflow), rtol=0, atol=0, equal_nan=True)
