"""Rates for each weight from the squares of its gradients; AdaFactor keeps one row and one column of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpkit.arguments import Positive, Real, Share, ShareOrOne
from mpkit.optimizers.arguments import Decay, FixedRate, NotAbove0, Pair, Rate
from mpkit.optimizers.base import Group, Optimizer
from mpkit.optimizers.update import Many, Number, Update, root

TINY = 1.17549435e-38  # the smallest float32 normal: 0 / TINY is 0 where 0 / 0 would be NaN


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

    slots = {"square": 1.0, "velocity": 0.0, "mean": 0.0}
    switched = {"velocity": "momentum", "mean": "centered"}

    learning_rate: Rate = 0.1
    decay: Share = 0.9
    momentum: Real = 0.0
    epsilon: Positive = 1e-10
    use_locking: bool = False
    centered: bool = False
    loss_scale: Positive = 1.0
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        d, eps, s = u["decay"], u["epsilon"], u.mix("square", u["decay"], u.g, u.g)
        spread = s + eps
        if u["centered"]:
            a = u.mix("mean", d, u.g)
            spread.add_(a, -1.0, a).at_least_(eps)  # a variance; rounding may take it below 0
        spread.sqrt_()
        if u["momentum"]:
            u.descend(u.add("velocity", u.g.times(u.lr).div_(spread), hold=u["momentum"]), 1.0)
        else:
            u.descend(u.g, u.lr, over=spread)


def _root(a: Many, start: float) -> Many:
    """Square roots of sums; where they may still be 0 (start 0), the least number that divides."""
    return a.sqrt() if start else a.sqrt().at_least_(TINY)


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

    slots = {"square": "accum"}

    accum: Real = 0.1
    learning_rate: Rate = 0.001
    update_slots: bool = True
    loss_scale: Positive = 1.0
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        a = u.add("square", u.g, u.g) if u["update_slots"] else u.state["square"]
        u.descend(u.g, u.lr, over=_root(a, u["accum"]))


class Adadelta(Optimizer):
    """`a = r a + (1-r) g^2;  d = sqrt(c + eps) / sqrt(a + eps) g;  c = r c + (1-r) d^2;  w -= lr d`.

    Args:
        rho:      r, a number in [0, 1].
        epsilon:  number > 0, in the unit of g squared.
    Against torch:  bit for bit `torch.optim.Adadelta`, which decays every parameter.
    Source:  Zeiler 2012, arXiv:1212.5701, algorithm 1; MindSpore 2.7 nn.Adadelta.
    """

    slots = {"square": 0.0, "change": 0.0}

    learning_rate: Rate = 1.0
    rho: ShareOrOne = 0.9
    epsilon: Positive = 1e-6
    loss_scale: Positive = 1.0
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        r, eps, a = u["rho"], u["epsilon"], u.mix("square", u["rho"], u.g, u.g)
        d = (u.state["change"] + eps).sqrt_().div_((a + eps).sqrt_()).mul_(u.g)
        u.mix("change", r, d, d)
        u.descend(d, u.lr)


class ProximalAdagrad(Optimizer):
    """`a = a + g^2;  r = lr / sqrt(a);  p = w - r g;  w = sign(p) max(|p| - r l1, 0) / (1 + r l2)`.

    Args:
        accum, l1, l2:  numbers >= 0; a starts at `accum`.
        use_locking:    accepted for MindSpore's sake, without effect.
    Against torch:  there is no namesake.
    Source:  Duchi and Singer 2009, JMLR 10, equation 19; MindSpore 2.7 nn.ProximalAdagrad.
    """

    slots = {"square": "accum"}

    accum: Real = 0.1
    learning_rate: Rate = 0.001
    l1: Real = 0.0
    l2: Real = 0.0
    use_locking: bool = False
    loss_scale: Positive = 1.0
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        r = _root(u.add("square", u.g, u.g), u["accum"]).reciprocal().mul_(u.lr)
        p = (r * u.g).mul_(-1.0).add_(u.w)
        size = p.abs().add_(r, -u["l1"]).at_least_(0.0)
        u.put(u.w, p.sign().mul_(size).div_(r.mul_(u["l2"]).add_(1.0)))


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
    Raises:  ValueError for a rate that changes or differs between groups, or that a scheduler of torch took down to 0:
             the formula divides by the rate.
    Source:  McMahan et al. 2013, KDD, algorithm 1; MindSpore 2.7 nn.FTRL, whose CPU kernel takes +l1 for negative z
             too; this follows the paper.
    """

    slots = {"square": "initial_accum", "linear": 0.0}
    decay_filter = rate_by_group = False

    initial_accum: Real = 0.1
    learning_rate: FixedRate = 0.001
    lr_power: NotAbove0 = -0.5
    l1: Real = 0.0
    l2: Real = 0.0
    use_locking: bool = False
    loss_scale: Positive = 1.0
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        if not isinstance(u.lr, Tensor) and u.lr == 0:
            raise ValueError("FTRL divides by its learning rate, which came down to 0; let the scheduler end above 0")
        p, before = -u["lr_power"], u.state["square"] ** -u["lr_power"]
        after = u.add("square", u.g, u.g) ** p
        z = u.put(u.state["linear"], (before - after).div_(u.lr).mul_(u.w).add_(u.g).add_(u.state["linear"]))
        size = z.abs().add_(-u["l1"]).at_least_(0.0)
        over = after.div_(u.lr).add_(2 * u["l2"]).at_least_(TINY)
        u.put(u.w, z.sign().mul_(size).mul_(-1.0).div_(over))


