"""Scenes of lessons 14 to 16: ranges inside a format, a recorded run, and what another policy would have done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.formats import FP16
from mpkit.plots.formats import edges, histogram, regions
from mpkit.plots.scene import Panel, Scene, exponents, fitted, linear, log2, names, power_of_two, space
from mpkit.replay.percent import percent

if TYPE_CHECKING:
    from mpkit.explorers import evidence as explorers  # upward: the types of its arguments


def detective_scene(data: explorers.DetectiveExplorer) -> Scene:
    """Above, the batch's way through the network and back; below, the ranges of its values inside the format."""
    low, high, fmt = -44, 44, data.fmt
    labels = [f"gradient of {n} × scale" if g else f"output of {n}" for n, _, _, g in data.bars]
    tall = 110 + 32 * len(labels)
    scene = Scene(height=220 + tall, width=960, rows=(220, tall))
    scene.play("step", "step", len(data.stops), every=700, first=1)
    _way(scene, data)
    x = log2("magnitude, as computed in float32", low, high, 8)
    y = names(labels, down=True) | {"hi": -1.2}
    panel = scene.panel(1, title="ranges of the values, as computed in float32", x=x, y=y)
    regions(panel, "x", *edges(fmt))
    for row, (name, small, large, gradient) in enumerate(data.bars):
        broken = "NaN" if math.isnan(large) else "inf" if math.isinf(large) else ""
        word = broken or ("too large" if large > fmt.max else "")
        color = "overflow" if word else "own" if gradient else "reference"
        ends = exponents(np.nan_to_num([small, large], nan=np.inf, posinf=np.inf), low, high)
        panel.boxes([ends[0]], [row - 0.2], [ends[1]], [row + 0.2], fill=f"{color}/0.5", edge=color, hatch=gradient)
        if data.report.operation and not gradient and name == data.report.module:
            panel.text("born here", ends[0], row, beside=-8, color="overflow", halo=True)
        if word:
            panel.text(word, high - 1, row - 0.33, anchor="end", color="overflow", halo=True)
    if any(g for *_, g in data.bars):
        row = next(i for i, bar in enumerate(data.bars) if bar[3])
        finite = bool(np.isfinite(data.bars[row][2]))
        top = float(exponents([data.bars[row][2]], low, high)[0]) if finite else float(data.exponent)
        grip = {"base": top - data.exponent, "cross": row, "note": f"scale {power_of_two(data.exponent)}"}
        panel.handle("x", "exponent", data.exponent, -8, 30, "loss scale, 2 to the", **grip)
    return scene


def _way(scene: Scene, data: explorers.DetectiveExplorer) -> None:
    """Forward along the upper row, back along the lower one; each part shows what passed it once it is reached."""
    last, parts = len(data.stops) - 1, [stop.name for stop in data.stops if not stop.backward]
    wide = len(parts)
    title = f"training {data.name}, {data.dtype}: {data.report.verdict.replace('_', ' ')}"
    panel = scene.panel(title=title, x=space(-0.75, wide), y=space(-0.1, 2.1), bare=True, pad=[28, 6, 6, 6])
    for y, name in ((1.6, "forward"), (0.45, "gradients\n× scale")):
        panel.text(name, -0.72, y, anchor="start", color="muted")
    for i, stop in enumerate(data.stops):
        x, y = parts.index(stop.name), 0.05 if stop.backward else 1.2
        box = ([x + 0.04], [y], [x + 0.86], [y + 0.8])
        panel.boxes(*box, fill="paper", edge="muted", width=1.2, radius=4)
        role = "overflow" if stop.bad else "normal"
        panel.boxes(*box, fill=f"{role}/0.2", edge=role, width=1.5, radius=4, only=(i, last))
        panel.boxes(*box, edge="own", width=4, radius=4, only=(i, i))
        panel.text(stop.name, x + 0.45, y + 0.62, weight="bold")
        seen = f"{stop.bad} of {stop.count}\ninf or NaN" if stop.bad else f"{stop.dtype}\n≤ {stop.largest:.3g}"
        panel.text(seen, x + 0.45, y + 0.28, size=11, color="overflow" if stop.bad else "ink", only=(i, last))
        if i == data.born:
            panel.text("born here", x + 0.45, y + 0.92, weight="bold", color="overflow", only=(i, last))
        if i == len(parts) - 1:
            panel.arrow((x + 0.45, y), (x + 0.45, 0.86))
        elif i < last:
            ends = (x + 0.04, x - 0.14) if stop.backward else (x + 0.86, x + 1.03)
            panel.arrow((ends[0], y + 0.4), (ends[1], y + 0.4))


def _scale_line(panel: Panel, scale: np.ndarray, skipped: np.ndarray, low: int, high: int, **look: Any) -> None:
    at = exponents(np.nan_to_num(scale, nan=0.0), low, high)
    panel.line(at, step="post", **look)
    panel.crosses(at, skipped, "skipped", size=4)


