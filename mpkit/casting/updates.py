"""An optimizer's step inside a forward computes as it does anywhere else: a level is for what a network computes.

Its states would be made in 16 bits, which the fused steps of torch refuse beside float32 weights. The step is known by
torch's hooks on the steps of all optimizers; its closure is the network's again. After a step that raises, the rest of
the forward around it is computed without casts.

The same hooks count the steps whose writes torch does not count: of its fused optimizers, and of kernels of others.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mpkit.casting.mode import LOCAL, current, running
from mpkit.casting.rules import PLAIN, UPDATING, Rule

_installed: list[RemovableHandle] = []
_unseen: dict[int, int] = {}  # of the parameters that were asked about, by id; one that is given again goes on


def install() -> None:
    """Make the steps of optimizers leave the rule that is on; again is once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before))
        _installed.append(register_optimizer_step_post_hook(_after))


def _before(
    optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    mode = None if LOCAL.mode is None or is_compiling() else current()
    if mode is None or mode.rule is PLAIN:
        return None
    rule, mode.rule = mode.rule, UPDATING
    LOCAL.steps[id(optimizer)] = mode, rule
    return tuple(_by(rule, x) for x in args), {name: _by(rule, x) for name, x in kwargs.items()}


def _by(rule: Rule, argument: object) -> object:
    """A closure that computes by `rule`; whatever else is given to a step as it is."""
    if not callable(argument) or isinstance(argument, Optimizer):
        return argument
    closure: Callable[[], object] = argument

    def computed() -> object:
        with running(rule):
            return closure()

    return computed


def writes(p: Tensor) -> tuple[int, int]:
    """What changes when a parameter is written into: torch's count, and that of optimizer steps it knows nothing of."""
    return p._version, _unseen.setdefault(id(p), 0)


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if _unseen and not is_compiling():  # where nobody asks, no step is looked at
        _count_unseen(optimizer)
    if LOCAL.steps and not is_compiling() and (found := LOCAL.steps.pop(id(optimizer), None)):
        mode, rule = found
        mode.rule = rule


def _count_unseen(optimizer: Optimizer) -> None:
    # whether others write through torch nobody knows; a step that torch has counted too is one step all the same
    foreign = not type(optimizer).__module__.startswith(("torch.", "mpkit."))
    for group in optimizer.param_groups:
        if foreign or group.get("fused"):
            for p in group["params"]:
                if id(p) in _unseen and p.grad is not None:
                    _unseen[id(p)] += 1
