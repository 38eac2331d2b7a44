"""Two updates and what becomes of them; many workers; losses of a training with each rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from mpkit.plots.base import BLACK, BLUE, GREEN, GREY, VERMILION, Picture, log2_axis, new_figure

LOOK: Mapping[str, dict[str, Any]] = {
    "sum": {"color": VERMILION, "ls": "--", "marker": "s"},
    "mean": {"color": GREEN, "ls": "-.", "marker": "^"},
    "AdaSum": {"color": BLUE, "ls": "-", "marker": "o"},
}

RULES = tuple(LOOK)


class PairPicture(Picture):
    """The vectors in the plane, and the length of each result over the angle."""

    size = (8.4, 3.9)

    def layout(self, figure: Figure, data: Any) -> None:
        plane, lengths = figure.subplots(1, 2)
        plane.set(xlim=(-3.2, 6.4), ylim=(-0.8, 6.2), xlabel="first weight's update", ylabel="second weight's update")
        plane.set_aspect("equal", adjustable="box")
        plane.set_title("two updates a, b and the merged update", loc="left")
        given = {"color": BLACK, "lw": 3, "ms": 7}
        self.arrows = {
            "a": plane.plot([], [], marker=">", label="a", **given)[0],
            "b": plane.plot([], [], marker="D", ls=":", label="b", **given)[0],
        }
        for rule in RULES:
            self.arrows[rule] = plane.plot([], [], lw=2.2, ms=8, label=rule, **LOOK[rule])[0]
        plane.legend(loc="upper left", ncols=2, handlelength=2.6)
        lengths.set(
            xlim=(0, 180), ylim=(0, 6.2), xlabel="angle between a and b, degrees", ylabel="length of the result"
        )
        lengths.set_xticks(range(0, 181, 30))
        lengths.set_title("length over the angle", loc="left")
        self.curves = {rule: lengths.plot([], [], lw=2, **(LOOK[rule] | {"marker": None}))[0] for rule in RULES}
        self.points = {rule: lengths.plot([], [], ms=9, **LOOK[rule])[0] for rule in RULES}
        self.moving(*self.arrows.values(), *self.curves.values(), *self.points.values())

    def update(self, data: Any) -> None:
        vectors = {"a": data.a, "b": data.b, **data.results}
        for name, vector in vectors.items():
            self.arrows[name].set_data([0, float(vector[0])], [0, float(vector[1])])
            self.arrows[name].set_markevery([1])
        for rule in RULES:
            self.curves[rule].set_data(data.angles, data.lengths[rule])
            self.points[rule].set_data([data.angle], [float(data.results[rule].norm())])


class WorkersPicture(Picture):
    """Length of the merged update over the number of workers, and its cosine with the shared direction."""

    size = (8.4, 3.6)

    def layout(self, figure: Figure, data: Any) -> None:
        lengths, cosines = figure.subplots(1, 2)
        log2_axis(lengths, "y", -3, 4, 1)
        lengths.set_ylabel("length, in single updates")
        lengths.set_title("length of the merged update", loc="left")
        cosines.set(ylim=(-0.5, 1.05), ylabel="cosine with the shared direction")
        cosines.set_title("direction", loc="left")
        for axes in (lengths, cosines):
            log2_axis(axes, "x", 0, 4, 1)
            axes.set(xlabel="workers", xlim=(0.9, 18))
            axes.set_xticks(data.counts, [str(n) for n in data.counts])
        self.at = [axes.axvline(1, color=GREY, lw=6, alpha=0.3) for axes in (lengths, cosines)]
        self.lengths = {rule: lengths.plot([], [], lw=2, ms=7, label=rule, **LOOK[rule])[0] for rule in RULES}
        directions = {rule: LOOK[rule] for rule in ("mean", "AdaSum")}
        names = {"mean": "mean and sum", "AdaSum": "AdaSum"}
        self.cosines = {
            r: cosines.plot([], [], lw=2, ms=7, label=names[r], **look)[0] for r, look in directions.items()
        }
        lengths.legend(loc="upper left")
        self.cosines["mean"].set(markersize=12, markerfacecolor="none")  # the two often lie on one another
        cosines.legend(loc="lower right")
        self.moving(*self.at, *self.lengths.values(), *self.cosines.values())

    def update(self, data: Any) -> None:
        for line in self.at:
            line.set_xdata([data.workers, data.workers])
        for lines, values in ((self.lengths, data.lengths), (self.cosines, data.cosines)):
            for rule, line in lines.items():
                line.set_data(data.counts, values[rule])


def training_curves(losses: Mapping[str, Sequence[float]], top: float = 3.0) -> Figure:
    """Loss over the steps, one line per rule; what lies above `top` is drawn at `top`."""
    figure = new_figure(7.2, 3.4)
    axes = figure.subplots()
    for rule, values in losses.items():
        shown = [min(v, top) for v in values]
        axes.plot(shown, lw=2, label=rule, markevery=8, ms=6, **LOOK[rule.split(",")[0]])
    axes.set(xlabel="step", ylabel="loss over the training digits, nats", xlim=(0, None), ylim=(0, top * 1.25))
    axes.axhline(top, color=GREY, lw=0.8)
    axes.text(0.3, top * 1.03, f"larger losses are drawn at {top:g}", color=GREY)
    axes.legend(loc="upper right", ncols=3, frameon=False)
    return figure
