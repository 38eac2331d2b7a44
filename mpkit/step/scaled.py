"""A scaled step taken apart, for training loops written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_number, checked
from mpkit.optimizers.arguments import parameters_of, trainer
from mpkit.step.engine import Step
from mpkit.step.phases import checked_loss, clip_, device_of
from mpkit.step.scaling import scaling_of
from mpkit.step.update import Update


def _listed(value: Any) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    listed = [value] if isinstance(value, Optimizer) else list(value) if isinstance(value, Iterable) else []
    if not listed:
        raise TypeError(f"optimizers must be torch.optim.Optimizers, one or a non-empty list, got {value!r:.80}")
    for each in listed:
        trainer("each of optimizers", each)
    identities = [id(p) for optimizer in listed for p in parameters_of(optimizer)]
    if len(identities) != len(set(identities)):
        raise ValueError("two optimizers share a parameter, whose gradient would be unscaled twice; give it to one")
    return listed


class ScaledStep(Step):
    """Several losses and several optimizers behind one loss scale, one phase per call.

    The order is backward (once per loss or micro-batch), unscale_, clip_ if wanted, update; a call out of order says
    what it would have broken. Nothing is read on the host when the optimizers can skip on the device. Micro-batches are
    summed in float32, unless DistributedDataParallel averages them in the dtype of the parameters (`average=False`).

    Args:
        optimizers:   one optimizer or several, without a parameter in common.
        scale_sense:  an update cell, a `LossScaler`, or the scale as a tensor of shape () or (1,).
        skip:         "all": an overflow anywhere skips every optimizer, so the step is applied as a whole or not at
                      all; "each": it skips only the optimizer whose gradients overflowed, as torch.amp.GradScaler
                      does, and one that this step has no gradients for rests, its state unmoved. The scale backs off
                      in both.
        average:      average the gradients over the processes of a distributed run; False when
                      DistributedDataParallel has done so in the backward pass.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> step = ScaledStep(torch.optim.SGD(net.parameters(), 0.1, fused=True), torch.tensor(1024.0))
    >>> for micro_batch in torch.ones(2, 4, 2):
    ...     step.backward(net(micro_batch).mean() / 2)
    >>> norm = step.clip_(max_norm=1.0)
    Traceback (most recent call last):
    RuntimeError: clip_ before unscale_ would clip to max_norm / scale, because the gradients are still multiplied ...
    >>> _ = step.unscale_()
    >>> norm = step.clip_(max_norm=1.0)
    >>> bool(step.update())
    False
    """

    @checked
    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        scale_sense: object,
        *,
        skip: Literal["all", "each"] = "all",
        average: bool = True,
    ) -> None:
        self.optimizers = own = _listed(optimizers)
        scaling = scaling_of(scale_sense, device_of(parameters_of(own[0])))
        rule = scale_sense if hasattr(scale_sense, "load_state_dict") else None
        updates = [Update(optimizer) for optimizer in own]
        super().__init__(updates, scaling, parts=0 if average else 1, skip=skip, average=average, rule=rule)

    @property
    def scale(self) -> Tensor:
        """What the next loss is multiplied by, () or (1,) float32."""
        return self.scaling.seed

    def backward(self, loss: Tensor, **options: object) -> None:
        """Add the gradients of `loss * scale`; the first call of a step clears the old ones.

        An error in the backward pass gives the step up, as `drop` does: a part of the gradients is in the sums already.

        Args:    loss: scalar; `options` go to `Tensor.backward` (`retain_graph`, `inputs`).
        Raises:  RuntimeError between `unscale_` and `update`; ValueError for a loss that cannot be differentiated.
        """
        if self.found:
            raise RuntimeError(
                "backward after unscale_ would add gradients times the scale to gradients that are not; run every "
                "backward pass of the step before unscale_(), or call update() first, or drop() to give the step up"
            )
        checked_loss(loss)
        self.begin()
        try:
            super().backward(loss, **options)
        except BaseException:
            self.drop()
            raise

    def unscale_(self) -> Tensor:
        """Average over processes, divide by the scale, check everywhere. Returns the overflow flag, () bool.

        Raises:  RuntimeError when it would divide twice, when there are no gradients, and when those that there are do
                 not come from `backward`.
        """
        if self.found:
            raise RuntimeError("the gradients are unscaled already, and it would divide twice; go on to update()")
        if not self.pending:
            there = any(p.grad is not None for p in self.parameters())
            told = "the gradients come from no backward of this step: they are unscaled" if there else "no gradients"
            raise RuntimeError(f"{told}; write step.backward(loss), which multiplies by the scale, not loss.backward()")
        found: Any = self.unscale()
        return found.bool()

    def clip_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clip the joint L2 norm of the true gradients (of one optimizer, if named); returns the norm before."""
        if not self.found:
            would = "clip_ before unscale_ would clip to max_norm / scale, because the gradients are still multiplied"
            raise RuntimeError(f"{would} by the scale; call unscale_() first")
        check_number("max_norm", max_norm, open_low=True, closed_high=True)
        return clip_(self.parameters() if optimizer is None else parameters_of(optimizer), max_norm)

    def update(self) -> Tensor:
        """Update or skip, then adjust the scale; unscales first if that was not done. Returns the overflow flag.

        Where an optimizer raises, the step is given up; those before it have moved.
        """
        if not self.found:
            self.unscale_()
        overflow = self.anywhere().bool()
        try:
            self.apply()
        finally:
            self.drop()
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """Scale, rule and optimizers. Raises RuntimeError between `backward` and `update`."""
        if self.pending:
            raise RuntimeError("the step has gradients that no update has used; save after update()")
        return super().state_dict()
