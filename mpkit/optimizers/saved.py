"""Whether a saved state belongs to an optimizer: known before anything is loaded, not by a crash some steps later."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpkit.arguments import check_alike, check_kind, is_number

FREE = frozenset({"params", "param_names", "lr", "weight_decay"})  # may be there or not: schedules are not saved
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})


def check_saved(optimizer: torch.optim.Optimizer, saved: object, *, whole: bool = False) -> None:
    """Raise ValueError unless `saved` is what an optimizer of this kind, with as many groups, gives as its state.

    Kinds are told apart by the hyper-parameters of their groups. With `whole` none may be missing either (torch fills
    in what an older version did not have).
    """
    name = type(optimizer).__name__
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError(f"{name} needs what state_dict() of an optimizer gave, got {saved!r:.60}")
    theirs, ours = saved["param_groups"], optimizer.param_groups
    check_kind("state", saved["state"], Mapping, "a dict, as state_dict() gave it")
    check_kind("param_groups", theirs, (list, tuple), "a list of groups, as state_dict() gave it")
    for i, group in enumerate(theirs):
        check_alike(f"param_groups[{i}]", group, {"params": None})
        check_kind(f"params of param_groups[{i}]", group["params"], (list, tuple), "a list")
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the saved optimizer has groups of {sizes[0]} parameters, this {name} of {sizes[1]}; build it as it was"
        )
    for there, here in zip(theirs, ours):
        strange = sorted(there.keys() - here.keys() - FREE - SCHEDULED)
        missing = sorted(here.keys() - there.keys() - FREE - SCHEDULED) if whole else []
        if strange or missing:
            what = f"has {', '.join(strange)}" if strange else f"lacks {', '.join(missing)}"
            raise ValueError(
                f"the saved optimizer is another one than this {name}: it {what}; build the optimizer that was saved"
            )
        for key in there.keys() & here.keys() - {"params", "param_names"}:
            _check_hyper(key, there[key], here[key])
    for key, held in saved["state"].items():
        check_kind(f"state[{key!r}]", held, Mapping, "a dict, as state_dict() gave it")


def check_state(optimizer: torch.optim.Optimizer, saved: object) -> None:
    """Raise TypeError or ValueError unless an optimizer, asked itself if it can be, takes `saved` over."""
    getattr(type(optimizer), "check_state", check_saved)(optimizer, saved)


def kinds_of(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The class of an optimizer, and those of the optimizers inside it, each with its bases down to torch's."""
    own = [cls.__name__ for cls in type(optimizer).__mro__ if cls is not torch.optim.Optimizer and cls is not object]
    held = vars(optimizer)
    inside = held.get("optimizer", held.get("inner"))
    return [own, *(kinds_of(inside) if isinstance(inside, torch.optim.Optimizer) else [])]


def check_kinds(optimizer: torch.optim.Optimizer, saved: list[list[str]] | None) -> None:
    """Raise ValueError if a state is that of another rule, though its groups and tensors are the same: Momentum, LARS.

    One class may be a base of the other. `saved` is what `kinds_of` gave; None, in states of older versions, is any.
    """
    if saved is None:
        return
    own = kinds_of(optimizer)
    check_kind("kinds", saved, (list, tuple), "a list of lists of names, as it was saved")
    for kind in saved:
        check_kind("each of kinds", kind, (list, tuple), "a list of names, as it was saved")
        for name in kind:
            check_kind("each of kinds' names", name, str, "the name of a class")
        if not kind:
            raise ValueError("each of kinds needs the name of a class, got an empty list")
    names = [" of ".join(str(kind[0]) for kind in kinds) for kinds in (saved, own)]
    alike = len(saved) == len(own) and all(a[0] in b or b[0] in a for a, b in zip(saved, own))
    if not alike:
        raise ValueError(f"the saved optimizer is a {names[0]}, this one a {names[1]}; build the one that was saved")


def _check_hyper(key: str, saved: object, own: object) -> None:
    """A number may have become a tensor, or the other way round: a counter on the device, a rate for torch.compile."""
    plain = is_number(own) or (isinstance(own, torch.Tensor) and not own.dim())
    if not plain:
        own = None if isinstance(own, torch.Tensor) or callable(own) else own
        check_alike(key, saved, own)
    elif not (is_number(saved) or isinstance(saved, torch.Tensor)):
        raise TypeError(f"{key} must be a number, as it was saved, got {saved!r:.60}")
