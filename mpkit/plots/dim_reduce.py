"""The training path in the plane of two components, the trials of its line search, losses and residual."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mpkit.plots.base import BLACK, BLUE, GREY, VERMILION, Picture

LEVELS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)


class DimReducePicture(Picture):
    """Left: the plane. Right: the losses of both ways, and the share of the gradient outside the subspace."""

    size = (8.4, 4.3)

    def layout(self, figure: Figure, data: Any) -> None:
        parts = figure.subplot_mosaic([["plane", "loss"], ["plane", "outside"]], width_ratios=(3, 2))
        plane, loss, outside = parts["plane"], parts["loss"], parts["outside"]
        x, y, height = data.landscape
        lines = plane.contour(x, y, height, levels=LEVELS, colors=GREY, linewidths=0.8)
        margin = 0.06 * np.array([x[-1] - x[0], y[-1] - y[0]])
        for label in plane.clabel(lines, fmt="%.1f", fontsize=9):
            at = np.array(label.get_position())
            if (at - margin < (x[0], y[0])).any() or (at + margin > (x[-1], y[-1])).any():
                label.remove()  # the edge would cut it
        plane.set(xlabel="along component 1", ylabel="along component 2", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        plane.grid(False)
        plane.set_title("loss on the plane, nats, and the paths", loc="left")
        (self.earlier,) = plane.plot([], [], color=BLACK, ls=":", lw=2, marker="s", ms=4, markevery=10)
        (self.path,) = plane.plot([], [], color=BLUE, lw=1.8, marker="o", ms=4)
        (self.tried,) = plane.plot([], [], ls="none", marker="x", color=VERMILION, ms=9, mew=2)
        (self.taken,) = plane.plot([], [], ls="none", marker="*", color=BLUE, ms=15, mec=BLACK)
        (self.here,) = plane.plot([], [], ls="none", marker="o", color="white", mec=BLACK, mew=2, ms=9)
        artists = (self.earlier, self.path, self.here, self.tried, self.taken)
        names = ("gradient descent", "DimReduce", "weights now", "refused trial", "accepted trial")
        figure.legend(artists, names, loc="outside lower center", ncols=len(names))
        steps = len(data.path.searches)
        loss.set(ylabel="loss, nats", xlim=(0, steps), ylim=(0, 2.6))
        loss.set_title("loss", loc="left")
        (self.slow,) = loss.plot([], [], color=BLACK, ls=":", lw=2)
        (self.fast,) = loss.plot([], [], color=BLUE, lw=2)
        outside.set(xlabel="step", ylabel="share, %", xlim=(0, steps), ylim=(0, 104))
        outside.set_title("gradient outside the subspace", loc="left")
        (self.share,) = outside.plot([], [], color=BLUE, lw=2)
        self.now = [axes.axvline(0, color=GREY, lw=1) for axes in (loss, outside)]
        self.moving(self.earlier, self.path, self.here, self.tried, self.taken)
        self.moving(self.slow, self.fast, self.share, *self.now)

    def update(self, data: Any) -> None:
        at = data.step
        reduced, search = data.points["DimReduce"], data.path.searches[at]
        self.earlier.set_data(*data.points["gradient descent"].T)
        self.path.set_data(*reduced[: at + 1].T)
        self.here.set_data(*reduced[at : at + 1].T)
        last = len(data.trials) - 1
        taken = [search.accepted and i == last for i in range(len(data.trials))]
        for artist, wanted in ((self.taken, True), (self.tried, False)):
            points = np.array([p for p, t in zip(data.trials, taken) if t == wanted]).reshape(-1, 2)
            artist.set_data(*points.T)
        steps = np.arange(len(data.path.losses))
        self.slow.set_data(steps, data.earlier.losses)
        self.fast.set_data(steps, data.path.losses)
        self.share.set_data(steps[:-1], 100 * data.path.residual)
        for line in self.now:
            line.set_xdata([at, at])
