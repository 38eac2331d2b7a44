"""The one rule of dynamic loss scaling, and what every framework makes of it.

A loss scale is a number that grows after a run of finite steps and shrinks when gradients overflow. Frameworks
differ in a dozen small ways (floor, cap, patience, off-by-ones, rounding), and each difference is one number here.
`advance` is the rule: a policy, a state and "were the gradients finite" in, the next state out. It is written for
Python numbers and for tensors alike, so the same lines step one scaler on a device, thousands of policies in a replay,
and the oracle `run`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_kind, is_number, is_whole
from mpkit.device import as_device

from .vector import Value, Vector, stacked

NEVER = 2**62
"""A count that is not reached."""

SMALLEST_NORMAL = 2.0**-126
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class Stop(IntEnum):
    """The error code of `advance`: which error the framework raises in a step."""

    NONE = 0
    AT_FLOOR = 1
    SANK = 2
    ZERO = 3
    INFINITE = 4
    CONSECUTIVE = 5


STOPS = {
    Stop.NONE: "",
    Stop.AT_FLOOR: "overflow although the scale is at its floor: the scale is not the cause, look at the model and the "
    "data",
    Stop.SANK: "the scale sank to the value at which this policy stops the run",
    Stop.ZERO: "the scale is zero, so gradients cannot be divided by it",
    Stop.INFINITE: "overflow although the scale is infinite, and this framework dies while it writes the message",
    Stop.CONSECUTIVE: "too many overflows in a row: no scale helps, look at the model and the data",
}
"""What each error says."""

REASONS = {
    "held": "gradients were finite, and the growth interval is not over",
    "grew": "a whole growth interval without overflow",
    "backed off": "an overflow",
    "tolerated": "an overflow that hysteresis or tolerance let pass",
    "at floor": "an overflow, and the scale cannot go lower: look at the model, not at the scale",
    "at cap": "gradients were finite, and the scale cannot go higher",
    "lifted": "an overflow below the floor: the scale was raised to it",
    "lowered": "growth was due above the cap: the scale was lowered to it",
    "stopped": "the policy raised its error",
}
"""Every word that `ScaleHistory.reasons` uses."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalePolicy(Vector):
    """How a loss scale moves: numbers only, so that a vector of policies is a policy whose fields are tensors.

    Args:
        init_scale:       scale before the first step (dimensionless, >= 0).
        init_count:       finite steps already counted before the first step.
        growth_factor:    the scale is multiplied by this when it grows (> 0), exactly as the framework holds it.
        backoff_factor:   the scale is multiplied by this on overflow (>= 0) ...
        backoff_divisor:  ... and divided by this (> 0). 1/3 as a factor and 3 as a divisor differ in the last bit.
        growth_interval:  finite steps before growth; 0 and below: never (with `growth_ge`: every step).
        min_scale:        floor after a backoff, rounded to the format of the scale; 0 is none.
        max_scale:        cap after a growth, rounded too; inf is none.
        scale_bits:       16, 32 or 64: the float format that the scale is rounded to after every change.
        hold_at_overflow: keep the scale when growth would not be finite (otherwise it becomes inf and stays).
        growth_ge:        grow when the counter is at *or past* the interval.
        first_growth_lag: extra finite steps needed after the start and after an overflow.
        next_growth_lag:  extra finite steps needed after a growth.
        hysteresis:       bad steps needed before the scale backs off; `refill_on_growth`, `refill_on_finite` and
                          `refill_on_backoff` say what makes the count start again.
        tolerance:        back off only when bad steps / steps since the last change reach this share; replaces
                          `hysteresis`; negative: unused.
        raise_at_min:     error on an overflow at the floor.
        stop_at:          error when an overflow leaves the scale at or below this; -inf: never.
        max_consecutive:  error after more overflows in a row than this.
        error_at_zero:    error in the step after the scale has become 0.
        error_at_inf:     error on an overflow at an infinite scale.
        clamp_both_ways:  floor and cap both apply after every change.
        delayed:          a decision becomes public one step late.
        flush_subnormal:  a scale below 2^-126 becomes 0.
        name:             the preset it came from, for tables.
        layers:           names of a layer-wise policy (a vector): an overflow in one layer skips the step of all.
    All are given by keyword; `by_factor` and `fixed` make the two kinds that most often are wanted.

    Raises:  TypeError or ValueError for a number of the wrong kind or out of range.
    Source:  the parameters by which eighteen recorded implementations were reproduced bit for bit; a factor that a
             framework rounds to float32 first is stored rounded (`preset` does it), and a start that is cut to the
             cap is stored cut.
    """

    init_scale: Value = 2.0**16
    growth_factor: Value = 2.0
    backoff_factor: Value = 0.5
    growth_interval: Value = 2000
    min_scale: Value = 0.0
    max_scale: Value = math.inf
    backoff_divisor: Value = 1.0
    scale_bits: Value = 32
    hold_at_overflow: Value = True
    growth_ge: Value = False
    first_growth_lag: Value = 0
    next_growth_lag: Value = 0
    hysteresis: Value = 1
    refill_on_growth: Value = False
    refill_on_finite: Value = False
    refill_on_backoff: Value = False
    tolerance: Value = -1.0
    raise_at_min: Value = False
    stop_at: Value = -math.inf
    max_consecutive: Value = NEVER
    error_at_zero: Value = False
    error_at_inf: Value = False
    clamp_both_ways: Value = False
    delayed: Value = False
    flush_subnormal: Value = False
    init_count: Value = 0
    name: str = ""
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in _NUMBERS:
            value, high = getattr(self, key), NEVER if key in _BOUNDED else math.inf
            low = _LEAST.get(key, -high)
            if isinstance(value, Tensor):
                continue
            if not is_number(value):
                raise TypeError(f"{key} must be a number, got {value!r}")
            if isinstance(value, int) and key not in _COUNTS and abs(value) > sys.float_info.max:
                raise ValueError(f"{key} must fit a float, got an int of {value.bit_length()} bits")
            if not low <= value <= high:
                raise ValueError(f"{key} must lie in [{low}, {high}], got {value!r}")
            if key not in _COUNTS:
                object.__setattr__(self, key, float(value))  # an int of 100 bits, say, is a fine scale
            elif not is_whole(value) and not math.isinf(value) and value != int(value):
                raise ValueError(f"{key} counts steps and must be whole, got {value!r}")
            else:  # what no training reaches is one number, which a counter of 64 bits can be compared with
                object.__setattr__(self, key, int(max(-NEVER, min(value, NEVER))))
        check_flags(**{key: flag for key in _FLAGS if not isinstance(flag := getattr(self, key), Tensor)})
        if not isinstance(self.scale_bits, Tensor) and self.scale_bits not in (16, 32, 64):
            raise ValueError(f"scale_bits must be 16, 32 or 64, got {self.scale_bits!r}")
        for key in ("min_scale", "max_scale"):  # a bound between two numbers of the format is the nearer of them
            if not isinstance(bound := getattr(self, key), Tensor):
                object.__setattr__(self, key, _in_format(self.scale_bits, bound))

    @classmethod
    def by_factor(cls, init_scale: float, factor: float, window: int, floor: float = 0.0, **others: Any) -> ScalePolicy:
        """One factor for both ways, as half of the frameworks have it: times `factor` after `window`, over it at once.

        Args:    others: any further fields of a policy.

        >>> run_down = ScalePolicy.by_factor(2.0**16, 3.0, 100, floor=1.0)
        >>> run_down.growth_factor, run_down.backoff_divisor, run_down.backoff_factor
        (3.0, 3.0, 1.0)
        """
        bounds = {"growth_interval": window, "min_scale": floor}
        factors = {"growth_factor": factor, "backoff_factor": 1.0, "backoff_divisor": factor}
        return cls(**{"init_scale": init_scale, **factors, **bounds, **others})

    @classmethod
    def fixed(cls, scale: float, **others: Any) -> ScalePolicy:
        """A scale that never moves, in 32 bits unless `others` say so."""
        return cls(**{"init_scale": scale, "backoff_factor": 1.0, "growth_interval": 0, **others})


