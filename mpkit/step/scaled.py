"""A scaled step taken apart, for training loops written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_choice, check_flags, check_kind
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.optimizers.saved import check_kinds, kinds_of
from mpkit.step.engine import Step
from mpkit.step.phases import check_norm, clip_, device_of
from mpkit.step.restore import load_all
from mpkit.step.scaling import scaling_of
from mpkit.step.update import Update


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

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        scale_sense: object,
        *,
        skip: Literal["all", "each"] = "all",
        average: bool = True,
    ) -> None:
        listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        own = list(listed) if isinstance(listed, Iterable) else []
        if not own or not all(isinstance(o, Optimizer) for o in own):
            raise TypeError(
                f"optimizers must be torch.optim.Optimizers, one or a non-empty list, got {optimizers!r:.80}"
            )
        for optimizer in own:
            need_plain_step(optimizer)
        check_choice("skip", skip, ("all", "each"))
        check_flags(average=average)
        identities = [id(p) for o in own for p in parameters_of(o)]
        if len(identities) != len(set(identities)):
            raise ValueError("two optimizers share a parameter, whose gradient would be unscaled twice; give it to one")
        self.optimizers = own
        scaling = scaling_of(scale_sense, device_of(parameters_of(own[0])))
        super().__init__([Update(o) for o in own], scaling, parts=0 if average else 1, skip=skip, average=average)
        self.adjust = None if isinstance(scale_sense, Tensor) or scaling.groups else scale_sense

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
        super().backward(loss, **options)

    def unscale_(self) -> Tensor:
        """Average over processes, divide by the scale, check everywhere. Returns the overflow flag, () bool.

        Raises:  RuntimeError when it would divide twice, when there are no gradients, and when those that there are do
                 not come from `backward`.
        """
        if self.found:
            raise RuntimeError("the gradients are unscaled already, and it would divide twice; go on to update()")
        if not self.pending:
            foreign = any(p.grad is not None for p in self.parameters())
            raise RuntimeError(
                "the gradients come from no backward of this step, so nobody has multiplied them by the scale: they "
                "are unscaled; write step.backward(loss) in place of loss.backward()"
                if foreign
                else "there are no gradients to unscale: call backward(loss) first"
            )
        found = self.unscale()
        assert found is not None
        return found.bool()

    def clip_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clip the joint L2 norm of the true gradients (of one optimizer, if named); returns the norm before."""
        if not self.found:
            raise RuntimeError(
                "clip_ before unscale_ would clip to max_norm / scale, because the gradients are still multiplied by "
                "the scale; call unscale_() first"
            )
        check_norm("max_norm", max_norm)
        return clip_(self.parameters() if optimizer is None else parameters_of(optimizer), max_norm)

    def update(self) -> Tensor:
        """Update or skip, then adjust the scale; unscales first if that was not done. Returns the overflow flag.

        When an optimizer raises, the step stays open: `update()` again goes on with that optimizer, those before it are
        not run twice, and `drop()` gives the step up.
        """
        if not self.found:
            self.unscale_()
        anywhere = self.anywhere()
        overflow = anywhere.bool()
        self.apply()
        self.scaling.advance_(anywhere)
        self.drop()
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """Scale, rule and optimizers. Raises RuntimeError between `backward` and `update`."""
        if self.pending:
            raise RuntimeError("the step has gradients that no update has used; save after update()")
        rule: Any = self.adjust
        return {
            "scale": self.scale.clone(),
            "rule": rule.state_dict() if hasattr(rule, "state_dict") else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "kinds": [kinds_of(optimizer) for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError, and changes nothing, if the parts are others."""
        rule: Any = self.adjust if hasattr(self.adjust, "load_state_dict") else None
        if not isinstance(state, dict) or not {"scale", "rule", "optimizers", "kinds"} <= state.keys():
            raise ValueError(f"this is not what a ScaledStep saved: {state!r:.60}")
        check_kind("optimizers", state["optimizers"], (list, tuple), "the list of states that was saved")
        theirs, ours = (len(state["optimizers"]), state["rule"] is None), (len(self.optimizers), rule is None)
        if theirs != ours:
            saved, own = (f"{count} optimizers and {'no' if bare else 'a'} rule" for count, bare in (theirs, ours))
            raise ValueError(f"the saved step had {saved} for its scale, this one has {own}; build it as it was saved")
        kinds = state["kinds"]
        check_alike("kinds", kinds, [None] * len(self.optimizers))
        check_kind("scale", state["scale"], Tensor, "a tensor, as it was saved")
        if state["scale"].numel() != 1:
            raise ValueError(f"scale must be one number, got shape {tuple(state['scale'].shape)}")
        for optimizer, kind in zip(self.optimizers, kinds):
            check_kinds(optimizer, kind)
        load_all([*([] if rule is None else [(rule, state["rule"])]), *zip(self.optimizers, state["optimizers"])])
        self.scale.copy_(state["scale"].reshape(self.scale.shape))
        self.drop()
