"""Lesson 08: four broken trainings to look into."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import digits
from mpkit.diagnose import Report, diagnose
from mpkit.formats import BF16, FP16, FloatFormat, dtype_name
from mpkit.view import Choice, Range, Sheet, edges, exponents, log2, names, regions, space, view
from mpkit.view.words import exponent, power_of_two, short

FORMATS = {"float16": FP16, "bfloat16": BF16}
LOSS = nn.functional.cross_entropy


# ---- four broken trainings
class Layer(nn.Module):
    """A function as a module, so that the detective can name it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Case(NamedTuple):
    """A broken training: its network, and a batch whose step was not finite at this loss scale."""

    network: nn.Module
    batch: tuple[Tensor, Tensor]
    scale: float


@cache
def case(name: str) -> Case:
    """One of the four trainings, A to D."""
    images, labels = (values[:32].clone() for values in digits("train"))
    if name == "C":
        images[7, 0, 14, 14] = math.nan  # a dead pixel
    gained = {"gain": Layer(lambda x: x * 400), "square": Layer(torch.square), "shrink": Layer(lambda x: x * 1e-5)}
    middle: dict[str, Any] = {"B": gained, "D": {"entropy": Layer(torch.log)}}.get(name, {})
    torch.manual_seed(0)
    parts = {"flat": nn.Flatten(), "hidden": nn.Linear(784, 32), "relu": nn.ReLU(), **middle, "out": nn.Linear(32, 10)}
    return Case(nn.Sequential(OrderedDict(parts)), (images, labels), 2.0 ** (24 if name in ("A", "D") else 12))


@cache
def investigated(name: str, power: int, dtype: str) -> Report:
    """The diagnosis of a case at O2 and a loss scale of 2**power."""
    network, batch, _ = case(name)
    return diagnose(network, batch, LOSS, level="O2", scale=2.0**power, dtype=getattr(torch, dtype))


class Stop(NamedTuple):
    """What passes a part of a network, or the gradient of a parameter: values of `dtype`, the smallest and the largest
    finite magnitude above 0 (0 where there is none), and how many of `many` values are not finite.
    """

    name: str
    backward: bool
    dtype: str
    low: float
    high: float
    bad: int
    many: int

    @property
    def called(self) -> str:
        """Its name as the picture shows it."""
        return f"gradient of {self.name} × scale" if self.backward else f"output of {self.name}"


@cache
def passed(name: str, level: str, dtype: str, power: int) -> list[Stop]:
    """What passes a case's network at a level: its batch forward, gradients of the loss times 2**power back.

    The gradients are those of the parts, in the order in which they flow back, and then of the parameters.
    """
    found = case(name)
    network = auto_mixed_precision(copy.deepcopy(found.network), level, getattr(torch, dtype))
    heard = {"batch": found.batch[0]}
    for part, module in network.named_children():
        if not isinstance(module, nn.Flatten):
            module.register_forward_hook(lambda _m, _x, output, part=part: heard.__setitem__(part, output))
    heard["loss"] = LOSS(network(found.batch[0]), found.batch[1])
    wanted = {part: heard[part] for part in [*heard][:0:-1]} | dict(network.named_parameters())
    slopes = dict(zip(wanted, torch.autograd.grad(heard["loss"], [*wanted.values()], torch.tensor(2.0**power))))

    def stop(name: str, x: Tensor, backward: bool) -> Stop:
        size, finite = x.detach().abs(), x.isfinite()
        seen = size[finite & (size > 0)].tolist() or [0.0]
        return Stop(name, backward, dtype_name(x.dtype), min(seen), max(seen), x.numel() - int(finite.sum()), x.numel())

    return [stop(n, x, False) for n, x in heard.items()] + [stop(n, x, True) for n, x in slopes.items()]


