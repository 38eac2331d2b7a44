"""Lesson 05: one training step phase by phase, and the order of clipping, unscaling and accumulation."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import digits
from mpkit.formats import dtype_name
from mpkit.scalers import DynamicLossScaler, all_finite
from mpkit.view import Range, Sheet, view
from mpkit.view.sheet import DASHES, GLYPHS, Panel, exponents, log2, space


# ---- numbers
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


@dataclass(frozen=True)
class Walk:
    """A step seen phase by phase: was the update skipped, the largest change of a weight, weights lost."""

    phases: tuple[Phase, ...]
    skipped: bool
    change: float

    @property
    def lost(self) -> int:
        """How many weights are inf or NaN after the step."""
        return self.phases[6].bad

    @property
    def ill(self) -> list[bool]:
        """Whether values that are not finite are seen in each phase."""
        return [bool(re.search(r"\b(inf|nan)\b|not finite", phase.seen)) for phase in self.phases]


@cache
def one_step(exponent: int, bad: bool, late: bool = False) -> Walk:
    """A step at O2 in float16 at a scale of 2^exponent on 64 digits, one of them with an inf if `bad`.

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
    sizes = [f"{dtype_name(t.dtype)}, largest {_largest([t])}" for t in (inside[0], flowing)]
    first = f"largest weight {_largest(before)} in {dtype_name(before[0].dtype)}"
    rows: tuple[tuple[str, str, str, Sequence[Tensor]], ...] = (
        ("keep weights in float32", "parameters", first, before),
        ("forward in float16", "network(x)", f"first layer gives {sizes[0]}", inside),
        ("loss in float32", "loss_fn(out, y)", f"loss {loss.item():.4g} in {dtype_name(loss.dtype)}", [loss]),
        ("scaled backward pass", "scale(loss).backward()", f"in {sizes[1]}", [flowing]),
        ("gradients in float32", "p.grad", f"largest {_largest(grads)} in {dtype_name(grads[0].dtype)}", grads),
        ("divide by the scale", "unscale(grads)", f"largest {_largest(true)}", true),
        (*gate, parameters),
        ("adjust the scale", "adjust(finite)", f"next scale {float(scaler.scale_value):.0f}", ()),
    )
    return Walk(tuple(Phase(n, code, seen, *_spoilt(t)) for n, code, seen, t in rows), not updated, change)


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


def _largest(tensors: Sequence[Tensor]) -> str:
    return f"{float(torch.stack([t.detach().abs().float().max() for t in tensors]).max()):.3g}"  # NaN wins


# ---- one step in eight boxes
PLACES = [(i + 0.04, 1.3) if i < 4 else (7 - i + 0.04, 0.05) for i in range(8)]


