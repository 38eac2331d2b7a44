"""Emulated rounding: float32 or float64 tensors whose values fit a narrower format."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from mpkit.arguments import check_choice, check_count, check_kind
from mpkit.formats import FloatFormat

__all__ = ["MODES", "OVERFLOWS", "TOLD", "quantize", "round_to", "rounding_error", "ulp"]

Mode = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["inf", "nan", "saturate"]

MODES: tuple[Mode, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic")
OVERFLOWS: tuple[Overflow, ...] = ("inf", "nan", "saturate")
ROUNDING: ContextVar[tuple[Tensor, FloatFormat] | None] = ContextVar("ROUNDING", default=None)
"""What is being rounded, and to which format: for whoever watches operations, since the steps of a rounding are no
others'."""
TOLD: ContextVar[Callable[[Tensor, FloatFormat, Tensor], object] | None] = ContextVar("TOLD", default=None)
"""Who is told of each rounding, once, when it is done: called with the values, the format and what they became."""
BLOCK = 2**18
"""Values per core in a block: few calls, and a block of x, one of out and the scratch fit 4 MiB of a level-3 cache."""


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
    Edges:   NaN stays NaN; -0.0 stays -0.0 unless `fmt` has no minus zero; inf counts as beyond max. A directed mode
             turns a finite value beyond max into max when that lies in its direction. What is below 0 is beyond an
             unsigned format: it becomes NaN, or 0 by "saturate". No gradient flows here; see `quantize`.
    Raises:  TypeError for another dtype or an `out` that does not match; ValueError for an unknown mode or overflow.
    Source:  IEEE 754-2019, 4.3 (rounding directions) and 7.4 (overflow).

    >>> from mpkit.formats import E5M2
    >>> round_to(torch.tensor([1.125, 1.375, 70000.0]), E5M2)   # two ties, one overflow
    tensor([1.0000, 1.5000,    inf])
    """
    _check(x, fmt)
    if mode not in MODES:
        check_choice("mode", mode, MODES)
    if overflow is not None and overflow not in OVERFLOWS:
        check_choice("overflow", overflow, OVERFLOWS)
    if out is not None and out is not x and _likeness(out) != _likeness(x):
        raise TypeError(f"out must be like x, {_likeness(x)}, got {_likeness(out)}; torch.empty_like(x) makes one")
    x, overflow = x.detach().resolve_neg(), overflow or fmt.overflow
    if torch.compiler.is_compiling():  # one fused kernel makes blocks and scratch space pointless
        with torch._C.DisableTorchFunction():  # after a graph break a mode sees what its own handler does
            rounded = _exact(x, fmt, mode, overflow, generator)
        return rounded if out is None else out.copy_(rounded)
    kernel = _nearest_even(x.dtype, fmt, overflow) if mode == "nearest_even" else None
    kernel = kernel or _long_way(fmt, mode, overflow, generator)
    if (tell := TOLD.get()) is None:
        return _in_memory(x, out, kernel)
    given = x if out is None else x.clone()  # which may be written over
    # in a context of its own: an interrupt at any moment leaves nothing behind
    rounded = copy_context().run(_watched, x, out, kernel, fmt)
    tell(given, fmt, rounded)
    return rounded


def _watched(x: Tensor, out: Tensor | None, kernel: Kernel, fmt: FloatFormat) -> Tensor:
    ROUNDING.set((x, fmt))
    return _in_memory(x, out, kernel)


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


def check_dim(x: Tensor, dim: int) -> int:
    """Raise unless `x` is a dense float tensor that has this dim; -> the dim, counted from the end."""
    check_dense(x)
    if not x.is_floating_point():
        raise TypeError(f"x must be a float tensor, got {x.dtype}; call x.float() first")
    check_count("dim", dim, -x.dim())
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in [{-x.dim()}, {x.dim() - 1}] for shape {tuple(x.shape)}, got {dim}")
    return dim % x.dim() - x.dim()


def _likeness(t: object) -> object:
    return (t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t


def _is_elsewhere_in(x: Tensor, out: Tensor) -> bool:
    """Whether both lie in one memory and begin at different places.

    From one place with other strides, one of them is not contiguous: then `_in_memory` writes elsewhere first.
    """
    return x.data_ptr() != out.data_ptr() and x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


# blocks: whatever runs over a block several times finds it in the cache, and scratch space stays small

Kernel = Callable[[Tensor, Tensor], object]
"""(block of x, block of out) -> None, both of one shape and dtype; they may be the same."""


def _in_memory(x: Tensor, out: Tensor | None, kernel: Kernel) -> Tensor:
    """Run a kernel over x and out block by block, both walked in the memory order of x; -> out."""
    if out is not None and _is_elsewhere_in(x, out):
        x = x.clone()  # a block written must not be one that is still to be read
    final = torch.empty_like(x) if out is None else out
    places = final.detach()
    size = BLOCK * torch.get_num_threads() if x.is_cpu else 2**24
    if x.is_contiguous() and places.is_contiguous() and not places.is_neg():
        blocks = [(x, places)] if x.numel() <= size else zip(x.view(-1).split(size), places.view(-1).split(size))
        for block, result in blocks:
            kernel(block, result)
        return final
    # in the order in which x lies in memory: else each block would be gathered from all of it
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    places.permute(order).copy_(_in_memory(x.permute(order).contiguous(), None, kernel))
    return final


def _long_way(fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None) -> Kernel:
    return lambda x, out: out.copy_(_exact(x, fmt, mode, overflow, generator))


@cache
def _nearest_even(dtype: torch.dtype, fmt: FloatFormat, overflow: Overflow) -> Kernel | None:
    """The fastest exact way to nearest even, what every cast of a training does; None: the long one."""
    native = {torch.float32: (torch.float16, torch.bfloat16, torch.float32), torch.float64: (torch.float32,)}[dtype]
    if fmt.torch_dtype in native:
        return _native_kernel(fmt, fmt.torch_dtype, overflow)
    if dtype != torch.float32 or not fmt.signed:
        return None
    if fmt.specials == "ieee" and (fmt.min_exponent, fmt.max_exponent) == (-126, 127) and fmt.fraction_bits < 23:
        return _integer_kernel(fmt, overflow)
    # the sum of the shift has to be a normal float32; without fraction bits even means another thing
    room = 0 <= fmt.max_exponent < 104 + fmt.fraction_bits  # then the smallest normal is at least 2**-126
    return _shift_kernel(fmt, overflow) if room and 1 <= fmt.fraction_bits <= 20 else None


def _native_kernel(fmt: FloatFormat, native: torch.dtype, overflow: Overflow) -> Kernel:
    """torch's own cast there and back."""

    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(x.to(native))
        # the cast itself gives inf beyond the range
        if overflow == "saturate":
            out.clamp_(-fmt.max, fmt.max)
        elif overflow == "nan":
            out.add_(out, alpha=0)  # inf + 0 * inf

    return kernel


