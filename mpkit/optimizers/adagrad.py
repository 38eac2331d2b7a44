"""Rates for each weight from the squares of its gradients: RMSProp, Adagrad, Adadelta, FTRL, ProximalAdagrad."""

from __future__ import annotations

from torch import Tensor

from mpkit.optimizers.arguments import Decay, FixedRate, NotAbove0, Positive, Rate, Real, Share, ShareOrOne
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.many import Many
from mpkit.optimizers.update import Update

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
    Raises:  ValueError for a rate that changes or differs between groups, and from `step` for one that a scheduler of
             torch has set to 0.
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
