"""The widgets of the lesson on AdaSum."""

from mpkit.explorers.adasum import PairExplorer, WorkersExplorer
from mpkit.plots.adasum import adasum_scene, workers_scene
from mpkit.widgets.scene import plain

adasum_view = plain(PairExplorer, adasum_scene, "Two updates to turn and stretch")
workers_view = plain(WorkersExplorer, workers_scene, "1 to 16 workers that agree more or less")
