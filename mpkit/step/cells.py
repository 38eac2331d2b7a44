"""Train cells: a network, a loss and an optimizer become one callable training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_count, check_function, check_kind, check_number, is_number
from mpkit.compiling import runs_as_python
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.optimizers.saved import check_kinds, kinds_of
from mpkit.scalers import LossScaler
from mpkit.scalers.sense import scale_tensor
from mpkit.step import distributed
from mpkit.step.hooks import Hook, StepContext, StepOutcome
from mpkit.step.phases import backward, checked_loss, device_of, gradients_of
from mpkit.step.restore import carried, carrying, load_all, saved_count, saved_gradients
from mpkit.step.scaling import Scaling, scaling_of
from mpkit.step.update import Update

MakeUpdate = Callable[[nn.Module, Optimizer], Update]
"""Makes a step's update from its network and its optimizer."""


def plain_update(network: nn.Module, optimizer: Optimizer) -> Update:
    """The optimizer's own."""
    return Update(optimizer)


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

    `forward` is the skeleton of every step: differentiate, reduce, unscale and check, clip, update or skip, adjust.
    What varies are two values: a `Scaling` (here none, the gradients stay multiplied by `sens`) and an `Update`.

    Args:
        network:      module that returns the loss.
        optimizer:    updates the network's parameters.
        sens:         factor the backward pass starts from (dimensionless, not 0; None means 1). The gradients are
                      *not* divided by it: give the optimizer `loss_scale=sens`, else weights move `sens` times too far.
        return_grad:  also return the gradients, still multiplied by `sens`.
        hooks:        see each phase of the step.
        clip_norm:    largest joint L2 norm of the gradients; needs `sens` 1, since gradients stay multiplied here.
        accumulation_steps:  calls per update. Every call adds the gradient of its loss / accumulation_steps, so k
                      micro-batches of equal size give the gradient of the whole batch. An error in a backward pass
                      drops what was summed, since a part of that micro-batch is in it; the next call begins anew.
        update:       makes the step's update from network and optimizer; the default runs the optimizer.
    Returns:  the unscaled loss, or `(loss, {parameter name: gradient})`; names are those in the network itself.
    Raises:   TypeError for another kind, ValueError for another range of an argument.
    Source:   MindSpore nn.TrainOneStepCell. `state_dict()` holds everything that a resumed training needs: weights,
              optimizer, counters, the states of hooks that have one, and the gradients of a begun accumulation.
    """

    sens: Tensor
    _saves: tuple[str, ...] = ("index", "pending", "optimizer", "hooks")

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        sens: float | None = None,
        return_grad: bool = False,
        *,
        hooks: Sequence[Hook] = (),
        clip_norm: float | None = None,
        accumulation_steps: int = 1,
        update: MakeUpdate = plain_update,
    ) -> None:
        self._set_up(network, optimizer, hooks, clip_norm, accumulation_steps, update)
        sens = 1.0 if sens is None else sens
        if clip_norm is not None and sens != 1:
            raise ValueError(
                f"clip_norm={clip_norm} with sens={sens} would clip gradients that are still multiplied by sens, that "
                "is to clip_norm / sens; use TrainOneStepWithLossScaleCell, which unscales before it clips"
            )
        self.return_grad = return_grad
        self.register_buffer("sens", scale_tensor(sens, device_of(network.parameters()), "sens"))

    def _set_up(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        hooks: Sequence[Hook],
        clip_norm: float | None,
        accumulation_steps: int,
        update: MakeUpdate,
    ) -> None:
        """What every step has, with a scale or without."""
        nn.Module.__init__(self)
        check_parts(network, optimizer, hooks, clip_norm, accumulation_steps)
        self.network = network
        self.optimizer = optimizer
        self.return_grad = False
        self.scaling: Scaling | None = None
        self.clip_norm = clip_norm
        self.accumulation_steps = accumulation_steps
        self.index = 0
        self.pending = 0
        # Parameters that the optimizer does not update receive gradients too, and would go on summing them.
        updated = {id(p) for p in parameters_of(optimizer)}
        self._others: list[Tensor] = [p for p in network.parameters() if id(p) not in updated]
        self._replica = distributed.averaging_wrapper(network)
        self._averaged = distributed.averaged_by(self._replica)
        self.updating = update(network, optimizer)
        self.updating.attach(self._replica)
        self.hooks = [*hooks, *self.updating.hooks]

    def forward(self, *inputs: object) -> Any:
        if not self.return_grad:
            return self._step(inputs, self.sens).loss
        kept: list[dict[str, Tensor]] = []
        return (self._step(inputs, self.sens, kept).loss, *kept)

    @runs_as_python
    def _step(self, inputs: tuple[Any, ...], live: Tensor, kept: list[dict[str, Tensor]] | None = None) -> StepOutcome:
        """The skeleton; `live` is the scale, `kept` takes the gradients as they were before the update."""
        scaling, hooks = self.scaling, self.hooks
        # only a hook can look at the context after the scale was adjusted in place
        ctx = self.context(inputs, live.clone() if hooks and scaling is not None else live)
        loss = self.compute_gradients(ctx)
        if kept is not None:
            kept.append(self._named_gradients())
        if self.pending:
            ctx.outcome = StepOutcome(loss, torch.zeros_like(loss, dtype=torch.bool), ctx.scale.clone())
            return ctx.outcome
        overflow = self.unscale(ctx)
        for hook in hooks:
            hook.before_update(ctx)
        self.update(ctx)
        if scaling is None:
            ctx.outcome = StepOutcome(loss, overflow, live)
        else:
            assert ctx.found_inf is not None
            scaling.scale.advance_(ctx.found_inf)  # last: an error in the optimizer leaves the scale as it was
            ctx.outcome = StepOutcome(loss, overflow, scaling.shown())
        for hook in hooks:
            hook.after_update(ctx)
        return ctx.outcome

    @runs_as_python
    def context(self, inputs: tuple[Any, ...], scale: Tensor) -> StepContext:
        """What this call starts with; counts the call."""
        self.index += 1
        return StepContext(self.network, self.optimizer, inputs, self.index - 1, scale)

    @runs_as_python
    def compute_gradients(self, ctx: StepContext) -> Tensor:
        """Forward and backward pass: adds to every `p.grad`, multiplied by `ctx.scale`; returns the detached loss.

        `self.pending` counts the micro-batches added so far; it is 0 again when the update is due.
        """
        if not self.pending:
            self._clear_gradients()
        last = self.pending + 1 == self.accumulation_steps
        try:
            if last or self._replica is None:
                loss = self._differentiate(ctx)
            else:  # DistributedDataParallel sends gradients only in the backward pass that ends an accumulation
                with self._replica.no_sync():
                    loss = self._differentiate(ctx)
            ctx.loss = loss = loss.detach()
            self.pending = 0 if last else self.pending + 1
            with self._summing():
                for hook in self.hooks:
                    hook.after_backward(ctx)
        except BaseException:
            for hook in self.hooks:
                hook.after_failure(ctx)
            raise
        return loss

    def reduce(self) -> None:
        """Average the gradients over the processes, unless DistributedDataParallel already has."""
        self.updating.reduce()

    def unscale(self, ctx: StepContext) -> Tensor:
        """Reduce, unscale, check on all processes, and clip; returns the overflow flag, False where nobody looks."""
        scaling = self.scaling
        if scaling is None:
            self.reduce()
            self._clip()
            assert ctx.loss is not None
            return torch.zeros_like(ctx.loss, dtype=torch.bool)
        for hook in self.hooks:
            hook.before_unscale(ctx)
        several = distributed.several_processes()
        if several:
            self.reduce()
        ctx.found_inf = scaling.unscale_(gradients_of(parameters_of(self.optimizer)), ctx.scale)
        # what DistributedDataParallel has averaged is the same everywhere; inside its Join some processes are gone
        if several and not all(id(p) in self._averaged for p in parameters_of(self.optimizer)):
            distributed.agree_(ctx.found_inf)
        ctx.overflow = overflow = ctx.found_inf.bool()
        for hook in self.hooks:
            hook.after_unscale(ctx)
        self._clip()
        return overflow

    @runs_as_python
    def update(self, ctx: StepContext) -> None:
        """Run the optimizer, or skip on overflow; subclasses override this to update differently."""
        self.updating.apply(ctx, ctx.found_inf)

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict()` holds beside the tensors of the network."""
        state: dict[str, Any] = {"index": self.index, "pending": self.pending, "optimizer": self.optimizer.state_dict()}
        state["kinds"] = kinds_of(self.optimizer)
        state["hooks"] = [h.state_dict() if hasattr(h, "state_dict") else None for h in self.hooks]
        if self.pending:
            state["gradients"] = [p.grad for p in parameters_of(self.optimizer)]
            state["accumulation_steps"] = self.accumulation_steps  # each gradient was divided by it
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The reverse of `get_extra_state`.

        Raises:  ValueError if the saved cell had another number of hooks or another optimizer. All or nothing.
        """
        check_kind("the extra state of a train cell", state, dict, "what get_extra_state gave")
        if missing := [key for key in self._saves if key not in state]:
            raise ValueError(f"this is not what a {type(self).__name__} saved: it lacks {', '.join(missing)}")
        if len(state["hooks"]) != len(self.hooks):
            raise ValueError(
                f"the saved step had {len(state['hooks'])} hooks and this one has {len(self.hooks)}; "
                "build the cell with the same hooks in the same order before loading"
            )
        for hook, saved in zip(self.hooks, state["hooks"]):
            if hasattr(hook, "state_dict") == (saved is None):
                had, has = ("no state", "one") if saved is None else ("a state", "none")
                raise ValueError(
                    f"the saved step had a hook with {had} where this one's {type(hook).__name__} has {has}; "
                    "build the cell with the same hooks in the same order before loading"
                )
        check_kinds(self.optimizer, state.get("kinds"))
        gradients = self._checked_sums(state)
        load_all(self._stateful(state))
        self.index, self.pending = state["index"], state["pending"]
        for p, grad in zip(parameters_of(self.optimizer), gradients):
            p.grad = grad

    def _checked_sums(self, state: dict[str, Any]) -> Sequence[Tensor | None]:
        """The gradients of the accumulation that a saved step had begun; none if it had not."""
        check_count("index", state["index"], low=0)
        own, name = self.accumulation_steps, "accumulation_steps"
        begun = saved_count(name, own, state["pending"], state.get(name, own))
        return saved_gradients(parameters_of(self.optimizer), state.get("gradients")) if begun else ()

    def __getstate__(self) -> dict[str, Any]:
        return carrying(self.__dict__, parameters_of(self.optimizer) if self.pending else ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(carried(state, lambda: parameters_of(state["optimizer"])))

    def _stateful(self, state: dict[str, Any]) -> list[tuple[Any, Any]]:
        """The objects that take over a part of a saved state, each with its part."""
        hooks = [(hook, saved) for hook, saved in zip(self.hooks, state["hooks"]) if saved is not None]
        return [(self.optimizer, state["optimizer"]), *hooks]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`half()` and `double()` are meant for the network: the scale stays float32, or a large one became inf."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, scale in before.items():
            moved = self._buffers[name]
            if scale is not None and moved is not None and moved.dtype != scale.dtype:
                self._buffers[name] = scale.to(moved.device)
        return self

    def _clear_gradients(self) -> None:
        for p in chain(parameters_of(self.optimizer), self._others):
            p.grad = None

    def _differentiate(self, ctx: StepContext) -> Tensor:
        hooks = self.hooks
        for hook in hooks:
            hook.before_forward(ctx)
        ctx.loss = loss = checked_loss(self.network(*ctx.inputs))
        for hook in hooks:
            hook.after_forward(ctx)
        for hook in hooks:
            hook.before_backward(ctx)
        with self._summing():
            backward(loss, ctx.scale if self.accumulation_steps == 1 else ctx.scale / self.accumulation_steps)
        return loss

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """An error in here leaves a part of this micro-batch in the sums, and the next call would add to it."""
        try:
            yield
        except BaseException:
            self.pending = 0
            raise

    def _clip(self) -> None:
        if self.clip_norm is not None:
            self.updating.clip(self.clip_norm)

    def _named_gradients(self) -> dict[str, Tensor]:
        named = self.network.named_parameters()
        return {name.removeprefix("backbone."): p.grad.clone() for name, p in named if p.grad is not None}


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

    scale_sense: Tensor
    scaling: Scaling
    _saves = (*TrainOneStepCell._saves, "rule")

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        scale_sense: object,
        *,
        hooks: Sequence[Hook] = (),
        clip_norm: float | None = None,
        accumulation_steps: int = 1,
        update: MakeUpdate = plain_update,
    ) -> None:
        self._set_up(network, optimizer, hooks, clip_norm, accumulation_steps, update)
        self.scaling = scaling_of(scale_sense, device_of(network.parameters()))
        self.scaling.covers(parameters_of(optimizer))
        self.adjust = None if isinstance(scale_sense, Tensor) or self.scaling.groups else scale_sense
        self.register_buffer("scale_sense", self.scaling.scale.seed)

    def forward(self, *inputs: object) -> StepOutcome:
        return self._step(inputs, self.scale_sense)

    def get_extra_state(self) -> dict[str, Any]:
        """As of `TrainOneStepCell`, with the state of a `LossScaler`."""
        rule = self.adjust.state_dict() if isinstance(self.adjust, LossScaler) else None
        return {**super().get_extra_state(), "rule": rule}

    def _stateful(self, state: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Raises ValueError if only one of the two cells has a `LossScaler`."""
        rule = self.adjust if isinstance(self.adjust, LossScaler) else None
        if (state["rule"] is None) != (rule is None):
            had, has = ("no LossScaler", "one") if rule else ("a LossScaler", "none")
            raise ValueError(f"the saved step had {had} and this one has {has}; build it with the same scale_sense")
        return [*super()._stateful(state), *([] if rule is None else [(rule, state["rule"])])]

    def _load_from_state_dict(self, *args: object) -> None:
        """nn.Module has copied the scale by the time `set_extra_state` refuses the rest."""
        before = self.scale_sense.clone()
        try:
            super()._load_from_state_dict(*args)
        except Exception:
            self.scale_sense.copy_(before)
            raise
        self._hold()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._hold()
        return self

    def _hold(self) -> None:
        """The buffer is the tensor that moves, also where the module has got another one."""
        scale = self.scaling.scale.to_(self.scale_sense.device)
        if self.scale_sense is not scale.seed:
            scale.seed.copy_(self.scale_sense)
            self.scale_sense = scale.seed

    def set_sense_scale(self, sens: Tensor) -> None:
        """Replace the loss scale by a tensor of the same shape. Its value is not read, so nothing waits for it.

        Raises:  TypeError if it is no tensor; ValueError if its shape differs or it is not floating;
                 RuntimeError when the scale is a `LossScaler`'s, and in the middle of an accumulation, whose
                 gradients carry the old scale.
        """
        if not isinstance(sens, Tensor):
            raise TypeError(f"set_sense_scale needs a tensor, got {type(sens).__name__}; use torch.tensor({sens!r})")
        if sens.shape != self.scale_sense.shape or not sens.is_floating_point():
            raise ValueError(
                f"set_sense_scale needs a floating tensor of shape {tuple(self.scale_sense.shape)}, "
                f"got {sens.dtype} of shape {tuple(sens.shape)}"
            )
        if isinstance(self.adjust, LossScaler):
            raise RuntimeError("the scale belongs to the LossScaler that this cell was built with; set it there")
        if self.pending:
            raise RuntimeError(
                f"{self.pending} of {self.accumulation_steps} micro-batches are summed at the old scale; "
                "change the scale after the call that ends the accumulation"
            )
        self.scale_sense.copy_(sens)


def check_parts(
    network: object, optimizer: object, hooks: object, clip_norm: object, accumulation_steps: object
) -> None:
    """Raise TypeError or ValueError unless a train cell can be made of these."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be an nn.Module that returns the loss, got {type(network).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    need_plain_step(optimizer)
    if not any(p.requires_grad for p in parameters_of(optimizer)):
        raise ValueError(
            "the optimizer holds no parameter with requires_grad=True, so a step would change nothing; "
            "unfreeze some or build it from the parameters that train"
        )
    if isinstance(hooks, str) or not isinstance(hooks, Iterable) or not all(isinstance(h, Hook) for h in hooks):
        raise TypeError(f"hooks must be a list of Hook objects (an empty one for none), got {hooks!r:.80}")
    if clip_norm is not None:
        if not is_number(clip_norm):
            raise TypeError(f"clip_norm must be a number or None, got {type(clip_norm).__name__}")
        if isinstance(clip_norm, int):
            check_number("clip_norm", clip_norm)
        if not float(clip_norm) > 0:  # inf is a norm that clips nothing
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}; use None for no clipping")
    check_count("accumulation_steps", accumulation_steps)
