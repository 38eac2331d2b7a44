"""AdaSum in two dimensions, over many workers, and in a small training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from traitlets import Enum, Float, Int

from mpkit.arguments import is_number
from mpkit.boost.adasum import adasum, adasum_coefficients
from mpkit.data import digits
from mpkit.explorers.base import Explorer, counted

RULES = ("sum", "mean", "AdaSum")
WORKERS = (1, 2, 4, 8, 16)


def combined(rule: str, updates: Sequence[Tensor]) -> Tensor:
    """The updates of one tensor from several workers, merged by "sum", "mean" or "AdaSum"."""
    if rule == "AdaSum":
        return adasum([[u] for u in updates], eps=0.0)[0]
    total = torch.stack(list(updates)).sum(0)
    return total / len(updates) if rule == "mean" else total


class PairExplorer(Explorer):
    """Two updates in the plane: their sum, mean and AdaSum."""

    controls = ("length_a", "length_b", "angle")
    gestures = ("drag_b",)
    length_a = Float(2.0, min=0.0, max=3.0).tag(label="length of a", step=0.1)
    length_b = Float(1.5, min=0.0, max=3.0).tag(label="length of b", step=0.1)
    angle = Int(60, min=0, max=180).tag(label="angle", unit="degrees", step=5)

    def compute(self) -> None:
        """The five vectors, the two coefficients, and the length of each result over all angles."""
        self.a, self.b = self._vectors(self.angle)
        self.results = {rule: combined(rule, [self.a, self.b]) for rule in RULES}
        self.coefficients = adasum_coefficients(self.a, self.b, eps=0.0).tolist()
        self.angles = list(range(0, 181, 5))
        pairs = [self._vectors(angle) for angle in self.angles]
        self.lengths = {rule: [float(combined(rule, pair).norm()) for pair in pairs] for rule in RULES}

    def drag_b(self, _step: int, tip: Sequence[float]) -> None:
        """Move the tip of b to [x, y], within the ranges of length and angle; a point below the axis is mirrored."""
        if not (isinstance(tip, Sequence) and len(tip) == 2 and all(map(is_number, tip)) and math.isfinite(sum(tip))):
            raise ValueError(f"a tip is two finite numbers, such as [1.5, 0.5], got {tip!r:.80}")
        length = min(round(math.hypot(*tip), 1), 3.0)
        self.set(length_b=length, angle=round(math.degrees(math.atan2(abs(tip[1]), tip[0]))) if length else self.angle)

    def _vectors(self, angle: float) -> tuple[Tensor, Tensor]:
        turn = math.radians(angle)
        b = torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64) * self.length_b
        return torch.tensor([self.length_a, 0.0], dtype=torch.float64), b

    def summary(self) -> str:
        lengths = ", ".join(f"{rule} {float(v.norm()):.2f}" for rule, v in self.results.items())
        one, two = self.coefficients
        return (
            f"a of length {_told(self.length_a)} and b of length {_told(self.length_b)} at "
            f"{counted(self.angle, 'degree')}. "
            f"Lengths: {lengths}. AdaSum = {one:z.2f} a {f'{two:+z.2f}'.replace('+', '+ ').replace('-', '- ')} b."
        )

    def table(self) -> list[dict[str, Any]]:
        vectors = {"a": self.a, "b": self.b, **self.results}
        return [
            {
                "vector": name,
                "x": round(float(v[0]), 3) + 0.0,  # no -0.0
                "y": round(float(v[1]), 3) + 0.0,
                "length": round(float(v.norm()), 3),
            }
            for name, v in vectors.items()
        ]


def _told(length: float) -> str:
    """As the slider gives it, or as it was typed.

    >>> _told(2.0), _told(0.04)
    ('2.0', '0.04')
    """
    return f"{length:.1f}" if round(length, 1) == length else f"{length:.3g}"


class WorkersExplorer(Explorer):
    """Updates of 1 to 16 workers that share a direction to a chosen degree, each with noise of its own."""

    counts = WORKERS
    controls = ("agreement", "dimension", "workers", "seed")
    agreement = Float(0.3, min=0.0, max=1.0).tag(label="shared part", step=0.05)
    dimension = Int(64, min=2, max=256).tag(label="dimensions", step=2)
    workers = Enum(WORKERS, 8).tag(label="workers")
    seed = Int(0, min=0, max=99).tag(label="random draw")

    def compute(self) -> None:
        """Per worker count: length of each result, in single updates, and its cosine with the shared direction."""
        generator = torch.Generator().manual_seed(self.seed)
        common, *own = torch.randn(17, self.dimension, generator=generator, dtype=torch.float64)
        common /= common.norm()
        share = self.agreement
        updates = [math.sqrt(share) * common + math.sqrt(1 - share) * noise / noise.norm() for noise in own]
        updates = [u / u.norm() for u in updates]
        self.lengths: dict[str, list[float]] = {rule: [] for rule in RULES}
        self.cosines: dict[str, list[float]] = {rule: [] for rule in RULES}
        for count in WORKERS:
            for rule in RULES:
                result = combined(rule, updates[:count])
                self.lengths[rule].append(float(result.norm()))
                self.cosines[rule].append(float(result @ common / result.norm()))

    def summary(self) -> str:
        at = WORKERS.index(self.workers)
        lengths = ", ".join(f"{rule} {self.lengths[rule][at]:.2f}" for rule in RULES)
        cosines = f"{self.cosines['AdaSum'][at]:z.2f} for AdaSum and {self.cosines['mean'][at]:z.2f} for the mean"
        return (
            f"{counted(self.workers, 'worker')}; {self.agreement:.2f} of every update is shared, the rest is noise. "
            f"Lengths, in single updates: {lengths}. The cosine with the shared direction is {cosines}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "workers": count,
                **{f"length, {rule}": round(self.lengths[rule][i], 3) for rule in RULES},
                **{f"cosine, {rule}": round(self.cosines[rule][i], 3) + 0.0 for rule in ("mean", "AdaSum")},
            }
            for i, count in enumerate(WORKERS)
        ]


@lru_cache(maxsize=64)
def trained_with(rule: str, workers: int, rate: float = 0.5, steps: int = 40, batch: int = 16) -> tuple[float, ...]:
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
        deltas = []
        for pick in torch.randint(len(images), (workers, batch), generator=rows):
            deltas.append([rate * g for g in torch.autograd.grad(loss_of(pick), params)])
        _apply(params, [_merge(rule)(list(parts)) for parts in zip(*deltas)])
        losses.append(loss_of(everything).item())
    return tuple(losses)


def _merge(rule: str) -> Callable[[list[Tensor]], Tensor]:
    return lambda parts: combined(rule, parts)


@torch.no_grad()
def _apply(params: Sequence[Tensor], deltas: Sequence[Tensor]) -> None:
    for p, delta in zip(params, deltas):
        p -= delta
