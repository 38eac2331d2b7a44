"""The widgets of lesson 02."""

from mpkit.explorers.rounding import ModesExplorer, StaircaseExplorer, UpdatesExplorer
from mpkit.plots.rounding import modes_scene, staircase_scene, updates_scene
from mpkit.widgets.scene import plain

modes_view = plain(ModesExplorer, modes_scene, "A number between two neighbours in every mode")
staircase_view = plain(StaircaseExplorer, staircase_scene, "The graph of rounding")
updates_view = plain(UpdatesExplorer, updates_scene, "2,000 tiny updates in four schemes")
