"""The widget of the lesson on dimension-reduced training."""

from __future__ import annotations

from mpkit.explorers.dim_reduce import DimReduceExplorer
from mpkit.plots.dim_reduce import dim_reduce_scene
from mpkit.widgets.scene import View


def dim_reduce_view(**params: object) -> View:
    """The path of DimReduce in the plane of two components, step by step; parameters as `DimReduceExplorer`."""
    return View(DimReduceExplorer(**params), dim_reduce_scene)
