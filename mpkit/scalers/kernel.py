"""The rule as torch's fused scale-update kernel: a backend of `policies.advance`, and the proof of when it may be used.

`advance` on 0-d tensors costs twenty small launches, the kernel and a bound cost two. The kernel knows one scale in
float32 and one counter; it computes `scale * factor` in double precision and rounds once, as `advance` does, and it
refuses a growth that is not finite. Everything else that a policy may ask for has to be absent, or follow from that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.policies import ScalePolicy
from mpkit.policies.rule import FLOAT32_MAX, SMALLEST_NORMAL

_ROOM = 64  # powers of two by which a scale is moved down where growth past the largest float32 must give inf
# 0-d CPU tensors are arguments of a kernel on any device, and cheaper than Python numbers, which torch wraps each time
_DOWN, _UP = (torch.tensor(factor, dtype=torch.float32) for factor in (2.0**-_ROOM, 2.0**_ROOM))


class FusedRule(NamedTuple):
    """A policy that the kernel covers, as the kernel's numbers; made by `fused_rule`.

    growth, backoff, interval:  the arguments of the kernel.
    floor, cap:                 bounds afterwards; 0 and inf are none.
    room:                       growth past the largest float32 gives inf, which the kernel by itself refuses.
    """

    growth: float
    backoff: float
    interval: int
    floor: float
    cap: float
    room: bool

    def advance_(self, scale: Tensor, good: Tensor, found_inf: Tensor) -> None:
        """One step, in place: () or (1,) float32 `scale`, () int32 `good` (finite steps), () float32 flag 0 or 1."""
        growth, backoff, interval, floor, cap, room = self
        if room:
            scale.mul_(_DOWN)
        # torch has no public name for the kernel of its GradScaler
        torch._amp_update_scale_(scale, good, found_inf, growth, backoff, interval)
        if room:
            scale.mul_(_UP)
        if floor == 1.0 and cap == math.inf:
            torch.maximum(scale, found_inf, out=scale)  # the flag is the floor, and only where the scale was lowered
        elif floor or cap < math.inf:
            scale.clamp_(floor, cap)


def fused_rule(p: ScalePolicy) -> FusedRule | None:
    """`p` in the numbers of the kernel, or None where the kernel does not do all that the policy asks for."""
    if p.shape or not p.growth_interval < 2**31:  # the counter of the kernel has 32 bits
        return None
    backoff = p.backoff_factor / p.backoff_divisor
    rising, lowest = backoff <= 1 <= p.growth_factor, min(p.init_scale, p.min_scale)
    # growth out of range: refused by the kernel, or cut to a cap that it can reach, or inf in the room below
    free, room = p.max_scale == math.inf, not p.hold_at_overflow
    roomy = free and rising and p.growth_factor <= 2.0**_ROOM and lowest >= 2.0 ** (_ROOM - 126)
    reached = free or p.max_scale * p.growth_factor <= FLOAT32_MAX
    # a clamp acts after every step, the policy's bounds after a change of their own direction: the same inside them
    inside = rising and p.min_scale <= p.init_scale <= p.max_scale
    bounded = inside or (free and p.min_scale in (0, 1))
    # the other fields have to be those of a policy that asks for nothing more
    settings = ("init_scale", "growth_factor", "backoff_factor", "backoff_divisor", "growth_interval", "min_scale")
    plain = replace(
        ScalePolicy(**{key: getattr(p, key) for key in (*settings, "max_scale", "name")}),
        hold_at_overflow=p.hold_at_overflow,
        growth_ge=p.growth_ge,  # counted up from 0 the interval is met and never passed, and one below 1 is met at once
        flush_subnormal=p.flush_subnormal and rising and lowest >= SMALLEST_NORMAL,  # nothing is left to flush
        raise_at_min=p.raise_at_min,  # for the caller to see: it moves nothing
    )
    if p != plain or not _same_quotient(p) or not (reached and bounded and (roomy or not room)):
        return None
    interval = max(p.growth_interval, 1 if p.growth_ge else 0)
    return FusedRule(p.growth_factor, backoff, interval, p.min_scale, p.max_scale, room)


def _same_quotient(p: ScalePolicy) -> bool:
    """Whether scale * (factor / divisor), rounded to float32, is (scale * factor) / divisor, rounded.

    So it is for a power of two, which rounds nothing. And for whole divisors d < 2^24 of a normal result: two roundings
    in double precision leave the product within 2^-52 of the quotient, and a quotient of a float32 by d comes no nearer
    than 2^-49 to a point between two float32 (their 25-bit middle times d would have to equal 24 bits).
    """
    if math.frexp(p.backoff_divisor)[0] == 0.5:
        return True
    whole = p.backoff_divisor < 2**24 and p.backoff_divisor == int(p.backoff_divisor)
    return whole and p.backoff_factor == 1 and p.min_scale >= SMALLEST_NORMAL
