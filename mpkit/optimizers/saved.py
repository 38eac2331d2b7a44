"""Whether a saved state belongs to an optimizer: known before anything is loaded, not by a crash some steps later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FREE = frozenset({"params", "param_names", "lr", "weight_decay"})  # may be there or not: schedules are not saved
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})


def check_saved(optimizer: torch.optim.Optimizer, saved: Any, *, whole: bool = False) -> None:
    """Raise ValueError unless `saved` is what an optimizer of this kind, with as many groups, gives as its state.

    Kinds are told apart by the hyper-parameters of their groups. With `whole` none may be missing either (torch fills
    in what an older version did not have).
    """
    name = type(optimizer).__name__
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError(f"{name} needs what state_dict() of an optimizer gave, got {saved!r:.60}")
    theirs, ours = saved["param_groups"], optimizer.param_groups
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
