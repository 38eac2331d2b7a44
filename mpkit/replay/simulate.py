"""Any number of scale policies on one sequence of ceilings, by the one rule that training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpkit.arguments import check_kind
from mpkit.policies import ScalePolicy, ScaleState, advance, initial, stack

_FEW = 16  # policies that are stepped faster one by one as Python numbers than together as tensors
_BLOCK = 256  # steps that are counted together


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
        tally = _Tally(tops if tops.ndim == 2 else tops[:, None], wanted, count)
        table = torch.tensor(tops, device=device)
        _walk(policies.to(device), initial(policies, device), table.unbind(), tally.add)
        return tally.result()
    columns = np.broadcast_to(tops if tops.ndim == 2 else tops[:, None], (len(tops), count))
    alone = []
    for lane in range(count):
        tally = _Tally(columns[:, lane : lane + 1], wanted, 1)
        _walk(policies[lane], initial(policies[lane]), columns[:, lane].tolist(), tally.add)
        alone.append(vars(tally.result()))
    return Simulation(**{key: np.concatenate([one[key] for one in alone], axis=-1) for key in alone[0]})


def _checked(ceilings: ArrayLike, shape: torch.Size) -> np.ndarray:
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


def _walk(policy: ScalePolicy, state: ScaleState, tops: Iterable[Any], tell: Callable[..., None]) -> None:
    """Step numbers or tensors through the ceilings; `tell` hears of every block of steps, and at the end of the rest.

    It is given the scales that the steps were made with, the state after them, the steps at which policies raised
    (-1: none) and what they raised.
    """
    used: list[Any] = []
    raised_at, raised = 0 * state.good - 1, 0 * state.good
    for step, top in enumerate(tops):
        used.append(state.scale)
        after, code = advance(policy, state, state.scale <= top)
        if isinstance(code, Tensor):
            now = (code != 0) & (raised == 0)
            raised_at, raised = torch.where(now, step, raised_at), torch.where(now, code, raised)
            state = ScaleState(*(torch.where(raised != 0, old, new) for old, new in zip(state, after)))
        elif code:
            raised_at, raised = step, code
            break
        else:
            state = after
        if len(used) == _BLOCK:
            tell(used, state, raised_at, raised)
            used = []
    tell(used, state, raised_at, raised)


class _Tally:
    """What P policies did so far, counted block by block, so that a long run needs little memory."""

    def __init__(self, tops: np.ndarray, wanted: np.ndarray, count: int) -> None:
        self.tops, self.wanted, self.done = tops, wanted, 0
        self.sampled = np.full((len(wanted), count), math.nan)
        self.lowest = np.full(count, math.inf)
        self.skipped, self.ran, self.first_good = (np.zeros(count, dtype=np.int64) for _ in range(3))

    def add(self, scales: list[Any], state: ScaleState, raised_at: object, raised: object) -> None:
        """The scales of the next steps, and what holds after them."""
        self.final, self.raised_at, self.raised = _host(state.scale), _host(raised_at), _host(raised)
        if not scales:
            return
        used = _host(torch.stack(scales)) if isinstance(scales[0], Tensor) else np.array(scales)[:, None]
        steps = np.arange(self.done, self.done + len(used))
        ran = (steps[:, None] <= self.raised_at) | (self.raised_at < 0)
        fits = ran & (used <= self.tops[steps])
        self.lowest = np.minimum(self.lowest, np.where(ran, used, math.inf).min(axis=0))  # NaN if a scale was NaN
        # so many steps as ran before the first good one: while there is none, all of them
        none_yet = self.first_good == self.ran
        self.first_good += np.where(none_yet, np.where(fits.any(axis=0), fits.argmax(axis=0), ran.sum(axis=0)), 0)
        self.skipped += (ran & ~fits).sum(axis=0)
        self.ran += ran.sum(axis=0)
        here = (self.wanted >= steps[0]) & (self.wanted <= steps[-1])
        rows = self.wanted[here] - self.done
        self.sampled[here] = np.where(ran[rows], used[rows], math.nan)
        self.done += len(used)

    def result(self) -> Simulation:
        return Simulation(
            sampled=self.sampled,
            final=self.final.astype(np.float64),
            lowest=self.lowest,
            skipped=self.skipped,
            first_good=self.first_good,
            raised_at=self.raised_at.astype(np.int64),
            raised=self.raised.astype(np.int64),
        )


def _host(value: object) -> np.ndarray:
    return np.atleast_1d(value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value))
