"""Ranges inside a format, a recorded scale with its ceiling, and replayed scales beside the recorded one."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mpkit.plots.base import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, Picture, log2_axis, power_of_two

TOP, BOTTOM = 2.0**40, 2.0**-30


def _shown(values: Any, low: float, high: float) -> np.ndarray:
    """Values moved inside the axis, so that nothing is dropped."""
    return np.clip(np.nan_to_num(np.asarray(values, dtype=float), nan=high, posinf=high, neginf=low), low, high)


class DetectivePicture(Picture):
    """Per module the range of its outputs, per weight the range of its scaled gradient, inside the format."""

    size = (8.4, 4.2)
    low, high = -44, 44

    def frame(self, data: Any) -> Hashable:
        return data.dtype, tuple(bar[0] for bar in data.bars)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        log2_axis(axes, "x", self.low, self.high, 8)
        fmt = data.fmt
        axes.axvspan(fmt.max, 2.0**self.high, color=VERMILION, alpha=0.18, lw=0)
        if fmt.min_subnormal > 2.0**self.low:
            axes.axvspan(2.0**self.low, fmt.min_subnormal / 2, color=SKY, alpha=0.3, lw=0)
            axes.text(2.0 ** (self.low + 1), -0.75, "becomes 0", va="center")
            axes.text(2.0 ** (self.high - 1), -0.75, "becomes inf", va="center", ha="right")
        labels = [f"gradient of {n} × scale" if g else f"output of {n}" for n, _, _, g in data.bars]
        axes.set_yticks(range(len(labels)), labels)
        axes.set(ylim=(len(labels) - 0.4, -1.2), xlabel="magnitude, as computed in float32")
        axes.set_title(f"what the batch needs, and what {data.dtype} holds", loc="left")
        self.bars: list[Any] = []
        for row, bar in enumerate(data.bars):
            color = ORANGE if bar[3] else GREEN
            self.bars.append(axes.plot([], [], lw=9, color=color, solid_capstyle="butt")[0])
            self.bars.append(axes.plot([], [], color=BLACK, marker="|", ms=12, mew=2, lw=0)[0])
            self.bars.append(axes.text(2.0 ** (self.high - 1), row, "", ha="right", va="center", color=BLACK))
        self.moving(*self.bars)

    def update(self, data: Any) -> None:
        for row, (_, low, high, _) in enumerate(data.bars):
            line, ends, word = self.bars[3 * row : 3 * row + 3]
            edges = _shown([low, high], 2.0**self.low, 2.0**self.high)
            line.set_data(edges, [row, row])
            ends.set_data(edges, [row, row])
            bad = "NaN" if math.isnan(high) else "inf" if math.isinf(high) else ""
            word.set_text(bad or ("too large" if high > data.fmt.max else ""))


def _steps_axes(axes: Axes, count: int) -> None:
    log2_axis(axes, "y", -30, 40, 10)
    axes.set(xlim=(0, count), xlabel="step", ylabel="loss scale")


class RunPicture(Picture):
    """The recorded scale with its skipped steps, and the scaled gradients of one step inside float16."""

    size = (8.8, 3.7)

    def frame(self, data: Any) -> Hashable:
        return data.run

    def layout(self, figure: Figure, data: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        t = data.trace
        _steps_axes(left, len(t))
        left.plot(t.step, _shown(data.tops, BOTTOM, TOP), color=GREY, lw=1, label="ceiling")
        left.plot(t.step, _shown(t.scale, BOTTOM, TOP), color=BLUE, lw=2, drawstyle="steps-post", label="scale")
        bad = t.overflow
        left.plot(t.step[bad], _shown(t.scale[bad], BOTTOM, TOP), "x", color=VERMILION, ms=6, label="skipped")
        left.legend(loc="upper right", ncols=3)
        left.set_title(f"{data.run}: recorded loss scale", loc="left")
        right.axvspan(16, 40, color=VERMILION, alpha=0.18, lw=0)
        right.axvspan(-60, -25, color=SKY, alpha=0.3, lw=0)
        right.text(-58, 0.94, "zero", transform=right.get_xaxis_transform())
        right.text(39, 0.94, "inf", ha="right", transform=right.get_xaxis_transform())
        ticks = range(-60, 41, 20)
        right.set_xticks(ticks, [power_of_two(e) for e in ticks])
        right.set(xlim=(-60, 40), ylim=(0, 0.25), xlabel="scaled gradient in float16", ylabel="share of all values")
        right.set_title("gradients of the step", loc="left")
        self.cursor = left.axvline(0, color=BLACK, lw=1.5, ls=":")
        (self.outline,) = right.plot([], [], color=BLACK, lw=1.5, drawstyle="steps-post")
        self.note = right.text(39, 0.87, "", ha="right", transform=right.get_xaxis_transform())
        self.moving(self.cursor, self.outline, self.note)

    def update(self, data: Any) -> None:
        self.cursor.set_xdata([data.at, data.at])
        share = data.counts / max(1, data.values)
        self.outline.set_data(data.exponents, share)
        self.note.set_text(f"{data.nonfinite} inf or NaN" if data.nonfinite else "")


class WhatIfPicture(Picture):
    """The replayed scale, the recorded one, and the ceiling that both had to stay below."""

    size = (8.4, 3.6)

    def frame(self, data: Any) -> Hashable:
        return data.run

    def layout(self, figure: Figure, data: Any) -> None:
        self.draw_run(figure.subplots(), data)

    def update(self, data: Any) -> None:
        self.move_run(data)

    def draw_run(self, axes: Axes, run: Any) -> None:
        """What stays while the policy changes."""
        t = run.trace
        _steps_axes(axes, len(t))
        recorded = _shown(t.scale, BOTTOM, TOP)
        axes.plot(t.step, _shown(run.tops, BOTTOM, TOP), color=GREY, lw=1, label="ceiling")
        axes.plot(t.step, recorded, color=BLACK, lw=1.5, ls="--", drawstyle="steps-post", label="recorded")
        (self.line,) = axes.plot([], [], color=BLUE, lw=2.2, drawstyle="steps-post", label="replayed")
        (self.bad,) = axes.plot([], [], "x", color=VERMILION, ms=7, label="skipped")
        axes.legend(loc="lower left", ncols=4, columnspacing=1.0, handlelength=1.5)
        axes.set_title("what this policy would have done", loc="left")
        self.moving(self.line, self.bad)

    def move_run(self, run: Any) -> None:
        """The replayed policy."""
        scale = _shown(np.nan_to_num(run.scale, nan=BOTTOM), BOTTOM, TOP)
        self.line.set_data(run.trace.step, scale)
        self.bad.set_data(run.trace.step[run.skipped], scale[run.skipped])


class SweepPicture(WhatIfPicture):
    """The heat map of a sweep with the chosen cell framed, and that cell's run."""

    size = (9.6, 3.8)

    def layout(self, figure: Figure, data: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(5, 6))
        self.image = self.moving(left.imshow(data.grid, cmap="Blues", aspect="auto"))
        left.grid(visible=False)
        left.set_xticks(range(len(data.windows)), [str(w) for w in data.windows])
        left.set_yticks(range(len(data.factors)), [f"{f:g}" for f in data.factors])
        left.set(xlabel="scale_window, steps", ylabel="scale_factor")
        left.set_title("training signal lost", loc="left")
        self.shares = [
            self.moving(left.text(column, row, "", ha="center", va="center"))
            for row, column in np.ndindex(data.grid.shape)
        ]
        self.box = self.moving(left.add_patch(Rectangle((0, 0), 0.92, 0.92, fill=False, ec=VERMILION, lw=3)))
        self.draw_run(right, data.chosen)

    def update(self, data: Any) -> None:
        worst = max(float(data.grid.max()), 1e-9)
        self.image.set_data(data.grid)
        self.image.set_clim(0, 1.3 * worst)
        for text, lost in zip(self.shares, data.grid.flat):
            color = "white" if lost / worst > 0.75 else BLACK
            text.set(text=f"{lost:.0%}" if lost >= 0.1 else f"{lost:.1%}", color=color)
        x, y = data.windows.index(data.window), data.factors.index(data.factor)
        self.box.set_xy((x - 0.46, y - 0.46))
        self.move_run(data.chosen)


