"""A scaled step taken apart, for training loops written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_choice, check_kind, is_number
from mpkit.optimizers.arguments import need_plain_step, parameters_of
from mpkit.optimizers.saved import check_kinds, kinds_of
from mpkit.step import distributed
from mpkit.step.phases import backward, checked_loss, clip_, device_of, gradients_of
from mpkit.step.restore import carried, carrying, load_all
from mpkit.step.scaling import scaling_of
from mpkit.step.update import Update


class ScaledStep:
    """Several losses and several optimizers behind one loss scale, one phase per call.

    The order is backward (once per loss or micro-batch), unscale_, clip_ if wanted, update; a call out of order says
    what it would have broken. Nothing is read on the host when the optimizers can skip on the device.

    Args:
        optimizers:   one optimizer or several, without a parameter in common.
        scale_sense:  an update cell, a `LossScaler`, or the scale as a tensor of shape () or (1,).
        skip:         "all": an overflow anywhere skips every optimizer, so the step is applied as a whole or not at
                      all; "each": it skips only the optimizer whose gradients overflowed, as torch.amp.GradScaler
                      does. The scale backs off in both.
        average:      average the gradients over the processes of a distributed run; False when
                      DistributedDataParallel has done so in the backward pass.

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
        if (
            not isinstance(listed, Iterable)
            or not (own := list(listed))
            or not all(isinstance(o, Optimizer) for o in own)
        ):
            raise TypeError(
                f"optimizers must be one torch.optim.Optimizer or a non-empty sequence of them, got {optimizers!r:.80}"
            )
        self.optimizers = own
        for optimizer in own:
            need_plain_step(optimizer)
        check_choice("skip", skip, ("all", "each"))
        identities = [id(p) for o in self.optimizers for p in parameters_of(o)]
        if len(identities) != len(set(identities)):
            raise ValueError("two optimizers share a parameter, whose gradient would be unscaled twice; give it to one")
        self.skip = skip
        self.average = average
        self.updates = [Update(optimizer) for optimizer in self.optimizers]
        self.scaling = scaling_of(scale_sense, device_of(parameters_of(self.optimizers[0])))
        self.adjust = None if isinstance(scale_sense, Tensor) or self.scaling.groups else scale_sense
        self.drop()

    @property
    def scale(self) -> Tensor:
        """What the next loss is multiplied by, () or (1,) float32."""
        return self.scaling.scale.seed

    def drop(self) -> None:
        """Give the running step up, gradients and all; the next `backward` begins a new one. The scale stays."""
        self._begun = False
        self._found: list[Tensor] = []
        self._updated = 0  # optimizers that this step has run

    def backward(self, loss: Tensor, **options: object) -> None:
        """Add the gradients of `loss * scale`; the first call of a step clears the old ones.

        An error in the backward pass gives the step up, as `drop` does: a part of the gradients is in the sums already.

        Args:    loss: scalar; `options` go to `Tensor.backward` (`retain_graph`, `inputs`).
        Raises:  RuntimeError between `unscale_` and `update`; ValueError for a loss that cannot be differentiated.
        """
        if self._found:
            raise RuntimeError(
                "backward after unscale_ would add gradients times the scale to gradients that are not; "
                "run every backward pass of the step before unscale_(), or call update() first, or drop() to give the "
                "step up"
            )
        if not self._begun:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        self._begun = True
        try:
            backward(checked_loss(loss), self.scale, **options)
        except BaseException:
            self.drop()
            raise

    def unscale_(self) -> Tensor:
        """Divide the gradients of all optimizers by the scale, once; returns the 0-d bool "some were not finite"."""
        if self._found:
            raise RuntimeError("the gradients of this step are unscaled already; unscale_() again would divide twice")
        if not self._begun:
            raise RuntimeError("there are no gradients to unscale: call backward(loss) first")
        several = distributed.several_processes()
        for update in self.updates if self.average else ():
            update.reduce()
        for grads in [gradients_of(parameters_of(optimizer)) for optimizer in self.optimizers]:  # all, or an error
            found = self.scaling.unscale_(grads, self.scale)
            self._found.append(distributed.agree_(found) if several else found)
        return self._any().to(torch.bool)

    def clip_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clip the joint L2 norm of the true gradients (of one optimizer, if named); returns the norm before."""
        if not self._found:
            raise RuntimeError(
                "clip_ before unscale_ would clip to max_norm / scale, because the gradients are still multiplied by "
                "the scale; call unscale_() first"
            )
        if not is_number(max_norm):
            raise TypeError(f"max_norm must be a number, got {type(max_norm).__name__}")
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm}; leave clip_ out for no clipping")
        chosen = self.optimizers if optimizer is None else [optimizer]
        return clip_([p for o in chosen for p in parameters_of(o)], max_norm)

    def update(self) -> Tensor:
        """Update or skip, then adjust the scale; unscales first if that was not done. Returns the overflow flag.

        When an optimizer raises, the step stays open: `update()` again goes on with that optimizer, those before it are
        not run twice, and `drop()` gives the step up.
        """
        if not self._found:
            self.unscale_()
        anywhere = self._any()
        overflow = anywhere.to(torch.bool)
        for update, found in list(zip(self.updates, self._found))[self._updated :]:
            update.apply(None, anywhere if self.skip == "all" else found)
            self._updated += 1
        self.scaling.scale.advance_(anywhere)
        self.drop()
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """Scale, rule and optimizers. Raises RuntimeError between `backward` and `update`."""
        if self._begun:
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
        if not isinstance(state, dict) or not {"scale", "rule", "optimizers"} <= state.keys():
            raise ValueError(f"this is not what a ScaledStep saved: {state!r:.60}")
        check_kind("optimizers", state["optimizers"], (list, tuple), "the list of states that was saved")
        theirs, ours = (len(state["optimizers"]), state["rule"] is None), (len(self.optimizers), rule is None)
        if theirs != ours:
            saved, own = (f"{count} optimizers and {'no' if bare else 'a'} rule" for count, bare in (theirs, ours))
            raise ValueError(f"the saved step had {saved} for its scale, this one has {own}; build it as it was saved")
        kinds = state.get("kinds", [None] * len(self.optimizers))
        check_alike("kinds", kinds, [None] * len(self.optimizers))
        for optimizer, saved in zip(self.optimizers, kinds):
            check_kinds(optimizer, saved)
        check_kind("scale", state["scale"], Tensor, "a tensor, as it was saved")
        if state["scale"].numel() != 1:
            raise ValueError(f"scale must be one number, got shape {tuple(state['scale'].shape)}")
        scale = state["scale"].to(self.scale.dtype).reshape(self.scale.shape)
        parts = [*self.optimizers, *([] if rule is None else [rule])]
        load_all([(part, saved) for part, saved in zip(parts, [*state["optimizers"], state["rule"]])])
        self.scale.copy_(scale)
        self.drop()

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    def __getstate__(self) -> dict[str, Any]:
        return carrying(self.__dict__, self._parameters() if self._begun else ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__ = carried(self.__dict__, self._parameters)

    def _any(self) -> Tensor:
        first, *rest = self._found
        for found in rest:
            first = torch.maximum(first, found.to(first.device))
        return first
