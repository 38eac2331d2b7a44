"""Down the gradient itself: smoothed (Momentum, SGD), averaged (ASGD), or only its signs (Rprop)."""

from __future__ import annotations

import torch
from torch import Tensor

from mpkit.arguments import Float, Positive, Real, check_number
from mpkit.optimizers.arguments import Decay, FloatPair, Rate
from mpkit.optimizers.base import Group, Optimizer
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
    refused = {
        "nesterov needs a momentum and dampening 0": lambda g: g["nesterov"] and (not g["momentum"] or g["dampening"])
    }
    decay_of = staticmethod(check_number)
    sliced = False

    learning_rate: Rate = 0.1
    momentum: Real = 0.0
    dampening: Real = 0.0
    weight_decay: Real = 0.0
    nesterov: bool = False
    loss_scale: Positive = 1.0

    def update(self, u: Update) -> None:
        v, momentum, share = u.g, u["momentum"], 1 - u["dampening"]
        if momentum and share != 1 and isinstance(u.t, Tensor):  # only the device knows whether this is the first step
            part = torch.full_like(u.t, share).masked_fill(u.t == 1, 1.0)
            v = u.add("velocity", u.g.times(part), hold=momentum)
        elif momentum:
            v = u.add("velocity", u.g, hold=momentum, share=1.0 if isinstance(u.t, Tensor) or u.t == 1 else share)
        u.descend(u.g.plus(v, momentum) if u["nesterov"] else v, u.lr)


class Rprop(Optimizer):
    """`s = sign(g g_before);  step = clip(step up^(s>0) down^(s<0));  g = 0 where s < 0;  w -= sign(g) step`.

    Args:
        learning_rate:  the first step of every weight; later the signs decide.
        etas:           (down, up), a tuple of floats with 0 < down < 1 < up.
        step_sizes:     (least, most), a tuple of floats with 0 < least < most, in the unit of the weights.
    Against torch:  bit for bit `torch.optim.Rprop`, which decays every parameter.
    Source:  Riedmiller and Braun 1993, ICNN (the variant without weight backtracking); MindSpore 2.7 nn.Rprop.
    """

    slots = {"before": 0.0, "step": 0.0}
    refused = {
        "need 0 < etas[0] < 1 < etas[1], got {etas}": lambda g: not g["etas"][0] < 1 < g["etas"][1],
        "need step_sizes that ascend, got {step_sizes}": lambda g: g["step_sizes"][0] >= g["step_sizes"][1],
    }

    learning_rate: Rate = 0.1
    etas: FloatPair = (0.5, 1.2)
    step_sizes: FloatPair = (1e-6, 50.0)
    weight_decay: Decay = 0.0

    def first(self, slot: str, weight: Tensor, group: Group) -> Tensor:
        if slot == "before":
            return torch.zeros_like(weight)
        rate = torch.as_tensor(self._rate(group), dtype=torch.float64, device=weight.device)
        return torch.zeros_like(weight) + rate.clamp(*group["step_sizes"]).to(weight)

    def update(self, u: Update) -> None:
        (down, up), (least, most), step = u["etas"], u["step_sizes"], u.state["step"]
        s = (u.g * u.state["before"]).sign()
        g = u.put(u.state["before"], s.map(lambda s, g: g.masked_fill(s < 0, 0.0), u.g))
        change = s.map(lambda s: torch.where(s > 0, up, torch.where(s < 0, down, torch.ones_like(s))))
        u.put(step, change.mul_(step).at_least_(least).at_most_(most))
        u.descend(g.sign().mul_(step), 1.0)


class ASGD(Optimizer):
    """`w = w (1 - lambd eta) - eta g;  average += mu (w - average)`, with k = t - 1 updates done before update t:

    `eta = lr / (1 + lambd lr k)^alpha;  mu = 1 / max(1, k - t0)`. The averages are in `state[p]["average"]`.

    Args:
        lambd, alpha, t0:  floats >= 0; `t0` in updates, where averaging starts.
    Against torch:  bit for bit `torch.optim.ASGD` (foreach) at a fixed rate. Under a schedule torch's eta lags one step
                    behind the rate, this does not.
    Source:  Polyak and Juditsky 1992; MindSpore 2.7 nn.ASGD.
    """

    slots = {"average": 0.0}

    learning_rate: Rate = 0.1
    lambd: Float = 1e-4
    alpha: Float = 0.75
    t0: Float = 1e6
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        lambd, average = u["lambd"], u.state["average"]
        t = u.t if isinstance(u.t, Tensor) else torch.full((), u.t, device=u.w.xs[0].device)
        k = t.float() - 1.0  # as torch computes, in float32
        u.descend(u.g.plus(u.w, lambd), u.lr / (1 + lambd * u.lr * k) ** u["alpha"])
        u.descend(average - u.w, 1 / (k - u["t0"]).clamp(min=1.0), average)
