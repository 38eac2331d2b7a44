"""Thousands of scale policies on one sequence of ceilings, with the one rule that training uses."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpkit.arguments import check_kind
from mpkit.policies import ScalePolicy, ScaleState, advance, initial, stack
from mpkit.policies.rule import NEVER

_UNROLLED = 16  # steps per compiled call: the state stays in registers for that long
_FEW = 16  # policies that are stepped faster one by one as Python numbers than together as tensors
_INT32 = torch.iinfo(torch.int32)
_WORTH_COMPILING = 1e9  # policy-steps; below that, compiling costs more than it saves


@dataclass(frozen=True, eq=False)
class Simulation:
    """What P policies did on N steps; arrays of shape (P,) unless said otherwise.

    sampled:    (M, P) float64 scale that each sampled step was made with, NaN after a policy raised.
    final:      float64 scale after the last step (of a policy that raised: before that step).
    lowest:     float64 smallest scale that a step was made with.
    skipped:    int64 skipped steps.
    first_good: int64 index of the first applied step; N if there is none.
    raised_at:  int64 step at which the policy's own error ends the run, -1 for none.
    raised:     int64 code of that error, see `policies.STOPS`.
    """

    sampled: np.ndarray
    final: np.ndarray
    lowest: np.ndarray
    skipped: np.ndarray
    first_good: np.ndarray
    raised_at: np.ndarray
    raised: np.ndarray


class _Tally(NamedTuple):
    """What is counted over the steps so far, one entry per policy."""

    lowest: Tensor
    skipped: Tensor
    first_good: Tensor
    raised_at: Tensor
    raised: Tensor


def simulate(
    ceilings: ArrayLike,
    policies: ScalePolicy,
    *,
    sample: Any = None,
    compiled: bool | None = None,
    device: torch.device | str = "cpu",
) -> Simulation:
    """Step every policy through the run: a step is skipped when its scale lies above the step's ceiling.

    Args:
        ceilings: (N,) largest scale with finite gradients in each step, or (N, P) for runs of their own; inf: any
                  scale works, negative: none works.
        policies: a vector of policies, see `policies.stack`; a single one counts as a vector of one.
        sample:   ascending indices of the steps whose scales to return; None: all (8 bytes per policy and step).
        compiled: use torch.compile, 16 steps per call; None: when the work is large and a compiler is there.
    Edges:   a policy that raises skips that step and does nothing after it.
    Raises:  ValueError for ceilings that are NaN or of another shape.
    """
    check_kind("policies", policies, ScalePolicy, "a ScalePolicy; stack([...]) makes one of many")
    policies = policies if policies.shape else stack([policies])
    tops = _checked_ceilings(ceilings, policies.shape)
    if compiled is None:
        compiled = len(tops) * policies.shape[0] >= _WORTH_COMPILING and can_compile()
    steps = list(range(len(tops))) if sample is None else [int(i) for i in sample]
    if not compiled and policies.shape[0] <= _FEW:
        return _by_numbers(tops, policies, steps)
    policy, state = _narrowed(policies.to(device), initial(policies, device))
    tally = _empty_tally(state.scale)
    table = _table(tops, state.scale.dtype).to(device)
    whole = len(tops) // _UNROLLED * _UNROLLED if compiled else 0
    wanted = set(steps)
    rows: dict[int, Tensor] = {}
    for start in range(0, whole, _UNROLLED):
        here = [i for i in range(start, start + _UNROLLED) if i in wanted]
        block = _compiled_block(bool(here))
        if policy.delayed is False:  # one tensor in every call, the first too: two would be compiled for separately
            state = state._replace(decided=state.scale)
        index = torch.tensor(start, dtype=tally.skipped.dtype, device=device)
        flat = block(policy, state, tally, table[start : start + _UNROLLED], index)
        counts, used = flat[len(state) :], flat[len(state) + len(tally) :]
        state, tally = ScaleState(*flat[: len(state)]), _Tally(*counts[: len(tally)])
        rows |= {i: used[i - start].clone() for i in here}
    for i in range(whole, len(tops)):
        if i in wanted:
            rows[i] = _shown(state, tally)
        state, tally = _step(policy, state, tally, table[i], i)
    return _result(state, tally, [rows[i] for i in steps])


def _checked_ceilings(ceilings: ArrayLike, shape: torch.Size) -> np.ndarray:
    try:
        tops = np.asarray(ceilings, dtype=np.float64)
    except OverflowError:
        raise ValueError(
            "ceilings must fit a float, got an int that does not; write math.inf where every scale works"
        ) from None
    if tops.shape[1:] not in ((), shape) or not tops.ndim or np.isnan(tops).any():
        raise ValueError(
            f"ceilings must be (steps,) or (steps, {shape[0]}) without NaN, got shape {tops.shape}"
            + " with NaN" * bool(np.isnan(tops).any())
        )
    return tops


def _table(tops: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The ceilings as the rule compares them with its scales: rounded down, never up to a scale that overflowed."""
    table = torch.tensor(tops, dtype=dtype)
    return torch.where(table.double() > torch.tensor(tops), _below(table), table) if dtype == torch.float32 else table


