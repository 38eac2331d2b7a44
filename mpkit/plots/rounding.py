"""Pictures of lesson 02: one row per mode, the staircase, and weights that grow by tiny updates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpkit.plots.base import (
    BLACK,
    BLUE,
    DASHES,
    GREEN,
    LINES,
    MARKERS,
    PURPLE,
    VERMILION,
    Picture,
    log2_axis,
    new_figure,
)

SCHEME_STYLE = {  # colour, dash, label
    "nearest": (VERMILION, "-", "16 bit, nearest"),
    "master": (BLUE, "--", "float32 master"),
    "kahan": (GREEN, "-.", "16 bit, Kahan"),
    "stochastic": (PURPLE, "-", "16 bit, stochastic"),
}


class ModesPicture(Picture):
    """A number between its neighbours, and one row per mode with an arrow to the result."""

    size = (8.4, 3.6)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        modes = [*data.results, "stochastic"]
        axes.set(xlim=(-0.25, 1.25), ylim=(len(modes) - 0.4, -1.1), xlabel="position between the neighbours, ulp")
        axes.set_yticks(range(len(modes)), [mode.replace("_", " ") for mode in modes])
        axes.grid(axis="y", visible=False)
        for place in (0, 1):
            axes.axvline(place, color=BLACK, lw=1.5)
        self.x = self.moving(axes.axvline(0.5, color=VERMILION, lw=1.5, ls="--"))
        self.ends = [
            self.moving(
                axes.text(
                    place, -0.72, "", ha="center", va="center", size=10, bbox={"fc": "white", "ec": "none", "pad": 1}
                )
            )
            for place in (0, 1)
        ]
        self.number = self.moving(axes.text(0.5, -0.72, "", ha="center", va="center", size=10, color=VERMILION))
        self.number.set_bbox({"fc": "white", "ec": "none", "pad": 1})
        self.paths = [self.moving(axes.plot([], [], color=BLUE, lw=2)[0]) for _ in data.results]
        self.heads = [self.moving(axes.plot([], [], "o", color=BLUE, ms=9)[0]) for _ in data.results]
        row = len(data.results)
        self.either = [self.moving(axes.plot([place], [row], "o", color=BLUE)[0]) for place in (0, 1)]
        self.chances = [self.moving(axes.text(place, row, "", va="center", size=10)) for place in (-0.04, 1.04)]
        self.chances[0].set_ha("right")
        self.beyond = [self.moving(axes.text(0, number, "", va="center", size=10)) for number in range(row)]

    def update(self, data: Any) -> None:
        place = data.share_right
        self.x.set_xdata([place, place])
        for text, value in zip(self.ends, (data.left, data.right)):
            text.set_text(f"{value:.7g}\n{data.parity(value)}")
        inside = 0.2 < place < 0.8
        self.number.set_position((place if inside else 0.5, -0.72))
        self.number.set_text(f"{data.x:.7g}")
        for row, (path, head, text, result) in enumerate(
            zip(self.paths, self.heads, self.beyond, data.results.values())
        ):
            over = not np.isfinite(result)
            end = (-0.06 if data.negative else 1.06) if over else (result - data.left) / data.gap
            path.set_data([place, end], [row, row])
            head.set_data([end], [row])
            text.set_text(f"{result:g}" if over else "")
            text.set_position((-0.19 if data.negative else 1.1, row))
        for dot, text, chance in zip(self.either, self.chances, (1 - place, place)):
            dot.set_markersize(3 + 7 * np.sqrt(chance))
            text.set_text(f"{chance:.0%}")


class StaircasePicture(Picture):
    """Rounded against exact value, and the ulp against the magnitude."""

    size = (8.4, 3.6)

    def frame(self, data: Any) -> Hashable:
        return data.span

    def layout(self, figure: Figure, data: Any) -> None:
        stairs, gaps = figure.subplots(1, 2)
        limit = data.limit
        stairs.set(xlim=(-limit, limit), ylim=(-1.1 * limit, 1.1 * limit), xlabel="x", ylabel="rounded x")
        stairs.plot([-limit, limit], [-limit, limit], color=BLACK, lw=1, ls=":", label="exact")
        self.stairs = self.moving(stairs.plot([], [], color=BLUE, lw=1.8, label="rounded")[0])
        stairs.xaxis.set_major_locator(MaxNLocator(5))
        stairs.legend(loc="upper left")
        log2_axis(gaps, "x", data.span - 10, data.span, 2)
        log2_axis(gaps, "y", data.span - 24, data.span + 1, 4)
        gaps.set(xlabel="magnitude", ylabel="ulp")
        self.gaps = self.moving(gaps.plot([], [], color=GREEN, lw=2)[0])

    def update(self, data: Any) -> None:
        self.stairs.set_data(data.x, data.y)
        self.gaps.set_data(data.magnitudes, data.ulps)


class UpdatesPicture(Picture):
    """The weight after each update, for four schemes and exact arithmetic."""

    size = (8.4, 3.6)

    def frame(self, data: Any) -> Hashable:
        return data.update

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        end = data.paths["exact"][-1] - 1
        axes.set(xlim=(0, 2000), ylim=(1 - 0.08 * end, 1 + 1.25 * end), xlabel="updates", ylabel="weight")
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.plot(data.paths["exact"], color=BLACK, lw=1, ls=":", label="exact")
        self.lines = {
            scheme: self.moving(axes.plot([], [], color=colour, ls=dash, lw=2, label=label)[0])
            for scheme, (colour, dash, label) in SCHEME_STYLE.items()
        }
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(f"2,000 updates of {data.update:.3g}", loc="left")

    def update(self, data: Any) -> None:
        steps = np.arange(data.shown + 1)
        for scheme, line in self.lines.items():
            line.set_data(steps, data.paths[scheme][: data.shown + 1])


def sums(totals: Mapping[str, Any], exact: Any) -> Figure:
    """Running totals over the number of terms, one line per way of summing."""
    figure = new_figure(8.4, 3.4)
    axes = figure.subplots()
    axes.plot(exact, color=BLACK, lw=1, ls=":", label="exact")
    for (name, values), colour, dash, marker in zip(totals.items(), LINES, DASHES, MARKERS):
        axes.plot(values, color=colour, ls=dash, marker=marker, markevery=len(exact) // 8, ms=5, lw=1.8, label=name)
    axes.set(xlabel="terms added", ylabel="total")
    axes.legend()
    return figure
