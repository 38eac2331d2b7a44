"""Lesson 08 and *What if*: four broken trainings to look into, recorded runs, what other policies had done on them."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import data_dir, digits
from mpkit.diagnose import Report, diagnose
from mpkit.formats import BF16, FP16
from mpkit.lessons.dynamic_scale import drawn_over, every_pair
from mpkit.record import Trace
from mpkit.replay import ceilings, replay, swept
from mpkit.replay.percent import percent
from mpkit.view import Choice, Range, Sheet, Stroke, Text, view
from mpkit.view.parts import edges, framed, gradients, heat_map, regions, tenths
from mpkit.view.sheet import Panel, exponents, fitted, linear, log2, names, power_of_two, space
from mpkit.view.words import counted, exponent

TRACES = ("mlp_digits", "gpt_sums", "mnist_lenet", "resnet_digits", "growing_activations", "rare_outliers")
FORMATS = {"float16": FP16, "bfloat16": BF16}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# ---- lesson 08: four broken trainings
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
    works = "No scale works"
    if report.max_scale is not None:
        works = f"The largest scale that works is {exponent(report.max_scale)}"
    if born is None:
        end = FORMATS[dtype].max
        wide = [n for n, g in slopes.items() if n.endswith("bias") and not float(g.abs().max()) <= end]
        part = f"; the gradient of {' and '.join(wide) or 'a weight'} is not (no bar shows it)"
        walk = f"All {len(stops)} steps forward and back are finite{'' if report.verdict == 'healthy' else part}."
    else:
        what = f"gradient of {stops[born].name}" if stops[born].backward else stops[born].name
        walk = f"Step {born + 1} of {len(stops)}, {what}, is the first with a value that is not finite."
    see.say(
        f"Training {training} at scale 2^{scale} in {dtype}: {report.verdict}.{where} {works}. {walk}",
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
        panel.boxes(*box, fill="paper", edge="muted", width=1.2, radius=4)
        role = "overflow" if stop.bad else "normal"
        panel.boxes(*box, fill=f"{role}/0.2", edge=role, width=1.5, radius=4, only=(i, last))
        panel.boxes(*box, edge="own", width=4, radius=4, only=(i, i))
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
            panel.text("NaN", 0, row, color="overflow", halo=True)
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


# ---- lesson 08: a recorded run, step by step
@cache
def load_run(name: str) -> Trace:
    """A trace by the name of a file in data/traces, or by path.

    Raises:  ValueError that says what is wrong with the path or the file.
    """
    path = data_dir() / "traces" / f"{name}.npz" if name in TRACES else Path(name).expanduser()
    try:
        return Trace.load(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{error}; write one of {', '.join(TRACES)} or the path of a trace of your own") from None


@cache
def ceilings_of(name: str) -> np.ndarray:
    """The largest scale that each step of a run can bear in float16; negative: none."""
    return ceilings(load_run(name), FP16)


def _run(see: Sheet, title: str, t: Trace, tops: np.ndarray, *more: np.ndarray) -> tuple[Panel, int, int]:
    """A panel of scales over the steps under their ceiling, and the ends of its axis, which hold `more` scales, too."""
    low, high = fitted(tops, t.scale, *more, within=(-40, 60))
    y = log2("loss scale", low, high)
    if np.nanmin(t.scale) < 2.0**low:  # what lies lower is drawn at the edge
        y["ticks"] = [[low, f"≤ {power_of_two(low)}"], *(tick for tick in y["ticks"] if tick[0] > low + 2)]
    panel = see.panel(title=title, x=linear("step", 0, len(t), 6), y=y)
    panel.band(exponents(tops, low, high), high, label="here it would overflow")
    return panel, low, high


def _scale_line(panel: Panel, scale: np.ndarray, skipped: np.ndarray, **look: Any) -> None:
    at = exponents(np.nan_to_num(scale, nan=0.0), panel.given["y"]["lo"], panel.given["y"]["hi"])
    panel.line(at, step="post", **look)
    panel.crosses(at, skipped, "skipped", size=4)


@view(run=Choice({name: name for name in TRACES}, "recorded run"), step=(0, 499))
def recording(see: Sheet, run="growing_activations", step=130) -> None:
    """A recorded run: its loss scale over the steps, and the gradients of the step shown inside float16.

    Numbers over the steps: `scale skipped zeros bad` (shares of the values in percent) and `seen`, the step whose
    gradients these are: the last one with recorded gradients.
    """
    t = load_run(run)
    part, count = t.gradients, len(t)
    rows = np.clip(np.searchsorted(part.step, np.arange(count), side="right") - 1, 0, None)
    values = int(part.size.sum())
    zeros, bad = (100 * n.sum(axis=1)[rows] / max(1, values) for n in (part.zeros, part.nonfinite))

    see.grid(400, 960, cols=(1.9, 1))
    see.play("step", "step", count, every=120)
    left, _, _ = _run(see, f"{run}: recorded loss scale", t, ceilings_of(run))
    _scale_line(left, t.scale, np.flatnonzero(t.overflow), width=2, label="loss scale")
    left.rule("x", "index", "own", dash=":")
    left.handle("x", "step", min(step, count - 1), 0, count - 1, "step")
    gradients(see, (0, 1), t, "fp16", t.scale)
    see.say(
        f"{run}, step {{at}} of {count}: {{outcome}}, loss {{loss}}, scale {{told}}. Steps skipped so far: {{so_far}}. "
        f"Of the {values} gradient values of step {{seen}}, {{none}} % are zero and {{broken}} % inf or NaN.",
        at=np.arange(count), outcome=np.where(t.overflow, "skipped", "applied"), so_far=np.cumsum(t.overflow),
        loss=[f"{v:.3g}" if math.isfinite(v) else "not finite" for v in t.loss], told=[exponent(s) for s in t.scale],
        seen=part.step[rows], none=tenths(zeros / 100), broken=tenths(bad / 100), scale=t.scale, skipped=t.overflow,
        zeros=zeros, bad=bad,
    )  # fmt: skip


# ---- *What if*: what another policy would have done
FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0)
WINDOWS = (5, 10, 20, 50, 100, 200, 500)
PAIRS = [(f, w) for f in FACTORS for w in WINDOWS]
POWERS = (-60, 120)  # what a hand may draw: far beyond any axis, and within float32


def unsettled(trace: Trace, scales: np.ndarray, drawn: Mapping[int, float]) -> np.ndarray:
    """(steps, policies) -> (policies,) the steps that the recording leaves open for each policy.

    It lacks the size of their gradients, and had another scale.
    """
    if FP16.name in trace.measured:
        return np.zeros(scales.shape[1], int)
    known = ~np.isfinite(trace.loss)
    known[trace.rows[trace.gradients.nonfinite.sum(axis=1) == 0]] = True
    known[[step for step in drawn if step < len(known)]] = True
    was = trace.scale[:, None]
    settled = np.where(trace.overflow[:, None], scales >= was, scales <= was) & (trace.format == FP16.name)
    return (~(settled | known[:, None])).sum(axis=0)


@cache
def _pairs(run: str, start: int, drawn: tuple[tuple[int, float], ...]) -> dict[str, np.ndarray]:
    return every_pair(load_run(run), drawn_over(ceilings_of(run), dict(drawn)), start, FACTORS, WINDOWS)


@view(
    run=Text("recorded run, or path"),
    start=Range(0, 32, label="start at 2^"),
    factor=Range(1.1, 8, 0.1, "scale_factor"),
    window=Range(1, 1024, label="scale_window, steps"),
    drawn=Stroke(100_000, *POWERS),
)
def what_if(see: Sheet, run="mlp_digits", start=16, factor=2.0, window=50, drawn={}) -> None:
    """A recorded run replayed with another start, factor and window, under its own ceiling or one drawn by hand.

    Numbers: `tops scale` (steps,), `skipped` (their numbers), `row` (figures of `replay`), `lost estimates` (factors,
    windows) of every pair, `best` (factor, window) of the pair that loses least, and its `best_scale`.
    """
    trace, tops = load_run(run), drawn_over(ceilings_of(run), drawn)
    row = replay(trace, swept(2.0**start, factor, window), fmt=FP16, tops=tops, scales=True).iloc[0]
    scale, steps, pairs = np.asarray(row["scale"]), len(trace), _pairs(run, start, tuple(drawn.items()))
    skipped, lost = np.flatnonzero(~(scale <= tops)), pairs["lost"]
    best, best_scale = PAIRS[int(lost.argmin())], pairs["scales"][:, int(lost.argmin())]
    least = [(int(i), int(j)) for i, j in np.argwhere(lost <= lost.min() + 1e-12)]
    own = [(FACTORS.index(factor), WINDOWS.index(window))] if (factor, window) in PAIRS else []
    see.buttons["Take the best pair"] = {"factor": best[0], "window": best[1]}
    if drawn:
        see.buttons["Undo drawing"] = {"drawn": {}}

    see.grid(400, 1000, cols=(1.4, 1))
    title = "what this policy would have done; draw another ceiling"
    panel, low, high = _run(see, title, trace, tops, scale)
    look: dict[str, Any] = {"width": 1.6, "step": "post"}
    panel.line(exponents(trace.scale, low, high), color="reference", dash="--", label="recorded", **look)
    _scale_line(panel, scale, skipped, width=2.4, label="replayed", ghost=True)
    if not set(own) & set(least):
        panel.line(exponents(best_scale, low, high), color="normal", dash="-.", label="loses least", **look)
    pen = {"name": "drawn", "lo": low, "hi": high, "label": "ceiling", "width": 1.4}
    panel.add("pen", y=exponents(tops, low, high), color="overflow", **pen)
    covered = window < 0.25 * steps and abs(start - low - 0.8) < 0.06 * (high - low)  # by the ball of the start
    note = None if covered else f"window {window}" if window < 0.8 * steps else "window"
    panel.handle("y", "start", start, 0, 32, "start, 2 to the", cross=0.02 * steps, note="start")
    grip: dict[str, Any] = {"cross": low + 0.8, "stem": True, "note": note}
    panel.handle("x", "window", window, 1, min(1024, steps), "scale_window, steps", **grip)
    sets = [{"factor": f, "window": w} for f, w in PAIRS]
    cells: dict[str, Any] = {"sets": sets, "name": "pair", "size": 11, "col": 1}
    table = heat_map(see, lost, [short(v) for v in lost.flat], FACTORS, WINDOWS, "lost with each pair, %", **cells)
    framed(table, least, "normal", "loses least")
    if own:
        framed(table, own, "own", "chosen")

    own_open, estimates = int(unsettled(trace, scale[:, None], drawn)[0]), unsettled(trace, pairs["scales"], drawn)
    drew = f"{counted(len(drawn), 'step')} of the ceiling {'is' if len(drawn) == 1 else 'are'} drawn. " if drawn else ""
    pair = f"factor {best[0]:g} and window {best[1]}"
    who = f"{pair} loses" if len(least) == 1 else f"{len(least)}, among them {pair}, lose"
    see.say(
        f"From 2^{start} with factor {factor:g} and window {window} on {Path(run).stem}: {row['skipped']} of {steps} "
        f"steps {'is' if row['skipped'] == 1 else 'are'} skipped (recorded: {int(trace.overflow.sum())}). "
        f"{_left(row, steps)}{_open(own_open, estimates)} {drew}Of {len(PAIRS)} pairs {who} least, "
        f"{percent(float(lost.min()), 2)} of the training signal.",
        tops=tops, scale=scale, skipped=skipped, row=row, lost=lost, estimates=estimates.reshape(lost.shape),
        best=best, best_scale=best_scale,
    )  # fmt: skip


def _left(row: Mapping[str, Any], steps: int) -> str:
    """What becomes of the applied steps: those with recorded gradients tell of room and zeros."""
    end = f" The policy collapses: {row['why']}." if row["collapsed"] else ""
    if row["skipped"] == steps:
        return f"No step is applied.{end}"
    if math.isnan(row["flushed"]):
        return f"The gradients of the applied steps are not recorded.{end}"
    room = f"The scale lies {row['headroom']:.1f} bits below the ceiling on average"
    if math.isnan(row["headroom"]):
        room = "The scale is 0 in every applied step"
    zero = f"{percent(row['flushed'], 2)} of the non-zero gradient values become zero"
    return f"{room}, {zero}, and {percent(row['lost'], 2)} of the training signal is lost.{end}"


def _open(own: int, estimates: np.ndarray) -> str:
    """Says in how many steps, and in how many pairs, a skip is an estimate."""
    many = int((estimates > 0).sum())
    if not own and not many:
        return ""
    here = f"in {own} of the steps, and " if own else ""
    return (
        f" Whether a step is skipped is an estimate {here}with {counted(many, 'pair')} in the table: the size of these "
        "gradients is not recorded."
    )


def short(share: float) -> str:
    """A share in percent as it fits a cell, from a tenth on in whole ones; "0" is none at all."""
    told = percent(share, 0 if share >= 0.1 else 1).replace(" ", "").removesuffix("%")
    return told.replace("lessthan", "<").replace("morethan", ">")
