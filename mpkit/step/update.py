"""What a step does with its gradients, as a value: average them over processes, clip them, update the weights.

`Update` is the plain one. Others stand around one another and change what they are about; the boosts are such updates.
From outside in: accumulation, freezing, then AdaSum or dimension reduction. An order that makes no sense is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from mpkit.optimizers.arguments import parameters_of
from mpkit.step.distributed import average_
from mpkit.step.hooks import Hook, StepContext
from mpkit.step.phases import clip_, skips_on_device


class Update:
    """One optimizer's update from the gradients in `p.grad`.

    optimizer:  runs the update.
    hooks:      what has to see the other phases of the step.
    pending:    passes that it has kept for a later step.
    """

    what: ClassVar[str] = "the optimizer"
    hooks: tuple[Hook, ...] = ()
    pending: int = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def chain(self) -> Iterator[Update]:
        """This update, and those inside it."""
        yield self

    def drop(self) -> None:
        """Give up what it has kept."""

    def reduce(self) -> None:
        """Average the gradients over the processes."""
        average_(parameters_of(self.optimizer))

    def clip(self, max_norm: float) -> None:
        """Clip the joint L2 norm of the true gradients."""
        clip_(parameters_of(self.optimizer), max_norm)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """Run the optimizer, unless `found_inf` (None: nobody looked) says that a gradient was not finite.

        No host read when the optimizer can skip on the device; else `found_inf` is read once.

        Args:    ctx: the running step of a train cell, None in a loop by hand.
        """
        optimizer: Any = self.optimizer
        if found_inf is None or not skips_on_device(optimizer):
            if found_inf is None or not found_inf.item():
                optimizer.step()
            return
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # the gradients are unscaled already
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


class Wrapped(Update):
    """An update around another one; by itself it changes nothing.

    refuses:  what it cannot stand around, and why.
    Raises:   ValueError for an order that makes no sense.
    """

    refuses: ClassVar[Mapping[str, str]] = {}

    def __init__(self, inner: Update) -> None:
        super().__init__(inner.optimizer)
        for each in inner.chain():
            if each.what in self.refuses:
                raise ValueError(f"{self.what} cannot stand around {each.what}: {self.refuses[each.what]}")
        self.inner, self.hooks = inner, inner.hooks

    def chain(self) -> Iterator[Update]:
        yield self
        yield from self.inner.chain()

    def reduce(self) -> None:
        self.inner.reduce()

    def clip(self, max_norm: float) -> None:
        self.inner.clip(max_norm)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        self.inner.apply(ctx, found_inf)
