"""Why a loss is scaled, what happens in one step, and in which order: three models on real gradients of real digits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Bool, Enum, Float, Int

from mpkit.casting import auto_mixed_precision
from mpkit.data import digits
from mpkit.explorers.base import Explorer
from mpkit.explorers.start import computed_in
from mpkit.formats import FloatFormat, dtype_name, get_format
from mpkit.networks import Network
from mpkit.replay.percent import percent
from mpkit.scalers import DynamicLossScaler, all_finite
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

MOMENTS = (0, 60, 240, 720)
KINDS = ("activations", "weights")
FORMATS = ("fp16", "bf16", "e5m2", "e4m3")
EXPONENTS = range(-8, 31)


@cache
def gradients_of_digits() -> dict[tuple[int, str], np.ndarray]:
    """Magnitudes of the non-zero gradients of a training on the digits, float32, ascending, at four moments.

    The perceptron 784-128-128-10, batch 64, SGD with rate 0.1; "activations" are the gradients that flow back between
    the layers, "weights" those of the parameters. Trained in float64, so that processors differ by 1e-13 and no value
    changes its bin; the gradients are rounded to float32 at the end. A few seconds, once per process.
    """
    torch.manual_seed(0)
    network = Network(hidden=128).double()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=True)
    images, labels = digits("train")
    images = images.double()
    draw = torch.Generator().manual_seed(0)
    found: dict[tuple[int, str], np.ndarray] = {}
    for step in range(MOMENTS[-1] + 1):
        if step in MOMENTS:
            found |= {(step, kind): v for kind, v in zip(KINDS, _gradients(network, images[:64], labels[:64]))}
        batch = torch.randint(len(images), (64,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
    return found


def _gradients(network: Network, images: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(activation gradients, weight gradients) of one batch."""
    between = []
    x = network.flatten(images)
    for layer in network.dense_relu_sequential:
        x = layer(x)
        x.retain_grad()
        between.append(x)
    network.zero_grad()
    F.cross_entropy(x, labels).backward()
    tensors = ([t.grad for t in between if t.grad is not None], [p.grad for p in network.parameters()])
    first, second = (torch.cat([t.flatten() for t in group if t is not None]).abs() for group in tensors)
    return _ascending(first), _ascending(second)


def _ascending(magnitudes: Tensor) -> np.ndarray:
    return np.sort(magnitudes[magnitudes > 0].float().numpy())


@dataclass(frozen=True)
class Limits:
    """Where a format loses values, exactly.

    lost:     the largest magnitude that rounds to 0.
    normal:   the smallest magnitude that rounds to a normal number.
    overflow: the smallest magnitude that does not fit.
    """

    lost: float
    normal: float
    overflow: float


@cache
def limits_of(fmt: FloatFormat) -> Limits:
    """Half the smallest subnormal, half a gap below the smallest normal, half a gap above the largest number."""
    largest = float(np.finfo(np.float32).max)
    edge = np.float32(min(fmt.overflow_edge, largest))
    overflows = fmt.edge_overflows and fmt.overflow_edge <= largest
    overflow = float(edge if overflows else np.nextafter(edge, np.float32(np.inf)))
    return Limits(fmt.zero_up_to, fmt.min_normal - fmt.zero_up_to, overflow)


@dataclass(frozen=True)
class Shares:
    """What becomes of gradient values at one scale (shares of the non-zero values, 0 to 1)."""

    lost: float
    subnormal: float
    normal: float
    overflow: float


def shares_at(magnitudes: np.ndarray, scale: float, fmt: FloatFormat) -> Shares:
    """What becomes of ascending magnitudes, multiplied by a power of two and rounded to `fmt`."""
    limits = limits_of(fmt)
    below = np.searchsorted(magnitudes, limits.lost / scale, side="right")
    subnormal = max(below, np.searchsorted(magnitudes, limits.normal / scale, side="left"))
    fitting = max(subnormal, np.searchsorted(magnitudes, limits.overflow / scale, side="left"))
    n = len(magnitudes)
    return Shares(*(float(count / n) for count in (below, subnormal - below, fitting - subnormal, n - fitting)))


