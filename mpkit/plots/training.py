"""Scenes of lessons 04 and 06: gradients against a format's range, a step in eight boxes, norms for each order."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpkit.plots.formats import regions, zones
from mpkit.plots.scene import DASHES, GLYPHS, Panel, Scene, exponents, linear, log2, power_of_two, space
from mpkit.replay.percent import percents

if TYPE_CHECKING:
    from mpkit.explorers import training as explorers  # upward: the types of its arguments

FIRST, LAST = -46, 26  # exponents on screen; all smaller and larger ones stand in the outermost bars
SCALES = np.arange(-8, 31)
TALLEST = 25.1  # percent: the highest bar of all histograms; axes and rings stand above it


def underflow_scene(data: explorers.UnderflowExplorer) -> Scene:
    """Left: the scaled gradients over the format; below, the format's window over the gradients. Right: what is lost.

    The histogram at every scale is sent at once, so that the scale is dragged without asking the kernel.
    """
    scene = Scene(height=480, width=960, rows=(1.7, 1), cols=(1.6, 1))
    scene.play("exponent", "static scale, 2 to the", len(SCALES), every=150, first=int(SCALES[0]))
    edges = np.log2([data.limits.lost, data.limits.normal, data.limits.overflow])
    x, y = log2("magnitude", FIRST, LAST, 12), linear("share of the values, %", 0, 1.3 * TALLEST, 5)
    left = scene.panel(title=f"gradients times the scale, in {data.format}", x=x, y=y)
    regions(left, "x", *(float(e) for e in edges))
    heights = 100 * np.stack([_at_scale(data, int(e)) for e in SCALES])
    look = {"width": 1, "label": "share, %", "quiet": True}
    left.bars(heights, np.arange(FIRST, LAST) + 0.5, zones=zones(edges), **look)
    peak = int(np.argmax(_at_scale(data, 0))) + FIRST + 0.5
    grip = {"base": peak, "cross": 1.12 * TALLEST, "note": "drag"}
    lost, over = ([100 * getattr(s, name) for s in data.course] for name in ("lost", "overflow"))
    shown = (percents([getattr(s, name) for s in data.course]) for name in ("lost", "overflow"))
    words = ("{} % flushed to zero", "{} % overflow")
    for row, (text, told) in enumerate(zip(words, shown)):
        look = {"values": [told], "frame": True, "anchor": "end", "valign": "top", "halo": True}
        left.text(text, 0.99, 0.78 - 0.08 * row, color=("zero", "overflow")[row], **look)
    left.handle("x", "exponent", data.exponent, int(SCALES[0]), int(SCALES[-1]), "static scale, 2 to the", **grip)
    _window(scene, data, edges)
    x, y = log2("static loss scale", -8, 30, 8), linear("share, %", -3, 103, 5)
    right = scene.panel(0, 1, rowspan=2, title="lost at each scale", x=x, y=y)
    right.line(lost, SCALES, "zero", label="flushed to zero", every=4, glyph="o")
    right.line(over, SCALES, "overflow", dash="--", label="overflow", every=4, glyph="s")
    right.rule("x", data.best, "normal", dash=":", width=2)
    right.text("recommended", data.best, 96, color="normal", halo=True, beside=-6 if data.best > 16 else 6)
    for values in (lost, over):
        right.points(values, SCALES, "own", show="at", size=5)
    return scene


def _window(scene: Scene, data: explorers.UnderflowExplorer, edges: np.ndarray) -> None:
    """The gradients as they are; what the format holds of them at this scale is a window with a threshold to drag."""
    lost, over = float(edges[0]), float(edges[2])
    heights = 100 * _at_scale(data, 0)
    top = 1.5 * TALLEST
    x, y = log2("magnitude of the gradient itself", FIRST, LAST, 12), linear("share, %", 0, top, 2)
    panel = scene.panel(1, 0, title="what the format holds at this scale", x=x, y=y)
    window = {"width": over - lost, "shift": -SCALES, "fill": "normal/0.2", "edge": "normal"}
    told = [f"{power_of_two(round(lost - e, 1))} to {power_of_two(round(over - e, 1))}" for e in SCALES]
    panel.bars([top], [(lost + over) / 2], label="window of the format", told=told, **window)
    panel.bars(heights, np.arange(FIRST, LAST) + 0.5, width=1, fill="reference/0.6", quiet=True)
    panel.text("zero up to 2^{}", 0.99, 0.86, values=[lost - SCALES], frame=True, anchor="end", halo=True, color="zero")
    grip = {"id": "threshold", "base": lost, "slope": -1, "note": "threshold", "cross": 1.25 * TALLEST}
    panel.handle(
        "x", "exponent", data.exponent, int(SCALES[0]), int(SCALES[-1]), "threshold below which all is 0", **grip
    )


def _at_scale(data: explorers.UnderflowExplorer, exponent: int) -> np.ndarray:
    """Shares of the magnitudes times 2^exponent by power of two on screen, the ends with all that lies beyond."""
    heights = np.asarray(data.unscaled)
    start = FIRST - exponent - data.first_bin
    inside = np.zeros(LAST - FIRST)
    own = np.clip(np.arange(len(heights)) - start, 0, LAST - FIRST - 1)
    np.add.at(inside, own, heights)
    return inside


def step_scene(data: explorers.StepExplorer) -> Scene:
    """Eight boxes in a ring; a batch travels through them; an inf dies at the gate to the weights, or does not."""
    scene = Scene(height=440, width=960)
    scene.play("phase", "phase", 8, every=900, first=1)
    panel = scene.panel(title="one training step", x=space(0, 4), y=space(0, 2.14), bare=True)
    ill = [data.bad, *data.ill[1:6], data.ill[6], False]
    places = [(i + 0.04, 1.3) if i < 4 else (7 - i + 0.04, 0.05) for i in range(8)]
    for i, (phase, (x, y)) in enumerate(zip(data.phases, places)):
        box = ([x], [y], [x + 0.88], [y + 0.8])
        panel.boxes(*box, fill="reference/0.1", edge="reference", width=1.5, radius=5)
        if data.ill[i]:
            panel.boxes(*box, fill="overflow/0.22", edge="overflow", width=1.5, radius=5, only=(i, 7))
        panel.boxes(*box, edge="own", width=4, radius=5, only=(i, i))
        head = {"anchor": "start", "valign": "top"}
        panel.text(_wrapped(f"{i + 1} {phase.name}"), x + 0.04, y + 0.77, weight="bold", size=11, **head)
        panel.text(phase.code, x + 0.04, y + 0.61, color="muted", **head)
        panel.text(_wrapped(phase.seen), x + 0.04, y + 0.47, **head)
    for i, ((x, y), (to, down)) in enumerate(pairwise(places)):
        if x == to:  # from the upper row into the lower one
            ends = (x + 0.44, y - 0.01), (x + 0.44, down + 0.81)
        else:
            out = 0.885 if to > x else -0.005
            ends = (x + out, y + 0.4), (to + 0.88 - out, down + 0.4)
        panel.arrow(*ends, "reference", width=2)
        if ill[i]:
            panel.arrow(*ends, "overflow", width=2.6, only=(i + 1, 7))
    _gate(panel, data)
    _traveller(panel, data, ill, places)
    return scene


def _gate(panel: Panel, data: explorers.StepExplorer) -> None:
    """From the seventh phase back to the weights: a bar across the way that is closed, open, or comes too late."""
    shut, role = data.skipped, "overflow" if data.skipped or data.lost else "normal"
    words = {"overflow": "shut: the weights stay as they were", "normal": "open: the weights move"}[role]
    if data.lost:
        words = f"too late: {data.lost} of {data.phases[6].count} weights are not finite"
        panel.boxes([0.04], [1.3], [0.92], [2.1], fill="overflow/0.22", edge="overflow", radius=5, only=(6, 7))
    panel.text("the way to the weights", 1.62, 1.07, color="muted", anchor="start", only=(0, 5))
    panel.line([0.86, 1.075, 1.075], [1.4, 1.4, 0.6], "reference", width=2)
    panel.arrow((0.6, 1.07), (0.6, 1.29), "reference", width=2)
    if not shut:
        panel.line([0.86, 1.075, 1.075], [1.4, 1.4, 0.6], role, width=2.6, only=(6, 7))
        panel.arrow((0.6, 1.07), (0.6, 1.29), role, width=2.6, only=(6, 7))
    bar = ([0.99, 1.16], [1.2, 1.2]) if shut else ([1.14, 1.14], [1.2, 1.37])  # across the way, or beside it
    panel.line(*bar, role, width=6, only=(6, 7))
    if shut:
        panel.points([1.075], [1.2], "overflow", glyph="x", size=9, width=3, only=(6, 7))
    panel.text(words, 1.62, 1.07, color=role, anchor="start", weight="bold", only=(6, 7))


def _traveller(panel: Panel, data: explorers.StepExplorer, ill: list[bool], places: list[tuple[float, float]]) -> None:
    """The ring that is the batch, with what becomes of its values beside it."""
    x, y = ([place[axis] + 0.1 for place in places] for axis in (0, 1))
    told = [f"{p.bad} of {p.count}\nnot finite" if p.bad and p.count > 1 else "" for p in data.phases]
    told = [words or ("not finite" if p.bad else "all finite") for words, p in zip(told, data.phases)]
    told[0] = "the batch,\nwith an inf" if data.bad else "the batch"
    told[6:] = ["not finite" if data.ill[6] else "all finite", "the answer"]
    colors = ["overflow" if spoilt else "own" for spoilt in ill]
    panel.text(told, x, y, color=colors, anchor="start", dx=15, show="at", weight="bold")
    hue = np.array(ill, np.uint8)
    panel.points(y, x, ["own", "overflow"], hue=hue, show="at", size=8, glide=True)


def _wrapped(sentence: str, width: int = 24) -> str:
    return "\n".join(textwrap.wrap(sentence, width))


def order_scene(data: explorers.OrderExplorer) -> Scene:
    """Norm of the gradient that reaches the optimizer over the scale, one line per order."""
    low, high = -28, 6
    scene = Scene(height=380)
    x, y = log2("loss scale", 0, 20, 4), log2("norm that the optimizer sees", low, high, 4)
    panel = scene.panel(title="what each order hands to the optimizer", x=x, y=y)
    panel.rule("y", float(np.log2(data.max_norm)), "reference", dash=":")
    panel.text("the norm asked for", 0, float(np.log2(data.max_norm)), anchor="start", dx=20, dy=-16, color="reference")
    for (order, norms), color, dash, glyph in zip(data.norms.items(), ("normal", "overflow", "zero"), DASHES, GLYPHS):
        look = {"dash": dash, "glyph": glyph, "every": 2, "label": order, "tag": True}
        panel.line(exponents(norms, low, high), np.arange(21), color, **look)
    panel.handle("x", "exponent", data.exponent, 0, 20, "loss scale, 2 to the")
    norm = {"log2": True, "step": 0.5, "cross": 19.4}
    panel.handle("y", "max_norm", float(np.log2(data.max_norm)), -6, 2, "clip to the norm, 2 to the", **norm)
    return scene
