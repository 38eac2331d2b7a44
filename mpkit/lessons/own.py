"""A picture of what a student's own function gives, for labs: some lines, and what they are."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpkit.view import LINES, Sheet, exponents, fitted, log2
from mpkit.view.intervals import axis


def picture(
    x: str, y: str, lines: Mapping[str, ArrayLike], *,
    at: ArrayLike | None = None, powers: bool = False, title: str = "what your function gives",
) -> Sheet:  # fmt: skip
    """Lines by name over 0, 1, 2 ... or the places `at`; `powers` puts them on an axis of powers of two.

    Raises:  ValueError where nothing is finite, or lines and places differ in length.
    """
    values = {name: np.asarray(v, dtype=float) for name, v in lines.items()}
    longest = max(map(len, values.values()), default=0)
    place = np.arange(longest) if at is None else np.asarray(at, dtype=float)
    real = [float(v) for line in values.values() for v in line if np.isfinite(v)]
    if not real or any(len(line) != len(place) for line in values.values()):
        raise ValueError(f"need lines with a finite number and {len(place)} places, got {[*map(len, values.values())]}")
    see, ends = Sheet(), (min(real), max(real))
    see.grid(300, 840)
    low, high = fitted(*values.values(), room=1)
    panel = see.panel(title=title, x=axis(x, place.tolist(), 6), y=log2(y, low, high) if powers else axis(y, real))
    for (name, line), color in zip(values.items(), LINES):
        panel.line(exponents(line, low, high) if powers else line, place, step="mid", width=1.8, label=name, **color)
    see.say(f"{', '.join(values)}: {longest} places, from {ends[0]:.4g} to {ends[1]:.4g}.")
    return see


def look(make: Callable[[], Sheet]) -> Any:
    """The picture that `make` draws with a student's functions, or a sentence where they still fail."""
    from mpkit.view.still import Still

    try:
        return Still(make())
    except Exception as error:  # whatever an unfinished answer raises
        print(f"Your own result stands here once the question above is answered ({type(error).__name__}).")
        return None
