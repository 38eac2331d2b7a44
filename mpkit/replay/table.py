"""Ranked tables: what each policy would have done on a recorded run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.arguments import check_count, check_flags, check_kind, check_number
from mpkit.formats import FloatFormat
from mpkit.policies import STOPS, ScalePolicy, stack
from mpkit.record import Trace
from mpkit.replay.ceilings import CAVEAT, ceilings, flushed
from mpkit.replay.percent import percent
from mpkit.replay.simulate import Simulation, simulate

if TYPE_CHECKING:
    import pandas as pd

Policies = ScalePolicy | Mapping[str, ScalePolicy] | Sequence[ScalePolicy]
_SAMPLES = 512  # steps at which headroom and flushed shares are looked at, spread over the run
_FAR_BELOW = 24  # bits of unused range that count as a collapse: float16 has 40 in all
KEPT = 4_000_000  # policy-steps up to which `replay` returns every scale


def replay(
    trace: Trace,
    policies: Policies,
    *,
    fmt: FloatFormat | str | None = None,
    tops: np.ndarray | None = None,
    scales: bool | None = None,
    device: str = "cpu",
) -> pd.DataFrame:
    """What each policy would have done on this run, best first.

    Args:
        policies: one, a sequence, a vector, or a mapping from names to policies.
        fmt:      the format to replay in; None: the trace's own. A trace recorded in float32 needs "fp16" here.
        tops:     the ceiling of each step (N,), for instance a drawn one; None: `ceilings(trace, fmt)`.
        scales:   add the column `scale`, an array with the scale that each step was made with; None: when the work
                  is small. Steps after a policy's own error are NaN.
        device:   where the policies are stepped.
    Raises:   TypeError, ValueError for a trace without steps, ceilings of other steps, or anything that is no policy.
    Returns:  one row per policy. `skipped`, `skipped_share`; `first_good` index of the first applied step (N: none);
              `headroom` mean bits between scale and ceiling over applied steps; `flushed` mean share of non-zero
              gradient values lost to zero there; `lost` share of the training signal lost to both, the rank (to skipped
              steps alone where `flushed` is NaN, since no applied step has a histogram);
              `final_scale`, `lowest_scale`; `collapsed` and `why`. `frame.attrs["caveat"]` says what it cannot know.
    """
    import pandas as pd

    _check_trace(trace)
    names, vector = _named(policies)
    tops = ceilings(trace, fmt) if tops is None else tops
    check_kind("tops", tops, np.ndarray, "an array with the ceiling of each step")
    if tops.shape != (len(trace),):
        raise ValueError(f"tops need one ceiling for each of the {len(trace)} steps, got shape {tops.shape}")
    scales = len(trace) * len(names) <= KEPT if scales is None else scales
    check_flags(scales=scales)
    many = len(trace.rows)  # the steps with a histogram
    sample = trace.rows[np.linspace(0, many - 1, min(many, _SAMPLES)).astype(int)]
    done = simulate(tops, vector, sample=None if scales else sample, device=device)
    seen, top = done.sampled[sample] if scales else done.sampled, tops[sample][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(np.abs(top)) - np.log2(seen)
    lost, last = flushed(trace.thinned(trace.step[sample]), seen, fmt), sample.max(initial=0)
    tail = sample >= min(len(trace) * 0.9, last)  # a short trace has a last step, if no last tenth
    why = _why(done, (seen <= top)[tail], bits[tail], lost[tail])
    told = _columns(done, len(trace), seen <= top, bits, lost)
    frame = pd.DataFrame({"policy": names, **told, "collapsed": [*map(bool, why)], "why": why})
    if scales:
        frame["scale"] = list(done.sampled.T)
    frame = frame.sort_values(["collapsed", "lost", "headroom"], kind="stable", ignore_index=True)
    frame.attrs["caveat"] = CAVEAT
    return frame


def sweep(
    trace: Trace,
    *,
    init: float | Iterable[float] | None = None,
    factor: float | Iterable[float] = 2.0,
    window: int | Iterable[int] = 2000,
    fmt: FloatFormat | str | None = None,
    min_scale: float = 0.0,
    device: str = "cpu",
) -> pd.DataFrame:
    """`replay` of every combination of start, factor (up and down) and growth window, best first.

    Args:
        init:    scales to start from; None: the one that the trace started with.
        factor:  growth factors (> 1); the scale backs off by division by the same.
        window:  finite steps before growth.
    Returns:  the columns of `replay` with `init`, `factor`, `window` in place of the policy.
    Raises:   ValueError for a factor that does not move the scale, a window that is not whole, or an empty list.
    """
    _check_trace(trace)
    columns: dict[str, Any] = {"init": trace.scale[:1] if init is None else init, "factor": factor, "window": window}
    grid = list(itertools.product(*(np.atleast_1d(values).tolist() for values in columns.values())))
    frame = replay(trace, [swept(i, f, w, min_scale) for i, f, w in grid], fmt=fmt, scales=False, device=device)
    order = frame.pop("policy").astype(int)
    for position, (name, values) in enumerate(zip(columns, zip(*grid))):
        frame.insert(position, name, np.array(values, dtype=None if name == "window" else float)[order])
    return frame


def swept(init: float, factor: float, window: int, min_scale: float = 0.0) -> ScalePolicy:
    """The policy of one cell of `sweep`."""
    check_number("factor", factor, low=1.0, open_low=True)  # the scale has to move
    check_count("window", window)
    return ScalePolicy.by_factor(init, float(factor), window, min_scale, name="sweep")


def _check_trace(trace: Trace) -> None:
    check_kind("trace", trace, Trace, "a Trace, as Trace.load(path) or Recorder.trace() give it")
    if not len(trace):
        raise ValueError("the trace has no steps to replay; record some with Recorder(network, ...)")


def _named(policies: Policies) -> tuple[list[str], ScalePolicy]:
    if isinstance(policies, ScalePolicy):
        if policies.shape:
            return [str(i) for i in range(policies.shape[0])], policies
        policies = {policies.name or "policy": policies}
    if isinstance(policies, Sequence) and not isinstance(policies, str):
        policies = {str(i): policy for i, policy in enumerate(policies)}
    check_kind("policies", policies, Mapping, "one ScalePolicy, as preset() gives, or a sequence or mapping of them")
    return list(policies), stack(policies.values())


def _columns(done: Simulation, steps: int, applied: np.ndarray, bits: np.ndarray, lost: np.ndarray) -> dict[str, Any]:
    """What came of each policy: of (sampled steps, policies) which were applied, bits below the ceiling, share lost."""
    flush, ended = _mean(lost, applied), done.raised_at >= 0
    share = done.skipped / np.where(ended, done.raised_at + 1, steps)  # of the steps that were made, one at least
    return {
        "skipped": done.skipped,
        "skipped_share": share,
        "first_good": done.first_good,
        "headroom": _mean(bits, applied & np.isfinite(bits)),
        "flushed": flush,
        "lost": np.where(ended, 1.0, 1 - (1 - share) * (1 - np.nan_to_num(flush, nan=0.0))),
        "final_scale": done.final,
        "lowest_scale": done.lowest,
    }


def _mean(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Mean over steps of (steps, policies), counting `where`; NaN where nothing counts."""
    with np.errstate(invalid="ignore"):
        return np.where(where, values, 0.0).sum(axis=0) / np.where(where.any(axis=0), where.sum(axis=0), np.nan)


def _why(done: Simulation, applied: np.ndarray, bits: np.ndarray, lost: np.ndarray) -> list[str]:
    """For each policy the sentence that says how it collapsed at the end of the run; "" for one that did not."""
    stuck = (applied.sum(axis=0) == 0) & (len(applied) > 0)
    gone, unused = _mean(lost, applied), _mean(bits, applied & np.isfinite(bits))
    words = []
    for p in range(len(done.final)):
        if done.raised_at[p] >= 0:
            words.append(f"stopped at step {done.raised_at[p]}: {STOPS[done.raised[p]]}")
        elif not 0 < done.final[p] < math.inf:
            words.append(f"the scale ended at {done.final[p]:g}")
        elif stuck[p]:
            words.append("every step of the last tenth of the run was skipped")
        elif gone[p] > 0.5:
            words.append(f"{percent(gone[p])} of the non-zero gradients were lost in the last tenth of the run")
        else:
            far = unused[p] > _FAR_BELOW
            words.append(f"the scale ended {unused[p]:.0f} bits below the ceiling" if far else "")
    return words
