"""Pictures of lesson 01: boxes of bits, ranges on one axis, gradients over the range of a format."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mpkit.formats import FORMATS, FloatFormat, get_format
from mpkit.plots.base import (
    BLACK,
    BLUE,
    DASHES,
    GREEN,
    LINES,
    MARKERS,
    SKY,
    VERMILION,
    Picture,
    log2_axis,
    new_figure,
)

FIELD_COLOURS = {"sign": VERMILION, "exponent": GREEN, "fraction": BLUE}


def field_of(index: int, fmt: FloatFormat) -> str:
    """The field that one bit belongs to."""
    return "fraction" if index < fmt.fraction_bits else "exponent" if index < fmt.bits - 1 else "sign"


class BitsPicture(Picture):
    """The bits as boxes, and the value between its neighbours with the number that was asked for."""

    size = (8.4, 3.6)

    def frame(self, data: Any) -> Hashable:
        return data.fmt

    def layout(self, figure: Figure, data: Any) -> None:
        bits, line = figure.subplots(2, 1, height_ratios=[1, 1.1])
        self._boxes(bits, data.format)
        self._number_line(line)

    def _boxes(self, axes: Axes, fmt: FloatFormat) -> None:
        axes.set(xlim=(-0.5, 31.5), ylim=(-1.5, 1.75))
        axes.axis("off")
        first = (32 - fmt.bits) / 2 - 0.5
        self.boxes, self.digits = [], []
        for place in range(fmt.bits):
            name = field_of(fmt.bits - 1 - place, fmt)
            box = Rectangle((first + place + 0.04, 0), 0.92, 1, edgecolor=FIELD_COLOURS[name], lw=1.8)
            axes.add_patch(box)
            self.boxes.append(self.moving(box))
            self.digits.append(self.moving(axes.text(first + place + 0.5, 0.47, "", ha="center", va="center", size=11)))
        widths = {"sign": 1, "exponent": fmt.exponent_bits, "fraction": fmt.fraction_bits}
        left = first
        for name, width in widths.items():
            label, colour = (name if name == "sign" else f"{name}, {width} bits"), FIELD_COLOURS[name]
            if name == "fraction":  # below, as the labels of a narrow format would collide
                axes.text(left + 0.04, -0.12, label, ha="left", va="top", color=colour, size=10)
            elif name == "exponent":
                axes.text(left + 0.04, 1.15, label, ha="left", va="bottom", color=colour, size=10)
            else:
                axes.text(left + 0.7, 1.15, label, ha="right", va="bottom", color=colour, size=10)
            left += width
        self.formula = self.moving(axes.text(15.5, -1.15, "", ha="center", va="center", size=12))

    def _number_line(self, axes: Axes) -> None:
        axes.set(xlim=(-1.6, 1.6), ylim=(0, 1), yticks=[], xlabel="distance from the stored value, ulp")
        axes.spines["left"].set_visible(False)
        self.ticks = [self.moving(axes.plot([], [], "|", color=BLACK, ms=22, mew=2)[0]) for _ in range(3)]
        self.names = [self.moving(axes.text(0, 0.62, "", ha="center", size=10)) for _ in range(3)]
        (self.wanted,) = axes.plot([], [], "v", color=VERMILION, ms=10)
        self.moving(self.wanted)
        self.said = self.moving(axes.text(0, 0.9, "", ha="center", va="center", color=VERMILION, size=10))

    def update(self, data: Any) -> None:
        for index, box, digit in zip(reversed(range(data.format.bits)), self.boxes, self.digits):
            bit = data.bit(index)
            box.set_facecolor(box.get_edgecolor() if bit else "white")
            digit.set_text(str(bit))
            digit.set_color("white" if bit else BLACK)
        self.formula.set_text(f"{data.formula()}   {data.fields.kind}")
        finite = data.fields.value is not None
        values = (data.below, data.value, data.above) if finite else (None, data.value, None)
        for tick, name, value in zip(self.ticks, self.names, values):
            place: float | None = self._place(value, data)
            tick.set_data([] if place is None else [place], [] if place is None else [0.4])
            name.set_position((place or 0.0, 0.62))
            name.set_text("" if place is None else f"{value:.8g}")
        place = self._place(data.wanted, data)
        off = place is None or abs(place) > 1.5
        self.wanted.set_data([] if place is None or off else [place], [] if off else [0.84])
        self.said.set_position((max(-1.2, min(1.2, place or 0.0)), 0.97))
        self.said.set_text("" if off else f"asked for {data.number[:18]}")

    @staticmethod
    def _place(value: float | None, data: Any) -> float | None:
        """Where a value lies, in ulps from the stored one; inf is shown one ulp away."""
        if value is None or math.isnan(value):
            return None
        if not math.isfinite(value):
            return 0.0 if value == data.value else math.copysign(1.0, value)
        if not math.isfinite(data.value):
            return None
        return (value - data.value) / data.gap


def _range_bars(axes: Axes, names: list[str]) -> None:
    """One bar per format: subnormal numbers hatched, normal numbers filled."""
    for row, name in enumerate(names):
        fmt = get_format(name)
        parts = ((fmt.min_subnormal, fmt.min_normal, "white", "////"), (fmt.min_normal, fmt.max, SKY, ""))
        for low, high, colour, hatch in parts:
            axes.barh(row, high - low, left=low, height=0.6, color=colour, edgecolor=BLACK, lw=0.8, hatch=hatch)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("magnitude (filled: normal, hatched: subnormal)")


class RangesPicture(Picture):
    """The range of every format on one axis, and one magnitude with its fate in each."""

    size = (8.4, 3.9)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        names = list(data.kept)
        log2_axis(axes, "x", -152, 226, 24)
        axes.set_xticks([2.0**e for e in range(-144, 129, 24)])
        axes.grid(axis="y", visible=False)
        _range_bars(axes, names)
        axes.set_title("range of the formats: 0 to the left, overflow to the right", loc="left")
        self.line = self.moving(axes.axvline(1.0, color=VERMILION, lw=2))
        self.fates = [self.moving(axes.text(2.0**132, row, "", va="center", size=10)) for row in range(len(names))]

    def update(self, data: Any) -> None:
        self.line.set_xdata([2.0**data.exponent] * 2)
        for text, name in zip(self.fates, data.kept):
            text.set_text(data.fate(name))


class GradientsPicture(Picture):
    """The exponent histogram of scaled gradients over the regions of one format."""

    size = (8.4, 3.6)
    low, high = -50, 32

    def frame(self, data: Any) -> Hashable:
        return data.fmt

    def layout(self, figure: Figure, data: Any) -> None:
        axes, fmt = figure.subplots(), data.format
        axes.set(ylim=(0, 20), ylabel="share of the gradients, %")
        log2_axis(axes, "x", self.low, self.high, 8)
        axes.set_xlabel("magnitude of loss scale × gradient")
        lost, normal, top = data.lost_below, fmt.min_exponent, fmt.max_exponent + 1
        edges = (self.low, lost, normal, top, self.high)
        colours = ("#F4D9CC", "#FBEBC8", "white", "#F4D9CC")
        for left, right, colour, name in zip(edges, edges[1:], colours, ("zero", "subnormal", "normal", "overflow")):
            left, right = (min(max(edge, self.low), self.high) for edge in (left, right))
            if left < right:
                axes.axvspan(2.0**left, 2.0**right, color=colour, zorder=0)
                axes.text(2.0 ** ((left + right) / 2), 19.6, name, ha="center", va="top", size=10)
        self.bars = [
            self.moving(axes.bar(1.0, 0.0, color=BLUE, edgecolor=BLACK, lw=0.5, align="edge")[0]) for _ in data.share
        ]

    def update(self, data: Any) -> None:
        for bar, exponent, share in zip(self.bars, data.exponents, data.share):
            bar.set_bounds(2.0**exponent, 0.0, 2.0**exponent, 100 * share)


def precision(names: tuple[str, ...] = ("fp32", "fp16", "bf16", "e5m2", "e4m3fn")) -> Figure:
    """The gap to the next value relative to the value itself, over the whole range of each format."""
    figure = new_figure(8.4, 3.6)
    axes = figure.subplots()
    for name, colour, dash, marker in zip(names, LINES, DASHES, MARKERS):
        fmt = FORMATS[name]
        low = fmt.min_exponent - fmt.fraction_bits
        x = [2.0**e for e in range(low, fmt.max_exponent + 1)]
        y = [2.0 ** (max(e, fmt.min_exponent) - fmt.fraction_bits - e) for e in range(low, fmt.max_exponent + 1)]
        every = max(1, len(x) // 6)
        axes.plot(x, y, color=colour, ls=dash, marker=marker, markevery=every, ms=5, lw=1.8, label=name)
    log2_axis(axes, "x", -152, 130, 24)
    log2_axis(axes, "y", -25, 1, 4)
    axes.set(xlabel="magnitude (powers of two)", ylabel="ulp / magnitude")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("lower is finer; flat where numbers are normal, rising where subnormal", loc="left")
    return figure
