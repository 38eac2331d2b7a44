"""What a recorder holds: rows on the device, copied to the host now and then."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.record.counts import FIELDS
from mpkit.record.trace import LOWEST, Ranges

FLUSH = 512  # steps and recorded rows kept on the device before they are copied to the host in one transfer

Part = tuple[Any, Any, Any, int]
"""Counts (256,), zeros (), largest (), and how many values they describe: numpy's on the CPU, else tensors."""


class Table:
    """What is recorded in every step: numbers, and tensors that stay on their device for up to 512 steps."""

    names = ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds")

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, ...]] = []
        self.done: list[np.ndarray] = [np.zeros((0, len(self.names)))]

    def append(self, row: tuple[Any, ...]) -> None:
        if len(self.waiting) >= FLUSH:
            self._flush()
        self.waiting.append(row)

    def settle(self, step: int, overflow: object) -> None:
        """Write down the outcome of the last step where it is only noted where to look for it."""
        if self.waiting and self.waiting[-1][0] == step and isinstance(self.waiting[-1][3], dict):
            row = self.waiting[-1]
            self.waiting[-1] = (*row[:3], overflow, *row[4:])

    def _flush(self) -> None:
        self.waiting = [(*row[:3], noted(row[3]), *row[4:]) for row in self.waiting]
        self.done.append(_host([v for row in self.waiting for v in row]).reshape(-1, len(self.names)))
        self.waiting.clear()

    def forget(self, step: int) -> None:
        """Drop that step and later ones."""
        self._flush()
        self.done = [block[block[:, 0] < step] for block in self.done]

    def columns(self) -> dict[str, np.ndarray]:
        self._flush()
        self.done = [np.concatenate(self.done)]
        columns = dict(zip(self.names, self.done[0].T.copy()))
        return columns | {"step": columns["step"].astype(np.int64), "overflow": columns["overflow"].astype(bool)}


class Rows:
    """Histograms of named tensors, row after row: first on the device, later as arrays on the host."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.size = np.zeros(len(names), dtype=np.int64)
        self.steps: list[int] = []
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.done: list[Ranges] = []

    def append(self, step: int, parts: list[Part | None]) -> None:
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return
        nothing = None if None not in parts else (like[0] * 0, like[1] * 0, like[0][0] * 0.0, 0)
        counts, zeros, largest, sizes = zip(*(nothing if part is None else part for part in parts))
        self.size = np.maximum(self.size, sizes)
        self.steps.append(step)
        if isinstance(like[0], Tensor):
            self.waiting.append((torch.stack(counts).int(), torch.stack(zeros), torch.stack(largest)))
        else:
            self.waiting.append((np.stack(counts).astype(np.uint32), np.array(zeros), np.array(largest, np.float32)))
        if len(self.waiting) >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        if not self.waiting:
            return
        counts, zeros, largest = (
            torch.stack(column).cpu().numpy() if isinstance(column[0], Tensor) else np.stack(column)
            for column in zip(*self.waiting)
        )
        occupied = np.flatnonzero(counts[:, :, : FIELDS - 1].any(axis=(0, 1)))
        first, end = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 128)
        self.done.append(
            Ranges(
                names=self.names,
                size=self.size.copy(),
                step=np.array(self.steps, dtype=np.int64),
                lowest=first - 1 + LOWEST,
                counts=counts[:, :, first:end].astype(np.uint32),
                zeros=zeros.astype(np.int64),
                nonfinite=counts[:, :, FIELDS - 1].astype(np.int64),
                largest=largest.astype(np.float32),
            )
        )
        self.waiting.clear()
        self.steps.clear()

    def forget(self, step: int) -> None:
        """Drop that step and later ones."""
        self._flush()
        self.done = [block._rows(block.step < step) for block in self.done]

    def ranges(self) -> Ranges:
        self._flush()
        return Ranges.chained(self.done) if self.done else Ranges.empty(self.names)


def added(parts: list[Part]) -> Part | None:
    """The histogram of several tensors together; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counts, zeros, largest, sizes = zip(*parts)
    larger = torch.maximum if isinstance(largest[0], Tensor) else np.maximum
    return sum(counts), sum(zeros), reduce(larger, largest), sum(sizes)


def moved(part: Part, device: torch.device) -> Part:
    """A saved part as parts are on that device."""
    counts, zeros, largest, size = part
    if device.type == "cpu":
        return counts.numpy(force=True), zeros, np.float32(largest), size
    return (
        counts.to(device),
        torch.tensor(zeros, device=device),
        torch.tensor(largest, dtype=torch.float32, device=device),
        size,
    )


def kept(value: Any) -> float | Tensor:
    """A number as it is now: of a tensor on a GPU a copy that stays there."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        return value.detach().clone()
    value = value.detach()
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy().item()


def noted(value: object) -> Any:
    """An overflow, read from where the GradScaler noted it; a step that it never took had none."""
    if not isinstance(value, dict):
        return value
    found = list(value["found_inf_per_device"].values())
    return kept(sum(f.to(found[0].device) for f in found[1:]) + found[0] if found[1:] else found[0]) if found else 0.0


def _host(values: list[Any]) -> np.ndarray:
    """(N,) float64 from numbers and tensors of one element, with one transfer per kind of tensor."""
    kinds: dict[Any, list[int]] = {}
    for i, v in enumerate(values):
        if isinstance(v, Tensor):
            kinds.setdefault((v.dtype, v.device), []).append(i)
    found = np.array([0.0 if isinstance(v, Tensor) else v for v in values] if kinds else values, dtype=np.float64)
    for places in kinds.values():
        found[places] = torch.stack([values[i].reshape(()) for i in places]).double().numpy(force=True)
    return found
