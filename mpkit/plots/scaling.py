"""Loss scales: over a run with its ceiling, over a grid of settings, in every framework side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.formats import get_format
from mpkit.plots.evidence import framed, heat_map, two_rules
from mpkit.plots.formats import edges, histogram, regions
from mpkit.plots.scene import Panel, Scene, exponents, fitted, linear, log2, power_of_two
from mpkit.replay.percent import percents

if TYPE_CHECKING:
    from mpkit.explorers import scaling as explorers  # upward: the types of its arguments
    from mpkit.explorers import zoo  # upward: the types of its arguments


def dynamics_scene(data: explorers.DynamicsExplorer) -> Scene:
    """A ball on the scale under its ceiling, 80 steps at a time; beside it the gradients; below, all steps."""
    steps = np.arange(len(data.scale))
    skips = np.flatnonzero(~data.finite)
    real = np.log2(data.ceiling[data.ceiling > 0]), np.log2(data.scale)
    low, high = math.floor(min(map(min, real))) - 3, math.ceil(max(map(max, real)))
    high += max(3, math.ceil((high - low) / 7))  # the totals stand above the ceiling
    scale = exponents(data.scale, low, high)
    scene = Scene(height=440, rows=(3.3, 1), cols=(2.7, 1))
    scene.play("step", "step", len(steps), every=100)
    kept = scene.keep("ceiling", exponents(data.ceiling, low, high))
    x = linear("step", -60, 20, follow=True) | {"ticks": [[k, str(k)] for k in range(0, len(steps), 20)]}
    title = "the scale is held" if data.hold else "the loss scale and its ceiling"
    if data.ceiling[-1] < 0:
        title = f"from step {np.flatnonzero(data.ceiling > 0)[-1] + 1} on no scale helps: the loss is not finite"
    main = scene.panel(title=title, x=x, y=log2("loss scale", low, high))
    _decisions(main, data, scale, kept, low, high)
    _grips(main, data, scale, low, high)
    _gradients(scene, data)
    every = next(k for k in (8, 16, 32, 64) if high - low < 3.5 * k)  # four names find room
    x, y = linear("step of the whole run", 0, len(steps), 8), log2("", low, high, every)
    whole = scene.panel(1, 0, colspan=2, x=x, y=y)
    whole.band(kept, high, quiet=True)
    whole.line(kept, color="overflow", width=1)
    whole.line(scale, step="mid", width=1.6)
    whole.crosses(scale, skips, size=2.5, width=1.4)
    whole.handle("x", "step", data.step, 0, len(steps) - 1, "step")
    grip = {"cross": 0.015 * len(steps), "note": "start"}
    whole.handle("y", "init_exponent", data.init_exponent, 0, 32, "start, 2 to the", **grip)
    return scene


def _decisions(
    main: Panel, data: explorers.DynamicsExplorer, scale: np.ndarray, kept: dict[str, str], low: int, high: int
) -> None:
    """The run up to the step shown: ceiling, scale, skipped steps, and what the rule decided."""
    steps, skips = np.arange(len(scale)), np.flatnonzero(~data.finite)
    main.boxes(skips - 0.5, [low], skips + 0.5, [high], fill="muted/0.3", since=skips, show="upto", quiet=True)
    main.band(kept, high, label="here it would overflow")
    main.add("pen", y=kept, color="overflow", name="draw", lo=low, hi=high, label="ceiling", width=1.6)
    main.line(scale, step="mid", width=2.6, show="upto", label="loss scale", ghost=True)
    main.crosses(scale, skips, "skipped step", since=skips, size=4.5, show="upto")
    share = data.good / max(1, min(data.scale_window, len(steps)))
    ball: dict[str, Any] = {"color": ["overflow", "own"], "hue": data.finite.astype(np.uint8), "size": 7, "glide": True}
    main.points(scale, ring=share, show="at", **ball)
    codes = sorted(set(map(str, data.reasons)))
    index = np.searchsorted(codes, data.reasons.astype(str)).astype(np.uint8)
    main.add("notes", label="decision", told=codes, codes=index)
    totals = [np.cumsum(~data.finite), steps + 1]
    words = "skipped {} of {} steps"
    if not np.isnan(data.zeros).any():  # a step whose loss is not finite has no gradients to count
        totals.append(percents(data.zeros))
        words += ";  {} % of this step's gradients are zero"
    main.text(words, 0.01, 1, values=totals, frame=True, anchor="start", valign="top", dy=6, halo=True)


def _grips(main: Panel, data: explorers.DynamicsExplorer, scale: np.ndarray, low: int, high: int) -> None:
    """What the reader drags: the scale of the step, and the settings of the rule."""
    main.handle("y", "put", scale, low, high, "the scale of this step, 2 to the", cross=0, gesture=True, look="plain")
    if data.hold:
        return
    up, down = math.log2(data.scale_factor), math.log2(data.down_factor)
    window = {"slope": -1, "cross": low + 0.8, "stem": True, "note": f"window {data.scale_window}"}
    main.handle("x", "scale_window", data.scale_window, 1, 400, "scale_window, steps", **window)
    factor = {"base": scale, "log2": True, "stem": True, "cross": 4, "step": 0.25}
    main.handle("y", "scale_factor", up, 0.25, 4, "scale_factor", note=f"× {data.scale_factor:.4g}", **factor)
    if data.apart:
        main.handle(
            "y", "down_factor", down, 0.25, 4, "factor down", slope=-1, note=f"÷ {data.down_factor:.4g}", **factor
        )
    floor = data.floor_exponent
    main.handle("y", "floor_exponent", floor, -24, 10, "floor, 2 to the", note=f"floor {power_of_two(floor)}")


# of the axis of magnitudes, a power of two; where values lie above, up to 40 or as far as the format holds them
TOP = 20


def _gradients(scene: Scene, data: explorers.DynamicsExplorer) -> None:
    """This step's recorded gradients times its scale, over the regions of the format."""
    part, low, fmt = data.trace.gradients, -32.0, get_format(data.fmt)
    share = 100 * part.total() / part.size.sum()
    rows = np.searchsorted(data.trace.rows, np.arange(len(data.scale)), "right") - 1
    ends = np.where(share > 0, part.lowest + 1 + np.arange(part.bins), low).max(axis=1)
    top = min(max(40, fmt.max_exponent + 1), max(TOP, math.ceil((ends[rows] + np.log2(data.scale)).max())))
    magnitude = f"gradient of a weight × scale, {data.FORMATS[data.fmt]}"
    x, y = linear("share, %", 0, 1.05 * share.max(), 3), log2(magnitude, low, top)
    panel = scene.panel(0, 1, title="gradients × scale", x=x, y=y)
    look: dict[str, Any] = {"axis": "y", "rows": scene.keep("rows", rows), "shift": np.log2(data.scale)}
    regions(panel, "y", *edges(fmt), zero="become zero", normal="")
    histogram(scene, panel, share, part.lowest, fmt, label="share of the gradients, %", **look)
    if np.isnan(data.zeros[-1]):
        first = int(np.flatnonzero(np.isfinite(data.zeros))[-1]) + 1
        words = "no gradients:\nthe loss is\nnot finite"
        panel.text(words, 0.5, 0.5, frame=True, only=(first, len(data.scale) - 1))