def recommended_exponent(magnitudes: np.ndarray, fmt: FloatFormat) -> int:
    """The largest power of two that leaves the largest gradient one power of two of room below overflow.

    0, no scaling, where less than one value in a million is flushed or subnormal without.
    """
    unscaled = shares_at(magnitudes, 1.0, fmt)
    if unscaled.lost + unscaled.subnormal < 1e-6:
        return 0
    return math.floor(math.log2(limits_of(fmt).overflow) - math.log2(magnitudes[-1])) - 1


class UnderflowExplorer(Explorer):
    """A histogram of real gradients against the range of a format, moved by a static loss scale."""

    controls = ("moment", "kind", "format", "exponent")
    actions = {"Recommended": "take"}
    moment = Enum(list(MOMENTS), 720).tag(label="after training steps")
    kind = Enum(list(KINDS), "activations").tag(label="gradients of")
    format = Enum(list(FORMATS), "fp16").tag(label="format")
    exponent = Int(0, min=EXPONENTS[0], max=EXPONENTS[-1]).tag(label="static scale, 2 to the")
    first_bin = -150  # below every float32

    def compute(self) -> None:
        """Shares at this scale, their course over all scales; `unscaled`: shares by power of two without a scale."""
        values, fmt = gradients_of_digits()[self.moment, self.kind], get_format(self.format)
        self.fmt, self.limits = fmt, limits_of(fmt)
        self.shares = shares_at(values, 2.0**self.exponent, fmt)
        self.course = [shares_at(values, 2.0**e, fmt) for e in EXPONENTS]
        self.best = recommended_exponent(values, fmt)
        self.best_shares = shares_at(values, 2.0**self.best, fmt)
        self.unscaled = np.bincount(np.frexp(values)[1] - 1 - self.first_bin) / len(values)

    @property
    def threshold(self) -> int:
        """The largest power of two that becomes zero at this scale, as an exponent."""
        return math.floor(math.log2(self.limits.lost)) - self.exponent

    def take(self) -> None:
        """Set the recommended scale, as far as the slider goes."""
        self.set(exponent=min(max(self.best, EXPONENTS[0]), EXPONENTS[-1]))

    def summary(self) -> str:
        s = self.shares
        return (
            f"After {self.moment} steps, gradients of {self.kind} in {self.format} at a static scale of "
            f"2^{self.exponent}: {percent(s.lost)} flushed to zero, {percent(s.subnormal)} subnormal, "
            f"{percent(s.overflow)} overflow. Gradients up to the threshold 2^{self.threshold} become zero. The scale "
            f"recommended for this histogram is 2^{self.best}: with it, {percent(self.best_shares.lost)} is flushed to "
            "zero."
        )

    def table(self) -> list[dict[str, Any]]:
        rows = ((f"2^{self.exponent}", self.shares), (f"2^{self.best} (recommended)", self.best_shares))
        return [{"scale": scale, **{key: percent(value) for key, value in vars(s).items()}} for scale, s in rows]


@dataclass(frozen=True)
class Phase:
    """One phase of a step: what is done, the line that does it, the number seen there, and what travels on from there.

    `bad` of the `count` values that travel on are not finite.
    """

    name: str
    code: str
    seen: str
    bad: int = 0
    count: int = 0


class StepExplorer(Explorer):
    """One training step at O2 in float16, phase by phase, on 64 digits; `late` puts the check behind the update."""

    controls = ("phase", "exponent", "bad", "late")
    phase = Int(1, min=1, max=8).tag(label="phase")
    exponent = Int(16, min=0, max=30).tag(label="loss scale, 2 to the")
    bad = Bool(False).tag(label="put an inf into the batch")
    late = Bool(False).tag(label="wrong order: update, then check")

    def compute(self) -> None:
        """Run the step once per setting; the phase only says where to look."""
        if (key := (self.exponent, self.bad, self.late)) != getattr(self, "_ran", None):
            self.phases, self.skipped, self.change = one_step(*key)
            self.ill = [bool(re.search(r"\b(inf|nan)\b|not finite", phase.seen)) for phase in self.phases]
            self._ran = key

    @property
    def lost(self) -> int:
        """How many weights are inf or NaN after the step."""
        return self.phases[6].bad

    def summary(self) -> str:
        now = self.phases[self.phase - 1]
        end = "the update is skipped" if self.skipped else f"the weights move by up to {self.change:.3g}"
        if self.lost:
            end = f"the check comes too late: {self.lost} of {self.phases[6].count} weights are not finite"
        many = now.bad and now.count > 1 and self.phase < 7  # of one value the number itself tells it
        spoilt = f", {now.bad} of {now.count} values not finite" if many else ""
        return f"Phase {self.phase} of 8, {now.name}: {now.seen}{spoilt}. In this step {end}."

    def stored(self) -> str:
        end = "skipped" if self.skipped else "applied"
        late = ", and weights are lost: the check came too late" if self.lost else ""
        return f"Phase {self.phase} of 8, {self.phases[self.phase - 1].name}. In this step the update is {end}{late}."

    def table(self) -> list[dict[str, Any]]:
        return [{"phase": i, "name": p.name, "code": p.code, "seen": p.seen} for i, p in enumerate(self.phases, 1)]