def _by_numbers(tops: np.ndarray, policies: ScalePolicy, steps: list[int]) -> Simulation:
    """The same for a few policies, one after the other."""
    count = policies.shape[0]
    used, ran = np.full((len(tops), count), math.nan), np.zeros((len(tops), count), dtype=bool)
    columns = np.broadcast_to(tops if tops.ndim == 2 else tops[:, None], (len(tops), count))
    final, raised_at, raised = np.zeros(count), np.full(count, -1), np.zeros(count, dtype=np.int64)
    for lane in range(count):
        policy = policies[lane]
        state = initial(policy)
        for i, top in enumerate(columns[:, lane].tolist()):
            used[i, lane], ran[i, lane] = state.scale, True  # a scale may be NaN: an infinite one times 0
            after, code = advance(policy, state, state.scale <= top)
            if code:
                raised_at[lane], raised[lane] = i, code
                break
            state = after
        final[lane] = state.scale
    fits = ran & (used <= columns)
    return Simulation(
        sampled=used[steps],
        final=final,
        lowest=np.where(ran, used, math.inf).min(axis=0, initial=math.inf),
        skipped=(ran & ~fits).sum(axis=0),
        first_good=np.where(fits.any(axis=0), fits.argmax(axis=0) if len(tops) else 0, ran.sum(axis=0)),
        raised_at=raised_at,
        raised=raised,
    )


def _step(
    policy: ScalePolicy, state: ScaleState, tally: _Tally, top: Tensor, index: int | Tensor
) -> tuple[ScaleState, _Tally]:
    fits = state.scale <= top
    after, raised = advance(policy, state, fits)
    lowest = torch.minimum(tally.lowest, state.scale)
    skipped = torch.where(fits, tally.skipped, tally.skipped + 1)
    first = torch.where(fits | (tally.first_good < index), tally.first_good, tally.first_good + 1)
    if not isinstance(raised, Tensor):
        return _kept(after, state), tally._replace(lowest=lowest, skipped=skipped, first_good=first)
    alive = tally.raised == 0
    now = alive & (raised != 0)
    after = ScaleState(*(torch.where(alive & ~now, new, old) for new, old in zip(_kept(after, state), state)))
    return after, _Tally(
        lowest=torch.where(alive, lowest, tally.lowest),
        skipped=torch.where(alive, skipped, tally.skipped),
        first_good=torch.where(alive, first, tally.first_good),
        raised_at=torch.where(now, index, tally.raised_at),
        raised=torch.where(now, raised, tally.raised).to(tally.raised.dtype),
    )


