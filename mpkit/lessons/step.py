"""Lesson 05: one training step phase by phase, and the order of clipping, unscaling and accumulation."""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import digits
from mpkit.formats import dtype_name
from mpkit.scalers import DynamicLossScaler, all_finite
from mpkit.view import DIFFERENT, Panel, Range, Sheet, exponents, log2, names, short, view


# ---- numbers
class Phase(NamedTuple):
    """One phase of a step: what is done, what is seen there; the largest magnitude of what travels on, its dtype, and
    how many of its `many` values are not finite.
    """

    name: str
    seen: str
    largest: float
    dtype: str
    bad: int
    many: int


class Walk(NamedTuple):
    """A step seen phase by phase: was the update skipped, the largest change of a weight, weights not finite after."""

    phases: list[Phase]
    skipped: bool
    change: float
    lost: int


def _phase(name: str, seen: str, tensors: list[Tensor]) -> Phase:
    every, dtype = torch.cat([t.detach().float().flatten() for t in tensors]), dtype_name(tensors[0].dtype)
    largest = float(every.abs().max())  # NaN wins
    bad = int((~every.isfinite()).sum())
    ill = f", {bad} of {every.numel()} values not finite" if bad and every.numel() > 1 else ""
    return Phase(name, seen.format(largest=short(largest), dtype=dtype) + ill, largest, dtype, bad, every.numel())


@cache
def one_step(exponent: int, bad: bool, late: bool = False) -> Walk:
    """A step at O2 in float16 at a scale of 2^exponent on 64 digits, one of them with an inf if `bad`.

    An update that comes before the check, `late`, is never skipped.
    """
    network, images, labels = _small()
    auto_mixed_precision(network, "O2")
    if bad:
        images[0, 0, 0, 0] = torch.inf
    optimizer, parameters = torch.optim.SGD(network.parameters(), 0.1), list(network.parameters())
    scaler, inside = DynamicLossScaler(2.0**exponent, 2, 50), list[Tensor]()
    before = [p.detach().clone() for p in parameters]
    for layer in (network[1], network[3]):
        layer.register_forward_hook(lambda *call: inside.append(call[2]))
    loss = nn.functional.cross_entropy(network(images), labels)
    for output in inside:
        output.retain_grad()
    scaler.scale(loss).backward()
    flowing, grads = ([t.grad for t in some if t.grad is not None] for some in (inside, parameters))
    finite = all_finite(true := scaler.unscale(grads))
    for p, grad in zip(parameters, true):
        p.grad = grad
    if updated := bool(finite) or late:
        optimizer.step()
    moved = [p.detach() - old for p, old in zip(parameters, before)]
    scaler.adjust(finite)
    gate = "update, then check" if late else "update if all are finite"
    decided = "finite, updated" if finite else "not finite, yet updated" if late else "not finite, skipped"
    seen = [
        _phase("keep weights in float32", "largest weight {largest} in {dtype}", before),
        _phase("forward in float16", "the layers give {dtype}, largest {largest}", inside),
        _phase("loss in float32", "loss {largest} in {dtype}", [loss]),
        _phase("scaled backward pass", "in {dtype}, largest {largest}", flowing),
        _phase("gradients in float32", "largest {largest} in {dtype}", grads),
        _phase("divide by the scale", "largest {largest}", true),
        _phase(gate, decided, moved),
        _phase("adjust the scale", f"next scale 2^{math.log2(scaler.scale_value):g}", [scaler.scale_value]),
    ]
    return Walk(seen, not updated, seen[6].largest, sum(int((~p.isfinite()).sum()) for p in parameters))


