"""*AdaSum*: AdaSum of two updates in the plane, over many workers, and in a small training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.boost.adasum import adasum, adasum_coefficients
from mpkit.data import digits
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.sheet import exponents, linear, log2
from mpkit.view.words import counted

RULES = ("sum", "mean", "AdaSum")
WORKERS = (1, 2, 4, 8, 16)
LOOK: Mapping[str, dict[str, Any]] = {
    "sum": {"color": "overflow", "dash": "--", "glyph": "s"},
    "mean": {"color": "normal", "dash": "-.", "glyph": "^"},
    "AdaSum": {"color": "zero", "glyph": "o"},
}


# ---- numbers
def combined(rule: str, updates: Sequence[Tensor]) -> Tensor:
    """The updates of one tensor from several workers, merged by "sum", "mean" or "AdaSum"."""
    if rule == "AdaSum":
        return adasum([[u] for u in updates], eps=0.0)[0]
    total = torch.stack(list(updates)).sum(0)
    return total / len(updates) if rule == "mean" else total


def two(a: float, b: float, angle: float) -> tuple[Tensor, Tensor]:
    """Vectors of these lengths, the first along the axis, the second so many degrees from it."""
    turn = math.radians(angle)
    tip = torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64)
    return torch.tensor([a, 0.0], dtype=torch.float64), tip * b


def shared_updates(agreement: float, dimension: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A direction, and 16 updates of length 1 that share it to this degree, each with noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    common, *own = torch.randn(17, dimension, generator=generator, dtype=torch.float64)
    common /= common.norm()
    mixed = [math.sqrt(agreement) * common + math.sqrt(1 - agreement) * noise / noise.norm() for noise in own]
    return common, [u / u.norm() for u in mixed]


@cache
def trained_with(rule: str, count: int, rate: float = 0.5, steps: int = 40, batch: int = 16) -> tuple[float, ...]:
    """Loss over all training digits before and after each step; every worker has `batch` images of its own.

    In float64: at large rates a training doubles every difference many times over, and that of two processors in
    float32 would reach the first digit after the point.
    """
    images, labels = digits("train", size=8)
    images = images.double()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    params = list(net.parameters())
    rows = torch.Generator().manual_seed(1)

    def loss_of(pick: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(images[pick]), labels[pick])

    everything = torch.arange(len(images))
    losses = [loss_of(everything).item()]
    for _ in range(steps):
        picks = torch.randint(len(images), (count, batch), generator=rows)
        updates = [[rate * g for g in torch.autograd.grad(loss_of(pick), params)] for pick in picks]
        with torch.no_grad():
            for p, parts in zip(params, zip(*updates)):
                p.sub_(combined(rule, parts))
        losses.append(loss_of(everything).item())
    return tuple(losses)


# ---- two updates
@view(
    a=Range(0.0, 3.0, 0.1, "length of a"),
    b=Range(0.0, 3.0, 0.1, "length of b"),
    angle=Range(0, 180, 5, "angle, degrees"),
)
def pair(see: Sheet, a=2.0, b=1.5, angle=60) -> None:
    """Two updates in the plane: their sum, mean and AdaSum. Numbers: `results` (a dict of vectors) and `factors`."""
    first, second = two(a, b, angle)
    results = {rule: combined(rule, [first, second]) for rule in RULES}
    see.grid(420, 960, cols=(1.35, 1))
    x, y = linear("first weight's update", -3.4, 6.4, 5), linear("second weight's update", -0.8, 5.2, 4)
    plane = see.panel(title="two updates: drag a and b", x=x, y=y, equal=True)
    for name, vector in (("a", first), ("b", second)):
        across, up = vector.tolist()
        plane.line([0, up], [0, across], width=4)
        length = float(vector.norm()) or 1.0
        plane.text(name, across, up, color="own", size=14, halo=True, dx=18 * across / length, dy=-18 * up / length)
    for rule, vector in results.items():
        plane.line([0, float(vector[1])], [0, float(vector[0])], label=rule, width=2.2, **LOOK[rule])
    plane.handle("x", "a", a, 0, 3, "length of a", cross=0, step=0.1)
    plane.handle("xy", "b", second.tolist(), -3, 3, "tip of b", step=0.1, turns="angle")

    angles = np.arange(0, 181, 5)
    x, y = linear("angle between a and b, degrees", 0, 180, 6), linear("length of the result", 0, 6.2, 6)
    over = see.panel(0, 1, title="length over the angle", x=x, y=y)
    for rule, vector in results.items():
        long = [float(combined(rule, two(a, b, float(k))).norm()) for k in angles]
        over.line(long, angles, **LOOK[rule] | {"glyph": None})
        over.points([float(vector.norm())], [angle], **LOOK[rule] | {"dash": None})
    over.handle("x", "angle", angle, 0, 180, "angle, degrees", step=5)
    factors = [v + 0.0 for v in np.round(adasum_coefficients(first, second, eps=0.0).tolist(), 2).tolist()]
    lengths = ", ".join(f"{rule} {float(v.norm()):.2f}" for rule, v in results.items())
    sign = "+" if factors[1] >= 0 else "-"
    see.say(
        f"a of length {a:.3g} and b of length {b:.3g} at {counted(angle, 'degree')}. Lengths: {lengths}. "
        f"AdaSum = {factors[0]:.2f} a {sign} {abs(factors[1]):.2f} b.",
        results=results, factors=factors,
    )  # fmt: skip


# ---- many workers
@view(
    agreement=Range(0.0, 1.0, 0.05, "shared part"),
    dimension=Range(2, 256, 2, "dimensions"),
    count=Choice({n: str(n) for n in WORKERS}, "workers"),
    seed=Range(0, 99, label="random draw"),
)
def workers(see: Sheet, agreement=0.3, dimension=64, count=8, seed=0) -> None:
    """Updates of 1 to 16 workers that share a direction to a chosen degree, each with noise of its own.

    Numbers: `lengths` in single updates and `cosines` with the shared direction, by rule over 1, 2, 4, 8, 16 workers.
    """
    common, updates = shared_updates(agreement, dimension, seed)
    merged = {rule: [combined(rule, updates[:n]) for n in WORKERS] for rule in RULES}
    lengths = {rule: [float(v.norm()) for v in vs] for rule, vs in merged.items()}
    cosines = {rule: [float(v @ common / v.norm()) for v in vs] for rule, vs in merged.items()}
    see.grid(380, 940, cols=(1, 1))
    counts = np.log2(WORKERS)
    x = log2("workers", -0.2, 4.2) | {"ticks": [[float(e), str(n)] for e, n in zip(counts, WORKERS)]}
    least = min(-3, math.floor(math.log2(max(1e-9, min(map(min, lengths.values()))))))
    long = see.panel(title="length of the merged update", x=x, y=log2("length, in single updates", least, 4.2))
    y = linear("cosine", min(-0.5, min(map(min, cosines.values())) - 0.05), 1.05, 4)
    near = see.panel(0, 1, title="cosine with the shared direction", x=dict(x), y=y)
    for panel in (long, near):
        panel.rule("x", math.log2(count), "own", width=2)
    for rule, look in LOOK.items():
        long.line(exponents(lengths[rule], least, 4.2), counts, label=rule, tag=True, **look)
    for rule, name in (("mean", "mean and sum"), ("AdaSum", "AdaSum")):
        near.line(cosines[rule], counts, label=name, tag=True, **LOOK[rule])

    at = WORKERS.index(count)
    told = ", ".join(f"{rule} {lengths[rule][at]:.2f}" for rule in RULES)
    see.say(
        f"{counted(count, 'worker')}; {agreement:.2f} of the squared length of every update is shared, "
        f"the rest is noise. Lengths, in "
        f"single updates: {told}. The cosine with the shared direction is {cosines['AdaSum'][at]:z.2f} for AdaSum and "
        f"{cosines['mean'][at]:z.2f} for the mean.",
        lengths=lengths, cosines=cosines,
    )  # fmt: skip