@view(
    phase=(1, 8),
    exponent=Range(0, 30, label="loss scale, 2 to the"),
    bad="put an inf into the batch",
    late="wrong order: update, then check",
)
def phases(see: Sheet, phase=1, exponent=16, bad=False, late=False) -> None:
    """One training step, phase by phase: a batch travels through eight boxes; an inf dies at the gate, or does not.

    Numbers: `walk` (a `Walk`).
    """
    walk = one_step(exponent, bad, late)
    see.grid(440, 960, least=720)
    see.play("phase", "phase", 8, every=900, first=1)
    panel = see.panel(title="one training step", x=space(0, 4), y=space(0, 2.14), bare=True)
    ill = [bad, *walk.ill[1:7], False]
    for i, (step, (x, y)) in enumerate(zip(walk.phases, PLACES)):
        box = ([x], [y], [x + 0.88], [y + 0.8])
        panel.boxes(*box, fill="reference/0.1", edge="reference", width=1.5, radius=5)
        if ill[i]:
            panel.boxes(*box, fill="overflow/0.22", edge="overflow", width=1.5, radius=5, only=(i, 7))
        panel.boxes(*box, edge="own", width=4, radius=5, only=(i, i))
        head = {"anchor": "start", "valign": "top"}
        panel.text(_wrapped(f"{i + 1} {step.name}"), x + 0.04, y + 0.77, weight="bold", size=11, **head)
        panel.text(step.code, x + 0.04, y + 0.61, color="muted", **head)
        until = {"only": (0, 5)} if i == 0 and walk.lost else {}  # then they are other weights
        panel.text(_wrapped(step.seen), x + 0.04, y + 0.47, **head, **until)
    for i, ((x, y), (to, down)) in enumerate(pairwise(PLACES)):
        if x == to:  # from the upper row into the lower one
            ends = (x + 0.44, y - 0.01), (x + 0.44, down + 0.81)
        else:
            out = 0.885 if to > x else -0.005
            ends = (x + out, y + 0.4), (to + 0.88 - out, down + 0.4)
        panel.arrow(*ends, "reference", width=2)
        if ill[i]:
            panel.arrow(*ends, "overflow", width=2.6, only=(i + 1, 7))
    _gate(panel, walk)
    _traveller(panel, walk, bad, ill)
    end = "the update is skipped" if walk.skipped else f"the weights move by up to {walk.change:.3g}"
    if walk.lost:
        end = f"the check comes too late: {walk.lost} of {walk.phases[6].count} weights are not finite"
    told = [_told(p, i) for i, p in enumerate(walk.phases)]
    done = "skipped" if walk.skipped else "applied"
    late_words = ", and weights are lost: the check came too late" if walk.lost else ""
    names = [p.name for p in walk.phases]
    stored = f"Phase {phase} of 8, {names[phase - 1]}. In this step the update is {done}{late_words}."
    see.say(
        f"Phase {{at}} of 8, {{told}}. In this step {end}.", stored=stored, at=np.arange(1, 9), told=told, walk=walk
    )
    see.rows = [{"phase": i, "name": p.name, "code": p.code, "seen": p.seen} for i, p in enumerate(walk.phases, 1)]


def _told(phase: Phase, at: int) -> str:
    many = phase.bad and phase.count > 1 and at < 6  # of one value the number itself tells it
    return f"{phase.name}: {phase.seen}" + (f", {phase.bad} of {phase.count} values not finite" if many else "")


def _gate(panel: Panel, walk: Walk) -> None:
    """From the seventh phase back to the weights: a bar across the way that is closed, open, or comes too late."""
    shut, role = walk.skipped, "overflow" if walk.skipped or walk.lost else "normal"
    words = {"overflow": "shut: the weights stay as they were", "normal": "open: the weights move"}[role]
    if walk.lost:
        words = f"too late: {walk.lost} of {walk.phases[6].count} weights are not finite"
        panel.boxes([0.04], [1.3], [0.92], [2.1], fill="overflow/0.22", edge="overflow", radius=5, only=(6, 7))
        look: dict[str, Any] = {"anchor": "start", "valign": "top", "color": "overflow", "only": (6, 7)}
        panel.text(f"{walk.lost} of {walk.phases[6].count}\nnot finite", 0.08, 1.77, **look)
    panel.text("the way to the weights", 1.62, 1.07, color="muted", anchor="start", only=(0, 5))
    panel.line([0.86, 1.075, 1.075], [1.4, 1.4, 0.6], "reference", width=2)
    panel.arrow((0.6, 1.07), (0.6, 1.29), "reference", width=2)
    if not shut:
        panel.line([0.86, 1.075, 1.075], [1.4, 1.4, 0.6], role, width=2.6, only=(6, 7))
        panel.arrow((0.6, 1.07), (0.6, 1.29), role, width=2.6, only=(6, 7))
    bar = ([0.99, 1.16], [1.2, 1.2]) if shut else ([1.14, 1.14], [1.2, 1.37])  # across the way, or beside it
    panel.line(*bar, role, width=6, only=(6, 7))
    if shut:
        panel.points([1.075], [1.2], "overflow", glyph="x", size=9, width=3, only=(6, 7))
    panel.text(words, 1.62, 1.07, color=role, anchor="start", weight="bold", only=(6, 7))


