"""Rprop, which looks only at signs, and ASGD, which averages the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpkit.optimizers.arguments import Decay, Float, Pair, Rate
from mpkit.optimizers.base import Group, Optimizer
from mpkit.optimizers.update import Update


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

    learning_rate: Rate = 0.1
    etas: Pair = (0.5, 1.2)
    step_sizes: Pair = (1e-6, 50.0)
    weight_decay: Decay = 0.0

    @staticmethod
    def together(given: Mapping[str, Any]) -> None:
        if not given["etas"][0] < 1 < given["etas"][1]:
            raise ValueError(f"need 0 < etas[0] < 1 < etas[1], got {given['etas']}")

    def first(self, slot: str, weight: Tensor, group: Group) -> Tensor:
        if slot == "before":
            return torch.zeros_like(weight)
        rate = torch.as_tensor(self._rate(group), dtype=torch.float64)
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
        k = u.on_device(u.t) - 1.0  # as torch computes, in float32
        u.descend(u.g.plus(u.w, lambd), u.lr / (1 + lambd * u.lr * k) ** u["alpha"])
        u.descend(average - u.w, 1 / (k - u["t0"]).clamp(min=1.0), average)
