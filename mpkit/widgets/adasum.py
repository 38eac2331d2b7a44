"""The widgets of the lesson on AdaSum."""

from __future__ import annotations

from mpkit.explorers.adasum import PairExplorer, WorkersExplorer
from mpkit.plots.adasum import pair_scene, workers_scene
from mpkit.widgets.scene import View


def adasum_view(**params: object) -> View:
    """Two updates to turn and stretch; parameters as `PairExplorer`."""
    return View(PairExplorer(**params), pair_scene)


def workers_view(**params: object) -> View:
    """1 to 16 workers that agree more or less; parameters as `WorkersExplorer`."""
    return View(WorkersExplorer(**params), workers_scene)
