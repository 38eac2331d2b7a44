"""A checkpoint file: whole or not there, and of this very network."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpkit.files import read_tensors, write_tensors


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Write `state` beside `path`, then put it in place at once: a kill leaves the old or the new file.

    NumPy's numbers are written as Python's.
    Raises:  TypeError for what `load_whole`, which runs nothing, could not read again: nothing is written then.
    """
    write_tensors(path, {key: _readable(item, key) for key, item in state.items()})


AS_THEY_ARE = (bool, int, float, complex, str, bytes, set, type(None), torch.dtype, torch.device, torch.Size)


def _readable(value: object, name: str) -> object:
    """`value` with Python's numbers in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in AS_THEY_ARE or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_readable(item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict) and type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value):
        plain = copy.copy(value)  # with what a state_dict carries beside its entries
        plain.update({key: _readable(item, f"{name}[{key!r}]") for key, item in value.items()})
        return plain
    raise TypeError(
        f"{name} is a {type(value).__name__}, which is in no checkpoint, since reading one runs nothing; have "
        "state_dict() give it as numbers, text, tensors, lists and dicts"
    )


def load_whole(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save_whole` wrote for a `Model`. Raises FileNotFoundError; ValueError for any other file."""
    state = read_tensors(path, device)
    if not isinstance(state, dict) or not {"train_network", "progress"} <= state.keys():
        raise ValueError(f"{path} was not written by Model.save; load weights alone with network.load_state_dict(...)")
    return state


def need_same_tensors(saved: dict[str, Any], own: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """ValueError unless both states have entries of the same names, and the same shapes where these are tensors."""

    theirs, ours = (
        {name: tuple(v.shape) if isinstance(v, torch.Tensor) else "no tensor" for name, v in state.items()}
        for state in (saved, own)
    )
    differ = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    if differ:
        name = differ[0]
        raise ValueError(
            f"{path} belongs to another network or train cell: {name!r} is {theirs.get(name, 'missing')} there and "
            f"{ours.get(name, 'missing')} here ({len(differ)} entries differ); build the model as it was saved"
        )
