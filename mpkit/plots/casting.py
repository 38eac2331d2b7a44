"""Pictures of lesson 03: a network coloured by the precision it computes in, and log-probabilities that are lost."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mpkit.plots.base import BLACK, BLUE, ORANGE, SKY, VERMILION, Picture, power_of_two

LOWEST, HIGHEST = -30, 3  # powers of two on the error axis


class CastingPicture(Picture):
    """Above: the operations in order, coloured by compute precision. Below: error against float64, and lost values."""

    size = (9.0, 4.8)

    def frame(self, data: Any) -> Hashable:
        return tuple((step.module, step.operation) for step in data.walk.steps), data.fmt

    def layout(self, figure: Figure, data: Any) -> None:
        steps = data.walk.steps
        above, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.9))
        above.set(ylim=(0, 1), yticks=[], xlim=(-0.6, len(steps) - 0.4))
        above.grid(visible=False)
        above.tick_params(bottom=False)
        for side in ("left", "bottom"):
            above.spines[side].set_visible(False)
        above.legend(
            handles=[
                Patch(fc=SKY, ec=BLACK, label="computes in float32"),
                Patch(fc=ORANGE, ec=BLACK, hatch="///", label=f"computes in {data.fmt}"),
            ],
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=2,
        )
        places = range(len(steps))
        shapes = [Rectangle((i - 0.42, 0.3), 0.84, 0.6, ec=BLACK) for i in places]
        self.boxes = [self.moving(above.add_patch(shape)) for shape in shapes]
        white = {"fc": "white", "ec": "none", "pad": 1.5}
        centred: Any = {"ha": "center", "va": "center", "size": 10}
        self.names = [self.moving(above.text(i, 0.6, "", bbox=white, **centred)) for i in places]
        self.casts = [self.moving(above.text(i, 0.13, "", **centred)) for i in places]
        axes.set_yscale("log", base=2)
        axes.set(ylim=(2.0**LOWEST, 2.0**HIGHEST), ylabel="relative error, rms")
        axes.yaxis.set_major_locator(FixedLocator([2.0**e for e in range(LOWEST, HIGHEST, 6)]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: power_of_two(math.log2(v))))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks(range(len(steps)), [_label(step) for step in steps], rotation=40, ha="right")
        (self.line,) = axes.plot([], [], "o-", color=BLUE, label=f"{data.fmt}, at the level")
        (self.plain,) = axes.plot([], [], "s--", color=BLACK, ms=4, label="float32 (O0)")
        (self.zero,) = axes.plot([], [], "v", color=VERMILION, ms=9, ls="none", label="values flushed to zero")
        (self.over,) = axes.plot([], [], "X", color=BLACK, ms=9, ls="none", label="values overflowed")
        self.moving(self.line, self.plain, self.zero, self.over)
        axes.legend(loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0), handletextpad=0.3, columnspacing=1.2)

    def update(self, data: Any) -> None:
        steps = data.walk.steps
        for box, name, cast, step in zip(self.boxes, self.names, self.casts, steps):
            wide = step.compute == "float32"
            box.set(facecolor=SKY if wide else ORANGE, hatch="" if wide else "///")
            name.set_text("32" if wide else _short(step.compute))
            cast.set_text(f"{step.casts} casts" if len(steps) <= 12 and step.casts else f"{step.casts or ''}")
        places = range(len(steps))
        heights = [_clipped(step.error) for step in steps]
        self.line.set_data(places, heights)
        self.plain.set_data(places, [_clipped(step.error) for step in data.plain.steps])
        for marks, counts, height in ((self.zero, "flushed", LOWEST + 1.5), (self.over, "overflowed", HIGHEST - 1.2)):
            at = [i for i in places if getattr(steps[i], counts)]
            marks.set_data(at, [2.0**height] * len(at))


def _clipped(error: float) -> float:
    """Inside the axes: exact results lie on the floor, non-finite ones on the ceiling."""
    return min(max(error, 2.0**LOWEST), 2.0**HIGHEST)


def _short(compute: str) -> str:
    return compute.removesuffix("fn")


def _label(step: Any) -> str:
    operation = step.operation.removeprefix("scaled_dot_product_").removeprefix("layer_").removeprefix("batch_")
    named = [part for part in step.module.split(".") if not part.isdigit()]
    number = [part for part in step.module.split(".")[-1:] if part.isdigit()]
    module = ".".join([*named[-1:], *number]).replace("dense_relu_sequential.", "").replace("downsample", "down")
    return f"{module}: {operation}" if module else operation


class LogSoftmaxPicture(Picture):
    """Computed log-probabilities against the exact ones; what became -inf lies on the floor."""

    size = (7.6, 3.6)
    floor = -37.0

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        axes.set(xlim=(0.8, -32.8), ylim=(self.floor - 1.5, 1.5), xlabel="logit z", ylabel="log softmax(z), nats")
        axes.axhline(self.floor, color=BLACK, lw=1, ls=":")
        axes.text(0.3, self.floor + 0.8, "-inf", size=10)
        axes.plot(range(0, -33, -1), data.want.tolist(), "-", color=BLACK, lw=1.5, label="exact")
        (self.right,) = axes.plot([], [], "o", color=BLUE, ms=5, label="computed")
        (self.lost,) = axes.plot([], [], "v", color=VERMILION, ms=8, label="lost: log(0) = -inf")
        self.moving(self.right, self.lost)
        axes.legend(loc="upper right")

    def update(self, data: Any) -> None:
        points = list(zip(range(0, -33, -1), data.got.tolist()))
        finite = [(z, y) for z, y in points if math.isfinite(y)]
        self.right.set_data([z for z, _ in finite], [y for _, y in finite])
        lost = [z for z, y in points if not math.isfinite(y)]
        self.lost.set_data(lost, [self.floor] * len(lost))
