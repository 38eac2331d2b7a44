"""*Group loss scale*: one loss scale for a deep network, or one for each of its groups of layers."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.data import digits
from mpkit.formats import E5M2, FP16
from mpkit.lessons.failure import sigmoids
from mpkit.rounding import round_to
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.parts import tenths
from mpkit.view.sheet import LINES, exponents, linear, log2, names
from mpkit.view.words import counted

FORMATS = {"float16": FP16, "E5M2": E5M2}
GROUPS, WIDTH, BATCH, DISTINCT, STEPS = 4, 24, 64, 23, 160
LARGEST = 2.0**100
WAYS = ("one scale", "scale per group")


# ---- the network and its gradients
class GradientTrace(NamedTuple):
    """What the true gradients of a run look like.

    largest:  (steps, groups) float64, the largest magnitude that any operation of the group hands on.
    values:   per batch and group, the magnitudes of its weights' gradients, float32, zeros left out; step t meets the
              batch t modulo `DISTINCT`.
    """

    largest: np.ndarray
    values: tuple[tuple[Tensor, ...], ...]


def batches() -> list[tuple[Tensor, Tensor]]:
    """The digits in `DISTINCT` batches of `BATCH` images, which the steps take over and over."""
    images, labels = digits("train", size=8)
    return list(zip(images.split(BATCH), labels.split(BATCH)))[:DISTINCT]


@lru_cache(maxsize=8)
def gradient_trace(depth: int) -> GradientTrace:
    """True gradients, at its first weights, of a network of 4 groups of `depth` sigmoid layers, and an output layer.

    A sigmoid passes on at most a quarter of the gradient that it receives, so the groups' gradients differ by powers
    of two.
    """
    torch.manual_seed(0)
    network = sigmoids(GROUPS * depth, WIDTH)
    parameters = list(network.parameters())
    ends = [*range(0, GROUPS * depth, depth), GROUPS * depth + 1]  # of the groups, in linear layers
    layers, largest, values = [*network][1:], [], []
    for images, labels in batches():
        start = images.flatten(1).requires_grad_()
        between = [*accumulate(layers, lambda x, layer: layer(x), initial=start)]
        loss = nn.functional.cross_entropy(between[-1], labels)
        found = torch.autograd.grad(loss, [*between, *parameters])
        flow, own = found[: len(between)], found[len(between) :]
        groups = [(flow[2 * a : 2 * b + 1], own[2 * a : 2 * b]) for a, b in pairwise(ends)]
        largest.append([max(float(g.abs().max()) for g in chain(*group)) for group in groups])
        every = (torch.cat([g.flatten() for g in weights]).abs() for _, weights in groups)
        values.append(tuple(v[v != 0] for v in every))
    return GradientTrace(np.resize(np.array(largest), (STEPS, GROUPS)), tuple(values))


class ScaleRun(NamedTuple):
    """Scales over a run: (steps, groups) float64 used in each step, and whether an overflow began in the group."""

    scales: np.ndarray
    overflows: np.ndarray


@lru_cache(maxsize=64)
def replayed(depth: int, way: str, fmt_name: str, init_exponent: int, window: int) -> ScaleRun:
    """What the scales of a way would have been on the recorded gradients; `window` clean steps double a scale.

    A group overflows when its largest gradient times its scale leaves the format. With one scale the largest of all
    groups decides.
    """
    largest, fmt = gradient_trace(depth).largest, FORMATS[fmt_name]
    if way == "one scale":
        largest = largest.max(axis=1, keepdims=True)
    tops = [nn.Parameter(torch.zeros(())) for _ in largest[0]]
    manager = GroupLossScaleManager(
        2.0**init_exponent, [[p] for p in tops], growth=2 ** (1 / window), max_scale=LARGEST
    )
    scales, overflows = [], []
    for row in torch.tensor(largest, dtype=torch.float32):
        scales.append(manager.scales.tolist())
        for p, top in zip(tops, round_to(row * manager.scales, fmt)):
            p.grad = top
        overflows.append(manager.unscale_and_update_().tolist())
    shape = (len(largest), GROUPS)
    return ScaleRun(np.broadcast_to(scales, shape), np.broadcast_to(overflows, shape))


@lru_cache(maxsize=64)
def surviving_at(depth: int, way: str, fmt_name: str, init_exponent: int, window: int) -> np.ndarray:
    """(steps, groups) share of each step's gradient values that are not zero at its scales."""
    scales = torch.from_numpy(replayed(depth, way, fmt_name, init_exponent, window).scales.copy()).float()
    shares = torch.empty(scales.shape)
    for batch, groups in enumerate(gradient_trace(depth).values):
        for i, values in enumerate(groups):
            kept = round_to(values * scales[batch::DISTINCT, i, None], FORMATS[fmt_name]) != 0
            shares[batch::DISTINCT, i] = kept.float().mean(1)
    return shares.double().numpy()


