"""Gradients against a format's range, a step in eight boxes, and norms over the scale for each order."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mpkit.plots.base import BLACK, BLUE, DASHES, GREEN, GREY, MARKERS, SKY, VERMILION, Picture, log2_axis

_FIRST, _LAST = -46, 26  # exponents on screen; all smaller and larger ones stand in the outermost bars


class UnderflowPicture(Picture):
    """Left: the histogram of the scaled gradients over the regions of the format. Right: losses over the scale."""

    size = (9.6, 4.2)

    def frame(self, data: Any) -> str:
        """The regions depend on the format."""
        return data.format

    def layout(self, figure: Figure, data: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
        left.set_title(f"gradients times the scale, in {data.format}", loc="left")
        left.set(xlabel="magnitude", ylabel="share of the values, %", ylim=(0, 20))
        log2_axis(left, "x", _FIRST, _LAST, 12)
        edges = [2.0**_FIRST, data.limits.lost, data.fmt.min_normal, data.limits.overflow, 2.0**_LAST]
        edges = np.clip(edges, 2.0**_FIRST, 2.0**_LAST)
        regions = (("zero", "#F8DDCC"), ("subnormal", "#FFF3D6"), ("normal", "#E3F1FA"), ("overflow", "#F3DCE9"))
        for (name, shade), low, high in zip(regions, edges, edges[1:]):
            if high <= low:
                continue
            left.axvspan(low, high, color=shade, zorder=0, lw=0)
            upright = 90 if np.log2(high / low) < 12 else 0
            left.text(np.sqrt(low * high), 19.4, name, ha="center", va="top", rotation=upright)
        for edge in edges[1:-1]:
            left.axvline(edge, color=GREY, lw=1)
        exponents = np.arange(_FIRST, _LAST)
        self.bars = left.bar(
            2.0**exponents,
            np.zeros(len(exponents)),
            2.0**exponents,
            align="edge",
            color=BLUE,
            edgecolor="white",
            lw=0.6,
        )
        self.moving(*self.bars)
        self._right(right)

    def _right(self, axes: Any) -> None:
        axes.set_title("share lost at each scale", loc="left")
        axes.set(xlabel="static loss scale", ylabel="share of the values, %", ylim=(-3, 103))
        log2_axis(axes, "x", -8, 30, 8)
        (self.zero,) = axes.plot([], [], color=VERMILION, lw=2, label="flushed to zero")
        (self.over,) = axes.plot([], [], color=BLUE, lw=2, ls="--", label="overflow")
        (self.dots,) = axes.plot([], [], "o", color=BLACK, ms=7, label="the scale now")
        self.best = axes.axvline(1.0, color=GREEN, lw=2, ls=":", label="recommended")
        axes.legend(loc="upper center", bbox_to_anchor=(0.42, -0.2), ncols=2)
        self.moving(self.zero, self.over, self.dots, self.best)

    def update(self, data: Any) -> None:
        first = -70
        heights = np.asarray(data.heights) * 100
        shown = heights[_FIRST - first : _LAST - first].copy()
        shown[0] += heights[: _FIRST - first].sum()
        shown[-1] += heights[_LAST - first :].sum()
        for bar, height, exponent in zip(self.bars, shown, range(_FIRST, _LAST)):
            bar.set_height(height)
            bar.set_facecolor(self._colour(data, 2.0 ** (exponent + 0.5)))
        scales = 2.0 ** np.arange(-8, 31)
        self.zero.set_data(scales, [100 * s.lost for s in data.course])
        self.over.set_data(scales, [100 * s.overflow for s in data.course])
        now = 2.0**data.exponent
        self.dots.set_data([now, now], [100 * data.shares.lost, 100 * data.shares.overflow])
        self.best.set_xdata([2.0**data.best] * 2)

    @staticmethod
    def _colour(data: Any, magnitude: float) -> str:
        if magnitude <= data.limits.lost or magnitude >= data.limits.overflow:
            return VERMILION
        return SKY if magnitude < data.fmt.min_normal else BLUE


class StepPicture(Picture):
    """Eight boxes in the order of the step; the one looked at is dark, those that a skip leaves out are dashed."""

    size = (9.6, 3.4)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        axes.set(xlim=(0, 4), ylim=(0, 2))
        axes.set_axis_off()
        axes.set_title("one training step", loc="left")
        self.boxes, self.texts = [], []
        for number in range(8):
            row, column = divmod(number, 4)
            x, y = column + 0.06, 1.12 - row
            box = FancyBboxPatch((x, y), 0.86, 0.74, boxstyle="round,pad=0.02,rounding_size=0.05", lw=1.5)
            axes.add_patch(box)
            text = axes.text(x + 0.43, y + 0.37, "", ha="center", va="center", fontsize=10, linespacing=1.35)
            self.boxes.append(self.moving(box))
            self.texts.append(self.moving(text))
            if column < 3:
                arrow = {"arrowstyle": "-|>", "color": GREY, "lw": 1.5}
                axes.annotate("", (x + 0.985, y + 0.37), (x + 0.875, y + 0.37), arrowprops=arrow)
        arrow = {"arrowstyle": "-|>", "color": GREY, "lw": 1.5, "connectionstyle": "angle,angleA=-90,angleB=180,rad=4"}
        axes.annotate("", (0.49, 0.88), (3.49, 1.1), arrowprops={**arrow, "connectionstyle": "arc3,rad=0"})

    def update(self, data: Any) -> None:
        for number, (box, text, phase) in enumerate(zip(self.boxes, self.texts, data.phases)):
            here, failed = number == data.phase - 1, data.skipped and number == 6
            box.set_facecolor(BLUE if here else "#F8DDCC" if failed else "#F4F7FA")
            box.set_edgecolor(VERMILION if failed else BLUE)
            box.set_linestyle("--" if failed else "-")
            text.set_text(f"{number + 1}  {phase.name}\n{phase.code}\n{_wrapped(phase.seen)}")
            text.set_color("white" if here else "black")


def _wrapped(sentence: str, width: int = 26) -> str:
    return "\n".join(textwrap.wrap(sentence, width))


class OrderPicture(Picture):
    """Norm of the gradient that reaches the optimizer over the scale, one line per order."""

    size = (8.4, 3.6)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        axes.set_title("only the right order does not depend on the scale", loc="left")
        axes.set(xlabel="loss scale", ylabel="norm that the optimizer sees")
        log2_axis(axes, "x", 0, 20, 4)
        log2_axis(axes, "y", -28, 4, 4)
        colours, self.lines = (GREEN, VERMILION, BLUE), {}
        for order, colour, dash, marker in zip(data.norms, colours, DASHES, MARKERS):
            (line,) = axes.plot([], [], color=colour, ls=dash, marker=marker, markevery=2, lw=2, label=order)
            self.lines[order] = self.moving(line)
        self.limit = self.moving(axes.axhline(1.0, color=GREY, lw=1.2, ls=":", label="the norm asked for"))
        self.now = self.moving(axes.axvline(1.0, color=BLACK, lw=1.2, label="the scale now"))
        axes.legend(loc="lower left")

    def update(self, data: Any) -> None:
        for order, line in self.lines.items():
            line.set_data(2.0 ** np.arange(21), data.norms[order])
        self.limit.set_ydata([data.max_norm] * 2)
        self.now.set_xdata([2.0**data.exponent] * 2)
