"""Training in the plane of the principal components of an earlier training path."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from traitlets import Enum, Int

from mpkit.boost.dim_reduce import DimReduce, LineSearch, pca_matrix
from mpkit.data import digits
from mpkit.explorers.base import Explorer, counted
from mpkit.replay.percent import percent

IMAGES, HIDDEN, STEPS, EVERY, MOST = 300, 12, 40, 2, 16
RATE = 0.5
RHOS = (0.3, 0.55, 0.8)
ALPHAS = (0.0, 0.001, 0.05, 0.2)


class DigitsLoss(nn.Module):
    """A small network on 300 digits; called without arguments it returns the loss over all of them."""

    def __init__(self) -> None:
        super().__init__()
        images, labels = digits("train", size=8)
        self.images, self.labels = images[:IMAGES].double(), labels[:IMAGES]
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)).double()

    def forward(self) -> Tensor:
        return nn.functional.cross_entropy(self.body(self.images), self.labels)

    def flat(self) -> np.ndarray:
        """The weights now, (n,) float64, as a copy."""
        return torch.cat([p.detach().flatten() for p in self.parameters()]).numpy().copy()

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and its gradients at the present weights."""
        loss = self()
        return loss.detach(), list(torch.autograd.grad(loss, list(self.parameters())))


def start() -> DigitsLoss:
    """The network at the weights from which every run of the lesson starts."""
    torch.manual_seed(0)
    return DigitsLoss()


@dataclass(frozen=True, eq=False)
class Path:
    """A training: `weights` (steps + 1, n), `losses` (steps + 1,), and what each line search saw, if there was one.

    `residual` is the share of each gradient's length that lies outside the subspace, (steps,).
    """

    weights: np.ndarray
    losses: np.ndarray
    searches: tuple[LineSearch, ...] = ()
    residual: np.ndarray = field(default_factory=lambda: np.zeros(0))


@lru_cache(maxsize=1)
def earlier_path() -> Path:
    """Plain gradient descent, `STEPS` steps."""
    net, weights, losses = start(), [], []
    for _ in range(STEPS + 1):
        loss, grads = net.gradients()
        weights.append(net.flat())
        losses.append(loss.item())
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), grads, alpha=-RATE)
    return Path(np.array(weights), np.array(losses))


@lru_cache(maxsize=1)
def components() -> np.ndarray:
    """(MOST, n): principal components of every second set of weights of the earlier path."""
    return pca_matrix(earlier_path().weights[::EVERY], MOST, method="full")


@lru_cache(maxsize=64)
def reduced_path(k: int, rho: float = 0.55, alpha: float = 0.001, steps: int = STEPS) -> Path:
    """Training from the same start with DimReduce in the first `k` components."""
    net = start()
    params = list(net.parameters())
    reduce = DimReduce(net, torch.optim.SGD(params, lr=1.0), params, components()[:k], k, rho=rho, alpha=alpha)
    weights, losses, searches, residual = [net.flat()], [], [], []
    for _ in range(steps):
        loss, grads = net.gradients()
        reduce(loss, grads, None, None)
        assert reduce.search is not None
        losses.append(loss.item())
        weights.append(net.flat())
        searches.append(reduce.search)
        length = float(torch.cat([g.flatten() for g in grads]).norm())
        inside = min(float(reduce.search.projection.norm()) / length, 1.0)
        residual.append((1 - inside**2) ** 0.5)
    losses.append(net().item())
    return Path(np.array(weights), np.array(losses), tuple(searches), np.array(residual))


def on_plane(weights: np.ndarray) -> np.ndarray:
    """(..., n) weights -> (..., 2) their coordinates in the plane of the first two components, start at (0, 0)."""
    return (weights - earlier_path().weights[0]) @ components()[:2].T


