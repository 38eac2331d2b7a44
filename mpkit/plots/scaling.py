"""Loss scales: over a run with its ceiling, over a grid of settings, in every framework side by side."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mpkit.plots.base import BLACK, BLUE, GREY, SKY, VERMILION, Picture, log2_axis

LOW, HIGH = -26, 34  # exponents on the scale axis; what lies outside is drawn at its edge


def _inside(values: Any, low: int = LOW, high: int = HIGH) -> np.ndarray:
    """Values for the axis: zero, negative and infinite ones at its edges."""
    return np.clip(np.asarray(values, dtype=float), 2.0**low, 2.0**high)


def _scale_axis(axes: Axes, steps: int, low: int = LOW, high: int = HIGH, every: int = 8) -> None:
    log2_axis(axes, "y", low, high, every)
    axis = axes.yaxis
    axis.set_ticks([2.0**e for e in range(low + (-low) % every, high + 1, every)])
    axes.set_xlim(-0.5, steps - 0.5)


class DynamicsPicture(Picture):
    """Scale and ceiling up to the step shown, skipped steps as crosses; below, how many gradient values are zero."""

    size = (8.4, 4.4)

    def layout(self, figure: Figure, data: Any) -> None:
        n = len(data.scale)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _scale_axis(top, n)
        top.set_ylabel("loss scale")
        top.set_title("the scale climbs until it meets the ceiling; blue: it would overflow here", loc="left")
        bottom.set(xlabel="step", ylabel="gradients that\nare zero, %", ylim=(-5, 105), xlim=(-0.5, n - 0.5))
        self.above = self.moving(top.fill_between([0, 1], 1, 2, color=SKY, alpha=0.35, lw=0))
        (self.ceiling,) = top.plot([], [], color=GREY, lw=1.2, label="ceiling: largest scale without overflow")
        (self.scale,) = top.plot([], [], color=BLUE, lw=2, drawstyle="steps-mid", label="loss scale")
        (self.skips,) = top.plot([], [], "x", color=VERMILION, ms=8, mew=2, label="skipped step")
        (self.floor,) = top.plot([], [], color=GREY, lw=1.2, ls="--", label="floor")
        (self.now,) = top.plot([], [], "o", color=BLACK, ms=7, mfc="white", mew=1.5)
        (self.zeros,) = bottom.plot([], [], color=BLUE, lw=1.8)
        self.moving(self.ceiling, self.floor, self.scale, self.skips, self.now, self.zeros)
        handles = [self.scale, self.ceiling, self.skips, self.floor]
        figure.legend(handles=handles, loc="outside upper right", ncols=4)

    def update(self, data: Any) -> None:
        shown = slice(0, data.step + 1)
        steps = np.arange(len(data.scale))
        tops = _inside(data.ceiling)
        self.above.set_data(steps, tops, np.full(len(steps), 2.0**HIGH))
        self.ceiling.set_data(steps, tops)
        self.floor.set_data(steps[[0, -1]], [2.0**data.floor_exponent] * 2)
        scale = _inside(data.scale)
        self.scale.set_data(steps[shown], scale[shown])
        self.skips.set_data(data.skipped, scale[data.skipped])
        self.now.set_data([data.step], [scale[data.step]])
        self.zeros.set_data(steps[shown], 100 * data.zeros[shown])


class SweepPicture(Picture):
    """A table of factor x window, darker where the figure is larger; the smallest is framed."""

    size = (8.4, 4.0)

    def frame(self, data: Any) -> Hashable:
        """The title names the figure."""
        return data.figure

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        self.image = self.moving(axes.imshow(data.grid, cmap="cividis_r", aspect="auto"))
        axes.grid(False)
        axes.set_xticks(range(len(data.WINDOWS)), map(str, data.WINDOWS))
        axes.set_yticks(range(len(data.FACTORS)), [f"{f:g}" for f in data.FACTORS])
        axes.set(xlabel="scale_window, finite steps", ylabel="scale_factor, times")
        axes.set_title(f"{data.FIGURES[data.figure]} (darker is more, the best is framed)", loc="left")
        self.numbers = [
            self.moving(axes.text(column, row, "", ha="center", va="center"))
            for row, column in np.ndindex(data.grid.shape)
        ]
        self.box = self.moving(axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, ec=VERMILION, lw=3)))

    def update(self, data: Any) -> None:
        low, high = data.grid.min(), data.grid.max()
        self.image.set_data(data.grid)
        self.image.set_clim(low, high)
        digits = ".0f" if data.figure == "skipped" else ".1f"
        for text, value in zip(self.numbers, data.grid.flat):
            text.set(text=format(value, digits), color="white" if value > (low + high) / 2 else "black")
        row, column = data.best
        self.box.set_xy((column - 0.5, row - 0.5))


class LivePicture(Picture):
    """Loss and scale of the training so far."""

    size = (8.4, 3.4)

    def frame(self, data: Any) -> Hashable:
        """The number of steps."""
        return data.steps

    def layout(self, figure: Figure, data: Any) -> None:
        loss, scale = figure.subplots(1, 2)
        loss.set(xlabel="step", ylabel="loss, nats", xlim=(0, data.steps), ylim=(0, 3))
        loss.set_title("loss", loc="left")
        _scale_axis(scale, data.steps)
        scale.set(xlabel="step", ylabel="loss scale")
        scale.set_title("loss scale, × = skipped step", loc="left")
        (self.loss,) = loss.plot([], [], color=BLUE, lw=1.8)
        (self.scale,) = scale.plot([], [], color=BLUE, lw=2, drawstyle="steps-post")
        (self.floor,) = scale.plot([], [], color=GREY, lw=1.2, ls="--", label="floor")
        (self.skips,) = scale.plot([], [], "x", color=VERMILION, ms=8, mew=2)
        scale.legend(loc="lower right")
        self.moving(self.loss, self.scale, self.floor, self.skips)

    def update(self, data: Any) -> None:
        losses, scales, skipped = (data.run.losses, data.run.scales, data.run.skipped) if data.run else ([], [], [])
        scales = _inside(scales)
        n = min(len(losses), len(scales))
        self.loss.set_data(range(n), np.nan_to_num(losses[:n], nan=3, posinf=3))
        self.scale.set_data(range(n), scales[:n])
        here = [i for i in skipped if i < n]
        self.skips.set_data(here, scales[here])
        self.floor.set_data([0, data.steps], [2.0**data.floor_exponent] * 2)


class ZooPicture(Picture):
    """One small panel per framework: its scale, its skipped steps, the ceiling; a black dot where it raises."""

    size = (10.5, 5.6)
    columns = 6

    def layout(self, figure: Figure, data: Any) -> None:
        rows = -(-len(data.names) // self.columns)
        panels = figure.subplots(rows, self.columns, sharex=True, sharey=True).ravel()
        self.panels = []
        for axes, name in zip(panels, data.names):
            _scale_axis(axes, len(data.ceiling), -20, 28, 12)
            axes.set_title(name, fontsize=10)
            (ceiling,) = axes.plot([], [], color=GREY, lw=1, drawstyle="steps-mid")
            (scale,) = axes.plot([], [], color=BLUE, lw=1.8, drawstyle="steps-mid")
            (skips,) = axes.plot([], [], "x", color=VERMILION, ms=4, mew=1.2)
            (end,) = axes.plot([], [], "o", color=BLACK, ms=7)
            self.panels.append(self.moving(ceiling, scale, skips, end))
        figure.supxlabel("step", fontsize=10)
        figure.supylabel("loss scale", fontsize=10)
        handles = [
            Line2D([], [], color=BLUE, lw=1.8, label="loss scale"),
            Line2D([], [], color=GREY, lw=1, label="ceiling"),
            Line2D([], [], color=VERMILION, marker="x", ls="", mew=1.2, label="skipped step"),
            Line2D([], [], color=BLACK, marker="o", ls="", label="the rule raises an error"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4)

    def update(self, data: Any) -> None:
        steps = np.arange(len(data.ceiling))
        for i, (ceiling, scale, skips, end) in enumerate(self.panels):
            used = data.scales[:, i]
            alive = ~np.isnan(used)
            ceiling.set_data(steps, _inside(data.ceiling, -20, 28))
            scale.set_data(steps[alive], _inside(used[alive], -20, 28))
            bad = alive & ~data.finite[:, i]
            skips.set_data(steps[bad], _inside(used[bad], -20, 28))
            at = data.done.raised_at[i]
            end.set_data([at] if at >= 0 else [], _inside(data.done.final[i : i + 1], -20, 28) if at >= 0 else [])


class NaivePicture(Picture):
    """The rule that compares loss and scale, beside torch's, under the ceiling of the gradients."""

    size = (8.4, 3.8)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        _scale_axis(axes, data.STEPS, -50, 62, 10)
        axes.set(xlabel="step", ylabel="loss scale")
        axes.set_title("a rule that never looks at a gradient runs away", loc="left")
        (self.ceiling,) = axes.plot([], [], color=GREY, lw=1.2, label="ceiling of the gradients")
        (self.loss,) = axes.plot([], [], color=BLACK, lw=1.2, ls=":", label="the loss")
        (self.torch,) = axes.plot([], [], color=BLUE, lw=2, drawstyle="steps-post", label="torch's rule")
        (self.naive,) = axes.plot([], [], color=VERMILION, lw=2, ls="--", label="naive rule")
        (self.bad,) = axes.plot([], [], "x", color=VERMILION, ms=9, mew=2, label="first inf in the weights")
        self.moving(self.ceiling, self.loss, self.torch, self.naive, self.bad)
        axes.legend(loc="upper left", ncols=3)

    def update(self, data: Any) -> None:
        steps = np.arange(data.STEPS)
        naive = _inside(data.naive, -50, 62)
        self.ceiling.set_data(steps[[0, -1]], [data.ceiling] * 2)
        self.loss.set_data(steps[[0, -1]], [data.loss] * 2)
        self.torch.set_data(steps, data.torch)
        self.naive.set_data(steps, naive)
        first = data.poisoned[:1]
        self.bad.set_data(first, naive[first])