def _shift_kernel(fmt: FloatFormat, overflow: Overflow) -> Kernel:
    """Fewer exponents than float32 has: (x + C) - C, with C so large that the sum keeps just the bits of `fmt`.

    With e the exponent of x (at least that of the smallest normal, at most that of the largest) and
    C = 1.5 * 2**(e + 23 - m), x + C lies within [2**(e + 23 - m), 2**(e + 24 - m)), where float32 has gaps of
    2**(e - m): one ulp of `fmt`. So the addition itself rounds to nearest even, subnormals included, and the
    subtraction is exact. The 1.5 serves both signs. C is alpha times a power of two, so whether alpha is fused into
    the addition does not matter.
    """
    low, high = ((e + 127) << 23 for e in (fmt.min_exponent, fmt.max_exponent))  # the float32 patterns of 2**e
    alpha, overflow_ = 1.5 * 2.0 ** (23 - fmt.fraction_bits), _overflow_rule(fmt, overflow, torch.float32)

    def kernel(x: Tensor, out: Tensor) -> None:
        # below the smallest normal the ulp is that of the subnormals, above the largest that of the largest
        power = x.view(torch.int32).bitwise_and(0x7F800000).clamp_(low, high).view(torch.float32)
        rounded = torch.add(x, power, alpha=alpha).sub_(power, alpha=alpha)
        overflow_(rounded, power)
        # what was rounded to zero from below came out as +0
        torch.copysign(rounded, x, out=out) if fmt.has_minus_zero else out.copy_(rounded)

    return kernel


