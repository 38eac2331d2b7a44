"""Lesson 03: real gradients against the range of a format, with and without a static loss scale."""

import math
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.data import digits
from mpkit.formats import FloatFormat, get_format
from mpkit.networks import Network
from mpkit.rounding import round_to
from mpkit.view import Choice, Sheet, linear, log2, regions, tenths, view, zones

MOMENTS = (0, 60, 240, 720)
KINDS = ("activations", "weights")
FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn")
SCALES = np.arange(-8, 31)
FIRST, LAST = -46, 28  # exponents on screen; the outermost bars hold all beyond
LOST = ("lost", "becomes zero", "zero", "o", None), ("overflow", "overflow", "overflow", "s", "--")  # and how drawn
TALLEST = 25.1  # percent: the highest bar of all histograms; axes and rings stand above it


# ---- numbers
@cache
def gradients_of_digits() -> dict[tuple[int, str], np.ndarray]:
    """Magnitudes of the non-zero gradients of a training on the digits, at four moments.

    The perceptron 784-128-128-10, batch 64, SGD with rate 0.1; "activations" are the gradients that flow back between
    the layers, "weights" those of the parameters. Trained in float64, rounded to float32 at the end. Processors draw
    weights and digits with other last bits: up to 240 steps shares differ by less than 0.001 %, after 720 by 0.3 %.
    A few seconds, once per process.
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
        nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
    return found


def _gradients(network: Network, images: Tensor, labels: Tensor) -> list[np.ndarray]:
    """[activation gradients, weight gradients] of one batch, magnitudes that are not zero."""
    between = [*accumulate(network.dense_relu_sequential, lambda x, layer: layer(x), initial=network.flatten(images))]
    parameters = list(network.parameters())
    found = torch.autograd.grad(nn.functional.cross_entropy(between[-1], labels), [*between[1:], *parameters])
    parts = found[: -len(parameters)], found[-len(parameters) :]
    every = (torch.cat([g.flatten() for g in part]).abs().float().double() for part in parts)
    return [values[values > 0].numpy() for values in every]


def shares(magnitudes: np.ndarray, fmt: FloatFormat) -> dict[str, np.ndarray]:
    """`lost subnormal overflow`: (scales,) the shares of magnitudes to which this happens, scaled and rounded."""
    found = []
    for exponent in SCALES:
        rounded = round_to(torch.from_numpy(np.ldexp(magnitudes, exponent)), fmt, overflow="inf")
        lost, small, over = rounded == 0, rounded < fmt.min_normal, rounded.isinf()
        found.append([mask.double().mean().item() for mask in (lost, small & ~lost, over)])
    return dict(zip(("lost", "subnormal", "overflow"), np.array(found).T))


def heights(magnitudes: np.ndarray) -> np.ndarray:
    """(scales, powers of two on screen) percent of the magnitudes at each scale; the ends hold all that lies beyond."""
    bins = np.clip(np.frexp(magnitudes)[1] - 1 + SCALES[:, None] - FIRST, 0, LAST - FIRST - 1)
    return np.stack([100 * np.bincount(row, minlength=LAST - FIRST) / len(row) for row in bins])


@cache
def seen(moment: int, kind: str, fmt: str) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """`shares`, `heights`, and the highest safe exponent: it leaves the largest one power of two below overflow."""
    values, form = gradients_of_digits()[moment, kind], get_format(fmt)
    best = math.floor(math.log2(form.overflow_edge) - math.log2(values.max())) - 1
    return shares(values, form), heights(values), best


# ---- the histogram that is dragged
@view(
    moment=Choice({m: str(m) for m in MOMENTS}, "after training steps"),
    kind=Choice({"activations": "activations (between layers)", "weights": "weights"}, "gradients of"),
    fmt=Choice({f: f for f in FORMATS}, "format"),
    exponent=(int(SCALES[0]), int(SCALES[-1])),
)
def underflow(see: Sheet, moment=720, kind="activations", fmt="fp16", exponent=0) -> None:
    """A histogram of real gradients against the range of a format, moved by a static loss scale.

    Numbers: `course`, the `shares` at all scales 2^-8 to 2^30; `best`, the highest safe exponent. The histogram at
    every scale is sent at once, so that the scale is dragged without asking the kernel.
    """
    course, bars, best = seen(moment, kind, fmt)
    first, last, form = int(SCALES[0]), int(SCALES[-1]), get_format(fmt)
    ends = np.log2([form.zero_up_to, form.min_normal - form.zero_up_to, form.overflow_edge])
    see.grid(400, 960, cols=(1.6, 1))
    see.play("exponent", "loss scale, 2 to the", len(SCALES), every=150, first=first)
    see.buttons["Highest safe scale"] = {"exponent": int(np.clip(best, first, last))}
    x, y = log2("magnitude", FIRST, LAST, 12), linear("share of the values, %", 0, 1.6 * TALLEST, 5)
    left = see.panel(title=f"gradients times the scale, in {fmt}", x=x, y=y)
    regions(left, "x", *map(float, ends))
    at = np.arange(FIRST, LAST) + 0.5
    left.bars(bars, at, zones=zones(ends), width=1, label="share, %", quiet=True)
    largest = math.log2(gradients_of_digits()[moment, kind].max()) + SCALES  # too rare for a bar that one would see
    left.points(np.zeros(len(SCALES)), largest, "ink", glyph="|", size=12, width=2, show="at", label="the largest")
    grip: dict[str, Any] = {"base": at[np.argmax(bars[-first])], "cross": 1.08 * TALLEST, "note": "drag"}
    left.handle("x", "exponent", exponent, first, last, "loss scale, 2 to the", **grip)

    x, y = log2("loss scale", -8, 30, 8), linear("share, %", -3, 103, 5)
    right = see.panel(0, 1, title="lost at each scale", x=x, y=y)
    for name, label, color, glyph, dash in LOST:
        right.line(100 * course[name], SCALES, color, label=label, every=4, glyph=glyph, dash=dash)
        right.points(100 * course[name], SCALES, "own", show="at", size=5, label="at this scale")
    if best <= last:
        right.rule("x", best, "normal", dash=":", width=2)
        right.text("highest safe", best, 96, color="normal", halo=True, beside=-6 if best > 16 else 6)
    told: dict[str, Any] = {name: tenths(share) for name, share in course.items()}
    see.say(
        f"After {moment} steps, gradients of {kind} in {fmt} at a loss scale of {{power:2^}}: {{lost}} % become "
        "zero, {subnormal} % subnormal, {overflow} % overflow. Gradients up to {threshold:2^} become zero. The "
        f"highest safe scale for this histogram is {f'2^{best}' if best <= last else f'above 2^{last}'}.",
        power=SCALES, threshold=ends[0] - SCALES, course=course, best=best, **told,
    )  # fmt: skip