def sweep_scene(data: explorers.SweepExplorer) -> Scene:
    """A table of factor x window, darker where the figure is larger; the pairs that lose least are framed."""
    scene = Scene(height=400)
    digits = ".0f" if data.figure == "skipped" else ".1f"
    texts = [format(v, digits) if v == 0 or v >= 0.05 else "< 0.1" for v in data.grid.flat]
    panel = heat_map(scene, data.grid, texts, data.FACTORS, data.WINDOWS, data.FIGURES[data.figure])
    if data.best is not None:
        framed(panel, data.least, "normal", "least training signal lost")
    return scene


def runs_panels(scene: Scene, runs: Any, steps: int, also: Sequence[float] = (), mean: int = 1) -> tuple[Panel, Panel]:
    """Loss (mean of so many steps) and scale of some runs: (name, run, role, dash); crosses where a step was skipped.

    `also` are exponents that the axis of the scale has to hold.
    """
    scales = [np.minimum(run.scales, 2.0**127) for _, run, _, _ in runs]
    low, high = fitted(*scales, np.exp2(also), room=1)
    y = linear("loss, nats", 0, 3, 3)
    y["ticks"][-1][1] = "≥ 3, NaN"  # such losses are drawn there
    loss = scene.panel(title="loss", x=linear("step", 0, steps, 4), y=y)
    panel = scene.panel(0, 1, title="loss scale", x=linear("step", 0, steps, 4), y=log2("loss scale", low, high))
    for name, run, color, dash in runs:
        n = min(len(run.losses), len(run.scales))
        look = {"color": color, "dash": dash, "width": 2.2 if color == "own" else 1.6}
        look |= {"glyph": "o"} if n == 1 else {}  # a line of one point would not be seen
        losses = np.clip(np.nan_to_num(run.losses[:n], nan=3, posinf=3), 0, 3)
        loss.line(np.convolve(losses, np.ones(mean) / mean, "valid") if n >= mean else losses, label=name, **look)
        at = exponents(run.scales[:n], low, high)
        panel.line(at, step="post", label=name, **look)
        panel.crosses(at, [i for i in run.skipped if i < n], "skipped step")
    return loss, panel


