"""*Group loss scale*: one loss scale for a deep network, or one for each of its groups of layers."""

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
from mpkit.view import LINES, Choice, Range, Sheet, counted, exponents, linear, log2, names, tenths, view

FORMATS = {"float16": FP16, "E5M2": E5M2}
GROUPS, WIDTH, BATCH, DISTINCT, STEPS = 4, 24, 64, 23, 160
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
    every = (t.split(BATCH) for t in digits("train", size=8))
    for images, labels in [*zip(*every)][:DISTINCT]:
        between = [*accumulate(layers, lambda x, layer: layer(x), initial=images.flatten(1).requires_grad_())]
        found = torch.autograd.grad(nn.functional.cross_entropy(between[-1], labels), [*between, *parameters])
        flow, own = found[: len(between)], found[len(between) :]
        groups = [(flow[2 * a : 2 * b + 1], own[2 * a : 2 * b]) for a, b in pairwise(ends)]
        largest.append([max(float(g.abs().max()) for g in chain(*group)) for group in groups])
        every = (torch.cat([g.flatten() for g in weights]).abs() for _, weights in groups)
        values.append(tuple(v[v != 0] for v in every))
    return GradientTrace(np.resize(np.array(largest), (STEPS, GROUPS)), tuple(values))


class ScaleRun(NamedTuple):
    """A run, each (steps, groups): the scales used (float64), whether an overflow began in the group, and the share of
    its gradient values that are not zero at its scale.
    """

    scales: np.ndarray
    overflows: np.ndarray
    survive: np.ndarray


@lru_cache(maxsize=64)
def replayed(depth: int, way: str, fmt_name: str, start: int, window: int) -> ScaleRun:
    """What the scales of a way would have been on the recorded gradients; `window` clean steps double a scale.

    A group overflows when its largest gradient times its scale leaves the format. With one scale the largest of all
    groups decides.
    """
    (largest, batch), fmt = gradient_trace(depth), FORMATS[fmt_name]
    if way == "one scale":
        largest = largest.max(axis=1, keepdims=True)
    tops = [nn.Parameter(torch.zeros(())) for _ in largest[0]]
    manager = GroupLossScaleManager(2.0**start, [[p] for p in tops], growth=2 ** (1 / window), max_scale=2.0**100)
    scales, overflows = [], []
    for row in torch.tensor(largest, dtype=torch.float32):
        scales.append(manager.scales.tolist())
        for p, top in zip(tops, round_to(row * manager.scales, fmt)):
            p.grad = top
        overflows.append(manager.unscale_and_update_().tolist())
    used, began = (np.broadcast_to(rows, (STEPS, GROUPS)) for rows in (scales, overflows))
    survive = np.empty((STEPS, GROUPS))
    for first, groups in enumerate(batch):
        for i, values in enumerate(groups):
            at = torch.from_numpy(used[first::DISTINCT, i].copy()).float()
            survive[first::DISTINCT, i] = (round_to(values * at[:, None], fmt) != 0).float().mean(1)
    return ScaleRun(used, began, survive)


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

    Numbers by way, "one" and "own": `survive_` (steps, groups), `skipped_` (steps,) so far.
    """
    one, own = runs = [replayed(depth, way, fmt, start, window) for way in WAYS]
    see.grid(410, 960, cols=(1.5, 1))

    high = float(np.ceil(np.log2(max(one.scales.max(), own.scales.max())))) + 2
    x = linear("step", 0, STEPS, 6)
    left = see.panel(title="loss scale; × an overflow began", x=x, y=log2("loss scale", 0, high))
    look: dict[str, Any] = {"step": "post", "show": "upto", "tag": True}
    left.line(exponents(one.scales[:, 0], 0, high), color="reference", label="one scale", width=2.6, dash="1 2", **look)
    for i, line in enumerate(LINES[:GROUPS]):
        at, bad = exponents(own.scales[:, i], 0, high), np.flatnonzero(own.overflows[:, i])
        left.line(at, label=f"group {i + 1}", **line, **look)
        left.crosses(at, bad, color=line["color"], since=bad, size=3.5, show="upto")
    see.play("step", "step", STEPS, every=100, on=left)
    y = names([f"group {i + 1}" for i in range(GROUPS)], down=True)
    right = see.panel(0, 1, title="not rounded to zero", x=linear("values that survive, %", 0, 100, 5), y=y)
    for way, run, shift, role, hatch in zip(WAYS, runs, (-0.2, 0.2), ("reference", "own"), (True, None)):
        look = {"axis": "y", "width": 0.36, "fill": f"{role}/0.5", "edge": role, "hatch": hatch}
        right.bars(100 * run.survive, np.arange(GROUPS) + shift, label=way, **look)

    powers = {f"s{i}": np.round(np.log2(scales), 1) for i, scales in enumerate((one.scales[:, 0], *own.scales.T))}
    see.say(
        f"{fmt}, {counted(depth, 'layer')} per group, step {{at}}: the one scale is {{s0:2^}}, those of the groups "
        "{s1:2^}, {s2:2^}, {s3:2^}, {s4:2^}. Gradient values of group 1 that are not rounded to zero: {kept_one} % "
        "with one scale and {kept_own} % with four. Steps skipped: {skipped_one} with one scale and {skipped_own} with "
        "four.",
        at=np.arange(STEPS), kept_one=tenths(one.survive[:, 0]), kept_own=tenths(own.survive[:, 0]),
        skipped_one=one.overflows.any(axis=1).cumsum(), skipped_own=own.overflows.any(axis=1).cumsum(),
        survive_one=one.survive, survive_own=own.survive, **powers,
    )  # fmt: skip
