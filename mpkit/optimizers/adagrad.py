"""Rates for each weight from the squares of its gradients: RMSProp, Adagrad, Adadelta, FTRL, ProximalAdagrad."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_float, check_number
from mpkit.optimizers.arguments import Decay, Options, Params, Rate
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Update
from mpkit.schedules import LearningRateSchedule

TINY = 1.17549435e-38  # the smallest float32 normal: 0 / TINY is 0 where 0 / 0 would be NaN


def _rooted(accumulators: list[Tensor], start: float) -> tuple[Tensor, ...]:
    """Square roots of accumulators; where they may still be 0 (start 0), the least number that divides."""
    roots = torch._foreach_sqrt(accumulators)
    if start == 0:
        torch._foreach_clamp_min_(roots, TINY)
    return roots


class RMSProp(Optimizer):
    """`s = d s + (1-d) g^2;  p = u p + lr g / sqrt(s + eps);  w -= p`; centered: `sqrt(s - a^2 + eps)`, a the mean g.

    Args:
        decay:     d, a number in [0, 1).
        momentum:  u, a number >= 0; 0 keeps no p.
        epsilon:   number > 0, in the unit of g squared.
        centered:  subtract the square of the running mean; the difference is at least 0, whatever rounding says.
        use_locking:  accepted for MindSpore's sake, without effect.
    Against torch:  s starts at 1 (torch: 0), eps is inside the root, lr inside the momentum buffer, and d is 0.9 by
                    default (torch: 0.99).
    Source:  MindSpore 2.7 nn.RMSProp. When not centered its CPU kernel has eps outside the root in the vectorised part
             of a tensor; this never has.
    """

    elementwise = True
    switched = (("momentum", "velocity"), ("centered", "mean"))

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 0.1,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        loss_scale: float = 1.0,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        check_number("decay", decay, high=1.0)
        check_number("momentum", momentum)
        check_number("epsilon", epsilon, open_low=True)
        check_flags(centered=centered, use_locking=use_locking)
        hyper = {"decay": float(decay), "momentum": float(momentum), "epsilon": float(epsilon), "centered": centered}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        slots = {"square": torch.ones_like(weight)}
        if group["momentum"]:
            slots["velocity"] = torch.zeros_like(weight)
        if group["centered"]:
            slots["mean"] = torch.zeros_like(weight)
        return slots

    def update(self, u: Update) -> None:
        square, keep = u.state["square"], u.group["decay"]
        u.decay_average_(square, keep)
        torch._foreach_addcmul_(square, u.grads, u.grads, value=1 - keep)
        denominators = torch._foreach_add(square, u.group["epsilon"])
        if u.group["centered"]:
            mean = u.state["mean"]
            u.decay_average_(mean, keep)
            torch._foreach_add_(mean, u.grads, alpha=1 - keep)
            torch._foreach_addcmul_(denominators, mean, mean, value=-1.0)
            torch._foreach_clamp_min_(denominators, u.group["epsilon"])  # a variance; rounding may take it below 0
        torch._foreach_sqrt_(denominators)
        if not u.group["momentum"]:
            u.move_by_ratio_(u.weights, u.grads, denominators, u.lr)
            return
        velocity = u.state["velocity"]
        u.decay_average_(velocity, u.group["momentum"])
        if isinstance(u.lr, Tensor):
            torch._foreach_addcdiv_(velocity, torch._foreach_mul(u.grads, u.lr), denominators)
        else:
            torch._foreach_addcdiv_(velocity, u.grads, denominators, value=u.lr)
        u.move_(u.weights, velocity, 1.0)


class Adagrad(Optimizer):
    """`a = a + g^2;  w -= lr g / sqrt(a)`, a starting at `accum`.

    Args:
        accum:         number >= 0, the second positional argument, before the rate.
        update_slots:  False leaves a as it is.
    Against torch:  no eps; a starts at 0.1 (torch 0). With accum=0 a weight whose gradients were all 0 stays, where the
                    formula alone gives 0 / 0.
    Source:  Duchi et al. 2011, JMLR 12, section 1.2; MindSpore 2.7 nn.Adagrad, whose CPU kernel ignores
             update_slots=False; this does not.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        accum: float = 0.1,
        learning_rate: Rate = 0.001,
        update_slots: bool = True,
        loss_scale: float = 1.0,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        check_number("accum", accum)
        check_flags(update_slots=update_slots)
        hyper = {"accum": float(accum), "update_slots": update_slots}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"square": torch.full_like(weight, group["accum"])}

    def update(self, u: Update) -> None:
        square = u.state["square"]
        if u.group["update_slots"]:
            torch._foreach_addcmul_(square, u.grads, u.grads)
        u.move_by_ratio_(u.weights, u.grads, _rooted(square, u.group["accum"]), u.lr)