def live_scene(data: explorers.LiveExplorer) -> Scene:
    """Loss and scale of the training so far; before the first one, those of a recorded run."""
    scene = Scene(height=360, width=900, cols=(1, 1.2))
    own = data.run is not None and bool(data.run.losses)
    runs = [("this run", data.run, "own", None)] if own else [("a recorded run", data.recorded, "reference", "--")]
    _, panel = runs_panels(scene, runs, data.steps, also=(data.floor_exponent,))
    floor = {"note": f"floor {power_of_two(data.floor_exponent)}"}
    panel.handle("y", "floor_exponent", data.floor_exponent, -14, 10, "floor, 2 to the", **floor)
    return scene


def zoo_scene(data: zoo.ZooExplorer) -> Scene:
    """Above, the two rules that differ first; below, every rule under the same ceiling, played step by step."""
    count, columns = len(data.ceiling), 6
    rows = -(-len(data.names) // columns)
    scene = Scene(height=300 + 96 * rows, width=1000, rows=(3.2, *[1] * rows), cols=(1,) * columns)
    scene.play("step", "step", count, every=60)
    low, high = fitted(data.scales, data.ceiling)  # a line cut off would look like a floor or a cap
    ceiling = scene.keep("ceiling", exponents(data.ceiling, low, high))
    at, first, second = data.parting
    x, y = linear("step", 0, count - 1, 8), log2("loss scale", low, high)
    apart = f"rules differ first at step {at}: here are {data.names[first]} and {data.names[second]}"
    title = apart if at >= 0 else "no two rules differ here"
    main = scene.panel(colspan=columns, title=title, x=x, y=y)
    overflows = bool(np.isfinite(data.ceiling).any())
    if overflows:
        main.band(ceiling, high, label="here it would overflow", step="mid")
    for i, color, dash in ((first, "own", None), (second, "zero", "--")):
        _rule(main, data, i, (low, high), color, width=2.4, dash=dash, tag=True)
    if at >= 0:
        main.rule("x", at, "muted", dash=":")
    for i, name in enumerate(data.names):
        row, column = divmod(i, columns)
        x = linear("", 0, count - 1, 2) | {"blank": True}
        y = log2("", low, high) | {"blank": True, "ticks": []}
        panel = scene.panel(row + 1, column, title=name, title_size=10, x=x, y=y, pad=[24, 6, 6, 8])
        if overflows:
            panel.line(ceiling, color="overflow", width=1, step="mid")
        _rule(panel, data, i, (low, high), "own" if i == first else "zero" if i == second else "reference", width=1.8)
    return scene


def _rule(
    panel: Panel, data: zoo.ZooExplorer, i: int, ends: tuple[int, int], color: str, tag: bool | None = None, **look: Any
) -> None:
    """One rule's scale up to the step shown, its skipped steps, and where it raises an error."""
    used = np.where(np.isnan(data.scales[:, i]), np.nan, exponents(data.scales[:, i], *ends))
    panel.line(used, color=color, step="mid", show="upto", label=data.names[i] if tag else None, tag=tag, **look)
    bad = np.flatnonzero(~np.isnan(used) & ~data.finite[:, i])
    panel.crosses(used, bad, "skipped step", since=bad, size=4 if tag else 2.2, show="upto")
    raised = int(data.done.raised_at[i])
    if raised >= 0:
        end = exponents(data.done.final[i : i + 1], *ends)
        more = {"since": [raised], "show": "upto"}
        panel.points(end, [raised], "ink", size=4, label="the rule raises an error", **more)


def naive_scene(data: zoo.NaiveExplorer) -> Scene:
    """The rule that compares loss and scale, beside torch's, under the ceiling of the gradients."""
    losses = np.full(data.STEPS, data.loss)
    top = data.ceiling_exponent
    ceiling = {"at": top, "low": 4, "high": 24, "label": "ceiling of the gradients, 2 to the", "note": "ceiling"}
    start, called = ("start_exponent", -8, 16), ("naive rule", "torch's rule")
    return two_rules(
        data.naive, data.torch, losses, data.ceiling, data.start_exponent, start, called, ceiling_exponent=ceiling
    )
