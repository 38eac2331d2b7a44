"""Pictures of an experiment: what a cell buys against what it costs, and its curves, with every seed shown."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes

from mpkit.plots.base import DASHES, LINES, MARKERS, Still, log2_axis, new_figure, still

UNITS = {
    "accuracy": "accuracy, percent",
    "seconds_per_step": "seconds a step",
    "peak_memory_mib": "peak memory, MiB",
    "loss": "loss",
    "scale": "loss scale",
}
MOST = 10  # cells that colour, marker and dash can tell apart


def cost(results: Any, metric: str, against: str) -> Still:
    """`metric` over `against`: a marker a cell at the means, bars for the 95 % intervals, faint points for the runs."""
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for i, label in enumerate(_shown(results)):
        low_x, x, high_x = results.interval(label, against)
        low_y, y, high_y = results.interval(label, metric)
        if math.isnan(x) or math.isnan(y):
            continue
        color, marker = LINES[i % 5], MARKERS[i % 5]
        xs, ys = results.values(label, against), results.values(label, metric)
        both = [s for s in xs if s in ys]
        axes.scatter([xs[s] for s in both], [ys[s] for s in both], s=12, color=color, alpha=0.4, marker=marker)
        axes.errorbar(
            x,
            y,
            xerr=None if math.isnan(low_x) else [[x - low_x], [high_x - x]],
            yerr=None if math.isnan(low_y) else [[y - low_y], [high_y - y]],
            fmt=marker,
            color=color,
            mfc=color if i < 5 else "white",
            capsize=3,
            label=label,
        )
    axes.set(xlabel=_named(against), ylabel=_named(metric))
    axes.set_title(
        f"{_named(metric).split(',')[0]} and its price: means with 95 % intervals, every run a point", loc="left"
    )
    _legend(axes)
    return still(figure, _sentence(results, metric, against))


def curves(results: Any, name: str) -> Still:
    """The series `name` of every cell over its steps: the mean of the seeds as a line, each seed faint behind it."""
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    ends: list[str] = []
    seen: list[float] = []
    for i, label in enumerate(_shown(results)):
        runs = _runs(results, label, name)
        if not runs:
            continue
        color, dash = LINES[i % 5], DASHES[(i // 5 + i) % len(DASHES)]
        for run in runs:
            axes.plot(range(1, len(run) + 1), run, color=color, alpha=0.25, linewidth=0.8)
        length = min(map(len, runs))
        mean = [sum(run[k] for run in runs) / len(runs) for k in range(length)]
        axes.plot(range(1, length + 1), mean, color=color, linestyle=dash, linewidth=1.8, label=label)
        ends.append(f"{label} {mean[-1]:.4g}")
        seen += [v for run in runs for v in run if v > 0 and math.isfinite(v)]
    if not ends:
        raise ValueError(f"no run returned a series {name!r}; a run returns one as a list of numbers")
    axes.set(xlabel="step" if not name.endswith("_curve") else "epoch", ylabel=_named(name.removesuffix("_curve")))
    axes.set_title("mean of the seeds, every seed behind it", loc="left")
    if name == "scale" and seen:
        log2_axis(axes, "y", math.floor(math.log2(min(seen))) - 1, math.ceil(math.log2(max(seen))) + 1)
    _legend(axes)
    return still(figure, f"Mean of the last point of {name}: {'; '.join(ends)}.")


def _runs(results: Any, label: str, name: str) -> list[Any]:
    runs = []
    for seed in results.seeds:
        try:
            runs.append(results.series(label, name, seed))
        except ValueError:  # failed, not done, or a run without this series
            continue
    return [run for run in runs if len(run)]


def _shown(results: Any) -> list[str]:
    if len(results.labels) > MOST:
        raise ValueError(
            f"a picture tells at most {MOST} cells apart, got {len(results.labels)}; plot a part of the grid"
        )
    return list(results.labels)


def _named(metric: str) -> str:
    return UNITS.get(metric, metric.replace("_", " "))


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _sentence(results: Any, metric: str, against: str) -> str:
    parts = []
    for label in results.labels:
        low, mean, high = results.interval(label, metric)
        _, price, _ = results.interval(label, against)
        parts.append(f"{label} {mean:.4g} ({low:.4g} to {high:.4g}) at {price:.3g}")
    return f"{_named(metric)} at {_named(against)}, with 95 % intervals: {'; '.join(parts)}. {results.note}"