_COUNTS = {field.name for field in fields(ScalePolicy) if type(field.default) is int} - {"scale_bits"}
_FLAGS = [field.name for field in fields(ScalePolicy) if type(field.default) is bool]
_NUMBERS = [field.name for field in fields(ScalePolicy) if field.name not in (*_FLAGS, "scale_bits", "name", "layers")]
_LEAST = {
    **dict.fromkeys(("init_scale", "backoff_factor", "min_scale", "max_scale", "max_consecutive"), 0.0),
    **dict.fromkeys(("growth_factor", "backoff_divisor"), math.ulp(0.0)),
}
_BOUNDED = ("first_growth_lag", "next_growth_lag", "init_count")  # what is counted from, where others are counted to


def stack(policies: Iterable[ScalePolicy], device: torch.device | str = "cpu") -> ScalePolicy:
    """Many policies -> one whose fields are (n,) tensors where they differ and plain numbers where all agree.

    What all agree on stays a number, so `advance` leaves out what no policy of the vector uses.
    """
    rows = list(policies)
    if not rows:
        raise ValueError("stack needs at least one policy, got none")
    for row in rows:
        if not isinstance(row, ScalePolicy) or row.shape:
            raise TypeError(f"stack needs single policies, got {'a vector' if hasattr(row, 'shape') else repr(row)}")
    return stacked(rows, "init_scale", device)


