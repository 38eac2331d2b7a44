"""Loss scales: over a run with its ceiling, over a grid of settings, in every framework side by side."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mpkit.plots.base import BLACK, BLUE, GREY, VERMILION, Picture, log2_axis
from mpkit.plots.scene import Scene, exponents, linear, log2, power_of_two

LOW, HIGH = -26, 34  # exponents on the scale axis; what lies outside is drawn at its edge


def _inside(values: Any, low: int = LOW, high: int = HIGH) -> np.ndarray:
    """Values for the axis: zero, negative and infinite ones at its edges."""
    return np.clip(np.asarray(values, dtype=float), 2.0**low, 2.0**high)


def _scale_axis(axes: Axes, steps: int, low: int = LOW, high: int = HIGH, every: int = 8) -> None:
    log2_axis(axes, "y", low, high, every)
    axis = axes.yaxis
    axis.set_ticks([2.0**e for e in range(low + (-low) % every, high + 1, every)])
    axes.set_xlim(-0.5, steps - 0.5)


def dynamics_scene(data: Any) -> Scene:
    """A ball on the scale under its ceiling, 80 steps at a time; beside it the gradients; below, all steps."""
    steps = np.arange(len(data.scale))
    skips = np.flatnonzero(~data.finite)
    real = np.log2(data.ceiling[data.ceiling > 0]), np.log2(data.scale)
    low, high = math.floor(min(map(min, real))) - 3, math.ceil(max(map(max, real))) + 3
    scale, tops = exponents(data.scale, low, high), exponents(data.ceiling, low, high)
    scene = Scene(height=440, rows=(3.3, 1), cols=(2.7, 1))
    scene.play("step", "step", len(steps), every=100)
    kept = scene.keep("ceiling", tops)
    x = linear("step", -60, 20, follow=True) | {"ticks": [[k, str(k)] for k in range(0, len(steps), 20)]}
    y = log2("loss scale", low, high)
    main = scene.panel(title="the scale climbs until it meets the ceiling", x=x, y=y)
    main.boxes(skips - 0.5, [low], skips + 0.5, [high], fill="muted/0.3", since=skips, show="upto", quiet=True)
    main.band(kept, high, label="here it would overflow")
    main.add("pen", y=kept, color="overflow", name="draw", lo=low, hi=high, label="ceiling", width=1.6)
    main.line(scale, step="mid", width=2.6, show="upto", label="loss scale", ghost=True)
    main.points(scale[skips], skips, "overflow", since=skips, glyph="x", size=4.5, show="upto", label="skipped step")
    share = data.good / max(1, min(data.scale_window, len(steps)))
    ball = {"color": ["overflow", "own"], "hue": data.finite.astype(np.uint8), "size": 7, "glide": True}
    main.points(scale, ring=share, show="at", **ball)
    codes = sorted(set(map(str, data.reasons)))
    index = np.searchsorted(codes, data.reasons.astype(str)).astype(np.uint8)
    main.add("notes", label="decision", names=codes, codes=index)
    totals = [np.cumsum(~data.finite), steps + 1]
    words = "skipped {} of {} steps"
    if not np.isnan(data.zeros).any():  # a step whose loss is not finite has no gradients to count
        totals.append(np.round(100 * data.zeros))
        words += ";  {} % of this step's gradients are zero"
    main.text(words, 0.01, 1, values=totals, frame=True, anchor="start", valign="top", dy=6, halo=True)
    main.handle("y", "put", scale, low, high, "the scale of this step, 2 to the", cross=0, gesture=True, plain=True)
    if not data.hold:
        up, down = math.log2(data.scale_factor), math.log2(data.down_factor)
        window = {"slope": -1, "cross": low + 0.8, "stem": True, "note": f"window {data.scale_window}"}
        main.handle("x", "scale_window", data.scale_window, 1, 400, "scale_window, steps", **window)
        factor = {"base": scale, "log2": True, "stem": True, "cross": 7, "step": 0.25}
        main.handle("y", "scale_factor", up, 0.25, 4, "scale_factor", note=f"× {data.scale_factor:.4g}", **factor)
        if data.apart:
            main.handle(
                "y", "down_factor", down, 0.25, 4, "factor down", slope=-1, note=f"÷ {data.down_factor:.4g}", **factor
            )
        floor = data.floor_exponent
        main.handle("y", "floor_exponent", floor, -24, 10, "floor, 2 to the", note=f"floor {power_of_two(floor)}")
    _gradients(scene, data)
    whole = scene.panel(1, 0, colspan=2, x=linear("step of the whole run", 0, len(steps), 8), y=log2("", low, high, 8))
    whole.band(kept, high, quiet=True)
    whole.line(kept, color="overflow", width=1)
    whole.line(scale, step="mid", width=1.6)
    whole.points(scale[skips], skips, "overflow", glyph="x", size=2.5, width=1.4)
    whole.handle("x", "step", data.step, 0, len(steps) - 1, "step")
    whole.handle("y", "init_exponent", data.init_exponent, 0, 32, "initial scale, 2 to the", cross=0, note="start")
    return scene


REGIONS = (
    (-25, "zero", "become zero"),
    (-14, "subnormal", "subnormal"),
    (16, "normal", ""),
    (20, "overflow", "overflow"),
)
"""Of float16: up to which power of two, role, name."""


def _gradients(scene: Scene, data: Any) -> None:
    """This step's recorded gradients times its scale, over the regions of float16."""
    part, low = data.trace.gradients, -32
    share = part.total() / part.size.sum()
    unit = 100 * share.max() / 255
    x, y = linear("share, %", 0, 105 * share.max(), 3), log2("magnitude in float16", low, REGIONS[-1][0])
    panel = scene.panel(0, 1, title="gradients × scale", x=x, y=y)
    for high, role, name in REGIONS:
        panel.span("y", low, high, f"{role}/0.14", name)
        low = high
    rows = np.searchsorted(data.trace.rows, np.arange(len(data.scale)), "right") - 1
    panel.bars(
        scene.keep("gradients", np.round(255 * share / share.max()).astype(np.uint8)),
        np.arange(part.lowest, part.lowest + part.bins) + 0.5,
        axis="y",
        width=1,
        unit=unit,
        rows=scene.keep("rows", rows),
        shift=np.log2(data.scale),
        zones=[[upto if upto < 20 else None, role] for upto, role, _ in REGIONS],
        label="share of the gradients, %",
        quiet=True,
    )


class SweepPicture(Picture):
    """A table of factor x window, darker where the figure is larger; the pair that loses least is framed."""

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
        axes.set_title(f"{data.FIGURES[data.figure]} (darker is more; framed: least training signal lost)", loc="left")
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
        self.box.set_visible(data.best is not None)
        if data.best is not None:
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
