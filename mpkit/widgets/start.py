"""The widget of the first lesson."""

from __future__ import annotations

from typing import Any

from mpkit.explorers.start import StartExplorer
from mpkit.plots.start import StartPicture
from mpkit.widgets.base import View


def start_view(**params: Any) -> View:
    """Level, initial scale, scale_factor and scale_window, and a Train button; parameters as `StartExplorer`."""
    return View(StartExplorer(**params), StartPicture())
