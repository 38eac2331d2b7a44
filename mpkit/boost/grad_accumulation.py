"""Gradient accumulation: one update from the mean gradient of several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_count
from mpkit.compiling import runs_as_python
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.step.restore import saved_count, saved_sum


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
    Units:   sums are kept in float32 for float16 and bfloat16 gradients, so small micro-gradients are not lost.
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

    def __init__(
        self,
        max_accumulation_step: int,
        optimizer: Optimizer,
        *,
        update: Callable[[], Any] | None = None,
        reduce: Callable[[list[Tensor]], Any] | None = None,
    ) -> None:
        super().__init__()
        check_count("max_accumulation_step", max_accumulation_step)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if update is None:
            need_plain_step(optimizer)
        self.max_accumulation_step = max_accumulation_step
        self.optimizer = optimizer
        self.counter = 0
        if update is not None and not callable(update):
            raise TypeError(f"update must be a function without arguments or None, got {type(update).__name__}")
        self._update = optimizer.step if update is None else update
        self._reduce = reduce
        self._sums: dict[int, Tensor] = {}  # position of the parameter -> sum of gradient / N

    @property
    def weights(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order in which gradients are expected."""
        return parameters_of(self.optimizer)  # type: ignore[return-value]

    @property
    def accumulated(self) -> list[Tensor]:
        """The running sums of gradient / N, one per parameter; zeros right after an update."""
        return [self._sums.get(i, torch.zeros_like(p)) for i, p in enumerate(self.weights)]

    @runs_as_python
    def forward(
        self, loss: Tensor, grads: Sequence[Tensor | None] | None = None, overflow: Tensor | bool = False
    ) -> Tensor:
        """Add one micro-step's gradients (None: those in `p.grad`, which are taken away); -> the loss given.

        A micro-step with `overflow` is neither added nor counted. A tensor there costs one read on the host: the
        counter decides in Python whether the optimizer runs.
        """
        if grads is None:
            grads = self._taken()
        if bool(overflow):
            return loss
        self._add(grads)
        self.counter += 1
        if self.counter >= self.max_accumulation_step:
            self.flush()
        return loss

    @runs_as_python
    def flush(self) -> bool:
        """Update now with the mean of the micro-steps counted so far; -> whether there were any."""
        if self.counter == 0:
            return False
        self._step(scale=self.max_accumulation_step / self.counter)
        return True

    def _taken(self) -> list[Tensor | None]:
        grads = [p.grad for p in self.weights]
        for p in self.weights:
            p.grad = None  # the next backward starts from nothing instead of adding to what was counted
        return grads

    @torch.no_grad()
    def _add(self, grads: Sequence[Tensor | None]) -> None:
        parameters = self.weights
        if len(grads) != len(parameters):
            raise ValueError(f"need one gradient (or None) for each of {len(parameters)} parameters, got {len(grads)}")
        for p, grad in zip(parameters, grads):
            if grad is not None and grad.shape != p.shape:
                raise ValueError(
                    f"a gradient has shape {tuple(grad.shape)}, and its parameter {tuple(p.shape)}; give them in the "
                    "order of the optimizer's parameters"
                )
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.max_accumulation_step
            held = self._sums.get(i)
            if held is not None and held.is_sparse and not share.is_sparse:
                held, share = share, held  # torch adds a sparse tensor to a dense one, and not the other way round
            self._sums[i] = share if held is None else held.add_(share)

    @torch.no_grad()
    @runs_as_python
    def _step(self, scale: float) -> None:
        """Hand the sums over as gradients and run the update; once it has run, they are gone from here."""
        parameters = self.weights
        # copies, because the mean may be reduced and clipped in place before the update fails
        means = {i: held * scale for i, held in self._sums.items()}
        try:
            if self._reduce is not None:
                self._reduce(list(means.values()))
            for i, p in enumerate(parameters):
                p.grad = means[i].to(p.dtype) if i in means else None
            with torch.enable_grad():
                self._update()
        finally:
            for p in parameters:
                p.grad = None  # or the next backward would add to the mean just used
        self._sums, self.counter = {}, 0

    def get_extra_state(self) -> dict[str, Any]:
        """Counter and sums, so that a run can stop between two micro-steps."""
        return {"counter": self.counter, "sums": dict(self._sums), "steps": self.max_accumulation_step}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` gave."""
        check_alike("the state of an accumulation", state, {"counter": 0, "sums": {}})
        own, parameters = self.max_accumulation_step, self.weights
        # where an update has raised all of them are there
        steps, whole = state.get("steps", own), "steps" in state
        counter = saved_count("max_accumulation_step", own, state["counter"], steps, whole=whole)
        for i in state["sums"]:
            if check_count("a position", i, low=0) >= len(parameters):
                raise ValueError(f"this state has a sum of parameter {i}, and there are {len(parameters)}")
        self._sums = {i: saved_sum(parameters[i], held) for i, held in state["sums"].items()}
        self.counter = counter
