"""What a step does with its gradients, as a value: average them over processes, clip them, update the weights.

`Update` is the plain one. Others stand around one another: `Wrapped` hands everything on to the update inside it, and a
subclass changes what it is about. A train cell and a loop by hand call the same three phases.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpkit.optimizers.arguments import parameters_of
from mpkit.step import distributed
from mpkit.step.hooks import Hook, StepContext
from mpkit.step.phases import apply_, clip_, gradients_of


class Update:
    """One optimizer's update from the gradients in `p.grad`.

    optimizer:  runs the update.
    hooks:      what has to see the other phases of the step.
    """

    hooks: tuple[Hook, ...] = ()

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.replica: DistributedDataParallel | None = None

    def attach(self, replica: DistributedDataParallel | None) -> None:
        """Learn who averages the gradients of the network already, if anybody does."""
        self.replica = replica

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Average the gradients (of `parameters`; None: all of the optimizer's) over the processes.

        Nothing is left to do in one process, and where DistributedDataParallel has averaged in the backward pass.
        """
        if self.replica is None and distributed.several_processes():
            distributed.average_(parameters_of(self.optimizer) if parameters is None else parameters)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the joint L2 norm of the true gradients; returns the norm before, None if that is put off."""
        return clip_(parameters_of(self.optimizer), max_norm)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """Run the optimizer, unless `found_inf` (None: nobody looked) says that a gradient was not finite.

        Args:    ctx: the running step of a train cell, None in a loop by hand.
        Raises:  RuntimeError if there is no gradient at all.
        """
        if found_inf is None:
            gradients_of(parameters_of(self.optimizer))
            self.optimizer.step()
        else:
            apply_(self.optimizer, found_inf)


class Wrapped(Update):
    """An update around another one; by itself it changes nothing."""

    def __init__(self, inner: Update) -> None:
        super().__init__(inner.optimizer)
        self.inner = inner
        self.hooks = inner.hooks

    def attach(self, replica: DistributedDataParallel | None) -> None:
        """As of the update inside."""
        super().attach(replica)
        self.inner.attach(replica)

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """As of the update inside."""
        self.inner.reduce(parameters)

    def clip(self, max_norm: float) -> Tensor | None:
        """As of the update inside."""
        return self.inner.clip(max_norm)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """As of the update inside."""
        self.inner.apply(ctx, found_inf)
