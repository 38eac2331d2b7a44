"""Broken trainings to look into, recorded runs step by step, and what other policies would have done on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Enum, Float, Int, Unicode

from mpkit.arguments import is_whole
from mpkit.casting import auto_mixed_precision
from mpkit.data import data_dir, digits
from mpkit.diagnose import Report, diagnose
from mpkit.diagnose.report import power
from mpkit.explorers.base import Explorer, counted, stroke
from mpkit.explorers.scaling import POWERS
from mpkit.explorers.scaling import exponent as as_power
from mpkit.formats import BF16, FP16
from mpkit.policies import ScalePolicy, naive_loss_ratio, stack
from mpkit.record import Recorder, Trace
from mpkit.replay import ceilings, flushed, replay, simulate, sweep, swept
from mpkit.replay.percent import percent

TRACES = ("mlp_digits", "gpt_sums", "mnist_lenet", "resnet_digits", "growing_activations", "rare_outliers")
FORMATS = {"float16": FP16, "bfloat16": BF16}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# four broken trainings


class Layer(nn.Module):
    """A function as a module, so that the detective can name it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _network(**middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential()
    parts = {"flat": nn.Flatten(), "hidden": nn.Linear(784, 32), "relu": nn.ReLU(), **middle, "out": nn.Linear(32, 10)}
    for name, module in parts.items():
        network.add_module(name, module)
    return network


@dataclass(frozen=True)
class Case:
    """A broken training: its network, and a batch whose step was not finite at this loss scale."""

    network: nn.Module
    batch: tuple[Tensor, Tensor]
    scale: float


def _healthy_batch() -> tuple[Tensor, Tensor]:
    images, labels = digits("train")
    return images[:32], labels[:32]


def _dead_pixel() -> Case:
    images, labels = _healthy_batch()
    images = images.clone()
    images[7, 0, 14, 14] = math.nan
    return Case(_network(), (images, labels), 2.0**12)


@lru_cache(maxsize=8)
def case(name: str) -> Case:
    """One of the four cases "A" to "D"."""
    makers: dict[str, Callable[[], Case]] = {
        "A": lambda: Case(_network(), _healthy_batch(), 2.0**24),
        "B": lambda: Case(
            _network(gain=Layer(lambda x: x * 400), square=Layer(lambda x: x**2), shrink=Layer(lambda x: x * 1e-5)),
            _healthy_batch(),
            2.0**12,
        ),
        "C": _dead_pixel,
        "D": lambda: Case(_network(entropy=Layer(lambda x: torch.log(x))), _healthy_batch(), 2.0**12),
    }
    return makers[name]()


CASES = ("A", "B", "C", "D")


@lru_cache(maxsize=256)
def investigated(name: str, exponent: int, dtype: str, level: str = "O2") -> Report:
    """The diagnosis of a case at a loss scale of 2**exponent."""
    found = case(name)
    return diagnose(found.network, found.batch, F.cross_entropy, level=level, scale=2.0**exponent, dtype=DTYPES[dtype])


@lru_cache(maxsize=8)
def ranges(name: str) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...], np.ndarray]:
    """What the case's values need in float32: modules and (M, 2) largest and smallest magnitudes of their outputs, the
    same for the gradients of the parameters; NaN or inf where the values are."""
    found = case(name)
    recorder = Recorder(found.network, activations=True, format="fp32")
    loss = F.cross_entropy(found.network(found.batch[0]), found.batch[1])
    found.network.zero_grad()
    loss.backward()
    recorder.record(loss)
    recorder.close()
    found.network.zero_grad()
    trace = recorder.trace()
    assert trace.activations is not None
    return (trace.activations.names, _extremes(trace.activations), trace.gradients.names, _extremes(trace.gradients))


@dataclass(frozen=True)
class Stop:
    """What passes one part of a network: values of `dtype`, the largest finite magnitude, how many are not finite."""

    name: str
    backward: bool
    dtype: str
    largest: float
    bad: int
    count: int


