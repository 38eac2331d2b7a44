"""Gradient accumulation in MindSpore's order: each micro-gradient is checked by itself, one update gets their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_function, checked
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.step import StepContext
from mpkit.step.engine import uncompiled
from mpkit.step.update import Update, Wrapped

__all__ = ["GradientAccumulation"]


class GradientAccumulation(nn.Module):
    """Add gradients of N micro-steps and update the weights once with their mean.

    Call it as `accumulation(loss, grads)` after each backward pass. On calls N, 2N, ... the mean is put into
    `p.grad` and the update runs; on the others the weights stay. What is left at the end of an epoch joins the next
    epoch, unless `flush()` applies it at once. Where the update raises, nothing that was added is lost: `flush()` tries
    it again, and after one more call the mean is that of N + 1 micro-steps.

    Args:
        max_accumulation_step: N, micro-steps per update (>= 1; 1 updates on every call).
        optimizer:             its parameter groups name what is accumulated, in their order.
        update:                what runs on the N-th call with the mean in `p.grad`; None: `optimizer.step`.
        reduce:                called once per update with the list of mean gradients, to average them in place over
                               ranks (so micro-steps need no communication: run them under `network.no_sync()`).
    Units:   sums are kept in float32 for float16 and bfloat16 gradients, so small micro-gradients are not lost. They
             are in no state: a checkpoint falls between two updates.
    Raises:  TypeError if N is no int, or for an optimizer whose step needs a closure (LBFGS); ValueError if N < 1 or a
             call brings another number of gradients.
    Source:  MindSpore boost.GradientAccumulation; `flush`, `update`, `reduce` and `overflow` are mpkit's.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> accumulate = GradientAccumulation(2, torch.optim.SGD([weight], lr=1.0))
    >>> for gradient in (1.0, 3.0):
    ...     _ = accumulate(torch.tensor(0.0), [torch.tensor([gradient])])
    >>> weight.item()
    -2.0
    """

    @checked
    def __init__(
        self,
        max_accumulation_step: Count,
        optimizer: Optimizer,
        *,
        update: Callable[[], Any] | None = None,
        reduce: Callable[[list[Tensor]], Any] | None = None,
    ) -> None:
        super().__init__()
        check_function("update", update, "a function without arguments", optional=True)
        need_plain_step(optimizer)
        uncompiled(GradientAccumulation, "forward", "flush", "_add", "drop")
        self.max_accumulation_step, self.optimizer = max_accumulation_step, optimizer
        self._update = optimizer.step if update is None else update
        self._reduce = reduce
        self.drop()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order in which gradients are expected."""
        return parameters_of(self.optimizer)  # type: ignore[return-value]

    @property
    def accumulated(self) -> list[Tensor]:
        """The running sums of gradient / N, one per parameter; zeros right after an update."""
        return [self._sums.get(i, torch.zeros_like(p)) for i, p in enumerate(self.weights)]

    def forward(
        self, loss: Tensor, grads: Sequence[Tensor | None] | None = None, overflow: Tensor | bool = False
    ) -> Tensor:
        """Add one micro-step's gradients (None: those in `p.grad`, which are taken away); -> the loss given.

        A micro-step with `overflow` is neither added nor counted. A tensor there costs one read on the host: the
        counter decides in Python whether the optimizer runs.
        """
        taken = grads is None
        if grads is None:
            grads = [p.grad for p in self.weights]
            for p in self.weights:
                p.grad = None  # the next backward starts from nothing instead of adding to what was counted
        if bool(overflow):
            return loss
        self._add(grads, taken)
        self.counter += 1
        if self.counter >= self.max_accumulation_step:
            self.flush()
        return loss

    @torch.no_grad()
    def _add(self, grads: Sequence[Tensor | None], taken: bool) -> None:
        """Sum gradient / N; what was `taken` is nobody else's any more, and is divided where it stands."""
        shapes = [p.shape for p in self.weights]
        if len(grads) != len(shapes):
            raise ValueError(f"need one gradient (or None) for each of {len(shapes)} parameters, got {len(grads)}")
        for shape, grad in zip(shapes, grads):
            if grad is not None and grad.shape != shape:
                raise ValueError(
                    f"a gradient has shape {tuple(grad.shape)}, and its parameter {tuple(shape)}; give them in the "
                    "order of the optimizer's parameters"
                )
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            mine = taken or wide is not grad
            share = wide.div_(self.max_accumulation_step) if mine else wide / self.max_accumulation_step
            held = self._sums.get(i)
            if held is not None and held.is_sparse and not share.is_sparse:
                held, share = share, held  # torch adds a sparse tensor to a dense one, and not the other way round
            self._sums[i] = share if held is None else held.add_(share)

    def flush(self) -> bool:
        """Update now with the mean of the micro-steps counted so far; -> whether there were any."""
        if self.counter == 0:
            return False
        parameters, scale = self.weights, self.max_accumulation_step / self.counter
        # copies, because the mean may be reduced and clipped in place before the update fails
        means = {i: held * scale for i, held in self._sums.items()}
        try:
            if self._reduce is not None:
                self._reduce(list(means.values()))
            for i, p in enumerate(parameters):
                p.grad = means[i].to(p.dtype) if i in means else None
            self._update()
        finally:
            for p in parameters:
                p.grad = None  # or the next backward would add to the mean just used
        self.drop()
        return True

    def drop(self) -> None:
        """Give up what was added since the last update."""
        self._sums: dict[int, Tensor] = {}  # position of the parameter -> sum of gradient / N
        self.counter = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins its own sums."""
        return {**vars(self), "_sums": {}, "counter": 0}


class Accumulate(Wrapped):
    """Adds the gradients of several steps; the update inside gets their mean. A step that overflowed is not counted.

    The gradients of a step are whole here, divided by its scale and checked. (`accumulation_steps` of a train cell sums
    before that, and checks the sum: nothing is kept apart, and one micro-batch that overflows costs the whole update.)
    """

    what = "accumulation"

    def __init__(self, inner: Update, steps: int) -> None:
        super().__init__(inner)
        uncompiled(Accumulate, "add", "_update")
        self.accumulation = GradientAccumulation(steps, inner.optimizer, update=self._update)
        self._max_norm: float | None = None
        self._ctx: StepContext | None = None

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Nothing: only the mean is sent."""

    def clip(self, max_norm: float) -> None:
        """Put off: it is the mean that is clipped, and not each micro-gradient."""
        self._max_norm = max_norm

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """Add the gradients in `p.grad`; update when enough are there."""
        self.add(ctx, None, found_inf)

    def add(self, ctx: StepContext | None, grads: Sequence[Tensor | None] | None, found_inf: Tensor | None) -> None:
        """As `apply`, with the gradients given one by one."""
        self._ctx = ctx
        try:
            self.accumulation(torch.zeros(()), grads, False if found_inf is None else found_inf)
        finally:
            self._ctx = None

    def _update(self) -> None:
        self.inner.reduce()
        if self._max_norm is not None:
            self.inner.clip(self._max_norm)
        self.inner.apply(self._ctx, None)
