"""Scenes of lesson 00: loss and loss scale over the steps, of one run and the run before, or of every level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scaling import runs_panels
from mpkit.plots.scene import DASHES, SERIES, Scene

if TYPE_CHECKING:
    from mpkit.explorers.start import StartExplorer  # upward: the types of its arguments


def start_scene(data: StartExplorer) -> Scene:
    """This run, the run before, and the scale that would be reached without an overflow."""
    scene = Scene(height=380, width=900, cols=(1, 1.2))
    own = data.run is not None and bool(data.run.losses)
    runs: list[tuple[str, Any, str, str | None]] = []
    if data.before is not None:
        runs.append(("run before", data.before, "reference", "--"))
    if own:
        runs.append(("this run", data.run, "own", None))
    if not runs:
        runs.append(("a recorded run", data.recorded, "reference", "--"))
    plan = np.log2(np.minimum(data.plan, 2.0**127))
    _, panel = runs_panels(scene, runs, len(data.plan), also=(plan.min(), min(plan.max(), 40)))
    y = panel.given["y"]
    at = np.where(plan <= y["hi"], plan, np.nan)  # a line along the edge would look like a cap
    panel.line(at, color="muted", dash=":", width=1.4, step="post", label="without an overflow")
    inside = 0.03 * len(data.plan)  # or the ball would cover the axis
    panel.handle("y", "init_exponent", data.init_exponent, 0, 30, "initial scale, 2 to the", cross=inside, note="start")
    return scene


def compare_runs(runs: Sequence[Any]) -> Scene:
    """Loss (mean of 8 steps) and scale of several runs, one line style per level."""
    scene = Scene(height=360, width=900, cols=(1, 1))
    named = [(run.level, run, color, dash) for run, color, dash in zip(runs, SERIES, DASHES)]
    loss, _ = runs_panels(scene, named, len(runs[0].losses), mean=8)
    loss.given["title"] = "loss, mean of 8 steps"
    return scene
