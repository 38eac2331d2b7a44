"""Scene of lesson 11: the training path in the plane of two components, walked step by step, with its line search."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from contourpy import contour_generator  # matplotlib draws its own contours with it, so it is always there

from mpkit.plots.scene import Panel, Scene, linear

if TYPE_CHECKING:
    from mpkit.explorers.dim_reduce import DimReduceExplorer  # upward: the types of its arguments

LEVELS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)


def dim_reduce_scene(data: DimReduceExplorer) -> Scene:
    """Left: the plane. Right: the losses of both ways, and the share of the gradient outside the subspace."""
    scene = Scene(height=460, width=980, rows=(1, 1), cols=(1.5, 1))
    steps = len(data.path.searches)
    scene.play("step", "step", steps, every=150)
    (left, right), (low, high) = data.picture
    across, up = linear("along component 1", left, right, 6), linear("along component 2", low, high, 5)
    plane = scene.panel(rowspan=2, title="loss on the plane, nats, and the paths", x=across, y=up)
    _contours(scene, plane, data)
    earlier, reduced = data.points["gradient descent"], data.points["DimReduce"]
    look = {"dash": ":", "glyph": "s", "size": 2.5, "every": 10}
    plane.line(earlier[:, 1], earlier[:, 0], "reference", label="gradient descent", **look)
    plane.line(reduced[:, 1], reduced[:, 0], "own", glyph="o", size=2.2, width=1.8, show="upto", label="DimReduce")
    for refused in data.refused:
        if np.isfinite(refused).any():
            look = {"glyph": "x", "size": 5, "show": "at", "label": "refused trial"}
            plane.points(refused[:, 1], refused[:, 0], "overflow", **look)
    words = ["beyond the picture" if number else "" for number in data.beyond]
    edge = np.nan_to_num(np.where(np.isnan(data.refused[0]), data.refused[1], data.refused[0]))
    plane.text(words, edge[:, 0], edge[:, 1], show="at", beside=8, dy=-8, color="overflow")
    taken = data.taken
    plane.points(taken[:, 1], taken[:, 0], "normal", glyph="D", size=5, show="at", label="accepted trial")
    plane.points(reduced[:-1, 1], reduced[:-1, 0], "ink", fill="paper", size=5, show="at", label="weights now")
    loss = scene.panel(0, 1, title="loss", x=linear("", 0, steps, 4), y=linear("loss, nats", 0, 2.6, 3))
    loss.line(data.earlier.losses, color="reference", dash=":")
    loss.line(data.path.losses)
    x, y = linear("step", 0, steps, 4), linear("share, %", 0, 104, 2)
    outside = scene.panel(1, 1, title="gradient outside the subspace", x=x, y=y)
    outside.line(100 * data.path.residual)
    for panel in (loss, outside):
        panel.rule("x", "index", "muted", dash=":")
    outside.handle("x", "step", data.step, 0, steps - 1, "step")
    return scene


def _contours(scene: Scene, plane: Panel, data: DimReduceExplorer) -> None:
    """Lines of equal loss, which never change and so travel once, with their values where the picture has room."""
    room = [(low + 1.5, high - 1.5) for low, high in data.picture]
    for level, (xs, ys) in _lines(*(a.tobytes() for a in data.landscape), len(data.landscape[0])).items():
        plane.line(scene.keep(f"y{level}", ys), scene.keep(f"x{level}", xs), "muted/0.75", width=0.9)
        inside = [(low < part) & (part < high) for (low, high), part in zip(room, (xs, ys))]
        places = np.flatnonzero(inside[0] & inside[1])
        if len(places):
            at = places[len(places) // 3]
            plane.text(f"{level:.1f}", float(xs[at]), float(ys[at]), size=11, color="muted", halo=True)


@lru_cache(maxsize=2)
def _lines(x: bytes, y: bytes, height: bytes, columns: int) -> dict[float, tuple[Any, Any]]:
    """Level -> (xs, ys); NaN between the pieces of one level."""
    across, up = np.frombuffer(x), np.frombuffer(y)
    generator = contour_generator(across, up, np.frombuffer(height).reshape(-1, columns))
    found = {}
    for level in LEVELS:
        gap = np.full((1, 2), np.nan)
        pieces: list[Any] = [part for piece in generator.lines(level) for part in (piece, gap)]
        if pieces:
            xs, ys = np.concatenate(pieces).T
            found[level] = xs, ys
    return found