def _integer_kernel(fmt: FloatFormat, overflow: Overflow) -> Kernel:
    """The exponents of float32 itself: rounding drops a fixed number of bits, subnormals included.

    Adding to the pattern carries from fraction to exponent and at last to inf, as rounding must.
    """
    dropped = 23 - fmt.fraction_bits
    mask = 2**dropped - 1
    finite, overflow_ = torch.finfo(torch.float32).max, _overflow_rule(fmt, overflow, torch.float32)

    def kernel(x: Tensor, out: Tensor) -> None:
        bits = x.view(torch.int32)
        # half an ulp less one unit, plus the lowest bit that is kept: a tie carries only out of an odd pattern
        pattern = bits.bitwise_right_shift(dropped).bitwise_and_(1).add_(mask >> 1).add_(bits).bitwise_and_(~mask)
        scratch = x.clamp(-finite, finite)
        # 0 * NaN: the patterns of NaNs have lost their meaning; everything else gains a zero of its own sign
        torch.add(pattern.view(torch.float32), scratch, alpha=0, out=out)
        if overflow != "inf":
            overflow_(out, scratch)

    return kernel


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
    least = -fmt.max if fmt.signed else 0.0
    if fmt.bits == 64:
        rounded = wide.clone()
    else:
        gap = _gap(wide, fmt)
        y = wide / gap
        whole = _to_integer(y, mode, generator)
        if (
            mode == "nearest_even" and fmt.fraction_bits == 0
        ):  # the even one of two powers of two is that of the pattern
            lower_is_odd = ((gap.view(torch.int64) >> 52) - 1023 + fmt.bias) & 1
            whole = torch.where(y.abs() == 1.5, torch.copysign(1.0 + lower_is_odd, y), whole)
        rounded = whole * gap
    low = least if mode in ("toward_zero", "up") else -torch.inf
    high = fmt.max if mode in ("toward_zero", "down") else torch.inf
    rounded = rounded.clamp(low, high) + _infinite_part(wide)  # a directed mode stops at max, but inf is no rounding
    if fmt.bits < 64:
        _overflow_rule(fmt, overflow, rounded.dtype)(rounded, torch.empty_like(rounded))
    elif overflow == "saturate":
        largest = torch.finfo(x.dtype).max
        rounded.clamp_(-largest, largest)
    elif overflow == "nan":
        rounded.add_(rounded, alpha=0)
    if not fmt.signed:
        rounded = rounded.clamp(min=0.0) if overflow == "saturate" else rounded.masked_fill(rounded < 0, torch.nan)
    rounded = torch.copysign(rounded, wide) if fmt.has_minus_zero else rounded + 0.0  # -0 + 0 is +0
    return rounded.to(x.dtype)


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
    """In the shape that `torch.func` (vmap, grad, jvp) wants too."""

    @staticmethod
    def forward(
        x: Tensor, fmt: FloatFormat, grad_fmt: FloatFormat | None, mode: Mode, overflow: Overflow | None
    ) -> Tensor:
        return round_to(x, fmt, mode, overflow=overflow)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.grad_rule = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _StraightThrough.jvp(ctx, *grads), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        grad_fmt, mode, overflow = ctx.grad_rule
        return tangents[0] if grad_fmt is None else quantize(tangents[0], grad_fmt, None, mode, overflow)

    @staticmethod
    def vmap(info: object, in_dims: tuple[int | None, ...], x: Tensor, *rule: object) -> tuple[Tensor, int | None]:
        return _StraightThrough.apply(x, *rule), in_dims[0]


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
    return _StraightThrough.apply(x, fmt, grad_fmt, mode, overflow)
