"""Adam and its relatives: the smoothed gradient divided by the size it usually has."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_flags
from mpkit.optimizers.arguments import Decay, Options, Params, Rate, check_betas
from mpkit.optimizers.base import Numbers, Optimizer, follow_
from mpkit.optimizers.update import Update, root, unbiased


def average_moments_(u: Update) -> None:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2, in place."""
    beta1, beta2 = u.group["betas"]
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
        use_offload:   accepted for MindSpore's sake; the state stays on the weights' device.
        use_locking:   accepted for MindSpore's sake, without effect.
    Against torch:  eps stands outside the bias correction, so this is `torch.optim.Adam` with
                    eps' = eps / sqrt(1 - b2^t). Weight decay is coupled (added to the gradient) in both. t counts the
                    updates of the group, torch's those of the parameter: one that had no gradient at first (it was
                    frozen) starts uncorrected, about 3 times lr in size; add it later as a group of its own.
    Source:  Kingma and Ba 2015, arXiv:1412.6980, end of section 2; MindSpore 2.7 nn.Adam.
    """

    elementwise = True
    switched = (("use_amsgrad", "largest2"),)

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Decay = 0.0,
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
        hyper = {"betas": (beta1, beta2), "eps": float(eps), **flags}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        names = ("moment1", "moment2", "largest2")[: 3 if group["use_amsgrad"] else 2]
        return {name: torch.zeros_like(weight) for name in names}

    def _takes_rows(self, group: dict[str, Any]) -> bool:
        return bool(group["use_lazy"])

    def _step_some(self, chosen: list[int], group: dict[str, Any], numbers: Numbers) -> None:
        rows = [i for i in chosen if group["use_lazy"] and group["params"][i].grad.is_sparse]
        for i in rows:
            self._step_rows(i, group, numbers)
        dense = [i for i in chosen if i not in rows]
        if dense:
            super()._step_some(dense, group, numbers)

    def _step_rows(self, i: int, group: dict[str, Any], numbers: Numbers) -> None:
        """Run the formula on the rows that a sparse gradient names, and on nothing else."""
        p = group["params"][i]
        grad = p.grad.coalesce()
        rows, (state,) = tuple(grad.indices()), self._states([p], group)  # one index for each sparse axis
        whole = {"weight": state.get("master", p), **{name: t for name, t in state.items() if name != "master"}}
        part = {name: [t[rows]] for name, t in whole.items()}
        weights = part.pop("weight")
        if "master" in state:
            follow_(weights, [p[rows]])
        self._apply([grad.values()], weights, part, group, [i], numbers.on(weights[0]))
        for name, (values,) in {"weight": weights, **part}.items():
            whole[name][rows] = values
        if "master" in state:
            p[rows] = weights[0].to(p.dtype)

    def update(self, u: Update) -> None:
        beta1, beta2 = u.group["betas"]
        average_moments_(u)
        numerators, spread = u.state["moment1"], u.state["moment2"]
        if u.group["use_nesterov"]:
            numerators = list(torch._foreach_mul(numerators, beta1))
            torch._foreach_add_(numerators, u.grads, alpha=1 - beta1)
        if u.group["use_amsgrad"]:
            torch._foreach_maximum_(u.state["largest2"], spread)
            spread = u.state["largest2"]
        denominators = torch._foreach_sqrt(spread)
        torch._foreach_add_(denominators, u.group["eps"])
        rate = u.once("rate", lambda: u.lr * root(unbiased(beta2, u.count)) / unbiased(beta1, u.count))
        u.move_by_ratio_(u.weights, numerators, denominators, rate)


class LazyAdam(Adam):
    """`Adam` that, given a sparse gradient (`nn.Embedding(sparse=True)`), touches only the rows it names.

    Rows without a gradient keep their moments and do not move, where Adam would decay the moments and move on. With
    dense gradients it is Adam. Finding the rows of a sparse gradient on a GPU reads the host.

    Source:  MindSpore 2.7 nn.LazyAdam (deprecated there in favour of `Adam(use_lazy=True)`).
    """

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        args = (learning_rate, beta1, beta2, eps, use_locking, use_nesterov, weight_decay, loss_scale)
        super().__init__(params, *args, use_lazy=True, **options)


class AdamOffload(Adam):
    """`Adam` under MindSpore's name for a state kept on the host; here it stays on the device. Never centralizes.

    Source:  MindSpore 2.7 nn.AdamOffload (deprecated there in favour of `Adam(use_offload=True)`).
    """

    centralizes = False

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        args = (learning_rate, beta1, beta2, eps, use_locking, use_nesterov, weight_decay, loss_scale)
        super().__init__(params, *args, use_offload=True, **options)


class AdamWeightDecay(Optimizer):
    """`m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (m / (sqrt(v) + eps) + weight_decay w)`.

    Decoupled decay and no bias correction: the first steps are about (1-b1) / sqrt(1-b2) = 3.16 times lr in size.

    Args:  as `Adam`; eps is 1e-6 by default. Takes no `loss_scale`.
    Against torch:  `torch.optim.AdamW` corrects the bias, this does not.
    Source:  MindSpore 2.7 nn.AdamWeightDecay, after BERT's optimizer (Devlin et al. 2019, arXiv:1810.04805, code). The
             original forms 1 - b2 in float32, an error of 5e-5 in v that is not copied.
    """

    elementwise = True
    decay_in_formula = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: Decay = 0.0,
        **options: Unpack[Options],
    ) -> None:
        check_betas(beta1, beta2, eps)
        hyper = {"betas": (beta1, beta2), "eps": float(eps)}
        super().__init__(params, learning_rate, weight_decay, hyper=hyper, options=options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight) for name in ("moment1", "moment2")}

    def update(self, u: Update) -> None:
        average_moments_(u)
        denominators = torch._foreach_sqrt(u.state["moment2"])
        torch._foreach_add_(denominators, u.group["eps"])
        u.shrink_(u.lr)
        u.move_by_ratio_(u.weights, u.state["moment1"], denominators, u.lr)


class AdaMax(Optimizer):
    """`m = b1 m + (1-b1) g;  n = max(b2 n, |g|);  w -= lr / (1 - b1^t) * m / (n + eps)`.

    Args:  as `Adam`.
    Against torch:  `torch.optim.Adamax` puts eps inside the maximum.
    Source:  Kingma and Ba 2015, arXiv:1412.6980, algorithm 2; MindSpore 2.7 nn.AdaMax.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        check_betas(beta1, beta2, eps)
        hyper = {"betas": (beta1, beta2), "eps": float(eps)}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight) for name in ("moment1", "largest")}

    def update(self, u: Update) -> None:
        (beta1, beta2), m, largest = u.group["betas"], u.state["moment1"], u.state["largest"]
        u.decay_average_(m, beta1)
        torch._foreach_add_(m, u.grads, alpha=1 - beta1)
        u.decay_average_(largest, beta2)
        torch._foreach_maximum_(largest, torch._foreach_abs(u.grads))
        denominators = torch._foreach_add(largest, u.group["eps"])
        u.move_by_ratio_(u.weights, m, denominators, u.once("rate", lambda: u.lr / unbiased(beta1, u.count)))
