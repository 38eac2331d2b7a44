"""Loss scales: over a run with its ceiling, over a grid of settings, in every framework side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.evidence import two_rules
from mpkit.plots.scene import Panel, Scene, exponents, fitted, linear, log2

if TYPE_CHECKING:
    from mpkit.explorers import zoo  # upward: the types of its arguments


# of the axis of magnitudes, a power of two; where values lie above, up to 40 or as far as the format holds them


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
