"""AdaFactor: the second moment of a matrix kept as one row and one column."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_number
from mpkit.optimizers.arguments import Options, Params, Rate
from mpkit.optimizers.base import Numbers, Optimizer
from mpkit.optimizers.update import Number, Tensors, Update, root


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

    decay_in_formula = True
    decay_filter = False
    switched = (("beta1", "moment1"),)

    def __init__(
        self,
        params: Params,
        learning_rate: Rate | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = 0.8,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        compression: bool = False,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        flags = {"scale_parameter": scale_parameter, "relative_step": relative_step, "warmup_init": warmup_init}
        check_flags(**flags, compression=compression)
        if (learning_rate is not None) == relative_step:
            raise ValueError(f"give a learning rate or relative_step=True, not {learning_rate!r} and {relative_step}")
        if warmup_init and not relative_step:
            raise ValueError("warmup_init needs relative_step=True")
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise TypeError(f"eps must be a pair of numbers, got {eps!r}")
        pairs = {"eps1": eps[0], "eps2": eps[1], "clip_threshold": clip_threshold, "decay_rate": decay_rate}
        for name, value in pairs.items():
            check_number(name, value, open_low=True)
        check_number("beta1", beta1, high=1.0)
        check_number("weight_decay", weight_decay, high=1.0)
        hyper = {**{name: float(value) for name, value in pairs.items()}, "beta1": float(beta1), **flags}
        super().__init__(
            params, 0.0 if learning_rate is None else learning_rate, weight_decay, loss_scale, hyper, options
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "lr" in param_group:
            raise ValueError("AdaFactor takes one learning rate for all groups; leave 'lr' out of the group")
        super().add_param_group(param_group)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        slots = {"moment1": torch.zeros_like(weight)} if group["beta1"] else {}
        if weight.ndim < 2:
            return {**slots, "square": torch.zeros_like(weight)}
        return {
            **slots,
            "row": weight.new_zeros(weight.shape[:-1]),
            "column": weight.new_zeros((*weight.shape[:-2], weight.shape[-1])),
        }

    def _step_some(self, chosen: list[int], group: dict[str, Any], numbers: Numbers) -> None:
        for factored in (True, False):  # the two kinds of state need an `Update` each
            some = [i for i in chosen if (group["params"][i].ndim >= 2) == factored]
            if some:
                super()._step_some(some, group, numbers)

    def update(self, u: Update) -> None:
        mix = u.counted ** -u.group["decay_rate"]  # 1 - b2
        steps = self._normalized(u, mix.to(u.weights[0].dtype) if isinstance(mix, Tensor) else mix)
        sizes = [math.sqrt(w.numel()) for w in u.weights]
        limit = torch._foreach_norm(steps)
        torch._foreach_div_(limit, [size * u.group["clip_threshold"] for size in sizes])
        torch._foreach_clamp_min_(limit, 1.0)
        rates = self._rates(u, sizes)
        torch._foreach_mul_(steps, list(torch._foreach_div(rates, limit)))
        if u.group["beta1"]:
            moment = u.state["moment1"]
            u.decay_average_(moment, u.group["beta1"])
            torch._foreach_add_(moment, steps, alpha=1 - u.group["beta1"])
            steps = moment
        if not isinstance(u.decay, float) or u.decay:
            shrink = torch._foreach_mul(rates, u.stop(-u.decay))
            torch._foreach_add_(shrink, 1.0)
            torch._foreach_mul_(u.weights, shrink)
        u.move_(u.weights, steps, 1.0)

    def _normalized(self, u: Update, mix: Number) -> Tensors:
        """Gradients over the root of their second moment, which is brought up to date."""
        squares = torch._foreach_mul(u.grads, u.grads)
        if "square" in u.state:
            spread = self._averaged(u, "square", squares, mix)
            torch._foreach_rsqrt_(spread)
            torch._foreach_mul_(spread, u.grads)
            return spread
        row = self._averaged(u, "row", [s.mean(-1) for s in squares], mix)
        column = self._averaged(u, "column", [s.mean(-2) for s in squares], mix)
        torch._foreach_div_(row, [r.mean(-1, keepdim=True) for r in row])
        torch._foreach_rsqrt_(row)
        torch._foreach_rsqrt_(column)
        steps = torch._foreach_mul(u.grads, [r.unsqueeze(-1) for r in row])
        torch._foreach_mul_(steps, [c.unsqueeze(-2) for c in column])
        return steps

    @staticmethod
    def _averaged(u: Update, name: str, means: Tensors, mix: Number) -> Tensors:
        """The new running average, also stored unless the step is skipped; a copy, to be worked on.

        On a skipped step it is computed from zeros all the same, so that everything after it stays finite.
        """
        torch._foreach_add_(means, u.group["eps1"])
        torch._foreach_mul_(means, mix)
        new = torch._foreach_mul(u.state[name], 1 - mix)
        torch._foreach_add_(new, means)
        u.replace_(u.state[name], new)
        return new

    @staticmethod
    def _rates(u: Update, sizes: list[float]) -> Tensors:
        """One 0-d rate per weight."""
        rate: Number = u.lr
        if u.group["relative_step"]:
            most = 1e-6 * u.counted if u.group["warmup_init"] else 1e-2
            slow = 1 / root(u.counted)
            rate = slow.clamp(max=most).to(u.weights[0].dtype) if isinstance(slow, Tensor) else min(slow, most)
        if not u.group["scale_parameter"]:
            rates = [w.new_ones(()) for w in u.weights]
        else:
            rates = list(torch._foreach_norm(u.weights))
            torch._foreach_div_(rates, sizes)
            torch._foreach_clamp_min_(rates, u.group["eps2"])
        torch._foreach_mul_(rates, rate)
        return rates
