"""Train cells that know boost: freezing, accumulation, AdaSum, DimReduce and loss scales per group."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_kind
from mpkit.boost.adasum import AdaSum, adasum_enabled
from mpkit.boost.auto import AutoBoost
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.boost.grad_freeze import FreezeOpt
from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.boost.process import inner
from mpkit.step import Hook, StepContext, StepOutcome, TrainOneStepCell, TrainOneStepWithLossScaleCell, distributed
from mpkit.step.phases import apply_, gradients_of, parameters_of


class _Boosted(TrainOneStepCell):
    """What both boost cells do between the gradients and the weights: one order for every combination.

    accumulation (when its step count is above 1) hands the mean to the update; the update is DimReduce, else AdaSum
    around the optimizer, else the optimizer; a `FreezeOpt` freezes during the forward and backward pass.
    """

    accumulation: GradientAccumulation | None
    dim_reduce: DimReduce | None
    adasum: AdaSum | None

    def _set_up(self, boost: AutoBoost | None) -> None:
        optimizer = self.optimizer
        check_kind("boost", boost, AutoBoost, "an AutoBoost", optional=True)
        self.boost = boost
        self._running: StepContext | None = None
        self._freezing: Hook | None = None
        self.accumulation = self.dim_reduce = self.adasum = None
        self._device_number = 1 if boost is None else boost.hyper["device_number"]
        if isinstance(optimizer, FreezeOpt):
            if self._replica is not None and not self._replica.find_unused_parameters:
                raise ValueError(
                    "on a frozen step DistributedDataParallel would wait for gradients that never come; make it with "
                    "find_unused_parameters=True, or leave it out: this cell averages the gradients itself"
                )
            self._freezing = optimizer.hook()
            self.hooks.append(self._freezing)
        if (
            boost is not None
            and boost.flags["loss_scale_group"]
            and not isinstance(self, TrainOneStepWithLossScaleCell)
        ):
            warnings.warn(
                "loss_scale_group is on and does nothing in this cell: BoostTrainOneStepWithLossScaleCell, or "
                "Model(loss_scale_manager=...), with a GroupLossScaleManager scales the groups",
                stacklevel=3,
            )
        if boost is not None and "grad_accumulation" in boost.active:
            steps = boost.hyper["grad_accumulation_step"]
            self.accumulation = GradientAccumulation(steps, optimizer, update=self._update_now)
        if self.check_dim_reduce_enable():
            self.dim_reduce = _dim_reduce(self.network, optimizer, boost)
        if self.check_adasum_enable():
            world = torch.distributed.get_world_size()
            trained = tuple(p for p in parameters_of(optimizer) if isinstance(p, nn.Parameter))
            rank, groups = torch.distributed.get_rank(), world // self._device_number
            self.adasum = AdaSum(rank, self._device_number, groups, trained)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        centralize_where_marked(inner(self.optimizer))

    def check_adasum_enable(self) -> bool:
        """Whether AdaSum runs: the optimizer is marked and 2, 4, 8, ... groups of `device_number` processes train."""
        if not getattr(self.optimizer, "adasum", False) or not distributed.several_processes():
            return False
        return adasum_enabled(torch.distributed.get_world_size(), self._device_number)

    def check_dim_reduce_enable(self) -> bool:
        """Whether the update is DimReduce's: the optimizer is marked."""
        return bool(getattr(self.optimizer, "dim_reduce", False))

    def gradient_freeze_process(self, *inputs: Any) -> Tensor:
        """One step with freezing; -> the loss. Raises TypeError unless the optimizer is a FreezeOpt."""
        if not isinstance(self.optimizer, FreezeOpt):
            raise TypeError(
                f"gradient_freeze_process needs a FreezeOpt, got {type(self.optimizer).__name__}; "
                "GradientFreeze(...).freeze_generate(network, optimizer) makes one"
            )
        return self(*inputs).loss

    def gradient_accumulation_process(
        self, loss: Tensor, grads: Sequence[Tensor | None], sens: Tensor, *inputs: Any
    ) -> Tensor:
        """Add one micro-step's gradients; update when enough are there; -> the loss given.

        Raises:  RuntimeError when the configuration does not accumulate.
        """
        if self.accumulation is None:
            raise RuntimeError("accumulation is off: pass boost=AutoBoost(...) with grad_accumulation_step above 1")
        self._running = self._running or StepContext(self.network, self.optimizer, inputs, self.index, sens, loss)
        overflow = self._running.overflow
        return self.accumulation(loss, grads, False if overflow is None else overflow)

    def adasum_process(self, loss: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
        """Run the optimizer on these gradients and merge the updates of all nodes; -> the loss given."""
        if self.adasum is None:
            raise RuntimeError("AdaSum is off: see check_adasum_enable() for what it needs")
        for p, grad in zip(parameters_of(self.optimizer), grads):
            p.grad = grad
        self.adasum.update_(self.optimizer.step)
        return loss

    def compute_gradients(self, ctx: StepContext) -> Tensor:
        """As of `TrainOneStepCell`; when the pass ends in an exception nothing stays frozen."""
        try:
            return super().compute_gradients(ctx)
        except BaseException:
            if self._freezing is not None:
                self._freezing.after_backward(ctx)
            raise

    def _clip(self) -> None:
        """During an accumulation it is the mean that is clipped, in `_update_now`, and not each micro-gradient."""
        if self.accumulation is None:
            super()._clip()

    def reduce(self) -> None:
        """Average the gradients over the processes; AdaSum merges updates instead, frozen layers have nothing to send.

        During an accumulation nothing is sent before the update.
        """
        if self.adasum is None and self.accumulation is None and distributed.several_processes():
            self._average()

    def update(self, ctx: StepContext) -> None:
        """Accumulate or update from the gradients in `p.grad`."""
        self._running = ctx
        try:
            if self.accumulation is None:
                self._update_now()
            else:
                assert ctx.loss is not None
                grads = [p.grad for p in parameters_of(self.optimizer)]
                self.gradient_accumulation_process(ctx.loss, grads, ctx.scale, *ctx.inputs)
        finally:
            self._running = None

    def _update_now(self) -> None:
        ctx = self._running
        found_inf = None if ctx is None or self.accumulation is not None else ctx.found_inf
        if self.accumulation is not None and self.adasum is None and distributed.several_processes():
            self._average()
        if self.accumulation is not None:
            super()._clip()
        before = self.optimizer.steps if isinstance(self.optimizer, FreezeOpt) else 0
        if self.dim_reduce is not None or self.adasum is not None:
            if found_inf is None or not found_inf.item():  # both measure losses or talk to peers: no skip on a device
                self._second_order(ctx) if self.dim_reduce is not None else self._merged()
        elif found_inf is None:
            gradients_of(parameters_of(self.optimizer))  # raises when there are none
            self.optimizer.step()
        else:
            apply_(self.optimizer, found_inf)
        if isinstance(self.optimizer, FreezeOpt) and self.optimizer.steps == before:
            self.optimizer.advance()

    def _second_order(self, ctx: StepContext | None) -> None:
        assert ctx is not None and ctx.loss is not None and self.dim_reduce is not None  # noqa: PT018
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.dim_reduce.weights]
        self.dim_reduce(ctx.loss, grads, None, None, *ctx.inputs)

    def _merged(self) -> None:
        assert self.adasum is not None
        self.adasum.update_(self.optimizer.step)

    def _average(self) -> None:
        optimizer = self.optimizer
        trained = optimizer.groups[optimizer.index] if isinstance(optimizer, FreezeOpt) else parameters_of(optimizer)
        if self._replica is None:
            distributed.average_(trained)


