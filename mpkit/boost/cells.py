"""Train cells that know boost: the engine with the update that an optimizer and an `AutoBoost` ask for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_kind
from mpkit.boost.adasum import AdaSum, AdaSumUpdate, adasum_enabled
from mpkit.boost.auto import MADE, AutoBoost
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.dim_reduce.descent import DimReduceUpdate
from mpkit.boost.grad_accumulation import Accumulate, GradientAccumulation
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.optimizers.arguments import inner, parameters_of
from mpkit.step import StepContext, StepOutcome, TrainOneStepCell, TrainOneStepWithLossScaleCell, distributed
from mpkit.step.update import Update


def boosted(network: nn.Module, optimizer: Optimizer, boost: AutoBoost | None) -> Update:
    """The update that an optimizer and an `AutoBoost` ask for; each algorithm stands around those before it.

    Raises:  ValueError for an optimizer marked for DimReduce that does not come from an AutoBoost, and for algorithms
             that do not go together.
    """
    update = Update(optimizer)
    if merges(optimizer, boost):
        update = AdaSumUpdate(update, device_number(optimizer, boost))
    if reduces_dimension(optimizer):
        update = DimReduceUpdate(update, network, (_maker(optimizer, boost) or AutoBoost()).hyper)
    update = getattr(optimizer, "around", lambda inside: inside)(update)  # an optimizer may freeze
    if boost is not None and "grad_accumulation" in boost.active:
        update = Accumulate(update, boost.hyper["grad_accumulation_step"])
    return update


def merges(optimizer: Optimizer, boost: AutoBoost | None) -> bool:
    """Whether AdaSum runs: `boost`, or a mark set by hand, asks for it, and 2, 4, 8, ... groups of processes train."""
    boost = _maker(optimizer, boost)
    if boost is not None and boost.flags["adasum"]:
        return "adasum" in boost.active
    marked = getattr(optimizer, "adasum", False)
    return bool(marked) and adasum_enabled(distributed.rank_and_size()[1], device_number(optimizer, boost))


def device_number(optimizer: Optimizer, boost: AutoBoost | None) -> int:
    """Processes per node of AdaSum."""
    boost = _maker(optimizer, boost)
    return 1 if boost is None else boost.hyper["device_number"]


def reduces_dimension(optimizer: Optimizer) -> bool:
    """Whether the update is DimReduce's: the optimizer is marked."""
    return bool(getattr(optimizer, "dim_reduce", False))


def _maker(optimizer: Optimizer, boost: AutoBoost | None) -> AutoBoost | None:
    """None stands for the AutoBoost that returned this very optimizer."""
    return MADE.get(optimizer) if boost is None else boost


class _Boosted(TrainOneStepCell):
    """MindSpore's names for what the update of a boosted step does."""

    accumulation: GradientAccumulation | None
    dim_reduce: DimReduce | None
    adasum: AdaSum | None

    def _keep(self, boost: AutoBoost | None) -> None:
        """Have the algorithms as parts of the cell, so that `state_dict()` holds theirs."""
        self.boost = boost
        for name in ("accumulation", "dim_reduce", "adasum"):
            held = (getattr(update, name, None) for update in self.step.updates[0].chain())
            setattr(self, name, next((part for part in held if part is not None), None))

    @property
    def pending(self) -> int:
        """As of any cell, and micro-steps whose mean no update has used."""
        return self.step.pending + (0 if self.accumulation is None else self.accumulation.counter)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        if self.accumulation is not None:
            self.accumulation.drop()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        centralize_where_marked(inner(self.optimizer))

    def check_adasum_enable(self) -> bool:
        """Whether AdaSum runs: `boost`, or a mark on the optimizer, asks for it, and 2, 4, 8, ... groups train."""
        return merges(self.optimizer, self.boost)

    def check_dim_reduce_enable(self) -> bool:
        """Whether the update is DimReduce's: the optimizer is marked."""
        return reduces_dimension(self.optimizer)

    def gradient_freeze_process(self, *inputs: object) -> Tensor:
        """One step with freezing; -> the loss. Raises TypeError unless the optimizer is a FreezeOpt."""
        if not hasattr(self.optimizer, "around"):
            raise TypeError(
                f"gradient_freeze_process needs a FreezeOpt, got {type(self.optimizer).__name__}; "
                "GradientFreeze(...).freeze_generate(network, optimizer) makes one"
            )
        return self(*inputs).loss

    def gradient_accumulation_process(
        self, loss: Tensor, grads: Sequence[Tensor | None], sens: Tensor, *inputs: object
    ) -> Tensor:
        """Add one micro-step's gradients; update when enough are there; -> the loss given.

        Raises:  RuntimeError when the configuration does not accumulate.
        """
        if self.accumulation is None:
            raise RuntimeError("accumulation is off: pass boost=AutoBoost(...) with grad_accumulation_step above 1")
        update: Any = self.step.updates[0]
        if self.step.clip_norm is not None:
            update.clip(self.step.clip_norm)  # put off to the mean, as in a step
        update.add(StepContext(self.network, self.optimizer, inputs, self.index, sens, loss), list(grads), None)
        return loss

    def adasum_process(self, loss: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
        """Run the optimizer on these gradients and merge the updates of all nodes; -> the loss given."""
        if self.adasum is None:
            raise RuntimeError("AdaSum is off: see check_adasum_enable() for what it needs")
        for p, grad in zip(parameters_of(self.optimizer), grads):
            p.grad = grad
        self.adasum.update_(self.optimizer.step)
        return loss


class BoostTrainOneStepCell(_Boosted):
    """One training step with the boost algorithms of an optimizer and an `AutoBoost`.

    Args:
        network:    returns the loss.
        optimizer:  from `AutoBoost.network_auto_process_train` (a `FreezeOpt`, or the one for DimReduce), or any
                    optimizer; one with an attribute `adasum = True` asks for AdaSum, as in MindSpore.
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
        check_kind("boost", boost, AutoBoost, "an AutoBoost", optional=True)
        super().__init__(network, optimizer, sens, update=partial(boosted, boost=boost), **options)
        self._keep(boost)
        if boost is not None and boost.flags["loss_scale_group"]:
            warnings.warn(
                "loss_scale_group is on and does nothing in this cell: BoostTrainOneStepWithLossScaleCell, or "
                "Model(loss_scale_manager=...), with a GroupLossScaleManager scales the groups",
                stacklevel=2,
            )

    def forward(self, *inputs: object) -> StepOutcome:
        return self._run(inputs)


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
        if boost is not None:
            boost.need_groups(scale_sense)
        super().__init__(network, optimizer, scale_sense, update=partial(boosted, boost=boost), **options)
        self.groups = self.step.scaling.groups
        self._keep(boost)

    @property
    def group_overflow(self) -> Tensor | None:
        """(N,) bool: the groups that overflowed in the last step; None before it, and without groups."""
        return self.step.scaling.group_overflow
