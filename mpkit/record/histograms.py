"""Exponent histograms of named tensors: of the step that runs, added up as they come, and a row for each before it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from mpkit.record.columns import Block, Columns
from mpkit.record.counts import FIELDS, exponent_counts
from mpkit.record.ranges import LOWEST, Ranges

Part = tuple[Tensor, Tensor, Tensor, int]  # counts (256,) int64, zeros (), largest (), how many values they describe


class Histograms(Columns):
    """Rows of histograms of the tensors of these names."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.now: dict[str, Part] = {}

    def add(self, name: str, values: Tensor, factor: float | Tensor | None = None, size: int | None = None) -> None:
        """Count values times a factor, of `size` values in all: what is not stored is zero."""
        size, values = values.numel() if size is None else size, values.float()
        counts, zeros, largest = exponent_counts(values if factor is None else values * factor)
        zeros = zeros + (size - values.numel())
        if name in self.now:
            before = self.now[name]
            counts, zeros, size = counts + before[0], zeros + before[1], size + before[3]
            largest = torch.maximum(largest, before[2])
        self.now[name] = counts, zeros, largest, size

    def end_step(self, step: int) -> None:
        """Make a row of what was counted, with nothing for a tensor that did not occur; no row where none did."""
        if self.now:
            counts, zeros, largest, _ = next(iter(self.now.values()))
            nothing = torch.zeros_like(counts), torch.zeros_like(zeros), torch.zeros_like(largest), 0
            *columns, sizes = zip(*(self.now.get(name, nothing) for name in self.names))
            counts, zeros, largest = map(torch.stack, columns)
            row = {"counts": counts.int(), "zeros": zeros, "largest": largest}
            self.append({"step": step, "size": np.array(sizes), **row})
        self.now = {}

    def pack(self, block: Block) -> Block:
        """Counts of the powers of two that occur, from the lowest on, and what is not finite apart."""
        counts = block.pop("counts")
        occupied = np.flatnonzero(counts[:, :, : FIELDS - 1].any(axis=(0, 1)))
        first, end = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 128)
        lowest = np.full(len(counts), first - 1 + LOWEST)
        nonfinite = counts[:, :, FIELDS - 1].astype(np.int64)
        return {**block, "counts": counts[:, :, first:end].astype(np.uint32), "nonfinite": nonfinite, "lowest": lowest}

    def ranges(self) -> Ranges:
        """All rows (reads the device)."""
        parts = []
        for block in self.blocks():
            if len(block["step"]):
                rows = {name: column for name, column in block.items() if name not in ("size", "lowest")}
                size = block["size"].max(axis=0)
                parts.append(Ranges(names=self.names, size=size, lowest=int(block["lowest"][0]), **rows))
        return Ranges.chained(parts) if parts else Ranges.empty(self.names)
