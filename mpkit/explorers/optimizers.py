"""Schedules side by side, Adam with a narrow state, weight decay, and a static loss scale, divided out or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Bool, Enum, Float, Int

from mpkit.data import digits
from mpkit.explorers.base import Explorer, counted
from mpkit.formats import BF16, FP16, FP32, FloatFormat
from mpkit.optimizers import SGD, Adam, AdamWeightDecay, Momentum
from mpkit.rounding import round_to
from mpkit.schedules import (
    CosineDecayLR,
    ExponentialDecayLR,
    InverseDecayLR,
    LearningRateSchedule,
    NaturalExpDecayLR,
    PolynomialDecayLR,
    WarmUpLR,
)
from mpkit.step import TrainOneStepCell, WithLossCell

STEPS = 200
FORMATS = {"float32": FP32, "float16": FP16, "bfloat16": BF16}


# --- schedules


class SchedulesExplorer(Explorer):
    """Five schedules with the same numbers, after a common warm-up."""

    controls = ("learning_rate", "decay_rate", "decay_steps", "power", "is_stair", "warmup_steps", "step")
    learning_rate = Float(0.1, min=1e-4, max=1.0).tag(label="learning_rate", scale="log10", step=0.25)
    decay_rate = Float(0.5, min=0.05, max=1.5).tag(label="decay_rate", step=0.05)
    decay_steps = Int(60, min=1, max=STEPS).tag(label="decay_steps", unit="steps")
    power = Float(0.5, min=0.25, max=4.0).tag(label="power", step=0.25)
    is_stair = Bool(False).tag(label="is_stair")
    warmup_steps = Int(0, min=0, max=100).tag(label="warm-up", unit="steps")
    step = Int(60, min=0, max=STEPS - 1).tag(label="marked step")

    def schedules(self) -> dict[str, LearningRateSchedule]:
        """The five schedules of the present settings, by a short name."""
        lr, rate, span = float(self.learning_rate), float(self.decay_rate), self.decay_steps
        decays: dict[str, LearningRateSchedule] = {
            "exponential": ExponentialDecayLR(lr, rate, span, self.is_stair),
            "natural exp": NaturalExpDecayLR(lr, rate, span, self.is_stair),
            "inverse": InverseDecayLR(lr, rate, span, self.is_stair),
            "cosine": CosineDecayLR(0.0, lr, span),
            "polynomial": PolynomialDecayLR(lr, 0.0, span, float(self.power)),
        }
        if not self.warmup_steps:
            return decays
        warm = WarmUpLR(lr, self.warmup_steps)
        return {name: warm.then(decay, at=self.warmup_steps) for name, decay in decays.items()}

    def compute(self) -> None:
        steps = torch.arange(STEPS)
        self.curves = {name: schedule(steps).tolist() for name, schedule in self.schedules().items()}

    def summary(self) -> str:
        shown = ", ".join(f"{name} {rates[self.step]:.3g}" for name, rates in self.curves.items())
        given = f"learning_rate {self.learning_rate:.3g}, decay_rate {self.decay_rate:.3g}"
        return f"Learning rates at step {self.step}, with {given} and decay_steps {self.decay_steps}: {shown}."

    def table(self) -> list[dict[str, Any]]:
        steps = sorted({0, self.step, *range(0, STEPS, 40)})
        return [{"step": k, **{name: float(f"{r[k]:.3g}") for name, r in self.curves.items()}} for k in steps]


# --- Adam with a narrow state


@dataclass(frozen=True)
class AdamStep:
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

    g = held(gradient)
    moment1 = held(g * 0.1)
    moment2 = held(held(g * g) * 0.001)
    tiny = held(torch.tensor(eps))
    correction = held(torch.tensor(math.sqrt(0.001) / 0.1))
    ratio = held(held(moment1 * correction) / held(held(moment2.sqrt()) + tiny))
    return AdamStep(moment2, float(tiny), ratio)


class AdamStateExplorer(Explorer):
    """The size of Adam's first step over the size of the gradient, when state and eps are kept in a narrow format."""

    controls = ("state_format", "eps_exponent", "gradient_exponent")
    state_format = Enum(list(FORMATS), "float16").tag(label="state kept in")
    eps_exponent = Int(-8, min=-12, max=-1).tag(label="eps, 10 to the")
    gradient_exponent = Int(-10, min=-26, max=16).tag(label="gradient, 2 to the")

    def compute(self) -> None:
        self.eps = 10.0**self.eps_exponent
        exponents = torch.arange(-26 * 4, 16 * 4 + 1) / 4
        self.gradients = torch.exp2(exponents)
        self.narrow = first_adam_step(self.gradients, self.eps, FORMATS[self.state_format])
        self.wide = first_adam_step(self.gradients, self.eps, FP32)
        self.marked = int((exponents == self.gradient_exponent).nonzero())

    def row(self, index: int) -> dict[str, Any]:
        """Gradient, stored second moment, and step sizes at one position of the curve."""
        return {
            "gradient": float(f"{self.gradients[index]:.5g}"),
            "v as stored": float(f"{self.narrow.moment2[index]:.5g}"),
            "step, learning rates": float(f"{self.narrow.size[index]:.3g}"),
            "the same in float32": float(f"{self.wide.size[index]:.3g}"),
        }

    def summary(self) -> str:
        gradient, moment2, size, exact = self.row(self.marked).values()
        return (
            f"The gradient is 2^{self.gradient_exponent} = {gradient:g}. In {self.state_format} v is {moment2:g}, "
            f"eps 1e{self.eps_exponent} becomes {self.narrow.eps:.3g}, and the step is {size:g} times the learning "
            f"rate. In float32 the step is {exact:g} times the learning rate."
        )

    def table(self) -> list[dict[str, Any]]:
        return [self.row(i) for i in range(0, len(self.gradients), 8)]


