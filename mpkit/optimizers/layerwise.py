"""LARS: the rate of each layer from the sizes of its weights and of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.arguments import check_function, checked
from mpkit.optimizers.arguments import Positive
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.many import Many
from mpkit.optimizers.update import Update
from mpkit.optimizers.wrapper import Wrapper
from mpkit.schedules import LearningRateSchedule


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

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        epsilon: Positive = 1e-5,
        coefficient: Positive = 0.001,
        use_clip: bool = False,
        lars_filter: Callable[[NamedParameter], bool] = not_norm_or_bias,
    ) -> None:
        if optimizer.decays_itself:
            raise TypeError(
                f"LARS wraps an optimizer that adds decay to the gradient, such as Momentum, got {optimizer!r}"
            )
        check_function("lars_filter", lars_filter, "a function of a named parameter")
        rates = [group["lr"] for group in optimizer.param_groups]
        if use_clip and optimizer.rates_grouped and any(isinstance(rate, LearningRateSchedule) for rate in rates):
            raise ValueError("use_clip does not go together with rates that differ by group and change with the step")
        super().__init__(optimizer)
        self.epsilon, self.coefficient, self.use_clip, self.lars_filter = epsilon, coefficient, use_clip, lars_filter
        optimizer.gradient_rule = self.scaled

    def scaled(self, u: Update) -> Many:
        """Gradients as the loss gave them -> unscaled, decayed and scaled by q where the filter lets them."""
        g = u.g if self.optimizer.loss_scale == 1.0 else u.g * (1.0 / self.optimizer.loss_scale)
        names, params = u.group.get("param_names"), u.group["params"]
        asked = [NamedParameter(names[i] if names else "", params[i]) for i in u.chosen]
        if not (where := [k for k, each in enumerate(asked) if self.lars_filter(each)]):
            return g
        w, part = u.w.part(where), g.part(where)
        w_size, g_size = (torch.stack(list(x.norms().xs)) for x in (w, part))
        q = self.coefficient * w_size / (g_size + u.decay * w_size + self.epsilon)
        if self.use_clip:
            q = torch.where(q > 0, (q / u.lr).clamp(max=1.0), q)  # 0 / 0 for weights of 0 at a rate of 0
        return g.changed(where, part.plus(w, u.decay).mul_(Many(q.to(w.xs[0].dtype).unbind())))
