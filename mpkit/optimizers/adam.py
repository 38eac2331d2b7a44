"""Adam and its relatives: the smoothed gradient divided by the size it usually has."""

from __future__ import annotations

from dataclasses import KW_ONLY, field

import torch

from mpkit.arguments import Positive
from mpkit.optimizers.arguments import Beta, Decay, Rate
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Many, Update, root, unbiased


class Betas(Optimizer):
    """What Adam and its relatives are given first."""

    slots = {"moment1": 0.0, "moment2": 0.0}

    learning_rate: Rate = 1e-3
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Positive = 1e-8


def moments(u: Update) -> tuple[Many, Many]:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2."""
    b1, b2 = u["betas"]
    return u.mix("moment1", b1, u.g), u.mix("moment2", b2, u.g, u.g)


class Adam(Betas):
    """`m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr sqrt(1-b2^t) / (1-b1^t) * m / (sqrt(v) + eps)`.

    Args:
        beta1, beta2:  floats in (0, 1).
        eps:           number > 0, in the unit of the gradient.
        use_nesterov:  the numerator is `b1 m + (1-b1) g`.
        use_amsgrad:   divides by the largest v so far, not corrected for bias.
        use_lazy:      sparse gradients touch only their rows; see `LazyAdam`. Excludes `use_offload` and `use_amsgrad`.
        use_offload:   accepted for MindSpore's sake; the state stays on the weights' device.
        use_locking:   accepted for MindSpore's sake, without effect.
    Memory:  two float32 numbers for each weight, and a float32 master for each of 16 bits. For moments of 8 bits take
             the optimizers of torchao (`torchao.optim.AdamW8bit`) or bitsandbytes; they are torch optimizers, and
             mpkit's steps drive them.
    Against torch:  eps stands outside the bias correction, so this is `torch.optim.Adam` with
                    eps' = eps / sqrt(1 - b2^t). Weight decay is coupled (added to the gradient) in both. t counts the
                    updates of the group, torch's those of the parameter: one that had no gradient at first (it was
                    frozen) starts uncorrected, about 3 times lr in size; add it later as a group of its own.
    Source:  Kingma and Ba 2015, arXiv:1412.6980, end of section 2; MindSpore 2.7 nn.Adam.
    """

    slots = {"moment1": 0.0, "moment2": 0.0, "largest2": 0.0}
    switched = {"largest2": "use_amsgrad"}
    refused = {
        "use_lazy, use_offload or use_amsgrad, not two": lambda g: (
            g["use_lazy"] + g["use_offload"] + g["use_amsgrad"] > 1
        )
    }

    use_locking: bool = False
    use_nesterov: bool = False
    weight_decay: Decay = 0.0
    loss_scale: Positive = 1.0
    use_amsgrad: bool = False
    _: KW_ONLY
    use_lazy: bool = False
    use_offload: bool = False

    def update(self, u: Update) -> None:
        (b1, b2), (m, v) = u["betas"], moments(u)
        if u["use_nesterov"]:
            m = (m * b1).plus(u.g, 1 - b1)
        if u["use_amsgrad"]:
            v = u.peak("largest2", v)
        u.descend(m, u.lr * root(unbiased(b2, u.t)) / unbiased(b1, u.t), over=v.sqrt().add_(u["eps"]))


class LazyAdam(Adam):
    """`Adam` that, given a sparse gradient (`nn.Embedding(sparse=True)`), touches only the rows it names.

    Rows without a gradient keep their moments and do not move, where Adam would decay the moments and move on. With
    dense gradients it is Adam. Finding the rows of a sparse gradient on a GPU reads the host.

    Source:  MindSpore 2.7 nn.LazyAdam (deprecated there in favour of `Adam(use_lazy=True)`).
    """

    use_lazy: bool = field(default=True, init=False)
    use_offload: bool = field(default=False, init=False)
    use_amsgrad: bool = field(default=False, init=False)


class AdamOffload(Adam):
    """`Adam` under MindSpore's name for a state kept on the host; here it stays on the device. Never centralizes.

    Source:  MindSpore 2.7 nn.AdamOffload (deprecated there in favour of `Adam(use_offload=True)`).
    """

    centralizes = False

    use_lazy: bool = field(default=False, init=False)
    use_offload: bool = field(default=True, init=False)
    use_amsgrad: bool = field(default=False, init=False)


class AdamWeightDecay(Betas):
    """`m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (m / (sqrt(v) + eps) + weight_decay w)`.

    Decoupled decay and no bias correction: the first steps are about (1-b1) / sqrt(1-b2) = 3.16 times lr in size.

    Args:  as `Adam`; eps is 1e-6 by default. Takes no `loss_scale`.
    Against torch:  `torch.optim.AdamW` corrects the bias, this does not.
    Source:  MindSpore 2.7 nn.AdamWeightDecay, after BERT's optimizer (Devlin et al. 2019, arXiv:1810.04805, code). The
             original forms 1 - b2 in float32, an error of 5e-5 in v that is not copied.
    """

    decays_itself = True

    eps: Positive = 1e-6
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        m, v = moments(u)
        u.shrink(u.lr)
        u.descend(m, u.lr, over=v.sqrt().add_(u["eps"]))


class AdaMax(Betas):
    """`m = b1 m + (1-b1) g;  n = max(b2 n, |g|);  w -= lr / (1 - b1^t) * m / (n + eps)`.

    Args:  as `Adam`.
    Against torch:  `torch.optim.Adamax` puts eps inside the maximum.
    Source:  Kingma and Ba 2015, arXiv:1412.6980, algorithm 2; MindSpore 2.7 nn.AdaMax.
    """

    slots = {"moment1": 0.0, "largest": 0.0}

    weight_decay: Decay = 0.0
    loss_scale: Positive = 1.0

    def update(self, u: Update) -> None:
        b1, b2 = u["betas"]
        m, n = u.mix("moment1", b1, u.g), u.peak("largest", u.g.abs(), hold=b2)
        u.descend(m, u.lr / unbiased(b1, u.t), over=n + u["eps"])


class Lamb(Betas):
    """`r = m' / (sqrt(v') + eps) + weight_decay w;  w -= lr |w| / |r| r`, m' and v' Adam's moments corrected for bias.

    The ratio of the norms is 1 where either is 0.

    Args:  as `Adam`; eps is 1e-6 by default. Takes no `loss_scale`.
    Against torch:  there is no namesake.
    Source:  You et al. 2020, arXiv:1904.00962, algorithm 2 with phi(z) = z; MindSpore 2.7 nn.Lamb (its formula; the
             kernel runs on no CPU). The composed version of MindSpore 1.x clipped the ratio to [0, 10]; this does not.
    """

    decays_itself = True
    sliced = False

    learning_rate: Rate
    eps: Positive = 1e-6
    weight_decay: Decay = 0.0

    def update(self, u: Update) -> None:
        (b1, b2), (m, v) = u["betas"], moments(u)
        spread = root(unbiased(b2, u.t))  # m' / (sqrt(v') + eps) = spread / (1 - b1^t) m / (sqrt(v) + eps spread)
        r = m.over(v.sqrt().add_(u["eps"] * spread)).mul_(spread / unbiased(b1, u.t))
        if where := u.decayed():
            r = r.changed(where, r.part(where).plus(u.w.part(where), u.decay))
        u.descend(r.mul_(_ratio(u.w.norms(), r.norms())), u.lr)


def _ratio(a: Many, b: Many) -> Many:
    """a / b, 1 where either is 0; 0-d tensors."""
    x, y = torch.stack(list(a.xs)), torch.stack(list(b.xs))
    return Many(torch.where((x > 0) & (y > 0), x / y, 1.0).unbind())
