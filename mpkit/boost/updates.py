"""The updates of the boost algorithms: each stands around another one, in one order for every combination.

Accumulation hands the mean to the update inside it; that one is DimReduce's, else AdaSum around the optimizer, else the
optimizer; freezing stands around each of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpkit.boost.adasum import AdaSum, adasum_enabled
from mpkit.boost.auto import MADE, AutoBoost
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_freeze import FreezeOpt
from mpkit.optimizers.arguments import parameters_of
from mpkit.step import StepContext, distributed
from mpkit.step.update import Update, Wrapped


class AdaSumUpdate(Wrapped):
    """The updates of all nodes are merged, so the gradients are not averaged before."""

    def __init__(self, inner: Update, adasum: AdaSum) -> None:
        super().__init__(inner)
        self.adasum = adasum

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Nothing: AdaSum averages in the node and merges between nodes."""

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """One step of the optimizer, merged. It talks to peers, so the flag is read on the host."""
        if found_inf is None or not found_inf.item():
            self.adasum.update_(self.optimizer.step)


class DimReduceUpdate(Wrapped):
    """The move of `DimReduce`, which drives the optimizer."""

    def __init__(self, inner: Update, dim_reduce: DimReduce) -> None:
        super().__init__(inner)
        self.dim_reduce = dim_reduce

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """One move from the loss and the batch of `ctx`. It measures losses, so the flag is read on the host."""
        if found_inf is not None and found_inf.item():
            return
        if ctx is None or ctx.loss is None:
            raise RuntimeError("DimReduce measures losses on the batch of a step: run it through a train cell")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.dim_reduce.weights]
        self.dim_reduce(ctx.loss, grads, None, None, *ctx.inputs)


class FrozenUpdate(Wrapped):
    """Frozen layers have no gradients to send; a step that is skipped uses up its place in the strategy."""

    def __init__(self, inner: Update, optimizer: FreezeOpt) -> None:
        super().__init__(inner)
        self.freezing = optimizer
        self.hooks = (*inner.hooks, optimizer.hook())

    def attach(self, replica: DistributedDataParallel | None) -> None:
        """Raises ValueError for a DistributedDataParallel that would wait for the gradients of frozen layers."""
        if replica is not None and not replica.find_unused_parameters:
            raise ValueError(
                "on a frozen step DistributedDataParallel would wait for gradients that never come; make it with "
                "find_unused_parameters=True, or leave it out: this cell averages the gradients itself"
            )
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


class AccumulatedUpdate(Wrapped):
    """Adds the gradients of several steps; the update inside gets their mean. A step that overflowed is not counted.

    The gradients of a step are whole here, divided by the scale and checked; their sums are kept apart, in float32.
    (`accumulation_steps` of a train cell sums scaled gradients in `p.grad` before that, and checks the sum: it needs no
    memory and sends nothing before the last, and one micro-batch that overflows costs the whole update.)
    """

    def __init__(self, inner: Update, steps: int) -> None:
        super().__init__(inner)
        self.accumulation = GradientAccumulation(steps, inner.optimizer, update=self._update)
        self._max_norm: float | None = None
        self._ctx: StepContext | None = None

    def reduce(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Nothing: only the mean is sent."""

    def clip(self, max_norm: float) -> Tensor | None:
        """Put off: it is the mean that is clipped, and not each micro-gradient."""
        self._max_norm = max_norm
        return None

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """Add the gradients in `p.grad`; update when enough are there."""
        self.add(ctx, [p.grad for p in parameters_of(self.optimizer)], found_inf)

    def add(self, ctx: StepContext | None, grads: list[Tensor | None], found_inf: Tensor | None) -> None:
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


class BoostedUpdate(Wrapped):
    """The update that an optimizer and an `AutoBoost` ask for, and the algorithms that take part in it, None for off.

    Args:
        network:    returns the loss.
        optimizer:  from `AutoBoost.network_auto_process_train`, or any other.
        boost:      the AutoBoost that made it.
    Raises:  ValueError for an optimizer marked for DimReduce that does not come from an AutoBoost.
    """

    accumulation: GradientAccumulation | None = None
    dim_reduce: DimReduce | None = None
    adasum: AdaSum | None = None

    def __init__(self, network: nn.Module, optimizer: Optimizer, boost: AutoBoost | None) -> None:
        update = Update(optimizer)
        if merges(optimizer, boost):
            self.adasum = _adasum(optimizer, device_number(optimizer, boost))
            update = AdaSumUpdate(update, self.adasum)
        if reduces_dimension(optimizer):
            self.dim_reduce = _dim_reduce(network, optimizer, boost)
            update = DimReduceUpdate(update, self.dim_reduce)
        self.freezing = optimizer if isinstance(optimizer, FreezeOpt) else None
        if self.freezing is not None:
            update = FrozenUpdate(update, self.freezing)
        self.accumulated: AccumulatedUpdate | None = None
        if boost is not None and "grad_accumulation" in boost.active:
            update = self.accumulated = AccumulatedUpdate(update, boost.hyper["grad_accumulation_step"])
            self.accumulation = self.accumulated.accumulation
        super().__init__(update)


def device_number(optimizer: Optimizer, boost: AutoBoost | None) -> int:
    """Processes per node of AdaSum."""
    boost = MADE.get(optimizer) if boost is None else boost
    return 1 if boost is None else boost.hyper["device_number"]


def merges(optimizer: Optimizer, boost: AutoBoost | None) -> bool:
    """Whether AdaSum runs: `boost`, or a mark set by hand, asks for it, and 2, 4, 8, ... groups of processes train.

    None stands for the AutoBoost that returned this very optimizer.
    """
    boost = MADE.get(optimizer) if boost is None else boost
    if boost is not None and boost.flags["adasum"]:
        return "adasum" in boost.active
    marked = getattr(optimizer, "adasum", False)
    return bool(marked) and adasum_enabled(distributed.rank_and_size()[1], device_number(optimizer, boost))


def reduces_dimension(optimizer: Optimizer) -> bool:
    """Whether the update is DimReduce's: the optimizer is marked."""
    return bool(getattr(optimizer, "dim_reduce", False))


def _adasum(optimizer: Optimizer, devices: int) -> AdaSum:
    rank, world = distributed.rank_and_size()
    trained = tuple(p for p in parameters_of(optimizer) if isinstance(p, nn.Parameter))
    return AdaSum(rank, devices, world // devices, trained)


def _dim_reduce(network: nn.Module, optimizer: Any, boost: AutoBoost | None) -> DimReduce:
    """The DimReduce of an optimizer that `AutoBoost` made."""
    if not hasattr(optimizer, "pca_mat_local"):  # marked by hand
        raise ValueError("an optimizer marked for dim_reduce comes from AutoBoost.network_auto_process_train")
    hyper = (boost or AutoBoost()).hyper
    rank, size = distributed.rank_and_size()
    return DimReduce(
        network,
        optimizer,
        parameters_of(optimizer),  # type: ignore[arg-type]
        optimizer.pca_mat_local,
        hyper["n_components"],
        hyper["rho"],
        hyper["gamma"],
        float(optimizer.dim_reduce_alpha),
        hyper["sigma"],
        rank,
        size,
    )
