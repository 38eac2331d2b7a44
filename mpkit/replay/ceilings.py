"""What a recorded run says about scales that it was not made with."""

from __future__ import annotations

import math

import numpy as np

from mpkit.arguments import check_kind
from mpkit.formats import FloatFormat, get_format
from mpkit.record import Ranges, Trace

CAVEAT = (
    "A replay takes the recorded gradients as given. Another policy would have skipped other steps, so the weights "
    "and later gradients would have been a little different. A replay looks at the gradients of parameters only, not "
    "at those of activations. A value that was flushed to zero at the recorded scale stays zero at every other scale. "
    "Unless they were measured, the ceilings of skipped steps and of steps without a histogram are estimates."
)


def ceilings(trace: Trace, fmt: FloatFormat | str | None = None) -> np.ndarray:
    """The largest loss scale with finite gradients, for each step.

    If the trace holds ceilings that were measured in this format, these are returned. If not, they are computed from
    the histograms: a scale S overflows when S * (largest gradient) rounds to inf. In steps without a histogram the
    largest gradient is interpolated (in bits) between recorded ones. The ceiling of a step that overflowed lies below
    the scale of that step: it is the interpolated ceiling where that lies below, else half the scale. Where the loss
    itself was not finite no scale helps, and the ceiling is negative.

    Args:    fmt: the format to replay in; None: the trace's own. In the trace's own format the recorded outcome of a
                  step overrules the estimate, so replaying the recorded policy gives the recorded run.
    Shapes:  (N,) float64; inf where all gradients of a step are zero.
    """
    fmt = _format(trace, fmt)
    if fmt.name in trace.measured:
        return trace.measured[fmt.name].copy()
    largest = trace.gradients.finite_largest()
    clean = (trace.gradients.nonfinite.sum(axis=1) == 0) & (largest > 0)
    top = np.full(len(trace), math.inf)
    if clean.any():
        edge = fmt.overflow_edge if fmt.overflow != "saturate" else math.inf
        bits = np.log2(edge) - np.log2(largest[clean])
        top = np.exp2(np.interp(trace.step, trace.gradients.step[clean], bits))
        exact = trace.rows[clean]
        top[exact] = np.nextafter(edge / largest[clean], 0)
        none = trace.rows[(trace.gradients.nonfinite.sum(axis=1) == 0) & (largest == 0)]
        top[none] = math.inf
    if fmt.name == get_format(trace.format).name:
        top = np.where(~trace.overflow, np.maximum(top, trace.scale), top)
        top = np.where(trace.overflow & (top >= trace.scale), trace.scale / 2, top)
    return np.where(np.isfinite(trace.loss), top, -1.0)


def flushed(trace: Trace, scales: np.ndarray, fmt: FloatFormat | str | None = None) -> np.ndarray:
    """Share of the recorded non-zero gradient values that become zero in `fmt` when multiplied by a scale.

    Shapes:  scales (H, P), one row per recorded histogram -> (H, P) float64 in 0..1; NaN where the scale is NaN.
    Edges:   the values of a bin count as spread evenly (in bits) over its power of two. At scales that are powers of
             two the share is exact up to ties. Rows without finite values give 0.
    """
    fmt = _format(trace, fmt)
    check_kind("scales", scales, np.ndarray, "an array of scales")
    if scales.ndim != 2 or len(scales) != len(trace.gradients.step):
        raise ValueError(f"scales need {len(trace.gradients.step)} rows, one a histogram, got shape {scales.shape}")
    return _flushed(trace.gradients.total(), trace.gradients.lowest, scales, fmt)


def flushed_by_current_scale(part: Ranges, fmt: FloatFormat) -> np.ndarray:
    """Share of the non-zero values of each tensor that become zero in `fmt` under a scale of its own amax.

    Shapes:  (H, P) float64 in 0..1; NaN where the amax is 0, inf or NaN. Approximate as `flushed`.
    """
    check_kind("part", part, Ranges, "Ranges, such as a trace's gradients")
    check_kind("fmt", fmt, FloatFormat, "a FloatFormat such as E4M3FN")
    with np.errstate(divide="ignore", invalid="ignore"):
        usable = (part.largest > 0) & np.isfinite(part.largest)
        scales = np.where(usable, fmt.max / part.largest.astype(np.float64), np.nan)
    shares = [_flushed(part.counts[:, p], part.lowest, scales[:, p : p + 1], fmt) for p in range(len(part.names))]
    return np.concatenate(shares, axis=1)


def _format(trace: Trace, fmt: FloatFormat | str | None) -> FloatFormat:
    """The format to replay a trace in."""
    check_kind("trace", trace, Trace, "a Trace")
    check_kind("fmt", fmt, (FloatFormat, str), "a FloatFormat, or the name of one,", optional=True)
    return fmt if isinstance(fmt, FloatFormat) else get_format(trace.format if fmt is None else fmt)


def _flushed(counts: np.ndarray, lowest: int, scales: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Histograms (H, B), scales (H, P) -> (H, P) share of the values below half the smallest number of `fmt`."""
    share = np.concatenate([np.zeros((len(counts), 1)), counts.cumsum(axis=1, dtype=np.float64)], axis=1)
    share = share / np.maximum(share[:, -1:], 1)
    with np.errstate(divide="ignore"):
        threshold = math.log2(fmt.min_subnormal) - 1 - np.log2(scales)  # at half the smallest value a tie goes to zero
    edges = np.arange(lowest, lowest + counts.shape[1] + 1)
    result = np.stack([np.interp(threshold[h], edges, share[h]) for h in range(len(counts))]) if len(counts) else scales
    return np.where(np.isnan(scales), np.nan, result)
