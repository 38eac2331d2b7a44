"""The scenes of the drawn predictions in lessons 01, 02, 05 and 11."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import Panel, Scene, linear, log2, names, power_of_two

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


def _points(labels: list[str], every: int, label: str) -> dict[str, Any]:
    """An axis of named points with a tick at every so many of them."""
    axis = names(labels, label, bare=False)
    return axis | {"ticks": axis["ticks"][::every]}


def draw_scene(data: explorers.DrawExplorer) -> Scene:
    """The scale so far under its ceiling, the reader's pen for the rest, and over it what happened once it is shown."""
    x, y = linear("step", -1, len(data.truth), 10), log2("loss scale", data.low, data.high)
    scene, panel = _opened(data, "draw the scale into the right part", x, y)
    panel.band(np.clip(data.top, data.low, data.high), data.high, label="here it would overflow")
    panel.rule("x", data.first - 0.5, "muted", dash=":")
    _pen(panel, data)
    shown = _shown(data)
    skips = np.flatnonzero(~data.finite[:shown])
    panel.line(data.truth[:shown], color="reference", step="mid", width=2.6, label="loss scale")
    panel.crosses(data.truth, skips, "skipped step")
    return scene


def gap_scene(data: explorers.GapExplorer) -> Scene:
    """The known gap of 1, the reader's pen over all powers of two, and the gaps once they are shown."""
    x = _points([power_of_two(int(e)) for e in data.exponents], 4, "number")
    y = log2("gap to the next number of float16", data.low, data.high)
    scene, panel = _opened(data, "draw the gap over all powers of two", x, y)
    _pen(panel, data)
    if data.revealed:
        panel.line(data.truth, color="reference", width=2.6, label="gap")
    one = int(np.flatnonzero(data.exponents == 0)[0])
    panel.points([data.truth[one]], [one], "reference", glyph="s", size=5, label="gap at 1")
    return scene


def total_scene(data: explorers.TotalExplorer) -> Scene:
    """The first sums, the reader's pen for the rest, and the sums once they are shown."""
    x = _points([str(data.each * i) for i in range(len(data.truth))], 5, "ones added")
    y = linear("sum in float16", data.low, data.high)
    scene, panel = _opened(data, "draw the sum into the right part", x, y)
    panel.given["pad"] = [28, 14, 46, 74]
    panel.rule("x", data.first - 0.5, "muted", dash=":")
    _pen(panel, data)
    panel.line(data.truth[: _shown(data)], color="reference", width=2.6, label="sum in float16")
    return scene


def stuck_scene(data: explorers.StuckExplorer) -> Scene:
    """The loss of gradient descent, the reader's pen, and the loss of DimReduce once it is shown."""
    x, y = linear("step", -1, len(data.truth), 10), linear("loss, nats", data.low, data.high)
    scene, panel = _opened(data, "draw the loss of DimReduce with 2 components", x, y)
    panel.line(data.descent, color="muted", width=1.6, dash=":", label="gradient descent")
    _pen(panel, data)
    if data.revealed:
        panel.line(data.truth, color="reference", width=2.6, label="DimReduce, 2 components")
    return scene