@lru_cache(maxsize=64)
def walked(name: str, exponent: int, dtype: str) -> tuple[Stop, ...]:
    """The case's batch through its network at O2 and back from a loss scale of 2**exponent, part by part."""
    found = case(name)
    network = auto_mixed_precision(copy.deepcopy(found.network), "O2", DTYPES[dtype])
    heard: dict[str, Tensor] = {"batch": found.batch[0]}
    for part, module in network.named_children():
        if not isinstance(module, nn.Flatten):
            module.register_forward_hook(lambda _m, _x, output, part=part: heard.__setitem__(part, output))
    heard["loss"] = F.cross_entropy(network(found.batch[0]), found.batch[1])
    flowing = list(heard)[:0:-1]
    seed = torch.tensor(2.0**exponent)
    gradients = torch.autograd.grad(heard["loss"], [heard[part] for part in flowing], seed)
    forward = [_stop(part, False, values) for part, values in heard.items()]
    return (*forward, *(_stop(part, True, values) for part, values in zip(flowing, gradients)))


def _stop(name: str, backward: bool, values: Tensor) -> Stop:
    finite = values.detach().float()[values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    kind = str(values.dtype).removeprefix("torch.")
    return Stop(name, backward, kind, largest, values.numel() - finite.numel(), values.numel())


def _extremes(part: Any) -> np.ndarray:
    counts = part.counts[0] > 0
    low = np.exp2(np.where(counts.any(axis=1), part.exponents[counts.argmax(axis=1)], -126).astype(float))
    return np.stack([part.largest[0].astype(float), low], axis=1)


class DetectiveExplorer(Explorer):
    """One of four broken trainings, diagnosed at a loss scale and in a format of the reader's choice.

    After `compute`: `report`, `bars`, the `stops` of the batch on its way forward and back, of which `step` are shown,
    and `born`, the number of the first with a value that is not finite, or None.
    """

    controls = ("name", "exponent", "dtype", "step")
    name = Enum(CASES, "A").tag(label="training")
    exponent = Int(24, min=-8, max=30).tag(label="loss scale 2^", costly=True)
    dtype = Enum(tuple(DTYPES), "float16").tag(label="format")
    step = Int(20, min=1, max=20).tag(label="step")

    def compute(self) -> None:
        """The report, and bars (label, smallest, largest, is gradient) in the order of the network."""
        self.report = investigated(self.name, self.exponent, self.dtype)
        names, outputs, parameters, gradients = ranges(self.name)
        scale = 2.0**self.exponent
        self.bars = [(n, row[1], row[0], False) for n, row in zip(names, outputs) if n not in ("flat", "relu")]
        self.bars += [
            (n, row[1] * scale, row[0] * scale, True) for n, row in zip(parameters, gradients) if n.endswith("weight")
        ]
        self.fmt = FORMATS[self.dtype]
        self.stops = walked(self.name, self.exponent, self.dtype)
        wide = [n for n, row in zip(parameters, gradients) if not row[0] * scale <= self.fmt.max]
        self.wide = " and ".join(n for n in wide if not n.endswith("weight"))  # without a bar
        self.born = next((i for i, stop in enumerate(self.stops) if stop.bad), None)

    def summary(self) -> str:
        r = self.report
        born = "The first inf or NaN was born in"
        where = f" {born} {r.module}, {r.phase} pass, operation {r.operation}." if r.operation else ""
        where = where or (f" The inf or NaN sits in {r.module}." if r.module else "")
        works = "No scale works" if r.max_scale is None else f"The largest scale that works is {power(r.max_scale)}"
        part = "" if r.verdict == "healthy" else f"; the gradient of {self.wide or 'a weight'} is not (no bar shows it)"
        walk = f"All {len(self.stops)} steps forward and back are finite{part}."
        if self.born is not None:
            stop = self.stops[self.born]
            what = f"gradient of {stop.name}" if stop.backward else stop.name
            walk = f"Step {self.born + 1} of {len(self.stops)}, {what}, is the first with a value that is not finite."
        return f"Training {self.name} at scale 2^{self.exponent} in {self.dtype}: {r.verdict}.{where} {works}. {walk}"

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "values": f"gradient of {name} x scale" if gradient else f"output of {name}",
                "smallest": f"{low:.2g}",
                "largest": f"{high:.3g}",
                "fits": bool(math.isfinite(high) and high <= self.fmt.max),
            }
            for name, low, high, gradient in self.bars
        ]


