"""Scene of lesson 13: scales over the steps, one against four, and what survives in each group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import DASHES, SERIES, Scene, exponents, linear, log2, names

if TYPE_CHECKING:
    from mpkit.explorers.group_scale import GroupScaleExplorer  # upward: the types of its arguments

GROUPS = 4


def group_scale_scene(data: GroupScaleExplorer) -> Scene:
    """Left: the scales, x where an overflow began. Right: the share of gradient values that is not rounded to zero."""
    one, own = data.runs.values()
    steps = len(one.scales)
    scene = Scene(height=410, width=960, cols=(1.5, 1))
    scene.play("step", "step", steps, every=100)
    low, high = 0, float(np.ceil(np.log2(max(one.scales.max(), own.scales.max())))) + 2
    y = log2("loss scale", low, high)
    left = scene.panel(title="loss scale; × an overflow began", x=linear("step", 0, steps, 6), y=y)
    look: dict[str, Any] = {"step": "post", "show": "upto", "tag": True}
    at = exponents(one.scales[:, 0], low, high)
    left.line(at, color="reference", label="one scale", width=2.6, dash="1 2", **look)
    for i, (color, dash) in enumerate(zip(SERIES[:GROUPS], DASHES)):
        at = exponents(own.scales[:, i], low, high)
        left.line(at, color=color, dash=dash, label=f"group {i + 1}", **look)
        bad = np.flatnonzero(own.overflows[:, i])
        left.crosses(at, bad, color=color, since=bad, size=3.5, show="upto")
    left.rule("x", "index", "muted", dash=":")
    left.handle("x", "step", data.step, 0, steps - 1, "step")
    x, y = linear("values that survive, %", 0, 100, 5), names([f"group {i + 1}" for i in range(GROUPS)], down=True)
    right = scene.panel(0, 1, title="not rounded to zero", x=x, y=y)
    for way, shift, role, hatch in zip(data.runs, (-0.2, 0.2), ("reference", "own"), (True, None)):
        look = {"axis": "y", "width": 0.36, "fill": f"{role}/0.5", "edge": role, "hatch": hatch}
        right.bars(100 * data.survive_all[way], np.arange(GROUPS) + shift, label=way, **look)
    return scene
