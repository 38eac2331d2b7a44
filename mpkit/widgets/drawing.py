"""The widgets of the predictions that are drawn."""

from mpkit.explorers.drawing import DrawExplorer, GapExplorer, StuckExplorer, TotalExplorer
from mpkit.plots.drawing import draw_scene, gap_scene, stuck_scene, total_scene
from mpkit.widgets.scene import plain

draw_view = plain(DrawExplorer, draw_scene, "The next steps of a scale, drawn by the reader before they are shown")
gap_view = plain(GapExplorer, gap_scene, "The gaps between numbers of float16, drawn before they are shown")
total_view = plain(TotalExplorer, total_scene, "A long sum in float16, drawn before it is shown")
stuck_view = plain(StuckExplorer, stuck_scene, "The loss of DimReduce in two directions, drawn before it is shown")
