"""What other tensor-scale policies would have done on recorded amaxes: thousands of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpkit.arguments import check_flags
from mpkit.formats import E4M3FN, FloatFormat
from mpkit.policies import (
    TensorScalePolicy,
    advance_tensor_scale,
    initial_tensor_scale,
    tensor_scale_preset,
)

if TYPE_CHECKING:
    import pandas as pd

_SLACK = np.float32(1 + 2.0**-22)  # one last bit of the product is no clipping


@dataclass(frozen=True)
class TensorScaleReplay:
    """What each of n policies would have done to a tensor of which `steps` amaxes were recorded.

    Args:
        policies:    the n policies.
        clipped:     (n,) steps whose largest element was beyond what the scale could hold.
        first:       (n,) the first such step, -1 if there is none.
        worst:       (n,) the largest overshoot: amax * scale / element_max (1 and below: nothing was clipped).
        unused_bits: (n,) range given away: powers of two that lie between the largest scaled element and element_max,
                     as a mean over the steps that were not clipped.
        scales:      (n, steps) the scale each step was cast with, where asked for, else None.
    """

    policies: list[TensorScalePolicy]
    clipped: np.ndarray
    first: np.ndarray
    worst: np.ndarray
    unused_bits: np.ndarray
    scales: np.ndarray | None = None

    def to_frame(self) -> pd.DataFrame:
        """One row per policy: the fields in which policies differ, then the results."""
        import pandas as pd

        columns: dict[str, Any] = {}
        for field in fields(TensorScalePolicy):
            values = [getattr(policy, field.name) for policy in self.policies]
            if field.name in ("name", "history_len") or len(set(values)) > 1:
                columns["policy" if field.name == "name" else field.name] = values
        results = {key: getattr(self, key) for key in ("clipped", "first", "worst", "unused_bits")}
        return pd.DataFrame({**columns, **results})


def replay_tensor_scales(
    amax: Sequence[float] | np.ndarray, policies: Iterable[TensorScalePolicy], *, scales: bool = False
) -> TensorScaleReplay:
    """Run many policies over the recorded amaxes of one tensor.

    The numbers are those of `policies.advance` step by step, bit for bit; a window's maximum is found from a table of
    maxima over 1, 2, 4, ... steps, so a step costs the same for a history of 16 and of 1024. A clipped step would have
    changed the run that follows; the recorded amaxes cannot show that.

    Args:    amax (steps,): largest magnitude of the tensor at each step; `scales` keeps the scale of every step.
    Raises:  TypeError or ValueError for what is no series of magnitudes, or no policies.

    >>> replay_tensor_scales([1.0, 1.0, 64.0, 1.0], [tensor_scale_preset("te_delayed")]).clipped
    array([1])
    """
    check_flags(scales=scales)
    series = _checked(amax)
    rows = list(policies)
    if not rows or not all(isinstance(p, TensorScalePolicy) and not p.shape for p in rows):
        raise TypeError(f"policies are single TensorScalePolicy objects, at least one, got {rows!r:.200}")
    windows: dict[bool, _Windows] = {}
    used, found = [], []
    with np.errstate(all="ignore"):
        for p in rows:
            scale = _scales(p, series, windows)
            found.append(_judged(p, series * scale))
            used += [scale] if scales else []
    clipped, first, worst, unused = (np.array(column) for column in zip(*found))
    return TensorScaleReplay(rows, clipped, first, worst, unused, np.stack(used) if scales else None)


def sweep_tensor_scales(
    amaxes: Mapping[str, Sequence[float]] | Sequence[float] | np.ndarray,
    *,
    history_len: Sequence[int] = (1, 16, 1024),
    margin: Sequence[int] = (0,),
    algorithm: Sequence[str] = ("max", "most_recent"),
    element: FloatFormat = E4M3FN,
    preset: str = "te_delayed",
) -> pd.DataFrame:
    """Every combination of a delayed policy's settings on one or several recorded tensors: one row for each.

    Args:    amaxes maps a tensor's name to its amaxes (an AmaxTrace's `series()`), or is one series.
    """
    import pandas as pd

    for name, value in (("history_len", history_len), ("margin", margin), ("algorithm", algorithm)):
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            raise TypeError(f"{name} must be a list, got {value!r:.80}; write [{value!r:.80}]")
    named = dict(amaxes) if isinstance(amaxes, Mapping) else {"tensor": amaxes}
    policies = [
        tensor_scale_preset(preset, element, history_len=length, margin=m, amax_compute_algo=how)
        for how in algorithm
        for length in (history_len if how == "max" else history_len[:1])
        for m in margin
    ]
    frames = []
    for name, series in named.items():
        frame = replay_tensor_scales(series, policies).to_frame()
        frame.insert(0, "tensor", name)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _checked(amax: object) -> np.ndarray:
    """(steps,) float32. Raises TypeError or ValueError for what is no series of largest magnitudes."""
    try:
        series = np.ascontiguousarray(amax, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"amax is a series of numbers, one per step, got {amax!r:.100}") from error
    if series.ndim != 1 or not len(series):
        raise ValueError(f"amax has one number per step, shape (steps,), got shape {series.shape}")
    if (series < 0).any():
        step = int((series < 0).argmax())
        raise ValueError(f"an amax is a largest magnitude, at least 0, got {series[step]} at step {step}; take abs()")
    return series


class _Windows:
    """Largest entry of the last L steps for any L, from maxima over powers of two; the time before is 0."""

    def __init__(self, series: np.ndarray) -> None:
        self.steps = len(series)
        level = np.concatenate([np.zeros(self.steps, dtype=np.float32), series])
        self.levels = [level]
        while 2 ** len(self.levels) <= self.steps:
            half = 2 ** (len(self.levels) - 1)
            level = level.copy()
            level[half:] = np.maximum(self.levels[-1][half:], self.levels[-1][:-half])
            self.levels.append(level)

    def largest(self, length: int) -> np.ndarray:
        """(steps,) maximum over each step and the `length` - 1 before it."""
        length = min(length, self.steps)
        level = self.levels[length.bit_length() - 1]
        back = length - 2 ** (length.bit_length() - 1)
        return np.maximum(level[self.steps :], level[self.steps - back : 2 * self.steps - back])


def _scales(p: TensorScalePolicy, series: np.ndarray, windows: dict[bool, _Windows]) -> np.ndarray:
    """(steps,) float32: the scale that each step is cast with."""
    if not p.delayed:
        return _by_the_rule(p, series)
    counts = np.full(len(series), True) if p.unfused else series != 0  # the kernel leaves a step without an amax out
    if not counts.any():
        return np.ones_like(series)
    counted = series[counts]
    if p.most_recent:
        reached = counted
    else:
        if p.unfused not in windows:
            windows[p.unfused] = _Windows(counted if p.unfused else np.nan_to_num(counted, nan=0.0, posinf=np.inf))
        reached = windows[p.unfused].largest(p.history_len)
    after = np.ones(len(series) + 1, dtype=np.float32)
    after[1:][counts] = _by_the_rule(p, reached)
    renewed = np.concatenate([[True], counts])
    renewed[1:][counts] = ~np.isnan(after[1:][counts])  # elsewhere a scale stays what it was
    return after[np.maximum.accumulate(np.where(renewed, np.arange(len(after)), 0))][:-1]


def _by_the_rule(p: TensorScalePolicy, reached: np.ndarray) -> np.ndarray:
    """The scale after one step of the policy for each of many amaxes, each by itself; NaN where it does not renew."""
    many = replace(p, history_len=torch.ones(len(reached), dtype=torch.int64))
    state = initial_tensor_scale(many)
    state = state._replace(scale=torch.full_like(state.scale, torch.nan))
    return advance_tensor_scale(many, state, torch.tensor(reached)).scale.numpy()


def _judged(p: TensorScalePolicy, product: np.ndarray) -> tuple[int, int, float, float]:
    """Of (steps,) scaled amaxes: how many are clipped, the first, the largest overshoot, and the bits left unused."""
    over = product > np.float32(p.element_max) * _SLACK
    worst = float(np.nan_to_num(product, nan=0.0, posinf=np.inf).max()) / p.element_max
    _, exponent = np.frexp(product[(product > 0) & ~over])
    unused = np.frexp(np.float32(p.element_max))[1] - exponent.mean() if len(exponent) else 0.0
    return int(over.sum()), int(over.argmax()) if over.any() else -1, worst, float(unused)
