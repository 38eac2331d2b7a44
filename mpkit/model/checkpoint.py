"""A checkpoint file: whole or not there, and of this very network."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mpkit.files import drafts_of, read_tensors, write_tensors


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Write `state` beside `path`, then put it in place at once: a kill leaves the old or the new file.

    What killed processes left half-written beside it is removed once nobody has written to it for an hour.
    """
    for stale in drafts_of(path):
        with suppress(FileNotFoundError):
            if time.time() - stale.stat().st_mtime > 3600:
                stale.unlink()
    write_tensors(path, state)


def load_whole(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save_whole` wrote for a `Model`. Raises FileNotFoundError; ValueError for any other file."""
    state = read_tensors(path, device)
    if not isinstance(state, dict) or not {"train_network", "progress"} <= state.keys():
        raise ValueError(f"{path} was not written by Model.save; load weights alone with network.load_state_dict(...)")
    return state


def need_same_tensors(saved: dict[str, Any], own: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """ValueError unless both states have entries of the same names, and the same shapes where these are tensors."""

    def shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...] | str]:
        return {name: tuple(v.shape) if isinstance(v, torch.Tensor) else "no tensor" for name, v in state.items()}

    theirs, ours = shapes(saved), shapes(own)
    differ = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    if differ:
        name = differ[0]
        raise ValueError(
            f"{path} belongs to another network or train cell: {name!r} is {theirs.get(name, 'missing')} there and "
            f"{ours.get(name, 'missing')} here ({len(differ)} entries differ); build the model as it was saved"
        )
