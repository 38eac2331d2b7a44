"""Rprop, which looks only at signs, and ASGD, which averages the weights."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_float
from mpkit.optimizers.arguments import Decay, Options, Params, Rate
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Number, Update


class Rprop(Optimizer):
    """`s = sign(g g_before);  step = clip(step up^(s>0) down^(s<0));  g = 0 where s < 0;  w -= sign(g) step`.

    Args:
        learning_rate:  the first step of every weight; later the signs decide.
        etas:           (down, up), a tuple of floats with 0 < down < 1 < up.
        step_sizes:     (least, most), a tuple of floats with 0 < least < most, in the unit of the weights.
    Against torch:  bit for bit `torch.optim.Rprop`, which decays every parameter.
    Source:  Riedmiller and Braun 1993, ICNN (the variant without weight backtracking); MindSpore 2.7 nn.Rprop.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 0.1,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        for name, pair in (("etas", etas), ("step_sizes", step_sizes)):
            if not isinstance(pair, tuple):
                raise TypeError(f"{name} must be a tuple of two floats, got {pair!r}")
            if len(pair) != 2:
                raise ValueError(f"{name} must have two entries, got {pair!r}")
            for value in pair:
                check_float(name, value, open_low=True)
        if not etas[0] < 1 < etas[1]:
            raise ValueError(f"need 0 < etas[0] < 1 < etas[1], got {etas}")
        if not step_sizes[0] < step_sizes[1]:
            raise ValueError(f"need step_sizes[0] < step_sizes[1], got {step_sizes}")
        super().__init__(
            params, learning_rate, weight_decay, hyper={"etas": etas, "step_sizes": step_sizes}, options=options
        )

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        least, most = group["step_sizes"]
        first = self._rate(group)
        first = first.clamp(least, most) if isinstance(first, Tensor) else min(max(first, least), most)
        return {"before": torch.zeros_like(weight), "step": torch.zeros_like(weight) + first}

    def update(self, u: Update) -> None:
        down, up = u.group["etas"]
        least, most = u.group["step_sizes"]
        before, step = u.state["before"], u.state["step"]
        turned = torch._foreach_mul(u.grads, before)
        torch._foreach_sign_(turned)
        if u.keep is None:
            torch._foreach_copy_(before, u.grads)
        else:
            torch._foreach_mul_(before, 1 - u.keep)
            torch._foreach_add_(before, u.grads)
        for sign, old in zip(turned, before):
            old.masked_fill_(sign < 0, 0.0)  # nowhere in a skipped step, whose gradients are -0.0
            sign.copy_(torch.where(sign > 0, up, torch.where(sign < 0, down, torch.ones_like(sign))))
        torch._foreach_mul_(step, turned)
        torch._foreach_clamp_min_(step, least)
        torch._foreach_clamp_max_(step, most)
        if u.keep is None:
            torch._foreach_addcmul_(u.weights, torch._foreach_sign(before), step, value=-1.0)
        else:
            change = torch._foreach_sign(before)
            torch._foreach_mul_(change, step)
            u.move_(u.weights, change, 1.0)


class ASGD(Optimizer):
    """`w = w (1 - lambd eta) - eta g;  average += mu (w - average)`, with k = t - 1 updates done before update t:

    `eta = lr / (1 + lambd lr k)^alpha;  mu = 1 / max(1, k - t0)`. The averages are in `state[p]["average"]`.

    Args:
        lambd, alpha, t0:  floats >= 0; `t0` in updates, where averaging starts.
    Against torch:  bit for bit `torch.optim.ASGD` (foreach) at a fixed rate. Under a schedule torch's eta lags one step
                    behind the rate, this does not.
    Source:  Polyak and Juditsky 1992; MindSpore 2.7 nn.ASGD.
    """

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 0.1,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        for name, value in (("lambd", lambd), ("alpha", alpha), ("t0", t0)):
            check_float(name, value)
        hyper = {"lambd": lambd, "alpha": alpha, "t0": t0}
        super().__init__(params, learning_rate, weight_decay, hyper=hyper, options=options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"average": torch.zeros_like(weight)}

    def update(self, u: Update) -> None:
        average = u.state["average"]
        steps = torch._foreach_add(u.grads, u.weights, alpha=u.group["lambd"])
        self._descend_(u, u.weights, steps, self._eta(u))
        gaps = torch._foreach_sub(u.weights, average)
        torch._foreach_neg_(gaps)
        self._descend_(u, average, gaps, self._mu(u))

    @staticmethod
    def _descend_(u: Update, targets: list[Tensor], steps: tuple[Tensor, ...], rate: Tensor) -> None:
        """targets -= rate * steps with the rate as a 0-d tensor, in the operation that torch uses."""
        if u.keep is None:
            torch._foreach_addcmul_(targets, steps, [rate] * len(targets), value=-1.0)
        else:
            u.move_(targets, steps, rate)

    @staticmethod
    def _eta(u: Update) -> Tensor:
        weight, lambd = u.weights[0], u.group["lambd"]
        done: Number = (
            (u.count - 1).float() if isinstance(u.count, Tensor) else torch.tensor(u.count - 1, dtype=torch.float32)
        )
        return _as_rate(u.lr / ((1 + lambd * u.lr * done) ** u.group["alpha"]), weight)

    @staticmethod
    def _mu(u: Update) -> Tensor:
        over = (u.count.double() if isinstance(u.count, Tensor) else u.count) - 1 - u.group["t0"]
        return _as_rate(1 / over.clamp(min=1.0) if isinstance(over, Tensor) else 1 / max(1.0, over), u.weights[0])


def _as_rate(value: Number, like: Tensor) -> Tensor:
    """A 0-d tensor of the device and dtype of `like`, without a copy from the host."""
    if isinstance(value, Tensor) and value.device == like.device:
        return value.to(like.dtype)
    return torch.full((), float(value), dtype=like.dtype, device=like.device)