@cache
def _pixels(split: str) -> tuple[Tensor, Tensor]:
    images, labels = digits(split, size=8)
    return images.flatten(1), labels


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
    images, labels = _pixels("train")
    for step in range(steps):
        batch = torch.arange(step * 64, step * 64 + 64) % len(images)
        loss = F.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for moments in optimizer.state.values():
            for moment in moments.values():
                round_to(moment, fmt, out=moment)
    tests, truth = _pixels("test")
    right = (network(tests).argmax(1) == truth).float().mean()
    stored = optimizer.param_groups[0]["eps"]
    return {
        "state": fmt.name,
        "eps": eps,
        "stored eps": stored,
        "last loss": loss.item(),
        "accuracy": float(right),
    }


# --- weight decay

NAMES = ("fc.weight", "fc.bias", "bn.gamma", "bn.beta")
PLACES = ("no groups", "in a group", "in a group with weight_decay 0", "left out of all groups")


def _handed(place: str, name: str, weight: nn.Parameter) -> list[Any]:
    """What the optimizer is given: the parameter with its name, alone or in a group, or a group that lacks it."""
    if place == PLACES[0]:
        return [(name, weight)]
    if place == PLACES[3]:
        return [{"params": [("another.weight", nn.Parameter(torch.ones(1)))]}]
    return [{"params": [(name, weight)]} | ({"weight_decay": 0.0} if place == PLACES[2] else {})]


@lru_cache(maxsize=64)
def decay_curves(
    size: float, rate: float = 0.01, decay: float = 0.1, name: str = NAMES[0], place: str = PLACES[0], steps: int = 200
) -> dict[str, list[float]]:
    """A weight of 1 before each step and after the last, while its gradients alternate, -size and +size.

    Args:
        size:   of the gradients (>= 0).
        rate:   learning rate; `decay` the weight_decay of the optimizer.
        name:   of the parameter; `place`, one of `PLACES`, how the optimizer gets it.
    Returns:  SGD, Adam, AdamWeightDecay -> steps + 1 values.
    """
    curves = {}
    for kind in (SGD, Adam, AdamWeightDecay):
        weight = nn.Parameter(torch.ones(1))
        optimizer = kind(_handed(place, name, weight), rate, weight_decay=decay)
        seen = [1.0]
        for step in range(steps):
            weight.grad = torch.tensor([size if step % 2 else -size])
            optimizer.step()
            seen.append(weight.item())
        curves[kind.__name__] = seen
    return curves


def decayed_weights(size: float, steps: int = 200) -> dict[str, float]:
    """Where a weight of 1 ends when its gradients alternate, with weight decay 0.1 and learning rate 0.01."""
    return {name: seen[-1] for name, seen in decay_curves(size, steps=steps).items()}


