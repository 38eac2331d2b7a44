"""*AdaSum*: AdaSum of two updates in the plane, and in a small training."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.boost.adasum import adasum, adasum_coefficients
from mpkit.data import digits
from mpkit.view import Range, Sheet, counted, linear, view

LOOK: Mapping[str, dict[str, Any]] = {
    "sum": {"color": "overflow", "dash": "--", "glyph": "s"},
    "mean": {"color": "normal", "dash": "-.", "glyph": "^"},
    "AdaSum": {"color": "zero", "glyph": "o"},
}
RULES = tuple(LOOK)


# ---- numbers
def combined(rule: str, updates: Sequence[Tensor]) -> Tensor:
    """The updates of one tensor from several workers, merged by "sum", "mean" or "AdaSum"."""
    if rule == "AdaSum":
        return adasum([[u] for u in updates], eps=0.0)[0]
    every = torch.stack([*updates])
    return every.mean(0) if rule == "mean" else every.sum(0)


def two(a: float, b: float, angle: float) -> Tensor:
    """Vectors (2, 2) of these lengths, the first along the axis, the second so many degrees from it."""
    turn = math.radians(angle)
    return torch.tensor([[a, 0.0], [b * math.cos(turn), b * math.sin(turn)]], dtype=torch.float64)


@cache
def trained_with(rule: str, count: int, rate: float = 0.5, steps: int = 40, batch: int = 16) -> float:
    """Loss over all training digits at the end; every worker has `batch` images of its own.

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

    for _ in range(steps):
        picks = torch.randint(len(images), (count, batch), generator=rows)
        updates = [[rate * g for g in torch.autograd.grad(loss_of(pick), params)] for pick in picks]
        with torch.no_grad():
            for p, parts in zip(params, zip(*updates)):
                p.sub_(combined(rule, parts))
    return loss_of(torch.arange(len(images))).item()


# ---- two updates
@view(
    a=Range(0.0, 3.0, 0.1, "length of a"),
    b=Range(0.0, 3.0, 0.1, "length of b"),
    angle=Range(0, 180, 5, "angle, degrees"),
)
def pair(see: Sheet, a=2.0, b=1.5, angle=60) -> None:
    """Two updates in the plane: their sum, mean and AdaSum. Numbers: `results` (a dict of vectors) and `factors`."""
    first, second = two(a, b, angle)
    results = {rule: combined(rule, (first, second)) for rule in RULES}
    see.grid(420, 960, cols=(1.35, 1))
    x, y = linear("first weight's update", -3.4, 6.4, 5), linear("second weight's update", -0.8, 5.2, 4)
    plane = see.panel(title="two updates: drag a and b", x=x, y=y, equal=True)
    x, y = linear("angle between a and b, degrees", 0, 180, 6), linear("length of the result", 0, 6.6, 6)
    over = see.panel(0, 1, title="length over the angle", x=x, y=y)
    turn = math.radians(angle)
    for name, (across, up), dx, dy in (("a", first, 0, 18), ("b", second, -18 * math.sin(turn), -18 * math.cos(turn))):
        plane.line([0, up], [0, across], width=4)
        plane.text(name, across, up, color="own", size=14, halo=True, dx=dx, dy=dy)  # beside the tips: they may meet
    angles = np.arange(0, 181, 5)
    for rule, vector in results.items():
        across, up = vector.tolist()
        plane.line([0, up], [0, across], label=rule, width=2.2, **LOOK[rule])
        over_all = [combined(rule, [*two(a, b, float(k))]).norm() for k in angles]
        over.line(over_all, angles, **LOOK[rule] | {"glyph": None})
        over.points([vector.norm()], [angle], **LOOK[rule] | {"dash": None})
    plane.handle("x", "a", a, 0, 3, "length of a", cross=0, step=0.1)
    plane.handle("xy", "b", second.tolist(), -3, 3, "tip of b", step=0.1, turns="angle")
    over.handle("x", "angle", angle, 0, 180, "angle, degrees", step=5)
    factors = [v + 0.0 for v in np.round(adasum_coefficients(first, second, eps=0.0).tolist(), 2).tolist()]
    lengths = ", ".join(f"{rule} {vector.norm():.2f}" for rule, vector in results.items())
    see.say(
        f"a of length {a:.3g} and b of length {b:.3g} at {counted(angle, 'degree')}. Lengths: {lengths}. "
        f"AdaSum = {factors[0]:.2f} a {'+-'[factors[1] < 0]} {abs(factors[1]):.2f} b.",
        results=results, factors=factors,
    )  # fmt: skip
