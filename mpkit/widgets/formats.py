"""The widgets of lesson 01."""

from __future__ import annotations

from mpkit.explorers.formats import BitsExplorer, GradientsExplorer, RangesExplorer
from mpkit.plots.formats import bits_scene, gradients_scene, ranges_scene
from mpkit.widgets.scene import View


def bits_view(**params: object) -> View:
    """A number and its bits; parameters as `BitsExplorer`."""
    return View(BitsExplorer(**params), bits_scene)


def ranges_view(**params: object) -> View:
    """One magnitude in all formats; parameters as `RangesExplorer`."""
    return View(RangesExplorer(**params), ranges_scene)


def gradients_view(**params: object) -> View:
    """Recorded gradients over the range of a format; parameters as `GradientsExplorer`."""
    return View(GradientsExplorer(**params), gradients_scene)
