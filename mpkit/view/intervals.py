"""Pictures of an experiment: every cell with its interval, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpkit.view.sheet import Panel, Sheet, linear, names
from mpkit.view.still import Still

UNITS = {
    "accuracy": "accuracy, percent",
    "seconds_per_step": "seconds a step",
    "peak_memory_mib": "peak memory, MiB",
    "final_loss": "loss of the last epoch",
}


def named(metric: str) -> str:
    """A metric as an axis calls it."""
    return UNITS.get(metric, metric.replace("_", " "))


def intervals(panel: Panel, values: Sequence[Sequence[float]], ends: Sequence[tuple[float, float, float]]) -> None:
    """In rows from the top: a dot for every run, a bar for the 95 % interval of the mean, a square for the mean."""
    for row, (numbers, (low, mean, high)) in enumerate(zip(values, ends)):
        finite = [v for v in numbers if math.isfinite(v)]
        if not finite:
            continue
        told = [f"{v:.4g}" for v in finite]
        panel.points([row + 0.18] * len(finite), finite, "muted", size=2.5, label="one run", told=told)
        if math.isfinite(low):
            told, label = [f"{low:.4g} to {high:.4g}"], "95 % interval of the mean"
            panel.line([row - 0.1] * 2, [low, high], "zero", width=3, label=label, told=told)
        panel.points([row - 0.1], [mean], "zero", glyph="s", size=4, label="mean", told=[f"{mean:.4g}"])


def axis(label: str, values: Sequence[float], count: int = 5) -> dict[str, Any]:
    """An axis that holds all finite values with a little room."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low) or max(abs(high), 1.0) * 0.05
    return linear(label, low - room, high + room, count)


def beside(labels: Sequence[str]) -> list[int]:
    """Room of a panel whose rows are named: top, right, bottom, left."""
    return [28, 14, 42, 18 + math.ceil(7.6 * max(map(len, labels), default=1))]


def cost(results: Any, metric: str, against: str) -> Still:
    """Every cell in a row: its `metric`, and what that costs, each with runs, mean and interval."""
    see, means, labels = Sheet(), list[list[str]](), results.labels
    see.grid(90 + 34 * max(len(labels), 5), 900, cols=(1.7, 1))
    for col, (which, title) in enumerate(((metric, "every run, mean, 95 % interval"), (against, "and their cost"))):
        runs = [list(results.values(label, which).values()) for label in labels]
        ends = [results.interval(label, which) for label in labels]
        x = axis(named(which), [v for one, three in zip(runs, ends) for v in (*one, *three)], 3 if col else 5)
        y = names(labels if col == 0 else [""] * len(labels), down=True, bare=False)
        pad = [28, 14, 42, 14] if col else beside(labels)
        intervals(see.panel(0, col, title=title, x=x, y=y, pad=pad), runs, ends)
        means.append([f"{m:.4g}" + ("" if math.isnan(a) else f" ({a:.4g} to {b:.4g})") for a, m, b in ends])
    parts = "; ".join(f"{label} {mean} at {price}" for label, mean, price in zip(labels, *means))
    head = f"Each cell's mean with its 95 % interval ({named(metric)}), and its mean cost ({named(against)})"
    see.say("{told}", told=f"{head}: {parts}. {results.note}")  # names of cells may hold braces
    return Still(see)
