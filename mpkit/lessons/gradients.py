"""Lesson 03: real gradients against the range of a format, with and without a static loss scale."""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.data import digits
from mpkit.formats import FloatFormat, get_format
from mpkit.networks import Network
from mpkit.view import Choice, Sheet, view
from mpkit.view.parts import regions, tenths, zones
from mpkit.view.sheet import linear, log2, power_of_two

MOMENTS = (0, 60, 240, 720)
KINDS = ("activations", "weights")
FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn")
SCALES = np.arange(-8, 31)
FIRST, LAST = -46, 26  # exponents on screen; the outermost bars hold all beyond
TALLEST = 25.1  # percent: the highest bar of all histograms; axes and rings stand above it


# ---- numbers
@cache
def gradients_of_digits() -> dict[tuple[int, str], np.ndarray]:
    """Magnitudes of the non-zero gradients of a training on the digits, ascending, at four moments.

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


def _gradients(network: Network, images: Tensor, labels: Tensor) -> list[np.ndarray]:
    """[activation gradients, weight gradients] of one batch, magnitudes that are not zero, ascending."""
    between = list(
        accumulate(network.dense_relu_sequential, lambda x, layer: layer(x), initial=network.flatten(images))
    )
    parameters = list(network.parameters())
    found = torch.autograd.grad(F.cross_entropy(between[-1], labels), [*between[1:], *parameters])
    parts = found[: -len(parameters)], found[-len(parameters) :]
    every = (torch.cat([g.flatten() for g in part]).abs().float().double() for part in parts)
    return [np.sort(values[values > 0].numpy()) for values in every]


class Shares(NamedTuple):
    """What becomes of gradient values at one scale (shares of the non-zero values, 0 to 1)."""

    lost: float
    subnormal: float
    normal: float
    overflow: float


def ends_of(fmt: FloatFormat) -> tuple[float, float, float]:
    """The ends of what rounds to 0, to a subnormal, and to any number of the format."""
    return fmt.zero_up_to, fmt.min_normal - fmt.zero_up_to, fmt.overflow_edge


def shares_at(magnitudes: np.ndarray, scale: float, fmt: FloatFormat) -> Shares:
    """What becomes of ascending magnitudes, multiplied by a power of two and rounded to `fmt`."""
    ties: tuple[Any, ...] = "right", "left", "left" if fmt.edge_overflows else "right"  # 0 and 2^n are even
    below = [np.searchsorted(magnitudes, end / scale, side) for end, side in zip(ends_of(fmt), ties)]
    parts = np.diff([0, *np.maximum.accumulate(below), len(magnitudes)])
    return Shares(*(parts / len(magnitudes)).tolist())


def recommended_exponent(magnitudes: np.ndarray, fmt: FloatFormat) -> int:
    """The largest power of two that leaves the largest gradient one power of two of room below overflow.

    0, no scaling, where less than one value in a million is flushed or subnormal without.
    """
    unscaled = shares_at(magnitudes, 1.0, fmt)
    if unscaled.lost + unscaled.subnormal < 1e-6:
        return 0
    return math.floor(math.log2(fmt.overflow_edge) - math.log2(magnitudes[-1])) - 1


def heights(values: np.ndarray, exponent: int) -> np.ndarray:
    """Percent of the magnitudes times 2^exponent by power of two on screen, the ends with all that lies beyond."""
    bins = np.clip(np.frexp(values)[1] - 1 + exponent - FIRST, 0, LAST - FIRST - 1)
    return 100 * np.bincount(bins, minlength=LAST - FIRST) / len(values)


# ---- the histogram that is dragged
@cache
def _picture(moment: int, kind: str, fmt: str) -> tuple[list[Shares], np.ndarray, int]:
    """(shares, percent in each power of two) at every scale, and the recommended exponent."""
    values, form = gradients_of_digits()[moment, kind], get_format(fmt)
    course = [shares_at(values, 2.0**e, form) for e in SCALES]
    return course, np.stack([heights(values, int(e)) for e in SCALES]), recommended_exponent(values, form)


@view(
    moment=Choice({m: str(m) for m in MOMENTS}, "after training steps"),
    kind=Choice({"activations": "activations (between layers)", "weights": "weights"}, "gradients of"),
    fmt=Choice({f: f for f in FORMATS}, "format"),
    exponent=(int(SCALES[0]), int(SCALES[-1])),
)
def underflow(see: Sheet, moment=720, kind="activations", fmt="fp16", exponent=0) -> None:
    """A histogram of real gradients against the range of a format, moved by a static loss scale.

    Numbers: `shares` at the scale, `course` at all scales 2^-8 to 2^30, `best`, the highest safe exponent. The
    histogram at every scale is sent at once, so that the scale is dragged without asking the kernel.
    """
    course, bars, best = _picture(moment, kind, fmt)
    ends = np.log2(ends_of(get_format(fmt)))
    see.grid(480, 960, rows=(1.7, 1), cols=(1.6, 1))
    see.play("exponent", "loss scale, 2 to the", len(SCALES), every=150, first=int(SCALES[0]))
    see.buttons["Highest safe scale"] = {"exponent": int(np.clip(best, SCALES[0], SCALES[-1]))}
    range_ = (int(SCALES[0]), int(SCALES[-1]), "loss scale, 2 to the")
    x, y = log2("magnitude", FIRST, LAST, 12), linear("share of the values, %", 0, 1.6 * TALLEST, 5)
    left = see.panel(title=f"gradients times the scale, in {fmt}", x=x, y=y)
    regions(left, "x", *map(float, ends))
    look = {"width": 1, "label": "share, %", "quiet": True}
    left.bars(bars, np.arange(FIRST, LAST) + 0.5, zones=zones(ends), **look)
    peak = int(np.argmax(bars[-SCALES[0]])) + FIRST + 0.5
    largest = math.log2(gradients_of_digits()[moment, kind][-1])  # too rare for a bar that one would see
    left.points(
        np.zeros(len(SCALES)), largest + SCALES, "ink", glyph="|", size=12, width=2, show="at", label="the largest"
    )
    left.handle("x", "exponent", exponent, *range_, base=peak, cross=1.08 * TALLEST, note="drag")

    top, where = 1.5 * TALLEST, log2("magnitude of the gradient itself", FIRST, LAST, 12)
    window = see.panel(
        1, 0, title="what the format holds at this scale", x=where, y=linear("share, %", 0, 1.25 * top, 2)
    )
    lost, over = float(ends[0]), float(ends[2])
    told = [f"{power_of_two(round(lost - e, 1))} to {power_of_two(round(over - e, 1))}" for e in SCALES]
    frame: dict[str, Any] = {"width": over - lost, "shift": -SCALES, "fill": "normal/0.2", "edge": "normal"}
    window.bars([top], [(lost + over) / 2], label="what the format holds", told=told, **frame)
    window.bars(
        bars[-SCALES[0]], np.arange(FIRST, LAST) + 0.5, width=1, fill="reference/0.6", label="without the scale, %"
    )
    words: dict[str, Any] = {"frame": True, "anchor": "end", "valign": "top", "color": "zero"}
    window.text("zero up to 2^{}", 0.99, 1, values=[lost - SCALES], **words)
    grip: dict[str, Any] = {"id": "threshold", "slope": -1, "note": "0 left of here", "cross": 1.22 * TALLEST}
    window.handle("x", "exponent", exponent, *range_[:2], "threshold below which all is 0", base=lost, **grip)

    x, y = log2("loss scale", -8, 30, 8), linear("share, %", -3, 103, 5)
    right = see.panel(0, 1, rowspan=2, title="lost at each scale", x=x, y=y)
    gone, over_all = ([100 * getattr(s, name) for s in course] for name in ("lost", "overflow"))
    right.line(gone, SCALES, "zero", label="becomes zero", every=4, glyph="o")
    right.line(over_all, SCALES, "overflow", dash="--", label="overflow", every=4, glyph="s")
    right.rule("x", best, "normal", dash=":", width=2)
    right.text("highest safe", best, 96, color="normal", halo=True, beside=-6 if best > 16 else 6)
    for values in (gone, over_all):
        right.points(values, SCALES, "own", show="at", size=5, label="at this scale")
    columns = {n: tenths([getattr(s, n) for s in course]) for n in ("lost", "subnormal", "overflow")}
    now = course[exponent - int(SCALES[0])]
    see.say(
        f"After {moment} steps, gradients of {kind} in {fmt} at a loss scale of {{power:2^}}: {{lost}} % become "
        "zero, {subnormal} % subnormal, {overflow} % overflow. Gradients up to {threshold:2^} become zero. The "
        f"highest safe scale for this histogram is 2^{best}.",
        power=SCALES, threshold=lost - SCALES, shares=now, course=course, best=best, **columns,  # type: ignore[arg-type]
    )  # fmt: skip
