"""Scenes of the lessons 07 and 21: schedules, weight decay, Adam's first step, and the loss under two loss scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import DASHES, GLYPHS, SERIES, Panel, Scene, linear, log2, power_of_two

if TYPE_CHECKING:
    from mpkit.explorers import optimizers as explorers  # upward: the types of its arguments


def schedules_scene(data: explorers.SchedulesExplorer) -> Scene:
    """Five learning rates over the steps, with a marker at one step."""
    most = max(map(max, data.curves.values()))  # a decay_rate above 1 makes one of them grow
    scene, top = Scene(height=380), float(f"{min(max(data.learning_rate, most), 4 * data.learning_rate):.3g}")
    steps = len(next(iter(data.curves.values())))
    scene.play("step", "step", steps, every=80)
    x, y = linear("step", 0, steps - 1, 8), linear("learning rate", -0.02 * top, 1.05 * top, 5)
    panel = scene.panel(title="the same numbers, five schedules", x=x, y=y)
    _curves(panel, data.curves, data.step)
    return scene


def _curves(panel: Panel, curves: Mapping[str, Sequence[float]], step: int) -> None:
    """A line for each curve with its name at the end and a marker at the step that is played, and a handle there."""
    for (name, seen), color, dash, glyph in zip(curves.items(), SERIES, DASHES, GLYPHS):
        panel.line(seen, color=color, dash=dash, width=1.8, label=name, tag=True)
        panel.points(seen, color=color, glyph=glyph, show="at", size=4.5)
    panel.rule("x", "index", "muted", dash=":")
    panel.handle("x", "step", step, 0, len(seen) - 1, "marked step")


def decay_scene(data: explorers.DecayExplorer) -> Scene:
    """The weight under three optimizers, beside what decay alone would leave of it."""
    scene, steps = Scene(height=380), len(data.curves["SGD"])
    scene.play("step", "step", steps, every=80)
    x, y = linear("step", 0, steps - 1, 8), linear("weight", -0.2, 1.4, 8)
    title, room = f"{data.parameter}, {data.place}: {data.reach}", [28, 136, 42, 60]  # for the name AdamWeightDecay
    panel = scene.panel(title=title, x=x, y=y, pad=room)
    alone = (1 - data.learning_rate * data.weight_decay) ** np.arange(steps)
    panel.line(alone, color="reference", dash=":", width=5, label="× (1 − rate × decay) each step")
    _curves(panel, data.curves, data.step)
    return scene


LOW, HIGH = -12, 8  # powers of two of the step axis; what lies beyond is drawn at the edge


def adam_state_scene(data: explorers.AdamStateExplorer) -> Scene:
    """Step size over gradient size, in float32 and in the narrow format; infinite and zero steps at the edges."""
    scene = Scene(height=390)
    y = log2("first step, in learning rates", LOW - 1, HIGH + 2)
    inner = [[e, power_of_two(e)] for e in range(-9, HIGH, 3)]
    y["ticks"] = [[LOW, f"up to {power_of_two(LOW)}"], *inner, [HIGH, f"from {power_of_two(HIGH)}"]]
    title = "Adam's first step: 1 where v fits the format and eps is small"
    panel = scene.panel(title=title, x=log2("size of the gradient", -26, 16, 6), y=y)
    x = np.log2(data.gradients.numpy())
    narrow, wide = (_shown(step.size.numpy()) for step in (data.narrow, data.wide))
    panel.line(wide, x, "reference", dash="--", label="float32", tag=True)
    panel.line(narrow, x, "own", width=2.4, label="chosen format", ghost=True)
    sizes = data.narrow.size.numpy()
    ends = ((sizes == 0, "zero", "no step: 0", "0"), (~np.isfinite(sizes), "overflow", "inf or NaN", "not finite"))
    for where, color, label, told in ends:
        at = np.flatnonzero(where)[::-3]  # with the last: one value may be all there is
        if len(at):
            panel.points(narrow[at], x[at], color, glyph="x", size=3, label=label, told=told)
    panel.points([narrow[data.marked]], [x[data.marked]], "own", fill="paper", size=6)
    handle = "marked gradient, 2 to the"
    panel.handle("x", "gradient_exponent", data.gradient_exponent, -26, 16, handle)
    return scene


def _shown(sizes: np.ndarray) -> np.ndarray:
    return np.log2(np.clip(np.where(np.isfinite(sizes), sizes, 2.0**HIGH), 2.0**LOW, 2.0**HIGH))


def loss_scale_scene(data: explorers.LossScaleExplorer) -> Scene:
    """The loss over the steps with the chosen scales and with scales that agree."""
    scene, low, top = Scene(height=370), -1.1, 3.0
    losses, steps = np.array(data.losses), len(data.losses)
    bad = ~np.isfinite(losses)
    ticks = [[math.log10(v), f"{v:g}" if v < 1000 else "≥ 1000"] for v in (0.1, 0.3, 1, 3, 10, 100, 1000)]
    y: dict[str, Any] = {"label": "loss, nats", "lo": low, "hi": top + 0.2, "ticks": ticks, "format": "log10"}
    panel = scene.panel(title="loss under two loss scales", x=linear("step", 0, steps - 1, 8), y=y)
    agreed = np.log10(np.clip(data.agreed, 10.0**low, 10.0**top))
    panel.line(agreed, color="reference", dash="--", label="sens = loss_scale", tag=True)
    own = np.where(bad, np.nan, np.log10(np.clip(np.nan_to_num(losses, nan=1.0), 10.0**low, 10.0**top)))
    panel.line(own, color="own", width=2.2, label="chosen", tag=True)
    if bad.any():
        look = {"glyph": "x", "label": "inf or NaN", "told": "not finite"}
        panel.points([top] * int(bad.sum()), np.flatnonzero(bad), "overflow", **look)
    return scene
