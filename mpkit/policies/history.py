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
    check_kind("policy", policy, ScalePolicy, "a ScalePolicy")
    flags = _flags(finite)
    return _run_vector(policy, flags) if policy.shape else _run_one(policy, flags)


def _flags(finite: ArrayLike | Tensor) -> np.ndarray:
    flags = finite.numpy(force=True) if isinstance(finite, Tensor) else np.asarray(finite)
    if flags.dtype != np.bool_:
        if flags.size:
            raise TypeError(f"finite must hold booleans (True: all gradients finite), got {flags.dtype}")
        flags = flags.astype(bool)
    if flags.ndim not in (1, 2):
        raise ValueError(f"finite must be (steps,) or (steps, policies), got shape {flags.shape}")
    return flags


def _run_one(policy: ScalePolicy, flags: np.ndarray) -> ScaleHistory:
    if flags.ndim != 1:
        raise ValueError(f"one policy takes finite of shape (steps,), got {flags.shape}; stack([...]) makes a vector")
    state, raised, scales = initial(policy), 0, []
    for flag in flags.tolist():
        state, raised = advance(policy, state, flag)
        if raised:
            break
        scales.append(state.scale)
    done, start = len(scales), initial(policy).scale
    flags, scale = flags[:done], np.array(scales, dtype=np.float64)
    stopped = done if raised else None
    return ScaleHistory(policy, flags, scale, np.logical_not(flags), stopped, STOPS[Stop(raised)], state, start)


def _run_vector(policy: ScalePolicy, flags: np.ndarray) -> ScaleHistory:
    state = initial(policy)
    n, device, start = policy.shape[0], state.scale.device, state.scale.numpy(force=True)
    if flags.ndim == 2 and flags.shape[1] != n:
        raise ValueError(f"{n} policies take finite of shape (steps,) or (steps, {n}), got {flags.shape}")
    flags = np.broadcast_to(flags if flags.ndim == 2 else flags[:, None], (len(flags), n))
    steps = torch.tensor(flags, device=device)
    scales = torch.empty(steps.shape, dtype=torch.float64, device=device)
    codes = torch.zeros(steps.shape, dtype=torch.int8, device=device)
    for t, flag in enumerate(steps.unbind()):
        state, raised = advance(policy, state, flag)
        scales[t] = state.scale
        if isinstance(raised, Tensor):
            codes[t] = raised
    stops = codes.numpy(force=True)
    stopped = np.maximum.accumulate(stops != 0, axis=0)
    scale = np.where(stopped, np.nan, scales.numpy(force=True))
    raised_at = np.where(stopped.any(0), np.logical_not(stopped).sum(0), -1)  # so many steps went before it
    sentences = tuple(STOPS[stops[step, i]] if step >= 0 else "" for i, step in enumerate(raised_at))
    skipped = np.logical_not(flags.all(1) if policy.layers else flags)
    return ScaleHistory(policy, flags, scale, skipped, raised_at, sentences, state, start)


def _plain_array(name: str, value: object) -> np.ndarray:
    array = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be an array of numbers or truth values, got {array.dtype}")
    return array


def explain(policy: ScalePolicy, before: object, after: object, finite: object) -> np.ndarray:
    """The reason of each decision, from the scale before and after it: arrays of one shape -> words of `REASONS`.

    In a delayed policy the word describes the decision of the step before, which became public in this one.
    """
    check_kind("policy", policy, ScalePolicy, "a ScalePolicy")
    before, after, finite = (
        _plain_array(*named) for named in zip(("before", "after", "finite"), (before, after, finite))
    )
    low, high, grow, bits = (
        value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
        for value in (policy.min_scale, policy.max_scale, policy.growth_factor, policy.scale_bits)
    )
    largest = np.select([bits == 16, bits == 32], [65504.0, FLOAT32_MAX], np.finfo(np.float64).max)
    with np.errstate(over="ignore", invalid="ignore"):
        capped = (after >= high) | (after * grow > largest)
    up, down, same = after > before, after < before, after == before
    choices = [
        (np.isnan(after), "stopped"),
        (same & finite & capped, "at cap"),
        (same & finite, "held"),
        (same & ((after <= low) | np.isinf(after)), "at floor"),
        (same, "tolerated"),
        (up & (finite | (before > low)), "grew"),
        (up, "lifted"),
        (down & finite & (after == high), "lowered"),
    ]
    return np.select([mask for mask, _ in choices], [word for _, word in choices], "backed off")


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
