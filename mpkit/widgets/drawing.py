"""The widgets of the predictions that are drawn."""

from mpkit.explorers.drawing import StuckExplorer
from mpkit.plots.drawing import stuck_scene
from mpkit.widgets.scene import plain

stuck_view = plain(StuckExplorer, stuck_scene, "The loss of DimReduce in two directions, drawn before it is shown")
