"""*Dimension reduction*: training in the plane of the principal components of an earlier training path."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from contourpy import contour_generator  # matplotlib draws its own contours with it, so it is always there
from torch import Tensor, nn

from mpkit.boost.dim_reduce import DimReduce, LineSearch, pca_matrix
from mpkit.data import digits
from mpkit.view import Choice, Range, Sheet, counted, linear, percent, view

IMAGES, HIDDEN, STEPS, EVERY, MOST = 300, 12, 40, 2, 16
RATE = 0.5
RHO = 0.55  # of the whole step: the second trial


# ---- numbers
class DigitsLoss(nn.Module):
    """A small network on 300 digits, always with the same weights; called without arguments it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        images, labels = digits("train", size=8)
        self.images, self.labels = images[:IMAGES].double(), labels[:IMAGES]
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)).double()

    def forward(self) -> Tensor:
        return nn.functional.cross_entropy(self.body(self.images), self.labels)

    def flat(self) -> np.ndarray:
        """The weights now, (n,) float64, as a copy."""
        return nn.utils.parameters_to_vector(self.parameters()).detach().numpy().copy()


class Path(NamedTuple):
    """A training: `weights` (steps + 1, n), `losses` (steps + 1,), and what each line search saw, if there was one.

    `residual` is the share of each gradient's length that lies outside the subspace, (steps,).
    """

    weights: np.ndarray
    losses: np.ndarray
    searches: list[LineSearch]
    residual: np.ndarray


@cache
def reduced_path(k: int, alpha: float = 0.001) -> Path:
    """`STEPS` steps with DimReduce in the first `k` components; 0: the plain gradient descent that went before."""
    net = DigitsLoss()
    params = list(net.parameters())
    plain = torch.optim.SGD(params, lr=1.0 if k else RATE)
    reduce: Any = DimReduce(net, plain, params, components()[:k], k, rho=RHO, alpha=alpha) if k else None
    weights, losses, searches, residual = [net.flat()], list[float](), list[LineSearch](), list[float]()
    for _ in range(STEPS):
        plain.zero_grad()
        loss = net()
        loss.backward()
        losses.append(loss.item())
        if reduce is None:
            plain.step()
        else:
            grads = [p.grad for p in params if p.grad is not None]
            reduce(loss, grads, None, None)

            searches.append(reduce.search)
            inside = float(reduce.search.projection.norm()) / float(torch.cat([g.flatten() for g in grads]).norm())
            residual.append((1 - min(inside, 1.0) ** 2) ** 0.5)
        weights.append(net.flat())
    return Path(np.array(weights), np.array([*losses, net().item()]), searches, np.array(residual))


@cache
def components() -> np.ndarray:
    """(MOST, n): principal components of every second set of weights of the earlier path."""
    return pca_matrix(reduced_path(0).weights[::EVERY], MOST, method="full")


def on_plane(weights: np.ndarray) -> np.ndarray:
    """(..., n) weights -> (..., 2) their coordinates in the plane of the first two components, start at (0, 0)."""
    return (weights - reduced_path(0).weights[0]) @ components()[:2].T


@cache
def contours() -> dict[float, np.ndarray]:
    """Loss (nats) -> (points, 2) of its line on the plane, NaN between the pieces, as far as any run goes."""
    x, y = np.linspace(-50, 5, 51), np.linspace(-10, 15, 26)
    net, origin, plane = DigitsLoss(), reduced_path(0).weights[0], components()[:2]

    def loss_at(a: float, b: float) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(origin + np.array([a, b]) @ plane), net.parameters())
        with torch.no_grad():
            return net().item()

    lines = contour_generator(x, y, [[loss_at(a, b) for a in x] for b in y], line_type="ChunkCombinedNan")
    found: Any = {level: lines.lines(level)[0][0] for level in (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)}
    return {level: line for level, line in found.items() if line is not None}


