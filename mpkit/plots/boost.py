"""Boost configurations side by side, the freeze timeline, the layers that LessBN keeps, and a centralized gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpkit.plots.base import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, Picture, new_figure

EDGE: Any = {"edgecolor": BLACK, "linewidth": 0.8}


class BoostPicture(Picture):
    """Time of a step of both configurations, and how often each stage of the network stands still."""

    size = (8.6, 3.9)

    def layout(self, figure: Figure, data: Any) -> None:
        times, stages = figure.subplots(1, 2, width_ratios=(1, 1.7))
        times.set(xlim=(-0.6, 2.6), ylim=(0, 1.25), ylabel="time of a step, share of no boost")
        times.set_xticks([0, 1, 2], ["no boost", "compared", "this"])
        times.set_title("measured time of a step", loc="left")
        self.bars = times.bar([0, 1, 2], [1, 1, 1], 0.6, color=[GREY, SKY, ORANGE], **EDGE)
        for bar, hatch in zip(self.bars, ("", "//", "")):
            bar.set_hatch(hatch)
        self.labels = [times.text(i, 1, "", ha="center", va="bottom", fontsize=10) for i in range(3)]
        count = len(data.stages)
        stages.set(xlim=(-0.7, count - 0.3), ylim=(-0.16, 1.0), ylabel="share of steps frozen")
        stages.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        stages.set_xticks(range(0, count, 2))
        stages.set_xlabel("stage of the ResNet-18, from the input to the last FC")
        stages.set_title("frozen steps; × = BatchNorm removed", loc="left")
        places = np.arange(count)
        self.this = stages.bar(places, np.zeros(count), 0.8, color=ORANGE, label="this", **EDGE)
        (self.other,) = stages.step([], [], where="mid", color=BLUE, lw=2, ls="--", label="compared")
        (self.removed,) = stages.plot([], [], "x", color=VERMILION, ms=7, mew=2)
        stages.legend(handles=[self.this, self.other], loc="upper right")
        self.moving(*self.bars, *self.labels, *self.this, self.other, self.removed)

    def update(self, data: Any) -> None:
        for bar, label, effect in zip(self.bars, self.labels, (None, data.other, data.this)):
            step = 1.0 if effect is None else effect.step
            bar.set_height(step)
            label.set_text("1.00" if effect is None else f"{step:.2f}\n({effect.speedup:.2f}×)")
            label.set_y(step + 0.01)
        for bar, share in zip(self.this, data.frozen_share(data.this)):
            bar.set_height(share)
        shares = data.frozen_share(data.other)
        self.other.set_data(np.arange(len(shares)), shares)
        gone = [i for i, (_, removed) in enumerate(data.stages) if removed] if data.this.removed else []
        self.removed.set_data(gone, np.full(len(gone), -0.08))


class FreezePicture(Picture):
    """Steps by stages: light is trained, dark stands still; beside it the work of the current step."""

    size = (8.6, 4.4)

    def layout(self, figure: Figure, data: Any) -> None:
        timeline, saving = figure.subplots(1, 2, width_ratios=(2.2, 1))
        count, steps = len(data.names), len(data.sequence)
        extent = (-0.5, steps - 0.5, count - 0.5, -0.5)
        self.map = timeline.imshow(_frozen_map(data), aspect="auto", interpolation="nearest", extent=extent)
        timeline.set(xlabel="step", ylabel="stage, input at the top")
        shown = range(0, count, 2)
        timeline.set_yticks(list(shown), [data.names[i].replace(".0", "") if i == 0 else data.names[i] for i in shown])
        timeline.tick_params(axis="y", labelsize=10)
        timeline.grid(False)
        timeline.set_title("dark = frozen, light = trained, ▼ = this step", loc="left", pad=18)
        self.now = timeline.axvline(0, color=VERMILION, lw=1.2)
        (self.place,) = timeline.plot([], [], "v", color=VERMILION, ms=9, clip_on=False)
        saving.set(xlim=(-0.6, 2.6), ylim=(0, 1.08), ylabel="backward work saved")
        saving.set_xticks([0, 1, 2], ["step", "mean", "formula"])
        saving.set_title("saved", loc="left", pad=18)
        self.bars = saving.bar([0, 1, 2], [0, 0, 0], 0.6, color=[ORANGE, SKY, "white"], **EDGE)
        self.bars[2].set_hatch("//")
        self.labels = [saving.text(i, 0, "", ha="center", va="bottom", fontsize=10) for i in range(3)]
        self.moving(self.map, self.now, self.place, *self.bars, *self.labels)

    def update(self, data: Any) -> None:
        self.map.set_data(_frozen_map(data))
        self.now.set_xdata([data.step, data.step])
        self.place.set_data([data.step], [-1.0])
        values = data.saved[data.step], float(np.mean(data.saved)), data.formula
        for bar, label, value in zip(self.bars, self.labels, values):
            bar.set_height(value)
            label.set_text(f"{value:.0%}" if bar is self.bars[0] else f"{value:.1%}")
            label.set_y(value + 0.01)


def _frozen_map(data: Any) -> np.ndarray:
    """(stages, steps, 3) colours: blue where a stage stands still."""
    still = np.array(data.sequence)[None, :] * data.stride > np.arange(len(data.names))[:, None]
    return np.where(still[..., None], np.array([0x00, 0x72, 0xB2]), np.array([0xEE, 0xEE, 0xEE])) / 255


KINDS: Mapping[str, tuple[str, str, str]] = {
    "conv": (GREY, "s", "convolution"),
    "kept": (BLUE, "o", "BatchNorm kept"),
    "removed": (VERMILION, "x", "BatchNorm removed"),
    "linear": (BLACK, "D", "FC"),
    "normalised": (GREEN, "D", "FC normalised"),
}
PER_ROW = 30


class LessBNPicture(Picture):
    """The layers of a network in definition order, row after row."""

    size = (8.6, 3.2)

    def frame(self, data: Any) -> Any:
        """Everything changes with the network."""
        return data.network, tuple(data.layers)

    def layout(self, figure: Figure, data: Any) -> None:
        axes = figure.subplots()
        rows = max(3, -(-len(data.layers) // PER_ROW))
        width = -(-len(data.layers) // rows)
        axes.set(xlim=(-1, width), ylim=(rows - 0.4, -0.6))
        axes.axis("off")
        for row in range(rows):
            length = min(width, len(data.layers) - row * width)
            axes.plot([0, length - 1], [row, row], color="#BBBBBB", lw=1, zorder=1)
        for kind, (colour, marker, _label) in KINDS.items():
            places = [i for i, (_, own) in enumerate(data.layers) if own == kind]
            size = 9 if kind in ("kept", "removed") else 7
            face = "white" if kind == "kept" else colour
            axes.plot(
                [i % width for i in places],
                [i // width for i in places],
                marker,
                color=colour,
                markerfacecolor=face,
                ms=size,
                mew=2,
            )
        gone, norms = len(data.report.removed), len(data.report.removed) + len(data.report.kept)
        axes.set_title(f"{data.network}: {gone} of {norms} BatchNorms removed, in definition order", loc="left")
        handles = [
            axes.plot([], [], m, color=c, markerfacecolor="white" if k == "kept" else c, mew=2, ms=8, label=text)[0]
            for k, (c, m, text) in KINDS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handletextpad=0.2, columnspacing=1.2)


class CentralizePicture(Picture):
    """The entries of one output's gradient with their mean, and the means of all outputs."""

    size = (8.4, 3.5)

    def frame(self, data: Any) -> Any:
        """The axes depend on the layer."""
        return data.layer

    def layout(self, figure: Figure, data: Any) -> None:
        entries, means = figure.subplots(1, 2)
        reach = 1.3 * float(data.grad.abs().max())
        entries.set(xlim=(-1, data.grad.shape[1]), ylim=(-reach, reach), xlabel="entry", ylabel="gradient")
        entries.set_title("chosen output: entries and mean", loc="left")
        entries.axhline(0, color=BLACK, lw=0.8)
        (self.before,) = entries.plot([], [], ".", color=GREY, ms=5, label="before")
        (self.after,) = entries.plot([], [], "o", color=BLUE, ms=4, markerfacecolor="none", label="used")
        (self.mean,) = entries.plot([], [], color=VERMILION, lw=2, ls="--", label="its mean")
        entries.legend(loc="lower left", ncols=3, columnspacing=0.8, handletextpad=0.3)
        before = data.grad.mean(1).numpy()
        top = 1.2 * max(float(np.abs(before).max()), 1e-12)
        means.set(xlim=(-1, len(before)), ylim=(-top, top), xlabel="output", ylabel="mean of its gradient")
        means.set_title(f"{data.layer}: mean of every output", loc="left")
        means.axhline(0, color=BLACK, lw=0.8)
        means.plot(before, ".", color=GREY, ms=7)
        (self.means,) = means.plot([], [], "o", color=BLUE, ms=5, markerfacecolor="none")
        (self.chosen,) = means.plot([], [], "s", color=VERMILION, ms=9, mfc="none", mew=2)
        for axes in (entries, means):
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        self.moving(self.before, self.after, self.mean, self.means, self.chosen)

    def update(self, data: Any) -> None:
        used = data.row_used.numpy()
        self.before.set_data(np.arange(len(used)), data.row.numpy())
        self.chosen.set_data([data.output], [float(data.row.mean())])
        self.after.set_data(np.arange(len(used)), used)
        self.mean.set_data([-1, len(used)], [float(used.mean())] * 2)
        means = data.used.mean(1).numpy()
        self.means.set_data(np.arange(len(means)), means)


