"""The widgets of the lessons about dynamic loss scaling."""

from mpkit.explorers.zoo import NaiveExplorer, ZooExplorer
from mpkit.plots.scaling import naive_scene, zoo_scene
from mpkit.widgets.scene import plain

zoo_view = plain(ZooExplorer, zoo_scene, "Every framework on one sequence of overflows")
naive_view = plain(NaiveExplorer, naive_scene, "The rule that compares loss and scale")
