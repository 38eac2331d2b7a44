"""Where a step's loss scale comes from, how its gradients are divided by it, and what moves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.scalers import LossScaler, check_and_unscale_
from mpkit.step.phases import scale_tensor

Rule = Callable[[Tensor, Tensor], Any]
"""`rule(scale, overflow)` updates the scale tensor in place; both live on the device."""


class Scaling:
    """One scale for the whole loss, in a () or (1,) float32 tensor that the step keeps.

    rule:            moves the scale after each step; None: it stays.
    groups:          the manager of a scaling that has a scale for each group of layers.
    group_overflow:  (N,) bool, its groups whose gradients were not finite in the last step; None before the first.
    """

    groups: Any = None
    group_overflow: Tensor | None = None

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule

    def covers(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError unless all these parameters get a scale; one scale for the loss is one for all."""

    def unscale_(self, gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Divide the gradients by the scale that was used; -> () float32, 1 where one was not finite."""
        return check_and_unscale_(gradients, scale)

    def adjust_(self, scale: Tensor, found_inf: Tensor, overflow: Tensor) -> None:
        """Let the rule move `scale` in place; `overflow` is `found_inf` as a bool.

        Our own rules take the float32 flag as it is: in a step of milliseconds each tiny operation more is half a
        percent, since it finds a cold cache. Anything else that can be called as an update cell is.
        """
        if self.rule is None:
            return
        advance_ = getattr(self.rule, "advance_", None)
        if advance_ is None:
            self.rule(scale, overflow)
        else:
            advance_(scale, found_inf)

    def shown(self, scale: Tensor) -> Tensor:
        """What the step reports as its scale, a tensor of its own."""
        return scale.clone()


class ScalerRule:
    """A `LossScaler` in the form of an update cell: the step's scale is the scaler's own tensor, or follows it."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler

    def __call__(self, scale: Tensor, overflow: Tensor) -> Tensor:
        if self.scaler.adjust(overflow.logical_not()):
            self._show(scale)
        return overflow

    def advance_(self, scale: Tensor, found_inf: Tensor) -> None:
        """One step from the float32 flag, without the conversions that a bool costs."""
        self.scaler.advance_(found_inf)
        self._show(scale)

    def _show(self, scale: Tensor) -> None:
        if scale is not self.scaler.scale_value:
            scale.copy_(self.scaler.scale_value)

    def check(self) -> None:
        """Raise RuntimeError if a policy met one of its errors since the last call; reads the host."""
        self.scaler.check()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scaler's."""
        self.scaler.load_state_dict(state)


def scaling_of(scale_sense: object, device: torch.device) -> tuple[Tensor, Scaling]:
    """The live scale and the scaling of what a train cell takes as `scale_sense`.

    Raises:  TypeError for a number or a manager; ValueError for a tensor that is neither () nor (1,).
    """
    if isinstance(scale_sense, Tensor):
        return scale_tensor(scale_sense, device, "scale_sense"), Scaling()
    if isinstance(scale_sense, LossScaler):
        if (scales := scale_sense.scale_value.numel()) != 1:
            raise ValueError(
                f"one loss has one scale, and this scaler has {scales}: take one of its policies, policy[i], or train "
                "layers with scales of their own through mpkit.boost.GroupLossScaleManager"
            )
        scale = scale_tensor(scale_sense.scale_value, device, "scale_sense")
        own = scale_sense.scale_value
        live = own if own.dtype == scale.dtype and own.device == device else scale
        return live, Scaling(ScalerRule(scale_sense))
    if callable(make := getattr(scale_sense, "scaling", None)):
        return scale_tensor(1.0, device, "scale_sense"), make()
    if callable(scale_sense) and hasattr(scale_sense, "get_loss_scale"):
        if isinstance(scale_sense, torch.nn.Module):
            scale_sense.to(device)
        return scale_tensor(float(scale_sense.get_loss_scale()), device, "scale_sense"), Scaling(scale_sense)
    hint = "wrap a number with torch.tensor(...)"
    if hasattr(scale_sense, "get_update_cell"):
        hint = "ask the manager for its cell with manager.get_update_cell()"
    raise TypeError(
        "scale_sense must be an update cell, a loss scaler or a tensor of shape () or (1,), got "
        f"{type(scale_sense).__name__}; {hint}"
    )
