"""The one engine of a training step: `backward` for each part of the loss, then `finish`.

finish = reduce, unscale and agree, clip, apply, advance. MindSpore's cells, `ScaledStep` and `Model` all run it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_alike
from mpkit.optimizers.arguments import parameters_of
from mpkit.optimizers.saved import check_rule, check_state, rule_of
from mpkit.scalers.tensor_scale import several_processes
from mpkit.step import distributed
from mpkit.step.hooks import Hook, StepContext
from mpkit.step.phases import gradients_of, narrow_, widen_
from mpkit.step.scaling import Scaling
from mpkit.step.update import Update


@dataclass(eq=False)
class Step:
    """Gradients of one or several backward passes, and what is done with their sum.

    They are summed in float32, for 16-bit parameters too, and rounded once, when the sum is whole. It stands in
    `p.grad`, where autograd adds.

    Args:
        updates:    one for each optimizer, without a parameter in common.
        scaling:    what the backward passes start from, and what the gradients are divided by.
        parts:      backward passes of a step, of which it takes the mean. 0: any number, of which it takes the sum.
        network:    may hold a DistributedDataParallel, and parameters that no optimizer updates.
        hooks:      see each phase from the end of the last backward pass on.
        clip_norm:  largest joint L2 norm of an update's gradients.
        skip:       "all": an overflow anywhere skips every update; "each": only the one whose gradients overflowed, and
                    one without gradients rests.
        average:    average the gradients over the processes.
        rule:       what moves the scale and has a state of its own; None where another module saves it.
    """

    updates: Sequence[Update]
    scaling: Scaling
    parts: int
    network: nn.Module = field(default_factory=nn.Module)
    hooks: Iterable[Hook] = ()
    clip_norm: float | None = None
    skip: Literal["all", "each"] = "all"
    average: bool = True
    rule: Any = None

    def __post_init__(self) -> None:
        uncompiled(Step, "due", "begin", "quiet", "backward", "finish", "unscale", "apply", "drop")
        self.hooks = [*self.hooks, *(hook for update in self.updates for hook in update.hooks)]
        self.replica = distributed.averaging_wrapper(self.network)
        # what DistributedDataParallel has averaged is the same everywhere; inside its Join some processes are gone
        self.alike = self.replica is not None and distributed.averages(self.replica, self.parameters())
        # Parameters that no optimizer updates receive gradients too, and would go on summing them.
        known = {id(p) for p in self.parameters()}
        self.others = [p for p in self.network.parameters() if id(p) not in known]
        self.pending = 0  # backward passes that no update has used
        self.found: list[Any] = []
        self.alone = self.replica is None  # whether nobody has averaged the gradients before they come here

    def parameters(self) -> list[Tensor]:
        """What the optimizers update."""
        return [p for update in self.updates for p in parameters_of(update.optimizer)]

    def tell(self, phase: str, ctx: StepContext | None) -> None:
        """Call one method of every hook; nothing in a loop by hand."""
        for hook in self.hooks if ctx is not None else ():
            getattr(hook, phase)(ctx)

    def due(self) -> bool:
        """Whether `finish` is to come: all parts are there."""
        return self.pending >= self.parts

    def begin(self) -> None:
        """Clear the gradients if a new step begins."""
        if self.pending:
            return
        parameters = self.parameters()
        for p in (*parameters, *self.others):
            p.grad = None
        if self.parts != 1:
            widen_(parameters)
            # DistributedDataParallel sends gradients in the dtype of the parameter alone
            self.alone = self.replica is None or any(p.dtype.itemsize < 4 for p in parameters)

    def quiet(self) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: DistributedDataParallel sends gradients only in the last of a step."""
        last = self.pending + 1 == self.parts and not self.alone
        return nullcontext() if self.replica is None or last else self.replica.no_sync()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of loss * seed / parts. After an error in it a part of them is in the sum: `drop` it."""
        seed = self.scaling.seed.detach().reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        self.pending += 1
        # autograd casts the seed to the loss's dtype, so a float16 loss with one above 65504 starts from inf
        loss.backward(seed / self.parts if self.parts > 1 else seed, **options)

    def finish(self, ctx: StepContext | None = None) -> Tensor | None:
        """Reduce, unscale and agree, clip, apply, advance; -> () float32, 1 where a gradient is not finite, or None.

        Raises:  RuntimeError where no optimizer, or with skip="all" one of them, received a gradient.
        """
        try:
            found = self.unscale(ctx)
            for update in self.updates if self.clip_norm is not None else ():
                update.clip(self.clip_norm)  # type: ignore[arg-type]
            self.tell("before_update", ctx)
            self.apply(ctx)
        finally:
            self.drop()
        return found

    def unscale(self, ctx: StepContext | None = None) -> Tensor | None:
        """The first half of `finish`: true gradients, the same in all processes."""
        reduced = self.updates if self.average and self.alone and several_processes() else ()
        if not reduced:  # nobody else brings gradients: ask before the sums are rounded
            self._need()
        narrow_(self.parameters() if self.parts != 1 else ())
        watched = ctx if self.scaling.checks else None
        self.tell("before_unscale", watched)
        for update in reduced:
            update.reduce()
        gradients = self._need()
        if not self.scaling.checks:
            self.found = [None] * len(self.updates)
            return None
        nothing = torch.zeros_like(self.scaling.seed.reshape(()))
        self.found = [self.scaling.unscale_(grads) if grads else nothing.clone() for grads in gradients]
        if several_processes() and (self.alone or not self.alike):
            for flag in self.found:
                distributed.agree_(flag)
        anywhere = self.anywhere()
        if ctx is not None:
            ctx.found_inf, ctx.overflow = anywhere, anywhere.bool()
        self.tell("after_unscale", watched)
        return anywhere

    def anywhere(self) -> Any:
        """() float32, 1 if a gradient of any optimizer was not finite; None if nobody looked."""
        return reduce(torch.maximum, self.found)

    def apply(self, ctx: StepContext | None = None) -> None:
        """The second half: run the updates, or skip; the scale moves."""
        anywhere = self.anywhere()
        for update, found in zip(self.updates, self.found):
            if len(self.updates) == 1 or gradients_of(parameters_of(update.optimizer)):
                update.apply(ctx, anywhere if self.skip == "all" else found)
        self.scaling.advance_(anywhere)  # last: an error in an optimizer leaves the scale as it was

    def drop(self) -> None:
        """Give the running step up; the next one begins anew."""
        narrow_(self.parameters() if self.pending and self.parts != 1 else ())
        self.pending, self.found = 0, []

    def state_dict(self) -> dict[str, Any]:
        """Scale, rule, optimizers and hooks as they stand between two updates."""
        states = {name: [_state_of(part) for part in parts] for name, parts in self._parts().items()}
        kinds = [rule_of(update.optimizer) for update in self.updates]
        return {"scale": self.scaling.seed.clone(), "kinds": kinds, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; what was begun is given up.

        Raises:  TypeError or ValueError, and changes nothing, if the parts are others; what a hook refuses.
        """
        shapes = {name: [None] * len(parts) for name, parts in self._parts().items()}
        own = {"scale": self.scaling.seed, "kinds": shapes["optimizers"], **shapes}
        check_alike("the state of a step", state, own)
        for update, kind in zip(self.updates, state["kinds"]):
            check_rule(update.optimizer, kind)
        pairs = [pair for name, parts in self._parts().items() for pair in zip(parts, state[name])]
        for part, saved in pairs:
            self._ask(part, saved)
        for part, saved in pairs:
            if saved is not None:
                part.load_state_dict(saved)
        self.scaling.seed.copy_(state["scale"])
        self.drop()
        for each in (part for update in self.updates for part in update.chain()):
            each.drop()

    def _parts(self) -> dict[str, Sequence[Any]]:
        """What may have a state of its own; hooks come first, since some can only be asked by loading it."""
        return {
            "hooks": [*self.hooks],
            "rule": [self.rule],
            "optimizers": [update.optimizer for update in self.updates],
        }

    def _ask(self, part: Any, saved: Any) -> None:
        """Raise TypeError, ValueError or what a hook raises of a state. Nobody else knows, so a copy of it is asked."""
        if hasattr(part, "state_dict") != (saved is not None):
            raise ValueError("the saved step had other hooks, or another kind of scale; build it as it was saved")
        if isinstance(part, Optimizer):
            check_state(part, saved)
        elif saved is not None:
            try:
                twin = copy.deepcopy(part, {id(p): p for p in (*self.parameters(), *self.others)})
            except Exception:  # it holds an open file, say: then it is asked when its turn has come
                return
            twin.load_state_dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins a step of its own: it has other parameters, and torch leaves gradients behind."""
        return {**vars(self), "pending": 0, "found": []}

    def _need(self) -> list[list[Tensor]]:
        """The gradients of each optimizer; RuntimeError if the loss reached no parameter of one that may not rest."""
        gradients = [gradients_of(parameters_of(update.optimizer)) for update in self.updates]
        resting = [update.optimizer for update, grads in zip(self.updates, gradients) if not grads]
        if resting and (self.skip == "all" or len(resting) == len(self.updates)):
            names = ", ".join(type(optimizer).__name__ for optimizer in resting)
            raise RuntimeError(
                f"no parameter of the optimizer received a gradient ({names}), so nothing would be trained; build the "
                "optimizer from the parameters of the network that this step runs, not of an earlier one"
            )
        return gradients


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else None


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
