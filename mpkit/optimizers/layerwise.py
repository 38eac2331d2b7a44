"""Lamb and LARS: one more factor per layer, the ratio of the weight's norm to its step's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_number
from mpkit.optimizers.adam import average_moments_
from mpkit.optimizers.arguments import Decay, Options, Params, Rate, check_betas
from mpkit.optimizers.base import Numbers, Optimizer
from mpkit.optimizers.update import Tensors, Update, add_, decayed_positions, root, unbiased
from mpkit.optimizers.wrapper import Wrapper
from mpkit.schedules import LearningRateSchedule


class Lamb(Optimizer):
    """`r = m' / (sqrt(v') + eps) + weight_decay w;  w -= lr |w| / |r| r`, m' and v' Adam's moments corrected for bias.

    The ratio of the norms is 1 where either is 0.

    Args:  as `Adam`; eps is 1e-6 by default. Takes no `loss_scale`.
    Against torch:  there is no namesake.
    Source:  You et al. 2020, arXiv:1904.00962, algorithm 2 with phi(z) = z; MindSpore 2.7 nn.Lamb (its formula; the
             kernel runs on no CPU). The composed version of MindSpore 1.x clipped the ratio to [0, 10]; this does not.
    """

    decay_in_formula = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate,
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
        beta1, beta2 = u.group["betas"]
        spread = root(unbiased(beta2, u.count))
        gain = spread / unbiased(beta1, u.count)  # m' / (sqrt(v') + eps) = gain m / (sqrt(v) + eps spread)
        denominators = torch._foreach_sqrt(u.state["moment2"])
        add_(denominators, u.group["eps"] * spread)
        steps = torch._foreach_div(u.state["moment1"], denominators)
        torch._foreach_mul_(steps, gain.to(steps[0].dtype) if isinstance(gain, Tensor) else gain)
        self._decay_(steps, u)
        ratios = _ratio(torch._foreach_norm(u.weights), torch._foreach_norm(steps))
        torch._foreach_mul_(steps, ratios)
        u.move_(u.weights, steps, u.lr)

    @staticmethod
    def _decay_(steps: Tensors, u: Update) -> None:
        """steps += weight_decay * w where the name rule lets decay through."""
        where = decayed_positions(u.group, u.chosen)
        if not where or (isinstance(u.decay, float) and u.decay == 0.0):
            return
        chosen, weights = [steps[i] for i in where], [u.weights[i] for i in where]
        if isinstance(u.decay, Tensor):
            torch._foreach_add_(chosen, torch._foreach_mul(weights, u.decay))
        else:
            torch._foreach_add_(chosen, weights, alpha=u.decay)


def _ratio(numerators: Tensors, denominators: Tensors) -> list[Tensor]:
    """numerators / denominators, 1 where either is 0; lists of 0-d tensors."""
    numerator, denominator = torch.stack(list(numerators)), torch.stack(list(denominators))
    return list(torch.where((numerator > 0) & (denominator > 0), numerator / denominator, 1.0).unbind())


class NamedParameter(NamedTuple):
    """What `lars_filter` is asked about."""

    name: str
    parameter: Tensor


def not_norm_or_bias(x: NamedParameter) -> bool:
    """The default `lars_filter`: not a parameter whose name contains "LayerNorm" or "bias"."""
    return "LayerNorm" not in x.name and "bias" not in x.name


class LARS(Wrapper):
    """Layer-wise rates around another optimizer: it is given `q (g + wd w)` for the parameters that pass the filter.

    `q = coefficient |w| / (|g| + wd |w| + epsilon)`, with use_clip `min(q / lr, 1)`. Parameters that do not pass get g
    as it is, without decay. The inner optimizer's weight decay (wd) and `loss_scale` are applied here and not again
    inside; its beta/gamma rule, transform and centralization are not used. Groups and state are the inner optimizer's.

    Args:
        optimizer:    one of mpkit.optimizers that adds decay to the gradient.
        epsilon, coefficient:  numbers > 0 (dimensionless).
        use_clip:     bound q / lr by 1.
        lars_filter:  asked with `.name` ("" for unnamed parameters) and `.parameter`.
    Against torch:  there is no namesake.
    Raises:  TypeError for another optimizer; ValueError for use_clip with rates that differ by group and change.
    Source:  You et al. 2017, arXiv:1708.03888, algorithm 1; MindSpore 2.7 nn.LARS (formula; the form of use_clip is
             inferred, its kernel runs on no CPU).
    """

    optimizer: Optimizer

    def __init__(
        self,
        optimizer: Optimizer,
        epsilon: float = 1e-5,
        coefficient: float = 0.001,
        use_clip: bool = False,
        lars_filter: Callable[[NamedParameter], bool] = not_norm_or_bias,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or optimizer.decay_in_formula:
            raise TypeError(
                f"LARS wraps an mpkit optimizer that adds decay to the gradient, such as Momentum, got {optimizer!r}"
            )
        check_number("epsilon", epsilon, open_low=True)
        check_number("coefficient", coefficient, open_low=True)
        check_flags(use_clip=use_clip)
        if not callable(lars_filter):
            raise TypeError(f"lars_filter must be a function of a named parameter, got {lars_filter!r}")
        rates = [group["lr"] for group in optimizer.param_groups]
        if use_clip and optimizer.rates_grouped and any(isinstance(rate, LearningRateSchedule) for rate in rates):
            raise ValueError("use_clip does not go together with rates that differ by group and change with the step")
        super().__init__(optimizer)
        self.use_clip, self.lars_filter = use_clip, lars_filter
        self.epsilon, self.coefficient = float(epsilon), float(coefficient)
        optimizer.gradient_rule = self.scaled

    def scaled(
        self, grads: list[Tensor], weights: list[Tensor], group: dict[str, Any], chosen: list[int], numbers: Numbers
    ) -> list[Tensor]:
        """Gradients as the loss gave them -> unscaled, decayed and scaled by q where the filter lets them."""
        if self.optimizer.loss_scale != 1.0:
            grads = list(torch._foreach_mul(grads, 1.0 / self.optimizer.loss_scale))
        names = group.get("param_names") or [""] * len(group["params"])
        where = [k for k, i in enumerate(chosen) if self.lars_filter(NamedParameter(names[i], group["params"][i]))]
        if not where:
            return grads
        g, w, wd = [grads[k] for k in where], [weights[k] for k in where], numbers.decay
        weight_norm, grad_norm = torch.stack(torch._foreach_norm(w)), torch.stack(torch._foreach_norm(g))
        q = self.coefficient * weight_norm / (grad_norm + wd * weight_norm + self.epsilon)
        if self.use_clip:
            q = torch.where(q > 0, (q / numbers.lr).clamp(max=1.0), q)  # 0 / 0 for weights of 0 at a rate of 0
        out = list(grads)
        if isinstance(wd, Tensor):
            new = torch._foreach_add(g, torch._foreach_mul(w, wd))
        else:
            new = torch._foreach_add(g, w, alpha=wd)
        torch._foreach_mul_(new, list(q.to(new[0].dtype).unbind()))
        for k, grad in zip(where, new):
            out[k] = grad
        return out
