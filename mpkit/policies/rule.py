"""The one rule of dynamic loss scaling, and what every framework makes of it.

A loss scale is a number that grows after a run of finite steps and shrinks when gradients overflow. Frameworks
differ in a dozen small ways (floor, cap, patience, off-by-ones, rounding), and each difference is one number here.
`advance` is the rule: a policy, a state and "were the gradients finite" in, the next state out. It is written for
Python numbers and for tensors alike, so the same lines step one scaler on a device, thousands of policies in a replay,
and the oracle `run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_kind
from mpkit.device import as_device

from .vector import NEVER, Bits, Divisor, First, Flag, Names, Real, Scale, Steps, Value, Vector, Whole, stacked

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

    init_scale: Scale = 2.0**16
    growth_factor: Divisor = 2.0
    backoff_factor: Scale = 0.5
    growth_interval: Steps = 2000
    min_scale: Scale = 0.0
    max_scale: Scale = math.inf
    backoff_divisor: Divisor = 1.0
    scale_bits: Bits = 32
    hold_at_overflow: Flag = True
    growth_ge: Flag = False
    first_growth_lag: First = 0
    next_growth_lag: First = 0
    hysteresis: Steps = 1
    refill_on_growth: Flag = False
    refill_on_finite: Flag = False
    refill_on_backoff: Flag = False
    tolerance: Real = -1.0
    raise_at_min: Flag = False
    stop_at: Real = -math.inf
    max_consecutive: Whole = NEVER
    error_at_zero: Flag = False
    error_at_inf: Flag = False
    clamp_both_ways: Flag = False
    delayed: Flag = False
    flush_subnormal: Flag = False
    init_count: First = 0
    name: str = ""
    layers: Names = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in {"min_scale", "max_scale"} - self.tensors().keys():
            if not isinstance(self.scale_bits, Tensor):  # a bound between two numbers of the format is the nearer one
                object.__setattr__(self, key, in_format(self.scale_bits, getattr(self, key)))

    @classmethod
    def by_factor(cls, init_scale: float, factor: float, window: int, floor: float = 0.0, **others: Any) -> ScalePolicy:
        """One factor for both ways, as half of the frameworks have it: times `factor` after `window`, over it at once.

        Args:    others: any further fields of a policy.

        >>> run_down = ScalePolicy.by_factor(2.0**16, 3.0, 100, floor=1.0)
        >>> run_down.growth_factor, run_down.backoff_divisor, run_down.backoff_factor
        (3.0, 3.0, 1.0)
        """
        moves = {"growth_factor": factor, "growth_interval": window, "backoff_factor": 1.0, "backoff_divisor": factor}
        return cls(**{"init_scale": init_scale, "min_scale": floor, **moves, **others})

    @classmethod
    def fixed(cls, scale: float, **others: Any) -> ScalePolicy:
        """A scale that never moves, in 32 bits unless `others` say so."""
        return cls(**{"init_scale": scale, "backoff_factor": 1.0, "growth_interval": 0, **others})


def stack(policies: Iterable[ScalePolicy], device: torch.device | str = "cpu") -> ScalePolicy:
    """Many policies -> one whose fields are (n,) tensors where they differ and plain numbers where all agree.

    What all agree on stays a number, so `advance` leaves out what no policy of the vector uses.
    """
    return stacked(ScalePolicy, policies, "init_scale", device)


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
    state = ScaleState(p.init_scale, p.init_scale, p.init_count - 1 * p.first_growth_lag, p.hysteresis, 0, 0, 1)
    if device is not None or p.shape:
        device = next(iter(p.tensors().values())).device if device is None else as_device(device)
        kinds = {name: torch.int64 if name in ("good", "left", "streak") else torch.float64 for name in state._fields}
        full = [torch.as_tensor(x, dtype=kind, device=device) for x, kind in zip(state, kinds.values())]
        state = ScaleState(*(x.expand(p.shape).clone() for x in full))
    scale = _rounded(p, state.scale)
    return state._replace(scale=scale, decided=scale + 0)


def advance(policy: ScalePolicy, state: ScaleState, finite: Value) -> tuple[ScaleState, Value]:
    """One step of the rule: (state before, were all gradients finite) -> (state after, error code).

    `finite` is a Python bool with a state of numbers, or a bool tensor of the policy's shape with a state of tensors;
    then nothing is read on the host. The error code is 0, or the `Stop` that says which error the framework raises
    here; the caller decides what to do about it. A part of the rule that a policy does not use (a plain number that
    says so) costs next to nothing.
    """
    check_kind("policy", policy, ScalePolicy, "a ScalePolicy")
    check_kind("state", state, ScaleState, "what initial(policy) gave")
    if isinstance(finite, Tensor) and finite.dtype != torch.bool:
        raise TypeError(f"finite must be a bool tensor, got {finite.dtype}; write finite != 0")
    p, s = policy, state.decided
    bad = finite ^ True  # `^ True` and `&` mean the same for Python's booleans and for tensors; `~` and `and` do not
    # counted first: the step that completes the interval is the one that grows
    good = state.good + 1
    due = ((good == p.growth_interval) | (good > p.growth_interval) & p.growth_ge) & finite
    # with hysteresis or a tolerance not every bad step makes the scale back off
    state, shrink = _patience(p, state, due, bad)

    decided = _where(due, _grown(p, s), s) if due is not False else s
    decided = _where(shrink, _shrunk(p, s), decided) if shrink is not False else decided
    # where growth lags the counter starts below zero: after each growth, or only at the start and after a bad step
    good = _where(due, -1 * p.next_growth_lag, good)
    good = _where(bad, -1 * p.first_growth_lag, good)

    streak = state.streak
    if _used(p.max_consecutive < NEVER):
        streak = _where(bad, streak + 1, 0)
    raised = _stops(p, s, decided, bad, shrink, streak)
    if _used(p.stop_at > -math.inf):
        decided = _where(bad & (decided <= p.stop_at), s, decided)
    # in MXNet a decision takes effect one step later than elsewhere
    scale = decided if p.delayed is False else _where(p.delayed, s, decided)
    return ScaleState(scale, decided, good, state.left, streak, state.strikes, state.since), raised


def _patience(p: ScalePolicy, state: ScaleState, due: Value, bad: Value) -> tuple[ScaleState, Value]:
    """Whether this bad step makes the scale back off, and the counters of hysteresis and tolerance after it."""
    left, strikes, since, shrink = state.left, state.strikes, state.since, bad
    if _used(p.hysteresis > 1):
        # at 0 it stays: further bad steps back off each time until something refills it
        left = _where(bad, _at_least(left - 1, 0), left)
        shrink = bad & (left <= 0)
    if _used(p.tolerance >= 0):
        strikes = strikes + bad
        # fairseq counts bad steps among all since the last change, not bad steps in a row
        shrink = bad & _where(p.tolerance >= 0, strikes / since >= p.tolerance, shrink)
        strikes = _where(shrink, 0, strikes)
        since = _where(due | shrink, 1, since + 1)
    if _used(p.hysteresis > 1):
        # frameworks differ in what restores the patience: growth, backing off, or any finite step
        refill = due & p.refill_on_growth | shrink & p.refill_on_backoff | (bad ^ True) & p.refill_on_finite
        left = _where(refill, p.hysteresis, left)
    return state._replace(left=left, strikes=strikes, since=since), shrink


def _grown(p: ScalePolicy, s: Value) -> Value:
    # rounded before it is bounded, as the framework stores the product and then compares
    grown = _at_most(_rounded(p, s * p.growth_factor), p.max_scale)
    if p.clamp_both_ways is not False:
        grown = _where(p.clamp_both_ways, _at_least(grown, p.min_scale), grown)
    # torch and MindSpore keep a scale that would grow to inf; others go there
    return _where((grown == math.inf) & p.hold_at_overflow, s, grown)


def _shrunk(p: ScalePolicy, s: Value) -> Value:
    shrunk = s * p.backoff_factor if _used(p.backoff_factor != 1) else s
    # division and multiplication by the reciprocal differ in the last bit for factors like 3
    shrunk = _rounded(p, shrunk / p.backoff_divisor if _used(p.backoff_divisor != 1) else shrunk)
    if p.clamp_both_ways is not False:
        shrunk = _where(p.clamp_both_ways, _at_most(shrunk, p.max_scale), shrunk)
    return _at_least(shrunk, p.min_scale)


def _stops(p: ScalePolicy, s: Value, decided: Value, bad: Value, shrink: Value, streak: Value) -> Value:
    """The error code of this step; a policy without errors costs nothing here."""
    raised: Value = 0
    if p.raise_at_min is not False:
        raised = _where(shrink & (s == p.min_scale) & p.raise_at_min, Stop.AT_FLOOR.value, raised)
    if _used(p.stop_at > -math.inf):
        raised = _where(bad & (decided <= p.stop_at), Stop.SANK.value, raised)
    if p.error_at_zero is not False:
        raised = _where((s == 0) & p.error_at_zero, Stop.ZERO.value, raised)
    if p.error_at_inf is not False:
        raised = _where(bad & (s == math.inf) & p.error_at_inf, Stop.INFINITE.value, raised)
    if _used(p.max_consecutive < NEVER):
        raised = _where(streak > p.max_consecutive, Stop.CONSECUTIVE.value, raised)
    return raised


def _used(condition: Value) -> bool:
    """Whether a part of the rule takes part: always in a vector that differs there, else as the number says."""
    return isinstance(condition, Tensor) or bool(condition)


def _where(mask: Value, yes: Value, no: Value) -> Value:
    return torch.where(mask, yes, no) if isinstance(mask, Tensor) else yes if mask else no


def _at_most(x: Value, cap: Value) -> Value:
    if isinstance(x, Tensor):
        return x if not isinstance(cap, Tensor) and cap == math.inf else torch.clamp(x, max=cap)
    return min(x, cap)


def _at_least(x: Value, floor: Value) -> Value:
    return torch.clamp(x, min=floor) if isinstance(x, Tensor) else max(x, floor)


def _rounded(p: ScalePolicy, x: Value) -> Value:
    """A float64 result -> the nearest number of the format in which the framework keeps its scale."""
    x = in_format(p.scale_bits, x)
    return x if p.flush_subnormal is False else _where((x < SMALLEST_NORMAL) & p.flush_subnormal, 0.0, x)


def in_format(bits: Value, x: Value) -> Value:
    """The nearest number of 16, 32 or 64 bits, as a Python float or a float64 tensor; too large becomes inf."""
    if isinstance(bits, Tensor):
        return torch.where(bits == 64, x, torch.where(bits == 32, in_format(32, x), in_format(16, x)))
    if bits == 64:
        return x
    if isinstance(x, Tensor):
        return (x.float() if bits == 32 else x.half()).double()
    with np.errstate(over="ignore"):  # float16 through float32, as a tensor is rounded
        return float(np.float32(x) if bits == 32 else np.float16(np.float32(x)))


in_float32 = partial(in_format, 32)
"""The nearest float32."""
