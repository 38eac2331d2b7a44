"""Scenes of lessons 09 and 10: speed against accuracy, the freeze timeline, what LessBN takes, centralization."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import Panel, Scene, linear, names
from mpkit.replay.percent import percents

if TYPE_CHECKING:
    from mpkit.explorers import boost as explorers  # upward: the types of its arguments


def boost_scene(data: explorers.BoostExplorer) -> Scene:
    """Speed-up and accuracy of every measured configuration; how often each stage stands still; below, two of them
    step by step.
    """
    scene = Scene(height=590, width=980, rows=(410, 180), cols=(1.25, 1))
    every = [v for _, _, runs in data.field for v in runs]
    low, high = np.floor(min(every)) - 0.5, np.ceil(max(every)) + 0.5
    this = data.this.speedup
    x = linear("speed-up against no boost", 0.96, max(1.4, this + 0.1), 5)
    title, y = "dots: seeds; lines: ± one standard deviation", linear("accuracy on the digits, %", low, high, 6)
    panel = scene.panel(title=title, x=x, y=y)
    for name, promise in data.promised.items():
        side = -9 if 0 < this - promise < 0.03 else 9  # away from the line of this configuration
        panel.rule("x", promise, "muted", dash="--")
        text = f"{name} promised {promise:.2f}"
        panel.text(text, promise, low, color="muted", rotate=90, dx=side, dy=-64, halo=True)
    _configurations(panel, data)
    if data.this.timed:
        panel.rule("x", this, "own", width=1.8)
        panel.text(f"this: {this:.2f}", this, high, color="own", valign="top", dx=36, halo=True)
    _frozen_stages(scene, data)
    _steps(scene, data)
    return scene


def _configurations(panel: Panel, data: explorers.BoostExplorer) -> None:
    """Every measured one with its seeds, and its name on the side with more room; arrows lead to the tuned one."""
    field = sorted(data.field, key=lambda one: one[1])
    at = {name: (speed, float(np.mean(runs))) for name, speed, runs in field}
    speeds, means = np.array(list(at.values())).T
    lower = False
    for k, (name, speed, runs) in enumerate(field):
        mean, spread = means[k], float(np.std(runs, ddof=1))
        color = "zero" if name == data.compare else "reference"
        panel.points(runs, [speed] * len(runs), "muted", size=2.5, label="one seed", quiet=True)
        panel.line([mean - spread, mean + spread], [speed] * 2, color, width=3, quiet=True)
        panel.points([mean], [speed], color, glyph="s", size=5.5, label=name, quiet=True)
        before = 0 < k < len(field) - 1 and speed - speeds[k - 1] > speeds[k + 1] - speed
        close = k > 1 and speed - speeds[k - 1] < 0.16 * (panel.given["x"]["hi"] - panel.given["x"]["lo"])
        lower = close and not lower  # of several close ones every second
        panel.text(name, speed, mean, beside=-8 if before else 8, dy=30 if lower else 14, halo=True, color=color)
    squares = speeds - 0.012, means - 0.4, speeds + 0.012, means + 0.4
    told = [f"compare with {name}" for name in at]
    panel.boxes(*squares, pick="compare_with", keys=list(at), names=told, quiet=True)
    for (x0, y0), (x1, y1) in pairwise(at[name] for name in ("none", "O1", "O1 tuned")):
        start, end = ((x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in (0.12, 0.88))
        panel.arrow(start, end, width=1.6)


BLOCKS = {  # role, hatch and name of each part of a step
    "forward": ("zero/0.6", False, "forward"),
    "batch_norm": ("subnormal/0.9", True, "batch norm"),
    "backward": ("reference/0.55", False, "backward"),
    "update": ("normal/0.8", False, "update"),
}


def _steps(scene: Scene, data: explorers.BoostExplorer) -> None:
    """The first steps of two configurations: each begins where one without boost would; a frame is what it lacks."""
    count = len(data.rows[0].indices)
    x = linear("step, as wide as one without boost", 0, count + 2.6)
    x |= {"ticks": [[v, str(v)] for v in range(0, count + 1, 3)]}
    y = names([row.name for row in data.rows], down=True)
    panel = scene.panel(1, 0, colspan=2, title="two of them, step by step: click two squares above", x=x, y=y)
    starts = np.tile(np.arange(count), 2)
    rows = np.repeat([0, 1], count)
    done = np.zeros(2 * count)
    parts = np.concatenate([row.parts for row in data.rows])
    for k, (fill, hatch, name) in enumerate(BLOCKS.values()):
        ends = (starts + done, rows - 0.32, starts + done + parts[:, k], rows + 0.32)
        told = [f"{share:.2f} of a step" for share in parts[:, k]]
        panel.boxes(*ends, fill=fill, edge="muted", width=1, hatch=hatch or None, label=name, told=told)
        done += parts[:, k]
    gone = np.flatnonzero(done < 0.985)
    if len(gone):
        ends = ((starts + done)[gone], rows[gone] - 0.32, starts[gone] + 1, rows[gone] + 0.32)
        which = " and ".join(row.name for row in data.rows)
        panel.boxes(*ends, edge="overflow", dash="3 2", width=1, label="removed", leaves=which)
    for k, row in enumerate(data.rows):
        words = f"{count} steps" if row.name == "none" else f"{count} take {row.total:.1f}"
        panel.text(words, count + 0.15, k, anchor="start", weight="bold")


def _frozen_stages(scene: Scene, data: explorers.BoostExplorer) -> None:
    count = len(data.stages)
    x = linear("stage of the ResNet-18, from the input", -0.7, count - 0.3, 6)
    y = linear("share of the steps, %", -8, 100, 5)
    panel = scene.panel(0, 1, title="frozen steps; × BatchNorm removed", x=x, y=y)
    panel.bars(100 * np.array(data.frozen_share(data.this)), fill="own/0.55", edge="own", label="this")
    other = 100 * np.array(data.frozen_share(data.other))
    panel.line(other, color="zero", dash="--", step="mid", label=f"compared: {data.compare}")
    gone = [i for i, (_, removed) in enumerate(data.stages) if removed] if data.this.removed else []
    if gone:
        look = {"glyph": "x", "size": 4, "label": "BatchNorm removed", "told": "this stage", "quiet": True}
        panel.points([-4.0] * len(gone), gone, "overflow", **look)


def freeze_scene(data: explorers.FreezeExplorer) -> Scene:
    """Steps by stages, dark where a stage stands still; beside it the work of the step that is saved."""
    count, steps = len(data.names), len(data.sequence)
    scene = Scene(height=440, width=960, cols=(2.2, 1))
    scene.play("step", "step", steps, every=100)
    frozen = np.array(data.sequence) * data.stride
    y = {"label": "stage, input at the top", "lo": count, "hi": 0}
    y["ticks"] = [[i + 0.5, data.names[i].replace("downsample.0", "shortcut")] for i in range(0, count, 2)]
    left = scene.panel(title="bars reach down over the frozen stages", x=linear("step", -0.5, steps - 0.5, 6), y=y)
    left.bars(frozen, width=1, fill="reference/0.75", edge="reference", label="frozen stages", quiet=True)
    left.rule("x", "index", "own", width=2)
    left.handle("x", "step", data.step, 0, steps - 1, "step")
    saved = 100 * np.array(data.saved)
    values = np.stack([saved, np.full(steps, saved.mean()), np.full(steps, 100 * data.formula)], axis=1)
    x, y = names(["this step", "mean", "formula"]), linear("backward work saved, %", 0, 108, 5)
    right = scene.panel(0, 1, title="backward work saved", x=x, y=y)
    fill = ["own/0.55", "reference/0.55", "paper"]
    right.bars(values, fill=fill, edge="reference", width=0.6, label="saved, %", quiet=True)
    for column in range(3):
        right.text("{} %", column, 104, values=[percents(values[:, column] / 100)], valign="top")
    return scene


KINDS: Mapping[str, tuple[str, str, str]] = {
    "conv": ("reference", "s", "convolution"),
    "kept": ("zero", "o", "BatchNorm kept"),
    "removed": ("overflow", "x", "BatchNorm removed"),
    "linear": ("ink", "D", "FC"),
    "normalised": ("normal", "^", "FC normalised"),
}
PER_ROW = 30


def less_bn_scene(data: explorers.LessBNExplorer) -> Scene:
    """The layers of a network in definition order, row after row; a frame holds the layers of one block."""
    parts = _rows(data.layers)
    rows, width = len(parts), max(map(len, parts))
    scene = Scene(height=110 + 72 * rows, width=900)
    gone, norms = len(data.report.removed), len(data.report.removed) + len(data.report.kept)
    title = f"{data.network}: {gone} of {norms} BatchNorms removed" if norms else f"{data.network} has no BatchNorm"
    title += "; layers in definition order"
    title += "; arrows are shortcuts" if data.shortcuts else ""
    panel = scene.panel(title=title, x=linear("", -1, width), y=linear("", rows - 0.4, -0.7), bare=True)
    places: list[tuple[int, int]] = []
    for row, part in enumerate(parts):
        panel.line([row, row], [0, len(part) - 1], "muted", width=1.5)
        _blocks(panel, part, row, data.shortcuts)
        places += [(row, column) for column in range(len(part))]
    for kind, (color, glyph, label) in KINDS.items():
        at = [i for i, (_, own) in enumerate(data.layers) if own == kind]
        if at:
            fill = "paper" if kind == "kept" else None
            where = [places[i][0] for i in at], [places[i][1] for i in at]
            panel.points(*where, color, glyph=glyph, size=5.5, fill=fill, label=label)
    return scene


def _block(layer: tuple[str, str]) -> str:
    return ".".join(layer[0].split(".")[:2])


def _rows(layers: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The layers in rows of about equal length, two more where a block needs them; a block is never parted."""
    count = -(-len(layers) // min(PER_ROW, max(8, -(-len(layers) // 3))))
    width = -(-len(layers) // count) + 2
    rows: list[list[tuple[str, str]]] = [[]]
    for _, members in groupby(layers, key=_block):
        block = list(members)
        if rows[-1] and len(rows[-1]) + len(block) > width:
            rows.append([])
        rows[-1] += block
    return rows


def _blocks(panel: Panel, layers: Sequence[tuple[str, str]], row: int, shortcuts: Collection[str]) -> None:
    """A frame around the neighbours that belong to one block, with its name, and its shortcut below."""
    for block, members in groupby(enumerate(layers), key=lambda item: _block(item[1])):
        places = [i for i, _ in members]
        if len(places) > 1:
            ends = ([places[0] - 0.45], [row + 0.24], [places[-1] + 0.45], [row - 0.24])
            panel.boxes(*ends, fill="muted/0.08", edge="muted", width=1, radius=4, quiet=True)
            panel.text(block, (places[0] + places[-1]) / 2, row - 0.36, size=11, color="muted")
            if block in shortcuts:
                panel.arrow((places[0] - 0.45, row + 0.34), (places[-1] + 0.45, row + 0.34), width=1.6)


def centralize_scene(data: explorers.CentralizeExplorer) -> Scene:
    """The entries of one output's gradient with their mean, and the means of all outputs."""
    scene = Scene(height=390, width=940, cols=(1.15, 1))
    reach = 1.15 * float(data.grad.abs().max())
    n = data.grad.shape[1]
    x, y = linear("entry", -1, n, 5), linear("gradient", -reach, reach, 4)
    entries = scene.panel(title=f"{data.layer}, output {data.output}: entries and mean", x=x, y=y)
    entries.rule("y", 0, "muted", width=0.8)
    used = data.row_used.numpy()
    entries.points(data.row.numpy(), color="reference", size=1.8, width=1, label="before")
    entries.points(used, color="own", size=2.6, width=1.2, fill="none", label="used")
    entries.line([float(used.mean())] * 2, [-1, n], "overflow", dash="--", label="mean of what is used")
    before, after = data.grad.mean(1).numpy(), data.used.mean(1).numpy()
    top = 1.2 * max(float(np.abs(before).max()), 1e-12)
    x, y = linear("output", -1, len(before), 4), linear("mean of its gradient", -top, top, 4)
    means = scene.panel(0, 1, title="mean of every output", x=x, y=y)
    means.rule("y", 0, "muted", width=0.8)
    means.points(before, color="reference", size=2.5, quiet=True)
    means.points(after, color="own", size=3.4, width=1.4, fill="none", quiet=True)
    means.handle("x", "output", data.output, 0, len(before) - 1, "output")
    return scene


def speedups(rows: Sequence[Mapping[str, Any]], promises: Mapping[str, float]) -> Scene:
    """Speed-up of each measured contender with its quartiles, and what was promised for it where something was."""
    values = np.array([row["ratio"] for row in rows])
    low, high = (np.array([row["quartiles"][i] for row in rows]) for i in (0, 1))
    scene = Scene(height=90 + 34 * len(rows), width=900)
    labels = [row["contender"] for row in rows]
    x = linear("speed-up against no boost", 0, max(1.6, 1.12 * float(high.max())), 8)
    title = "bar: all rounds together; line: quartiles of single rounds"
    panel = scene.panel(title=title, x=x, y=names(labels, down=True))
    panel.bars(values, axis="y", width=0.6, fill="zero/0.4", edge="zero", label="speed-up", quiet=True)
    panel.rule("x", 1, "ink", width=1)
    for place, row in enumerate(rows):
        panel.line([place] * 2, [low[place], high[place]], "ink", width=1.6, quiet=True)
        panel.text(f"{row['ratio']:.2f}", 0, place, beside=8)  # in its bar: a mark has a number of its own
        promise = promises.get(row["contender"])
        if promise is not None:
            look = {"width": 3.5, "label": "promised by MindSpore"}
            panel.line([place - 0.38, place + 0.38], [promise] * 2, "overflow", **look)
            end = max(promise, row["quartiles"][1])
            panel.text(f"promised {promise:.2f}", end, place, color="overflow", beside=8)
    return scene
