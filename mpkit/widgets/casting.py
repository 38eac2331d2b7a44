"""The widgets of lesson 03."""

from __future__ import annotations

from mpkit.explorers.casting import CastingExplorer, LogSoftmaxExplorer
from mpkit.plots.casting import casting_scene, log_softmax_scene
from mpkit.widgets.scene import View


def casting_view(**params: object) -> View:
    """A network at a level, operation by operation; parameters as `CastingExplorer`."""
    return View(CastingExplorer(**params), casting_scene)


def log_softmax_view(**params: object) -> View:
    """Why softmax and log want float32; parameters as `LogSoftmaxExplorer`."""
    return View(LogSoftmaxExplorer(**params), log_softmax_scene)
