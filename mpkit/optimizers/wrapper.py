"""An optimizer around another one: what is the same for LARS, FreezeOpt and BFloat16Weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer as TorchOptimizer

from mpkit.arguments import checked
from mpkit.optimizers.arguments import need_plain_step
from mpkit.optimizers.base import PATCHES, TOLD, Loss, evaluated
from mpkit.optimizers.saved import check_state


class Wrapper(TorchOptimizer):
    """Shows the groups, state, defaults and hooks of the optimizer inside as its own, and hands on what it lacks.

    A subclass says in `apply` what one step does, with `inside` for the step of the optimizer inside. Hooks of either
    run once, around the whole step.

    Raises:  TypeError for what is no optimizer, or one whose step needs a closure (LBFGS).
    """

    @checked
    def __init__(self, optimizer: TorchOptimizer) -> None:
        need_plain_step(optimizer)
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:  # only for names that this class does not have
        if name in ("optimizer", *TOLD) or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    _plain_closure = False

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

    def evaluated(self, closure: Callable[[], Loss] | None) -> Loss | None:
        """What the closure of a step returns."""
        return evaluated(self, closure)

    def apply(self) -> None:
        """What one step does."""
        self.inside()

    def inside(self, optimizer: TorchOptimizer | None = None) -> None:
        """One step of the optimizer inside (or another one), told of `found_inf` and `grad_scale`, without hooks."""
        optimizer = self.optimizer if optimizer is None else optimizer
        told = {name: getattr(self, name, None) for name in TOLD}
        vars(optimizer).update(told)
        step: Any = type(optimizer).step
        try:
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
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

    def check_state(self, saved: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for what the optimizer inside cannot take over."""
        check_state(self.optimizer, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in PATCHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


Wrapper.step.hooked = True  # type: ignore[attr-defined]  # torch would put its hooks around those that are there
