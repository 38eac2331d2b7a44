"""Pictures that topics share: a format's regions, a histogram over them, a heat map, runs, a drawn prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpkit.formats import FloatFormat
from mpkit.view.answers import number
from mpkit.view.sheet import Panel, Sheet, exponents, fitted, linear, log2, names

FATES = ("zero", "subnormal", "normal", "overflow")


def edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """The powers of two below which a magnitude becomes zero, is subnormal, fits."""
    return fmt.min_subnormal_exponent - 1, fmt.min_exponent, fmt.max_exponent + 1


def zones(ends: Iterable[float]) -> list[tuple[float | None, str]]:
    """The roles of bars over an axis of powers of two, for `Panel.bars`; the ends are exponents."""
    return list(zip((*map(float, ends), None), FATES))


def regions(panel: Panel, axis: str, lost: float, normal: float, overflow: float, /, **said: str) -> None:
    """Colour and name zero, subnormal, normal and overflow along an axis of powers of two; the edges are exponents.

    `said` are other names of the four, "" for none.
    """
    ends = sorted((panel.given[axis]["lo"], panel.given[axis]["hi"]))
    look = {"anchor": "end"} if axis == "y" else {}  # bars begin at the left
    for role, low, high in zip(FATES, (ends[0], lost, normal, overflow), (lost, normal, overflow, ends[1])):
        panel.span(axis, low, high, f"{role}/0.14", said.get(role, role), **look)


def histogram(see: Sheet, panel: Panel, shares: np.ndarray, lowest: float, fmt: FloatFormat, **look: Any) -> None:
    """Percent of magnitudes in each power of two from `lowest` on, a row for each step, coloured by the format.

    They travel once, a byte each. `look` as in `Panel.bars`.
    """
    kept = see.keep("shares", np.round(255 * shares / shares.max()).astype(np.uint8))
    at = lowest + 0.5 + np.arange(shares.shape[1])
    look = {"width": 1, "label": "share, %", "quiet": True} | look
    panel.bars(kept, at, unit=shares.max() / 255, zones=zones(edges(fmt)), **look)


def heat_map(see: Sheet, grid: Any, texts: Sequence[str], rows: Any, cols: Any, title: str, **look: Any) -> Panel:
    """A table of factors x windows, in column `col` of the sheet; the darker, the larger."""
    x = names([str(c) for c in cols], "scale_window, finite steps")
    y = names([f"{r:g}" for r in rows], "scale_factor", down=True)
    panel = see.panel(title=title, x=x, y=y, col=look.pop("col", 0), pad=[28, 14, 42, 60])
    cells = [f"factor {r:g}, window {c}" for r in rows for c in cols]
    given: dict[str, Any] = {"names": cells, "label": "cell", "quiet": True} | look
    panel.cells(grid, texts, **given)
    return panel


def framed(panel: Panel, cells: Sequence[tuple[int, int]], color: str, label: str) -> None:
    """A frame around each of some cells (row, column) of a heat map."""
    rows, cols = np.array(cells, dtype=float).T
    panel.boxes(cols - 0.47, rows - 0.47, cols + 0.47, rows + 0.47, edge=color, width=3, label=label)


def loss_and_scale(see: Sheet, runs: Any, first: int, last: int, also: Sequence[float] = ()) -> tuple[Panel, Panel]:
    """Loss and scale of some runs, from step `first` to `last`: (name, run, role, dash); crosses at skipped steps.

    `also` are exponents that the axis of the scale has to hold.
    """
    scales = [np.minimum(run.scales[first:], 2.0**127) for _, run, _, _ in runs]
    low, high = fitted(*scales, np.exp2(also), room=1)
    y = linear("loss, nats", 0, 3, 3)
    y["ticks"][-1][1] = "≥ 3, NaN"  # such losses are drawn there
    loss = see.panel(title="loss", x=linear("step", first, last, 4), y=y)
    panel = see.panel(0, 1, title="loss scale", x=linear("step", first, last, 4), y=log2("loss scale", low, high))
    for name, run, color, dash in runs:
        n = min(len(run.losses), len(run.scales))
        steps = np.arange(min(first, n), n)
        look: dict[str, Any] = {"color": color, "dash": dash, "width": 2.2 if color == "own" else 1.6}
        look |= {"glyph": "o"} if len(steps) == 1 else {}  # a line of one point would not be seen
        losses = np.clip(np.nan_to_num(run.losses[first:n], nan=3, posinf=3), 0, 3)
        loss.line(losses, steps, label=name, **look)
        at = exponents(run.scales[:n], low, high)
        panel.line(at[first:], steps, step="post", label=name, **look)
        panel.crosses(at, [i for i in run.skipped if first <= i < n], "skipped step")
    return loss, panel


def typed_line(text: str, count: int, low: float, high: float, asked: str) -> list[float]:
    """The numbers that a reader typed in place of a line. Raises ValueError, with an example, for anything else."""
    found = [number(word) for word in text.replace(",", " ").replace(";", " ").split()]
    if len(found) != count or not all(v is not None and low <= v <= high for v in found):
        raise ValueError(f"type {asked}, each from {low:g} to {high:g}, got {text!r}")
    return [float(v) for v in found if v is not None]


def guessed(given: np.ndarray, typed: np.ndarray | None, drawn: Mapping[int, float], first: int = 0) -> np.ndarray:
    """The reader's line from point `first` on: `given` at the opening, what was typed, and over it what was drawn."""
    line = (given if typed is None else typed).astype(float).copy()
    for point, value in drawn.items():
        if point >= first:
            line[point - first] = value
    return line


def prediction(see: Sheet, panel: Panel, guess: np.ndarray, first: int, shown: bool, made: bool, ends: Any) -> None:
    """The reader's line, from the first point that is not known, with its pen until the truth is shown.

    `made` says whether something was drawn or typed: nothing is shown before. Raises ValueError.
    """
    if shown and not made:
        raise ValueError("draw or type your prediction first; then it is shown")
    see.idle |= {"shown"}  # the button shows it, once
    mine = np.concatenate([np.full(first, np.nan), guess])
    look: dict[str, Any] = {"color": "own", "label": "your line", "width": 2.4, "dash": "--"}
    if shown:
        panel.line(mine, **look)
        see.idle |= {"typed"}
    else:
        panel.add("pen", y=mine, name="drawn", lo=ends[0], hi=ends[1], **look)
        see.buttons["Show what happened"] = {"shown": True}


def tenths(shares: Any) -> np.ndarray:
    """Shares in percent for a picture: to a tenth, smaller ones to one digit, and 100 for all alone."""
    exact = 100 * np.asarray(shares, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = 10.0 ** np.floor(np.log10(np.maximum(exact, 1e-12)))
        small = np.round(exact / size) * size
    near = np.round(exact, 1)
    return np.where((near == 0) & (exact > 0), small, np.where((near == 100) & (exact < 100), 99.9, near))