@lru_cache(maxsize=1)
def landscape() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (51,), y (26,) and the loss (26, 51) on the plane through the start of the path, as far as any run goes."""
    x, y = np.linspace(-50, 5, 51), np.linspace(-10, 15, 26)
    net, origin, plane = start(), earlier_path().weights[0], components()[:2]
    return x, y, np.array([[_loss_at(net, origin + np.array([a, b]) @ plane) for a in x] for b in y])


def _loss_at(net: DigitsLoss, flat: np.ndarray) -> float:
    nn.utils.vector_to_parameters(torch.from_numpy(flat), net.parameters())
    with torch.no_grad():
        return net().item()


class DimReduceExplorer(Explorer):
    """The path of DimReduce in the plane, its line search and what it leaves to the residual, step by step."""

    controls = ("components", "rho", "alpha", "step")
    components = Int(8, min=2, max=MOST).tag(label="components", costly=True)
    rho = Enum(RHOS, 0.55).tag(label="second step size rho")
    alpha = Enum(ALPHAS, 0.001).tag(label="residual rate alpha")
    step = Int(10, min=0, max=STEPS - 1).tag(label="step")

    def compute(self) -> None:
        """Both paths, in the plane and as losses; per step the trials of its line search, on the plane.

        `taken` (steps, 2) is the accepted trial and `refused` two such arrays, of those beyond the picture the place
        where the way to them leaves it; NaN where there was none. `beyond` (steps,) is the number of these.
        """
        self.landscape = landscape()
        self.earlier, self.path = earlier_path(), reduced_path(self.components, self.rho, self.alpha)
        self.points = {"gradient descent": on_plane(self.earlier.weights), "DimReduce": on_plane(self.path.weights)}
        steps, now = len(self.path.searches), self.points["DimReduce"]
        self.taken, self.refused = np.full((steps, 2), np.nan), np.full((2, steps, 2), np.nan)
        for t, search in enumerate(self.path.searches):
            sizes = (1.0, self.rho)[: len(search.losses)]
            for i, size in enumerate(sizes):
                accepted = search.accepted and i == len(sizes) - 1
                (self.taken if accepted else self.refused[i])[t] = now[t] + size * search.direction.numpy()[:2]
        shown = np.concatenate([now, self.taken[np.isfinite(self.taken).all(1)]])
        self.picture = (min(-27.0, shown[:, 0].min() - 2), 5.0), (-10.0, max(9.0, shown[:, 1].max() + 1))
        inside = np.array([[_inside(self.picture, a, b) for a, b in zip(now, ends)] for ends in self.refused])
        self.refused = now[:-1] + inside[..., None] * (self.refused - now[:-1])
        self.beyond = (inside < 1).sum(0)

    def summary(self) -> str:
        search, at = self.path.searches[self.step], self.step
        told = f"accepts the step size {search.rho:g}" if search.accepted else "accepts neither step size"
        if beyond := int(self.beyond[at]):
            told += f" ({counted(beyond, 'refused trial')} beyond the picture)"
        return (
            f"{self.components} components, step {at}: the line search {told}. The loss is {self.path.losses[at]:.3f} "
            f"(gradient descent {self.earlier.losses[at]:.3f}); after {STEPS} steps it is {self.path.losses[-1]:.3f} "
            f"(gradient descent {self.earlier.losses[-1]:.3f}). The part of the gradient outside "
            f"the subspace is {percent(self.path.residual[at])} as long as the whole gradient."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "step": t,
                "loss, DimReduce": round(float(self.path.losses[t]), 3),
                "loss, gradient descent": round(float(self.earlier.losses[t]), 3),
                "step size": search.rho,
                "trials": len(search.losses),
                "outside": percent(self.path.residual[t]),
            }
            for t, search in enumerate(self.path.searches)
        ]


def _inside(picture: tuple[tuple[float, float], ...], now: np.ndarray, end: np.ndarray) -> float:
    """The share of the way from `now` (2,) to `end` that lies within the picture; NaN where there is no end."""
    rooms = [((high if b > a else low) - a) / (b - a) for (low, high), a, b in zip(picture, now, end) if b != a]
    return min([1.0, *rooms]) if np.isfinite(end).all() else math.nan
