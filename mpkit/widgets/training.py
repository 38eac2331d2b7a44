"""The widgets of the lessons on why a loss is scaled, the step, and the order in it."""

from mpkit.explorers.training import OrderExplorer, StepExplorer, UnderflowExplorer
from mpkit.plots.training import order_scene, step_scene, underflow_scene
from mpkit.widgets.scene import plain

underflow_view = plain(
    UnderflowExplorer, underflow_scene, "A histogram of real gradients over a format, and a static scale"
)
step_view = plain(StepExplorer, step_scene, "One training step in eight phases")
order_view = plain(OrderExplorer, order_scene, "Clipping and unscaling in each order")
