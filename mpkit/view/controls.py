"""Controls: what a reader may set a parameter of a view to, and how the page offers it. Declared as for `interact`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpkit.arguments import is_number


@dataclass(frozen=True)
class Range:
    """A slider with a number box; whole numbers where the default is one. `(low, high)` is short for it.

    Args:
        step:    between the slider's places, which lie at whole steps from the default; in powers with `log`.
        log:     2 or 10: the slider moves by powers of it.
        label:   what stands beside it; the parameter's name where that is empty.
        costly:  the picture follows when the slider is released, and none is sent ahead.
        hidden:  set by a handle alone.
    """

    low: float
    high: float
    step: float = 0
    label: str = ""
    log: float = 0
    costly: bool = False
    hidden: bool = False

    def check(self, name: str, value: Any, default: Any) -> Any:
        """The value as Python's own number. Raises ValueError for any other, in the reader's words."""
        whole, what = isinstance(default, int), "a whole number" if isinstance(default, int) else "a number"
        fits = is_number(value) and self.low <= value <= self.high and (not whole or value == round(value))
        if not fits:
            raise ValueError(f"{name} must be {what} between {self.low:g} and {self.high:g}, got {value!r:.80}")
        return int(value) if whole else float(value)

    def row(self, default: Any) -> dict[str, Any]:
        """Its line of the form."""
        grid = self.grid(default)
        even = len(grid) > 1 and math.isclose(step := grid[1] - grid[0], grid[-1] - grid[-2], abs_tol=1e-9)
        wide = 3 + max(len(f"{v:.9g}") for v in grid)  # digits, and room for the arrows
        row = {"kind": "range", "grid": grid, "step": float(f"{step:.6g}") if even else "any", "wide": wide}
        return row | ({"costly": True} if self.costly else {}) | ({"kind": "hidden"} if self.hidden else {})

    def grid(self, default: Any) -> list[float]:
        """All places of the slider, ascending: its ends, and the whole steps from the default."""
        step = self.step or (1 if self.log or isinstance(default, int) else 0.01)
        there = (lambda v: math.log(v, self.log)) if self.log else float
        low, start, high = map(there, (self.low, float(default), self.high))
        first, last = math.ceil((low - start) / step - 1e-9), math.floor((high - start) / step + 1e-9)
        places = (round(start + i * step, 9) for i in range(first, last + 1))
        values: Any = (float(self.log**x) if self.log else x for x in places)
        if isinstance(default, int):
            values = (round(v) for v in values)
        elif self.log:  # powers with a whole exponent are exact, others have four digits
            values = (v if v.is_integer() else float(f"{v:.4g}") for v in values)
        ends = (int(self.low), int(self.high)) if isinstance(default, int) else (self.low, self.high)
        return sorted({*ends, *(min(max(v, self.low), self.high) for v in values)})


@dataclass(frozen=True)
class Choice:
    """One of some values, each with the words that stand for it. A list or a dict is short for it."""

    names: Mapping[Any, str]
    label: str = ""

    def check(self, name: str, value: Any, default: Any) -> Any:
        """The value itself, also for the word that the page knows it by. Raises ValueError for any other."""
        for own in self.names:
            if own is value or (type(value) in (str, type(own)) and str(own) == str(value)):
                return own
        raise ValueError(f"{name} must be one of {', '.join(map(str, self.names))}, got {value!r:.80}")

    def row(self, default: Any) -> dict[str, Any]:
        """Its line of the form."""
        return {"kind": "choice", "options": [[str(text), str(value)] for value, text in self.names.items()]}


@dataclass(frozen=True)
class Flag:
    """True or False. What a default of True or False gets by itself."""

    label: str = ""

    def check(self, name: str, value: Any, default: Any) -> bool:
        """The value. Raises ValueError for anything else."""
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} must be true or false, got {value!r:.80}")
        return bool(value)

    def row(self, default: Any) -> dict[str, Any]:
        """Its line of the form."""
        return {"kind": "checkbox"}


@dataclass(frozen=True)
class Text:
    """Words, or a number as a reader writes it. What a text as default gets by itself."""

    label: str = ""

    def check(self, name: str, value: Any, default: Any) -> str:
        """The text; a number from a handle has nine digits. Raises ValueError for anything else."""
        if is_number(value) and abs(value) < 1e308:
            return f"{value:.9g}"
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r:.80}")
        return value

    def row(self, default: Any) -> dict[str, Any]:
        """Its line of the form."""
        return {"kind": "text"}


@dataclass(frozen=True)
class Stroke:
    """What the pen drew or a hand put: step -> height, {} for nothing. A handle or pen adds to it."""

    steps: int
    low: float
    high: float

    def check(self, name: str, value: Any, default: Any) -> dict[int, float]:
        """Without what lies outside the steps, no higher than the picture. Raises ValueError unless all are numbers."""
        try:
            points = {int(step): float(height) for step, height in value.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            points = {0: math.nan}
        if not all(map(math.isfinite, points.values())):
            raise ValueError(f'{name} must be the height at each step, such as {{"7": 16.5}}, got {value!r:.80}')
        return {s: min(max(v, self.low), self.high) for s, v in sorted(points.items()) if 0 <= s < self.steps}


@dataclass(frozen=True)
class Inner:
    """A parameter without a control: pressed boxes, buttons and work set it."""

    def check(self, name: str, value: Any, default: Any) -> Any:
        """The value as it is: no reader types it."""
        return value


Control = Range | Choice | Flag | Text | Stroke | Inner


def control(given: Any, default: Any) -> Control:
    """The control that a declaration stands for: (low, high), some choices, a label, or else the default's own."""
    if isinstance(given, tuple):
        return Range(*given)
    if isinstance(given, dict | list):
        return Choice(given if isinstance(given, dict) else {v: str(v) for v in given})
    if given is None or isinstance(given, str):
        kind = Flag if isinstance(default, bool) else Text if isinstance(default, str) else None
        return kind(given or "") if kind else Inner()
    return given


__all__ = ["Choice", "Control", "Flag", "Inner", "Range", "Stroke", "Text", "control"]
