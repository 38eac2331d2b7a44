"""The scenes of the drawn predictions in lessons 01, 02, 05 and 11."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import Panel, Scene, linear

if TYPE_CHECKING:
    from mpkit.explorers import drawing as explorers  # upward: the types of its arguments


def _pen(panel: Panel, data: explorers.DrawnExplorer) -> None:
    """The reader's line, from the first point that is not known."""
    mine = np.concatenate([np.full(data.first, np.nan), data.guess])
    panel.add(
        "pen", y=mine, color="own", name="draw", lo=data.low, hi=data.high, label="your line", width=2.4, dash="--"
    )


def _opened(data: explorers.DrawnExplorer, before: str, x: dict[str, Any], y: dict[str, Any]) -> tuple[Scene, Panel]:
    """The picture, and its one panel, whose title says `before` until what happened is shown."""
    scene = Scene(height=380, width=900)
    title = "your line and what happened" if data.revealed else before
    return scene, scene.panel(title=title, x=x, y=y)


def _shown(data: explorers.DrawnExplorer) -> int:
    """How many points of the truth may be seen."""
    return len(data.truth) if data.revealed else data.first


def stuck_scene(data: explorers.StuckExplorer) -> Scene:
    """The loss of gradient descent, the reader's pen, and the loss of DimReduce once it is shown."""
    x, y = linear("step", -1, len(data.truth), 10), linear("loss, nats", data.low, data.high)
    scene, panel = _opened(data, "draw the loss of DimReduce with 2 components", x, y)
    panel.line(data.descent, color="muted", width=1.6, dash=":", label="gradient descent")
    _pen(panel, data)
    if data.revealed:
        panel.line(data.truth, color="reference", width=2.6, label="DimReduce, 2 components")
    return scene
