"""Train cells that know boost: the engine with the update that an optimizer and an `AutoBoost` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import checked
from mpkit.boost.adasum import AdaSum
from mpkit.boost.auto import AutoBoost, made_by
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.optimizers.arguments import inner, parameters_of
from mpkit.step import StepContext, StepOutcome, TrainOneStepCell, TrainOneStepWithLossScaleCell


class _Boosted(TrainOneStepCell):
    """MindSpore's names for what the update of a boosted step does."""

    def _keep(self, boost: AutoBoost) -> None:
        """Have the algorithms as parts of the cell, so that `state_dict()` holds theirs."""
        self.boost, inside = boost, {update.what: update for update in self.step.updates[0].chain()}
        self.dim_reduce: DimReduce | None = getattr(inside.get("dimension reduction"), "dim_reduce", None)
        self.adasum: AdaSum | None = getattr(inside.get("AdaSum"), "adasum", None)
        self.accumulation: Any = inside.get("accumulation")  # adds micro-gradients, each checked by itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        centralize_where_marked(inner(self.optimizer))

    def check_adasum_enable(self) -> bool:
        """Whether AdaSum runs: `boost`, or a mark on the optimizer, asks for it, and 2, 4, 8, ... groups train."""
        return self.boost.merges(self.optimizer)

    def check_dim_reduce_enable(self) -> bool:
        """Whether the update is DimReduce's."""
        return self.dim_reduce is not None

    def gradient_freeze_process(self, *inputs: object) -> Tensor:
        """One step, with freezing where the optimizer is a `FreezeOpt`; -> the loss."""
        return self(*inputs).loss

    def gradient_accumulation_process(
        self, loss: Tensor, grads: Sequence[Tensor | None], sens: Tensor, *inputs: object
    ) -> Tensor:
        """Add one micro-step's gradients; update when enough are there; -> the loss given.

        Raises:  RuntimeError when the configuration does not accumulate.
        """
        if self.accumulation is None:
            raise RuntimeError("accumulation is off: pass boost=AutoBoost(...) with grad_accumulation_step above 1")
        self.accumulation.add(grads, StepContext(self.network, self.optimizer, inputs, self.index, sens, loss))
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

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        sens: float | None = 1.0,
        *,
        boost: AutoBoost | None = None,
        **options: Any,
    ) -> None:
        maker = made_by(optimizer, boost)
        super().__init__(network, optimizer, sens, update=maker.update_of, **options)
        self._keep(maker)

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

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        scale_sense: Any,
        *,
        boost: AutoBoost | None = None,
        **options: Any,
    ) -> None:
        maker = made_by(optimizer, boost)
        if maker.flags["loss_scale_group"] and not getattr(scale_sense, "for_boost", False):
            came = type(scale_sense).__name__
            raise TypeError(f"loss_scale_group is on, so scale_sense must be a GroupLossScaleManager, got {came}")
        super().__init__(network, optimizer, scale_sense, update=maker.update_of, **options)
        self.groups = self.step.scaling.groups
        self._keep(maker)

    @property
    def group_overflow(self) -> Tensor | None:
        """(N,) bool: the groups that overflowed in the last step; None before it, and without groups."""
        return self.step.scaling.group_overflow