def tried(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(steps, 2 trials, 2) where each line search looked on the plane, and where it was refused; NaN: nowhere."""
    now = on_plane(path.weights)
    taken, refused = np.full((2, STEPS, 2, 2), np.nan)
    for t, search in enumerate(path.searches):
        for i, size in enumerate((1.0, RHO)[: len(search.losses)]):
            (taken if size == search.rho else refused)[t, i] = now[t] + size * search.direction.numpy()[:2]
    return taken, refused


# ---- the path of DimReduce, step by step
@view(
    k=Range(2, MOST, label="components", costly=True),
    alpha=Choice({alpha: f"{alpha:g}" for alpha in (0.0, 0.001, 0.05, 0.2)}, "residual rate alpha"),
    step=(0, STEPS - 1),
)
def descent(see: Sheet, k=8, alpha=0.001, step=10) -> None:
    """The path of DimReduce in the plane, its line search and what it leaves to the residual, step by step.

    Numbers: `losses` (steps + 1); of each step `size` (0 where
    nothing was accepted), `outside`, the share of the gradient outside the subspace, and `beyond`, refused trials
    beyond the picture.
    """
    path, earlier = reduced_path(k, alpha), reduced_path(0)
    see.grid(450, 980, cols=(1.5, 1))
    beyond = _plane(see, path, on_plane(earlier.weights))
    loss = see.panel(0, 1, title="loss", x=linear("step", 0, STEPS, 4), y=linear("loss, nats", 0, 2.6, 3))
    loss.line(earlier.losses, color="reference", dash=":")
    loss.line(path.losses)
    see.play("step", "step", STEPS, every=150, on=loss)
    size = np.array([search.rho for search in path.searches])
    told = [f"accepts the step size {s:g}" if s else "accepts neither step size" for s in size]
    left = [f" ({counted(n, 'refused trial')} beyond the picture)" if n else "" for n in beyond.tolist()]
    see.say(
        f"{k} components, step {{at}}: the line search {{told}}. The loss is {{loss:.3f}} (gradient descent "
        f"{{plain:.3f}}); after {STEPS} steps it is {path.losses[-1]:.3f} (gradient descent {earlier.losses[-1]:.3f}). "
        "The part of the gradient outside the subspace is {share} as long as the whole gradient.",
        at=np.arange(STEPS), told=[a + b for a, b in zip(told, left)], loss=path.losses[:-1],
        plain=earlier.losses[:-1], share=[percent(s) for s in path.residual], losses=path.losses,
        size=size, outside=path.residual, beyond=beyond,
    )  # fmt: skip


def _plane(see: Sheet, path: Path, earlier: np.ndarray) -> np.ndarray:
    """Both paths over lines of equal loss, with the trials of the step shown; -> (steps,) how many lie beyond it."""
    now, (taken, refused) = on_plane(path.weights), tried(path)
    x, y = np.concatenate([now, *taken.swapaxes(0, 1)]).T
    low, high = np.array([min(-27.0, np.nanmin(x) - 2), -10.0]), np.array([5.0, max(9.0, np.nanmax(y) + 1)])
    across, up = linear("along component 1", low[0], high[0], 6), linear("along component 2", low[1], high[1], 5)
    plane = see.panel(title="loss on the plane, nats, and the paths", x=across, y=up)
    for level, line in contours().items():
        line = np.where(((low <= line) & (line <= high)).all(1, keepdims=True), line, np.nan)
        plane.line(line[:, 1], line[:, 0], "muted/0.75", width=0.9)
        places = line[((low + 1.5 < line) & (line < high - 1.5)).all(1)]
        if len(places):
            plane.text(f"{level:.1f}", *places[len(places) // 3].tolist(), size=11, color="muted", halo=True)
    look: dict[str, Any] = {"dash": ":", "glyph": "s", "size": 2.5, "every": 10}
    plane.line(earlier[:, 1], earlier[:, 0], "reference", label="gradient descent", **look)
    plane.line(now[:, 1], now[:, 0], "own", glyph="o", size=2.2, width=1.8, show="upto", label="DimReduce")
    edge = np.clip(refused, low, high)
    beyond = (refused != edge).any(-1) & ~np.isnan(refused).any(-1)
    for i in (0, 1):
        plane.points(edge[:, i, 1], edge[:, i, 0], "overflow", glyph="x", size=5, show="at", label="refused trial")
        words = np.where(beyond[:, i] & ~beyond[:, :i].any(1), "beyond the picture", "").tolist()  # once for both
        x, y = np.nan_to_num(np.clip(edge[:, i], np.add(low, (6.5, 0)), np.subtract(high, (6.5, 1)))).T  # in the panel
        plane.text(words, x, y, show="at", dy=-14, color="overflow", halo=True)
        plane.points(taken[:, i, 1], taken[:, i, 0], "normal", glyph="D", size=5, show="at", label="accepted trial")
    plane.points(now[:-1, 1], now[:-1, 0], "ink", fill="paper", size=5, show="at", label="weights now")
    return beyond.sum(1)