# ---- one scale against four
@view(
    fmt=Choice({name: name for name in FORMATS}, "gradient format"),
    depth=Range(1, 5, label="layers per group", costly=True),
    start=Range(0, 30, label="start, 2 to the", costly=True),
    window=Range(1, 50, label="steps to double", costly=True),
    step=Range(0, STEPS - 1, hidden=True),
)
def group_scale(see: Sheet, fmt="E5M2", depth=3, start=12, window=4, step=STEPS - 1) -> None:
    """One scale against four on recorded gradients, step by step.

    Numbers by way, "one" and "own": `scales_`, `survive_` (steps, groups), `skipped_` (steps,) so far; `largest`.
    """
    runs = [replayed(depth, way, fmt, start, window) for way in WAYS]
    survive = [surviving_at(depth, way, fmt, start, window) for way in WAYS]
    one, own = runs
    see.grid(410, 960, cols=(1.5, 1))
    see.play("step", "step", STEPS, every=100)
    high = float(np.ceil(np.log2(max(one.scales.max(), own.scales.max())))) + 2
    x = linear("step", 0, STEPS, 6)
    left = see.panel(title="loss scale; × an overflow began", x=x, y=log2("loss scale", 0, high))
    look: dict[str, Any] = {"step": "post", "show": "upto", "tag": True}
    left.line(exponents(one.scales[:, 0], 0, high), color="reference", label="one scale", width=2.6, dash="1 2", **look)
    for i, line in enumerate(LINES[:GROUPS]):
        at, bad = exponents(own.scales[:, i], 0, high), np.flatnonzero(own.overflows[:, i])
        left.line(at, label=f"group {i + 1}", **line, **look)
        left.crosses(at, bad, color=line["color"], since=bad, size=3.5, show="upto")
    left.rule("x", "index", "muted", dash=":")
    left.handle("x", "step", step, 0, STEPS - 1, "step")
    y = names([f"group {i + 1}" for i in range(GROUPS)], down=True)
    right = see.panel(0, 1, title="not rounded to zero", x=linear("values that survive, %", 0, 100, 5), y=y)
    for way, shares, shift, role, hatch in zip(WAYS, survive, (-0.2, 0.2), ("reference", "own"), (True, None)):
        look = {"axis": "y", "width": 0.36, "fill": f"{role}/0.5", "edge": role, "hatch": hatch}
        right.bars(100 * shares, np.arange(GROUPS) + shift, label=way, **look)

    skipped = [np.cumsum(run.overflows.any(axis=1)) for run in runs]
    largest = gradient_trace(depth).largest
    see.say(
        f"{fmt}, {counted(depth, 'layer')} per group, step {{at}}: the one scale is {{s:2^}}, the scales per group are "
        "{s1:2^}, {s2:2^}, {s3:2^}, {s4:2^}. Gradient values of group 1 that are not rounded to zero: {kept_one} % "
        "with one scale and {kept_own} % with four. Steps skipped: {skipped_one} with one scale and {skipped_own} with "
        "four.",
        at=np.arange(STEPS), s=np.round(np.log2(one.scales[:, 0]), 1),
        **{f"s{i + 1}": np.round(np.log2(own.scales[:, i]), 1) for i in range(GROUPS)},
        kept_one=tenths(survive[0][:, 0]), kept_own=tenths(survive[1][:, 0]),
        skipped_one=skipped[0], skipped_own=skipped[1], survive_one=survive[0], survive_own=survive[1],
        scales_one=one.scales, scales_own=own.scales, largest=largest,
    )  # fmt: skip
