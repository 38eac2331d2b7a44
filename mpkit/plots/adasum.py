"""Scenes of lesson 12: two updates and what becomes of them, many workers, a training with each rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import Scene, exponents, linear, log2

if TYPE_CHECKING:
    from mpkit.explorers.adasum import PairExplorer, WorkersExplorer  # upward: the types of its arguments

LOOK: Mapping[str, dict[str, Any]] = {
    "sum": {"color": "overflow", "dash": "--", "glyph": "s"},
    "mean": {"color": "normal", "dash": "-.", "glyph": "^"},
    "AdaSum": {"color": "zero", "glyph": "o"},
}


def adasum_scene(data: PairExplorer) -> Scene:
    """The vectors in the plane, a and b by their tips, and the length of each result over the angle."""
    scene = Scene(height=420, width=960, cols=(1.35, 1))
    x, y = linear("first weight's update", -3.4, 6.4, 5), linear("second weight's update", -0.8, 5.2, 4)
    plane = scene.panel(title="two updates a, b and the merged update: drag a and b", x=x, y=y, equal=True)
    for name, vector in (("a", data.a), ("b", data.b)):
        tip = [float(v) for v in vector]
        plane.line([0, tip[1]], [0, tip[0]], width=4)
        length = float(vector.norm()) or 1.0
        beyond = {"dx": 18 * tip[0] / length, "dy": -18 * tip[1] / length}
        plane.text(name, *tip, color="own", size=14, halo=True, **beyond)
    for rule, vector in data.results.items():
        tip = [float(v) for v in vector]
        plane.line([0, tip[1]], [0, tip[0]], label=rule, width=2.2, **LOOK[rule])
    side: dict[str, Any] = {"step": 0.1, "gesture": True}
    plane.handle("x", "length_a", data.length_a, 0, 3, "length of a", cross=0, step=0.1)
    plane.handle("xy", "drag_b", [float(v) for v in data.b], -3, 3, "tip of b", **side)
    x, y = linear("angle between a and b, degrees", 0, 180, 6), linear("length of the result", 0, 6.2, 6)
    lengths = scene.panel(0, 1, title="length over the angle", x=x, y=y)
    for rule in data.results:
        lengths.line(data.lengths[rule], data.angles, **(LOOK[rule] | {"glyph": None}))
        lengths.points([float(data.results[rule].norm())], [data.angle], LOOK[rule]["color"], glyph=LOOK[rule]["glyph"])
    lengths.handle("x", "angle", data.angle, 0, 180, "angle, degrees", step=5)
    return scene


def workers_scene(data: WorkersExplorer) -> Scene:
    """Length of the merged update over the number of workers, and its cosine with the shared direction."""
    scene = Scene(height=380, width=940, cols=(1, 1))
    counts = np.log2(data.counts)
    x = log2("workers", -0.2, 4.2) | {"ticks": [[float(e), str(n)] for e, n in zip(counts, data.counts)]}
    least = min(-3, math.floor(math.log2(max(1e-9, min(map(min, data.lengths.values()))))))
    lengths = scene.panel(title="length of the merged update", x=x, y=log2("length, in single updates", least, 4.2))
    x, y = dict(x), linear("cosine", min(-0.5, min(map(min, data.cosines.values())) - 0.05), 1.05, 4)
    cosines = scene.panel(0, 1, title="cosine with the shared direction", x=x, y=y)
    for panel in (lengths, cosines):
        panel.rule("x", float(np.log2(data.workers)), "own", width=2)
    for rule, look in LOOK.items():
        lengths.line(exponents(data.lengths[rule], least, 4.2), counts, label=rule, tag=True, **look)
    for rule, name in (("mean", "mean and sum"), ("AdaSum", "AdaSum")):
        cosines.line(data.cosines[rule], counts, label=name, tag=True, **LOOK[rule])
    return scene


def training_curves(losses: Mapping[str, Sequence[float]], top: float = 3.0) -> Scene:
    """Loss over the steps, one line per rule; what lies above `top` is drawn at `top`."""
    scene = Scene(height=360)
    steps = max(map(len, losses.values()))
    x, y = linear("step", 0, steps - 1), linear("loss over the training digits, nats", 0, top * 1.1, 5)
    panel = scene.panel(title="a training with each rule", x=x, y=y)
    panel.rule("y", top, "muted", width=1)
    panel.text(
        f"larger losses are drawn at {top:g}", 0, top, anchor="start", valign="bottom", dx=6, dy=-3, color="muted"
    )
    for rule, values in losses.items():
        panel.line(np.minimum(values, top), every=8, label=rule, tag=True, **LOOK[rule.split(",")[0]])
    return scene
