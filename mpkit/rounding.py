"""Emulated rounding: float32 or float64 tensors whose values fit a narrower format."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mpkit.formats import FloatFormat

Mode = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["inf", "nan", "saturate"]

MODES: tuple[Mode, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic")
OVERFLOWS: tuple[Overflow, ...] = ("inf", "nan", "saturate")


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
        out:       where to write, of the shape, dtype and device of `x`; may be `x` itself.
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
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"round_to emulates formats inside float32 or float64, got {x.dtype}; call x.float() first")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if overflow is not None and overflow not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOWS)} or None, got {overflow!r}")
    x = x.detach()
    result = _round_plain(x, fmt, mode, overflow or fmt.overflow, generator)
    return result if out is None else out.copy_(result)


def _round_plain(
    x: Tensor, fmt: FloatFormat, mode: Mode, overflow: Overflow, generator: torch.Generator | None
) -> Tensor:
    if fmt.bits == 64:
        rounded = x.clone()
    else:
        wide = x.double()
        step = ulp(wide, fmt)
        rounded = _to_integer(wide / step, mode, generator) * step
    over = rounded.abs() > fmt.max
    limit = rounded.new_full((), {"inf": torch.inf, "nan": torch.nan, "saturate": fmt.max}[overflow])
    beyond = torch.where(_points_inward(x, mode) & x.isfinite(), rounded.new_full((), fmt.max), limit)
    return torch.where(over, torch.copysign(beyond, rounded), rounded).to(x.dtype)


def _points_inward(x: Tensor, mode: Mode) -> Tensor:
    if mode == "up":
        return x < 0
    if mode == "down":
        return x > 0
    return torch.full_like(x, mode == "toward_zero", dtype=torch.bool)


def _to_integer(y: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    if mode == "nearest_even":
        return y.round()
    if mode == "up":
        return y.ceil()
    if mode == "down":
        return y.floor()
    whole = y.trunc()
    if mode == "toward_zero":
        return whole
    rest = (y - whole).abs()
    if mode == "nearest_away":
        further = rest >= 0.5
    else:
        further = torch.rand(y.shape, dtype=y.dtype, device=y.device, generator=generator) < rest
    return torch.copysign(whole.abs() + further, y)


def ulp(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Gap between the values of `fmt` around each element: 2**(e - fraction_bits) for |x| in [2**e, 2**(e+1)).

    Shapes:  x (*) float32 or float64 -> (*) same dtype.
    Edges:   the gap never falls below `fmt.min_subnormal` and does not grow beyond `fmt.max`; NaN gives NaN.

    >>> from mpkit.formats import FP16
    >>> ulp(torch.tensor([1.0, 2048.0, 0.0]), FP16)
    tensor([9.7656e-04, 2.0000e+00, 5.9605e-08])
    """
    exponent = ((x.double().abs().view(torch.int64) >> 52) - 1023).clamp(fmt.min_exponent, fmt.max_exponent)
    gap = ((exponent - fmt.fraction_bits + 1023) << 52).view(torch.float64)
    return gap.masked_fill(x.isnan(), torch.nan).to(x.dtype)


def rounding_error(x: Tensor, fmt: FloatFormat, mode: Mode = "nearest_even") -> Tensor:
    """What rounding adds to each element: round_to(x, fmt, mode) - x, exact; (*) -> (*) same dtype."""
    return round_to(x, fmt, mode) - x.detach()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: FloatFormat, grad_fmt: FloatFormat | None, mode: Mode, overflow: Any
    ) -> Tensor:
        ctx.grad_rule = (grad_fmt, mode, overflow)
        return round_to(x, fmt, mode, overflow=overflow)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_fmt, mode, overflow = ctx.grad_rule
        grad = grads[0] if grad_fmt is None else round_to(grads[0], grad_fmt, mode, overflow=overflow)
        return grad, None, None, None, None


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
    return _StraightThrough.apply(x, fmt, grad_fmt, mode, overflow)