def run_scene(data: explorers.RunExplorer) -> Scene:
    """The recorded scale with its skipped steps, and the scaled gradients of the step inside float16."""
    t, scene = data.trace, Scene(height=400, width=960, cols=(1.6, 1))
    scene.play("step", "step", len(t), every=120)
    low, high = fitted(data.tops, t.scale, within=(-40, 60))
    y = log2("loss scale", low, high)
    left = scene.panel(title=f"{data.run}: recorded loss scale", x=linear("step", 0, len(t), 6), y=y)
    tops = exponents(data.tops, low, high)
    left.band(scene.keep("tops", tops), high, label="here it would overflow")
    _scale_line(left, t.scale, np.flatnonzero(t.overflow), low, high, width=2, label="loss scale")
    left.rule("x", "index", "own", dash=":")
    left.handle("x", "step", data.at, 0, len(t) - 1, "step")
    _gradients(scene, data)
    return scene


def _gradients(scene: Scene, data: explorers.RunExplorer) -> None:
    """Beside the scale: how the values of each step lie in float16, those without an exponent as words."""
    t, part = data.trace, data.trace.gradients
    shares = 100 * (part.total() / max(1, data.values))
    y = linear("share of all values, %", 0, 1.5 * float(shares.max()), 4)  # the words stand above all bars
    right = scene.panel(0, 1, title="gradients × scale, in float16", x=log2("magnitude", -60, 40, 20), y=y)
    rows = np.clip(np.searchsorted(part.step, np.arange(len(t)), side="right") - 1, 0, None)
    with np.errstate(divide="ignore"):
        shift = np.maximum(np.log2(t.scale), -200)
    look: dict[str, Any] = {"rows": scene.keep("rows", rows), "shift": scene.keep("shift", shift)}
    regions(right, "x", *edges(FP16))
    histogram(scene, right, shares, part.lowest, FP16, **look)
    look = {"frame": True, "halo": True}
    for words, count, x, anchor, color in (
        ("{} % zero", part.zeros, 0.02, "start", "zero"),
        ("{} % inf or NaN", part.nonfinite, 0.98, "end", "overflow"),
    ):
        shown = 100 * count.sum(axis=1)[rows] / max(1, data.values)
        right.text(words, x, 0.71, values=[shown], anchor=anchor, color=color, **look)


def what_if_scene(data: explorers.WhatIfExplorer) -> Scene:
    """The replayed scale under its ceiling, recorded or drawn; beside it what every pair loses under that ceiling."""
    scene = Scene(height=400, width=1000, cols=(1.4, 1))
    panel, low = _draw_run(scene, 0, data, "what this policy would have done; draw another ceiling")
    chosen = [(f, w) for f, w in ((data.factor, data.window),) if f in data.factors and w in data.windows]
    cells = [(data.factors.index(f), data.windows.index(w)) for f, w in chosen]
    if not set(cells) & set(data.least):
        best = exponents(data.best_scale, panel.given["y"]["lo"], panel.given["y"]["hi"])
        panel.line(best, color="normal", dash="-.", width=1.6, step="post", label="loses least")
    y = panel.given["y"]
    pen = {"name": "draw", "lo": y["lo"], "hi": y["hi"], "label": "ceiling", "width": 1.4, "quiet": True}
    panel.add("pen", y=exponents(data.tops, y["lo"], y["hi"]), color="overflow", **pen)
    inside = 0.02 * len(data.tops)  # or the ball would cover the axis
    beside = data.window < 0.25 * len(data.tops) and abs(data.init - low - 0.8) < 0.06 * (y["hi"] - low)
    panel.handle("y", "init", data.init, 0, 32, "start, 2 to the", cross=inside, note="start")
    room = data.window < 0.8 * len(data.tops)
    grip = {"cross": low + 0.8, "stem": True, "note": f"window {data.window}" if room else "window"}
    grip |= {"note": None} if beside else {}  # the ball of the start would lie over it
    panel.handle("x", "window", data.window, 1, min(1024, len(data.trace)), "scale_window, steps", **grip)
    pairs = _losses(scene, data, "lost with each pair, %", pick="pair", col=1)
    framed(pairs, data.least, "normal", "loses least")
    if cells:
        framed(pairs, cells, "own", "chosen")
    return scene


def _draw_run(scene: Scene, col: int, run: explorers.WhatIfExplorer, title: str) -> tuple[Panel, int]:
    low, high = fitted(run.tops, run.trace.scale, run.scale, within=(-40, 60))
    x = linear("step", 0, len(run.trace), 6)
    panel = scene.panel(0, col, title=title, x=x, y=log2("loss scale", low, high))
    panel.band(exponents(run.tops, low, high), high, label="here it would overflow")
    recorded = exponents(run.trace.scale, low, high)
    panel.line(recorded, color="reference", dash="--", width=1.6, step="post", label="recorded")
    _scale_line(panel, run.scale, run.skipped, low, high, width=2.4, label="replayed", ghost=True)
    return panel, low