def one_step(exponent: int, bad: bool, late: bool = False) -> tuple[list[Phase], bool, float]:
    """(the eight phases, was the update skipped, largest change of a weight) of a step at a scale of 2^exponent.

    An update that comes before the check, `late`, is never skipped.
    """
    network, images, labels = _small()
    auto_mixed_precision(network, "O2")
    if bad:
        images = images.clone()
        images[0, 0, 0, 0] = torch.inf
    optimizer, parameters = torch.optim.SGD(network.parameters(), 0.1), list(network.parameters())
    scaler = DynamicLossScaler(2.0**exponent, 2, 50)
    before = [p.detach().clone() for p in parameters]
    loss, inside, flowing = _there_and_back(network, images, labels, scaler)
    grads = [p.grad for p in parameters if p.grad is not None]
    true = scaler.unscale(grads)
    finite = all_finite(true)
    updated = bool(finite) or late
    if updated:
        for p, grad in zip(parameters, true):
            p.grad = grad
        optimizer.step()
    change = max(float((p.detach() - old).abs().max()) for p, old in zip(parameters, before))
    scaler.adjust(finite)
    gate = ("update if all are finite", "if all_finite: step()", "finite, updated" if finite else "not finite, skipped")
    if late:
        gate = ("update, then check", "step(); all_finite", "finite, updated" if finite else "not finite, yet updated")
    sizes = [f"{_kind(tensor)}, largest {_largest([tensor])}" for tensor in (inside[0], flowing)]
    rows: tuple[tuple[str, str, str, Sequence[Tensor]], ...] = (
        ("keep weights in float32", "parameters", f"largest weight {_largest(before)} in {_kind(before[0])}", before),
        ("forward in float16", "network(x)", f"first layer gives {sizes[0]}", inside),
        ("loss in float32", "loss_fn(out, y)", f"loss {loss.item():.4g} in {_kind(loss)}", [loss]),
        ("scaled backward pass", "scale(loss).backward()", f"in {sizes[1]}", [flowing]),
        ("gradients in float32", "p.grad", f"largest {_largest(grads)} in {_kind(grads[0])}", grads),
        ("divide by the scale", "unscale(grads)", f"largest {_largest(true)}", true),
        (*gate, parameters),
        ("adjust the scale", "adjust(finite)", f"next scale {float(scaler.scale_value):.0f}", ()),
    )
    phases = [Phase(name, code, seen, *_spoilt(tensors)) for name, code, seen, tensors in rows]
    return phases, not updated, change


