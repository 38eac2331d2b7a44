"""Where a step's loss scale comes from, and what moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpkit.scalers import LossScaler, PolicyLossScaler
from mpkit.step.phases import scale_tensor

Adjust = Callable[[Tensor, Tensor], Any]
"""`adjust(scale, overflow)` updates the scale tensor in place; both live on the device."""


class ScalerRule:
    """A `LossScaler` in the form of an update cell: it keeps its own scale, and the step's is a copy of it."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler

    def __call__(self, scale: Tensor, overflow: Tensor) -> Tensor:
        if self.scaler.adjust(overflow.logical_not()):
            scale.copy_(self.scaler.scale_value)
        return overflow

    def check(self) -> None:
        """Raise RuntimeError if a policy met one of its errors since the last call; reads the host."""
        if isinstance(self.scaler, PolicyLossScaler):
            self.scaler.check()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scaler's."""
        self.scaler.load_state_dict(state)


def scale_and_rule(scale_sense: Any, device: torch.device) -> tuple[Tensor, Adjust | None]:
    """The live scale and the rule that adjusts it (None: it stays), from what a train cell takes as `scale_sense`.

    Raises:  TypeError for a number or a manager; ValueError for a tensor that is neither () nor (1,).
    """
    if isinstance(scale_sense, Tensor):
        return scale_tensor(scale_sense, device, "scale_sense"), None
    if isinstance(scale_sense, LossScaler):
        if (scales := scale_sense.scale_value.numel()) != 1:
            raise ValueError(
                f"one loss has one scale, and this scaler has {scales}: take one of its policies, policy[i], or train "
                "layers with scales of their own through mpkit.boost.GroupLossScaleManager"
            )
        return scale_tensor(scale_sense.scale_value, device, "scale_sense"), ScalerRule(scale_sense)
    if callable(scale_sense) and hasattr(scale_sense, "get_loss_scale"):
        if isinstance(scale_sense, torch.nn.Module):
            scale_sense.to(device)
        return scale_tensor(float(scale_sense.get_loss_scale()), device, "scale_sense"), scale_sense
    hint = "wrap a number with torch.tensor(...)"
    if hasattr(scale_sense, "get_update_cell"):
        hint = "ask the manager for its cell with manager.get_update_cell()"
    raise TypeError(
        "scale_sense must be an update cell, a loss scaler or a tensor of shape () or (1,), got "
        f"{type(scale_sense).__name__}; {hint}"
    )
