"""Scales over the steps, one against four, and what survives in each group."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mpkit.plots.base import BLACK, BLUE, DASHES, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Picture, log2_axis

COLOURS = (BLUE, VERMILION, GREEN, PURPLE)
GROUPS, TOP = len(COLOURS), 64


class GroupScalePicture(Picture):
    """Left: the scales, × where an overflow began. Right: the share of gradient values that is not rounded to zero."""

    size = (8.6, 3.8)

    def layout(self, figure: Figure, data: Any) -> None:
        scales, shares = figure.subplots(1, 2, width_ratios=(3, 2))
        scales.set(xlabel="step", ylabel="loss scale", xlim=(0, len(data.runs["one scale"].scales)))
        log2_axis(scales, "y", 0, TOP, 8)
        scales.set_title("loss scale, × = an overflow began", loc="left")
        self.now = scales.axvline(0, color=GREY, lw=1)
        (self.one,) = scales.plot(
            [], [], color=BLACK, lw=2.4, ls=(0, (1, 1)), drawstyle="steps-post", label="one scale"
        )
        self.lines = [
            scales.plot([], [], color=c, lw=1.8, ls=d, drawstyle="steps-post", label=f"group {i + 1}")[0]
            for i, (c, d) in enumerate(zip(COLOURS, DASHES))
        ]
        self.marks = [scales.plot([], [], "x", color=c, ms=6, mew=1.6)[0] for c in COLOURS]
        scales.legend(loc="upper left", ncols=2, borderaxespad=0.1)
        shares.set(xlim=(0, 100), xlabel="values that survive, %", ylim=(GROUPS + 0.6, 0.2))
        shares.set_yticks(range(1, GROUPS + 1), [f"group {i + 1}" for i in range(GROUPS)])
        shares.set_title("not rounded to zero", loc="left")
        rows = np.arange(1, GROUPS + 1)
        looks: list[dict[str, Any]] = [{"color": ORANGE, "hatch": "//"}, {"color": SKY}]
        self.bars = {
            way: shares.barh(rows + shift, [0] * GROUPS, 0.36, edgecolor=BLACK, lw=0.8, label=way, **look)
            for way, shift, look in zip(data.runs, (-0.2, 0.2), looks)
        }
        shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        self.moving(self.now, self.one, *self.lines, *self.marks, *(bar for bars in self.bars.values() for bar in bars))

    def update(self, data: Any) -> None:
        one, own = data.runs.values()
        steps, shown = np.arange(len(one.scales)), slice(data.step + 1)
        self.now.set_xdata([data.step, data.step])
        self.one.set_data(steps[shown], one.scales[shown, 0])
        for i, (line, mark) in enumerate(zip(self.lines, self.marks)):
            line.set_data(steps[shown], own.scales[shown, i])
            at = np.flatnonzero(own.overflows[shown, i])
            mark.set_data(at, own.scales[at, i])
        for way, bars in self.bars.items():
            for bar, share in zip(bars, data.survive[way]):
                bar.set_width(100 * share)