def _kept(after: ScaleState, before: ScaleState) -> ScaleState:
    """The new state in the dtypes of the old one."""
    return ScaleState(*(new.to(old.dtype) for new, old in zip(after, before)))


def _shown(state: ScaleState, tally: _Tally) -> Tensor:
    return torch.where(tally.raised == 0, state.scale, math.nan)


@cache
def _compiled_block(keep: bool) -> Any:
    def block(policy: ScalePolicy, state: ScaleState, tally: _Tally, tops: Tensor, start: Tensor) -> Any:
        used = []
        for i in range(_UNROLLED):
            if keep:
                used.append(_shown(state, tally))
            state, tally = _step(policy, state, tally, tops[i], start + i)
        return *state, *tally, *used  # torch 2.11 hands named tuples back broken

    return torch.compile(block)


@cache
def can_compile() -> bool:
    """Whether torch.compile can build a kernel on this machine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x + 1)(torch.zeros(16))
    except Exception:  # no compiler, an unsupported Python: whatever the reason, the eager path is the way out
        return False
    return True


def _narrowed(policy: ScalePolicy, state: ScaleState) -> tuple[ScalePolicy, ScaleState]:
    """The same policy and state in float32 and int32 where that gives the same results, twice as fast.

    A scale kept in float32 times a factor that float32 holds is rounded once either way. A count beyond 32 bits is one
    that no run reaches, unless its counter starts far from zero.
    """
    factors = [policy.growth_factor, policy.backoff_factor, policy.backoff_divisor, policy.min_scale, policy.max_scale]
    plain = policy.scale_bits == 32 if not isinstance(policy.scale_bits, Tensor) else False
    patience = [policy.tolerance, policy.stop_at]
    if not plain or not all(_in_float32(v) for v in factors) or any(isinstance(v, Tensor) for v in patience):
        return policy, state
    if not policy.tolerance < 0 or policy.stop_at != -math.inf:
        return policy, state
    starts = (policy.init_count, policy.first_growth_lag, policy.next_growth_lag)
    if any(bool((torch.as_tensor(start).abs() > _INT32.max // 4).any()) for start in starts):
        return policy, state
    moved = {f.name: _short(getattr(policy, f.name)) for f in fields(policy)}
    if not isinstance(policy.max_consecutive, Tensor) and policy.max_consecutive == NEVER:
        moved["max_consecutive"] = NEVER  # so written the rule leaves the part out
    return replace(policy, **moved), ScaleState(*map(_short, state))


def _short(value: object) -> Any:
    """A tensor in 32 bits, a count cut to them; anything else as it is."""
    if isinstance(value, Tensor):
        if value.dtype == torch.float64:
            return value.float()
        return value.clamp(_INT32.min, _INT32.max).int() if value.dtype == torch.int64 else value
    return max(_INT32.min, min(value, _INT32.max)) if type(value) is int else value


def _in_float32(value: float | Tensor) -> bool:
    if isinstance(value, Tensor):
        return bool((value.float().double() == value).all())
    return math.isinf(value) or float(np.float32(value)) == value


def _below(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, -math.inf))


def _empty_tally(like: Tensor) -> _Tally:
    whole = torch.int64 if like.dtype == torch.float64 else torch.int32
    zero = torch.zeros_like(like, dtype=whole)
    return _Tally(torch.full_like(like, math.inf), zero, zero.clone(), zero - 1, zero.clone())


def _result(state: ScaleState, tally: _Tally, rows: list[Tensor]) -> Simulation:
    count = len(state.scale)
    sampled = torch.stack(rows).double().numpy(force=True) if rows else np.zeros((0, count))
    whole = {key: getattr(tally, key).long().numpy(force=True) for key in _Tally._fields[1:]}
    final, lowest = (value.double().numpy(force=True) for value in (state.scale, tally.lowest))
    return Simulation(sampled=sampled, final=final, lowest=lowest, **whole)
