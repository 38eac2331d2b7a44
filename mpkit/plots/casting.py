"""Scenes of lesson 03: a network by the precision it computes in, and log-probabilities that are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.plots.scene import Scene, exponents, linear, log2, names, space

if TYPE_CHECKING:
    from mpkit.explorers.casting import CastingExplorer, LogSoftmaxExplorer  # upward: the types of its arguments

LOWEST, HIGHEST = -30, 3  # powers of two on the error axis


def casting_scene(data: CastingExplorer) -> Scene:
    """Above: the operations in order, by compute precision. Below: error against float64, and lost values."""
    scene = Scene(height=500, width=960, rows=(1, 3.2))
    _operations(scene, data)
    _errors(scene, data)
    return scene


def _operations(scene: Scene, data: CastingExplorer) -> None:
    steps, n = data.walk.steps, len(data.walk.steps)
    above = scene.panel(title="what each operation computes in", x=space(-0.6, n - 0.4), y=space(0, 1))
    for wide, role, label in ((True, "reference", "computes in float32"), (False, "own", f"computes in {data.fmt}")):
        at = np.array([i for i, s in enumerate(steps) if (s.compute == "float32") == wide])
        if not len(at):
            continue
        above.boxes(
            *(at - 0.42, [0.34] * len(at), at + 0.42, [0.94] * len(at)),
            fill=f"{role}/0.2",
            edge=role,
            hatch=None if wide else True,
            text=["32" if wide else steps[i].compute for i in at],
            names=[_label(steps[i]) for i in at],
            label=label,
        )
    for i, step in enumerate(steps):
        if step.casts:
            unit = (" cast" if step.casts == 1 else " casts") if n <= 12 else ""
            above.text(f"{step.casts}{unit}", i, 0.14, color="muted")


def _errors(scene: Scene, data: CastingExplorer) -> None:
    steps = data.walk.steps
    ends = {"lo": -0.6, "hi": len(steps) - 0.4}
    x = names([_label(step) for step in steps], bare=False) | ends | {"slant": 40}
    y = log2("relative error", LOWEST - 1, HIGHEST + 1, 6)
    inner = [tick for tick in y["ticks"] if LOWEST < tick[0] < HIGHEST]
    y["ticks"] = [[LOWEST, "0"], *inner, [HIGHEST, "not finite"]]
    below = scene.panel(1, title="how far each result is from float64", x=x, y=y)
    own, plain = (exponents([s.error for s in w.steps], LOWEST, HIGHEST) for w in (data.walk, data.plain))
    below.line(plain, color="reference", dash="--", glyph="s", size=3, label="float32 (O0)")
    below.line(own, color="own", glyph="o", label=f"{data.fmt}, at the level", ghost=True)
    rows = (
        ("flushed", "zero", "v", LOWEST + 1.5, "flushed to zero"),
        ("overflowed", "overflow", "x", HIGHEST - 1.2, "overflowed"),
    )
    for name, color, glyph, height, label in rows:
        at = np.array([i for i, s in enumerate(steps) if getattr(s, name)])
        if len(at):
            told = [f"{getattr(steps[i], name)} of the values" for i in at]
            below.points([height] * len(at), at, color, glyph=glyph, size=5, label=label, told=told)


def _label(step: Any) -> str:
    operation = step.operation.removeprefix("scaled_dot_product_").removeprefix("layer_").removeprefix("batch_")
    named = [part for part in step.module.split(".") if not part.isdigit()]
    number = [part for part in step.module.split(".")[-1:] if part.isdigit()]
    module = ".".join([*named[-1:], *number]).replace("dense_relu_sequential.", "").replace("downsample", "down")
    return f"{module}: {operation}" if module else operation


def log_softmax_scene(data: LogSoftmaxExplorer) -> Scene:
    """Computed log-probabilities against the exact ones; what became -inf or NaN lies on the floor."""
    floor = -37.0
    scene = Scene(height=380)
    x, y = linear("logit z", 0.8, -32.8, 7), linear("log softmax(z), nats", floor - 1.5, 1.5, 6)
    panel = scene.panel(title="log-probabilities, as computed", x=x, y=y)
    panel.rule("y", floor, "muted", dash=":")
    panel.text(data.becomes, 0.4, floor, anchor="start", valign="bottom", dy=-3, color="overflow")
    logits, got = -np.arange(33.0), np.asarray(data.got.tolist())
    panel.line(np.asarray(data.want.tolist()), logits, "reference", width=1.6, label="exact")
    fine = np.isfinite(got)
    if fine.any():
        panel.points(got[fine], logits[fine], "own", size=3.5, label="computed")
    if not fine.all():
        lost = [floor] * int((~fine).sum())
        name = f"lost: log(0), stored as {data.becomes}"
        panel.points(lost, logits[~fine], "overflow", glyph="v", size=5, label=name, told=data.becomes)
    return scene
