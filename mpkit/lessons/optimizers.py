"""*The optimizer*: Adam with a narrow state, and a static loss scale that is multiplied and divided in two places."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.data import digits
from mpkit.formats import BF16, FP16, FP32, FloatFormat
from mpkit.optimizers import SGD, Adam, Momentum
from mpkit.rounding import round_to
from mpkit.step import TrainOneStepCell, WithLossCell
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.sheet import linear, log2, power_of_two

FORMATS = {"float32": FP32, "float16": FP16, "bfloat16": BF16}


# ---- Adam's first step in a narrow format
class AdamStep(NamedTuple):
    """What one first Adam update computes for gradients of given sizes, every intermediate result in one format.

    Args:
        moment2:  (1 - beta2) g^2 as stored.
        eps:      as stored.
        size:     the step in units of the learning rate; 1 in exact arithmetic when g is far above eps.
    """

    moment2: Tensor
    eps: float
    size: Tensor


def first_adam_step(gradient: Tensor, eps: float, fmt: FloatFormat) -> AdamStep:
    """The first update of Adam with beta1 0.9, beta2 0.999, each operation rounded to `fmt`.

    Shapes:  gradient (*) float32 >= 0 -> fields of the same shape.
    Source:  `mpkit.optimizers.Adam` at t = 1, rounded as a float16 optimizer would.
    """

    def held(x: Tensor) -> Tensor:
        return round_to(x, fmt)

    g, tiny, correction = held(gradient), held(torch.tensor(eps)), held(torch.tensor(math.sqrt(0.001) / 0.1))
    moment1, moment2 = held(g * 0.1), held(held(g * g) * 0.001)
    ratio = held(held(moment1 * correction) / held(held(moment2.sqrt()) + tiny))
    return AdamStep(moment2, float(tiny), ratio)


LOW, HIGH = -12, 8  # powers of two of the axis of steps; what lies beyond is drawn at the edge
EXPONENTS = torch.arange(-26 * 4, 16 * 4 + 1) / 4


def _shown(sizes: Tensor) -> np.ndarray:
    return sizes.nan_to_num(2.0**HIGH, posinf=2.0**HIGH).clamp(2.0**LOW, 2.0**HIGH).log2().numpy()


@view(
    state=Choice({name: name for name in FORMATS}, "computed in"),
    eps=Range(-12, -1, label="eps, 10 to the"),
    gradient=Range(-26, 16, label="gradient, 2 to the"),
)
def adam_state(see: Sheet, state="float16", eps=-8, gradient=-10) -> None:
    """The size of Adam's first step over the size of the gradient, all of it computed in a narrow format.

    Numbers: `gradients`, and `narrow` and `wide`, steps in learning rates; all over the powers of two of the axis.
    """
    gradients = EXPONENTS.exp2()
    narrow, wide = (first_adam_step(gradients, 10.0**eps, FORMATS[name]) for name in (state, "float32"))
    marked = int((gradient == EXPONENTS).nonzero())
    see.grid(390)
    y = log2("first step, in learning rates", LOW - 1, HIGH + 2)
    inner = [[e, power_of_two(e)] for e in range(-9, HIGH, 3)]
    y["ticks"] = [[LOW, f"up to {power_of_two(LOW)}"], *inner, [HIGH, f"from {power_of_two(HIGH)}"]]
    title = "Adam's first step over the gradient"
    panel = see.panel(title=title, x=log2("size of the gradient", -26, 16, 6), y=y)
    x, own = EXPONENTS.numpy(), _shown(narrow.size)
    panel.line(own, x, "own", width=4, label="chosen format", ghost=True)
    panel.line(_shown(wide.size), x, "reference", width=2.2, dash="--", label="float32", tag=True)
    for where, color, label, word in (
        (narrow.size == 0, "zero", "no step: 0", "0"),
        (~narrow.size.isfinite(), "overflow", "inf or NaN", "not finite"),
    ):
        at = np.flatnonzero(where.numpy())[::-3]  # with the last: one value may be all there is
        if len(at):
            panel.points(own[at], x[at], color, glyph="x", size=3, label=label, told=word)
    panel.points([own[marked]], [x[marked]], "own", fill="paper", size=6)
    panel.handle("x", "gradient", gradient, -26, 16, "marked gradient, 2 to the")
    moment2 = float(narrow.moment2[marked])
    see.say(
        f"The gradient is 2^{gradient} = {2.0**gradient:.5g}. In {state} v is {moment2:.5g}, eps 1e{eps} "
        f"becomes {narrow.eps:.3g}, and the step is {narrow.size[marked]:.3g} times the learning rate. In float32 the "
        f"step is {wide.size[marked]:.3g} times the learning rate.",
        gradients=gradients, narrow=narrow.size, wide=wide.size,
    )  # fmt: skip


# ---- trainings on the digits
def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """(64, 64) pixels and (64,) labels of the 8x8 digits for each step, over and over."""
    images, labels = digits("train", size=8)
    picks = (torch.arange(step * 64, step * 64 + 64) % len(images) for step in range(steps))
    return [(images[pick].flatten(1), labels[pick]) for pick in picks]


def small_network(seed: int = 0) -> nn.Module:
    """64 pixels, 64 hidden units, 10 digits; the same start for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_with_state(fmt: FloatFormat, eps: float, steps: int = 120) -> dict[str, Any]:
    """Train on the 8x8 digits with Adam whose moments and eps are rounded to `fmt` after every step.

    Weights, gradients and arithmetic stay in float32, so that the state alone makes the difference.
    """
    network = small_network()
    optimizer = Adam(network.parameters(), 0.01, eps=eps)
    optimizer.param_groups[0]["eps"] = float(round_to(torch.tensor(eps), fmt))
    for images, labels in batches(steps):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for moments in optimizer.state.values():
            for moment in moments.values():
                round_to(moment, fmt, out=moment)
    tests, truth = digits("test", size=8)
    right = float((network(tests.flatten(1)).argmax(1) == truth).float().mean())
    stored = f"{optimizer.param_groups[0]['eps']:.4g}"
    return {"state": fmt.name, "eps": eps, "stored eps": stored, "last loss": loss.item(), "accuracy": right}


