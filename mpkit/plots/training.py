"""Scenes of lessons 04 and 06: gradients against a format's range, a step in eight boxes, norms for each order."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from mpkit.plots.formats import regions
from mpkit.plots.scene import DASHES, GLYPHS, Scene, linear, log2, space

FIRST, LAST = -46, 26  # exponents on screen; all smaller and larger ones stand in the outermost bars
SCALES = np.arange(-8, 31)


def underflow_scene(data: Any) -> Scene:
    """Left: the histogram of the scaled gradients over the format. Right: what is lost at every scale.

    The histogram at every scale is sent at once, so that the scale is dragged without asking the kernel.
    """
    scene = Scene(height=400, width=960, cols=(1.6, 1))
    scene.play("exponent", "static scale, 2 to the", len(SCALES), every=150, first=int(SCALES[0]))
    edges = np.log2([data.limits.lost, data.limits.normal, data.limits.overflow])
    left = scene.panel(
        title=f"gradients times the scale, in {data.format}",
        x=log2("magnitude", FIRST, LAST, 12),
        y=linear("share of the values, %", 0, 20, 4),
    )
    regions(left, "x", *(float(e) for e in edges))
    heights = 100 * np.stack([_at_scale(data, int(e)) for e in SCALES])
    zones = [[float(e), role] for e, role in zip(edges, ("zero", "subnormal", "normal"))]
    look = {"width": 1, "label": "share, %", "quiet": True}
    left.bars(
        heights,
        np.arange(FIRST, LAST) + 0.5,
        zones=[*zones, [None, "overflow"]],
        **look,
    )
    peak = int(np.argmax(_at_scale(data, 0))) + FIRST + 0.5
    grip = {"base": peak, "cross": 14.5, "note": "drag"}
    lost, over = ([100 * getattr(s, name) for s in data.course] for name in ("lost", "overflow"))
    words = ("{} % flushed to zero", "{} % overflow")
    for row, (text, values) in enumerate(zip(words, (lost, over))):
        look = {"values": [np.round(values, 1)], "frame": True, "anchor": "end", "valign": "top", "halo": True}
        left.text(text, 0.62, 0.86 - 0.08 * row, color=("zero", "overflow")[row], **look)
    left.handle("x", "exponent", data.exponent, int(SCALES[0]), int(SCALES[-1]), "static scale, 2 to the", **grip)
    right = scene.panel(
        0, 1, title="lost at each scale", x=log2("static loss scale", -8, 30, 8), y=linear("share, %", -3, 103, 5)
    )
    right.line(lost, SCALES, "zero", label="flushed to zero", every=4, glyph="o")
    right.line(over, SCALES, "overflow", dash="--", label="overflow", every=4, glyph="s")
    right.rule("x", data.best, "normal", dash=":", width=2)
    side = {"anchor": "end", "dx": -6} if data.best > 12 else {"anchor": "start", "dx": 6}
    right.text("recommended", data.best, 96, color="normal", halo=True, **side)
    for values in (lost, over):
        right.points(values, SCALES, "own", show="at", size=5)
    return scene


def _at_scale(data: Any, exponent: int) -> np.ndarray:
    """Shares of the magnitudes times 2^exponent by power of two on screen, the ends with all that lies beyond."""
    heights = np.asarray(data.unscaled)
    start = FIRST - exponent - data.first_bin
    inside = np.zeros(LAST - FIRST)
    own = np.clip(np.arange(len(heights)) - start, 0, LAST - FIRST - 1)
    np.add.at(inside, own, heights)
    return inside


def step_scene(data: Any) -> Scene:
    """Eight boxes in the order of the step; one batch travels through them, and an inf dies at the gate."""
    scene = Scene(height=400, width=960)
    scene.play("phase", "phase", 8, every=900, first=1)
    panel = scene.panel(title="one training step", x=space(0, 4), y=space(-0.05, 2), bare=True)
    for i, phase in enumerate(data.phases):
        row, column = divmod(i, 4)
        x, y = column + 0.04, 1.08 - row
        failed = data.skipped and i == 6
        role = "overflow" if failed or (data.ill[i] and i < 7) else "reference"
        panel.boxes(
            *([x], [y], [x + 0.88], [y + 0.8]),
            fill=f"{role}/0.12",
            edge=role,
            dash="--" if failed else None,
            width=1.5,
            radius=5,
        )
        panel.boxes([x], [y], [x + 0.88], [y + 0.8], edge="own", width=4, radius=5, only=(i, i))
        head = {"anchor": "start", "valign": "top"}
        panel.text(f"{i + 1}  {phase.name}", x + 0.05, y + 0.74, weight="bold", **head)
        panel.text(phase.code, x + 0.05, y + 0.56, color="muted", **head)
        panel.text(_wrapped(phase.seen), x + 0.05, y + 0.4, color=role if role == "overflow" else "ink", **head)
        if column < 3:
            panel.add("arrows", x0=[x + 0.885], y0=[y + 0.4], x1=[x + 0.955], y1=[y + 0.4], width=2)
    panel.add("arrows", x0=[3.4], y0=[1.06], x1=[0.6], y1=[0.9], width=2)
    end = "the update is skipped: the weights stay as they were" if data.skipped else "the weights move"
    panel.text(end, 2.48, -0.02, color="overflow" if data.skipped else "normal", valign="middle")
    number = np.arange(8)
    hue = np.array(data.ill, np.uint8)
    panel.points(1.82 - number // 4, number % 4 + 0.85, ["own", "overflow"], hue=hue, show="at", size=8)
    return scene


def _wrapped(sentence: str, width: int = 27) -> str:
    return "\n".join(textwrap.wrap(sentence, width))


def order_scene(data: Any) -> Scene:
    """Norm of the gradient that reaches the optimizer over the scale, one line per order."""
    low, high = -28, 6
    scene = Scene(height=380)
    panel = scene.panel(
        title="only the right order does not depend on the scale",
        x=log2("loss scale", 0, 20, 4),
        y=log2("norm that the optimizer sees", low, high, 4),
    )
    panel.rule("y", float(np.log2(data.max_norm)), "reference", dash=":")
    panel.text("the norm asked for", 0, float(np.log2(data.max_norm)), anchor="start", dx=20, dy=-16, color="reference")
    for (order, norms), color, dash, glyph in zip(data.norms.items(), ("normal", "overflow", "zero"), DASHES, GLYPHS):
        y = np.clip(np.log2(np.maximum(norms, 1e-300)), low, high)
        panel.line(y, np.arange(21), color, dash=dash, glyph=glyph, every=2, label=order, tag=True)
    panel.handle("x", "exponent", data.exponent, 0, 20, "loss scale, 2 to the")
    norm = {"log2": True, "step": 0.5, "cross": 19.4}
    panel.handle("y", "max_norm", float(np.log2(data.max_norm)), -6, 2, "clip to the norm, 2 to the", **norm)
    return scene
