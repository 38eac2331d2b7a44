"""An optimizer around another one, as FreezeOpt and BFloat16Weights are, and the first of them: LARS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from mpkit.arguments import Positive, check_function, checked
from mpkit.optimizers.arguments import Trainer
from mpkit.optimizers.base import PATCHES, TOLD, Closing, Loss, Optimizer
from mpkit.optimizers.update import Many, Update
from mpkit.schedules import LearningRateSchedule


class Wrapper(Closing, TorchOptimizer):
    """Shows the groups, state, defaults and hooks of the optimizer inside as its own, and hands on what it lacks.

    A subclass says in `apply` what one step does, with `inside` for the step of the optimizer inside. Hooks of either
    run once, around the whole step.

    Raises:  TypeError for what is no optimizer, or one whose step needs a closure (LBFGS).
    """

    @checked
    def __init__(self, optimizer: Trainer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:  # only for names that this class does not have
        if name in ("optimizer", *TOLD) or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return not self._plain_closure and getattr(self.optimizer, "_step_supports_amp_scaling", False)

    @TorchOptimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """One step; -> what `closure` returns, which is called first, with gradients enabled."""
        loss = self.evaluated(closure)
        self.apply()
        return loss

    def apply(self) -> None:
        """What one step does."""
        self.inside()

    def inside(self, optimizer: TorchOptimizer | None = None) -> None:
        """One step of the optimizer inside (or another one), told of `found_inf` and `grad_scale`, without hooks."""
        optimizer = self.optimizer if optimizer is None else optimizer
        told = {name: getattr(self, name, None) for name in TOLD}
        vars(optimizer).update(told)
        step: Any = type(optimizer).step  # around that of every optimizer that was made torch puts its hooks
        try:
            step.__wrapped__(optimizer)
        finally:
            for name in told:
                delattr(optimizer, name)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler of the one inside looks for it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in PATCHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


Wrapper.step.hooked = True  # type: ignore[attr-defined]  # as torch marks a step around which hooks run


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
        optimizer: TorchOptimizer,
        epsilon: Positive = 1e-5,
        coefficient: Positive = 0.001,
        use_clip: bool = False,
        lars_filter: Callable[[NamedParameter], bool] = not_norm_or_bias,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or optimizer.decays_itself:
            came = type(optimizer).__name__
            raise TypeError(f"LARS wraps an mpkit optimizer that adds decay to gradients, such as Momentum, got {came}")
        check_function("lars_filter", lars_filter, "a function of a parameter and its name")
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
