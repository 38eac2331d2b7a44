"""The widget of lesson 00."""

from __future__ import annotations

from mpkit.explorers.start import StartExplorer
from mpkit.plots.start import start_scene
from mpkit.widgets.scene import View


def start_view(**params: object) -> View:
    """Train on the digits at any level and scale; parameters as `StartExplorer`."""
    return View(StartExplorer(**params), start_scene)
