"""Momentum and SGD: the gradient, smoothed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpkit.optimizers.arguments import Decay, Float, Positive, Rate, Real
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Update


class Momentum(Optimizer):
    """`v = u v + g;  w -= lr v`, or with Nesterov `w -= lr (g + u v)`; v starts at 0.

    Args:
        momentum:  u, a float >= 0 (dimensionless); above 1 is not refused.
    Against torch:  bit for bit `torch.optim.SGD(momentum=u, nesterov=use_nesterov)`, which decays every parameter.
    Source:  MindSpore 2.7 nn.Momentum. Its CPU kernel ignores `use_nesterov`; this does not.
    """

    slots = {"velocity": 0.0}
    sliced = False

    learning_rate: Rate
    momentum: Float
    weight_decay: Decay = 0.0
    loss_scale: Positive = 1.0
    use_nesterov: bool = False

    def update(self, u: Update) -> None:
        v = u.add("velocity", u.g, hold=u["momentum"])
        u.descend(u.g.plus(v, u["momentum"]) if u["use_nesterov"] else v, u.lr)


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

    slots = {"velocity": 0.0}
    switched = {"velocity": "momentum"}
    decay_varies = sliced = False

    learning_rate: Rate = 0.1
    momentum: Real = 0.0
    dampening: Real = 0.0
    weight_decay: Real = 0.0
    nesterov: bool = False
    loss_scale: Positive = 1.0

    @staticmethod
    def together(given: Mapping[str, Any]) -> None:
        momentum, dampening = given["momentum"], given["dampening"]
        if given["nesterov"] and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")

    def update(self, u: Update) -> None:
        v, momentum, share = u.g, u["momentum"], 1 - u["dampening"]
        if momentum and share != 1 and isinstance(u.t, Tensor):  # only the device knows whether this is the first step
            part = torch.full_like(u.t, share).masked_fill(u.t == 1, 1.0)
            v = u.add("velocity", u.g.times(part), hold=momentum)
        elif momentum:
            v = u.add("velocity", u.g, hold=momentum, share=1.0 if isinstance(u.t, Tensor) or u.t == 1 else share)
        u.descend(u.g.plus(v, momentum) if u["nesterov"] else v, u.lr)
