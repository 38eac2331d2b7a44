"""What a training step shows to others: its outcome, its context, and the hook that sees each phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer


class StepOutcome(NamedTuple):
    """What one training step did; every field is a tensor on the device, so reading it is the caller's choice.

    loss:      the unscaled loss, detached, in the dtype the network computed it in.
    overflow:  0-d bool, True when the step was skipped because a gradient was inf or NaN.
    scale:     the loss scale after the step, float32, in the shape of the cell's `scale_sense`.
    """

    loss: Tensor
    overflow: Tensor
    scale: Tensor


@dataclass(slots=True)
class StepContext:
    """What a hook sees of the running step; gradients are in `p.grad` of the network's parameters.

    network:    the cell that computes the loss.
    optimizer:  the optimizer about to update it.
    inputs:     the arguments of the step.
    index:      number of calls of the cell before this one.
    scale:      the loss scale used in this step, 0-d or (1,) float32.
    loss:       the unscaled loss, with its graph until the backward pass has run; None before the forward pass.
    found_inf:  0-d float32, 1 when a gradient was not finite; None before the gradients were checked.
    overflow:   the same as a 0-d bool; None before the gradients were checked.
    outcome:    what the step returned; None before `after_update`.
    """

    network: nn.Module
    optimizer: Optimizer
    inputs: tuple[Any, ...]
    index: int
    scale: Tensor
    loss: Tensor | None = None
    found_inf: Tensor | None = None
    overflow: Tensor | None = None
    outcome: StepOutcome | None = None


class Hook:
    """Sees each phase of a training step; override what you need.

    Order in one step: before_forward, after_forward, before_backward, after_backward (gradients still scaled),
    before_unscale, after_unscale (gradients true, `ctx.overflow` known), before_update, after_update (`ctx.outcome`
    known). With gradient accumulation the last four come only in the call that ends the accumulation. A hook that
    reads a tensor on the host makes the step wait for the device; that is the hook's cost, not the step's.
    """

    def before_forward(self, ctx: StepContext) -> None:
        """The inputs are known."""

    def after_forward(self, ctx: StepContext) -> None:
        """The loss is known."""

    def before_backward(self, ctx: StepContext) -> None:
        """Nothing of the backward pass has run."""

    def after_backward(self, ctx: StepContext) -> None:
        """The gradients are there, multiplied by `ctx.scale`."""

    def after_failure(self, ctx: StepContext) -> None:
        """The forward or the backward pass ended in an exception: what was changed for it is to be put back."""

    def before_unscale(self, ctx: StepContext) -> None:
        """The gradients of all micro-batches are summed, still multiplied by `ctx.scale`."""

    def after_unscale(self, ctx: StepContext) -> None:
        """The gradients are divided by the scale, reduced across processes and checked: the place to clip them."""

    def before_update(self, ctx: StepContext) -> None:
        """The gradients are final; neither the optimizer nor the rule of the scale has run."""

    def after_update(self, ctx: StepContext) -> None:
        """The step is over."""
