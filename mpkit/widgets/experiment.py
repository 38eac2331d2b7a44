"""The widget of the lesson about an experiment of one's own."""

from mpkit.explorers.own_experiment import OwnExperimentExplorer
from mpkit.plots.experiment import own_experiment_scene
from mpkit.widgets.scene import plain

own_experiment_view = plain(
    OwnExperimentExplorer, own_experiment_scene, "Cells, seeds and a network; Run, Stop, and two runs compared"
)
