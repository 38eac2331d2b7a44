"""The widgets of lesson 02."""

from __future__ import annotations

from mpkit.explorers.rounding import ModesExplorer, StaircaseExplorer, UpdatesExplorer
from mpkit.plots.rounding import modes_scene, staircase_scene, updates_scene
from mpkit.widgets.scene import View


def modes_view(**params: object) -> View:
    """A number between two neighbours in every mode; parameters as `ModesExplorer`."""
    return View(ModesExplorer(**params), modes_scene)


def staircase_view(**params: object) -> View:
    """The graph of rounding; parameters as `StaircaseExplorer`."""
    return View(StaircaseExplorer(**params), staircase_scene)


def updates_view(**params: object) -> View:
    """2,000 tiny updates in four schemes; parameters as `UpdatesExplorer`."""
    return View(UpdatesExplorer(**params), updates_scene)