class BoostTrainOneStepCell(_Boosted):
    """One training step with the boost algorithms of an optimizer and an `AutoBoost`.

    Args:
        network:    returns the loss.
        optimizer:  from `AutoBoost.network_auto_process_train` (a `FreezeOpt`, or marked for AdaSum or DimReduce), or
                    any optimizer.
        sens:       the backward pass starts from it, and it is not divided out; None means 1.
        boost:      the AutoBoost that made the optimizer: its accumulation, AdaSum and DimReduce settings.
        options:    `hooks`, `clip_norm` and `accumulation_steps` of `TrainOneStepCell`.
    Returns:  `StepOutcome(loss, overflow, scale)`; overflow is False, nothing is checked without a loss scale.
    Raises:   TypeError if `sens` is no number or `boost` no AutoBoost.
    Source:   MindSpore boost.BoostTrainOneStepCell, which promises the three values and returns the loss, or nothing
              with sens=None.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        sens: float | None = 1.0,
        *,
        boost: AutoBoost | None = None,
        **options: Any,
    ) -> None:
        super().__init__(network, optimizer, sens, **options)
        self._set_up(boost)

    def forward(self, *inputs: Any) -> StepOutcome:
        loss = super().forward(*inputs)
        return StepOutcome(loss, torch.zeros_like(loss, dtype=torch.bool), self.sens)


class BoostTrainOneStepWithLossScaleCell(TrainOneStepWithLossScaleCell, _Boosted):
    """One training step with a scaled loss and the boost algorithms; an overflow skips the update.

    Args:
        network, optimizer, boost, options:  as in `BoostTrainOneStepCell`.
        scale_sense:  an update cell, a tensor of shape () or (1,), or a `GroupLossScaleManager`, whose markers in the
                      network scale each group; the loss itself then stays unscaled.
    Returns:  `StepOutcome(loss, overflow, scale)`; with a GroupLossScaleManager overflow says whether any group did
              (`group_overflow` has all of them) and scale is that of the first group.
    Raises:   TypeError for another kind of scale_sense, and when the configuration asks for loss_scale_group without
              a GroupLossScaleManager; ValueError for another shape.
    Source:   MindSpore boost.BoostTrainOneStepWithLossScaleCell.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        scale_sense: Any,
        *,
        boost: AutoBoost | None = None,
        **options: Any,
    ) -> None:
        check_kind("boost", boost, AutoBoost, "an AutoBoost", optional=True)
        groups = scale_sense if isinstance(scale_sense, GroupLossScaleManager) else None
        if groups is None and boost is not None and boost.flags["loss_scale_group"]:
            raise TypeError(
                "loss_scale_group is on, so scale_sense must be a GroupLossScaleManager, got "
                f"{type(scale_sense).__name__}"
            )
        # a group loss is seeded with 1: the markers in the network apply the scales
        super().__init__(
            network, optimizer, torch.tensor(1.0, dtype=torch.float32) if groups is not None else scale_sense, **options
        )
        self.groups = groups
        self.group_overflow: Tensor | None = None
        if groups is not None:
            groups.covers(p for p in parameters_of(optimizer) if isinstance(p, nn.Parameter))
        self._set_up(boost)

    def unscale(self, ctx: StepContext) -> Tensor:
        """Divide the gradients by the scale, or by that of their group; returns the overflow flag."""
        if self.groups is None:
            return super().unscale(ctx)
        for hook in self.hooks:
            hook.before_unscale(ctx)
        self.reduce()
        together = distributed.several_processes()
        if together:  # an overflow seen by one process moves the scales of all: they must stay the same
            self.groups.passed.copy_(distributed.agree_((~self.groups.passed).float()) == 0)
        self.group_overflow = self.groups.unscale_and_update_()
        ctx.overflow = overflow = self.group_overflow.any()
        ctx.found_inf = overflow.float()
        if together:
            ctx.overflow = overflow = distributed.agree_(ctx.found_inf) != 0
        for hook in self.hooks:
            hook.after_unscale(ctx)
        self._clip()
        return overflow

    def update(self, ctx: StepContext) -> None:
        """Accumulate, update or skip."""
        _Boosted.update(self, ctx)

    def forward(self, *inputs: Any) -> StepOutcome:
        outcome = super().forward(*inputs)
        return outcome if self.groups is None else outcome._replace(scale=self.groups.scales[0].clone())


def _dim_reduce(network: nn.Module, optimizer: Any, boost: AutoBoost | None) -> DimReduce:
    """The DimReduce of an optimizer that `AutoBoost` made."""
    if not hasattr(optimizer, "pca_mat_local"):
        raise ValueError("an optimizer marked for dim_reduce comes from AutoBoost.network_auto_process_train")
    hyper = (boost or AutoBoost()).hyper
    several = distributed.several_processes()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
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
