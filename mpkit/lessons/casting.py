"""Lesson 06: a network at a level, operation by operation."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.casting import LEVELS, PRESETS, auto_mixed_precision, cast_like, ledger, to_float
from mpkit.casting.ledger import Operation
from mpkit.casting.operators import EXACT
from mpkit.data import digits
from mpkit.formats import get_format
from mpkit.networks import LeNet5, Network, ResidualBlock, TransformerBlock
from mpkit.view import Choice, Range, Sheet, counted, exponents, log2, names, space, view

LOGITS = torch.arange(0, -33.0, -1.0)
SHOWN_ANYWAY = ("relu", "max_pool2d")
FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn", "e4m7")


class SoftmaxThenLog(nn.Module):
    """The logarithm of a softmax, from the probabilities."""

    def forward(self, z: Tensor) -> Tensor:
        """(N,) logits -> (N,) their log-probabilities."""
        return torch.log(torch.softmax(z, 0))


NETWORKS: dict[str, Any] = {
    "MLP": Network, "LeNet5": LeNet5, "residual block": lambda: ResidualBlock(1, 8, stride=2),
    "transformer block": lambda: TransformerBlock(28, 4),  # the rows of an image are its tokens
    "softmax, then log": SoftmaxThenLog, "log_softmax": lambda: nn.LogSoftmax(0),
}  # fmt: skip


class Walk(NamedTuple):
    """A network seen operation by operation at one level.

    `steps` are rows of the ledger, the first one with what was lost at the network's border; `errors` the root mean
    square errors of their results against float64, relative to the result; then layer names, bytes kept, and the casts
    of parameters, of activations, and of these the ones at the network's border.
    """

    steps: tuple[Operation, ...]
    errors: tuple[float, ...]
    layers: tuple[str, ...]
    kept_bytes: int
    casts: tuple[int, int, int]


def _built(kind: str, exponent: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    network = NETWORKS[kind]()
    images = digits("test")[0][:8]
    x = LOGITS if "softmax" in kind else images.squeeze(1) if "transformer" in kind else images
    return network, x * 2.0**exponent


@lru_cache(maxsize=64)
def _exact(kind: str, exponent: int) -> list[Tensor]:
    """What every operation gives in float64."""
    network, x = _built(kind, exponent)
    with ledger(network.double(), keep=True) as book:
        network(x.double())
    return book.results


@lru_cache(maxsize=64)
def walk(kind: str, level: str, fmt: str, kept: int = 0, exponent: int = 0) -> Walk:
    """Run one forward pass of a network in an emulated format and compare every operation with float64.

    Args:
        kind:     a key of NETWORKS.
        level:    a MindSpore level or a preset of another framework.
        fmt:      name of the low format.
        kept:     number of the layer that `to_float` puts into float32, from 1; 0: none.
        exponent: the inputs are multiplied by 2**exponent.
    Raises:  ValueError if the network has fewer layers than `kept`.
    """
    network, x = _built(kind, exponent)
    layers = tuple(n for n, m in network.named_modules() if any(True for _ in m.parameters(recurse=False)))
    if not 0 <= kept <= len(layers):
        raise ValueError(f"{kind} has {counted(len(layers), 'layer')}, got layer {kept}; first set float32 layer to 0")
    (cast_like if level in PRESETS else auto_mixed_precision)(network, level, get_format(fmt))
    if kept:
        to_float(network.get_submodule(layers[kept - 1]), torch.float32)
    with ledger(network, count=True, keep=True) as book:
        network(x)
    every = zip(book.rows, map(relative_error, book.results, _exact(kind, exponent)))
    steps, errors = zip(*((r, e) for r, e in every if r.operation not in EXACT or r.operation in SHOWN_ANYWAY))
    border = [cast for cast in book.casts if not cast.operation]  # the network's input counts for the first operation
    lost = {name: sum(getattr(x, name) or 0 for x in (steps[0], *border)) for name in ("flushed", "overflowed")}
    weights = sum(c.tensor != "activation" for c in book.casts)
    entered = Counter(c.module for c in border if c.tensor == "activation")
    casts = weights, len(book.casts) - weights, entered.pop("", 0)
    # what a layer of another precision takes counts for its first operation
    first, *rest = (replace(step, casts=step.casts + entered.pop(step.module, 0)) for step in steps)
    return Walk((replace(first, **lost), *rest), errors, layers, book.measured_bytes, casts)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`; inf where a value is not finite."""
    if not bool(got.isfinite().all()):
        return math.inf
    difference = (got.double() - want.double()).square().mean().sqrt()
    return float(difference / want.double().square().mean().sqrt().clamp(min=1e-300))


# ---- a network at a level
LOWEST, HIGHEST = -30, 3  # powers of two on the error axis
EVERY = [*LEVELS, "apex_O1", "apex_O2", "keras_mixed_float16", "torch_autocast"]


