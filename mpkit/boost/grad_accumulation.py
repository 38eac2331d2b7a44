"""Gradient accumulation in MindSpore's order: each micro-gradient is checked by itself, one update gets their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_function, checked
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.step import StepContext
from mpkit.step.engine import Step
from mpkit.step.scaling import unscaled
from mpkit.step.update import Update

__all__ = ["GradientAccumulation"]
CPU = torch.device("cpu")


class GradientAccumulation(nn.Module):
    """Add gradients of N micro-steps and update the weights once with their mean.

    Call it as `accumulation(loss, grads)` after each backward pass. On calls N, 2N, ... the mean is put into
    `p.grad` and the update runs; on the others the weights stay. What is left at the end of an epoch joins the next
    epoch, unless `flush()` applies it at once. An update that raises drops what was added.

    Args:
        max_accumulation_step: N, micro-steps per update (>= 1; 1 updates on every call).
        optimizer:             its parameter groups name what is accumulated, in their order.
        update:                what runs on the N-th call with the mean in `p.grad`; None: `optimizer.step`.
    Units:   sums are kept in float32 for float16 and bfloat16 gradients, so small micro-gradients are not lost. They
             are in no state: a checkpoint falls between two updates.
    Raises:  TypeError if N is no int, or for an optimizer whose step needs a closure (LBFGS); ValueError if N < 1 or a
             call brings other gradients than the parameters have.
    Source:  MindSpore boost.GradientAccumulation; `flush`, `update` and `overflow` are mpkit's.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> accumulate = GradientAccumulation(2, torch.optim.SGD([weight], lr=1.0))
    >>> for gradient in (1.0, 3.0):
    ...     _ = accumulate(torch.tensor(0.0), [torch.tensor([gradient])])
    >>> weight.item()
    -2.0
    """

    @checked
    def __init__(
        self, max_accumulation_step: Count, optimizer: Optimizer, *, update: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        check_function("update", update, "a function without arguments", optional=True)
        need_plain_step(optimizer)
        self.max_accumulation_step, self.optimizer = max_accumulation_step, optimizer
        runs = Calls(optimizer, optimizer.step if update is None else update)
        self.step = Step([runs], unscaled(1.0, CPU), parts=max_accumulation_step, apart=True, average=False)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order in which gradients are expected."""
        return parameters_of(self.optimizer)  # type: ignore[return-value]

    @property
    def counter(self) -> int:
        """Micro-steps since the last update."""
        return self.step.pending

    @property
    def accumulated(self) -> list[Tensor]:
        """The running sums of gradient / N, one per parameter; zeros right after an update."""
        return [self.step.held.get(i, torch.zeros_like(p)) for i, p in enumerate(self.weights)]

    def forward(
        self, loss: Tensor, grads: Sequence[Tensor | None] | None = None, overflow: Tensor | bool = False
    ) -> Tensor:
        """Add one micro-step's gradients (None: those in `p.grad`, which are taken away); -> the loss given.

        A micro-step with `overflow` is neither added nor counted. A tensor there costs one read on the host: the
        counter decides in Python whether the optimizer runs.
        """
        if grads is None:
            grads = [p.grad for p in self.weights]
            self.optimizer.zero_grad()  # the next backward starts from nothing instead of adding to what was counted
        if not bool(overflow):
            self.step.add(grads)
        return loss

    def flush(self) -> bool:
        """Update now with the mean of the micro-steps counted so far; -> whether there were any."""
        return self.step.flush()


class Calls(Update):
    """Runs a function of somebody's own."""

    def __init__(self, optimizer: Optimizer, call: Callable[[], Any]) -> None:
        super().__init__(optimizer)
        self.call = call

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        self.call()