class Adadelta(Optimizer):
    """`a = r a + (1-r) g^2;  d = sqrt(c + eps) / sqrt(a + eps) g;  c = r c + (1-r) d^2;  w -= lr d`.

    Args:
        rho:      r, a number in [0, 1].
        epsilon:  number > 0, in the unit of g squared.
    Against torch:  bit for bit `torch.optim.Adadelta`, which decays every parameter.
    Source:  Zeiler 2012, arXiv:1212.5701, algorithm 1; MindSpore 2.7 nn.Adadelta.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1.0,
        rho: float = 0.9,
        epsilon: float = 1e-6,
        loss_scale: float = 1.0,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        check_number("rho", rho)
        if rho > 1:
            raise ValueError(f"rho must be in [0, 1], got {rho}")
        check_number("epsilon", epsilon, open_low=True)
        hyper = {"rho": float(rho), "epsilon": float(epsilon)}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight) for name in ("square", "change")}

    def update(self, u: Update) -> None:
        rho, eps, square, change = u.group["rho"], u.group["epsilon"], u.state["square"], u.state["change"]
        u.decay_average_(square, rho)
        torch._foreach_addcmul_(square, u.grads, u.grads, value=1 - rho)
        denominators = torch._foreach_add(square, eps)
        torch._foreach_sqrt_(denominators)
        steps = torch._foreach_add(change, eps)
        torch._foreach_sqrt_(steps)
        torch._foreach_div_(steps, denominators)
        torch._foreach_mul_(steps, u.grads)
        u.decay_average_(change, rho)
        torch._foreach_addcmul_(change, steps, steps, value=1 - rho)
        u.move_(u.weights, steps, u.lr)


class ProximalAdagrad(Optimizer):
    """`a = a + g^2;  r = lr / sqrt(a);  p = w - r g;  w = sign(p) max(|p| - r l1, 0) / (1 + r l2)`.

    Args:
        accum, l1, l2:  numbers >= 0; a starts at `accum`.
        use_locking:    accepted for MindSpore's sake, without effect.
    Against torch:  there is no namesake.
    Source:  Duchi and Singer 2009, JMLR 10, equation 19; MindSpore 2.7 nn.ProximalAdagrad.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        accum: float = 0.1,
        learning_rate: Rate = 0.001,
        l1: float = 0.0,
        l2: float = 0.0,
        use_locking: bool = False,
        loss_scale: float = 1.0,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        for name, value in (("accum", accum), ("l1", l1), ("l2", l2)):
            check_number(name, value)
        check_flags(use_locking=use_locking)
        hyper = {"accum": float(accum), "l1": float(l1), "l2": float(l2)}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"square": torch.full_like(weight, group["accum"])}

    def update(self, u: Update) -> None:
        square = u.state["square"]
        torch._foreach_addcmul_(square, u.grads, u.grads)
        rates = torch._foreach_reciprocal(_rooted(square, u.group["accum"]))
        torch._foreach_mul_(rates, u.lr)
        moved = torch._foreach_addcmul(u.weights, rates, u.grads, value=-1.0)
        sizes = torch._foreach_abs(moved)
        torch._foreach_sub_(sizes, torch._foreach_mul(rates, u.group["l1"]))
        torch._foreach_clamp_min_(sizes, 0.0)
        torch._foreach_mul_(rates, u.group["l2"])
        torch._foreach_add_(rates, 1.0)
        torch._foreach_div_(sizes, rates)
        torch._foreach_sign_(moved)
        torch._foreach_mul_(moved, sizes)
        u.replace_(u.weights, moved)