def _traveller(panel: Panel, walk: Walk, bad: bool, ill: list[bool]) -> None:
    """The ring that is the batch, with what becomes of its values beside it."""
    x, y = ([place[axis] + 0.1 for place in PLACES] for axis in (0, 1))
    told = [f"{p.bad} of {p.count}\nnot finite" if p.bad and p.count > 1 else "" for p in walk.phases]
    told = [words or ("not finite" if p.bad else "all finite") for words, p in zip(told, walk.phases)]
    told[0] = "the batch,\nwith an inf" if bad else "the batch"
    told[6:] = ["not finite" if walk.ill[6] else "all finite", "the answer"]
    colors = ["overflow" if spoilt else "own" for spoilt in ill]
    panel.text(told, x, y, color=colors, anchor="start", dx=15, show="at", weight="bold")
    panel.points(y, x, ["own", "overflow"], hue=np.array(ill, np.uint8), show="at", size=8, glide=True)


def _wrapped(sentence: str, width: int = 24) -> str:
    return "\n".join(textwrap.wrap(sentence, width))


# ---- what each order hands to the optimizer
ORDERS = ("unscale, clip", "clip, unscale", "unscale each micro-batch")


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


@view(
    exponent=Range(0, 20, label="loss scale, 2 to the"),
    max_norm=Range(2.0**-6, 4.0, 0.5, "clip to the norm", log=2),
    parts=Range(1, 8, label="micro-batches"),
)
def orders(see: Sheet, exponent=10, max_norm=0.25, parts=4) -> None:
    """What reaches the optimizer when clipping and unscaling change places, over all scales.

    Numbers: `norms` (order -> 21 norms, one for each scale 2^0 to 2^20), `cosines` with the right one at this scale.
    """
    micro, low, high = micro_gradients(parts), -28, 6
    norms = {o: [float(handed_over(micro, 2.0**e, max_norm, o).norm()) for e in range(21)] for o in ORDERS}
    right = clipped(micro.mean(0), max_norm)
    now = {o: handed_over(micro, 2.0**exponent, max_norm, o) for o in ORDERS}
    cosines = {o: float(F.cosine_similarity(g, right, dim=0)) for o, g in now.items()}
    see.grid(380)
    x, y = log2("loss scale", 0, 20, 4), log2("norm that the optimizer sees", low, high, 4)
    panel = see.panel(title="what each order hands to the optimizer", x=x, y=y)
    asked = math.log2(max_norm)
    panel.rule("y", asked, "reference", dash=":")
    panel.text("the norm asked for", 0, asked, anchor="start", dx=20, dy=-16, color="reference", halo=True)
    for (name, values), color, dash, glyph in zip(norms.items(), ("normal", "overflow", "zero"), DASHES, GLYPHS):
        look = {"dash": dash, "glyph": glyph, "every": 2, "label": name, "tag": True}
        panel.line(exponents(values, low, high), np.arange(21), color, **look)
    panel.handle("x", "exponent", exponent, 0, 20, "loss scale, 2 to the")
    panel.handle("y", "max_norm", asked, -6, 2, "clip to the norm, 2 to the", log2=True, step=0.5, cross=19.4)
    seen = [f"{norms[o][exponent]:.3g}" for o in ORDERS]
    see.say(
        f"The scale is 2^{exponent}, with {parts} micro-batch{'es' if parts > 1 else ''} and clipping to the norm "
        f"{max_norm:.3g}. The optimizer gets a gradient of norm {seen[0]} in the right order, {seen[1]} when clipping "
        f"comes first, and {seen[2]} when each micro-batch is unscaled. The last one has a cosine of "
        f"{cosines[ORDERS[2]]:.2f} with the right one.",
        norms=norms, cosines=cosines,
    )  # fmt: skip
    see.rows = [
        {"order": o, "norm": seen[k], "cosine with the right one": f"{cosines[o]:.2f}"} for k, o in enumerate(ORDERS)
    ]
