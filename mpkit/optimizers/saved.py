"""Whether a saved state belongs to an optimizer: known before anything is loaded, not by a crash some steps later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_kind

FREE = frozenset({"params", "param_names", "lr", "weight_decay"})  # may be there or not: schedules are not saved
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})


def check_saved(optimizer: Optimizer, saved: Any, *, whole: bool = False) -> None:
    """Raise TypeError or ValueError unless `saved` is what an optimizer of this kind, with as many groups, gives.

    Kinds are told apart by the hyper-parameters of their groups. With `whole` none may be missing either (torch fills
    in what an older version did not have).
    """
    name, groups = type(optimizer).__name__, optimizer.param_groups
    shape = {"state": {}, "param_groups": [{"params": [None] * len(group["params"])} for group in groups]}
    check_alike(f"the state of {name}", saved, shape)
    for i, (there, here) in enumerate(zip(saved["param_groups"], groups)):
        own = {key: None if callable(x) else x for key, x in here.items() if key not in FREE | SCHEDULED}
        if strange := sorted(there.keys() - own.keys() - FREE - SCHEDULED):
            raise ValueError(f"the saved optimizer is another one than this {name}: it has {', '.join(strange)}")
        # a number may have become a tensor, or the other way round: a counter on the device, a rate for torch.compile
        free = {key for key, x in own.items() if isinstance(x, Tensor) or isinstance(there.get(key), Tensor)}
        asked = {key: None if key in free else x for key, x in own.items() if whole or key in there}
        check_alike(f"param_groups[{i}]", there, asked)
    for key, held in saved["state"].items():
        check_kind(f"state[{key!r}]", held, Mapping, "a dict, as state_dict() gave it")


def check_state(optimizer: Optimizer, saved: object) -> None:
    """Raise TypeError or ValueError unless an optimizer, asked itself if it can be, takes `saved` over."""
    getattr(type(optimizer), "check_state", check_saved)(optimizer, saved)


def kinds_of(optimizer: Optimizer) -> list[str]:
    """The class of an optimizer and its bases down to torch's, by their names; then those of the one inside it."""
    own = [cls.__name__ for cls in type(optimizer).__mro__ if issubclass(cls, Optimizer) and cls is not Optimizer]
    inside = vars(optimizer).get("optimizer")
    return [" ".join(own), *(kinds_of(inside) if isinstance(inside, Optimizer) else [])]


def check_kinds(optimizer: Optimizer, saved: list[str]) -> None:
    """Raise ValueError if a state is that of another rule, though its groups and tensors are the same: Momentum, LARS.

    One class may be a base of the other. `saved` is what `kinds_of` gave.
    """
    check_kind("kinds", saved, (list, tuple), "a list of names, as it was saved")
    for kind in saved:
        check_kind("each of kinds", kind, str, "the names of a class and its bases, as they were saved")
    theirs, ours = ([kind.split() for kind in kinds] for kinds in (saved, kinds_of(optimizer)))
    if len(theirs) != len(ours) or not all(a[:1] == b[:1] or a[0] in b or b[0] in a for a, b in zip(theirs, ours)):
        names = [" of ".join(kind[0] for kind in kinds) for kinds in (theirs, ours)]
        raise ValueError(f"the saved optimizer is a {names[0]}, this one a {names[1]}; build the one that was saved")