# ---- the static loss scale, multiplied and divided in two places
MAKERS: dict[str, Any] = {
    "SGD": lambda p, scale, decay: SGD(p, 0.5, weight_decay=decay, loss_scale=scale),
    "Momentum": lambda p, scale, decay: Momentum(p, 0.05, 0.9, decay, scale),
    "Adam": lambda p, scale, decay: Adam(p, 0.01, weight_decay=decay, loss_scale=scale),
}


def train_scaled(kind: str, sens: float, scale: float, weight_decay: float = 0.0, steps: int = 40) -> list[float]:
    """Loss of each step when the backward pass starts from `sens` and the optimizer divides by `scale`.

    This is the pair that a FixedLossScaleManager with drop_overflow_update=False builds.
    """
    network = small_network()
    optimizer = MAKERS[kind](network.parameters(), float(scale), float(weight_decay))
    cell = TrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer, sens=float(sens))
    return torch.stack([cell(*batch) for batch in batches(steps)]).tolist()


@view(
    optimizer=Choice({name: name for name in MAKERS}, "optimizer"),
    sens=Range(0, 16, label="sens, 2 to the", costly=True),
    scale=Range(0, 16, label="loss_scale, 2 to the", costly=True),
    decay=Range(0.0, 0.1, 0.01, "weight_decay", costly=True),
)
def loss_scale(see: Sheet, optimizer="SGD", sens=10, scale=10, decay=0.0) -> None:
    """A static loss scale in two places: the cell multiplies by 2^sens, the optimizer divides by 2^scale.

    Numbers: `losses` of the 40 steps, `agreed` of those with scales that agree.
    """
    losses = np.array(train_scaled(optimizer, 2.0**sens, 2.0**scale, decay))
    agreed = np.array(train_scaled(optimizer, 1.0, 1.0, decay))
    see.grid(370)
    low, top, bad = -1.1, 3.0, ~np.isfinite(losses)
    ticks = [[math.log10(v), f"{v:g}" if v < 1000 else "≥ 1000"] for v in (0.1, 0.3, 1, 3, 10, 100, 1000)]
    y: dict[str, Any] = {"label": "loss, nats", "lo": low, "hi": top + 0.2, "ticks": ticks, "format": "log10"}
    panel = see.panel(title="loss under two loss scales", x=linear("step", 0, len(losses) - 1, 8), y=y)
    same = np.log10(np.clip(agreed, 10.0**low, 10.0**top))
    own = np.where(bad, np.nan, np.log10(np.clip(np.nan_to_num(losses, nan=1.0), 10.0**low, 10.0**top)))
    panel.line(own, color="own", width=4, label="chosen", tag=True)
    panel.line(same, color="reference", width=2.2, dash="--", label="sens = loss_scale", tag=True)
    if bad.any():
        look = {"glyph": "x", "label": "inf or NaN", "told": "not finite"}
        panel.points([top] * int(bad.sum()), np.flatnonzero(bad), "overflow", **look)
    ratio = 2 ** abs(sens - scale)
    part = "" if ratio == 1 else f"{ratio} times " if sens > scale else f"1/{ratio} of "
    head = f"{optimizer}, sens 2^{sens}, loss_scale 2^{scale}: gradients arrive at {part}their true size."
    see.say(
        f"{head} After {len(losses)} steps the loss is {told(losses[-1])}; with agreeing scales it is "
        f"{told(agreed[-1])}. Guessing gives 2.3.",
        stored=head, losses=losses, agreed=agreed,
    )  # fmt: skip


def told(loss: float) -> str:
    """A loss in words that do not depend on the machine: a training thrown off ends anywhere above 2."""
    if not math.isfinite(loss):
        return "inf or NaN"
    return f"{loss:.1f}" if loss < 2 else "above 2"
