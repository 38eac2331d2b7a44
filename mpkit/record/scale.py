"""What a loop's scaler says: the loss scale, its policy, and what it has done to the gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from mpkit.policies import ScalePolicy, preset
from mpkit.record.columns import kept
from mpkit.scalers import LossScaleManager


def scale_of(scaler: object) -> float | Tensor:
    """The loss scale in use, on the device where the scaler can give it so.

    Raises:  TypeError for a scaler that has none to tell, as an update cell, whose scale is the step's.
    """
    if scaler is None:
        return 1.0
    if isinstance(scaler, LossScaleManager):
        return scaler.get_loss_scale()
    held: float | Tensor | None = getattr(scaler, "_scale", getattr(scaler, "scale_value", None))
    if held is None and hasattr(scaler, "get_scale"):  # a GradScaler before its first use, or one that is off
        held = scaler.get_scale()
    if held is None:
        raise TypeError(f"cannot read a loss scale from {type(scaler).__name__}; give it to record(loss, scale=...)")
    return held


def note_of(scaler: object, optimizer: Optimizer | None) -> dict[str, Any] | None:
    """What a GradScaler notes down about this optimizer's running step; only its private bookkeeping knows."""
    if not isinstance(scaler, GradScaler) or optimizer is None or not scaler.is_enabled():
        return None
    return scaler._per_optimizer_states[id(optimizer)]


def found_inf(note: dict[str, Any]) -> float | Tensor:
    """Whether a GradScaler found an overflow in a step that it has taken; a step that it never took had none."""
    first, *others = note["found_inf_per_device"].values() or [0.0]
    return kept(sum((flag.to(first.device) for flag in others), first))


def was_unscaled(note: dict[str, Any] | None) -> bool:
    """Whether the GradScaler has divided this optimizer's gradients."""
    return note is not None and note["stage"].name == "UNSCALED"


def policy_of(scaler: object) -> ScalePolicy | None:
    """The scale policy in use, where the scaler has one that mpkit knows."""
    if isinstance(policy := getattr(scaler, "policy", None), ScalePolicy):
        return policy
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        given = {
            name: getattr(scaler, f"get_{name}")() for name in ("growth_factor", "backoff_factor", "growth_interval")
        }
        policy = preset("torch", init_scale=scaler.get_scale(), **given)
        return dataclasses.replace(policy, init_count=scaler._get_growth_tracker())
    return None
