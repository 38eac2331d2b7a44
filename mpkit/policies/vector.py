"""What policies are made of: numbers of declared kinds, or, in a vector of policies, tensors where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, Self, TypeVar

import torch
from torch import Tensor

from mpkit.arguments import Checked, check_flag, check_kind, check_number
from mpkit.device import as_device

Value = Any  # a Python number, or a tensor of them: one rule serves both
Policy = TypeVar("Policy", bound="Vector")

NEVER = 2**62
"""A count that is not reached."""


def steps(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> int:
    """A whole number of steps; what no training reaches is one number, that a counter of 64 bits compares with."""
    check_number(name, value, low=low, high=high, closed_high=True)
    if math.isfinite(value) and value != int(value):
        raise ValueError(f"{name} counts steps and must be whole, got {value!r}")
    return int(max(-NEVER, min(value, NEVER)))


def _bits(name: str, value: Any) -> int:
    if value not in (16, 32, 64):
        raise ValueError(f"{name} must be 16, 32 or 64, got {value!r}")
    return int(value)


Flag = Annotated[Value, check_flag]
Real = Annotated[Value, partial(check_number, low=-math.inf, closed_high=True)]
Scale = Annotated[Value, partial(check_number, closed_high=True)]
Divisor = Annotated[Value, partial(check_number, open_low=True, closed_high=True)]
Steps = Annotated[Value, steps]
Whole = Annotated[Value, partial(steps, low=0)]
Bits = Annotated[Value, _bits]
Names = Annotated[tuple[str, ...], lambda name, value: tuple(value)]
First = Annotated[Value, partial(steps, low=-NEVER, high=NEVER)]  # what is counted from, where others are counted to


class Vector(Checked):
    """A frozen dataclass of numbers, or of (n,) tensors where the policies of a vector differ."""

    unchecked = (Tensor,)
    name: str

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.plain() == other.plain()

    def __hash__(self) -> int:
        return hash((self.name, self.shape))

    @property
    def shape(self) -> torch.Size:
        """() for one policy, (n,) for a vector of n."""
        # torch.broadcast_shapes would import sympy, which takes half a second
        return torch.broadcast_tensors(torch.empty(()), *self.tensors().values())[0].shape

    def to(self, device: torch.device | str) -> Self:
        """The same vector of policies with its numbers on `device`; a single policy has nothing to move."""
        return replace(self, **{key: value.to(device) for key, value in self.tensors().items()})  # type: ignore[type-var]

    def __getitem__(self, index: int) -> Self:
        """One policy of a vector, as Python numbers."""
        if not self.shape:
            raise TypeError("this is one policy, not a vector of them; make a vector by stacking a list of them")
        picked: dict[str, Any] = {key: value.expand(self.shape)[index].item() for key, value in self.tensors().items()}
        return replace(self, **picked, **({"layers": ()} if hasattr(self, "layers") else {}))  # type: ignore[type-var]

    def plain(self) -> dict[str, Any]:
        """Every field as a number or a list of them."""
        return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(self).items()}

    def tensors(self) -> dict[str, Tensor]:
        """The fields in which the policies of a vector differ."""
        return {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}


def stacked(kind: type[Policy], policies: Iterable[Policy], spread: str, device: torch.device | str) -> Policy:
    """Single policies -> a vector: tensors where they differ, numbers where all agree; `spread` is always a tensor."""
    check_kind("policies", policies, Iterable, f"a list of {kind.__name__} objects")
    rows, device = list(policies), as_device(device)
    if not rows:
        raise ValueError(f"a vector needs at least one {kind.__name__}, got none")
    for row in rows:
        if not isinstance(row, kind) or row.shape:
            raise TypeError(f"a vector is made of single {kind.__name__} objects, got {row!r:.200}")
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(kind)}  # type: ignore[arg-type]
    names, _ = columns.pop("name"), columns.pop("layers", None)
    alike = {key: values[0] for key, values in columns.items() if len(set(values)) == 1 and key != spread}
    made = {key: alike[key] if key in alike else _column(values, device) for key, values in columns.items()}
    return kind(**{**made, "name": names[0] if len(set(names)) == 1 else "stack"})


def _column(values: Sequence[Value], device: torch.device) -> Tensor:
    kind = torch.bool if isinstance(values[0], bool) else torch.float64
    return torch.tensor(values, dtype=torch.int64 if all(type(x) is int for x in values) else kind, device=device)