class NaiveRulePicture(Picture):
    """Two rules, one start."""

    size = (8.4, 3.4)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        log2_axis(axes, "y", -50, 50, 10)
        axes.axhspan(data.ceiling, 2.0**50, color=VERMILION, alpha=0.18, lw=0)
        axes.axhspan(2.0**-50, 2.0**-24, color=SKY, alpha=0.3, lw=0)
        axes.text(990, 2.0**46, "gradients overflow", ha="right", va="top")
        axes.text(990, 2.0**-47, "the scale itself is zero in float16", ha="right")
        (self.naive,) = axes.plot([], [], color=VERMILION, lw=2, ls="--", label="loss compared with scale")
        (self.dynamic,) = axes.plot([], [], color=BLUE, lw=2, label="dynamic rule: gradients finite?")
        (self.loss,) = axes.plot([], [], color=GREY, lw=1.2, ls=":", label="loss")
        axes.set(xlim=(0, data.steps), xlabel="step", ylabel="loss scale; loss")
        axes.legend(loc="upper left")
        axes.set_title("a rule must look at gradients", loc="left")
        self.moving(self.naive, self.dynamic, self.loss)

    def update(self, data: Any) -> None:
        steps = np.arange(data.steps)
        for line, values in ((self.naive, data.naive), (self.dynamic, data.dynamic), (self.loss, data.losses)):
            line.set_data(steps, _shown(values, 2.0**-50, 2.0**50))
