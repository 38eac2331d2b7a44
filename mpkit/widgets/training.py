"""The widgets of the lessons on why a loss is scaled, the step, and the order in it."""

from __future__ import annotations

from mpkit.explorers.training import OrderExplorer, StepExplorer, UnderflowExplorer
from mpkit.plots.training import order_scene, step_scene, underflow_scene
from mpkit.widgets.scene import View


def underflow_view(**params: object) -> View:
    """A histogram of real gradients over a format, and a static scale; parameters as `UnderflowExplorer`."""
    return View(UnderflowExplorer(**params), underflow_scene)


def step_view(**params: object) -> View:
    """One training step in eight phases; parameters as `StepExplorer`."""
    return View(StepExplorer(**params), step_scene)


def order_view(**params: object) -> View:
    """Clipping and unscaling in each order; parameters as `OrderExplorer`."""
    return View(OrderExplorer(**params), order_scene)
