"""The widgets of the lessons about dynamic loss scaling."""

from __future__ import annotations

from mpkit.explorers.scaling import DynamicsExplorer, LiveExplorer, SweepExplorer
from mpkit.explorers.zoo import NaiveExplorer, ZooExplorer
from mpkit.plots.scaling import dynamics_scene, live_scene, naive_scene, sweep_scene, zoo_scene
from mpkit.widgets.scene import View


def dynamics_view(**params: object) -> View:
    """A recorded run under any dynamic scale, animated; parameters as `DynamicsExplorer`."""
    return View(DynamicsExplorer(**params), dynamics_scene)


def sweep_view(**params: object) -> View:
    """Factor x window on a recorded run; parameters as `SweepExplorer`."""
    return View(SweepExplorer(**params), sweep_scene)


def live_view(**params: object) -> View:
    """A training that is steered while it runs; parameters as `LiveExplorer`."""
    return View(LiveExplorer(**params), live_scene)


def zoo_view(**params: object) -> View:
    """Every framework on one sequence of overflows; parameters as `ZooExplorer`."""
    return View(ZooExplorer(**params), zoo_scene)


def naive_view(**params: object) -> View:
    """The rule that compares loss and scale; parameters as `NaiveExplorer`."""
    return View(NaiveExplorer(**params), naive_scene)