class AdaFactor(Optimizer):
    """Adam with a factored second moment, steps clipped by their size and scaled by the weight's.

    `r = lr`, or `min(1e-2, 1 / sqrt(t))` with relative_step (`1e-6 t` for 1e-2 with warmup_init);
    `r *= max(eps2, rms(w))` with scale_parameter;  `b2 = 1 - t^-decay_rate`;
    two axes or more: `row, col = b2 (row, col) + (1-b2) (mean over the last, last but one axis of g^2 + eps1)` and
    `s = g / sqrt(row / mean(row)) / sqrt(col)`; fewer: `v = b2 v + (1-b2) (g^2 + eps1)` and `s = g / sqrt(v)`;
    `s *= r / max(1, rms(s) / clip_threshold)`;  `m = b1 m + (1-b1) s`;  `w = w - weight_decay r w - m`.

    Args:
        learning_rate:   None with relative_step, else a rate; never per group.
        eps:             (eps1, eps2), numbers > 0.
        clip_threshold:  number > 0.
        decay_rate:      number > 0.
        beta1:           number in [0, 1); 0 keeps no m.
        weight_decay:    number in [0, 1); reaches every parameter.
        compression:     accepted for MindSpore's sake, without effect; state is float32.
        loss_scale:      stored, but the gradients are not divided by it, as in MindSpore.
    Against torch:  `torch.optim.Adafactor` has no m, decays by lr and not by r, and clips eps differently.
    Raises:  ValueError for a rate together with relative_step, neither of both, or warmup_init without relative_step.
    Source:  Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5; MindSpore 2.7 nn.AdaFactor.
    """

    slots = {"moment1": 0.0, "square": 0.0, "row": 0.0, "column": 0.0}
    switched = {"moment1": "beta1"}
    refused = {
        "give learning_rate or relative_step=True": lambda g: (g["learning_rate"] is not None) == g["relative_step"],
        "warmup_init needs relative_step=True": lambda g: g["warmup_init"] and not g["relative_step"],
    }
    decays_itself = by_axes = True
    decay_filter = rate_by_group = sliced = False

    learning_rate: Rate | None = None
    eps: Pair = (1e-30, 1e-3)
    clip_threshold: Positive = 1.0
    decay_rate: Positive = 0.8
    beta1: Share = 0.9
    weight_decay: Share = 0.0
    scale_parameter: bool = True
    relative_step: bool = True
    warmup_init: bool = False
    compression: bool = False
    loss_scale: Positive = 1.0

    def needed(self, p: Tensor, group: Group) -> list[str]:
        unused = {"square"} if p.ndim > 1 else {"row", "column"}
        return [slot for slot in super().needed(p, group) if slot not in unused]

    def first(self, slot: str, weight: Tensor, group: Group) -> Tensor:
        mean_over = {"row": -1, "column": -2}
        return super().first(slot, weight.sum(mean_over[slot]) if slot in mean_over else weight, group)

    def update(self, u: Update) -> None:
        step, sizes = self._normalized(u), [math.sqrt(w.numel()) for w in u.w.xs]
        r = self._rates(u, sizes)
        limit = Many(torch._foreach_div(step.norms().xs, [n * u["clip_threshold"] for n in sizes])).at_least_(1.0)
        step.mul_(r / limit)
        m = u.mix("moment1", u["beta1"], step) if u["beta1"] else step
        u.shrink(r)
        u.descend(m, 1.0)

    @staticmethod
    def _normalized(u: Update) -> Many:
        """Gradients over the root of their second moment, which is brought up to date."""
        squares = u.g * u.g
        if "square" in u.state:
            return _averaged(u, "square", squares).rsqrt().mul_(u.g)
        row = _averaged(u, "row", squares.map(lambda x: x.mean(-1)))
        column = _averaged(u, "column", squares.map(lambda x: x.mean(-2))).rsqrt()
        row = (row / row.map(lambda r: r.mean(-1, keepdim=True))).rsqrt()
        return (u.g * row.map(lambda r: r.unsqueeze(-1))).mul_(column.map(lambda c: c.unsqueeze(-2)))

    @staticmethod
    def _rates(u: Update, sizes: list[float]) -> Many:
        """r, a 0-d tensor for each weight."""
        rate = u.lr
        if u["relative_step"]:
            most, slow = 1e-6 * u.t if u["warmup_init"] else 1e-2, 1 / root(u.t)
            rate = slow.clamp(max=most) if isinstance(slow, Tensor) else min(slow, most)
        if not u["scale_parameter"]:
            return Many([w.new_ones(()) for w in u.w.xs]).times(rate)
        return Many(torch._foreach_div(u.w.norms().xs, sizes)).at_least_(u["eps"][1]).mul_(rate)


def _averaged(u: Update, slot: str, means: Many) -> Many:
    """The new average of squares; a skipped step computes it from zeros all the same: what follows stays finite."""
    mix: Number = u.t ** -u["decay_rate"]  # 1 - b2
    new = u.state[slot].times(1 - mix).add_(means.add_(u["eps"][0]).mul_(mix))
    u.put(u.state[slot], new)
    return new
