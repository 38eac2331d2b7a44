"""From a recorded run to a loss scale, a policy and a format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpkit.arguments import check_kind
from mpkit.formats import BF16, FP16, get_format
from mpkit.policies import ScalePolicy
from mpkit.record import Trace
from mpkit.replay import ceilings, flushed, replay
from mpkit.replay.percent import percent

_CLOSE = 0.002  # scales that lose hardly more than the best: the largest of them is taken
_LOST_TOO_MUCH = 0.05
_UNUSED = 20  # bits between scale and usual ceiling above which a scale is not considered


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
        scale = "no loss scale needed"
        if self.policy is not None:
            p = self.policy
            scale = (
                f"static scale {self.static:.10g}, or dynamic from {p.init_scale:.10g} with factor {p.growth_factor:g} "
                f"and window {p.growth_interval}"
            )
        return "\n".join([f"train in {self.dtype}: {scale}", *(f"  {r}" for r in self.reasons)])


def recommend(trace: Trace) -> Recommendation:
    """Static scale, dynamic policy, and fp16 or bf16, from what a run showed.

    bf16 when the forward pass left float16 (no scale repairs that) or when even the best scale loses over 5 % of the
    gradient values; else fp16. The policy is the best of a replayed sweep over starts, factors and windows.
    Raises:  ValueError for a trace without histograms, too short to have seen finite gradients, or with zeros alone.
    """
    check_kind("trace", trace, Trace, "a Trace")
    if not len(trace.gradients.step):
        raise ValueError("the trace has no gradient histograms; record it with Recorder(network, ...)")
    forward = _forward_reasons(trace)
    if forward:
        return Recommendation("bf16", None, None, (*forward, _bf16_sentence(trace)))
    if trace.overflow.all():
        return _never_finite(trace)
    tops = ceilings(trace, FP16)
    if not np.isfinite(tops).any():
        raise ValueError(
            f"all gradients of the {len(trace)} recorded steps are zero, which tells nothing about a scale; if they "
            "should not be, record in float32, or at a higher loss scale: in float16 small gradients become zero"
        )
    static, lost = _static(trace, tops)
    spread = f"a static scale of {static:.10g} overflows in {percent(float(np.mean(tops < static)), 1)} of the steps"
    if lost > _LOST_TOO_MUCH:
        reason = (
            f"{spread} and still loses {percent(lost, 1)} of the non-zero gradients: they span more than float16 holds"
        )
        return Recommendation("bf16", None, None, (reason, _bf16_sentence(trace)))
    policy, skipped = _best_policy(trace, static)
    return Recommendation(
        "fp16",
        static,
        policy,
        (
            f"{spread} and loses {percent(lost, 1)} of the non-zero gradients to zero",
            f"the dynamic policy would have skipped {skipped} of {len(trace)} steps",
        ),
    )


def _forward_reasons(trace: Trace) -> list[str]:
    reasons = []
    lost = ~np.isfinite(trace.loss)
    if lost.any():
        reasons.append(
            f"the loss itself was inf or NaN in {lost.sum()} steps, first in step {trace.step[lost.argmax()]}: the "
            "forward pass overflowed, which no loss scale repairs (if it overflows in bfloat16 too, the model is at "
            "fault)"
        )
    seen = trace.activations
    if seen is not None:
        largest = np.where(np.isfinite(seen.largest), seen.largest, np.inf)
        over = np.atleast_1d((largest > FP16.max).any(axis=0))
        left = [name for name, bad in zip(seen.names, over) if bad]
        reasons += [f"the output of module {name} left the range of float16" for name in left[:3]]
    return reasons


def _never_finite(trace: Trace) -> Recommendation:
    """No step was applied: either no scale is low enough, or the search for the ceiling had only begun."""
    lowest = float(trace.scale.min())
    if lowest > 1:
        raise ValueError(
            f"all {len(trace)} steps overflowed, down to a scale of {lowest:.10g}: the ceiling is not known yet; "
            "record until a step is applied, or ask diagnose(network, batch, loss_fn) for one batch"
        )
    reason = (
        f"all {len(trace)} steps overflowed, down to a scale of {lowest:.10g}: the scale is not to blame; ask "
        "diagnose(network, batch, loss_fn) where it begins"
    )
    return Recommendation("bf16", None, None, (reason, "if bfloat16 overflows too, the model or the data are at fault"))


def _bf16_sentence(trace: Trace) -> str:
    low = flushed(trace, np.ones((len(trace.gradients.step), 1)), BF16).mean()
    return (
        f"bfloat16 at scale 1 would lose {percent(float(low), 1)} of the non-zero gradients to zero: it has the range "
        "of float32, but three fraction bits less than float16"
    )


def _static(trace: Trace, tops: np.ndarray) -> tuple[float, float]:
    """The largest power of two among the best, and the mean share of gradient values that it loses to zero."""
    scales = 2.0 ** np.arange(-14, 25)
    known = tops[(tops > 0) & np.isfinite(tops)]  # where all gradients are zero no scale is too large
    usual = np.median(known) if len(known) else 1.0
    scales = scales[scales >= min(usual / 2.0**_UNUSED, scales[-1])]  # lower, most of the format would lie idle
    skipped = (tops[:, None] < scales).mean(axis=0)
    zeroed = flushed(trace, np.broadcast_to(scales, (len(trace.gradients.step), len(scales))), FP16).mean(axis=0)
    lost = 1 - (1 - skipped) * (1 - zeroed)
    best = np.flatnonzero(lost <= lost.min() + _CLOSE)[-1]
    return float(scales[best]), float(zeroed[best])


def _best_policy(trace: Trace, static: float) -> tuple[ScalePolicy, int]:
    windows = [w for w in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if w <= max(10, len(trace) // 2)]
    candidates = [
        ScalePolicy(
            init_scale=static, growth_interval=window, min_scale=2.0**-14, max_scale=2.0**24, name="recommended"
        )
        for window in windows
    ]
    table = replay(trace, candidates, fmt=get_format("fp16"), scales=False)
    best = table.iloc[0]
    return candidates[int(best["policy"])], int(best["skipped"])
