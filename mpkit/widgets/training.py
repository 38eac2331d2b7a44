"""The widgets of the lessons on why a loss is scaled and on the training step."""

from __future__ import annotations

from typing import Any

from mpkit.explorers.training import OrderExplorer, StepExplorer, UnderflowExplorer
from mpkit.plots.training import OrderPicture, StepPicture, UnderflowPicture
from mpkit.widgets.base import View


def underflow_view(**params: Any) -> View:
    """Training step, kind of gradient, format and static scale; parameters as `UnderflowExplorer`."""
    return View(UnderflowExplorer(**params), UnderflowPicture())


def step_view(**params: Any) -> View:
    """The phases of one step with Play and Step; parameters as `StepExplorer`."""
    return View(StepExplorer(**params), StepPicture())


def order_view(**params: Any) -> View:
    """Scale, clip norm and number of micro-batches; parameters as `OrderExplorer`."""
    return View(OrderExplorer(**params), OrderPicture())
