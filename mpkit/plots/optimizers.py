"""Curves of schedules, of Adam's step over the gradient, and of the loss under two loss scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mpkit.plots.base import BLUE, DASHES, GREY, LINES, MARKERS, VERMILION, Picture, log2_axis, power_of_two


class SchedulesPicture(Picture):
    """Five learning rates over the steps, relative positions kept, with a marker at one step."""

    size = (8.0, 3.8)

    def frame(self, data: Any) -> float:
        """The top of the rate axis."""
        return float(f"{data.learning_rate:.3g}")

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        top, steps = self.frame(data), len(next(iter(data.curves.values())))
        axes.set(xlabel="step", ylabel="learning rate", xlim=(0, steps - 1), ylim=(-0.02 * top, 1.05 * top))
        axes.set_title("the same numbers, five schedules", loc="left")
        self.lines, self.points = [], []
        for name, colour, dash, marker in zip(data.curves, LINES, DASHES, MARKERS):
            (line,) = axes.plot([], [], color=colour, ls=dash, lw=1.8, label=name)
            (point,) = axes.plot([], [], marker, color=colour, ms=7)
            self.lines.append(self.moving(line))
            self.points.append(self.moving(point))
        self.cursor = self.moving(axes.axvline(0, color=GREY, lw=1))
        figure.legend(handles=self.lines, loc="outside right upper")

    def update(self, data: Any) -> None:
        for line, point, rates in zip(self.lines, self.points, data.curves.values()):
            line.set_data(range(len(rates)), rates)
            point.set_data([data.step], [rates[data.step]])
        self.cursor.set_xdata([data.step, data.step])


LOW, HIGH = -12, 8  # powers of two of the step axis; what lies beyond is drawn at the edge


class AdamStatePicture(Picture):
    """Step size over gradient size, in float32 and in the narrow format; infinite and zero steps at the edges."""

    size = (8.0, 3.8)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        axes.set(xlabel="size of the gradient", ylabel="first step, in learning rates")
        log2_axis(axes, "x", -26, 16, 6)
        log2_axis(axes, "y", LOW - 1, HIGH + 1, 3)
        axes.set_yticks(
            [2.0**LOW, *(2.0**e for e in range(-9, HIGH, 3)), 2.0**HIGH],
            ["0", *(power_of_two(e) for e in range(-9, HIGH, 3)), "inf, NaN"],
        )
        axes.set_title("Adam's first step: 1 wherever the state can hold it", loc="left")
        (wide,) = axes.plot([], [], color=GREY, ls="--", lw=1.8, label="float32")
        (narrow,) = axes.plot([], [], color=BLUE, lw=2, label="chosen format")
        (broken,) = axes.plot([], [], "x", color=VERMILION, ms=5, label="inf, NaN or 0")
        (point,) = axes.plot([], [], "o", color=BLUE, ms=9, mfc="white", mew=2, label="marked gradient")
        self.wide, self.narrow, self.broken, self.point = self.moving(wide, narrow, broken, point)
        figure.legend(handles=[wide, narrow, broken, point], loc="outside right upper")

    def update(self, data: Any) -> None:
        x = data.gradients.numpy()
        narrow, wide = (_shown(step.size.numpy()) for step in (data.narrow, data.wide))
        self.wide.set_data(x, wide)
        self.narrow.set_data(x, narrow)
        edge = (narrow == 2.0**LOW) | (narrow == 2.0**HIGH)
        self.broken.set_data(x[edge][::3], narrow[edge][::3])
        self.point.set_data([x[data.marked]], [narrow[data.marked]])


def _shown(sizes: np.ndarray) -> np.ndarray:
    return np.clip(np.where(np.isfinite(sizes), sizes, 2.0**HIGH), 2.0**LOW, 2.0**HIGH)


class LossScalePicture(Picture):
    """The loss over the steps with the chosen scales and with scales that agree."""

    size = (8.0, 3.6)
    top = 1e3

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        axes.set(xlabel="step", ylabel="loss, nats", xlim=(0, len(data.losses) - 1))
        axes.set(yscale="log", ylim=(0.1, 2 * self.top))
        axes.set_title("loss, × = not finite", loc="left")
        (agreed,) = axes.plot([], [], color=GREY, ls="--", lw=2, label="sens = loss_scale")
        (losses,) = axes.plot([], [], color=BLUE, lw=2, label="chosen")
        (broken,) = axes.plot([], [], "x", color=VERMILION, ms=7, label="inf or NaN")
        self.agreed, self.losses, self.broken = self.moving(agreed, losses, broken)
        figure.legend(handles=[agreed, losses, broken], loc="outside right upper")

    def update(self, data: Any) -> None:
        losses, steps = np.array(data.losses), np.arange(len(data.losses))
        bad = ~np.isfinite(losses)
        self.agreed.set_data(steps, data.agreed)
        self.losses.set_data(steps, np.where(bad, np.nan, np.minimum(losses, self.top)))
        self.broken.set_data(steps[bad], np.full(int(bad.sum()), self.top * 0.8))
