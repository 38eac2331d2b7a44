"""Momentum and SGD: the gradient, smoothed."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_float, check_number
from mpkit.optimizers.arguments import Decay, Options, Params, Rate
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Update


class Momentum(Optimizer):
    """`v = u v + g;  w -= lr v`, or with Nesterov `w -= lr (g + u v)`; v starts at 0.

    Args:
        momentum:  u, a float >= 0 (dimensionless); above 1 is not refused.
    Against torch:  bit for bit `torch.optim.SGD(momentum=u, nesterov=use_nesterov)`, which decays every parameter.
    Source:  MindSpore 2.7 nn.Momentum. Its CPU kernel ignores `use_nesterov`; this does not.
    """

    elementwise = True
    intermediates = False

    def __init__(
        self,
        params: Params,
        learning_rate: Rate,
        momentum: float,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        check_float("momentum", momentum)
        check_flags(use_nesterov=use_nesterov)
        hyper = {"momentum": momentum, "use_nesterov": use_nesterov}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(weight)}

    def update(self, u: Update) -> None:
        velocity, momentum = u.state["velocity"], u.group["momentum"]
        u.decay_average_(velocity, momentum)
        torch._foreach_add_(velocity, u.grads)
        steps = torch._foreach_add(u.grads, velocity, alpha=momentum) if u.group["use_nesterov"] else velocity
        u.move_(u.weights, steps, u.lr)


class SGD(Optimizer):
    """`v = g` at first, `v = u v + (1 - dampening) g` later;  `w -= lr v`, or with Nesterov `w -= lr (g + u v)`.

    Args:
        momentum:   u, a number >= 0; 0 keeps no state, and `dampening` is then without effect.
        dampening:  number >= 0. It is the fourth positional argument, where other libraries have the weight decay.
        nesterov:   needs momentum > 0 and dampening = 0.
    Against torch:  bit for bit `torch.optim.SGD`, which decays every parameter. The first step is that of the group,
                    not of the single parameter.
    Raises:  TypeError for a weight decay that is a function, as MindSpore.
    Source:  MindSpore 2.7 nn.SGD.
    """

    elementwise = True
    intermediates = False
    switched = (("momentum", "velocity"),)

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        check_number("momentum", momentum)
        check_number("dampening", dampening)
        check_flags(nesterov=nesterov)
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
        hyper = {"momentum": float(momentum), "dampening": float(dampening), "nesterov": nesterov}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)
        if any(callable(group["weight_decay"]) for group in [self.defaults, *self.param_groups]):
            raise TypeError("SGD takes a fixed weight decay; use Momentum for one that changes")

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(weight)} if group["momentum"] else {}

    def _states(self, params: list[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        stateless = not group["momentum"] and params[0].dtype.itemsize >= 4
        return [{}] * len(params) if stateless else super()._states(params, group)

    def update(self, u: Update) -> None:
        momentum, steps = u.group["momentum"], u.grads
        if momentum:
            steps = u.state["velocity"]
            u.decay_average_(steps, momentum)
            self._collect_(steps, u)
        if u.group["nesterov"]:
            steps = list(torch._foreach_add(u.grads, steps, alpha=momentum))
        u.move_(u.weights, steps, u.lr)

    @staticmethod
    def _collect_(velocity: list[Tensor], u: Update) -> None:
        """velocity += g at the first step and (1 - dampening) g later; adds -0.0 when the step is skipped."""
        dampening = u.group["dampening"]
        if dampening and isinstance(u.count, Tensor):
            part = velocity[0].new_full((), 1.0 - dampening).masked_fill(u.count == 1, 1.0)
            torch._foreach_add_(velocity, torch._foreach_mul(u.grads, part))
        else:
            torch._foreach_add_(velocity, u.grads, alpha=1.0 if u.count == 1 else 1.0 - dampening)
