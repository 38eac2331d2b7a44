"""What a recorder holds: rows of named values, on their device until many are copied to the host at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLUSH = 512  # rows that stay on the device before they are copied to the host
Block = dict[str, np.ndarray]


class Columns:
    """Named columns that grow by a row, each row with its `step`."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self._done: list[Block] = []

    def pack(self, block: Block) -> Block:
        """Make smaller what is on the host."""
        return block

    def append(self, row: dict[str, Any]) -> None:
        """A row of numbers, arrays, tensors, and functions that will tell one of these."""
        if len(self.waiting) >= FLUSH:
            self.blocks()
        self.waiting.append(row)

    def blocks(self) -> list[Block]:
        """All rows, a few hundred in each block, as arrays on the host."""
        if self.waiting:
            columns = {name: _host([row[name] for row in self.waiting]) for name in self.waiting[0]}
            self._done.append(self.pack(columns))
            self.waiting.clear()
        return self._done

    def forget(self, step: int) -> None:
        """Drop the rows of that step and later ones."""
        self._done = [{name: c[block["step"] < step] for name, c in block.items()} for block in self.blocks()]

    def joined(self, names: Sequence[str]) -> Block:
        """Each of these columns in one piece."""
        blocks = self.blocks()
        return {name: np.concatenate([block[name] for block in blocks]) if blocks else np.zeros(0) for name in names}


def kept(value: Any) -> Any:
    """A value as it is now: of a tensor on the CPU its number, of one on a GPU a copy that stays there."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().reshape(()).clone()


def _host(values: list[Any]) -> np.ndarray:
    """(N, *) on the host, of values (*): tensors with one transfer."""
    values = [value() if callable(value) else value for value in values]
    if not all(isinstance(value, Tensor) for value in values):  # numbers, and a few tensors among them
        return np.array([kept(value) if isinstance(value, Tensor) else value for value in values])
    whole = torch.stack([value.double() if value.is_floating_point() else value for value in values])
    return np.asarray(whole.numpy(force=True))
