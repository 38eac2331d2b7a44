"""Running a policy: the Python oracle, a vector of policies at once, and the reason of every decision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpkit.arguments import check_kind, check_number

from .rule import FLOAT32_MAX, STOPS, ScalePolicy, ScaleState, Stop, advance, initial

REASONS = {
    "held": "gradients were finite, and the growth interval is not over",
    "grew": "a whole growth interval without overflow",
    "backed off": "an overflow",
    "tolerated": "an overflow that hysteresis or tolerance let pass",
    "at floor": "an overflow, and the scale cannot go lower: look at the model, not at the scale",
    "at cap": "gradients were finite, and the scale cannot go higher",
    "lifted": "an overflow below the floor: the scale was raised to it",
    "lowered": "growth was due above the cap: the scale was lowered to it",
    "stopped": "the policy raised its error",
}
"""Every word that `ScaleHistory.reasons` uses."""


@dataclass(frozen=True, eq=False)
class ScaleHistory:
    """What a policy did on a run of steps.

    `scale` (steps,) float64: the scale after each completed step; (steps, n) for a vector of n policies, NaN from the
    step on in which a policy raised. `skipped`, bool, same shape: steps whose update did not happen ((steps,) for a
    layer-wise policy, where one overflow skips all). `raised_at`: the 0-based step that raised, or None
    ((n,) int64 with -1 for none in a vector). `raised`: the sentence of `STOPS`, "" for none (a tuple in a vector).
    `start`: the scale of the first step; `final`: the state after the last.
    """

    policy: ScalePolicy
    finite: np.ndarray
    scale: np.ndarray
    skipped: np.ndarray
    raised_at: Any
    raised: Any
    final: ScaleState
    start: Any

    @cached_property
    def reasons(self) -> np.ndarray:
        """Why the scale is what it is after each step, same shape as `scale`: words of `REASONS`."""
        start = np.broadcast_to(self.start, self.scale.shape[1:])[None]
        return explain(self.policy, np.concatenate([start, self.scale[:-1]]), self.scale, self.finite)


def run(policy: ScalePolicy, finite: ArrayLike | Tensor) -> ScaleHistory:
    """Step `policy` through a run: finite (steps,) -> `ScaleHistory`. The Python oracle for one policy.

    A vector of n policies takes finite (steps,), the same run for all, or (steps, n), and is stepped as tensors. A
    policy that raises ends there: a single one stops, in a vector its later scales are NaN.

    >>> run(ScalePolicy(growth_interval=2), [True, True, False, True]).scale
    array([ 65536., 131072.,  65536.,  65536.])
    """
    state, flags = initial(policy), _array("finite", finite, "b")
    if flags.ndim not in (1, 2) or flags.shape[1:] not in ((), policy.shape):
        shapes = f"(steps,) or (steps, {policy.shape[0]})" if policy.shape else "(steps,); stack([...]) makes a vector"
        raise ValueError(f"finite must have shape {shapes}, got {flags.shape}")
    return (_run_vector if policy.shape else _run_one)(policy, state, flags)


def _array(name: str, value: ArrayLike | Tensor, kinds: str) -> np.ndarray:
    array = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
    if array.size and array.dtype.kind not in kinds:
        raise TypeError(f"{name} must be an array of {'numbers or ' * (len(kinds) > 1)}booleans, got {array.dtype}")
    return array if array.size else array.astype(bool)


def _run_one(policy: ScalePolicy, state: ScaleState, flags: np.ndarray) -> ScaleHistory:
    start, raised, scales = state.scale, 0, []
    for flag in flags.tolist():
        state, raised = advance(policy, state, flag)
        if raised:
            break
        scales.append(state.scale)
    flags, scale = flags[: len(scales)], np.array(scales, dtype=np.float64)
    stopped = len(scales) if raised else None
    return ScaleHistory(policy, flags, scale, np.logical_not(flags), stopped, STOPS[Stop(raised)], state, start)


def _run_vector(policy: ScalePolicy, state: ScaleState, flags: np.ndarray) -> ScaleHistory:
    n, device, start = policy.shape[0], state.scale.device, state.scale.numpy(force=True)
    flags = np.broadcast_to(flags if flags.ndim == 2 else flags[:, None], (len(flags), n))
    steps = torch.tensor(flags, device=device)
    scales = torch.empty(steps.shape, dtype=torch.float64, device=device)
    codes = torch.zeros(steps.shape, dtype=torch.int8, device=device)
    for t, flag in enumerate(steps.unbind()):
        state, raised = advance(policy, state, flag)
        scales[t] = state.scale
        codes[t] = raised
    stops = codes.numpy(force=True)
    stopped = np.maximum.accumulate(stops != 0, axis=0)
    scale = np.where(stopped, np.nan, scales.numpy(force=True))
    raised_at = np.where(stopped.any(0), np.logical_not(stopped).sum(0), -1)  # so many steps went before it
    sentences = tuple(STOPS[stops[step, i]] if step >= 0 else "" for i, step in enumerate(raised_at))
    skipped = np.logical_not(flags.all(1) if policy.layers else flags)
    return ScaleHistory(policy, flags, scale, skipped, raised_at, sentences, state, start)


def explain(policy: ScalePolicy, before: ArrayLike, after: ArrayLike, finite: ArrayLike) -> np.ndarray:
    """The reason of each decision, from the scale before and after it: arrays of one shape -> words of `REASONS`.

    In a delayed policy the word describes the decision of the step before, which became public in this one.
    """
    check_kind("policy", policy, ScalePolicy, "a ScalePolicy")
    old, new, ok = (_array(*x, "biuf") for x in (("before", before), ("after", after), ("finite", finite)))
    asked = ("min_scale", "max_scale", "growth_factor", "scale_bits")
    low, high, grow, bits = (_array(name, getattr(policy, name), "if") for name in asked)
    largest = np.select([bits == 16, bits == 32], [65504.0, FLOAT32_MAX], np.finfo(np.float64).max)
    with np.errstate(over="ignore", invalid="ignore"):
        capped = (new >= high) | (new * grow > largest)
    up, down, same = new > old, new < old, new == old
    choices = {
        "stopped": np.isnan(new),
        "at cap": same & ok & capped,
        "held": same & ok,
        "at floor": same & ((new <= low) | np.isinf(new)),
        "tolerated": same,
        "grew": up & (ok | (old > low)),
        "lifted": up,
        "lowered": down & ok & (new == high),
    }
    return np.select([*choices.values()], [*choices], "backed off")


def naive_loss_ratio(scale: float, loss: float) -> float:
    """The next scale by a rule found in a tutorial: x 0.9 if loss > scale, x 1.1 if loss < scale / 2. Do not use it.

    A counter-example for lessons. Overflow and underflow are properties of gradients, and the rule never looks at one;
    the band between `loss` and `2 * loss` repels, so the scale runs away from it exponentially: from 1 to the
    smallest float16 in 158 steps, from 65536 to float32 infinity in 815; no step is skipped, so the first overflow
    goes into the weights.
    """
    check_number("scale", scale)
    check_kind("loss", loss, Real, "a number")  # NaN too: the loss of a broken training, at which the rule does nothing
    if loss > scale:
        return scale * 0.9
    return scale * 1.1 if loss < 0.5 * scale else scale
