"""*Dimension reduction*: training in the plane of the principal components of an earlier training path."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from contourpy import contour_generator  # matplotlib draws its own contours with it, so it is always there
from torch import Tensor, nn

from mpkit.boost.dim_reduce import DimReduce, LineSearch, pca_matrix
from mpkit.data import digits
from mpkit.replay.percent import percent
from mpkit.view import Choice, Range, Sheet, Stroke, view
from mpkit.view.parts import prediction
from mpkit.view.sheet import Panel, linear
from mpkit.view.words import counted

IMAGES, HIDDEN, STEPS, EVERY, MOST = 300, 12, 40, 2, 16
RATE = 0.5
RHOS = (0.3, 0.55, 0.8)
ALPHAS = (0.0, 0.001, 0.05, 0.2)


# ---- numbers
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
        return nn.utils.parameters_to_vector(self.parameters()).detach().numpy().copy()

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and its gradients at the present weights."""
        loss = self()
        return loss.detach(), list(torch.autograd.grad(loss, list(self.parameters())))


def start() -> DigitsLoss:
    """The network at the weights from which every run of the lesson starts."""
    torch.manual_seed(0)
    return DigitsLoss()


class Path(NamedTuple):
    """A training: `weights` (steps + 1, n), `losses` (steps + 1,), and what each line search saw, if there was one.

    `residual` is the share of each gradient's length that lies outside the subspace, (steps,).
    """

    weights: np.ndarray
    losses: np.ndarray
    searches: tuple[LineSearch, ...] = ()
    residual: np.ndarray = np.zeros(0)


@cache
def earlier_path() -> Path:
    """Plain gradient descent, `STEPS` steps."""
    net, weights, losses = start(), [], []
    plain = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(STEPS + 1):
        weights.append(net.flat())
        plain.zero_grad()
        loss = net()
        loss.backward()
        losses.append(loss.item())
        plain.step()
    return Path(np.array(weights), np.array(losses))


@cache
def components() -> np.ndarray:
    """(MOST, n): principal components of every second set of weights of the earlier path."""
    return pca_matrix(earlier_path().weights[::EVERY], MOST, method="full")


@cache
def reduced_path(k: int, rho: float = 0.55, alpha: float = 0.001) -> Path:
    """Training from the same start with DimReduce in the first `k` components."""
    net = start()
    params = list(net.parameters())
    reduce = DimReduce(net, torch.optim.SGD(params, lr=1.0), params, components()[:k], k, rho=rho, alpha=alpha)
    weights, losses, searches, residual = [net.flat()], [], list[LineSearch](), []
    for _ in range(STEPS):
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


