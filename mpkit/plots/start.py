"""Loss and loss scale over the steps, for one run, a run before, and several levels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpkit.plots.base import BLACK, BLUE, DASHES, GREY, LINES, MARKERS, VERMILION, Picture, log2_axis, new_figure


def _axes(figure: Figure, steps: int, top: int) -> tuple[Axes, Axes]:
    loss, scale = figure.subplots(1, 2)
    loss.set(xlabel="step", ylabel="loss, nats", xlim=(0, steps), ylim=(0, 3))
    loss.set_title("loss", loc="left")
    scale.set(xlabel="step", ylabel="loss scale", xlim=(0, steps))
    log2_axis(scale, "y", 0, top, 4 if top <= 40 else 16)
    scale.set_title("loss scale, × = skipped step", loc="left")
    return loss, scale


class StartPicture(Picture):
    """The present run (solid), the run before (dotted) and the scale that would be reached without an overflow."""

    size = (8.4, 3.4)

    def frame(self, data: Any) -> int:
        """The top of the scale axis, in powers of two."""
        shown = [*data.plan, *(s for run in (data.run, data.before) if run for s in run.scales)]
        return 40 if max(shown) <= 2.0**40 else 128

    def layout(self, figure: Figure, data: Any) -> None:
        loss, scale = _axes(figure, len(data.plan), self.frame(data))
        self.loss = self._pair(loss, "default")
        self.scale = self._pair(scale, "steps-post")
        (self.plan,) = scale.plot([], [], color=GREY, lw=1.5, ls="--", label="without overflow")
        (self.skips,) = scale.plot([], [], "x", color=VERMILION, ms=8, mew=2)
        self.moving(self.plan, self.skips)
        handles = [*self.scale, self.plan]
        scale.legend(handles=handles, loc="lower right")

    def _pair(self, axes: Axes, style: Any) -> tuple[Any, Any]:
        (now,) = axes.plot([], [], color=BLUE, lw=2, label="this run", drawstyle=style)
        (before,) = axes.plot([], [], color=BLACK, lw=1.2, ls=":", label="run before", drawstyle=style)
        return self.moving(now, before)

    def update(self, data: Any) -> None:
        for number, run in enumerate((data.run, data.before)):
            for lines, values in ((self.loss, run.losses if run else []), (self.scale, run.scales if run else [])):
                lines[number].set_data(range(len(values)), np.clip(values, 0, 2.0**127))
        self.plan.set_data(range(len(data.plan)), np.minimum(data.plan, 2.0**127))
        skipped = data.run.skipped if data.run else []
        self.skips.set_data(skipped, [data.run.scales[i] for i in skipped] if data.run else [])


def compare_runs(runs: Sequence[Any]) -> Figure:
    """Loss and scale of several runs, one line style per level."""
    figure = new_figure(8.4, 3.4)
    loss, scale = _axes(figure, len(runs[0].losses), 40)
    for run, colour, dash, marker in zip(runs, LINES, DASHES, MARKERS):
        every = slice(None, None, 30)
        loss.plot(np.convolve(run.losses, np.ones(8) / 8, "valid"), color=colour, ls=dash, lw=1.8, label=run.level)
        scale.step(range(len(run.scales)), run.scales, where="post", color=colour, ls=dash, lw=1.8, label=run.level)
        steps = range(len(run.scales))
        scale.plot(steps[every], run.scales[every], marker, color=colour, ms=5)
        scale.plot(run.skipped, [run.scales[i] for i in run.skipped], "x", color=colour, ms=8, mew=2)
    loss.set_ylabel("loss, nats (mean of 8 steps)")
    loss.legend()
    return figure
