"""Lesson 08: four broken trainings to look into."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import digits
from mpkit.diagnose import Report, diagnose
from mpkit.formats import BF16, FP16
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.parts import edges, regions
from mpkit.view.sheet import exponents, log2, names, power_of_two, space
from mpkit.view.words import exponent

FORMATS = {"float16": FP16, "bfloat16": BF16}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# ---- four broken trainings
class Layer(nn.Module):
    """A function as a module, so that the detective can name it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _network(**middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    parts = {"flat": nn.Flatten(), "hidden": nn.Linear(784, 32), "relu": nn.ReLU(), **middle, "out": nn.Linear(32, 10)}
    return nn.Sequential(OrderedDict(parts))


class Case(NamedTuple):
    """A broken training: its network, and a batch whose step was not finite at this loss scale."""

    network: nn.Module
    batch: tuple[Tensor, Tensor]
    scale: float


CASES = ("A", "B", "C", "D")


@cache
def case(name: str) -> Case:
    """One of the four trainings `CASES`."""
    images, labels = (values[:32] for values in digits("train"))
    middle: dict[str, nn.Module] = {}
    if name == "B":
        middle = {"gain": Layer(lambda x: x * 400), "square": Layer(torch.square), "shrink": Layer(lambda x: x * 1e-5)}
    elif name == "C":
        images = images.clone()
        images[7, 0, 14, 14] = math.nan  # a dead pixel
    elif name == "D":
        middle = {"entropy": Layer(torch.log)}
    return Case(_network(**middle), (images, labels), 2.0 ** (24 if name in ("A", "D") else 12))


@cache
def investigated(name: str, power: int, dtype: str, level: str = "O2") -> Report:
    """The diagnosis of a case at a loss scale of 2**power."""
    found = case(name)
    return diagnose(found.network, found.batch, F.cross_entropy, level=level, scale=2.0**power, dtype=DTYPES[dtype])


@cache
def flow(name: str, level: str, dtype: str, power: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what passes each part of a case's network at a level on the way forward, gradients of the loss times 2**power).

    The gradients are those of the parts, in the order in which they flow back, and then of the parameters.
    """
    found = case(name)
    network = auto_mixed_precision(copy.deepcopy(found.network), level, DTYPES[dtype])
    heard = {"batch": found.batch[0]}
    for part, module in network.named_children():
        if not isinstance(module, nn.Flatten):
            module.register_forward_hook(lambda _m, _x, output, part=part: heard.__setitem__(part, output))
    heard["loss"] = F.cross_entropy(network(found.batch[0]), found.batch[1])
    wanted = {part: heard[part] for part in [*heard][:0:-1]} | dict(network.named_parameters())
    slopes = torch.autograd.grad(heard["loss"], [*wanted.values()], torch.tensor(2.0**power))
    return heard, dict(zip(wanted, slopes))


class Stop(NamedTuple):
    """What passes one part of a network: values of `dtype`, the largest finite magnitude, how many are not finite."""

    name: str
    backward: bool
    dtype: str
    largest: float
    bad: int
    many: int


def walked(name: str, power: int, dtype: str) -> list[Stop]:
    """The case's batch through its network at O2 and back from a loss scale of 2**power, part by part."""
    stops = []
    for backward, values in enumerate(flow(name, "O2", dtype, power)):
        for part, x in values.items():
            finite = x.detach().float()[x.isfinite()].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
            lost, kind = x.numel() - finite.numel(), str(x.dtype).removeprefix("torch.")
            if "." not in part:  # a parameter has no place on the way
                stops.append(Stop(part, bool(backward), kind, largest, lost, x.numel()))
    return stops


def reach(values: Tensor) -> tuple[float, float]:
    """The smallest magnitude that is not zero, and the largest; NaN or inf where the values are."""
    size = values.detach().abs()
    low = size[(size > 0) & size.isfinite()]
    return (float(low.min()) if low.numel() else 2.0**-126), float(size.max())


@view(
    training=Choice({name: name for name in CASES}, "training"),
    scale=Range(-8, 30, label="loss scale 2^", costly=True),
    dtype=Choice({name: name for name in DTYPES}, "format"),
    step=(1, 20),
)
def detective(see: Sheet, training="A", scale=24, dtype="float16", step=20) -> None:
    """One of four broken trainings, diagnosed at a loss scale and in a format of the reader's choice.

    Numbers: `report`; `stops`, the batch on its way forward and back; `born`, the number of the first of them with a
    value that is not finite, or None; `bars`, (label, smallest, largest, is it a gradient), as computed in float32.
    """
    report, stops = investigated(training, scale, dtype), walked(training, scale, dtype)
    outputs, slopes = flow(training, "O0", dtype, scale)
    bars = [(n, *reach(x), False) for n, x in outputs.items() if n not in ("batch", "relu", "loss")]
    bars += [(n, *reach(g), True) for n, g in slopes.items() if n.endswith("weight")]
    born = next((i for i, stop in enumerate(stops) if stop.bad), None)

    tall = 110 + 32 * len(bars)
    see.grid(220 + tall, 960, rows=(220, tall), least=680)
    see.play("step", "step", len(stops), every=700, first=1)
    _way(see, f"training {training}, {dtype}: {report.verdict.replace('_', ' ')}", stops, born)
    _bars(see, bars, FORMATS[dtype], report, scale)

    where = f" The inf or NaN sits in {report.module}." if report.module else ""
    if report.operation:
        where = f" The first inf or NaN was born in {report.module}, {report.phase} pass, operation {report.operation}."
    works = (
        "No scale works" if not report.max_scale else f"The largest scale that works is {exponent(report.max_scale)}"
    )
    walk = f"All {len(stops)} steps forward and back are finite"
    if born is not None:
        what = f"gradient of {stops[born].name}" if stops[born].backward else stops[born].name
        walk = f"Step {born + 1} of {len(stops)}, {what}, is the first with a value that is not finite"
    elif report.verdict != "healthy":
        walk += "; the gradient of a parameter is not (no bar shows it)"
    see.say(
        f"Training {training} at scale 2^{scale} in {dtype}: {report.verdict}.{where} {works}. {walk}.",
        report=report, stops=stops, born=born, bars=bars,
    )  # fmt: skip
    see.rows = [
        {"values": _called(n, gradient), "smallest": f"{a:.2g}", "largest": f"{b:.3g}",
         "fits": bool(b <= FORMATS[dtype].max)}
        for n, a, b, gradient in bars
    ]  # fmt: skip


def _called(name: str, gradient: bool) -> str:
    return f"gradient of {name} × scale" if gradient else f"output of {name}"


def _way(see: Sheet, title: str, stops: list[Stop], born: int | None) -> None:
    """Forward along the upper row, back along the lower one; each part shows what passed it once it is reached."""
    last, parts = len(stops) - 1, [stop.name for stop in stops if not stop.backward]
    panel = see.panel(title=title, x=space(-0.75, len(parts)), y=space(-0.1, 2.1), bare=True, pad=[28, 6, 6, 6])
    for y, name in ((1.6, "forward"), (0.45, "gradients\n× scale")):
        panel.text(name, -0.72, y, anchor="start", color="muted")
    for i, stop in enumerate(stops):
        x, y = parts.index(stop.name), 0.05 if stop.backward else 1.2
        box = ([x + 0.04], [y], [x + 0.86], [y + 0.8])
        panel.boxes(*box, fill="paper", edge="muted", width=1.2)
        role = "overflow" if stop.bad else "normal"
        panel.boxes(*box, fill=f"{role}/0.2", edge=role, width=1.5, only=(i, last))
        panel.boxes(*box, edge="own", width=4, only=(i, i))
        panel.text(stop.name, x + 0.45, y + 0.62, weight="bold")
        told = f"{stop.bad} of {stop.many}\ninf or NaN" if stop.bad else f"{stop.dtype}\n≤ {stop.largest:.3g}"
        panel.text(told, x + 0.45, y + 0.28, size=11, color="overflow" if stop.bad else "ink", only=(i, last))
        if i == born:
            panel.text("born here", x + 0.45, y + 0.92, weight="bold", color="overflow", only=(i, last))
        if i == len(parts) - 1:
            panel.arrow((x + 0.45, y), (x + 0.45, 0.86))
        elif i < last:
            ends = (x + 0.04, x - 0.14) if stop.backward else (x + 0.86, x + 1.03)
            panel.arrow((ends[0], y + 0.4), (ends[1], y + 0.4))


def _bars(see: Sheet, bars: Any, fmt: Any, report: Report, scale: int) -> None:
    """The ranges of the values inside the format, and the grip of the scale on the first gradient's."""
    low, high = -44, 44
    y = names([_called(n, gradient) for n, _, _, gradient in bars], down=True) | {"hi": -1.2}
    x = log2("magnitude, as computed in float32", low, high, 8)
    panel = see.panel(1, title="ranges of the values, as computed in float32", x=x, y=y)
    regions(panel, "x", *edges(fmt))
    for row, (name, small, large, gradient) in enumerate(bars):
        broken = "NaN" if math.isnan(large) else "inf" if math.isinf(large) else ""
        word = broken or ("too large" if large > fmt.max else "")
        color = "overflow" if word else "own" if gradient else "reference"
        ends = exponents(np.nan_to_num([small, large], nan=np.inf, posinf=np.inf), low, high)
        look = {"dash": "--"} if gradient else {}
        if broken == "NaN":  # it has no place on the axis
            panel.text("NaN", high - 1, row, anchor="end", color="overflow", halo=True)
            continue
        panel.boxes([ends[0]], [row - 0.2], [ends[1]], [row + 0.2], fill=f"{color}/0.4", edge=color, width=1.5, **look)
        if report.operation and not gradient and name == report.module:
            panel.text("born here", ends[0], row, beside=-8, color="overflow", halo=True)
        if word:
            panel.text(word, high - 1, row - 0.36, anchor="end", color="overflow", halo=True)
    row = next(i for i, bar in enumerate(bars) if bar[3])
    top = float(exponents([bars[row][2]], low, high)[0]) if math.isfinite(bars[row][2]) else float(scale)
    grip = {"base": top - scale, "cross": row, "note": f"scale {power_of_two(scale)}"}
    panel.handle("x", "scale", scale, -8, 30, "loss scale, 2 to the", **grip)
