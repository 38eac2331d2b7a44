"""The widgets of the predictions that are drawn."""

from __future__ import annotations

from mpkit.explorers.drawing import DrawExplorer, GapExplorer, StuckExplorer, TotalExplorer
from mpkit.plots.drawing import draw_scene, gap_scene, stuck_scene, total_scene
from mpkit.widgets.scene import View


def draw_view(**params: object) -> View:
    """The next steps of a scale, drawn by the reader before they are shown; parameters as `DrawExplorer`."""
    return View(DrawExplorer(**params), draw_scene)


def gap_view(**params: object) -> View:
    """The gaps between numbers of float16, drawn before they are shown; parameters as `GapExplorer`."""
    return View(GapExplorer(**params), gap_scene)


def total_view(**params: object) -> View:
    """A long sum in float16, drawn before it is shown; parameters as `TotalExplorer`."""
    return View(TotalExplorer(**params), total_scene)


def stuck_view(**params: object) -> View:
    """The loss of DimReduce in two directions, drawn before it is shown; parameters as `StuckExplorer`."""
    return View(StuckExplorer(**params), stuck_scene)
