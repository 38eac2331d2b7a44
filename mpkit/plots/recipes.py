"""Scenes of the lessons on recipes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import GLYPHS, Scene, exponents, fitted, linear, log2

if TYPE_CHECKING:
    from mpkit.explorers import recipes as explorers  # upward: the types of its arguments


def amax_scene(data: explorers.AmaxExplorer) -> Scene:
    """The largest element of each step under what the scale can hold; beyond it elements are clipped."""
    low, high = fitted(data.amax, data.holds[1:], room=1)
    amax, holds = exponents(data.amax, low, high), exponents(data.holds, low, high)
    scene = Scene(height=400)
    steps = len(amax)
    x, y = linear("step", 0, steps - 1), log2("magnitude", low, high)
    panel = scene.panel(title="the largest element, and the largest that the scale can hold", x=x, y=y)
    panel.band(holds, high, label="clipped here")
    panel.line(holds, color="overflow", step="mid", width=1.6, label="the scale holds")
    panel.line(amax, color="own", width=1.6, label="amax")
    panel.crosses(amax, data.clipped, "clipped step")
    return scene


def block_scene(data: explorers.BlockExplorer) -> Scene:
    """128 values and how they are stored, with the borders of the blocks."""
    scene = Scene(height=420)
    low, high = -8, max(3, math.ceil(math.log2(float(np.abs(data.x).max()))) + 1)
    x, y = linear("place in the row", -1, 128, 8), log2("magnitude", low, high)
    panel = scene.panel(title="128 magnitudes in a row, and how they are stored; zero is at the bottom", x=x, y=y)
    for border in range(data.size, 128, data.size):
        panel.rule("x", border - 0.5)
    panel.points(exponents(np.abs(data.x), low, high), color="reference", glyph="o", size=3.5, label="value")
    panel.points(exponents(np.abs(data.decoded), low, high), color="own", glyph="x", size=4, label="stored")
    return scene


def recipe_scene(data: explorers.RecipeExplorer) -> Scene:
    """Losses of every seed, float32 and the recipe."""
    scene = Scene(height=380)
    at = data.every * (1 + np.arange(data.own.shape[1]))
    top = float(max(data.own.max(), data.plain.max()))
    low = float(min(data.own.min(), data.plain.min()))
    x, y = linear("step", 0, int(at[-1])), linear("loss, nats", math.floor(low * 4) / 4, math.ceil(top * 4) / 4)
    panel = scene.panel(title="training loss, one line and one sign for each seed", x=x, y=y)
    for i, (plain, own, glyph) in enumerate(zip(data.plain, data.own, GLYPHS)):
        sign: dict[str, Any] = {"glyph": glyph, "size": 3}
        panel.line(plain, at, "reference", width=1.4, dash="--", label=None if i else "float32", **sign)
        panel.line(own, at, "own", width=1.6, label=None if i else data.recipe, **sign)
    panel.rule("x", data.at, "muted", dash=":")
    return scene
