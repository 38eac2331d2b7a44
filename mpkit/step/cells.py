"""Train cells: a network, a loss and an optimizer become one callable training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.step.hooks import Hook, StepContext, StepOutcome
from mpkit.step.phases import apply_, backward, checked_loss, gradients_of, parameters_of

try:
    from mpkit.scalers import check_and_unscale_
except ImportError:  # only until mpkit/scalers.py has landed

    def check_and_unscale_(grads: list[Tensor], scale: Tensor, found_inf: Tensor | None = None) -> Tensor:
        found_inf = torch.zeros((), device=scale.device) if found_inf is None else found_inf
        for g in grads:
            g.mul_((1 / scale.float()).to(g.dtype).reshape(()))
            found_inf.copy_(torch.maximum(found_inf, 1.0 - g.isfinite().all().float()))
        return found_inf


class WithLossCell(nn.Module):
    """A network and its loss as one module: `cell(data, label) == loss_fn(backbone(data), label)`."""

    def __init__(self, backbone: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss_fn = loss_fn

    def forward(self, data: Any, label: Any) -> Tensor:
        return self.loss_fn(self.backbone(data), label)


class TrainOneStepCell(nn.Module):
    """One training step without an overflow check.

    Args:
        network:      module that returns the loss.
        optimizer:    updates the network's parameters.
        sens:         factor the backward pass starts from (dimensionless, not 0). The gradients are *not* divided by
                      it again: give the optimizer `loss_scale=sens`, else weights move `sens` times too far.
        return_grad:  also return the gradients, still multiplied by `sens`.
        hooks:        see each phase of the step.
    Returns:  the unscaled loss, or `(loss, {parameter name: gradient})`.
    Source:   MindSpore nn.TrainOneStepCell.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        sens: float | None = None,
        return_grad: bool = False,
        *,
        hooks: Sequence[Hook] = (),
    ) -> None:
        super().__init__()
        _check_parts(network, optimizer)
        self.network = network
        self.optimizer = optimizer
        self.return_grad = return_grad
        self.hooks = list(hooks)
        self.index = 0
        self.register_buffer("sens", _as_scale(1.0 if sens is None else sens, network, "sens"))

    sens: Tensor

    def forward(self, *inputs: Any) -> Any:
        ctx = self.context(inputs, self.sens)
        self.compute_gradients(ctx)
        _call(self.hooks, "before_update", ctx)
        kept = self._named_gradients() if self.return_grad else None
        self.update(ctx)
        assert ctx.loss is not None
        ctx.outcome = StepOutcome(ctx.loss, torch.zeros_like(ctx.loss, dtype=torch.bool), ctx.scale)
        _call(self.hooks, "after_update", ctx)
        return ctx.loss if kept is None else (ctx.loss, kept)

    def context(self, inputs: tuple[Any, ...], scale: Tensor) -> StepContext:
        """What this call starts with; counts the call."""
        self.index += 1
        return StepContext(self.network, self.optimizer, inputs, self.index - 1, scale)

    def compute_gradients(self, ctx: StepContext) -> None:
        """Forward and backward pass: fills `ctx.loss` and every `p.grad`, multiplied by `ctx.scale`."""
        for p in (*self.network.parameters(), *parameters_of(self.optimizer)):
            p.grad = None
        _call(self.hooks, "before_forward", ctx)
        ctx.loss = checked_loss(self.network(*ctx.inputs))
        _call(self.hooks, "after_forward", ctx)
        _call(self.hooks, "before_backward", ctx)
        backward(ctx.loss, ctx.scale)
        ctx.loss = ctx.loss.detach()
        _call(self.hooks, "after_backward", ctx)

    def update(self, ctx: StepContext) -> None:
        """Run the optimizer; subclasses override this to update differently."""
        self.optimizer.step()

    def _named_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.network.named_parameters() if p.grad is not None}


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """One training step with a scaled loss: an overflow skips the update and adjusts the scale.

    Forward; backward from `scale`; unscale the gradients; reduce; check; adjust the scale; update or skip.

    Args:
        network, optimizer, hooks:  as in `TrainOneStepCell`.
        scale_sense:  an update cell, or the scale itself as a tensor of shape () or (1,).
    Returns:  `StepOutcome(loss, overflow, scale)`.
    Raises:   TypeError if `scale_sense` is a number or a manager; ValueError for another shape.
    Source:   MindSpore nn.TrainOneStepWithLossScaleCell.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, scale_sense: Any, *, hooks: Sequence[Hook] = ()
    ) -> None:
        super().__init__(network, optimizer, hooks=hooks)
        del self.sens
        self.update_cell = None
        if isinstance(scale_sense, Tensor):
            scale = _as_scale(scale_sense, network, "scale_sense")
        elif callable(scale_sense) and hasattr(scale_sense, "get_loss_scale"):
            self.update_cell = scale_sense
            scale = _as_scale(float(scale_sense.get_loss_scale()), network, "scale_sense")
        else:
            raise TypeError(
                "scale_sense must be an update cell or a tensor of shape () or (1,), got "
                f"{type(scale_sense).__name__}; wrap a number with torch.tensor(...), and ask a manager for its cell "
                "with manager.get_update_cell()"
            )
        self.register_buffer("scale_sense", scale)

    scale_sense: Tensor

    def forward(self, *inputs: Any) -> StepOutcome:
        ctx = self.context(inputs, self.scale_sense.clone())
        self.compute_gradients(ctx)
        self.unscale(ctx)
        if self.update_cell is not None:
            self.update_cell(self.scale_sense, ctx.overflow)
        _call(self.hooks, "before_update", ctx)
        self.update(ctx)
        assert ctx.loss is not None and ctx.overflow is not None
        ctx.outcome = StepOutcome(ctx.loss, ctx.overflow, self.scale_sense.clone())
        _call(self.hooks, "after_update", ctx)
        return ctx.outcome

    def unscale(self, ctx: StepContext) -> None:
        """Divide the gradients by the scale and say in `ctx` whether all were finite."""
        _call(self.hooks, "before_unscale", ctx)
        grads = gradients_of(parameters_of(self.optimizer))
        ctx.found_inf = check_and_unscale_(grads, ctx.scale)
        ctx.overflow = ctx.found_inf.reshape(()) != 0
        _call(self.hooks, "after_unscale", ctx)

    def update(self, ctx: StepContext) -> None:
        """Run the optimizer, or skip on overflow; subclasses override this to update differently."""
        assert ctx.found_inf is not None
        apply_(self.optimizer, ctx.found_inf)

    def set_sense_scale(self, sens: Tensor) -> None:
        """Replace the loss scale by a tensor of the same shape.

        Raises:  TypeError if it is no tensor; ValueError if shape or kind differ.
        """
        if not isinstance(sens, Tensor):
            raise TypeError(f"set_sense_scale needs a tensor, got {type(sens).__name__}; use torch.tensor({sens!r})")
        if sens.shape != self.scale_sense.shape or not sens.is_floating_point():
            raise ValueError(
                f"set_sense_scale needs a floating tensor of shape {tuple(self.scale_sense.shape)}, "
                f"got {sens.dtype} of shape {tuple(sens.shape)}"
            )
        self.scale_sense.copy_(sens)


def _call(hooks: Iterable[Hook], phase: str, ctx: StepContext) -> None:
    for hook in hooks:
        getattr(hook, phase)(ctx)


def _check_parts(network: object, optimizer: object) -> None:
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be an nn.Module that returns the loss, got {type(network).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def _as_scale(value: float | Tensor, network: nn.Module, name: str) -> Tensor:
    """A float32 tensor on the network's device that is nobody else's."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    if isinstance(value, Tensor):
        if value.shape not in ((), (1,)):
            raise ValueError(f"{name} must have shape () or (1,), got {tuple(value.shape)}")
        return value.detach().to(device=device, dtype=torch.float32, copy=True)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if value == 0 or math.isnan(value):
        raise ValueError(f"{name} multiplies every gradient and must not be {value}")
    return torch.tensor(float(value), device=device)
