"""Which tensor was clipped by a stale scale, and which recipe the recorded amaxes allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import tensor_scale_preset
from mpkit.record.amax import AmaxTrace
from mpkit.replay.tensor_scales import replay_tensor_scales


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
        return (
            f"{self.tensor}: its scale was stale in {self.steps} step(s), first in step {self.first}; the largest "
            f"element was {self.overshoot:.3g} times what the scale holds"
        )


def stale_scales(trace: AmaxTrace, preset: str = "te_delayed", **options: object) -> list[StaleScale]:
    """The tensors that a delayed policy would have clipped on this run, the worst first.

    Gradients count in E5M2, inputs and weights in E4M3. The first step, which every delayed policy casts with scale 1,
    is left out.

    Args:    preset and options as in `policies.tensor_scale_preset`.
    Raises:  TypeError if `trace` is no AmaxTrace; ValueError for an unknown preset.

    >>> trace = AmaxTrace(("0.input", "0.grad"), np.array([[1, 1], [1, 1], [90, 1]], dtype=np.float32))
    >>> print(*stale_scales(trace))
    0.input: its scale was stale in 1 step(s), first in step 2; the largest element was 90 times what the scale holds
    """
    if not isinstance(trace, AmaxTrace):
        raise TypeError(f"need an AmaxTrace, as AmaxRecorder.trace() gives it, got {type(trace).__name__}")
    found = []
    for name, series in trace.series().items():
        element = E5M2 if name.endswith(".grad") else E4M3FN
        policy = tensor_scale_preset(preset, element, **options)
        replayed = replay_tensor_scales(series, [policy], scales=True)
        assert replayed.scales is not None
        overshoot = np.nan_to_num(series * replayed.scales[0] / np.float32(element.max))[1:]
        clipped = overshoot > 1 + 2.0**-22
        if clipped.any():
            first = int(clipped.argmax()) + 1
            found.append(StaleScale(name, int(clipped.sum()), first, float(overshoot.max())))
    return sorted(found, key=lambda stale: -stale.overshoot)


def recommend_recipe(trace: AmaxTrace, *, history_len: int = 1024) -> tuple[str, tuple[str, ...]]:
    """A recipe whose scales would have fitted this run, and why: delayed where no scale went stale, else current.

    Amaxes say whether a scale fits the largest element. They do not say what becomes of the small ones, nor how far
    training suffers; `ledger(network).operands` counts what is flushed under any recipe.
    """
    stale = stale_scales(trace, amax_history_len=history_len)
    steps = max(len(trace) - 1, 1)
    if not stale:
        return "te_hybrid_delayed", (f"no scale of {len(trace.tensors)} tensors went stale in {steps} steps",)
    return "te_current", (f"{len(stale)} of {len(trace.tensors)} tensors had a stale scale", str(stale[0]))