class FTRL(Optimizer):
    """`n = a + g^2;  z += g - (n^-p - a^-p) / lr * w;  w = (sign(z) l1 - z) / (n^-p / lr + 2 l2)`, 0 where |z| <= l1.

    Args:
        initial_accum:  number >= 0 at which a starts.
        learning_rate:  a float > 0; no list, no schedule, no rates of groups.
        lr_power:       p, a number <= 0.
        l1, l2:         numbers >= 0; note the 2 before l2.
        use_locking:    accepted for MindSpore's sake, without effect.
    Decay:   reaches every parameter: this optimizer ignores the beta/gamma rule.
    Against torch:  there is no namesake.
    Raises:  ValueError for a rate that changes or differs between groups, and from `step` for one that a scheduler of
             torch has set to 0.
    Source:  McMahan et al. 2013, KDD, algorithm 1; MindSpore 2.7 nn.FTRL, whose CPU kernel takes +l1 for negative z
             too; this follows the paper.
    """

    elementwise = True
    decay_filter = False

    def __init__(
        self,
        params: Params,
        initial_accum: float = 0.1,
        learning_rate: float = 0.001,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        use_locking: bool = False,
        loss_scale: float = 1.0,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        for name, value in (("initial_accum", initial_accum), ("l1", l1), ("l2", l2)):
            check_number(name, value)
        if isinstance(learning_rate, LearningRateSchedule | list | tuple | Tensor):
            raise ValueError(f"FTRL takes one fixed learning rate, got {type(learning_rate).__name__}")
        check_float("learning_rate", learning_rate, open_low=True)
        check_flags(use_locking=use_locking)
        check_number("lr_power", lr_power, low=-math.inf)
        if lr_power > 0:
            raise ValueError(f"lr_power must be at most 0, got {lr_power}")
        hyper = {"initial_accum": float(initial_accum), "lr_power": float(lr_power), "l1": float(l1), "l2": float(l2)}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "lr" in param_group:
            raise ValueError("FTRL takes one learning rate for all groups; leave 'lr' out of the group")
        super().add_param_group(param_group)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"square": torch.full_like(weight, group["initial_accum"]), "linear": torch.zeros_like(weight)}

    def update(self, u: Update) -> None:
        square, linear, lr = u.state["square"], u.state["linear"], u.lr
        if not isinstance(lr, Tensor) and lr == 0:
            raise ValueError("FTRL divides by its learning rate, which came down to 0; let the scheduler end above 0")
        before = _powered(square, -u.group["lr_power"])
        torch._foreach_addcmul_(square, u.grads, u.grads)
        denominators = _powered(square, -u.group["lr_power"])
        growth = torch._foreach_sub(denominators, before)
        torch._foreach_div_(growth, lr)
        numerators = torch._foreach_add(linear, u.grads)
        torch._foreach_addcmul_(numerators, growth, u.weights, value=-1.0)
        u.replace_(linear, numerators)
        sizes = torch._foreach_abs(numerators)
        torch._foreach_sub_(sizes, u.group["l1"])
        torch._foreach_clamp_min_(sizes, 0.0)
        torch._foreach_sign_(numerators)
        torch._foreach_mul_(numerators, sizes)
        torch._foreach_neg_(numerators)
        torch._foreach_div_(denominators, lr)
        torch._foreach_add_(denominators, 2 * u.group["l2"])
        torch._foreach_clamp_min_(denominators, TINY)
        torch._foreach_div_(numerators, denominators)
        u.replace_(u.weights, numerators)


def _powered(xs: list[Tensor], power: float) -> tuple[Tensor, ...]:
    return torch._foreach_sqrt(xs) if power == 0.5 else torch._foreach_pow(xs, power)
