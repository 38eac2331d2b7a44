"""How many values of a tensor lie in each power of two: now, added up as they come, and row by row."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_kind
from mpkit.casting.low import values_of
from mpkit.record.columns import Block, Columns
from mpkit.record.ranges import LOWEST, Ranges

FIELDS = 256  # exponent fields of float32: 0 holds zeros and subnormals, 255 holds inf and NaN
_SAFE = 1e-15, 1e15  # norms whose squares float32 adds up without overflow or loss


def exponent_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many values of `x` lie in each power of two; on a GPU without a host read.

    Shapes:  x (*) floating -> (256,) int64 counts by exponent field (entry e + 127 counts 2**e <= |x| < 2**(e+1),
             entry 255 inf and NaN, entry 0 nothing), () int64 zeros, () float32 largest magnitude.
    Edges:   |x| < 2**-126, the subnormals of float32, count as zeros; float64 is rounded to float32 first.

    >>> counts, zeros, largest = exponent_counts(torch.tensor([0.0, 1.0, 1.5, -3.0]))
    >>> counts[127:130].tolist(), int(zeros), float(largest)
    ([2, 1, 0], 1, 3.0)
    """
    check_kind("x", x, Tensor, "a tensor")
    flat = x.detach().reshape(-1).to(torch.float32)
    if not flat.numel():
        return flat.new_zeros(FIELDS, dtype=torch.int64), flat.new_zeros((), dtype=torch.int64), flat.new_zeros(())
    fields = (flat.view(torch.int32) >> 23).to(torch.uint8)  # eight bits: the sign is cut off
    if flat.device.type == "cpu":
        counts = torch.bincount(fields, minlength=FIELDS)
    else:
        # bincount would read the length of its result on the host; histc counts in float32: exact up to 2**24
        counts = torch.stack([torch.histc(p.float(), FIELDS, 0, FIELDS).long() for p in fields.split(2**24)]).sum(0)
    zeros = counts[0].clone()
    counts[0] = 0
    low, high = torch.aminmax(flat)
    return counts, zeros, torch.maximum(-low, high).abs()  # of zeros alone it may be -0.0


def real_values(x: Tensor) -> Tensor:
    """The numbers that a float tensor of any layout or format stores; of complex ones both parts."""
    values = values_of(x)
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.resolve_neg()


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """() L2 norm of real tensors together; not finite exactly where a value is not.

    On a GPU float64, on the CPU of float32 sums where those lose nothing.
    """
    tensors = [*tensors]
    # squares of float32 leave its range long before the values do; float64 costs eight times as much on a CPU
    narrow = all(t.device.type == "cpu" and t.dtype != torch.float64 for t in tensors)
    norm = _norm(tensors, torch.float32 if narrow else torch.float64)
    return _norm(tensors, torch.float64) if narrow and not _SAFE[0] < norm.item() < _SAFE[1] else norm


def _norm(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros(())
    same = all(t.dtype == dtype for t in tensors)
    norms = torch._foreach_norm(tensors) if same else torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms)).double()


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
        # what a sparse gradient does not store is zero too
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
