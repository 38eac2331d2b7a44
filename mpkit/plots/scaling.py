"""Loss and scale of some runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpkit.plots.scene import Panel, Scene, exponents, fitted, linear, log2


def runs_panels(scene: Scene, runs: Any, steps: int, also: Sequence[float] = (), mean: int = 1) -> tuple[Panel, Panel]:
    """Loss (mean of so many steps) and scale of some runs: (name, run, role, dash); crosses where a step was skipped.

    `also` are exponents that the axis of the scale has to hold.
    """
    scales = [np.minimum(run.scales, 2.0**127) for _, run, _, _ in runs]
    low, high = fitted(*scales, np.exp2(also), room=1)
    y = linear("loss, nats", 0, 3, 3)
    y["ticks"][-1][1] = "≥ 3, NaN"  # such losses are drawn there
    loss = scene.panel(title="loss", x=linear("step", 0, steps, 4), y=y)
    panel = scene.panel(0, 1, title="loss scale", x=linear("step", 0, steps, 4), y=log2("loss scale", low, high))
    for name, run, color, dash in runs:
        n = min(len(run.losses), len(run.scales))
        look = {"color": color, "dash": dash, "width": 2.2 if color == "own" else 1.6}
        look |= {"glyph": "o"} if n == 1 else {}  # a line of one point would not be seen
        losses = np.clip(np.nan_to_num(run.losses[:n], nan=3, posinf=3), 0, 3)
        loss.line(np.convolve(losses, np.ones(mean) / mean, "valid") if n >= mean else losses, label=name, **look)
        at = exponents(run.scales[:n], low, high)
        panel.line(at, step="post", label=name, **look)
        panel.crosses(at, [i for i in run.skipped if i < n], "skipped step")
    return loss, panel
