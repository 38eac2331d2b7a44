"""The widget of the lesson about an experiment of one's own."""

from __future__ import annotations

from mpkit.explorers.own_experiment import OwnExperimentExplorer
from mpkit.plots.experiment import own_experiment_scene
from mpkit.widgets.scene import View


def own_experiment_view(**params: object) -> View:
    """Cells, seeds and a network; Run, Stop, and two runs compared; parameters as `OwnExperimentExplorer`."""
    return View(OwnExperimentExplorer(**params), own_experiment_scene)
