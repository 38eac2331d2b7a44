"""A vector of policies is a policy whose fields are tensors: what both kinds of policies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from mpkit.device import as_device

Value = Any  # a Python number, or a tensor of them: one rule serves both
Policy = TypeVar("Policy", bound="Vector")


class Vector:
    """A frozen dataclass of numbers, or of (n,) tensors where the policies of a vector differ."""

    name: str

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash((self.name, self.shape))

    @property
    def shape(self) -> torch.Size:
        """() for one policy, (n,) for a vector of n."""
        sizes = [value.shape for value in self.tensors().values()]
        return torch.broadcast_shapes(*sizes) if sizes else torch.Size()

    def to(self, device: torch.device | str) -> Self:
        """The same vector of policies with its numbers on `device`; a single policy has nothing to move."""
        return replace(self, **{key: value.to(device) for key, value in self.tensors().items()})  # type: ignore[type-var]

    def __getitem__(self, index: int) -> Self:
        """One policy of a vector, as Python numbers."""
        if not self.shape:
            raise TypeError("this is one policy, not a vector of them; make a vector by stacking a list of them")
        picked: dict[str, Any] = {key: value.expand(self.shape)[index].item() for key, value in self.tensors().items()}
        return replace(self, **picked, **({"layers": ()} if hasattr(self, "layers") else {}))  # type: ignore[type-var]

    def tensors(self) -> dict[str, Tensor]:
        """The fields in which the policies of a vector differ."""
        return {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def stacked(rows: Sequence[Policy], spread: str, device: torch.device | str) -> Policy:
    """Single policies -> a vector: tensors where they differ, numbers where all agree, `spread` always a tensor."""
    device = as_device(device)
    columns: dict[str, Any] = {}
    for field in fields(rows[0]):  # type: ignore[arg-type]
        values = [getattr(row, field.name) for row in rows]
        if field.name == "name":
            columns["name"] = values[0] if len(set(values)) == 1 else "stack"
        elif field.name != "layers":
            columns[field.name] = _column(values, device)
    if not any(isinstance(value, Tensor) for value in columns.values()):
        kind = torch.float64 if spread == "init_scale" else torch.float32
        columns[spread] = torch.full((len(rows),), float(getattr(rows[0], spread)), dtype=kind, device=device)
    return type(rows[0])(**columns)


def _column(values: Sequence[Value], device: torch.device) -> Value:
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], bool):
        return torch.tensor(values, device=device)
    whole = all(isinstance(value, int) for value in values)
    return torch.tensor(values, dtype=torch.int64 if whole else torch.float64, device=device)