@view(
    network=Choice({n: n for n in NETWORKS}, "network"),
    level=Choice({n: n for n in EVERY}, "level"),
    fmt=Choice({n: n for n in FORMATS}, "format"),
    kept=Range(0, 6, label="float32 layer (0: none)", costly=True),
    exponent=Range(-24, 18, label="inputs times 2 to the", costly=True),
)
def levels(see: Sheet, network="MLP", level="O2", fmt="fp16", kept=0, exponent=0) -> None:
    """A network at a level: what each operation computed in, what was cast, and what that cost in accuracy.

    Numbers: `walk` and `plain`, that at O0 (a `Walk` each).
    """
    seen, plain = walk(network, level, fmt, kept, exponent), walk(network, "O0", fmt, 0, exponent)
    see.grid(444, 960, rows=(1, 3), least=680)
    _operations(see, seen.steps, fmt)
    _errors(see, seen, plain)
    low = sum(step.compute != "float32" for step in seen.steps)
    flushed, over = (sum(getattr(s, name) or 0 for s in seen.steps) for name in ("flushed", "overflowed"))
    moved = f", layer {seen.layers[kept - 1]} in float32" if kept else ""
    weights, values, border = seen.casts
    ends = f", of these {border} at the network's input and output" if border else ""
    memory = f" Kept for the backward pass: {seen.kept_bytes / 1024:.0f} KiB, in float32 {plain.kept_bytes / 1024:.0f}."
    told = (
        f"{network} at {level} in {fmt}{moved}: {low} of {len(seen.steps)} operations compute in {fmt}. Parameters are "
        f"cast {counted(weights, 'time')}, activations {counted(values, 'time')}{ends}. {counted(flushed, 'value')} "
        f"became zero and {over} overflowed.{memory if plain.kept_bytes else ''}"  # none: nothing is trained
    )
    error = "not finite" if math.isinf(seen.errors[-1]) else f"{seen.errors[-1]:.2g}"
    see.say(f"{told} The relative error of the result is {error}.", stored=told, walk=seen, plain=plain)


def _operations(see: Sheet, steps: tuple[Operation, ...], fmt: str) -> None:
    """Above: the operations in order, by what they compute in."""
    n = len(steps)
    above = see.panel(title="what each operation computes in", x=space(-0.6, n - 0.4), y=space(0, 1))
    for wide, role, label in ((True, "reference", "computes in float32"), (False, "own", f"computes in {fmt}")):
        at = np.array([i for i, s in enumerate(steps) if (s.compute == "float32") == wide])
        if len(at):
            look: dict[str, Any] = {"fill": f"{role}/0.2", "edge": role, "hatch": not wide or None, "label": label}
            look["text"] = ["fp32" if wide else steps[i].compute for i in at]
            look["names"] = [_label(steps[i]) for i in at]
            above.boxes(at - 0.42, [0.34] * len(at), at + 0.42, [0.94] * len(at), **look)
    words = [(counted(s.casts, "cast") if n <= 12 else str(s.casts)) if s.casts else "" for s in steps]
    above.text(words, np.arange(n), [0.14] * n, color="muted")


def _errors(see: Sheet, seen: Walk, plain: Walk) -> None:
    """Below: error against float64, and lost values."""
    steps = seen.steps
    x = names([_label(step) for step in steps], bare=False, slant=40) | {"lo": -0.6, "hi": len(steps) - 0.4}
    y = log2("relative error", LOWEST - 1, HIGHEST + 1, 6)
    y["ticks"] = [[LOWEST, "0"], *(t for t in y["ticks"] if LOWEST < t[0] < HIGHEST), [HIGHEST, "not finite"]]
    below = see.panel(1, title="how far each result is from float64", x=x, y=y)
    own, wide = (exponents(w.errors, LOWEST, HIGHEST) for w in (seen, plain))
    below.line(wide, color="reference", dash="--", glyph="s", size=3, label="float32 (O0)")
    below.line(own, color="own", glyph="o", label="at the level", ghost=True)
    lost = ("flushed to zero", "zero", "v", LOWEST + 1.5), ("overflowed", "overflow", "x", HIGHEST - 2.4)
    for label, color, glyph, height in lost:  # the first word names the column of the ledger
        if found := {i: n for i, s in enumerate(steps) if (n := getattr(s, label.split()[0]))}:
            told = [f"{n} of the values" for n in found.values()]
            below.points([height] * len(found), [*found], color, glyph=glyph, size=5, label=label, told=told)


def _label(step: Operation) -> str:
    """The last name on its module's path, with the number that follows, and what is done there."""
    name = re.sub(r".*\.(?=[a-z])|dense_relu_sequential\.", "", step.module).replace("downsample", "down")
    operation = re.sub("^(scaled_dot_product|layer|batch)_", "", step.operation)
    return f"{name}: {operation}" if name else operation
