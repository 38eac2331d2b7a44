"""A checkpoint file: whole or not there, and of this very network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mpkit.files import read_tensors, write_whole

PLAIN = (bool, int, float, complex, str, bytes, set, type(None), torch.dtype, torch.device, torch.Size)


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Write `state` beside `path`, then put it in place at once: a kill leaves the old or the new file.

    Raises:  TypeError for what `load_whole`, which runs nothing, could not read again: nothing is written then.
    """
    for leaf in tree_leaves(state):
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN:
            raise TypeError(
                f"a {type(leaf).__name__} is in no checkpoint, since reading one runs nothing; have state_dict() of "
                "the hook or callback give it as Python's numbers, text, tensors, lists and dicts"
            )
    write_whole(path, lambda file: torch.save(state, file))


def load_whole(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save_whole` wrote for a `Model`. Raises FileNotFoundError; ValueError for any other file."""
    state = read_tensors(path, device)
    if not isinstance(state, dict) or not {"train_network", "progress"} <= state.keys():
        raise ValueError(f"{path} was not written by Model.save; load weights alone with network.load_state_dict(...)")
    return state


def need_same_tensors(saved: dict[str, Any], own: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """ValueError unless both states have entries of the same names, and the same shapes where these are tensors."""
    for name in sorted({*saved, *own}):
        theirs, ours = (_shape(state[name]) if name in state else "missing" for state in (saved, own))
        if theirs != ours:
            whose = f"{path} belongs to another network or train cell: {name!r} is {theirs} there and {ours} here"
            raise ValueError(f"{whose}; build the model as it was saved")


def _shape(entry: object) -> object:
    return tuple(entry.shape) if isinstance(entry, torch.Tensor) else "no tensor"