def heat_map(
    scene: Scene, grid: Any, texts: list[str], rows: Any, cols: Any, title: str, *, col: int = 0, **look: Any
) -> Panel:
    """A table of factors x windows in column `col`; the darker, the larger."""
    x = names([str(c) for c in cols], "scale_window, finite steps")
    y = names([f"{r:g}" for r in rows], "scale_factor", down=True)
    panel = scene.panel(title=title, x=x, y=y, col=col, pad=[28, 14, 42, 60])
    cells = [f"factor {r:g}, window {c}" for r in rows for c in cols]
    panel.cells(grid, texts, names=cells, label="cell", quiet=True, **look)
    return panel


def framed(panel: Panel, cells: Sequence[tuple[int, int]], color: str, label: str) -> None:
    """A frame around each of some cells (row, column) of a heat map."""
    rows, cols = np.array(cells, dtype=float).T
    panel.boxes(cols - 0.47, rows - 0.47, cols + 0.47, rows + 0.47, edge=color, width=3, label=label)


def short(share: float) -> str:
    """A share in percent as it fits a cell, from a tenth on in whole ones; "0" is none at all."""
    told = percent(share, 0 if share >= 0.1 else 1).replace(" ", "").removesuffix("%")
    return told.replace("lessthan", "<").replace("morethan", ">")


def _losses(scene: Scene, data: explorers.WhatIfExplorer | explorers.GridExplorer, title: str, **look: Any) -> Panel:
    """What every pair loses, in percent; a click on a cell is told to the explorer."""
    look |= {"keys": list(range(data.grid.size)), "size": 11}
    return heat_map(scene, data.grid, [short(v) for v in data.grid.flat], data.factors, data.windows, title, **look)


def grid_scene(data: explorers.GridExplorer) -> Scene:
    """The heat map of a sweep with the chosen cell framed, and that cell's run."""
    scene = Scene(height=400, width=980, cols=(1, 1))
    left = _losses(scene, data, "training signal lost, %; choose a cell", pick="cell")
    framed(left, data.least, "normal", "loses least")
    framed(left, [(data.factors.index(data.factor), data.windows.index(data.window))], "own", "chosen")
    _draw_run(scene, 1, data.chosen, "the run of the chosen cell")
    return scene


def naive_rule_scene(data: explorers.NaiveRuleExplorer) -> Scene:
    """Two rules, one start, and where each leads."""
    return two_rules(data.naive, data.dynamic, data.losses, data.ceiling, data.exponent, ("exponent", -10, 20))


def two_rules(
    naive: Any,
    dynamic: Any,
    losses: Any,
    ceiling: float,
    start: int,
    handle: tuple[str, int, int],
    called: tuple[str, str] = ("compares loss and scale", "gradients finite?"),
    **more: Any,
) -> Scene:
    """A rule that compares loss and scale beside one that looks at gradients, under the gradients' ceiling."""
    powers, steps = np.log2(naive), len(naive)  # a line cut off at the edge would look like rest
    low, high = min(-50, math.floor(powers.min()) - 2), max(50, math.ceil(powers.max()) + 2)
    scene = Scene(height=400, width=900)
    x, y = linear("step", 0, steps, 8), log2("loss scale; loss", low, high, 10 if high - low < 120 else 25)
    panel = scene.panel(title="a rule that never looks at a gradient, and one that does", x=x, y=y)
    panel.span("y", math.log2(ceiling), high, "overflow/0.15", "gradients overflow")
    panel.span("y", low, -24, "zero/0.15")
    corner: dict[str, Any] = {"anchor": "start", "valign": "bottom", "dx": 6, "dy": -3}  # which no line comes near
    panel.text("below the smallest float16", 0, low, **corner)
    every = np.unique(np.linspace(0, steps - 1, 301).astype(int))
    rows: tuple[tuple[str, str, str | None, Any], ...] = (
        ("loss", "reference", ":", losses),
        (called[0], "overflow", "--", naive),
        (called[1], "zero", None, dynamic),
    )
    for name, color, dash, values in rows:
        panel.line(exponents(values, low, high)[every], every, color, dash=dash, width=2.2, label=name, tag=True)
    bad = np.flatnonzero(np.asarray(naive) > ceiling)[:1]
    panel.crosses(exponents(naive, low, high), bad, "first inf in the weights", size=7)
    name, least, most = handle
    panel.handle("y", name, start, least, most, "start, 2 to the", cross=0.015 * steps)
    panel.text("start", 0, start, color="own", beside=4, dy=20, halo=True)  # below the ring: both lines begin beside it
    for axis, given in more.items():
        panel.handle("y", axis, **given)
    return scene
