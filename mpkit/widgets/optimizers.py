"""The widgets of the lessons on optimizers and on schedules."""

from mpkit.explorers.optimizers import AdamStateExplorer, DecayExplorer, LossScaleExplorer, SchedulesExplorer
from mpkit.plots.optimizers import adam_state_scene, decay_scene, loss_scale_scene, schedules_scene
from mpkit.widgets.scene import plain

schedules_view = plain(SchedulesExplorer, schedules_scene, "Five schedules side by side with a common warm-up")
decay_view = plain(DecayExplorer, decay_scene, "One weight under the weight decay of three optimizers")
adam_state_view = plain(AdamStateExplorer, adam_state_scene, "Adam's first step with its state in a narrow format")
loss_scale_view = plain(
    LossScaleExplorer, loss_scale_scene, "A static loss scale multiplied in the cell and divided in the optimizer"
)
