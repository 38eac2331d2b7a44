"""The scene of the drawn prediction in lesson 05."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpkit.plots.scene import Scene, linear, log2

if TYPE_CHECKING:
    from mpkit.explorers.drawing import DrawExplorer  # upward: the types of its arguments

LOW, HIGH = 14, 22


def draw_scene(data: DrawExplorer) -> Scene:
    """The scale so far under its ceiling, the reader's pen for the rest, and over it what happened once it is shown."""
    steps, first = len(data.truth), len(data.truth) - len(data.guess)
    scene = Scene(height=380, width=900)
    title = "your line and what happened" if data.revealed else "draw the scale into the right part"
    panel = scene.panel(title=title, x=linear("step", -1, steps, 10), y=log2("loss scale", LOW, HIGH))
    panel.band(np.clip(data.top, LOW, HIGH), HIGH, label="here it would overflow")
    panel.rule("x", first - 0.5, "muted", dash=":")
    mine = np.concatenate([np.full(first, np.nan), np.clip(data.guess, LOW, HIGH)])
    panel.add("pen", y=mine, color="own", name="draw", lo=LOW, hi=HIGH, label="your line", width=2.4, dash="--")
    shown = steps if data.revealed else first
    skips = np.flatnonzero(~data.finite[:shown])
    panel.line(data.truth[:shown], color="reference", step="mid", width=2.6, label="loss scale")
    if len(skips):
        panel.points(data.truth[skips], skips, "overflow", glyph="x", size=5, label="skipped step")
    return scene
