"""The widgets of the lessons on optimizers and on schedules."""

from __future__ import annotations

from mpkit.explorers.optimizers import AdamStateExplorer, DecayExplorer, LossScaleExplorer, SchedulesExplorer
from mpkit.plots.optimizers import adam_state_scene, decay_scene, loss_scale_scene, schedules_scene
from mpkit.widgets.scene import View


def schedules_view(**params: object) -> View:
    """Five schedules side by side with a common warm-up; parameters as `SchedulesExplorer`."""
    return View(SchedulesExplorer(**params), schedules_scene)


def decay_view(**params: object) -> View:
    """One weight under the weight decay of three optimizers; parameters as `DecayExplorer`."""
    return View(DecayExplorer(**params), decay_scene)


def adam_state_view(**params: object) -> View:
    """Adam's first step with its state in a narrow format; parameters as `AdamStateExplorer`."""
    return View(AdamStateExplorer(**params), adam_state_scene)


def loss_scale_view(**params: object) -> View:
    """A static loss scale multiplied in the cell and divided in the optimizer; parameters as `LossScaleExplorer`."""
    return View(LossScaleExplorer(**params), loss_scale_scene)
