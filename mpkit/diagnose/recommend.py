"""From a recorded run to a loss scale, a policy and a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpkit.arguments import check_kind
from mpkit.diagnose.words import said
from mpkit.formats import FP16
from mpkit.policies import ScalePolicy
from mpkit.record import Trace
from mpkit.replay import ceilings, flushed, replay
from mpkit.replay.percent import percent

_CLOSE = 0.002  # scales that lose hardly more than the best: the largest of them is taken
_LOST_TOO_MUCH = 0.05
_UNUSED = 20  # bits between scale and usual ceiling above which a scale is not considered
_SCALES = 2.0 ** np.arange(-14, 25)
_WINDOWS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

_say = partial(said, "recommend")


@dataclass(frozen=True)
class Recommendation:
    """What to train with.

    dtype:   "fp16" or "bf16".
    static:  the fixed power-of-two scale that loses least, to skipped steps and to zeros; None with bf16.
    policy:  a dynamic policy; None with bf16, which needs no scale.
    reasons: one sentence each, with the numbers behind it.
    """

    dtype: str
    static: float | None
    policy: ScalePolicy | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        scale = _say("no_scale" if self.policy is None else "scale", static=self.static, policy=self.policy)
        return "\n".join([_say("summary", dtype=self.dtype, scale=scale), *(f"  {r}" for r in self.reasons)])


def recommend(trace: Trace) -> Recommendation:
    """Static scale, dynamic policy, and fp16 or bf16, from what a run showed.

    bf16 when the forward pass left float16 (no scale repairs that), when every step overflows at every scale, or when
    even the best scale loses over 5 % of the gradient values; else fp16. The policy is the best of a replayed sweep
    over starts, factors and windows.
    Raises:  ValueError for a trace without histograms, too short to have seen finite gradients, or with zeros alone.
    """
    check_kind("trace", trace, Trace, "a Trace")
    if not len(trace.gradients.step):
        raise ValueError(_say("no_histograms"))
    if forward := tuple(_forward_reasons(trace)):
        return Recommendation("bf16", None, None, (*forward, _say("bf16")))
    steps = len(trace)
    if trace.overflow.all():  # either no scale is low enough, or the search for the ceiling had only begun
        if (lowest := float(trace.scale.min())) > 1:
            raise ValueError(_say("ceiling_unknown", steps=steps, lowest=lowest))
        reasons = _say("never_finite", steps=steps, lowest=lowest), _say("not_bf16_either")
        return Recommendation("bf16", None, None, reasons)
    tops = ceilings(trace, FP16)
    if not np.isfinite(tops).any():
        raise ValueError(_say("all_zero", steps=steps))
    if (tops[np.isfinite(tops)] < _SCALES[0]).all():  # a step whose gradients are all zero bears every scale
        return Recommendation("bf16", None, None, (_say("too_large", lowest=_SCALES[0]), _say("bf16")))
    static, lost = _static(trace, tops)
    spread = _say("spread", static=static, share=percent(float(np.mean(tops < static)), 1))
    loses = {"spread": spread, "lost": percent(lost, 1)}
    if lost > _LOST_TOO_MUCH:
        return Recommendation("bf16", None, None, (_say("too_wide", **loses), _say("bf16")))
    policy, skipped = _best_policy(trace, static)
    reasons = _say("loses", **loses), _say("skipped", skipped=skipped, steps=steps)
    return Recommendation("fp16", static, policy, reasons)


def _forward_reasons(trace: Trace) -> Iterator[str]:
    lost = ~np.isfinite(trace.loss)
    if lost.any():
        yield _say("loss_not_finite", count=lost.sum(), first=trace.step[lost.argmax()])
    if (seen := trace.activations) is not None:
        left = np.flatnonzero((~(seen.largest <= FP16.max)).any(axis=0))  # NaN too
        yield from (_say("output_left", name=seen.names[i]) for i in left[:3])


def _static(trace: Trace, tops: np.ndarray) -> tuple[float, float]:
    """The largest power of two among the best, and the mean share of gradient values that it loses to zero."""
    known = tops[(tops > 0) & np.isfinite(tops)]  # where all gradients are zero no scale is too large
    usual = np.median(known) if len(known) else 1.0
    scales = _SCALES[min(usual / 2.0**_UNUSED, _SCALES[-1]) <= _SCALES]  # lower, most of the format would lie idle
    skipped = (tops[:, None] < scales).mean(axis=0)
    zeroed = flushed(trace, np.broadcast_to(scales, (len(trace.gradients.step), len(scales))), FP16).mean(axis=0)
    lost = 1 - (1 - skipped) * (1 - zeroed)
    best = np.flatnonzero(lost <= lost.min() + _CLOSE)[-1]
    return float(scales[best]), float(zeroed[best])


def _best_policy(trace: Trace, static: float) -> tuple[ScalePolicy, int]:
    limits = {"init_scale": static, "min_scale": _SCALES[0], "max_scale": _SCALES[-1], "name": "recommended"}
    windows = [window for window in _WINDOWS if window <= max(10, len(trace) // 2)]
    policies = [ScalePolicy(growth_interval=window, **limits) for window in windows]
    best = replay(trace, policies, fmt=FP16, scales=False).iloc[0]
    return policies[int(best["policy"])], int(best["skipped"])
