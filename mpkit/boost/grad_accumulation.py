"""Gradient accumulation in MindSpore's order: each micro-gradient is checked by itself, one update gets their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.arguments import Count, checked
from mpkit.optimizers.arguments import Trainer, parameters_of
from mpkit.step import StepContext
from mpkit.step.update import Update, Wrapped

__all__ = ["GradientAccumulation"]


class Accumulate(Wrapped):
    """The update inside runs with the mean of `parts` passes, each of which was divided by its scale and checked.

    One that overflowed is neither added nor counted. Sums are kept in float32 for 16-bit gradients. What a step asks of
    the gradients of a pass, to be averaged over processes and to be clipped, is done to the mean.

    pending:  passes since the last update.
    held:     position of a parameter -> its sum so far, divided by `parts`.
    """

    what = "accumulation"
    averages, max_norm = False, None

    def __init__(self, inner: Update, parts: int) -> None:
        super().__init__(inner)
        self.parts = parts
        self.drop()

    def drop(self) -> None:
        """Give up what was added."""
        self.pending, self.held = 0, dict[int, Tensor]()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: it has other parameters."""
        return {**vars(self), "pending": 0, "held": {}}

    def reduce(self) -> None:
        """The mean is to be averaged over processes."""
        self.averages = True

    def clip(self, max_norm: float) -> None:
        """The mean is to be clipped."""
        self.max_norm = max_norm

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """Add the gradients of a pass. The counter decides in Python, so the flag is read on the host."""
        if found_inf is None or not found_inf.item():
            self.add([p.grad for p in parameters_of(self.optimizer)], ctx)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], ctx: StepContext | None = None) -> None:
        """Add the true gradients of one pass; with the last of `parts` the update runs.

        Raises:  ValueError unless there is one gradient, or None, of its shape for each parameter.
        """
        need = [tuple(p.shape) for p in parameters_of(self.optimizer)]
        came = [shape if grad is None else tuple(grad.shape) for grad, shape in zip(gradients, need)]
        if len(gradients) != len(need) or came != need:
            raise ValueError(f"need a gradient or None for each parameter, of the shapes {need}, got {came}")
        for i, grad in enumerate(gradients):
            if grad is not None:
                share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.parts
                self.held[i] = self.held[i].add_(share) if i in self.held else share
        self.pending += 1
        if self.pending >= self.parts:
            self.flush(ctx)

    @torch.no_grad()
    def flush(self, ctx: StepContext | None = None) -> bool:
        """Run the update with the mean of the passes so far; -> whether there were any."""
        if not self.pending:
            return False
        parameters, share = parameters_of(self.optimizer), self.parts / self.pending
        try:
            for i, p in enumerate(parameters):
                p.grad = (self.held[i] * share).to(p.dtype) if i in self.held else None
            if self.averages:
                self.inner.reduce()
            if self.max_norm is not None:
                self.inner.clip(self.max_norm)
            self.inner.apply(ctx, None)
        finally:
            self.drop()
            for p in parameters:
                p.grad = None  # or the next pass would add to the mean just used
        return True


class GradientAccumulation(nn.Module):
    """Add gradients of N micro-steps and update the weights once with their mean.

    Call it as `accumulation(loss, grads)` after each backward pass. On calls N, 2N, ... the mean is put into
    `p.grad` and the update runs; on the others the weights stay. What is left at the end of an epoch joins the next
    epoch, unless `flush()` applies it at once. An update that raises drops what was added.

    Args:
        max_accumulation_step: N, micro-steps per update (>= 1; 1 updates on every call).
        optimizer:             its parameter groups name what is accumulated, in their order.
    Units:   sums are kept in float32 for float16 and bfloat16 gradients, so small micro-gradients are not lost. They
             are in no state: a checkpoint falls between two updates.
    Raises:  TypeError if N is no int, or for an optimizer whose step needs a closure (LBFGS); ValueError if N < 1 or a
             call brings other gradients than the parameters have.
    Source:  MindSpore boost.GradientAccumulation; `flush` and `overflow` are mpkit's.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> accumulate = GradientAccumulation(2, torch.optim.SGD([weight], lr=1.0))
    >>> for gradient in (1.0, 3.0):
    ...     _ = accumulate(torch.tensor(0.0), [torch.tensor([gradient])])
    >>> weight.item()
    -2.0
    """

    @checked
    def __init__(self, max_accumulation_step: Count, optimizer: Trainer) -> None:
        super().__init__()
        self.max_accumulation_step, self.optimizer = max_accumulation_step, optimizer
        self.sums = Accumulate(Update(optimizer), max_accumulation_step)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order in which gradients are expected."""
        return parameters_of(self.optimizer)  # type: ignore[return-value]

    @property
    def counter(self) -> int:
        """Micro-steps since the last update."""
        return self.sums.pending

    @property
    def accumulated(self) -> list[Tensor]:
        """The running sums of gradient / N, one per parameter; zeros right after an update."""
        return [self.sums.held.get(i, torch.zeros_like(p)) for i, p in enumerate(self.weights)]

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
            self.sums.add(grads)
        return loss

    def flush(self) -> bool:
        """Update now with the mean of the micro-steps counted so far; -> whether there were any."""
        return self.sums.flush()
