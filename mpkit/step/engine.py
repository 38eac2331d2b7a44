"""The one engine of a training step: `backward` for each part of the loss, then `finish`.

finish = reduce, unscale and agree, clip, apply, advance. MindSpore's cells, `ScaledStep` and `Model` all run it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpkit.arguments import check_alike
from mpkit.optimizers.arguments import parameters_of
from mpkit.optimizers.saved import check_kinds, check_state, kinds_of
from mpkit.step import distributed
from mpkit.step.hooks import Hook, StepContext
from mpkit.step.phases import checked_loss, gradients_of, narrow_, need_gradients, widen_
from mpkit.step.scaling import Scaling
from mpkit.step.update import Update


class Step:
    """Gradients of one or several backward passes, and what is done with their sum.

    They are summed in float32, for 16-bit parameters too, and rounded once, when the sum is whole. It stands in
    `p.grad`, where autograd adds; or `apart`, where each pass is divided by its scale and checked before it is added.

    Args:
        updates:    one for each optimizer, without a parameter in common.
        scaling:    what the backward passes start from, and what the gradients are divided by.
        parts:      backward passes of a step, of which it takes the mean. 0: any number, of which it takes the sum.
        apart:      `finish` comes after each pass; one that is not finite is neither added nor counted.
        network:    may hold a DistributedDataParallel, and parameters that no optimizer updates.
        hooks:      see each phase from the end of the last backward pass on.
        clip_norm:  largest joint L2 norm of an update's gradients.
        skip:       "all": an overflow anywhere skips every update; "each": only the one whose gradients overflowed, and
                    one without gradients rests.
        average:    average the gradients over the processes.
        rule:       what moves the scale and has a state of its own; None where another module saves it.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        scaling: Scaling,
        *,
        parts: int = 1,
        apart: bool = False,
        network: nn.Module | None = None,
        hooks: Iterable[Hook] = (),
        clip_norm: float | None = None,
        skip: Literal["all", "each"] = "all",
        average: bool = True,
        rule: Any = None,
    ) -> None:
        uncompiled(Step, "due", "begin", "quiet", "backward", "finish", "unscale", "add", "flush", "apply", "drop")
        self.updates, self.scaling, self.parts, self.apart = list(updates), scaling, parts, apart
        self.sums = parts != 1 and not apart  # whether autograd adds in `p.grad`
        self.clip_norm, self.skip, self.average, self.rule = clip_norm, skip, average, rule
        self.hooks = [*hooks, *(hook for update in self.updates for hook in update.hooks)]
        self.replica = None if network is None else distributed.averaging_wrapper(network)
        self.averaged = distributed.averaged_by(self.replica)
        for update in self.updates:
            update.attach(self.replica)
        # Parameters that no optimizer updates receive gradients too, and would go on summing them.
        known = {id(p) for p in self.parameters()}
        self.others = [] if network is None else [p for p in network.parameters() if id(p) not in known]
        self.pending = 0  # backward passes that no update has used
        self.found: list[Any] = []
        self.held: dict[int, Tensor] = {}  # position of a parameter -> its sum, where it stands apart
        self.alone = False  # whether the sums are averaged here, though there is a replica

    def parameters(self) -> list[Tensor]:
        """What the optimizers update."""
        return [p for update in self.updates for p in parameters_of(update.optimizer)]

    def tell(self, phase: str, ctx: StepContext | None) -> None:
        """Call one method of every hook; nothing in a loop by hand."""
        for hook in self.hooks if ctx is not None else ():
            getattr(hook, phase)(ctx)

    def due(self) -> bool:
        """Whether `finish` is to come: all parts are there, or each is looked at."""
        return self.apart or self.pending >= max(1, self.parts)

    def begin(self) -> None:
        """Clear the gradients if a new step begins."""
        if self.pending and not self.apart:
            return
        parameters = self.parameters()
        for p in (*parameters, *self.others):
            p.grad = None
        if self.sums:
            widen_(parameters)
            # DistributedDataParallel sends gradients in the dtype of the parameter alone
            self.alone = self.replica is not None and any(p.dtype.itemsize < 4 for p in parameters)
            for update in self.updates if self.replica is not None else ():
                update.attach(None if self.alone else self.replica)

    def quiet(self) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: DistributedDataParallel sends gradients only in the last of a step."""
        last = self.apart or (self.pending + 1 == self.parts and not self.alone)
        return nullcontext() if self.replica is None or last else self.replica.no_sync()

    def backward(self, loss: Tensor, **options: object) -> None:
        """Add the gradients of loss * seed / parts. An error gives a sum in `p.grad` up: a part of them is in it."""
        self.begin()
        seed = self.scaling.seed.detach().reshape(())
        try:
            # autograd casts the seed to the loss's dtype, so a float16 loss with one above 65504 starts from inf
            checked_loss(loss).backward(seed / self.parts if self.sums and self.parts else seed, **options)
        except BaseException:
            if not self.apart:
                self.drop()
            raise
        self.pending += not self.apart

    def finish(self, ctx: StepContext | None = None) -> Tensor | None:
        """Reduce, unscale and agree, clip, apply, advance; -> () float32, 1 where a gradient is not finite, or None.

        Raises:  RuntimeError where no optimizer, or with skip="all" one of them, received a gradient.
        """
        try:
            found = self.unscale(ctx)
            if not self.apart:
                self.clip()
            self.tell("before_update", ctx)
            if not self.apart:
                self.apply(ctx)
            elif found is None or not found.item():
                self.add([p.grad for p in self.parameters()], ctx)
            self.scaling.advance_(found)  # last: an error in the optimizer leaves the scale as it was
        finally:
            self.found = []
            if not self.apart:
                self.drop()
        return found

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], ctx: StepContext | None = None) -> None:
        """Apart: add the true gradients of one pass; with the last of `parts` the update runs.

        Raises:  ValueError unless there is one gradient, or None, of its shape for each parameter.
        """
        shapes = [p.shape for p in self.parameters()]
        came = [shape if grad is None else grad.shape for grad, shape in zip(gradients, shapes)]
        if len(gradients) != len(shapes) or came != shapes:
            need = [tuple(shape) for shape in shapes]
            raise ValueError(
                f"need a gradient (or None) for each parameter, in the optimizer's order, of the shapes {need}; got "
                f"{len(gradients)} of {[tuple(shape) for shape in came]}"
            )
        for i, grad in enumerate(gradients):
            if grad is not None:
                share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.parts
                self.held[i] = self.held[i].add_(share) if i in self.held else share
        self.pending += 1
        if self.pending >= self.parts:
            self.flush(ctx)

    def flush(self, ctx: StepContext | None = None) -> bool:
        """Apart: run the update with the mean of the passes so far; -> whether there were any."""
        if not self.pending:
            return False
        parameters, share = self.parameters(), self.parts / self.pending
        try:
            for i, p in enumerate(parameters):
                p.grad = (self.held[i] * share).to(p.dtype) if i in self.held else None
            self.found = [None] * len(self.updates)  # each pass was looked at
            for update in self.updates if self.average else ():
                update.reduce()
            self.clip()
            self.apply(ctx)
        finally:
            self.drop()
            for p in parameters:
                p.grad = None  # or the next pass would add to the mean just used
        return True

    def clip(self) -> None:
        """Clip the true gradients of each update."""
        for update in self.updates if self.clip_norm is not None else ():
            update.clip(self.clip_norm)  # type: ignore[arg-type]

    def unscale(self, ctx: StepContext | None = None) -> Tensor | None:
        """The first half of `finish`: true gradients, the same in all processes."""
        narrow_(self.parameters() if self.sums else ())
        watched = ctx if self.scaling.checks else None
        self.tell("before_unscale", watched)
        for update in self.updates if self.average and not self.apart else ():
            update.reduce()
        if not self.scaling.checks:
            self.found = [None] * len(self.updates)
            return None
        gradients = [gradients_of(parameters_of(update.optimizer)) for update in self.updates]
        self._need(gradients)
        nothing = torch.zeros_like(self.scaling.seed.reshape(()))
        found: list[Any] = [self.scaling.unscale_(grads) if grads else nothing.clone() for grads in gradients]
        # what DistributedDataParallel has averaged is the same everywhere; inside its Join some processes are gone
        if distributed.several_processes() and not self._alike():
            for flag in found:
                distributed.agree_(flag)
        self.found = found
        anywhere = self.anywhere()
        if ctx is not None:
            ctx.found_inf, ctx.overflow = anywhere, anywhere.bool()
        self.tell("after_unscale", watched)
        return anywhere

    def anywhere(self) -> Any:
        """() float32, 1 if a gradient of any optimizer was not finite; None if nobody looked."""
        first, *rest = self.found
        for found in rest:
            first = torch.maximum(first, found.to(first.device))
        return first

    def apply(self, ctx: StepContext | None = None) -> None:
        """The second half: run the updates, or skip."""
        anywhere = self.anywhere()
        for update, found in zip(self.updates, self.found):
            if len(self.updates) == 1 or gradients_of(parameters_of(update.optimizer)):
                update.apply(ctx, anywhere if self.skip == "all" else found)

    def drop(self) -> None:
        """Give the running step up; the next `backward` begins a new one."""
        narrow_(self.parameters() if self.pending and self.sums else ())
        self.pending, self.found, self.held = 0, [], {}

    def state_dict(self) -> dict[str, Any]:
        """Scale, rule, optimizers and hooks as they stand between two updates."""
        optimizers = [update.optimizer for update in self.updates]
        return {
            "scale": self.scaling.seed.clone(),
            "rule": None if self.rule is None else self.rule.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "kinds": [kinds_of(optimizer) for optimizer in optimizers],
            "hooks": [hook.state_dict() if hasattr(hook, "state_dict") else None for hook in self.hooks],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a state that this step cannot take over."""
        nothing = [None] * len(self.updates)
        own = {"rule": None, "optimizers": nothing, "kinds": nothing, "hooks": [None] * len(self.hooks)}
        check_alike("the state of a step", state, {"scale": self.scaling.seed, **own})
        rule = None if self.rule is None else self.rule.state_dict()
        held = [rule is not None, *(hasattr(hook, "state_dict") for hook in self.hooks)]
        if [part is not None for part in (state["rule"], *state["hooks"])] != held:
            raise ValueError("the saved step had other hooks, or another kind of scale; build it as it was saved")
        for update, kinds, saved in zip(self.updates, state["kinds"], state["optimizers"]):
            check_kinds(update.optimizer, kinds)
            check_state(update.optimizer, saved)
        check_alike("rule", state["rule"], rule)
        for hook, saved in zip(self.hooks, state["hooks"]):
            if saved is not None:
                self._try(hook, saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; what was begun is given up.

        Raises:  TypeError or ValueError, and changes nothing, if the parts are others; what a hook refuses.
        """
        self.check_state(state)
        optimizers = [update.optimizer for update in self.updates]
        parts = [*zip(self.hooks, state["hooks"]), (self.rule, state["rule"]), *zip(optimizers, state["optimizers"])]
        for part, saved in parts:
            if saved is not None:
                part.load_state_dict(saved)
        self.scaling.seed.copy_(state["scale"])
        self.drop()

    def _try(self, hook: Any, saved: Any) -> None:
        """Raise what a hook raises of a state. Nobody else knows before, so a copy of the hook is asked."""
        try:
            twin = copy.deepcopy(hook, {id(p): p for p in (*self.parameters(), *self.others)})
        except Exception:  # it holds an open file, say: then it is asked when its turn has come
            return
        twin.load_state_dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins a step of its own: it has other parameters, and torch leaves gradients behind."""
        return {**vars(self), "pending": 0, "found": [], "held": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.averaged = distributed.averaged_by(self.replica)

    def _need(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        resting = [update.optimizer for update, grads in zip(self.updates, gradients) if not grads]
        if resting and (self.skip == "all" or len(resting) == len(self.updates)):
            need_gradients(resting)

    def _alike(self) -> bool:
        return not self.alone and all(id(p) in self.averaged for p in self.parameters())


def uncompiled(kind: type, *names: str) -> None:
    """Leave methods of a class to Python under torch.compile too, and what they call to the compiler.

    For what counts: the compiler takes an int for a constant, and would compile anew at each count. Told when the first
    object is made, since telling imports the compiler, which takes more than a second.
    """
    if kind not in _LEFT_TO_PYTHON:
        _LEFT_TO_PYTHON.add(kind)
        for name in names:
            setattr(kind, name, torch.compiler.disable(vars(kind)[name], recursive=False))


_LEFT_TO_PYTHON: set[type] = set()