# recorded runs


@lru_cache(maxsize=16)
def load_run(name: str) -> Trace:
    """A trace by the name of a file in data/traces, or by path.

    Raises:  ValueError that says what is wrong with the path or the file.
    """
    path = data_dir() / "traces" / f"{name}.npz" if name in TRACES else Path(name).expanduser()
    try:
        return Trace.load(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{error}; write one of {', '.join(TRACES)} or the path of a trace of your own") from None


@lru_cache(maxsize=16)
def ceilings_of(name: str) -> np.ndarray:
    return ceilings(load_run(name), FP16)


class RunExplorer(Explorer):
    """A recorded run: its loss scale over the steps, and the gradients of one step inside float16."""

    controls = ("run", "step")
    run = Enum(TRACES, "growing_activations").tag(label="recorded run")
    step = Int(130, min=0, max=499).tag(label="step")

    def compute(self) -> None:
        """Histogram (exponents, counts) of the scaled gradients of the last recorded step up to `step`."""
        self.trace = load_run(self.run)
        self.tops = ceilings_of(self.run)
        self.at = min(self.step, len(self.trace) - 1)
        part = self.trace.gradients
        row = max(0, int(np.searchsorted(part.step, self.at, side="right")) - 1)
        self.row = row
        self.scale = float(self.trace.scale[self.at])
        self.counts = part.total()[row]
        self.shift = math.log2(self.scale) if self.scale > 0 else -200.0
        self.exponents = part.exponents + self.shift
        self.zeros, self.nonfinite = int(part.zeros[row].sum()), int(part.nonfinite[row].sum())
        self.values = int(part.size.sum())

    def summary(self) -> str:
        t, i = self.trace, self.at
        outcome = "skipped" if t.overflow[i] else "applied"
        loss = f"{t.loss[i]:.4g}" if np.isfinite(t.loss[i]) else "not finite"
        seen = int(t.gradients.step[self.row])
        of = "" if seen == i else f" of step {seen}, the last with recorded gradients,"
        return (
            f"{self.run}, step {i} of {len(t)}: {outcome}, loss {loss}, scale {as_power(self.scale)}. "
            f"Of {self.values} gradient values{of} {percent(self.zeros / self.values, 1)} are zero, and "
            f"{counted(self.nonfinite, 'value')} {'is' if self.nonfinite == 1 else 'are'} inf or NaN. "
            f"Steps skipped so far: {int(t.overflow[: i + 1].sum())}."
        )

    def table(self) -> list[dict[str, Any]]:
        around = range(max(0, self.at - 5), min(len(self.trace), self.at + 6))
        t = self.trace
        return [
            {"step": i, "loss": f"{t.loss[i]:.4g}", "scale": f"{t.scale[i]:.4g}", "skipped": bool(t.overflow[i])}
            for i in around
        ]


FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0)
WINDOWS = (5, 10, 20, 50, 100, 200, 500)


