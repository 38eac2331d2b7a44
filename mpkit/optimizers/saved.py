"""Whether a saved state belongs to an optimizer: known before anything is loaded, not by a crash some steps later."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_kind

FREE = frozenset({"params", "param_names", "lr", "weight_decay"}) | {  # may be there or not: schedules are not saved
    *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # and torch's leave their marks
}
BASES = ("Optimizer", "Grouped", "Wrapper", "Betas")


def check_saved(optimizer: Optimizer, saved: Any, *, whole: bool = False) -> None:
    """Raise TypeError or ValueError unless `saved` is what an optimizer of this kind, with as many groups, gives.

    Kinds are told apart by the hyper-parameters of their groups. With `whole` none may be missing either (torch fills
    in what an older version did not have).
    """
    name, groups = type(optimizer).__name__, optimizer.param_groups
    shape = {"state": {}, "param_groups": [{"params": [None] * len(group["params"])} for group in groups]}
    check_alike(f"the state of {name}", saved, shape)
    for i, (there, here) in enumerate(zip(saved["param_groups"], groups)):
        if strange := sorted(there.keys() - here.keys() - FREE):
            raise ValueError(f"the saved optimizer is another one than this {name}: it has {', '.join(strange)}")
        # a number may have become a tensor, or the other way round: a counter on the device, a rate for torch.compile
        asked = {key: x for key, x in here.items() if key not in FREE and (whole or key in there)}
        free = [key for key, x in asked.items() if isinstance(x, Tensor) or isinstance(there.get(key), Tensor)]
        check_alike(f"param_groups[{i}]", there, asked | dict.fromkeys(free))
    for key, held in saved["state"].items():
        check_kind(f"state[{key!r}]", held, Mapping, "a dict, as state_dict() gave it")


def check_state(optimizer: Optimizer, saved: object) -> None:
    """Raise TypeError or ValueError unless an optimizer, asked itself if it can be, takes `saved` over."""
    getattr(optimizer, "check_state", partial(check_saved, optimizer))(saved)


def rule_of(optimizer: Optimizer) -> str:
    """What an optimizer computes, by the name of its class (a user's subclass has that of its base) and what it wraps.

    Momentum and LARS have the same groups and the same tensors.
    """
    kinds = [cls.__name__ for cls in type(optimizer).__mro__ if issubclass(cls, Optimizer)]
    inside = vars(optimizer).get("optimizer")
    own = [kind for kind in kinds if kind not in BASES][-1]
    return f"{own} of {rule_of(inside)}" if isinstance(inside, Optimizer) else own


def check_rule(optimizer: Optimizer, saved: object) -> None:
    """Raise ValueError for the state of another rule than this one; `saved` is what `rule_of` gave."""
    if saved != (own := rule_of(optimizer)):
        raise ValueError(f"the saved optimizer is a {saved}, this one a {own}; build the one that was saved")
