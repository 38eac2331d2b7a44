"""Adam and its relatives: the smoothed gradient divided by the size it usually has."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.optimizers.arguments import Options, check_betas, check_flags
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.update import Update, root, unbiased


def average_moments_(u: Update) -> None:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2, in place."""
    beta1, beta2 = u.group["beta1"], u.group["beta2"]
    m, v = u.state["moment1"], u.state["moment2"]
    u.decay_average_(m, beta1)
    torch._foreach_add_(m, u.grads, alpha=1 - beta1)
    u.decay_average_(v, beta2)
    torch._foreach_addcmul_(v, u.grads, u.grads, value=1 - beta2)


class Adam(Optimizer):
    """`m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr sqrt(1-b2^t) / (1-b1^t) * m / (sqrt(v) + eps)`.

    Args:
        beta1, beta2:  floats in (0, 1).
        eps:           number > 0, in the unit of the gradient.
        use_nesterov:  the numerator is `b1 m + (1-b1) g`.
        use_amsgrad:   divides by the largest v so far, not corrected for bias.
        use_lazy:      sparse gradients touch only their rows; see `LazyAdam`. Excludes `use_offload` and `use_amsgrad`.
        use_offload:   accepted for the reference's sake; the state stays on the weights' device.
        use_locking:   accepted for the reference's sake, without effect.
    Against torch:  eps stands outside the bias correction, so this is `torch.optim.Adam` with
                    eps' = eps / sqrt(1 - b2^t). Weight decay is coupled (added to the gradient) in both.
    Source:  Kingma and Ba 2015, arXiv:1412.6980, end of section 2; MindSpore 2.7 nn.Adam.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        use_amsgrad: bool = False,
        *,
        use_lazy: bool = False,
        use_offload: bool = False,
        **options: Unpack[Options],
    ) -> None:
        check_betas(beta1, beta2, eps)
        flags = {"use_nesterov": use_nesterov, "use_amsgrad": use_amsgrad, "use_lazy": use_lazy}
        check_flags(**flags, use_offload=use_offload, use_locking=use_locking)
        if use_lazy + use_offload + use_amsgrad > 1:
            raise ValueError("use_lazy, use_offload and use_amsgrad exclude each other; choose one")
        hyper = {"beta1": beta1, "beta2": beta2, "eps": float(eps), **flags}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        names = ("moment1", "moment2", "largest2")[: 3 if group["use_amsgrad"] else 2]
        return {name: torch.zeros_like(weight) for name in names}

    def update(self, u: Update) -> None:
        beta1, beta2 = u.group["beta1"], u.group["beta2"]
        average_moments_(u)
        tops, spread = u.state["moment1"], u.state["moment2"]
        if u.group["use_nesterov"]:
            tops = list(torch._foreach_mul(tops, beta1))
            torch._foreach_add_(tops, u.grads, alpha=1 - beta1)
        if u.group["use_amsgrad"]:
            torch._foreach_maximum_(u.state["largest2"], spread)
            spread = u.state["largest2"]
        bottoms = torch._foreach_sqrt(spread)
        torch._foreach_add_(bottoms, u.group["eps"])
        rate = u.lr * root(unbiased(beta2, u.count)) / unbiased(beta1, u.count)
        u.move_by_ratio_(u.weights, tops, bottoms, rate)