def _cell(number: int) -> dict[str, float]:
    """Factor and window of a cell of the grids, row by row from the top left."""
    if not (is_whole(number) and 0 <= number < len(FACTORS) * len(WINDOWS)):
        raise ValueError(f"the cells are numbered from 0 to {len(FACTORS) * len(WINDOWS) - 1}, got {number!r:.80}")
    return {"factor": FACTORS[number // len(WINDOWS)], "window": WINDOWS[number % len(WINDOWS)]}


class WhatIfExplorer(Explorer):
    """A recorded run replayed with another start, factor and window, under its own ceiling or one drawn by hand.

    After `compute`: `tops` and `scale` (steps,), `skipped` (their numbers), `row` (figures of `replay`), `grid`
    (factors, windows) with the share of the training signal that each pair loses under this ceiling, `open` (factors,
    windows) with the number of its steps that are estimates, `least`, where the pairs stand that lose least, `rides`,
    the first of them, and `best_scale` (steps,), its scale.
    """

    controls = ("run", "init", "factor", "window")
    actions = {"Take the best pair": "take", "Undo drawing": "undraw"}
    gestures = ("draw", "pair")
    fresh: ClassVar[Mapping[str, Any]] = {"drawn": {}}
    drawn: dict[int, float]
    _drawn_on = ""
    _ridden_on: object = None
    factors, windows = FACTORS, WINDOWS
    run = Unicode("mlp_digits").tag(label="recorded run, or path")
    init = Int(16, min=0, max=32).tag(label="start at 2^")
    factor = Float(2.0, min=1.1, max=8.0).tag(label="scale_factor", step=0.1)
    window = Int(50, min=1, max=1024).tag(label="scale_window", unit="steps", scale="log2", step=1)

    def compute(self) -> None:
        """The replayed policy, and the recorded one as it was."""
        trace = load_run(self.run)
        if self.run != self._drawn_on:  # another run has another ceiling
            self.drawn, self._drawn_on = {}, self.run
        self.trace, self.tops = trace, ceilings_of(self.run).copy()
        self.tops[list(self.drawn)] = list(self.drawn.values())
        policy = swept(2.0**self.init, self.factor, self.window)
        self.row = replay(trace, policy, fmt=FP16, tops=self.tops, scales=True).iloc[0]
        self.scale = np.asarray(self.row["scale"])
        self.skipped = np.flatnonzero(~(self.scale <= self.tops))
        self.recorded = int(trace.overflow.sum())
        if (key := (self.run, self.init, tuple(self.drawn.items()))) != self._ridden_on:
            self._ride()
            self._ridden_on = key

    def _ride(self) -> None:
        """Every pair under the ceiling as it is now, at once."""
        pairs = [(f, w) for f in FACTORS for w in WINDOWS]
        scales, lost = self._lost([swept(2.0**self.init, f, w) for f, w in pairs])
        self.grid = lost.reshape(len(FACTORS), len(WINDOWS))
        self.open = self._unsettled(scales).reshape(self.grid.shape)
        self.least = least_lost(self.grid)
        self.rides = pairs[int(lost.argmin())]
        self.best_scale = scales[:, int(lost.argmin())]

    def _lost(self, policies: list[ScalePolicy]) -> tuple[np.ndarray, np.ndarray]:
        """(scales (steps, policies), share of the training signal lost by each to skipped steps and to zeros)."""
        scales = simulate(self.tops, stack(policies)).sampled
        good, rows = scales <= self.tops[:, None], self.trace.rows
        kept = good[rows]
        zeros = np.where(kept, flushed(self.trace, scales[rows], FP16), 0.0).sum(0) / np.maximum(kept.sum(0), 1)
        return scales, 1 - good.mean(0) * (1 - zeros)

    def take(self) -> None:
        """Set the pair that loses least under this ceiling."""
        self.set(factor=self.rides[0], window=self.rides[1])

    def pair(self, number: int) -> None:
        """Set a pair by its number in `grid`, row by row from the top left."""
        self.set(**_cell(number))

    def draw(self, ceiling: Mapping[str, float]) -> None:
        """Take over a ceiling drawn by hand: step -> exponent."""
        powers = stroke(ceiling, len(self.trace), *POWERS)
        self._change({}, drawn=self.drawn | {k: 2.0**v for k, v in powers.items()})

    def undraw(self) -> None:
        """Forget what was drawn."""
        self._change({}, **self.fresh)

    def idle(self) -> tuple[str, ...]:
        return () if self.drawn else ("undraw",)

    def summary(self) -> str:
        r, steps = self.row, len(self.trace)
        end = f" The policy collapses: {r['why']}." if r["collapsed"] else ""
        return (
            f"From 2^{self.init} with factor {self.factor:g} and window {self.window}: {r['skipped']} of {steps} steps "
            f"{'is' if r['skipped'] == 1 else 'are'} skipped (recorded: {self.recorded}). {self._left(r)}{end}"
            f"{self._estimated()}{self._ridden()}"
        )

    def _left(self, r: Mapping[str, Any]) -> str:
        """What becomes of the applied steps: those with recorded gradients tell of room and zeros."""
        if r["skipped"] == len(self.trace):
            return "No step is applied."
        if math.isnan(r["flushed"]):
            return "The gradients of the applied steps are not recorded."
        room = f"The scale lies {r['headroom']:.1f} bits below the ceiling on average"
        if math.isnan(r["headroom"]):
            room = "The scale is 0 in every applied step"
        return f"{room}, and {percent(r['flushed'], 2)} of the non-zero gradient values become zero."

    def _unsettled(self, scales: np.ndarray) -> np.ndarray:
        """(steps, policies) -> (policies,) the steps that the recording leaves open for each policy.

        It lacks the size of their gradients, and had another scale.
        """
        trace = self.trace
        if FP16.name in trace.measured:
            return np.zeros(scales.shape[1], int)
        known = ~np.isfinite(trace.loss)
        known[trace.rows[trace.gradients.nonfinite.sum(axis=1) == 0]] = True
        known[list(self.drawn)] = True
        was = trace.scale[:, None]
        settled = np.where(trace.overflow[:, None], scales >= was, scales <= was) & (trace.format == FP16.name)
        return (~(settled | known[:, None])).sum(axis=0)

    def _estimated(self) -> str:
        number = int(self._unsettled(self.scale[:, None])[0])
        return (
            f" Whether a step is skipped is an estimate in {number} of the steps: the size of the gradients there is "
            "not recorded."
            if number
            else ""
        )

    def _ridden(self) -> str:
        if not self.drawn:
            return ""
        drawn = f"{counted(len(self.drawn), 'step')} of the ceiling {'is' if len(self.drawn) == 1 else 'are'}"
        pair, many = f"factor {self.rides[0]:g} and window {self.rides[1]}", len(self.least)
        who = pair if many == 1 else f"{many}, among them {pair},"
        return f" {drawn} drawn. Of {self.grid.size} pairs {who} lose least under this ceiling."

    def table(self) -> list[dict[str, Any]]:
        every = max(1, len(self.trace) // 20)
        return [
            {
                "step": i,
                "scale": f"{self.scale[i]:.4g}",
                "ceiling": f"{self.tops[i]:.4g}",
                "recorded scale": f"{self.trace.scale[i]:.4g}",
            }
            for i in range(0, len(self.trace), every)
        ]


def least_lost(grid: np.ndarray) -> list[tuple[int, int]]:
    """(row, column) of each cell that loses least; many pairs do where the scale never grows."""
    return [(int(row), int(column)) for row, column in np.argwhere(grid <= grid.min() + 1e-12)]


@lru_cache(maxsize=16)
def swept_grid(run: str, init: int) -> np.ndarray:
    """(factors, windows) share of the training signal lost to skipped steps and zeros."""
    frame = sweep(load_run(run), init=2.0**init, factor=FACTORS, window=WINDOWS, fmt=FP16)
    return frame.pivot(index="factor", columns="window", values="lost").to_numpy()


class GridExplorer(Explorer):
    """Every combination of factor and window on a recorded run, and the run of one of them."""

    controls = ("run", "init", "factor", "window")
    gestures = ("cell",)
    run = Unicode("gpt_sums").tag(label="recorded run, or path")
    init = Int(24, min=0, max=32).tag(label="start at 2^", costly=True)
    factor = Enum(FACTORS, 2.0).tag(label="scale_factor")
    window = Enum(WINDOWS, 100).tag(label="scale_window")
    factors, windows = FACTORS, WINDOWS

    def compute(self) -> None:
        """The grid of lost shares, and the scale over the steps in the chosen cell."""
        load_run(self.run)
        self.grid = swept_grid(self.run, self.init)
        self.least = least_lost(self.grid)
        self.chosen = WhatIfExplorer(run=self.run, init=self.init, factor=self.factor, window=self.window)

    def cell(self, number: int) -> None:
        """Show the run of a cell by its number, row by row from the top left."""
        self.set(**_cell(number))

    def lost(self, factor: float, window: int) -> float:
        return float(self.grid[FACTORS.index(factor), WINDOWS.index(window)])

    def best(self) -> tuple[float, int]:
        """The factor and window that lose least."""
        row, column = np.unravel_index(self.grid.argmin(), self.grid.shape)
        return FACTORS[row], WINDOWS[column]

    def summary(self) -> str:
        factor, window = self.best()
        pair, many = f"factor {factor:g}, window {window}", len(self.least)
        best = f"The best of {self.grid.size} pairs is {pair}"
        if many > 1:
            best = f"{many} of {self.grid.size} pairs are the best, one of them {pair}"
        skipped = int(self.chosen.row["skipped"])
        told = f"{counted(skipped, 'step')} {'is' if skipped == 1 else 'are'}"
        return (
            f"Factor {self.factor:g}, window {self.window} on {Path(self.run).stem}: "
            f"{percent(self.lost(self.factor, self.window), 2)} of the training signal is lost to skipped steps and to "
            f"zeros, and {told} skipped. {best}, with {percent(self.lost(factor, window), 2)}.{self._estimated()}"
        )

    def _estimated(self) -> str:
        """Says in how many pairs a skip is an estimate."""
        open_ = self.chosen.open
        if not open_.any():
            return ""
        number, own = int((open_ > 0).sum()), open_[FACTORS.index(self.factor), WINDOWS.index(self.window)]
        this = (", this one among them," if number > 1 else ", this one,") if own else ""
        return (
            f" In {number} of {open_.size} pairs{this} some skips are estimates: the size of "
            "the gradients in these steps is not recorded."
        )

    def table(self) -> list[dict[str, Any]]:
        return [{"factor": f, **{f"window {w}": percent(self.lost(f, w), 2) for w in WINDOWS}} for f in FACTORS]


# a wrong rule


class NaiveRuleExplorer(Explorer):
    """The rule that compares the loss with the scale, beside a rule that looks at the gradients."""

    controls = ("exponent", "loss", "decay")
    exponent = Int(0, min=-10, max=20).tag(label="start at 2^")
    loss = Float(2.3, min=0.1, max=10.0).tag(label="first loss", step=0.1)
    decay = Float(0.005, min=0.0, max=0.05).tag(label="loss falls per step by", step=0.001)
    steps = 1000
    ceiling = 2.0**17

    def compute(self) -> None:
        """`naive` and `dynamic`: scale over the steps; the dynamic rule sees overflow above a fixed ceiling."""
        self.losses = self.loss * np.exp(-self.decay * np.arange(self.steps))
        naive = [2.0**self.exponent]
        for loss in self.losses[:-1]:
            naive.append(naive_loss_ratio(naive[-1], float(loss)))
        self.naive = np.array(naive)
        policy = ScalePolicy(init_scale=2.0**self.exponent, growth_interval=50)
        self.dynamic = simulate(np.full(self.steps, self.ceiling), policy).sampled[:, 0]

    def end_of_learning(self) -> tuple[str, int]:
        """What ends the training under the naive rule, and when; step 1000 if nothing does."""
        low = np.flatnonzero(self.naive < FP16.min_subnormal)
        high = np.flatnonzero(self.naive > self.ceiling)
        first = {
            "it falls below 2^-24, the smallest float16": low,
            "the gradients overflow, and no step is skipped": high,
        }
        found = {why: int(steps[0]) for why, steps in first.items() if len(steps)}
        return min(found.items(), key=lambda kv: kv[1]) if found else ("nothing ends it", self.steps)

    def summary(self) -> str:
        why, step = self.end_of_learning()
        end = f"at step {step} {why}" if step < self.steps else f"after {step} steps nothing has ended it"
        return (
            f"The scale starts at 2^{self.exponent}, the loss at {self.loss:.1f}. Under the rule that compares loss "
            f"and scale, the scale is {self.naive[100]:.3g} at step 100 and {self.naive[-1]:.3g} at step 999; {end}. "
            f"Under the rule that asks whether the gradients are finite, it ends at {self.dynamic[-1]:.0f}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "step": i,
                "loss": f"{self.losses[i]:.3g}",
                "compares loss and scale": f"{self.naive[i]:.3g}",
                "gradients finite?": f"{self.dynamic[i]:.6g}",
            }
            for i in range(0, self.steps, 50)
        ]
