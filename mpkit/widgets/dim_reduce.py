"""The widget of the lesson on dimension-reduced training."""

from mpkit.explorers.dim_reduce import DimReduceExplorer
from mpkit.plots.dim_reduce import dim_reduce_scene
from mpkit.widgets.scene import plain

dim_reduce_view = plain(
    DimReduceExplorer, dim_reduce_scene, "The path of DimReduce in the plane of two components, step by step"
)