def _there_and_back(
    network: nn.Sequential, images: Tensor, labels: Tensor, scaler: DynamicLossScaler
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Both passes; -> (the loss, [what the first layer gave], the scaled gradient of that)."""
    inside: list[Tensor] = []
    handle = network[1].register_forward_hook(lambda *call: inside.append(call[2]))
    loss = F.cross_entropy(network(images), labels)
    handle.remove()
    inside[0].retain_grad()
    scaler.scale(loss).backward()
    flowing = inside[0].grad
    assert flowing is not None
    return loss, inside, flowing


def _spoilt(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """(values that are not finite, values)."""
    return sum(int((~t.detach().isfinite()).sum()) for t in tensors), sum(t.numel() for t in tensors)


def _small() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A perceptron 64-32-10 with fixed weights, and the first 64 digits, 8x8 pixels each."""
    torch.manual_seed(0)
    images, labels = digits("train", 8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return network, images[:64], labels[:64]


def _largest(tensors: list[Tensor]) -> str:
    return f"{float(torch.stack([t.detach().abs().float().max() for t in tensors]).max()):.3g}"  # NaN wins


def _kind(tensor: Tensor) -> str:
    return dtype_name(tensor.dtype)


ORDERS = ("unscale, clip", "clip, unscale", "unscale each micro-batch")


class OrderExplorer(Explorer):
    """What reaches the optimizer when clipping and unscaling change places, over all scales."""

    controls = ("exponent", "max_norm", "parts")
    exponent = Int(10, min=0, max=20).tag(label="loss scale, 2 to the")
    max_norm = Float(0.25, min=2.0**-6, max=4.0).tag(label="clip to the norm", scale="log2", step=0.5)
    parts = Int(4, min=1, max=8).tag(label="micro-batches")

    def compute(self) -> None:
        """The gradient that each order hands to the optimizer, at every scale."""
        micro = micro_gradients(self.parts)
        self.right = clipped(micro.mean(0), self.max_norm)
        self.norms = {
            order: [float(handed_over(micro, 2.0**e, self.max_norm, order).norm()) for e in range(21)]
            for order in ORDERS
        }
        now = {order: handed_over(micro, 2.0**self.exponent, self.max_norm, order) for order in ORDERS}
        self.cosines = {order: float(F.cosine_similarity(g, self.right, dim=0)) for order, g in now.items()}

    def summary(self) -> str:
        right, early, each = (self.norms[order][self.exponent] for order in ORDERS)
        parts = f"{self.parts} micro-batch{'es' if self.parts > 1 else ''}"
        return (
            f"The scale is 2^{self.exponent}, with {parts} and clipping to the norm {self.max_norm:.3g}. The optimizer "
            f"gets a gradient of norm {right:.3g} in the right order, {early:.3g} when clipping comes first, and "
            f"{each:.3g} when each micro-batch is unscaled. The last one has a cosine of {self.cosines[ORDERS[2]]:.2f} "
            "with the right one."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"order": o, "norm": f"{self.norms[o][self.exponent]:.3g}", "cosine with the right one": f"{c:.2f}"}
            for o, c in self.cosines.items()
        ]


@cache
def micro_gradients(parts: int) -> Tensor:
    """(parts, parameters) float32: the gradient of each of `parts` micro-batches of 64 digits."""
    network, images, labels = _small()
    rows = []
    for x, y in zip(images.tensor_split(parts), labels.tensor_split(parts)):
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        rows.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    return torch.stack(rows)


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """`gradient`, shortened to `max_norm` if it is longer."""
    return gradient * min(1.0, max_norm / float(gradient.norm()))


def handed_over(micro: Tensor, scale: float, max_norm: float, order: str) -> Tensor:
    """The gradient that the optimizer sees when micro-batch gradients are summed at `scale` in one of `ORDERS`."""
    parts = len(micro)
    if order == "unscale each micro-batch":
        total = torch.zeros_like(micro[0])
        for g in micro:
            total = (total + g * scale / parts) / scale  # what was there is divided again
        return clipped(total, max_norm)
    total = (micro * scale / parts).sum(0)
    if order == "clip, unscale":
        return clipped(total, max_norm) / scale
    return clipped(total / scale, max_norm)


def trained_with(
    level: str, weight: float, scale: float, steps: int = 120, rate: float = 0.1
) -> dict[str, float | str | int]:
    """Train on the digits with the loss multiplied by a small `weight` (and the rate divided by it): one table row.

    In exact arithmetic the weight changes nothing. In float16 it makes the gradients small.
    """
    torch.manual_seed(0)
    network = auto_mixed_precision(Network(), level, computed_in("float16", torch.device("cpu")))
    optimizer = torch.optim.SGD(network.parameters(), rate / weight, fused=True)
    cell = TrainOneStepWithLossScaleCell(WithLossCell(network, WeightedLoss(weight)), optimizer, torch.tensor(scale))
    images, labels = digits("train")
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=draw)
        outcome = cell(images[batch], labels[batch])
    test, truth = digits("test")
    with torch.no_grad():
        right = (network(test).argmax(1) == truth).float().mean().item()
    return {
        "level": level,
        "scale": f"2^{math.log2(scale):g}",
        "loss": round(float(outcome.loss) / weight, 2),
        "accuracy": round(right, 2),
    }


class WeightedLoss(nn.Module):
    """Cross-entropy times a weight, as one term of a larger loss has it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) * self.weight
