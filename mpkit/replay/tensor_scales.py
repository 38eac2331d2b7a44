"""What other tensor-scale policies would have done on recorded amaxes: thousands of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpkit.arguments import check_flags
from mpkit.formats import E4M3FN, FloatFormat
from mpkit.policies import TensorScalePolicy, tensor_scale_preset
from mpkit.policies.rule import FLOAT32_MAX
from mpkit.policies.tensor_scale import current_scale

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
    series = checked_amaxes(amax)
    rows = list(policies)
    if not rows or not all(isinstance(p, TensorScalePolicy) and not p.shape for p in rows):
        raise TypeError(f"policies are single TensorScalePolicy objects, at least one, got {rows!r:.200}")
    n, steps = len(rows), len(series)
    kept = np.empty((n, steps), dtype=np.float32) if scales else None
    clipped, first = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    worst, unused = np.zeros(n), np.zeros(n)
    tables: dict[tuple[bool, bool], _Windows] = {}
    with np.errstate(all="ignore"):
        shared: dict[Any, np.ndarray] = {}
        nonzero = bool((series > 0).all())
        for i, p in enumerate(rows):
            used = _scales_used(p, series, tables, shared)
            product = series * used
            over = product > np.float32(p.element_max) * _SLACK
            clipped[i] = np.count_nonzero(over)
            if clipped[i]:
                first[i] = over.argmax()
            worst[i] = _finite_max(product) / p.element_max
            unused[i] = _unused(product, nonzero and not clipped[i], over, p.element_max)
            if kept is not None:
                kept[i] = used
    return TensorScaleReplay(rows, clipped, first, worst, unused, kept)


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


def checked_amaxes(amax: object) -> np.ndarray:
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


def _scales_used(
    p: TensorScalePolicy, series: np.ndarray, tables: dict[Any, _Windows], shared: dict[Any, Any]
) -> np.ndarray:
    """(steps,) float32: the scale that each step is cast with."""
    if not p.delayed:
        return current_scale(p, torch.from_numpy(series.copy())).numpy()
    key = (p.unfused, p.most_recent)
    if key not in tables:
        counted = series if p.unfused else series[series != 0]  # the kernel leaves a step without an amax out
        if not len(counted):
            return np.ones_like(series)
        inner = counted if p.unfused or p.most_recent else np.nan_to_num(counted, nan=0.0, posinf=np.inf)
        tables[key] = _Windows(inner)
    reached = shared.get(("amax", key, p.history_len))
    if reached is None:
        reached = tables[key].largest(1 if p.most_recent else p.history_len)
        shared.clear() if len(shared) > 64 else None
        shared["amax", key, p.history_len] = reached
    limit = np.float32(p.element_max)
    if p.unfused:
        after = (np.float32(1) / reached) * limit / np.float32(2.0**p.margin)
    else:
        after = np.float32(p.element_max * 2.0**-p.margin) / reached
    lowest, highest = after.min(), after.max()
    if not (lowest > 0 and highest <= FLOAT32_MAX):  # else every amax was finite and positive
        valid = (reached > 0) & (reached < np.inf)
        np.minimum(after, np.float32(FLOAT32_MAX), out=after)
        latest = np.maximum.accumulate(np.where(valid, np.arange(len(after)), -1))
        after = np.where(latest >= 0, after[latest], np.float32(1))
    if p.power_of_two:
        power = (after.astype(np.float64).view(np.int64) & (0x7FF << 52)).view(np.float64)
        after = np.where(after == 1, after, power.astype(np.float32))
    if len(after) != len(series):  # steps left out keep the scale before them
        counts = np.cumsum(series != 0)
        after = np.where(counts > 0, after[np.maximum(counts - 1, 0)], np.float32(1))
    used = np.empty_like(series)
    used[0], used[1:] = 1, after[:-1]
    return used


def _finite_max(product: np.ndarray) -> float:
    largest = product.max()
    return float(largest if np.isfinite(largest) else np.nan_to_num(product, nan=0.0, posinf=np.inf).max())


def _unused(product: np.ndarray, plain: bool, over: np.ndarray, limit: float) -> float:
    """Mean distance of exponents, limit to product, over the steps that were not clipped and were not zero."""
    exponent = product.view(np.int32) >> 23
    if not plain:
        exponent = exponent[(product > 0) & ~over]
    top = int(np.float32(limit).view(np.int32)) >> 23
    return top - float(exponent.mean()) if len(exponent) else 0.0
