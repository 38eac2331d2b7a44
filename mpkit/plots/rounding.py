"""Scenes of lesson 02: a number dropped between two neighbours, the staircase, weights that grow by tiny updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import DASHES, GLYPHS, SERIES, Scene, linear, log2, names
from mpkit.replay.percent import percent

if TYPE_CHECKING:
    from mpkit.explorers import rounding as explorers  # upward: the types of its arguments

SCHEMES = {  # role, dash, label
    "nearest": ("overflow", None, "16 bit, nearest"),
    "master": ("zero", "--", "float32 master"),
    "kahan": ("normal", "-.", "16 bit, Kahan"),
    "stochastic": ("own", None, "16 bit, stochastic"),
}


def modes_scene(data: explorers.ModesExplorer) -> Scene:
    """A number between its neighbours, and one row per mode with an arrow to the result."""
    modes, place = [*data.results, "stochastic"], data.share_right
    scene = Scene(height=380)
    x = linear("position between the two neighbours, ulp", -0.3, 1.3, 6)
    y = names([mode.replace("_", " ") for mode in modes], down=True, bare=False) | {"hi": -1.7}
    panel = scene.panel(title=f"two neighbours in {data.format.name}, and where each mode goes", x=x, y=y)
    for at, value in ((0, data.left), (1, data.right)):
        panel.rule("x", at, "ink", width=1.6)
        panel.text(f"{value:.7g}\n{data.parity(value)}", at, -1.2, size=13, beside=8 if at else -8)
    for row, result in enumerate(data.results.values()):
        end, color = _arrival(data, result)
        if end != place:
            panel.arrow((place, row), (end, row), color, width=2.2)
        panel.points([row], [end], color, size=6)
        if color == "overflow":
            panel.text(f"{result:g}", end, row, color=color, beside=-10 if data.negative else 10)
    row = len(modes) - 1
    for at, chance in enumerate((1 - data.chance_up, data.chance_up)):
        end, color = _arrival(data, data.reached[at])
        if chance:
            panel.points([row], [end], color, size=2 + 6 * math.sqrt(chance))
        over = color == "overflow" and chance
        words = f"{percent(chance)} {data.reached[at]:g}" if over else percent(chance)
        where, ink = (end, color) if over else (at, "ink")
        panel.text(words, where, row, color=ink, beside=14 if at else -14)
    mirrored = {"base": 1, "slope": -1} if data.negative else {}
    grip = {"cross": -0.75, "step": 1 / 32, "note": f"{data.x:.7g}"}
    panel.rule("x", place, "own", dash=":", width=1.4)
    panel.handle("x", "offset", data.offset, 0, 1, "distance above the lower neighbour, ulp", **grip, **mirrored)
    return scene


def _arrival(data: explorers.ModesExplorer, result: float) -> tuple[float, str]:
    """Where a result lies on the axis, and its colour: inf and NaN lie beyond the neighbour that is too large."""
    if not math.isfinite(result):
        return (-0.06 if data.negative else 1.06), "overflow"
    return (result - data.left) / data.gap, "reference"


def staircase_scene(data: explorers.StaircaseExplorer) -> Scene:
    """Rounded against exact value, and the ulp against the magnitude."""
    scene, limit = Scene(height=380, cols=(1.15, 1)), data.limit
    x = linear("x", -limit, limit, 4)
    y = linear("rounded x", -1.1 * limit, 1.1 * limit, 4) | {"ticks": x["ticks"]}
    stairs = scene.panel(title="rounding is a staircase", x=x, y=y)
    stairs.line([-limit, limit], [-limit, limit], "reference", dash=":", width=1.4, label="exact")
    at = _corners(data.y)[:: 2 if len(_corners(data.y)) > 2400 else 1]
    stairs.line(data.y[at], data.x[at], label="rounded")
    low, high = math.log2(data.ulps.min()), math.log2(data.ulps.max())
    x, y = log2("magnitude", data.span - 10, data.span, 2), log2("ulp", low - 1, high + 1)
    gaps = scene.panel(0, 1, title="a step is one ulp high", x=x, y=y)
    held = data.magnitudes <= data.format.max  # beyond it there is no step
    at = _corners(data.ulps[held])
    gaps.line(np.log2(data.ulps[at]), np.log2(data.magnitudes[at]), "normal", label="ulp", quiet=True)
    if not held.all():
        gaps.rule("x", math.log2(data.format.max), "muted", dash=":")
        largest = math.log2(data.format.max)
        beside = 6 if largest < data.span - 4 else -6  # where there is room
        gaps.text("largest number", largest, low - 0.5, beside=beside, color="muted", halo=True)
    return scene


def _corners(values: np.ndarray) -> np.ndarray:
    """Where a staircase changes, with both ends: all that a line needs."""
    changes = np.flatnonzero(np.diff(values))
    return np.unique(np.concatenate([[0], changes, changes + 1, [len(values) - 1]]))


def updates_scene(data: explorers.UpdatesExplorer) -> Scene:
    """The weight after each update, for four schemes and exact arithmetic, revealed as far as it is played."""
    exact = data.paths["exact"]
    end, steps = exact[-1] - 1, np.linspace(0, len(exact) - 1, 101).astype(int)
    top = max(float(path.max()) for path in data.paths.values()) - 1
    scene = Scene(height=380)
    scene.play("progress", "% of the run", 101, every=80)
    x, y = linear("updates", 0, len(exact) - 1, 8), linear("weight", 1 - 0.08 * end, 1 + 1.08 * max(top, end), 5)
    panel = scene.panel(title=f"a weight of 1 gets 2,000 updates of {data.update:.3g}, kept in five ways", x=x, y=y)
    panel.line(exact[steps], steps, "reference", dash=":", width=1.6, label="exact", tag=True)
    for scheme, (color, dash, label) in SCHEMES.items():
        panel.line(data.paths[scheme][steps], steps, color, dash=dash, width=2.2, show="upto", label=label, tag=True)
    last = {s: data.paths[s][steps] - 1 for s in ("nearest", "exact")}  # beside the 1 a tiny change would not be seen
    words = "nearest has moved by {}, exact by {}"
    panel.text(words, 0.02, 1, values=list(last.values()), frame=True, anchor="start", valign="top", dy=6, halo=True)
    return scene


def sums(totals: Mapping[str, Any], exact: Any) -> Scene:
    """Running totals over the number of terms, one line per way of summing."""
    scene, at = Scene(height=340), np.linspace(0, len(exact) - 1, 251).astype(int)
    exact = np.asarray(exact)
    top = float(exact.max())
    x, y = linear("terms added", 0, len(exact)), linear("total", 0, 1.05 * top)
    panel = scene.panel(title="running totals, and where they stall", x=x, y=y)
    panel.line(exact[at], at + 1, "reference", dash=":", width=1.4, label="exact")
    for (name, values), color, dash, glyph in zip(totals.items(), SERIES, DASHES, GLYPHS):
        look = {"dash": dash, "glyph": glyph, "every": 30}
        panel.line(np.asarray(values)[at], at + 1, color, label=name, tag=True, **look)
    return scene