class DecayExplorer(Explorer):
    """The weight decay of three optimizers at work on one weight, by its name and by how the optimizer got it.

    After `compute`: `curves`, as `decay_curves` gives them; `reach`, what the optimizer does with this parameter.
    """

    controls = ("parameter", "place", "size", "learning_rate", "weight_decay", "step")
    parameter = Enum(NAMES, NAMES[0]).tag(label="parameter")
    place = Enum(PLACES, PLACES[0]).tag(label="handed over")
    size = Float(0.1, min=1e-4, max=10.0).tag(label="gradient size", scale="log10", step=0.25)
    learning_rate = Float(0.01, min=0.0, max=0.03).tag(label="learning rate", step=0.001)
    weight_decay = Float(0.1, min=0.0, max=0.5).tag(label="weight_decay", step=0.01)
    step = Int(STEPS, min=0, max=STEPS).tag(label="marked step")

    def compute(self) -> None:
        self.curves = decay_curves(self.size, self.learning_rate, self.weight_decay, self.parameter, self.place, STEPS)
        probe = decay_curves(0.0, 0.1, 0.5, self.parameter, self.place, 1)["SGD"][-1]  # only decay can move it
        reached = "weight decay reaches it" if self.weight_decay else "its weight_decay is 0"
        self.reach = reached if probe < 1 else "weight decay does not reach it"
        if self.place == PLACES[3]:
            self.reach = "it is not trained"
        elif not self.learning_rate:
            self.reach = "a learning rate of 0 moves nothing"

    def summary(self) -> str:
        ends = ", ".join(f"{_shortly(seen[self.step])} in {name}" for name, seen in self.curves.items())
        elsewhere = " outside of this group" if self.place == PLACES[2] else ""
        return (
            f"{self.parameter}, {self.place}: {self.reach}. The learning rate is {self.learning_rate:.3g}, "
            f"weight_decay is {self.weight_decay:.3g}{elsewhere}, "
            f"and the gradients are -{self.size:.3g} and +{self.size:.3g} in turn. "
            f"After {counted(self.step, 'step')} a weight of 1 becomes {ends}."
        )

    def table(self) -> list[dict[str, Any]]:
        steps = sorted({self.step, *range(0, STEPS + 1, 40)})
        return [{"step": k, **{name: _shortly(seen[k]) for name, seen in self.curves.items()}} for k in steps]


def _shortly(weight: float) -> str:
    """A weight to two digits after the point; a small one keeps its first digit, or it would look like 0."""
    return f"{weight:.2f}" if abs(weight) >= 0.005 or not weight else f"{weight:.1g}"


# --- the static loss scale, multiplied and divided in two places

MAKERS: dict[str, Any] = {
    "SGD": lambda p, scale, decay: SGD(p, 0.5, weight_decay=decay, loss_scale=scale),
    "Momentum": lambda p, scale, decay: Momentum(p, 0.05, 0.9, decay, scale),
    "Adam": lambda p, scale, decay: Adam(p, 0.01, weight_decay=decay, loss_scale=scale),
}


def train_scaled(kind: str, sens: float, loss_scale: float, weight_decay: float = 0.0, steps: int = 40) -> list[float]:
    """Loss of each step when the backward pass starts from `sens` and the optimizer divides by `loss_scale`.

    This is the pair that a FixedLossScaleManager with drop_overflow_update=False builds.
    """
    network = small_network()
    optimizer = MAKERS[kind](network.parameters(), float(loss_scale), float(weight_decay))
    cell = TrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer, sens=float(sens))
    images, labels = _pixels("train")
    batches = [torch.arange(step * 64, step * 64 + 64) % len(images) for step in range(steps)]
    return torch.stack([cell(images[batch], labels[batch]) for batch in batches]).tolist()


class LossScaleExplorer(Explorer):
    """A static loss scale in two places: the cell multiplies by 2^sens, the optimizer divides by 2^loss_scale."""

    controls = ("optimizer", "sens_exponent", "scale_exponent", "weight_decay")
    optimizer = Enum(list(MAKERS), "SGD").tag(label="optimizer")
    sens_exponent = Int(10, min=0, max=16).tag(label="sens, 2 to the", costly=True)
    scale_exponent = Int(10, min=0, max=16).tag(label="loss_scale, 2 to the", costly=True)
    weight_decay = Float(0.0, min=0.0, max=0.1).tag(label="weight_decay", step=0.01, costly=True)

    def compute(self) -> None:
        sens, scale = 2.0**self.sens_exponent, 2.0**self.scale_exponent
        self.losses = train_scaled(self.optimizer, sens, scale, self.weight_decay)
        self.agreed = train_scaled(self.optimizer, 1.0, 1.0, self.weight_decay)

    def summary(self) -> str:
        return (
            f"{self.stored()} After {len(self.losses)} steps the loss is {told(self.losses[-1])}; with agreeing scales "
            f"it is {told(self.agreed[-1])}. (Guessing gives 2.3.)"
        )

    def stored(self) -> str:
        ratio = 2 ** abs(self.sens_exponent - self.scale_exponent)
        part = f"{ratio} times" if self.sens_exponent > self.scale_exponent else f"1/{ratio} of"
        return (
            f"{self.optimizer}, sens 2^{self.sens_exponent}, loss_scale 2^{self.scale_exponent}: gradients arrive "
            f"at {f'{part} ' if ratio > 1 else ''}their true size."
        )

    def table(self) -> list[dict[str, Any]]:
        steps = range(0, len(self.losses), 5)
        return [{"step": k, "these": told(self.losses[k]), "agreeing": told(self.agreed[k])} for k in steps]


def told(loss: float) -> str:
    """A loss in words that do not depend on the machine: a training thrown off ends anywhere above 2."""
    if not math.isfinite(loss):
        return "inf or NaN"
    return f"{loss:.1f}" if loss < 2 else "above 2"
