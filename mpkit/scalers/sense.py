"""What a training step takes as `scale_sense`, as the one thing that it works with: a `Scale`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mpkit.arguments import check_number, is_number
from mpkit.policies import ScalePolicy

from .scale import Scale
from .scaler import LiveScaler, LossScaler, adjusts_itself


def scale_of(scale_sense: object, device: torch.device | str) -> Scale:
    """`scale_sense` as a `Scale` on `device`.

    A `Scale` is itself, a tensor of shape () or (1,) a fixed one on a copy, a loss scaler gives its own. A scaler with
    an `adjust` of its own, and whatever can be called as an update cell, `cell(scale, overflow)`, moves one that
    follows it.

    Raises:  TypeError for a number or a manager; ValueError for another shape, several scales, or a scale that is 0,
             infinite or NaN.
    """
    if isinstance(scale_sense, Tensor):
        return Scale(ScalePolicy.fixed(1.0), scale_tensor(scale_sense, device, "scale_sense"))
    if isinstance(scale_sense, Scale | LossScaler):
        value = scale_sense.value if isinstance(scale_sense, Scale) else scale_sense.scale_value
        if (scales := value.numel()) != 1:
            raise ValueError(
                f"one loss has one scale, and this scaler has {scales}: take one of its policies, policy[i], or train "
                "layers with scales of their own through mpkit.boost.GroupLossScaleManager"
            )
        copied = scale_tensor(value, device, "scale_sense")
        if isinstance(scale_sense, Scale):
            return scale_sense.to_(device)
        if isinstance(scale_sense, LiveScaler) and not adjusts_itself(type(scale_sense)):
            return scale_sense.live.to_(device)
        return FollowingScale(scale_sense, copied)
    if callable(scale_sense) and hasattr(scale_sense, "get_loss_scale"):
        if isinstance(scale_sense, torch.nn.Module):
            scale_sense.to(device)
        return FollowingScale(scale_sense, scale_tensor(float(scale_sense.get_loss_scale()), device, "scale_sense"))
    hint = "wrap a number with torch.tensor(...)"
    if hasattr(scale_sense, "get_update_cell"):
        hint = "ask the manager for its cell with manager.get_update_cell()"
    raise TypeError(
        "scale_sense must be an update cell, a loss scaler or a tensor of shape () or (1,), got "
        f"{type(scale_sense).__name__}; {hint}"
    )


class FollowingScale(Scale):
    """The scale of an object with a rule of its own: `owner` is told of each step, and its scale is taken over.

    owner:  a `LossScaler`, or a cell `owner(scale, overflow)` that writes the next scale into the tensor it is given.
    """

    def __init__(self, owner: Any, value: Tensor) -> None:
        super().__init__(ScalePolicy.fixed(1.0), value)
        self.owner = owner

    def advance_(self, found_inf: Tensor, part: Tensor | None = None) -> None:
        """Tell the owner."""
        if isinstance(self.owner, LossScaler):
            self.owner.advance_(found_inf)
            self.value.copy_(self.owner.scale_value)
        elif hasattr(self.owner, "advance_"):  # takes the float32 flag as it is, which saves a conversion
            self.owner.advance_(self.value, found_inf)
        else:
            self.owner(self.value, found_inf.bool())

    def check(self) -> None:
        """Ask the owner, where it can be asked."""
        getattr(self.owner, "check", lambda: None)()


def scale_tensor(value: float | Tensor, device: torch.device | str, name: str) -> Tensor:
    """A float32 tensor on `device` that holds `value` and is nobody else's.

    Raises:  TypeError if it is no number and no tensor; ValueError if a tensor's shape is neither () nor (1,), or the
             value is 0, infinite or NaN.
    """
    if isinstance(value, Tensor):
        if value.shape not in ((), (1,)):
            raise ValueError(f"{name} must have shape () or (1,), got {tuple(value.shape)}")
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, got {value.dtype}; call {name}.float() first")
    elif not is_number(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    elif isinstance(value, int):
        check_number(name, value, low=-math.inf)
    if float(value) == 0 or not math.isfinite(float(value)):
        raise ValueError(f"{name} multiplies every gradient and must be finite and not 0, got {float(value)}")
    return torch.as_tensor(value, dtype=torch.float32).detach().to(device, copy=True)
