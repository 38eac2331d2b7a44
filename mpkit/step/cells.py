"""Train cells: a network, a loss and an optimizer become one callable training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_alike, check_count, check_function, check_kind, check_number, checked
from mpkit.optimizers.arguments import Trainer
from mpkit.scalers import LossScaler, Scale
from mpkit.step.engine import Step, uncompiled
from mpkit.step.hooks import Hook, StepContext, StepOutcome
from mpkit.step.phases import checked_loss, device_of
from mpkit.step.scaling import scaling_of, unscaled
from mpkit.step.update import Update


def _hooks(name: str, value: Any) -> Sequence[Hook]:
    if not isinstance(value, Iterable) or not all(isinstance(h, Hook) for h in value):
        raise TypeError(f"{name} must be a list of Hook objects (an empty one for none), got {value!r:.80}")
    return value  # type: ignore[return-value]


Hooks = Annotated[Sequence[Hook], _hooks]
# a number above 0; inf is a norm that clips nothing
Norm = Annotated[float, partial(check_number, open_low=True, closed_high=True)]
# makes a step's update from its network and its optimizer; None: the optimizer's own
MakeUpdate = Callable[[nn.Module, Optimizer], Update] | None


class WithLossCell(nn.Module):
    """A network and its loss as one module: `cell(data, label) == loss_fn(backbone(data), label)`.

    Raises:  TypeError for a backbone that is no module, or a loss that is neither a module nor a function.
    Source:  MindSpore nn.WithLossCell, whose loss is a module.
    """

    def __init__(self, backbone: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        check_kind("backbone", backbone, nn.Module, "an nn.Module")
        check_function("loss_fn", loss_fn, "a module or function (output, label) -> loss, as nn.CrossEntropyLoss()")
        super().__init__()
        self.backbone = backbone
        self.loss_fn = loss_fn

    def forward(self, data: object, label: object) -> Tensor:
        return self.loss_fn(self.backbone(data), label)


class TrainOneStepCell(nn.Module):
    """One training step without an overflow check: forward, backward, reduce across processes, update.

    Every cell runs the engine `Step`; what varies are two values: a `Scaling` (here none, the gradients stay multiplied
    by `sens`) and an `Update`.

    Args:
        network:      module that returns the loss.
        optimizer:    updates the network's parameters.
        sens:         factor the backward pass starts from (dimensionless, not 0; None means 1). The gradients are
                      *not* divided by it: give the optimizer `loss_scale=sens`, else weights move `sens` times too far.
        return_grad:  also return the gradients, still multiplied by `sens`.
        hooks:        see each phase of the step.
        clip_norm:    largest joint L2 norm of the gradients; needs `sens` 1, since gradients stay multiplied here.
        accumulation_steps:  calls per update. Every call adds the gradient of its loss / accumulation_steps, in float32
                      for 16-bit parameters too, so k micro-batches of equal size give the gradient of the whole batch.
                      An error in a backward pass drops what was summed, since a part of that micro-batch is in it; the
                      next call begins anew.
        update:       makes the step's update from network and optimizer; the default runs the optimizer.
    Returns:  the unscaled loss, or `(loss, {parameter name: gradient})`; names are those in the network itself.
    Raises:   TypeError for another kind, ValueError for another range of an argument.
    Source:   MindSpore nn.TrainOneStepCell. `state_dict()` holds everything that a resumed training needs: weights,
              optimizer, counter, the states of hooks that have one. It stands for the moment between two updates: what
              a begun accumulation has summed (`pending` micro-batches) is in no state and in no copy.
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Trainer,
        sens: float | None = None,
        return_grad: bool = False,
        *,
        hooks: Hooks = (),
        clip_norm: Norm | None = None,
        accumulation_steps: Count = 1,
        update: MakeUpdate = None,
    ) -> None:
        if clip_norm is not None and sens not in (None, 1):
            would = f"clip_norm={clip_norm} would clip gradients that are still multiplied by sens={sens}"
            raise ValueError(f"{would}, to clip_norm / sens; TrainOneStepWithLossScaleCell unscales before it clips")
        super().__init__()
        uncompiled(TrainOneStepCell, "_run", "_differentiated")
        self.network, self.optimizer, self.return_grad = network, optimizer, return_grad
        self.accumulation_steps = accumulation_steps
        self.index = 0
        scaling = unscaled(1.0 if sens is None else sens, device_of(network.parameters()))
        updates = [Update(optimizer) if update is None else update(network, optimizer)]
        self.step = Step(updates, scaling, accumulation_steps, network, hooks, clip_norm)

    @property
    def sens(self) -> Tensor:
        """What the backward pass starts from, () or (1,) float32."""
        return self.step.scaling.seed

    @property
    def hooks(self) -> list[Hook]:
        """What sees each phase, in order; those of boosts come last."""
        return self.step.hooks  # type: ignore[return-value]

    @property
    def pending(self) -> int:
        """Micro-batches that are summed and that no update has used."""
        return self.step.pending + sum(part.pending for update in self.step.updates for part in update.chain())

    def forward(self, *inputs: object) -> Any:
        kept: dict[str, Tensor] | None = {} if self.return_grad else None
        loss = self._run(inputs, kept).loss
        return loss if kept is None else (loss, kept)

    def _run(self, inputs: tuple[Any, ...], kept: dict[str, Tensor] | None = None) -> StepOutcome:
        """One call; `kept` takes the gradients as they were before the update."""
        step = self.step
        # only a hook can look at the context after the scale was adjusted in place
        scale = step.scaling.seed.clone() if step.hooks else step.scaling.seed
        ctx = StepContext(self.network, self.optimizer, inputs, self.index, scale)
        self.index += 1
        loss = self._differentiated(ctx)
        if kept is not None:
            named = self.network.named_parameters()
            kept.update({name.removeprefix("backbone."): p.grad.clone() for name, p in named if p.grad is not None})
        due = step.due()
        found = step.finish(ctx) if due else None
        overflow = torch.zeros_like(loss, dtype=torch.bool) if found is None else found.bool()
        ctx.outcome = StepOutcome(loss, overflow, step.scaling.shown())
        if due:
            step.tell("after_update", ctx)
        return ctx.outcome

    def _differentiated(self, ctx: StepContext) -> Tensor:
        """Forward and backward pass: adds to every `p.grad`, multiplied by `ctx.scale`; returns the detached loss."""
        step = self.step
        step.begin()
        before = step.pending
        try:
            with step.quiet():
                step.tell("before_forward", ctx)
                ctx.loss = loss = checked_loss(self.network(*ctx.inputs))
                step.tell("after_forward", ctx)
                step.tell("before_backward", ctx)
                step.backward(loss)
            ctx.loss = loss.detach()
            step.tell("after_backward", ctx)
        except BaseException:
            if step.pending > before:  # a hook has failed when this micro-batch was in the sums
                step.drop()
            step.tell("after_failure", ctx)
            raise
        return ctx.loss

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict()` holds beside the tensors of the network."""
        return {"index": self.index, **self.step.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The reverse of `get_extra_state`; a begun accumulation is given up.

        Raises:  TypeError or ValueError, and changes nothing, for what this cell cannot take over.
        """
        check_alike("the state of a train cell", state, {"index": self.index})
        index = check_count("index", state["index"], low=0)
        self.step.load_state_dict(state)
        self.index = index

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The scale goes where the network goes, and stays float32 when that is cast, or a large one became inf."""
        super()._apply(fn, recurse)
        self.step.scaling.scale.to_(fn(self.sens).device)
        return self


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """One training step with a scaled loss: an overflow skips the update and adjusts the scale.

    Forward; backward from the scale; reduce across processes; unscale and check; clip; update, or skip on overflow,
    when no weight and no optimizer state changes; adjust the scale. Nothing is read on the host when the optimizer can
    skip on the device (torch's fused SGD, Adam, AdamW, Adagrad and all of mpkit.optimizers).

    Args:
        network, optimizer, hooks, update:  as in `TrainOneStepCell`.
        scale_sense:  an update cell, a `LossScaler`, or the scale itself as a tensor of shape () or (1,).
        clip_norm:    largest joint L2 norm of the true, unscaled gradients.
        accumulation_steps:  calls per update; gradients are summed scaled, and unscaled and checked once.
    Returns:  `StepOutcome(loss, overflow, scale)`; before the end of an accumulation `overflow` is False.
    Raises:   TypeError if `scale_sense` is a number or a manager; ValueError for another shape.
    Source:   MindSpore nn.TrainOneStepWithLossScaleCell.
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Trainer,
        scale_sense: object,
        *,
        hooks: Hooks = (),
        clip_norm: Norm | None = None,
        accumulation_steps: Count = 1,
        update: MakeUpdate = None,
    ) -> None:
        scaling = scaling_of(scale_sense, device_of(network.parameters()))
        rule = scale_sense if isinstance(scale_sense, LossScaler | Scale) else None
        options: dict[str, Any] = {"hooks": hooks, "clip_norm": clip_norm, "accumulation_steps": accumulation_steps}
        super().__init__(network, optimizer, update=update, **options)
        self.step.scaling, self.step.rule = scaling, rule
        # by this name an update cell's counters stand in `state_dict()`
        self.adjust = None if isinstance(scale_sense, Tensor) or scaling.groups else scale_sense

    def forward(self, *inputs: object) -> StepOutcome:
        return self._run(inputs)

    scale_sense = TrainOneStepCell.sens  # the loss scale of now

    def set_sense_scale(self, sens: Tensor) -> None:
        """Replace the loss scale by a tensor of the same shape. Its value is not read, so nothing waits for it.

        Raises:  TypeError if it is no tensor; ValueError if its shape differs or it is not floating;
                 RuntimeError when the scale is a `LossScaler`'s, and in the middle of an accumulation, whose
                 gradients carry the old scale.
        """
        check_kind("sens", sens, Tensor, "a tensor, as torch.tensor(1024.0)")
        if sens.shape != self.scale_sense.shape or not sens.is_floating_point():
            need = f"a floating tensor of shape {tuple(self.scale_sense.shape)}"
            raise ValueError(f"sens must be {need}, got {sens.dtype} of shape {tuple(sens.shape)}")
        if self.step.rule is not None:
            raise RuntimeError("the scale belongs to the LossScaler that this cell was built with; set it there")
        if self.step.pending:
            summed = f"{self.step.pending} of {self.accumulation_steps} micro-batches are summed at the old scale"
            raise RuntimeError(f"{summed}; change it after the call that ends the accumulation")
        self.scale_sense.copy_(sens)
