"""What other tensor-scale policies would have done on recorded amaxes: thousands of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpkit.arguments import check_flags, check_kind
from mpkit.formats import E4M3FN, FloatFormat
from mpkit.policies import TensorScalePolicy, advance, initial_tensor_scale, stack_tensor_scales, tensor_scale_preset
from mpkit.replay.simulate import array_of

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

        frame = pd.DataFrame([vars(policy) for policy in self.policies])
        told = [name for name in frame if name in ("name", "history_len") or frame[name].nunique() > 1]
        results = {key: getattr(self, key) for key in ("clipped", "first", "worst", "unused_bits")}
        return frame[told].rename(columns={"name": "policy"}).assign(**results)


def replay_tensor_scales(
    amax: Sequence[float] | np.ndarray, policies: Iterable[TensorScalePolicy], *, scales: bool = False
) -> TensorScaleReplay:
    """Run many policies over the recorded amaxes of one tensor.

    The numbers are those of `policies.advance` step by step, bit for bit. All steps are computed at once: what a scale
    depends on is the largest amax of its window. A clipped step would have changed the run that follows; the recorded
    amaxes cannot show that.

    Args:    amax (steps,): largest magnitude of the tensor at each step; `scales` keeps the scale of every step.
    Raises:  ValueError for what is no series of magnitudes, TypeError for what are no policies.

    >>> replay_tensor_scales([1.0, 1.0, 64.0, 1.0], [tensor_scale_preset("te_delayed")]).clipped
    array([1])
    """
    check_flags(scales=scales)
    series = _checked(amax)
    rows = list(policies)
    if not rows or not all(isinstance(p, TensorScalePolicy) and not p.shape for p in rows):
        raise TypeError(f"policies are single TensorScalePolicy objects, at least one, got {rows!r:.200}")
    used = _scales(series, rows)
    limit = np.array([p.element_max for p in rows], dtype=np.float32)
    with np.errstate(all="ignore"):
        product = series * used
        over = product > np.minimum(limit * _SLACK, np.finfo(np.float32).max)[:, None]
        fits = (product > 0) & ~over
        worst = np.nan_to_num(product, nan=0.0, posinf=np.inf).max(axis=1) / limit.astype(np.float64)
        unused = np.where(fits, np.frexp(limit)[1][:, None] - np.frexp(product)[1], 0).sum(axis=1)
    first = np.where(over.any(axis=1), over.argmax(axis=1), -1)
    unused_bits = unused / np.maximum(fits.sum(axis=1), 1)
    return TensorScaleReplay(rows, over.sum(axis=1), first, worst, unused_bits, used if scales else None)


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
        check_kind(name, value, (list, tuple, range, np.ndarray), "a list")
    named = dict(amaxes) if isinstance(amaxes, Mapping) else {"tensor": amaxes}
    policies = [
        tensor_scale_preset(preset, element, history_len=length, margin=m, amax_compute_algo=how)
        for how in algorithm
        for length in (history_len if how == "max" else history_len[:1])
        for m in margin
    ]
    frames = {name: replay_tensor_scales(series, policies).to_frame() for name, series in named.items()}
    return pd.concat(frames, names=["tensor"]).reset_index("tensor").reset_index(drop=True)


def _checked(amax: object) -> np.ndarray:
    """(steps,) float32. Raises ValueError for what is no series of largest magnitudes."""
    series = np.ascontiguousarray(array_of("amax", amax, np.float32))
    if series.ndim != 1 or not len(series):
        raise ValueError(f"amax has one number per step, shape (steps,), got shape {series.shape}")
    if (series < 0).any():
        step = int((series < 0).argmax())
        raise ValueError(f"an amax is a largest magnitude, at least 0, got {series[step]} at step {step}; take abs()")
    return series


def _scales(series: np.ndarray, rows: list[TensorScalePolicy]) -> np.ndarray:
    """(policies, steps) float32: the scale that each step is cast with, by the rule on every step by itself."""
    reached = np.empty((len(rows), len(series)), dtype=np.float32)
    known: dict[Any, np.ndarray] = {}
    for row, p in zip(reached, rows):
        window = (p.unfused, 1 if p.most_recent else p.history_len) if p.delayed else None
        if window not in known:
            known[window] = series if window is None else _reached(series, *window)
        row[:] = known[window]
    vector = stack_tensor_scales(rows)
    columns: dict[str, Any] = {key: value[:, None] for key, value in vector.tensors().items()}
    alone = replace(vector, **columns | {"history_len": torch.ones(reached.shape, dtype=torch.int64)})
    state = initial_tensor_scale(alone)
    state = state._replace(scale=torch.full_like(state.scale, torch.nan))  # NaN: not renewed in this step
    after = advance(alone, state, torch.from_numpy(reached)).scale.numpy()
    # delayed: the newest scale of an earlier step, 1 before there is one
    before = np.concatenate([np.ones((len(rows), 1), dtype=np.float32), after[:, :-1]], axis=1)
    newest = np.maximum.accumulate(np.where(np.isnan(before), 0, np.arange(len(series))), axis=1)
    delayed = np.array([p.delayed for p in rows])[:, None]
    return np.where(delayed, np.take_along_axis(before, newest, axis=1), after)


def _reached(series: np.ndarray, unfused: bool, length: int) -> np.ndarray:
    """(steps,) the largest amax of a history of `length` steps; 0 in a step that does not count."""
    if unfused:
        return _largest(series, min(length, len(series)))
    counts = series != 0  # the kernel leaves a step without an amax out
    inside = np.fmax(series[counts], np.float32(0))  # NaN counts as 0
    reached = np.zeros_like(series)
    reached[counts] = _largest(inside, min(length, len(inside)))
    return reached


def _largest(series: np.ndarray, length: int) -> np.ndarray:
    """The maximum over each step and the `length` - 1 before it, from those over half as many."""
    if length <= 1:
        return series
    half = (length + 1) // 2
    part = _largest(series, half)
    return np.concatenate([part[: length - half], np.maximum(part[length - half :], part[: half - length])])
