"""Any number of scale policies on one sequence of ceilings, by the one rule that training uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpkit.arguments import check_kind
from mpkit.policies import ScalePolicy, ScaleState, advance, initial, stack

_FEW = 16  # policies that are stepped faster one by one as Python numbers than together as tensors
_BLOCK = 256  # steps that are counted together, so that a long run needs little memory


@dataclass(frozen=True, eq=False)
class Simulation:
    """What P policies did on N steps; arrays of shape (P,) unless said otherwise.

    sampled:    (M, P) float64 scale that each sampled step was made with, NaN after a policy raised.
    final:      float64 scale after the last step (of a policy that raised: before that step).
    lowest:     float64 smallest scale that a step was made with.
    skipped:    int64 skipped steps.
    first_good: int64 index of the first applied step; where there is none the number of steps that were made.
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


def simulate(
    ceilings: ArrayLike,
    policies: ScalePolicy,
    *,
    sample: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
) -> Simulation:
    """Step every policy through the run: a step is skipped when its scale lies above the step's ceiling.

    Args:
        ceilings: (N,) largest scale with finite gradients in each step, or (N, P) for runs of their own; inf: any
                  scale works, negative: none works.
        policies: a vector of policies, see `policies.stack`; a single one counts as a vector of one.
        sample:   ascending indices of the steps whose scales to return; None: all (8 bytes per policy and step).
    Edges:   a policy that raises skips that step and does nothing after it.
    Raises:  ValueError for ceilings that are NaN or of another shape.
    """
    check_kind("policies", policies, ScalePolicy, "a ScalePolicy; stack([...]) makes one of many")
    policies = policies if policies.shape else stack([policies])
    tops = _checked(ceilings, policies.shape)
    wanted = np.arange(len(tops)) if sample is None else np.array(list(sample), dtype=np.int64)
    if wanted.ndim != 1:
        raise ValueError(f"sample holds indices of steps, one number each, got shape {wanted.shape}")
    count = policies.shape[0]
    if count > _FEW:
        return _stepped(policies.to(device), initial(policies, device), tops, wanted)
    lanes = map(policies.__getitem__, range(count))
    alone = [vars(_stepped(p, initial(p), tops[:, i % tops.shape[1], None], wanted)) for i, p in enumerate(lanes)]
    return Simulation(**{key: np.concatenate([one[key] for one in alone], axis=-1) for key in alone[0]})


def array_of(name: str, value: Any, dtype: type[np.floating]) -> np.ndarray:
    """An array of numbers. Raises ValueError for what is none, or does not fit a float."""
    try:
        return np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be numbers that fit a float (math.inf does), got {value!r:.80}") from error


def _checked(ceilings: ArrayLike, shape: torch.Size) -> np.ndarray:
    """(N, 1) or (N, P) float64."""
    tops = array_of("ceilings", ceilings, np.float64)
    if tops.shape[1:] not in ((), shape) or not tops.ndim or np.isnan(tops).any():
        raise ValueError(f"ceilings must be (steps,) or (steps, {shape[0]}) without NaN, got shape {tops.shape}")
    return tops if tops.ndim == 2 else tops[:, None]


def _stepped(policy: ScalePolicy, state: ScaleState, tops: np.ndarray, wanted: np.ndarray) -> Simulation:
    """Step a vector by tensors, or one policy by numbers, through ceilings (N, 1) or (N, P)."""
    numbers, steps = not policy.shape, len(tops)
    rows = tops[:, 0].tolist() if numbers else torch.tensor(tops, device=state.scale.device).unbind()
    raised_at, raised = 0 * state.good - 1, 0 * state.good
    count = 1 if numbers else policy.shape[0]
    sampled, lowest = np.full((len(wanted), count), math.nan), np.full(count, math.inf)
    skipped, first_good = np.zeros(count, dtype=np.int64), np.full(count, steps)
    for start in range(0, steps, _BLOCK):
        end = min(start + _BLOCK, steps)
        used = []
        for step in range(start, end):
            used.append(state.scale)
            after, code = advance(policy, state, state.scale <= rows[step])
            if isinstance(code, Tensor):
                now = (code != 0) & (raised == 0)
                raised_at, raised = torch.where(now, step, raised_at), torch.where(now, code, raised)
                state = ScaleState(*(torch.where(raised != 0, old, new) for old, new in zip(state, after)))
            elif not numbers or not (code or raised):
                state = after
            elif not raised:
                raised_at, raised = step, code
        scales = np.array(used)[:, None] if numbers else torch.stack(used).numpy(force=True)
        at = np.arange(start, end)[:, None]
        ran = (at <= (last := _host(raised_at))) | (last < 0)
        fits = ran & (scales <= tops[start:end])
        lowest = np.minimum(lowest, np.where(ran, scales, math.inf).min(axis=0))  # NaN if a scale was NaN
        first_good = np.minimum(first_good, np.where(fits, at, steps).min(axis=0))
        skipped += (ran & ~fits).sum(axis=0)
        here = (wanted >= start) & (wanted < end)
        sampled[here] = np.where(ran, scales, math.nan)[wanted[here] - start]
    last = _host(raised_at).astype(np.int64)
    first_good = np.minimum(first_good, np.where(last < 0, steps, last + 1))
    final = _host(state.scale).astype(np.float64)
    return Simulation(sampled, final, lowest, skipped, first_good, last, _host(raised).astype(np.int64))


def _host(value: object) -> np.ndarray:
    return np.atleast_1d(value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value))
