"""Pictures of an experiment: every cell with its interval, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpkit.view.sheet import Panel, Sheet, linear, names
from mpkit.view.still import Still, still

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
    """Left: `metric` of every cell with its interval. Right: the same means over `against`, by the cells' numbers."""
    labels = results.labels
    both = {m: [results.interval(label, m) for label in labels] for m in (metric, against)}
    runs = [list(results.values(label, metric).values()) for label in labels]
    shown = [v for one, ends in zip(runs, both[metric]) for v in (*one, *ends)]
    see = Sheet()
    see.grid(90 + 34 * max(len(labels), 5), 900, cols=(1.7, 1))
    told = [f"{i + 1}  {label}" for i, label in enumerate(labels)]
    x, y = axis(named(metric), shown), names(told, down=True, bare=False)
    intervals(see.panel(title="every run, mean, 95 % interval", x=x, y=y, pad=beside(told)), runs, both[metric])
    dear, good = axis(named(against), [v for ends in both[against] for v in ends], 3), axis(named(metric), shown)
    right = see.panel(0, 1, title="the same means, and their cost", x=dear, y=good)
    near = [0.04 * (scale["hi"] - scale["lo"]) for scale in (dear, good)]
    together: dict[tuple[float, ...], list[str]] = {}  # numbers that would cover each other stand side by side
    for i, (up, across) in enumerate(zip(both[metric], both[against])):
        if math.isfinite(across[1] + up[1]):
            right.line([up[0], up[2]], [across[1]] * 2, "zero", width=1.2, quiet=True)
            right.line([up[1]] * 2, [across[0], across[2]], "zero", width=1.2, quiet=True)
            right.points([up[1]], [across[1]], "zero", glyph="s", size=3, quiet=True)
            place = tuple(step * round(at / step) for at, step in zip((across[1], up[1]), near))
            together.setdefault(place, []).append(str(i + 1))
    for place, numbers in together.items():
        right.text(", ".join(numbers), *place, beside=5, dy=-8, halo=True)
    means = zip(labels, both[metric], both[against])
    parts = "; ".join(f"{label} {_interval(*ends)} at {price[1]:.3g}" for label, ends, price in means)
    head = f"Each cell's mean with its 95 % interval ({named(metric)}), and its mean cost ({named(against)})"
    see.say("{told}", told=f"{head}: {parts}. {results.note}")  # names of cells may hold braces
    return still(see)


def _interval(low: float, mean: float, high: float) -> str:
    return f"{mean:.4g}" if math.isnan(low) else f"{mean:.4g} ({low:.4g} to {high:.4g})"
