"""Emulated rounding: float32 or float64 tensors whose values fit a narrower format."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from mpkit.arguments import check_kind
from mpkit.formats import FloatFormat

__all__ = [
    "MODES",
    "OVERFLOWS",
    "quantize",
    "round_to",
    "rounding_error",
    "ulp",
]

Mode = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["inf", "nan", "saturate"]

MODES: tuple[Mode, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic")
OVERFLOWS: tuple[Overflow, ...] = ("inf", "nan", "saturate")
ROUNDING: ContextVar[tuple[Tensor, FloatFormat] | None] = ContextVar("ROUNDING", default=None)
"""What is being rounded, and to which format: for whoever watches operations, since the steps of a rounding are no
others'."""
BLOCK = 2**18
"""Values per core in a block: few calls, and a block of x, one of out and the scratch fit 4 MiB of a level-3 cache."""
WORDS = 2**16
"""Random numbers of 64 bits in one draw: fewer are more calls, and more do not stay in the cache."""
SEEDED = 2**13
"""Values: from this many on, a generator of the CPU seeds a faster one; below, making that costs more."""


def round_to(
    x: Tensor,
    fmt: FloatFormat,
    mode: Mode = "nearest_even",
    *,
    overflow: Overflow | None = None,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round each element of `x` to a value of `fmt`.

    Args:
        x:         the values to round.
        fmt:       the format whose values may come out.
        mode:      "nearest_even" and "nearest_away" (ties to the even fraction, or to the larger magnitude),
                   "toward_zero", "up" (toward +inf), "down" (toward -inf), or "stochastic": the neighbour above with
                   the probability that keeps the mean exact, subnormals included.
        overflow:  what stands for a value beyond `fmt.max`: "inf", "nan" or "saturate" (+-max); None: `fmt.overflow`.
                   float32 can show an inf or NaN that the format itself could not store.
        generator: source of the random bits of "stochastic", on the device of `x`.
        out:       where to write, of the shape, dtype and device of `x`; may be `x` itself or overlap it.
    Shapes:  x (*) float32 or float64 -> (*) same dtype and device; values fit `fmt`, storage does not shrink.
    Units:   one ulp is 2**(e - fmt.fraction_bits) for |x| in [2**e, 2**(e+1)); the nearest modes err <= ulp / 2.
    Edges:   NaN stays NaN and -0.0 stays -0.0, whatever the format; inf counts as beyond max. A directed mode
             turns a finite value beyond max into max when that lies in its direction. No gradient flows here; see
             `quantize`.
    Raises:  TypeError for another dtype or an `out` that does not match; ValueError for an unknown mode or overflow.
    Source:  IEEE 754-2019, 4.3 (rounding directions) and 7.4 (overflow).

    >>> from mpkit.formats import E5M2
    >>> round_to(torch.tensor([1.125, 1.375, 70000.0]), E5M2)   # two ties, one overflow
    tensor([1.0000, 1.5000,    inf])
    """
    _check(x, fmt)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if overflow is not None and overflow not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOWS)} or None, got {overflow!r}")
    if out is not None and _likeness(out) != _likeness(x):
        raise TypeError(f"out must be like x, {_likeness(x)}, got {_likeness(out)}; torch.empty_like(x) makes one")
    x, overflow = x.detach().resolve_neg(), overflow or fmt.overflow
    if torch.compiler.is_compiling():  # one fused kernel makes blocks and scratch space pointless
        with torch._C.DisableTorchFunction():  # after a graph break a mode sees what its own handler does
            rounded = _exact(x, fmt, mode, overflow, generator)
        return rounded if out is None else out.copy_(rounded)
    # in a context of its own: an interrupt at any moment leaves nothing behind
    return copy_context().run(_in_memory, x, fmt, mode, overflow, generator, out)


def _in_memory(
    x: Tensor,
    fmt: FloatFormat,
    mode: Mode,
    overflow: Overflow,
    generator: torch.Generator | None,
    out: Tensor | None,
) -> Tensor:
    ROUNDING.set((x, fmt))
    if out is None:
        out = torch.empty_like(x)
    elif _is_elsewhere_in(x, out):
        x = x.clone()  # a block written must not be one that is still to be read
    if x.numel():
        with torch.no_grad():
            # a stochastic one keeps its place among the random numbers
            kernel = (
                _kernel(x.dtype, fmt, mode, overflow, generator)
                if mode == "stochastic"
                else _kept(x.dtype, fmt, mode, overflow)
            )
            _by_blocks(x, out.detach(), kernel)
    return out


def _check(x: object, fmt: object) -> None:
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"fmt is a FloatFormat such as FP16 or get_format('e5m10'), got {fmt!r}")
    if not isinstance(x, Tensor):
        raise TypeError(f"need a float32 or float64 tensor, got {type(x).__name__}; torch.as_tensor(x) makes one")
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"formats are emulated inside float32 or float64, got {x.dtype}; call x.float() first")
    check_dense(x)


def check_dense(x: Tensor) -> None:
    """Raise TypeError for a tensor that is no array of numbers in memory, such as a sparse or a nested one."""
    check_kind("x", x, Tensor, "a tensor")
    if torch.compiler.is_compiling():  # a compiled backward may not ask for a layout
        return
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"need a dense tensor, got a {kind} one; give its values, or x.to_dense()")


def _likeness(t: object) -> object:
    return (tuple(t.shape), t.dtype, str(t.device)) if isinstance(t, Tensor) else t


def _is_elsewhere_in(x: Tensor, out: Tensor) -> bool:
    """Whether both lie in one memory and begin at different places.

    From one place with other strides, one of them is not contiguous: then `_by_blocks` writes elsewhere first.
    """
    return x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() and x.data_ptr() != out.data_ptr()


# blocks: whatever runs over a block several times finds it in the cache, and scratch space stays small

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(block of x, block of out, two scratch blocks) -> None, all of one shape and dtype; x and out are never the same."""


def _by_blocks(x: Tensor, out: Tensor, kernel: Kernel) -> None:
    """Run a kernel over x and out block by block, both walked in the memory order of x."""
    final = out
    if not (x.is_contiguous() and out.is_contiguous()) or out.is_neg():
        # in the order in which x lies in memory: else each block would be gathered from all of it
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        x, final = x.permute(order).contiguous(), out.permute(order)
    target = final if final.is_contiguous() and not final.is_neg() else torch.empty_like(x)
    whole, places = x.view(-1), target.view(-1)
    size = min(BLOCK * torch.get_num_threads() if x.is_cpu else 2**24, whole.numel())
    b, c = whole.new_empty(size), whole.new_empty(size)
    # splitting what is one block costs as much as a small rounding
    blocks = [(whole, places)] if size == whole.numel() else zip(whole.split(size), places.split(size))
    for block, result in blocks:
        count = block.numel()
        # in place: a kernel reads x again after it has written to out
        source = block.clone() if block.data_ptr() == result.data_ptr() else block
        kernel(source, result, *((b, c) if count == size else (b[:count], c[:count])))
    if target is not final:
        final.copy_(target)


def _kernel(
    dtype: torch.dtype, fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None
) -> Kernel:
    """The fastest exact way for this combination."""
    native = {torch.float32: (torch.float16, torch.bfloat16, torch.float32), torch.float64: (torch.float32,)}[dtype]
    special = fmt.specials == "ieee" or overflow != "inf"
    # the first way that serves: all are exact, and those that pass over memory least often come first
    if dtype == torch.float32 and mode not in ("nearest_even", "stochastic") and _serves_directions(fmt):
        return _directed_kernel(fmt, mode, overflow)
    if mode == "nearest_even" and fmt.torch_dtype in native:
        return _native_kernel(fmt, fmt.torch_dtype, overflow)
    if dtype == torch.float32 and mode in ("nearest_even", "stochastic") and special:
        if fmt.exponent_bits == 8 and fmt.fraction_bits < 23:
            return _integer_kernel(fmt, mode, overflow, generator)
        if fmt.exponent_bits < 8 and fmt.fraction_bits <= 20:
            return _shift_kernel(fmt, mode, overflow, generator)

    def kernel(x: Tensor, out: Tensor, _b: Tensor, _c: Tensor) -> None:
        out.copy_(_exact(x, fmt, mode, overflow, generator))

    return kernel


@cache
def _kept(dtype: torch.dtype, fmt: FloatFormat, mode: Mode, overflow: Overflow) -> Kernel:
    return _kernel(dtype, fmt, mode, overflow, None)


def _native_kernel(fmt: FloatFormat, native: torch.dtype, overflow: Overflow) -> Kernel:
    """torch's own cast there and back."""

    def kernel(x: Tensor, out: Tensor, b: Tensor, _c: Tensor) -> None:
        narrow = b.view(native)[: x.numel()]
        out.copy_(narrow.copy_(x))
        # the cast itself gives inf beyond the range
        if overflow == "saturate":
            out.clamp_(-fmt.max, fmt.max)
        elif overflow == "nan":
            out.add_(out, alpha=0)  # inf + 0 * inf

    return kernel


def _shift_kernel(fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None) -> Kernel:
    """Up to 7 exponent bits in float32: (x + C) - C, with C so large that the sum keeps just the bits of `fmt`.

    With e the exponent of x (at least that of the smallest normal, at most that of the largest) and
    C = 1.5 * 2**(e + 23 - m), x + C lies within [2**(e + 23 - m), 2**(e + 24 - m)), where float32 has gaps of
    2**(e - m): one ulp of `fmt`. So the addition itself rounds to nearest even, subnormals included, and the
    subtraction is exact. The 1.5 serves both signs. C is alpha times a power of two, so whether alpha is fused into
    the addition does not matter.

    Stochastic: noise from [-ulp / 2, ulp / 2) is added before rounding. With few fraction bits it goes straight to x,
    exact to 2**(m - 24) ulp. Else to x - h, where h = (x + C) - C: that difference is exact and at most ulp / 2, so the
    sum with the noise is exact to 2**-24 ulp, and adding it to h + C rounds once more.
    """
    low, high = ((e + 127) << 23 for e in (fmt.min_exponent, fmt.max_exponent))  # the float32 patterns of 2**e
    alpha, grain = 1.5 * 2.0 ** (23 - fmt.fraction_bits), 2.0 ** (-32 - fmt.fraction_bits)
    finite, largest, overflow_ = torch.finfo(torch.float32).max, fmt.max, _overflow_rule(fmt, overflow, torch.float32)
    draw, spare = _random_words(generator), torch.empty(0, device="cpu")

    def kernel(x: Tensor, out: Tensor, b: Tensor, c: Tensor) -> None:
        nonlocal spare
        power = b.view(torch.int32)
        torch.bitwise_and(x.view(torch.int32), 0x7F800000, out=power)
        # below the smallest normal the ulp is that of the subnormals, above the largest that of the largest
        power.clamp_(low, high)
        within = mode == "stochastic" and _within(x, largest)  # saves three passes; nearest even would save one
        if mode == "nearest_even":
            torch.add(x, b, alpha=alpha, out=out)
        else:
            if fmt.fraction_bits <= 4:
                torch.addcmul(x, draw(c, torch.int32), b, value=grain, out=out).add_(b, alpha=alpha)
            else:
                torch.add(x, b, alpha=alpha, out=out)
                if not within:
                    out.clamp_(-finite, finite)  # or inf - inf
                # out is C + h, so c becomes h - x: what nearest even rounded off, with the sign turned
                torch.sub(out, b, alpha=alpha, out=c).sub_(x)
                if spare.numel() < x.numel():
                    spare = torch.empty_like(x)
                c.addcmul_(draw(spare[: x.numel()], torch.int32), b, value=grain)
                out.sub_(c)
        out.sub_(b, alpha=alpha)
        if not within:
            overflow_(out, b)
        # what was rounded to zero from below came out as +0
        out.copysign_(x)

    return kernel


def _integer_kernel(fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None) -> Kernel:
    """8 exponent bits in float32: the same exponents, so rounding drops a fixed number of bits, subnormals included.

    Adding to the pattern carries from fraction to exponent and at last to inf, as rounding must.
    """
    dropped = 23 - fmt.fraction_bits
    mask = 2**dropped - 1
    finite, largest, overflow_ = torch.finfo(torch.float32).max, fmt.max, _overflow_rule(fmt, overflow, torch.float32)
    draw = _random_words(generator)

    def kernel(x: Tensor, out: Tensor, b: Tensor, c: Tensor) -> None:
        bits, pattern = x.view(torch.int32), c.view(torch.int32)
        if mode == "stochastic":
            draw(pattern, torch.int16 if dropped <= 16 else torch.int32).bitwise_and_(mask)
            if _within(x, largest):  # saves two passes
                torch.add(bits, pattern, out=out.view(torch.int32)).bitwise_and_(~mask)
                return
        else:
            # half an ulp less one unit, plus the lowest bit that is kept: a tie carries only out of an odd pattern
            torch.bitwise_right_shift(bits, dropped, out=pattern)
            pattern.bitwise_and_(1).add_(mask >> 1)
        pattern.add_(bits).bitwise_and_(~mask)
        torch.clamp(x, -finite, finite, out=b)
        # 0 * NaN: the patterns of NaNs have lost their meaning; everything else gains a zero of its own sign
        torch.add(c, b, alpha=0, out=out)
        if overflow != "inf":
            overflow_(out, b)

    return kernel


def _serves_directions(fmt: FloatFormat) -> bool:
    """Whether `_directed_kernel` serves a format: its arithmetic neither overflows nor underflows in float32."""
    if fmt.exponent_bits == 8:
        return fmt.fraction_bits < 23
    unit = fmt.min_subnormal
    return fmt.exponent_bits < 8 and fmt.fraction_bits <= 20 and 2.0**-125 <= unit <= 1 and fmt.max / unit < 2.0**126


def _directed_kernel(fmt: FloatFormat, mode: Mode, overflow: Overflow) -> Kernel:
    """The modes that look at a direction, in float32, for a block on a CPU that holds numbers up to `fmt.max` only.

    Clearing the lowest bits of a float32 pattern rounds its magnitude down; adding to the pattern first gives the
    other directions, and a carry goes to the exponent as rounding must. With 8 exponent bits that is all. With fewer,
    `fmt` has subnormals where float32 has none, so the numbers are first rounded in the same direction to multiples of
    the smallest value of `fmt`: rounding twice in one direction is rounding once, since every value is such a multiple.
    Nearest away does that in halves of it, toward zero, which moves nothing past a value or a tie. The bits that are
    cleared then are those of normal numbers; a subnormal that still ends in a half is a tie. float16 has torch's own
    cast to nearest even: with its lowest bit set a tie goes away from zero, and no value or tie has a one there.
    Everything else, NaN and what overflows, goes the long way.
    """
    fewest = _cast_of_odd if mode == "nearest_away" and fmt.torch_dtype is torch.float16 else None
    short, largest = fewest or _clearing(fmt, mode), fmt.max

    def kernel(x: Tensor, out: Tensor, b: Tensor, c: Tensor) -> None:
        if _within(x, largest):
            short(x, out, b, c)
        else:
            out.copy_(_exact(x, fmt, mode, overflow, None))

    return kernel


def _cast_of_odd(x: Tensor, out: Tensor, b: Tensor, _c: Tensor) -> None:
    torch.bitwise_or(x.view(torch.int32), 1, out=out.view(torch.int32))
    out.copy_(b.view(torch.float16)[: x.numel()].copy_(out))


def _clearing(fmt: FloatFormat, mode: Mode) -> Kernel:
    mask, unit = 2 ** (23 - fmt.fraction_bits) - 1, fmt.min_subnormal

    def in_units(x: Tensor, out: Tensor) -> Tensor:
        if mode in ("toward_zero", "nearest_away"):
            step = unit / 2 if mode == "nearest_away" else unit
            return torch.div(x, step, rounding_mode="trunc", out=out)  # trunc_ alone is not vectorised
        torch.mul(x, 1 / unit, out=out)
        return out.ceil_() if mode == "up" else out.floor_()

    def clear(bits: Tensor, out: Tensor, side: Tensor) -> None:
        if mode == "toward_zero":
            torch.bitwise_and(bits, ~mask, out=out)
            return
        if mode == "nearest_away":
            torch.add(bits, (mask + 1) // 2, out=out)
        elif mode == "up":
            torch.add(bits, torch.clamp(bits, 0, 1, out=side), alpha=mask, out=out)  # 1 where positive
        else:
            torch.sub(bits, torch.clamp(bits, -1, 0, out=side), alpha=mask, out=out)  # -1 where negative
        out.bitwise_and_(~mask)

    def kernel(x: Tensor, out: Tensor, b: Tensor, _c: Tensor) -> None:
        narrow, pattern = fmt.exponent_bits < 8, out.view(torch.int32)
        clear((in_units(x, out) if narrow else x).view(torch.int32), pattern, b.view(torch.int32))
        if narrow and mode == "nearest_away":
            out.mul_(0.5)
            pattern.bitwise_or_(1)  # a tie is now nearer to the side away from zero; the others go back
            out.round_()
            pattern.bitwise_and_(~mask)  # from 2**23 on nothing was rounded
        if narrow:
            out.mul_(unit)

    return kernel


def _within(x: Tensor, largest: float) -> bool:
    """Whether a block lies on a CPU, where a look at numbers waits for nothing, and none is beyond `largest`."""
    if not x.is_cpu:
        return False
    least, most = x.aminmax()
    return bool(-largest <= least.numpy() and most.numpy() <= largest)  # not so with a NaN


def _random_words(generator: torch.Generator | None) -> Callable[[Tensor, torch.dtype], Tensor]:
    """A function (target, int16 or int32) that fills a float32 or int32 tensor with random integers of that many bits.

    On a GPU, and where the first target is small, the bits are the generator's own. Otherwise the generator seeds
    NumPy's SFC64, four times as fast. One draw of 64 bits serves two elements or four, and the draws follow each other
    whatever the size of the blocks, so a seed gives the same numbers with any number of threads.
    """
    fast: np.random.Generator | None = None
    begun = False

    def words(x: Tensor, count: int) -> Tensor:
        if fast is not None:
            return torch.from_numpy(fast.integers(-(2**63), 2**63 - 1, count, dtype=np.int64, endpoint=True))
        return torch.empty(count, dtype=torch.int64, device=x.device).random_(-(2**63), None, generator=generator)

    def fill(target: Tensor, bits: torch.dtype) -> Tensor:
        nonlocal begun, fast
        if not begun and target.is_cpu and type(target) is Tensor and target.numel() >= SEEDED:
            seed = torch.empty((), dtype=torch.int64, device="cpu").random_(0, None, generator=generator)
            fast = np.random.Generator(np.random.SFC64(int(seed.numpy())))
        begun = True
        per_word = 64 // bits.itemsize // 8
        for part in target.split(per_word * WORDS if target.is_cpu else target.numel()):
            part.copy_(words(target, -(-part.numel() // per_word)).view(bits)[: part.numel()])
        return target

    return fill


def _overflow_rule(fmt: FloatFormat, overflow: Overflow, dtype: torch.dtype) -> Callable[[Tensor, Tensor], object]:
    """A function (values, scratch) that applies the rule in place to values on the grid of `fmt`, perhaps beyond max.

    Multiplying until max is next to the largest number of the dtype finds them without a comparison, which would
    cost several times as much on a CPU.
    """
    largest, most = torch.finfo(dtype).max, fmt.max
    to_top = 2.0 ** (math.frexp(largest)[1] - 1 - fmt.max_exponent)
    factor = largest / fmt.overflow_edge  # +-inf just where |values| > max

    def apply_(values: Tensor, scratch: Tensor) -> object:
        if overflow == "saturate":
            return values.clamp_(-most, most)
        if overflow == "inf" and fmt.specials == "ieee":
            return values.mul_(to_top).mul_(1 / to_top)
        # the compiler takes contiguous tensors only as an `out`
        scratch = values * factor if torch.compiler.is_compiling() else torch.mul(values, factor, out=scratch)
        return values.add_(scratch, alpha=0) if overflow == "nan" else values.add_(_infinite_part(scratch))

    return apply_


def _infinite_part(x: Tensor) -> Tensor:
    """0 for finite elements; inf, -inf and NaN stay."""
    largest = torch.finfo(x.dtype).max
    return x - x.clamp(-largest, largest)


def _exact(x: Tensor, fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None) -> Tensor:
    """Every mode and format in float64: divide by the gap, round to an integer, multiply; all but the second exact."""
    wide = x.double()
    if fmt.bits == 64:
        rounded = wide.clone()
    else:
        gap = _gap(wide, fmt)
        rounded = _to_integer(wide / gap, mode, generator) * gap
    low = -fmt.max if mode in ("toward_zero", "up") else -torch.inf
    high = fmt.max if mode in ("toward_zero", "down") else torch.inf
    rounded = rounded.clamp(low, high) + _infinite_part(wide)  # a directed mode stops at max, but inf is no rounding
    if fmt.bits < 64:
        _overflow_rule(fmt, overflow, rounded.dtype)(rounded, torch.empty_like(rounded))
    elif overflow == "saturate":
        largest = torch.finfo(x.dtype).max
        rounded.clamp_(-largest, largest)
    elif overflow == "nan":
        rounded.add_(rounded, alpha=0)
    return torch.copysign(rounded, wide).to(x.dtype)


def _to_integer(y: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    if mode == "nearest_even":
        return y.round()
    if mode == "nearest_away":  # the number before 0.5: 0.5 itself would carry 0.49999999999999994 to 1
        y = y + torch.copysign(y.new_tensor(math.nextafter(0.5, 0.0)), y)
    if mode in ("nearest_away", "toward_zero"):
        return torch.div(y, 1.0, rounding_mode="trunc")  # trunc() alone is not vectorised
    if mode == "up":
        return y.ceil()
    whole = y.floor()
    if mode == "down":
        return whole
    noise = torch.rand(y.shape, dtype=y.dtype, device=y.device, generator=generator)
    return whole + ((y - whole).nan_to_num(0.0) + noise).floor()  # inf - inf


def _gap(wide: Tensor, fmt: FloatFormat) -> Tensor:
    """float64 -> the gap of `fmt` around each element, from the exponent bits; float64."""
    exponent = (wide.abs().view(torch.int64) >> 52).clamp(fmt.min_exponent + 1023, fmt.max_exponent + 1023)
    return (exponent << 52).view(torch.float64) * 2.0**-fmt.fraction_bits


def ulp(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Gap between the values of `fmt` around each element: 2**(e - fraction_bits) for |x| in [2**e, 2**(e+1)).

    Shapes:  x (*) float32 or float64 -> (*) same dtype.
    Edges:   the gap never falls below `fmt.min_subnormal` and does not grow beyond `fmt.max`; NaN gives NaN.
    Raises:  TypeError for another dtype.

    >>> from mpkit.formats import FP16
    >>> ulp(torch.tensor([1.0, 2048.0, 0.0]), FP16)
    tensor([9.7656e-04, 2.0000e+00, 5.9605e-08])
    """
    _check(x, fmt)
    return _gap(x.detach().double(), fmt).masked_fill(x.isnan(), torch.nan).to(x.dtype)


def rounding_error(x: Tensor, fmt: FloatFormat, mode: Mode = "nearest_even") -> Tensor:
    """What rounding adds to each element: round_to(x, fmt, mode) - x; (*) -> (*) same dtype.

    Exact in the nearest modes; in the others where the gap of `fmt` is below 2**24 |x| (float64: 2**53).
    """
    return round_to(x, fmt, mode) - x.detach()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: FloatFormat, grad_fmt: FloatFormat | None, mode: Mode, overflow: Overflow | None
    ) -> Tensor:
        ctx.grad_rule = (grad_fmt, mode, overflow)
        return round_to(x, fmt, mode, overflow=overflow)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_fmt, mode, overflow = ctx.grad_rule
        grad = grads[0] if grad_fmt is None else quantize(grads[0], grad_fmt, None, mode, overflow)
        return grad, None, None, None, None


class _InTransforms(torch.autograd.Function):
    """The same inside `torch.func` (vmap, grad, jvp), which wants another shape of Function that costs more."""

    @staticmethod
    def forward(
        x: Tensor, fmt: FloatFormat, grad_fmt: FloatFormat | None, mode: Mode, overflow: Overflow | None
    ) -> Tensor:
        return round_to(x, fmt, mode, overflow=overflow)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.grad_rule = inputs[2:]

    backward = _StraightThrough.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        grad_fmt, mode, overflow = ctx.grad_rule
        return tangents[0] if grad_fmt is None else quantize(tangents[0], grad_fmt, None, mode, overflow)

    @staticmethod
    def vmap(info: object, in_dims: tuple[int | None, ...], x: Tensor, *rule: object) -> tuple[Tensor, int | None]:
        return _InTransforms.apply(x, *rule), in_dims[0]


def quantize(
    x: Tensor,
    fmt: FloatFormat,
    grad_fmt: FloatFormat | None = None,
    mode: Mode = "nearest_even",
    overflow: Overflow | None = None,
) -> Tensor:
    """`round_to` that training can go through: the gradient passes straight, rounded to `grad_fmt` when given.

    Shapes:  x (*) float32 or float64 -> (*) same dtype; the gradient has the shape of `x`.
    Source:  the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432.
    """
    if grad_fmt is not None and not isinstance(grad_fmt, FloatFormat):
        raise TypeError(f"grad_fmt is a FloatFormat or None (gradients stay as they are), got {grad_fmt!r}")
    transformed = not torch.compiler.is_compiling() and peek_interpreter_stack() is not None
    return (_InTransforms if transformed else _StraightThrough).apply(x, fmt, grad_fmt, mode, overflow)