@cache
def contours() -> dict[float, np.ndarray]:
    """Loss (nats) -> (points, 2) of its line on the plane, NaN between the pieces, as far as any run goes."""
    x, y = np.linspace(-50, 5, 51), np.linspace(-10, 15, 26)
    net, origin, plane = start(), earlier_path().weights[0], components()[:2]

    def loss_at(a: float, b: float) -> float:
        nn.utils.vector_to_parameters(torch.from_numpy(origin + np.array([a, b]) @ plane), net.parameters())
        with torch.no_grad():
            return net().item()

    lines, gap = contour_generator(x, y, [[loss_at(a, b) for a in x] for b in y]), np.full((1, 2), np.nan)
    found = dict[float, np.ndarray]()
    for level in (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        pieces: Any = lines.lines(level)
        if len(pieces):
            found[level] = np.concatenate([part for piece in pieces for part in (piece, gap)])
    return found


class Trials(NamedTuple):
    """The trials of each line search on the plane, and the `picture` ((left, right), (low, high)) that holds the path.

    `taken` (steps, 2) is the accepted trial and `refused` (2, steps, 2) the others, NaN where there was none. Those
    beyond the picture stand at its edge; `beyond` (steps,) is their number.
    """

    points: np.ndarray
    taken: np.ndarray
    refused: np.ndarray
    picture: tuple[tuple[float, float], tuple[float, float]]
    beyond: np.ndarray


@cache
def trials(k: int, rho: float, alpha: float) -> Trials:
    """Where the line searches of a `reduced_path` looked."""
    path = reduced_path(k, rho, alpha)
    now, nowhere = on_plane(path.weights), np.full((STEPS, 2), np.nan)
    taken, refused = nowhere.copy(), np.stack([nowhere, nowhere])
    for t, search in enumerate(path.searches):
        for i in range(len(search.losses)):
            accepted = search.accepted and i == len(search.losses) - 1
            (taken if accepted else refused[i])[t] = now[t] + (1.0, rho)[i] * search.direction.numpy()[:2]
    shown = np.concatenate([now, taken[np.isfinite(taken).all(1)]])
    picture = (min(-27.0, shown[:, 0].min() - 2), 5.0), (-10.0, max(9.0, shown[:, 1].max() + 1))
    low, high = np.array(picture).T
    beyond = ((refused < low) | (refused > high)).any(-1).sum(0)
    return Trials(now, taken, np.clip(refused, low, high), picture, beyond)


# ---- the path of DimReduce, step by step
@view(
    k=Range(2, MOST, label="components", costly=True),
    rho=Choice({rho: f"{rho:g}" for rho in RHOS}, "second step size rho"),
    alpha=Choice({alpha: f"{alpha:g}" for alpha in ALPHAS}, "residual rate alpha"),
    step=(0, STEPS - 1),
)
def descent(see: Sheet, k=8, rho=0.55, alpha=0.001, step=10) -> None:
    """The path of DimReduce in the plane, its line search and what it leaves to the residual, step by step.

    Numbers: `losses` and `earlier` (steps + 1), those of gradient descent; of each step `accepted`, `size` (0 where
    nothing was accepted), `outside`, the share of the gradient outside the subspace, and `beyond`, refused trials
    beyond the picture.
    """
    path, earlier, seen = reduced_path(k, rho, alpha), earlier_path(), trials(k, rho, alpha)
    see.grid(460, 980, rows=(1, 1), cols=(1.5, 1))
    see.play("step", "step", STEPS, every=150)
    _plane(see, seen, on_plane(earlier.weights))
    loss = see.panel(0, 1, title="loss", x=linear("", 0, STEPS, 4), y=linear("loss, nats", 0, 2.6, 3))
    loss.line(earlier.losses, color="reference", dash=":")
    loss.line(path.losses)
    x, y = linear("step", 0, STEPS, 4), linear("share, %", 0, 104, 2)
    outside = see.panel(1, 1, title="gradient outside the subspace", x=x, y=y)
    outside.line(100 * path.residual)
    for panel in (loss, outside):
        panel.rule("x", "index", "muted", dash=":")
    outside.handle("x", "step", step, 0, STEPS - 1, "step")

    accepted = np.array([s.accepted for s in path.searches])
    size = np.array([s.rho if s.accepted else 0.0 for s in path.searches])
    told = [f"accepts the step size {s:g}" if s else "accepts neither step size" for s in size]
    left = [f" ({counted(n, 'refused trial')} beyond the picture)" if n else "" for n in seen.beyond.tolist()]
    see.say(
        f"{k} components, step {{at}}: the line search {{told}}. The loss is {{loss:.3f}} (gradient descent "
        f"{{plain:.3f}}); after {STEPS} steps it is {path.losses[-1]:.3f} (gradient descent {earlier.losses[-1]:.3f}). "
        "The part of the gradient outside the subspace is {share} as long as the whole gradient.",
        at=np.arange(STEPS), told=[a + b for a, b in zip(told, left)], loss=path.losses[:-1],
        plain=earlier.losses[:-1], share=[percent(s) for s in path.residual], losses=path.losses,
        earlier=earlier.losses, accepted=accepted, size=size, outside=path.residual, beyond=seen.beyond,
    )  # fmt: skip


def _plane(see: Sheet, seen: Trials, earlier: np.ndarray) -> None:
    """Both paths on the plane, with the trials of the step shown."""
    across, up = seen.picture
    x, y = linear("along component 1", *across, 6), linear("along component 2", *up, 5)
    plane = see.panel(rowspan=2, title="loss on the plane, nats, and the paths", x=x, y=y)
    _contours(plane, seen.picture)
    look: dict[str, Any] = {"dash": ":", "glyph": "s", "size": 2.5, "every": 10}
    plane.line(earlier[:, 1], earlier[:, 0], "reference", label="gradient descent", **look)
    x, y = seen.points.T
    plane.line(y, x, "own", glyph="o", size=2.2, width=1.8, show="upto", label="DimReduce")
    for refused in seen.refused:
        if np.isfinite(refused).any():
            look = {"glyph": "x", "size": 5, "show": "at", "label": "refused trial"}
            plane.points(refused[:, 1], refused[:, 0], "overflow", **look)
    words = ["beyond the picture" if number else "" for number in seen.beyond]
    edge = np.nan_to_num(np.where(np.isnan(seen.refused[0]), seen.refused[1], seen.refused[0]))
    plane.text(words, edge[:, 0], edge[:, 1], show="at", beside=8, dy=-8, color="overflow", halo=True)
    taken = seen.taken
    plane.points(taken[:, 1], taken[:, 0], "normal", glyph="D", size=5, show="at", label="accepted trial")
    plane.points(y[:-1], x[:-1], "ink", fill="paper", size=5, show="at", label="weights now")


def _contours(plane: Panel, picture: tuple[tuple[float, float], ...]) -> None:
    """Lines of equal loss, with their values where the picture has room."""
    low, high = np.array(picture).T
    for level, line in contours().items():
        plane.line(line[:, 1], line[:, 0], "muted/0.75", width=0.9)
        places = line[((low + 1.5 < line) & (line < high - 1.5)).all(1)]
        if len(places):
            x, y = places[len(places) // 3].tolist()
            plane.text(f"{level:.1f}", x, y, size=11, color="muted", halo=True)


# ---- a prediction that is drawn: the loss in two directions
ENDS = (0.0, 2.5)


@view(typed="or type it: nine losses from left to right", drawn=Stroke(STEPS + 1, *ENDS))
def draw_loss(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """Draw the loss of DimReduce with 2 components over 40 steps, beside the gradient descent that they come from.

    Numbers: `guess` and `truth` from step 1 on, `near`, at how many steps they are within 0.1 of each other.
    """
    truth = reduced_path(2).losses
    see.grid(380, 900)
    panel = see.panel(x=linear("step", -1, STEPS + 1, 10), y=linear("loss, nats", *ENDS))
    panel.line(earlier_path().losses, color="muted", width=1.6, dash=":", label="gradient descent")
    prediction(see, panel, "dim_reduce.loss", truth, first=1, ends=ENDS, start=2.3, points=9, within=0.1,
               typed=typed, drawn=drawn, shown=shown)  # fmt: skip
    if shown:
        panel.line(truth, color="reference", width=2.6, label="DimReduce, 2 components")