class ScaleState(NamedTuple):
    """Where a policy stands: every counter, as numbers or as tensors of the policy's shape."""

    scale: Value  # what the next loss is multiplied by
    decided: Value  # what was decided last; differs from `scale` only in a delayed policy
    good: Value  # finite steps counted towards growth; starts below zero where growth lags
    left: Value  # bad steps until the scale backs off
    streak: Value  # bad steps in a row
    strikes: Value  # bad steps since the scale last changed
    since: Value  # steps since the scale last changed


def counters(policy: ScalePolicy) -> list[str]:
    """The parts of the state that this policy uses beside `scale`; none where nothing can move the scale."""
    p = policy
    if replace(p, init_scale=1.0, scale_bits=32, name="") == ScalePolicy.fixed(1.0):
        return []
    used = {"decided": p.delayed is not False, "good": True, "left": _used(p.hysteresis > 1)}
    used |= {"streak": _used(p.max_consecutive < NEVER), **dict.fromkeys(("strikes", "since"), _used(p.tolerance >= 0))}
    return [name for name, needed in used.items() if needed]


def initial(policy: ScalePolicy, device: torch.device | str | None = None) -> ScaleState:
    """The state before the first step: Python numbers, or tensors where `device` is given or `policy` is a vector.

    Tensors are float64 (scales, strikes, since) and int64 (counters) of `policy.shape`.
    """
    check_kind("policy", policy, ScalePolicy, "a ScalePolicy")
    p = policy
    if device is None and not p.shape:
        # numbers: one policy, followed step by step, as the oracle and a loop by hand do
        scale = _rounded(p, float(p.init_scale))
        return ScaleState(scale, scale, p.init_count - p.first_growth_lag, p.hysteresis, 0, 0, 1)
    device = next(value.device for value in p.tensors().values()) if device is None else as_device(device)

    def full(value: Value, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(device, dtype, copy=True).expand(p.shape).contiguous()
        return torch.full(p.shape, value, dtype=dtype, device=device)

    scale = _rounded(p, full(p.init_scale, torch.float64))
    good, left, streak = (full(v, torch.int64) for v in (p.init_count - 1 * p.first_growth_lag, p.hysteresis, 0))
    return ScaleState(scale, scale.clone(), good, left, streak, full(0, torch.float64), full(1, torch.float64))


def advance(policy: ScalePolicy, state: ScaleState, finite: Value) -> tuple[ScaleState, Value]:
    """One step of the rule: (state before, were all gradients finite) -> (state after, error code).

    `finite` is a Python bool with a state of numbers, or a bool tensor of the policy's shape with a state of tensors;
    then nothing is read on the host. The error code is 0, or the `Stop` that says which error the framework raises
    here; the caller decides what to do about it. A part of the rule that a policy does not use (a plain number that
    says so) costs nothing.
    """
    if not (isinstance(policy, ScalePolicy) and isinstance(state, ScaleState)):
        kinds = f"{type(policy).__name__} and {type(state).__name__}"
        raise TypeError(f"need a ScalePolicy and what initial(policy) gave, got {kinds}")
    p, s = policy, state.decided
    bad = _not(finite)
    # counted first: the step that completes the interval is the one that grows
    good = state.good + 1
    due = good == p.growth_interval
    if p.growth_ge is not False:
        due = _either(due, _both(good > p.growth_interval, p.growth_ge))
    due = _both(due, finite)
    # with hysteresis or a tolerance not every bad step makes the scale back off
    state, shrink = _patience(p, state, due, bad)

    decided = s
    if due is not False:
        decided = _where(due, _grown(p, s), s)
    if shrink is not False:
        decided = _where(shrink, _shrunk(p, s), decided)
    # where growth lags the counter starts below zero: after each growth, or only at the start and after a bad step
    good = _where(due, -1 * p.next_growth_lag, good)
    good = _where(bad, -1 * p.first_growth_lag, good)

    streak = state.streak
    if _used(p.max_consecutive < NEVER):
        streak = _where(bad, streak + 1, 0)
    raised = _stops(p, s, decided, bad, shrink, streak)
    if _used(p.stop_at > -math.inf):
        decided = _where(_both(bad, decided <= p.stop_at), s, decided)
    # in MXNet a decision takes effect one step later than elsewhere
    scale = decided if p.delayed is False else _where(p.delayed, s, decided)
    return ScaleState(scale, decided, good, state.left, streak, state.strikes, state.since), raised


def _patience(p: ScalePolicy, state: ScaleState, due: Value, bad: Value) -> tuple[ScaleState, Value]:
    """Whether this bad step makes the scale back off, and the counters of hysteresis and tolerance after it."""
    left, strikes, since = state.left, state.strikes, state.since
    shrink = bad
    if _used(p.hysteresis > 1):
        # at 0 it stays: further bad steps back off each time until something refills it
        left = _where(bad, _at_least(left - 1, 0), left)
        shrink = _both(bad, left <= 0)
    if _used(p.tolerance >= 0):
        strikes = strikes + bad
        # fairseq counts bad steps among all since the last change, not bad steps in a row
        enough = strikes / since >= p.tolerance
        shrink = _both(bad, _where(p.tolerance >= 0, enough, shrink) if isinstance(p.tolerance, Tensor) else enough)
        strikes = _where(shrink, 0, strikes)
        since = _where(_either(due, shrink), 1, since + 1)
    if _used(p.hysteresis > 1):
        # frameworks differ in what restores the patience: growth, backing off, or any finite step
        refill = _either(_both(due, p.refill_on_growth), _both(shrink, p.refill_on_backoff))
        if p.refill_on_finite is not False:
            refill = _either(refill, _both(_not(bad), p.refill_on_finite))
        left = _where(refill, p.hysteresis, left)
    return state._replace(left=left, strikes=strikes, since=since), shrink


def _grown(p: ScalePolicy, s: Value) -> Value:
    # rounded before it is bounded, as the framework stores the product and then compares
    grown = _at_most(_rounded(p, s * p.growth_factor), p.max_scale)
    if p.clamp_both_ways is not False:
        grown = _where(p.clamp_both_ways, _at_least(grown, p.min_scale), grown)
    if p.hold_at_overflow is False:
        return grown
    # torch and MindSpore keep a scale that would grow to inf; others go there
    fits = grown < math.inf
    return _where(_either(fits, _not(p.hold_at_overflow)), grown, s)


def _shrunk(p: ScalePolicy, s: Value) -> Value:
    shrunk = s * p.backoff_factor if _used(p.backoff_factor != 1) else s
    # division and multiplication by the reciprocal differ in the last bit for factors like 3
    if _used(p.backoff_divisor != 1):
        shrunk = shrunk / p.backoff_divisor
    shrunk = _rounded(p, shrunk)
    if p.clamp_both_ways is not False:
        shrunk = _where(p.clamp_both_ways, _at_most(shrunk, p.max_scale), shrunk)
    return _at_least(shrunk, p.min_scale)


def _stops(p: ScalePolicy, s: Value, decided: Value, bad: Value, shrink: Value, streak: Value) -> Value:
    """The error code of this step; a policy without errors costs nothing here."""
    raised: Value = 0
    if p.raise_at_min is not False:
        raised = _where(_both(_both(shrink, s == p.min_scale), p.raise_at_min), Stop.AT_FLOOR.value, raised)
    if _used(p.stop_at > -math.inf):
        raised = _where(_both(bad, decided <= p.stop_at), Stop.SANK.value, raised)
    if p.error_at_zero is not False:
        raised = _where(_both(s == 0, p.error_at_zero), Stop.ZERO.value, raised)
    if p.error_at_inf is not False:
        raised = _where(_both(_both(bad, s == math.inf), p.error_at_inf), Stop.INFINITE.value, raised)
    if _used(p.max_consecutive < NEVER):
        raised = _where(streak > p.max_consecutive, Stop.CONSECUTIVE.value, raised)
    return raised


def _used(condition: Value) -> bool:
    """Whether a part of the rule takes part: always in a vector that differs there, else as the number says."""
    return isinstance(condition, Tensor) or bool(condition)


def _not(a: Value) -> Value:
    return ~a if isinstance(a, Tensor) else not a


def _both(a: Value, b: Value) -> Value:
    """a and b; where one of them is a plain bool, no operation on a tensor is spent on it."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a & b
    plain, other = (b, a) if isinstance(a, Tensor) else (a, b)
    return other if plain else False


def _either(a: Value, b: Value) -> Value:
    """a or b, as `_both`."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a | b
    plain, other = (b, a) if isinstance(a, Tensor) else (a, b)
    return True if plain else other


def _where(mask: Value, yes: Value, no: Value) -> Value:
    if not isinstance(mask, Tensor):
        return yes if mask else no
    if isinstance(no, Tensor) and not isinstance(yes, Tensor):
        return no.masked_fill(mask, yes)
    return torch.where(mask, yes, no)


def _at_most(x: Value, cap: Value) -> Value:
    if isinstance(x, Tensor):
        return x if not isinstance(cap, Tensor) and cap == math.inf else torch.clamp(x, max=cap)
    return min(x, cap)


def _at_least(x: Value, floor: Value) -> Value:
    return torch.clamp(x, min=floor) if isinstance(x, Tensor) else max(x, floor)


def _rounded(p: ScalePolicy, x: Value) -> Value:
    """A float64 result -> the nearest number of the format in which the framework keeps its scale."""
    if isinstance(bits := p.scale_bits, Tensor):
        narrow = torch.where(bits == 32, x.float().double(), x.half().double())
        x = torch.where(bits == 64, x, narrow)
    else:
        x = _in_format(bits, x)
    if p.flush_subnormal is False:
        return x
    return _where(_both(x < SMALLEST_NORMAL, p.flush_subnormal), 0.0, x)


def _in_format(bits: Value, x: Value) -> Value:
    if isinstance(bits, Tensor) or bits == 64:
        return x
    return in_float32(x) if bits == 32 else in_float16(x)


def in_float32(x: Value) -> Value:
    """The nearest float32, as a Python float or a float64 tensor (a float32 one stays); too large becomes inf."""
    if isinstance(x, Tensor):
        return x if x.dtype == torch.float32 else x.float().double()
    return ctypes.c_float(x).value


def in_float16(x: Value) -> Value:
    """The nearest float16 of a number that float32 holds, as a Python float or a float64 tensor."""
    if isinstance(x, Tensor):
        return x.half().double()
    with np.errstate(over="ignore"):
        return float(np.float16(np.float32(x)))
