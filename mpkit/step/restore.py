"""All or nothing: several objects take over a saved state together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.optimizers.saved import check_saved


def load_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """`part.load_state_dict(saved)` for each (part, saved); when one refuses, all are as they were.

    Optimizers are asked before anything is loaded. What a hook or scaler of somebody else's takes nobody knows before.
    Raises:  ValueError for the state of another kind of optimizer, and what the parts raise.
    """
    for part, saved in pairs:
        if isinstance(part, Optimizer) and "param_groups" in part.state_dict():
            check_saved(part, saved)
    done: list[tuple[Any, Any]] = []
    try:
        for part, saved in pairs:
            before = part.state_dict()
            if isinstance(part, nn.Module):  # which loads into the very tensors that its state names
                before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in before.items()}
            done.append((part, before))
            part.load_state_dict(saved)
    except BaseException:
        for part, before in done:
            part.load_state_dict(before)
        raise