def speedups(rows: Sequence[Mapping[str, Any]], promises: Mapping[str, float]) -> Figure:
    """Speed-up of each measured contender with its quartiles, and what was promised for it where something was."""
    figure = new_figure(8.2, 0.42 * len(rows) + 1.1)
    axes = figure.subplots()
    places = np.arange(len(rows))[::-1]
    values = np.array([row["ratio"] for row in rows])
    low, high = (np.array([row["quartiles"][i] for row in rows]) for i in (0, 1))
    axes.barh(places, values, 0.62, color=SKY, **EDGE)
    whiskers = np.maximum([values - low, high - values], 0)  # a whole training may lie outside its phases' quartiles
    axes.errorbar(values, places, xerr=whiskers, fmt="none", ecolor=BLACK, capsize=4, lw=1.4)
    for place, row in zip(places, rows):
        promise = promises.get(row["contender"])
        end = max(row["ratio"], row["quartiles"][1], promise or 0)
        axes.text(end + 0.02, place, f"{row['ratio']:.2f}", va="center", fontsize=10)
        if promise is not None:
            axes.plot([promise] * 2, [place - 0.4, place + 0.4], color=VERMILION, lw=2.5)
    axes.axvline(1, color=BLACK, lw=1)
    axes.set_yticks(places, [row["contender"] for row in rows])
    axes.set(
        xlabel="speed-up against no boost (bar: whole training, whisker: quartiles of its phases)",
        xlim=(0, max(1.6, 1.12 * high.max())),
    )
    axes.legend(handles=[Patch(color=VERMILION, label="promised by the original")], loc="lower right")
    return figure
