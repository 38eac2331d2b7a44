"""What a loop's scaler says: the loss scale, its policy, and what it has done to the gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkit.policies import ScalePolicy, preset
from mpkit.record.columns import kept
from mpkit.scalers import LossScaleManager, LossScaler


def scale_of(scaler: object) -> float | Tensor:
    """The loss scale in use, on the device where the scaler can give it so."""
    if scaler is None:
        return 1.0
    if isinstance(scaler, torch.amp.GradScaler):
        if not scaler.is_enabled():
            return 1.0
        return scaler._scale if scaler._scale is not None else scaler.get_scale()
    if isinstance(scaler, LossScaler):
        return scaler.scale_value
    if isinstance(scaler, LossScaleManager):
        return scaler.get_loss_scale()
    raise TypeError(
        f"cannot read a loss scale from {type(scaler).__name__}; give it to record(loss, scale=...) in every step"
    )


def state_of(scaler: object, optimizer: Optimizer | None) -> dict[str, Any] | None:
    """What a GradScaler notes down about this optimizer's running step; only its private bookkeeping knows."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if not isinstance(scaler, torch.amp.GradScaler) or states is None or optimizer is None or not scaler.is_enabled():
        return None
    return states[id(optimizer)]


def found_inf(state: dict[str, Any]) -> float | Tensor:
    """Whether a GradScaler found an overflow in a step that it has taken; a step that it never took had none."""
    found = list(state["found_inf_per_device"].values())
    return kept(sum(flag.to(found[0].device) for flag in found)) if found else 0.0


def was_unscaled(scaler: object, optimizer: Optimizer | None) -> bool:
    """Whether the GradScaler has divided this optimizer's gradients."""
    state = state_of(scaler, optimizer)
    return state is not None and getattr(state["stage"], "name", "READY") == "UNSCALED"


def policy_of(scaler: object) -> ScalePolicy | None:
    """The scale policy in use, where the scaler has one that mpkit knows."""
    if isinstance(policy := getattr(scaler, "policy", None), ScalePolicy):
        return policy
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        policy = preset(
            "torch",
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        return dataclasses.replace(policy, init_count=scaler._get_growth_tracker())
    return None