def _small() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A perceptron 64-32-10 with fixed weights, and the first 64 digits, 8x8 pixels each."""
    torch.manual_seed(0)
    images, labels = digits("train", 8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return network, images[:64].clone(), labels[:64]


# ---- one step in eight phases
LOW, HIGH = -28, 40  # powers of two of the axis; inf and NaN lie at its top, what is 0 at its foot
PLACES = ("1 weights", "2 forward", "3 loss", "4 backward", "5 gradients", "6 divided", "7 change", "8 next scale")


@view(
    phase=(1, 8),
    exponent=Range(0, 30, label="loss scale, 2 to the"),
    bad="put an inf into the batch",
    late="wrong order: update, then check",
)
def phases(see: Sheet, phase=8, exponent=16, bad=False, late=False) -> None:
    """One training step, phase by phase: the largest value on its way; an inf dies at the gate, or does not.

    Numbers: `walk` (a `Walk`).
    """
    walk = one_step(exponent, bad, late)
    see.grid(420, 900, least=560)
    see.play("phase", "phase", 8, every=900, first=1)
    y = log2("largest magnitude", LOW - 1, HIGH + 2, 8)
    y["ticks"] = [[LOW, "0"], *(t for t in y["ticks"] if -24 <= t[0] <= 32), [HIGH, "inf, NaN"]]
    panel = see.panel(title="the largest value on its way through one training step", x=names(PLACES, bare=False), y=y)
    panel.span("y", 16, HIGH - 2, "overflow/0.14", "too large\nfor float16", anchor="end", dy=20)
    panel.span("y", LOW - 1, -25, "zero/0.14", "zero in float16")
    bad_at = [i for i, p in enumerate(walk.phases[:7]) if p.bad and not (i == 6 and walk.skipped)]
    at = exponents(np.nan_to_num([p.largest for p in walk.phases], nan=math.inf), LOW, HIGH)
    at[7] = math.nan  # the scale is no value on its way: words tell it
    panel.line(at, color="reference", width=1.6, show="upto")
    kinds = ["inf or NaN" if i in bad_at else p.dtype for i, p in enumerate(walk.phases)]
    for kind, role, glyph in (("float16", "own", "o"), ("float32", "reference", "s"), ("inf or NaN", "overflow", "x")):
        if here := [i for i in range(8) if kinds[i] == kind]:
            look: dict[str, Any] = {"glyph": glyph, "size": 6, "width": 3 if role == "overflow" else 1, "label": kind}
            told = [walk.phases[i].seen for i in here]
            panel.points(at[here], here, role, since=here, show="upto", told=told, **look)
    for i, p in enumerate(walk.phases):
        words = "" if i in bad_at[1:] else f"2^{math.log2(p.largest):g}\nis the scale" if i == 7 else short(p.largest)
        words = f"{p.bad} of {p.many}\nnot finite" if i in bad_at[:1] and p.many > 1 else words
        only = (0, 5) if i == 0 and walk.lost else (i, 7)  # then they are other weights
        falls = 0 < i < 7 and at[i - 1] - at[i] > 6 and at[i] > LOW + 4  # the line comes down where words would stand
        rises = i < 6 and at[i + 1] - at[i] > 7  # or leaves there
        dy, color = (24, "overflow") if i in bad_at else (18 if falls or rises else -18, "ink")
        # right of the line that rises to an inf or falls to 0
        by = 4 if i in bad_at else 9 if at[i] <= LOW < at[i - 1] else 0
        panel.text(words, i, at[i] if i < 7 else 4.0, halo=True, only=only, dy=dy, color=color, beside=by)
    _gate(panel, walk)
    roles = np.array([i in bad_at for i in range(8)], np.uint8)
    panel.points(at, color=["own", "overflow"], hue=roles, show="at", size=9, glide=True, fill="none", width=3)
    end = "the update is skipped" if walk.skipped else f"the weights move by up to {walk.change:.3g}"
    if walk.lost:
        end = f"the check comes too late: {walk.lost} of {walk.phases[0].many} weights are not finite"
    done = "skipped" if walk.skipped else "applied"
    see.say(
        f"Phase {{at}} of 8, {{told}}. In this step {end}.", at=np.arange(1, 9), walk=walk,
        told=[f"{p.name}: {p.seen}" for p in walk.phases],
        stored=f"Phase {phase} of 8, {walk.phases[phase - 1].name}. In this step the update is {done}.",
    )  # fmt: skip


def _gate(panel: Panel, walk: Walk) -> None:
    """Before the update: a bar that is open, shut, or comes too late; then the weights of the first phase are lost."""
    words = "shut: the weights\nstay as they were" if walk.skipped else "open: the weights\nmove"
    words = f"too late: {walk.lost} weights\nare not finite" if walk.lost else words
    role = "overflow" if walk.skipped or walk.lost else "normal"
    if walk.lost:
        panel.points([HIGH], [0], "overflow", glyph="x", size=7, width=3, only=(6, 7), quiet=True)
    panel.rule("x", 5.5, "muted", dash=":")
    panel.rule("x", 5.5, role, width=5 if walk.skipped else 2, dash=None if walk.skipped else ":", only=(6, 7))
    panel.text(words, 5.5, LOW + 8, beside=-10, color=role, weight="bold", halo=True, only=(6, 7))


# ---- what each order hands to the optimizer
ORDERS = ("unscale, clip", "clip, unscale", "unscale each micro-batch")


@cache
def micro_gradients(parts: int) -> Tensor:
    """(parts, parameters) float32: the gradient of each of `parts` micro-batches of 64 digits."""
    network, *whole = _small()
    losses = (nn.functional.cross_entropy(network(x), y) for x, y in zip(*(t.tensor_split(parts) for t in whole)))
    every = (torch.autograd.grad(loss, [*network.parameters()]) for loss in losses)
    return torch.stack([torch.cat([g.flatten() for g in grads]) for grads in every])


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
    return clipped(total, max_norm) / scale if order == "clip, unscale" else clipped(total / scale, max_norm)


@view(
    exponent=Range(0, 20, label="loss scale, 2 to the"),
    max_norm=Range(2.0**-6, 4.0, 0.5, "clip to the norm", log=2),
    parts=Range(1, 8, label="micro-batches"),
)
def orders(see: Sheet, exponent=10, max_norm=0.25, parts=4) -> None:
    """What reaches the optimizer when clipping and unscaling change places, over all scales.

    Numbers: `norms` (order -> 21 norms, one for each scale 2^0 to 2^20), `cosines` with the right one at this scale.
    """
    micro = micro_gradients(parts)
    right = clipped(micro.mean(0), max_norm)
    handed = {o: torch.stack([handed_over(micro, 2.0**e, max_norm, o) for e in range(21)]) for o in ORDERS}
    norms = {order: grads.norm(dim=1).tolist() for order, grads in handed.items()}
    cosines = {o: float(nn.functional.cosine_similarity(g[exponent], right, dim=0)) for o, g in handed.items()}
    see.grid(380, least=560)
    x, y = log2("loss scale", 0, 20, 4), log2("norm that the optimizer sees", -28, 6, 4)
    panel = see.panel(title="what each order hands to the optimizer (its cosine)", x=x, y=y)
    asked = math.log2(max_norm)
    panel.rule("y", asked, "reference", dash=":")
    for (name, values), look, color in zip(norms.items(), DIFFERENT, ("normal", "overflow", "zero")):
        named = f"{name} ({cosines[name]:.2f})"
        panel.line(exponents(values, -28, 6), label=named, tag=True, every=2, **look | {"color": color})
    panel.handle("x", "exponent", exponent, 0, 20, "loss scale, 2 to the")
    panel.handle("y", "max_norm", asked, -6, 2, "clip to the norm, 2 to the", log2=True, step=0.5, cross=19.4)
    panel.text("asked for", 19.4, asked, anchor="end", dy=-14, color="own", halo=True)
    seen = [f"{norms[o][exponent]:.3g}" for o in ORDERS]
    see.say(
        f"Scale 2^{exponent}, {parts} micro-batch{'es' * (parts > 1)}, clipping to the norm {max_norm:.3g}. The "
        f"optimizer gets {seen[0]} in the right order, {seen[1]} when clipping comes first, and {seen[2]} when each "
        f"part is unscaled. The last one has a cosine of {cosines[ORDERS[2]]:.2f} with the right one.",
        norms=norms, cosines=cosines,
    )  # fmt: skip
