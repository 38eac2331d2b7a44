"""Controls: what a reader may set a parameter of a view to, and how the page offers it. Declared as for `interact`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpkit.arguments import is_number


def power(base: float, exponent: float) -> float:
    """A power: of a whole exponent exact, of others to four digits.

    >>> power(2, -6), power(2, 3.25)
    (0.015625, 9.514)
    """
    return float(base**exponent if exponent == round(exponent) else f"{base**exponent:.4g}")


class Control:
    """A parameter without a line in the form: pressed boxes, buttons and work set it, and no reader types it."""

    label: str = ""

    def check(self, name: str, value: Any, now: Any) -> Any:
        """The value of the parameter that is `now` another. Raises ValueError in the reader's words."""
        return value

    def row(self, default: Any) -> dict[str, Any]:
        """Its line of the form, if it has one."""
        return {}


@dataclass(frozen=True)
class Range(Control):
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

    def check(self, name: str, value: Any, now: Any) -> Any:
        """The value as Python's own number."""
        kind, what = (int, "a whole number") if isinstance(now, int) else (float, "a number")
        if not (is_number(value) and self.low <= value <= self.high and kind(value) == value):
            raise ValueError(f"{name} must be {what} between {self.low:g} and {self.high:g}, got {value!r:.80}")
        return kind(value)

    def row(self, default: Any) -> dict[str, Any]:
        """Its line, unless it is hidden."""
        grid = self.grid(default)
        even = len(grid) > 1 and math.isclose(step := grid[1] - grid[0], grid[-1] - grid[-2], abs_tol=1e-9)
        wide = 4 + max(len(f"{v:.9g}") for v in grid)  # digits, and room for the arrows
        row = {"kind": "range", "grid": grid, "step": float(f"{step:.6g}") if even else "any", "wide": wide}
        return {} if self.hidden else row | ({"costly": True} if self.costly else {})

    def grid(self, default: Any) -> list[float]:
        """All places of the slider, ascending: its ends, and the whole steps from the default."""
        kind, ends = type(default), (self.low, self.high)
        step = self.step or (1 if self.log or kind is int else 0.01)
        low, start, high = (math.log(v, self.log) if self.log else float(v) for v in (self.low, default, self.high))
        ranks = range(math.ceil((low - start) / step - 1e-9), math.floor((high - start) / step + 1e-9) + 1)
        places = [round(start + k * step, 9) for k in ranks]
        places = [power(self.log, x) for x in places] if self.log else places
        return sorted({*map(kind, ends), *(kind(round(v) if kind is int else v) for v in np.clip(places, *ends))})


@dataclass(frozen=True)
class Choice(Control):
    """One of some values, each with the words that stand for it. A list or a dict is short for it."""

    names: Mapping[Any, str]
    label: str = ""

    def check(self, name: str, value: Any, now: Any) -> Any:
        """The value itself, also for the word that the page knows it by."""
        for own in self.names:
            if own is value or (type(value) in (str, type(own)) and str(own) == str(value)):
                return own
        raise ValueError(f"{name} must be one of {', '.join(map(str, self.names))}, got {value!r:.80}")

    def row(self, default: Any) -> dict[str, Any]:
        """Its line."""
        return {"kind": "choice", "options": [[str(text), str(value)] for value, text in self.names.items()]}


@dataclass(frozen=True)
class Flag(Control):
    """True or False. What a default of True or False gets by itself."""

    label: str = ""

    def check(self, name: str, value: Any, now: Any) -> bool:
        """The value."""
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} must be true or false, got {value!r:.80}")
        return bool(value)

    def row(self, default: Any) -> dict[str, Any]:
        """Its line."""
        return {"kind": "checkbox"}


@dataclass(frozen=True)
class Text(Control):
    """Words, or a number as a reader writes it. What a text as default gets by itself."""

    label: str = ""

    def check(self, name: str, value: Any, now: Any) -> str:
        """The text; a number from a handle has nine digits."""
        if not isinstance(value, str) and not is_number(value):
            raise ValueError(f"{name} must be text, got {value!r:.80}")
        return value if isinstance(value, str) else f"{value:.9g}"

    def row(self, default: Any) -> dict[str, Any]:
        """Its line."""
        return {"kind": "text"}


@dataclass(frozen=True)
class Stroke(Control):
    """What the pen drew or a hand put: step -> height. It is added to what is there; {} clears it."""

    steps: int
    low: float
    high: float

    def check(self, name: str, value: Any, now: Any) -> dict[int, float]:
        """Without what lies outside the steps, no higher than the picture."""
        try:
            points = {int(step): float(height) for step, height in value.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            points = {0: math.nan}
        if not all(map(math.isfinite, points.values())):
            raise ValueError(f'{name} must be the height at each step, such as {{"7": 16.5}}, got {value!r:.80}')
        fits = {s: min(max(v, self.low), self.high) for s, v in sorted(points.items()) if 0 <= s < self.steps}
        return now | fits if points else {}


def control(given: Any, default: Any) -> Control:
    """The control that a declaration stands for: (low, high), some choices, a label, or else the default's own."""
    if isinstance(given, tuple):
        return Range(*given)
    if isinstance(given, dict | list):
        return Choice(given if isinstance(given, dict) else {v: str(v) for v in given})
    if given is None or isinstance(given, str):
        kind = Flag if isinstance(default, bool) else Text if isinstance(default, str) else None
        return kind(given or "") if kind else Control()
    return given
