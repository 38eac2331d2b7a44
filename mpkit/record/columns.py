"""What a recorder holds: rows of named values, on their device until many are copied to the host at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpkit.record.counts import FIELDS
from mpkit.record.ranges import LOWEST, Ranges

FLUSH = 512  # rows that stay on the device before they are copied to the host
Block = dict[str, np.ndarray]


class Columns:
    """Named columns that grow by a row, each row with its `step`.

    Args:    pack: makes smaller what goes to the host.
    """

    def __init__(self, pack: Callable[[Block], Block] = dict) -> None:
        self.waiting: list[dict[str, Any]] = []
        self._done: list[Block] = []
        self._pack = pack

    def append(self, row: Mapping[str, Any]) -> None:
        """A row of numbers, arrays and tensors."""
        if len(self.waiting) >= FLUSH:
            self.blocks()
        self.waiting.append(dict(row))

    def blocks(self) -> list[Block]:
        """All rows, a few hundred in each block, as arrays on the host."""
        if self.waiting:
            columns = {name: _host([row[name] for row in self.waiting]) for name in self.waiting[0]}
            self._done.append(self._pack(columns))
            self.waiting.clear()
        return self._done

    def forget(self, step: int) -> None:
        """Drop the rows of that step and later ones."""
        self._done = [{name: c[block["step"] < step] for name, c in block.items()} for block in self.blocks()]

    def joined(self, names: Sequence[str]) -> Block:
        """Each of these columns in one piece."""
        blocks = self.blocks()
        return {name: np.concatenate([block[name] for block in blocks]) if blocks else np.zeros(0) for name in names}


class Part(NamedTuple):
    """The histogram of a tensor: counts (256,) int64, zeros (), largest (), and how many values they describe."""

    counts: Tensor
    zeros: Tensor
    largest: Tensor
    size: int

    def __add__(self, other: Part) -> Part:  # type: ignore[override]
        """The histogram of both tensors together."""
        largest = torch.maximum(self.largest, other.largest)
        return Part(self.counts + other.counts, self.zeros + other.zeros, largest, self.size + other.size)


def histogram_row(step: int, parts: Sequence[Part | None]) -> dict[str, Any] | None:
    """A row for `Columns(trimmed)` of histograms, None for a tensor that did not occur; None where none did."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    nothing = Part(torch.zeros_like(like.counts), torch.zeros_like(like.zeros), torch.zeros_like(like.largest), 0)
    counts, zeros, largest, sizes = zip(*(nothing if part is None else part for part in parts))
    stacked = {"counts": torch.stack(counts).int(), "zeros": torch.stack(zeros), "largest": torch.stack(largest)}
    return {"step": step, "size": np.array(sizes), **stacked}


def trimmed(block: Block) -> Block:
    """Counts of the powers of two that occur, from the lowest on, and what is not finite apart."""
    counts = block.pop("counts")
    occupied = np.flatnonzero(counts[:, :, : FIELDS - 1].any(axis=(0, 1)))
    first, end = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 128)
    lowest = np.full(len(counts), first - 1 + LOWEST)
    nonfinite = counts[:, :, FIELDS - 1].astype(np.int64)
    return {**block, "counts": counts[:, :, first:end].astype(np.uint32), "nonfinite": nonfinite, "lowest": lowest}


def ranges_of(names: tuple[str, ...], columns: Columns) -> Ranges:
    """The rows of `Columns(trimmed)` of the tensors of these names."""
    parts = []
    for block in columns.blocks():
        if len(block["step"]):
            rows = {name: column for name, column in block.items() if name not in ("size", "lowest")}
            size = block["size"].max(axis=0)
            parts.append(Ranges(names=names, size=size, lowest=int(block["lowest"][0]), **rows))
    return Ranges.chained(parts) if parts else Ranges.empty(names)


def kept(value: Any) -> float | Tensor:
    """A number as it is now: of a tensor on a GPU a copy that stays there."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().reshape(())
    if value.device.type != "cpu":
        return value.clone()
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy().item()


def _host(values: list[Any]) -> np.ndarray:
    """(N, *) on the host, of values (*), with one transfer for each kind of tensor."""
    values = [value() if callable(value) else value for value in values]
    kinds: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            kinds.setdefault((value.dtype, value.device), []).append(i)
    for (dtype, _), places in kinds.items():
        stacked = torch.stack([values[i] for i in places])
        for i, value in zip(places, (stacked.double() if dtype.is_floating_point else stacked).numpy(force=True)):
            values[i] = value
    return np.array(values)