@view(
    training=Choice({name: name for name in "ABCD"}, "training"),
    scale=Range(-8, 30, label="loss scale 2^", costly=True),
    dtype=Choice({name: name for name in FORMATS}, "format"),
    step=(1, 20),
)
def detective(see: Sheet, training="A", scale=24, dtype="float16", step=20) -> None:
    """One of four broken trainings, diagnosed at a loss scale and in a format of the reader's choice.

    Numbers: `report`; `stops`, the batch on its way forward and back; `born`, the number of the first of them with a
    value that is not finite, or None; `bars`, what passes as computed in float32.
    """
    report, every = investigated(training, scale, dtype), passed(training, "O0", dtype, scale)
    # parameters have no place on the way
    stops = [s for s in passed(training, "O2", dtype, scale) if "." not in s.name]
    bars = [s for s in every if not s.backward and s.name not in ("batch", "relu", "loss")]
    bars += [s for s in every if s.backward and s.name.endswith("weight")]
    born = next((i for i, stop in enumerate(stops) if stop.bad), None)

    see.grid(436, 960, rows=(204, 232), least=680)
    see.play("step", "step", len(stops), every=700, first=1)
    _way(see, f"training {training}, {dtype}: {report.verdict.replace('_', ' ')}", stops, born)
    _bars(see, bars, FORMATS[dtype], report, scale)

    told = [line.strip() for line in str(report).splitlines()[: 2 if report.module else 1]]
    works = f"The largest scale that works is {exponent(report.max_scale)}" if report.max_scale else "No scale works"
    walk = f"All {len(stops)} steps forward and back are finite"
    if born is not None:
        walk = f"Step {born + 1} of {len(stops)}, {stops[born].called}, is the first with a value that is not finite"
    elif report.verdict != "healthy":
        walk += "; the gradient of a parameter is not (no bar shows it)"
    whole = f"Training {training} at scale 2^{scale} in {dtype}: {' '.join(told)} {works}. {walk}."
    see.say(
        f"Step {{at}}, {{what}}: {{passes}}. {whole}",
        at=range(1, len(stops) + 1), what=[stop.called for stop in stops], stored=whole, report=report, stops=stops,
        passes=[f"{s.bad} of {s.many} inf or NaN" if s.bad else f"{s.dtype}, up to {short(s.high)}" for s in stops],
        born=born, bars=bars,
    )  # fmt: skip


def _way(see: Sheet, title: str, stops: list[Stop], born: int | None) -> None:
    """Forward along the upper row, back along the lower one; each part shows what passed it once it is reached."""
    last, parts = len(stops) - 1, [stop.name for stop in stops if not stop.backward]
    panel = see.panel(title=title, x=space(-0.75, len(parts)), y=space(-0.1, 2.1), bare=True, pad=[28, 6, 6, 6])
    panel.text(["forward", "gradients\n× scale"], [-0.72] * 2, [1.6, 0.45], anchor="start", color="muted")
    for i, stop in enumerate(stops):
        x, y = parts.index(stop.name), 0.05 if stop.backward else 1.2
        box, role = ([x + 0.04], [y], [x + 0.86], [y + 0.8]), "overflow" if stop.bad else "normal"
        panel.boxes(*box, fill="paper", edge="muted", width=1.2)
        panel.boxes(*box, fill=f"{role}/0.2", edge=role, width=1.5, only=(i, last))
        panel.boxes(*box, edge="own", width=4, only=(i, i))
        panel.text(stop.name, x + 0.45, y + 0.62, weight="bold")
        told = f"{stop.bad}/{stop.many}\ninf or NaN" if stop.bad else f"{stop.dtype}\n≤ {short(stop.high)}"
        panel.text(told, x + 0.45, y + 0.28, size=10, color="overflow" if stop.bad else "ink", only=(i, last))
        if i == born:
            panel.text("born here", x + 0.45, y + 0.92, weight="bold", color="overflow", only=(i, last))
        if i == len(parts) - 1:
            panel.arrow((x + 0.45, y), (x + 0.45, 0.86))
        elif i < last:
            ends = (x + 0.04, x - 0.14) if stop.backward else (x + 0.86, x + 1.03)
            panel.arrow((ends[0], y + 0.4), (ends[1], y + 0.4))


def _bars(see: Sheet, bars: list[Stop], fmt: FloatFormat, report: Report, scale: int) -> None:
    """The ranges of the values inside the format, and the grip of the scale on the first gradient's."""
    low, high = -44, 44
    y = names([stop.called for stop in bars], down=True) | {"hi": -1.2}
    x = log2("magnitude, as computed in float32", low, high, 8)
    title = f"ranges of the values, as computed in float32; ring: the scale, {power_of_two(scale)}"
    panel = see.panel(1, title=title, x=x, y=y)
    regions(panel, "x", *edges(fmt))
    see.rows = []
    for row, stop in enumerate(bars):
        word = "inf or NaN" if stop.bad else "too large" if stop.high > fmt.max else ""
        most = "not finite" if stop.bad else short(stop.high)
        see.rows.append({"values": stop.called, "smallest": f"{stop.low:.2g}", "largest": most, "fits": not word})
        color = "overflow" if word else "own" if stop.backward else "reference"
        (left, right), dash = exponents([stop.low, stop.high], low, high), "--" if stop.backward else None
        look: dict[str, Any] = {"fill": f"{color}/0.4", "edge": color, "width": 1.5, "dash": dash}
        if stop.high:
            panel.boxes([left], [row - 0.2], [right], [row + 0.2], **look)
        if report.phase == "forward" and not stop.backward and stop.name == report.module:
            panel.text("born here", left, row, beside=-8, color="overflow", halo=True)
        panel.text(word, high - 1, row, anchor="end", color="overflow", halo=True)
    row = next(i for i, stop in enumerate(bars) if stop.backward)
    top = math.log2(bars[row].high) if bars[row].high else scale
    panel.handle("x", "scale", scale, -8, 30, "loss scale, 2 to the", base=top - scale, cross=row)
