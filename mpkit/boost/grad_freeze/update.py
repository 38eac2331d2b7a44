"""What freezing changes of a step: what is differentiated, what is sent, and when the strategy goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mpkit.step import Hook, StepContext
from mpkit.step.update import Update, Wrapped


class Freeze(Wrapped):
    """Frozen layers have no gradients to send; a step that is skipped uses up its place in the strategy."""

    what = "freezing"
    refuses: ClassVar[Mapping[str, str]] = {
        "freezing": "a layer can stand still once",
        "dimension reduction": "it needs the gradient of every weight",
    }

    def __init__(self, inner: Update, optimizer: Any) -> None:
        super().__init__(inner)
        self.freezing = optimizer
        self.hooks = (*inner.hooks, FreezeHook(optimizer))

    def attach(self, replica: DistributedDataParallel | None) -> None:
        """Raises ValueError for a DistributedDataParallel that would wait for the gradients of frozen layers."""
        need_unused(replica)
        super().attach(replica)

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Average the gradients of the layers that this step trains."""
        self.inner.reduce(self.freezing.trained() if parameters is None else parameters)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """As inside, and on to the next place."""
        before = self.freezing.steps
        self.inner.apply(ctx, found_inf)
        if self.freezing.steps == before:
            self.freezing.advance()


def need_unused(replica: DistributedDataParallel | None) -> None:
    """Raise ValueError for a DistributedDataParallel that cannot freeze."""
    if replica is not None and not replica.find_unused_parameters:
        raise ValueError(
            "on a frozen step DistributedDataParallel would wait for gradients that never come; make it with "
            "find_unused_parameters=True, or leave it out: this cell averages the gradients itself"
        )


class FreezeHook(Hook):
    """Switches gradients off for the forward and backward pass of any train cell."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._pass = optimizer, ExitStack()

    def before_forward(self, ctx: StepContext) -> None:
        self._pass.close()  # left over when the last pass ended in an exception
        self._pass.enter_context(self._optimizer.frozen())

    def after_backward(self, ctx: StepContext) -> None:
        self._pass.close()

    after_failure = after_backward
