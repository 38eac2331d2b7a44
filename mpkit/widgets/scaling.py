"""The widgets of the lessons about dynamic loss scaling."""

from mpkit.explorers.scaling import DynamicsExplorer, LiveExplorer, SweepExplorer
from mpkit.explorers.zoo import NaiveExplorer, ZooExplorer
from mpkit.plots.scaling import dynamics_scene, live_scene, naive_scene, sweep_scene, zoo_scene
from mpkit.widgets.scene import plain

dynamics_view = plain(DynamicsExplorer, dynamics_scene, "A recorded run under any dynamic scale, animated")
sweep_view = plain(SweepExplorer, sweep_scene, "Factor x window on a recorded run")
live_view = plain(LiveExplorer, live_scene, "A training that is steered while it runs")
zoo_view = plain(ZooExplorer, zoo_scene, "Every framework on one sequence of overflows")
naive_view = plain(NaiveExplorer, naive_scene, "The rule that compares loss and scale")
