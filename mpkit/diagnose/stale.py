"""Which tensor was clipped by a stale scale, and which recipe the recorded amaxes allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpkit.arguments import check_kind
from mpkit.diagnose.words import said
from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import tensor_scale_preset
from mpkit.record import AmaxTrace, Trace
from mpkit.replay.ceilings import flushed_by_current_scale
from mpkit.replay.percent import percent
from mpkit.replay.tensor_scales import replay_tensor_scales

_FLUSHED_TOO_MUCH = 0.05


@dataclass(frozen=True)
class StaleScale:
    """A tensor that grew faster than its delayed scale followed.

    tensor:    its name.
    steps:     how many steps were clipped.
    first:     the first of them.
    overshoot: how many times too large the largest element was at worst.
    """

    tensor: str
    steps: int
    first: int
    overshoot: float

    def __str__(self) -> str:
        return said("stale", "scale", **vars(self))


def stale_scales(trace: AmaxTrace, preset: str = "te_delayed", **options: object) -> list[StaleScale]:
    """The tensors that a delayed policy would have clipped on this run, the worst first.

    Gradients count in E5M2, inputs and weights in E4M3. The first step, which every delayed policy casts with scale 1,
    is left out.

    Args:    preset and options as in `policies.tensor_scale_preset`.
    Raises:  TypeError if `trace` is no AmaxTrace; ValueError for an unknown preset, and for an amax that is inf or NaN.

    >>> trace = AmaxTrace(("0.input", "0.grad"), np.array([[1, 1], [1, 1], [90, 1]], dtype=np.float32))
    >>> print(*stale_scales(trace))
    0.input: its scale was stale in 1 step(s), first in step 2; the largest element was 90 times what the scale holds
    """
    check_kind("trace", trace, AmaxTrace, "an AmaxTrace, as AmaxRecorder.trace() gives it")
    found = []
    for name, series in trace.series().items():
        if not np.isfinite(series).all():
            step = int(np.isfinite(series).argmin())
            raise ValueError(said("stale", "broken", name=name, value=series[step], step=step))
        element = E5M2 if name.endswith(".grad") else E4M3FN
        policy = tensor_scale_preset(preset, element, **options)
        replayed = replay_tensor_scales(series, [policy], scales=True)
        assert replayed.scales is not None
        overshoot = (series * replayed.scales[0] / np.float32(element.max))[1:]
        clipped = overshoot > 1 + 2.0**-22
        if clipped.any():
            first = int(clipped.argmax()) + 1
            found.append(StaleScale(name, int(clipped.sum()), first, float(overshoot.max())))
    return sorted(found, key=lambda stale: -stale.overshoot)


def recommend_recipe(
    trace: AmaxTrace, histograms: Trace | None = None, *, history_len: int = 1024
) -> tuple[str, tuple[str, ...]]:
    """A recipe whose scales would have fitted this run, and why.

    "mxfp8" where the histograms show that one scale for a whole tensor, even one from the tensor itself, would flush
    over 5 % of an activation's values to zero in E4M3: blocks have scales of their own. Else "te_current" where a
    delayed scale went stale. Else "te_hybrid_delayed".

    Amaxes say whether a scale fits the largest element. Histograms say how many small elements become zero. Neither
    says how much the training suffers. `ledger(network).operands` counts what is clipped and flushed under any recipe.

    Args:    trace: `Recorder(..., amaxes=True).amax_trace()`; histograms: the `trace()` of the same recorder, made with
             `activations=True`.
    Raises:  TypeError for another kind of trace; ValueError for histograms without activations, or a NaN or inf amax.
    """
    stale = stale_scales(trace, amax_history_len=history_len)
    flushed = [] if histograms is None else _flushed_reasons(histograms)
    tensors, steps = len(trace.tensors), max(len(trace) - 1, 1)
    seen = [said("stale", "none", tensors=tensors, steps=steps)]
    if stale:
        seen = [said("stale", "some", count=len(stale), tensors=tensors), str(stale[0])]
    return "mxfp8" if flushed else "te_current" if stale else "te_hybrid_delayed", (*flushed, *seen)


def _flushed_reasons(histograms: Trace) -> list[str]:
    """One sentence for each of the three activations of which one scale would flush the largest shares to zero."""
    check_kind("histograms", histograms, Trace, "a Trace, as Recorder.trace() gives it")
    if (seen := histograms.activations) is None:
        raise ValueError("the trace has no histograms of activations; record it with Recorder(..., activations=True)")
    shares = flushed_by_current_scale(seen, E4M3FN)
    means = np.nanmean(np.where(np.isnan(shares).all(axis=0), 0.0, shares), axis=0)
    worst = [i for i in np.argsort(-means)[:3] if means[i] > _FLUSHED_TOO_MUCH]
    return [said("stale", "flushed", name=seen.names[i], share=percent(means[i], 1)) for i in worst]
