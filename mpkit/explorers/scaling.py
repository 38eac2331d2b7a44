"""How a loss scale moves: over a recorded run, over a grid of settings, in a live training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from traitlets import Bool, Enum, Float, Int

from mpkit.data import data_dir
from mpkit.explorers.base import Explorer, counted, stroke
from mpkit.explorers.start import STEPS as LIVE_STEPS
from mpkit.explorers.start import Run, recorded_run, training
from mpkit.policies import ScalePolicy, ScaleState, advance, explain, initial, stack
from mpkit.policies.rule import FLOAT32_MAX
from mpkit.record import Trace
from mpkit.replay import ceilings, flushed, simulate
from mpkit.replay.percent import percent
from mpkit.scalers import LossScaler

RUNS = {
    "mlp_digits": "perceptron on digits, healthy",
    "gpt_sums": "small GPT on sums, healthy",
    "rare_outliers": "one huge batch in 16",
    "growing_activations": "broken from step 129 on",
}
SHOWN = 400  # steps of each recorded run
POWERS = (-60, 120)  # what a hand may set: far beyond any axis, and within float32

FORMATS = {"fp16": "float16", "bf16": "bfloat16"}


@cache
def recorded(run: str, fmt: str = "fp16") -> tuple[Trace, np.ndarray]:
    """A trace from `data/traces` and the largest scale that each of its steps can bear in `fmt` (negative: none).

    The runs were trained in float32, so that no recorded scale hides what another one would have kept, and the ceiling
    of float16 was measured in each step; that of bfloat16 follows from the largest gradient of a weight.
    """
    trace = Trace.load(data_dir() / "traces" / f"{run}_float32.npz").before(SHOWN)
    return trace, ceilings(trace, fmt)


def exponent(value: float) -> str:
    """2^n for tables and sentences: exponent(1024.0) is '2^10', exponent(1000.0) is '2^9.966', and 0, inf as they are.

    >>> exponent(1024.0), exponent(1000.0), exponent(0.0)
    ('2^10', '2^9.966', '0')
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    if value == FLOAT32_MAX:
        return "float32 max"
    return f"2^{math.log2(value):.4g}"


def _sentence(words: str) -> str:
    """The words with a capital first letter; names such as GPT stay as they are."""
    return words[0].upper() + words[1:]


def zero_share(trace: Trace, scales: np.ndarray, fmt: str = "fp16") -> np.ndarray:
    """Share of gradient values that are zero in float32 already, or become zero in `fmt` at these scales.

    Shapes:  scales (N, P), one row per step -> (N, P); NaN in steps whose loss is not finite: they have no gradients.
    """
    part = trace.gradients
    lost = flushed(trace, scales, fmt)
    nonzero = part.total().sum(axis=1)[:, None]
    share = (part.zeros.sum(axis=1)[:, None] + lost * nonzero) / part.size.sum()
    return np.where((ceilings(trace, fmt) < 0)[:, None], math.nan, share)


def stepped(
    policy: ScalePolicy, tops: np.ndarray, puts: Mapping[int, float] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale used in each step, was it finite, what was decided after it) when step i overflows above `tops[i]`.

    `puts` are scales set by hand, by step; the count of finite steps starts again there.
    """
    starts = {0: policy.init_scale} | {k: v for k, v in (puts or {}).items() if k < len(tops)}
    ends, parts = [*sorted(starts)[1:], len(tops)], []
    for first, end in zip(sorted(starts), ends):
        own = replace(policy, init_scale=starts[first])
        done = simulate(tops[first:end], own)
        used = done.sampled[:, 0]
        finite = used <= tops[first:end]
        parts.append((used, finite, explain(own, used, np.append(used[1:], done.final[0]), finite)))
    scale, finite, reasons = (np.concatenate(column) for column in zip(*parts))
    return scale, finite, reasons


class DynamicsExplorer(Explorer):
    """A `DynamicLossScaler` with any settings on a recorded run, step by step.

    After `compute`: `ceiling`, `scale`, `finite`, `reasons`, `zeros` (share of the gradient values that are zero at
    that scale, NaN where there are no gradients), `good` (finite steps since the scale last changed, this one
    included), all (400,), and `headroom` = log2(ceiling / scale) in bits. `drawn` holds ceilings drawn by hand, `puts`
    scales set by hand, by step.
    """

    controls = (
        *("run", "fmt", "init_exponent", "hold", "scale_factor", "apart", "down_factor", "scale_window"),
        *("floor_exponent", "step"),
    )
    actions = {"Undo drawing": "undraw"}
    gestures = ("draw", "put")
    fresh: ClassVar[Mapping[str, Any]] = {"drawn": {}, "puts": {}}
    drawn: dict[int, float]
    puts: dict[int, float]
    ahead = ("scale_window", "scale_factor", "down_factor", "floor_exponent", "init_exponent", "put")
    FORMATS = FORMATS
    run = Enum(list(RUNS), "gpt_sums").tag(label="run", names=RUNS)
    fmt = Enum(list(FORMATS), "fp16").tag(label="format", names=FORMATS)
    init_exponent = Int(24, min=0, max=32).tag(label="start 2^")
    scale_factor = Float(2.0, min=1.25, max=16.0).tag(label="scale_factor", scale="log2", step=0.25)
    apart = Bool(False).tag(label="own factor down")
    down_factor = Float(2.0, min=1.25, max=16.0).tag(label="factor down", scale="log2", step=0.25)
    scale_window = Int(50, min=1, max=400).tag(label="scale_window", unit="steps")
    floor_exponent = Int(0, min=-24, max=10).tag(label="floor 2^")
    hold = Bool(False).tag(label="hold the scale")
    step = Int(SHOWN - 1, min=0, max=SHOWN - 1).tag(label="step shown")

    def policy(self) -> ScalePolicy:
        """MindSpore's rule with a floor that can be moved; held, neither factor acts."""
        up, floor = self.scale_factor, 2.0**self.floor_exponent
        down = self.down_factor if self.apart else up
        window = 2**30 if self.hold else self.scale_window
        apart = {"backoff_divisor": 1.0 if self.hold else down}
        return ScalePolicy.by_factor(2.0**self.init_exponent, up, window, floor, name="dynamic", **apart)

    def idle(self) -> tuple[str, ...]:
        moving = ("scale_factor", "apart", "down_factor", "scale_window", "floor_exponent") if self.hold else ()
        return (*moving, *(() if self.apart else ("down_factor",)), *(() if self.drawn or self.puts else ("undraw",)))

    def draw(self, ceiling: Mapping[str, float]) -> None:
        """Take over a ceiling drawn by hand: step -> exponent."""
        powers = stroke(ceiling, SHOWN, *POWERS)
        self._change({}, drawn=self.drawn | {k: 2.0**v for k, v in powers.items()})

    def put(self, step: int, power: float) -> None:
        """Set the scale of one step by hand; held, it is the scale of all steps."""
        powers = stroke({step: power}, SHOWN, *((0, 32) if self.hold else POWERS))
        if self.hold:
            self.set(init_exponent=round(next(iter(powers.values()), self.init_exponent)))
        else:
            self._change({}, puts=self.puts | {k: 2.0**v for k, v in powers.items()})

    def undraw(self) -> None:
        """Forget what was drawn and set by hand."""
        self._change({}, **self.fresh)

    def compute(self) -> None:
        key = [*self.state().values()][:-1], self.drawn, self.puts
        if key == vars(self).get("_key"):  # only the step moved: the trajectory stays
            return
        if self.floor_exponent > self.init_exponent:
            raise ValueError(f"the floor 2^{self.floor_exponent} must not lie above the start 2^{self.init_exponent}")
        self._key = None  # an interrupt from here on leaves results of two settings
        self.trace, self.ceiling = recorded(self.run, self.fmt)
        if self.drawn:
            self.ceiling = self.ceiling.copy()
            self.ceiling[list(self.drawn)] = list(self.drawn.values())
        self.scale, self.finite, self.reasons = stepped(self.policy(), self.ceiling, {} if self.hold else self.puts)
        fresh = self.finite & np.append(True, (self.scale[1:] != self.scale[:-1]) | ~self.finite[:-1])
        fresh[[] if self.hold else list(self.puts)] = True
        starts = np.maximum.accumulate(np.where(fresh, np.arange(SHOWN), 0))
        self.good = np.where(self.finite, (np.arange(SHOWN) - starts) % self.scale_window + 1, 0)
        self.zeros = zero_share(self.trace, self.scale[:, None], self.fmt)[:, 0]
        with np.errstate(invalid="ignore"):
            self.headroom = np.log2(np.maximum(self.ceiling, 2.0**-60) / self.scale)
        self._key = key

    @property
    def skipped(self) -> np.ndarray:
        """Indices of the skipped steps up to the one shown."""
        return np.flatnonzero(~self.finite[: self.step + 1])

    def _name(self) -> str:
        """The run; a format with more range than float16 holds its activations for some steps more."""
        broken = np.flatnonzero(recorded(self.run, self.fmt)[1] < 0)
        return f"broken from step {broken[0]} on" if len(broken) else RUNS[self.run]

    def summary(self) -> str:
        i, skipped = self.step, len(self.skipped)
        so_far = (
            f"Up to here {skipped} of {counted(i + 1, 'step')} {'was' if skipped == 1 else 'were'} skipped, so the "
            f"optimizer was called {counted(i + 1 - skipped, 'time')}"
        )
        inside = "" if self.fmt == "fp16" else f", with gradients in {FORMATS[self.fmt]}"
        head = f"{_sentence(self._name())}{inside}. Step {i}: the scale is {exponent(self.scale[i])}"
        if self.ceiling[i] < 0:
            return f"{head}; no scale helps, because the loss itself is not finite. {so_far}."
        zeros = f"{_sentence(percent(self.zeros[i]))} of this step's gradient values are zero."
        if math.isnan(self.zeros[i]):  # a ceiling drawn by hand
            zeros = "This step has no recorded gradients, because its loss was not finite."
        bits = f"{self.headroom[i]:.1f}" if abs(self.headroom[i]) >= 0.05 else f"{self.headroom[i]:.1g}"
        return (
            f"{head}, the ceiling {exponent(self.ceiling[i])}, the headroom {bits} bits; decision: "
            f"{self.reasons[i]}{'' if self.finite[i] else ', and the optimizer sees nothing of this step'}. {so_far}. "
            f"{zeros}"
        )

    def table(self) -> list[dict[str, Any]]:
        events = [i for i in range(self.step + 1) if not self.finite[i] or self.reasons[i] not in ("held", "at cap")]
        return [
            {
                "step": i,
                "scale": exponent(self.scale[i]),
                "ceiling": exponent(self.ceiling[i]) if self.ceiling[i] > 0 else "none",
                "skipped": "yes" if not self.finite[i] else "",
                "decision": str(self.reasons[i]),
            }
            for i in events
        ]


class SweepExplorer(Explorer):
    """Every pair of factor and window on one recorded run: `grid` (factors, windows) of the chosen figure.

    `least` are the pairs that lose the least training signal, to skipped steps and to zeros together, as `replay` ranks
    policies; `best` is the first of them, None where all lose the same. They are the same whichever figure is shown.
    """

    controls = ("run", "init_exponent", "figure")
    FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
    WINDOWS = (2, 5, 10, 20, 50, 100, 200)
    FIGURES = {
        "skipped": "skipped steps of 400",
        "headroom": "mean headroom, bits",
        "zeros": "gradient values that are zero, %",
        "lost": "training signal lost, %",
    }
    TOLD = {
        "skipped": "The pairs of factor and window skip from {low} to {high} of 400 steps.",
        "headroom": "The mean headroom of the pairs of factor and window goes from {low} to {high} bits.",
        "zeros": "With the pairs of factor and window, from {low} to {high} % of the gradient values are zero.",
        "lost": "The pairs of factor and window lose from {low} to {high} % of the training signal.",
    }
    run = Enum(list(RUNS)[:3], "gpt_sums").tag(label="recorded run", names=RUNS)
    init_exponent = Int(16, min=0, max=32).tag(label="initial scale, 2 to the", costly=True)
    figure = Enum(list(FIGURES), "skipped").tag(label="what the cells show", names=FIGURES)

    def compute(self) -> None:
        trace, tops = recorded(self.run)
        pairs = [(f, w) for f in self.FACTORS for w in self.WINDOWS]
        start = 2.0**self.init_exponent
        policies = [ScalePolicy.by_factor(start, f, w, floor=1.0) for f, w in pairs]
        done = simulate(tops, stack(policies))
        good = done.sampled <= tops[:, None]
        bits = np.where(good, np.log2(np.maximum(tops, 2.0**-60))[:, None] - np.log2(done.sampled), 0.0)
        lost = np.where(good, flushed(trace, done.sampled, "fp16"), 0.0).sum(0) / np.maximum(good.sum(0), 1)
        columns = {
            "skipped": done.skipped.astype(float),
            "headroom": bits.sum(0) / np.maximum(good.sum(0), 1),
            "zeros": 100 * zero_share(trace, done.sampled).mean(0),
            "lost": 100 * (1 - good.mean(0) * (1 - lost)),
        }
        self.grids = {name: c.reshape(len(self.FACTORS), len(self.WINDOWS)) for name, c in columns.items()}
        self.grid = self.grids[self.figure]
        lost = self.grids["lost"]
        self.least = [(int(row), int(column)) for row, column in np.argwhere(lost <= lost.min() + 1e-10)]
        self.best = self.least[0] if len(self.least) < lost.size else None

    def summary(self) -> str:
        told = self.TOLD[self.figure].format(low=f"{self.grid.min():.4g}", high=f"{self.grid.max():.4g}")
        head = f"{_sentence(RUNS[self.run])}, started at 2^{self.init_exponent}. {told} "
        if self.best is None:
            return head + "All pairs lose the same share of the training signal."
        at = {name: grid[self.best] for name, grid in self.grids.items()}
        return head + (
            f"Factor {self.FACTORS[self.best[0]]:g} with window {self.WINDOWS[self.best[1]]} loses the least training "
            f"signal, {percent(at['lost'] / 100, 1)}: it skips {at['skipped']:.0f} of 400 steps, and "
            f"{percent(at['zeros'] / 100, 1)} of the gradient values are zero.{self._others()}"
        )

    def _others(self) -> str:
        """How many pairs lose as little as the one that is named."""
        others = len(self.least) - 1
        return f" {others} other pair{'s lose' if others > 1 else ' loses'} as little." if others else ""

    def table(self) -> list[dict[str, Any]]:
        return [
            {"factor": f, **{f"window {w}": float(f"{v:.4g}") for w, v in zip(self.WINDOWS, values)}}
            for f, values in zip(self.FACTORS, self.grid)
        ]


class SteeredScaler(LossScaler):
    """A loss scaler whose policy is asked for anew before every step, so that it can be steered while it runs."""

    def __init__(self, policy: Callable[[], ScalePolicy]) -> None:
        self._policy = policy
        self._state: ScaleState = initial(policy())
        self._kicks = deque[float]()  # from any thread
        self.scale_value = torch.tensor(self._state.scale, dtype=torch.float32)

    def adjust(self, grads_finite: Tensor) -> bool:
        """One step of the policy as it is now, and of what was asked for by hand."""
        factor = 1.0
        while self._kicks:
            factor *= self._kicks.popleft()
        self._state, _ = advance(self._policy(), self._state, bool(grads_finite))
        if factor != 1:
            self.put(min(2.0**100, max(2.0**-40, self._state.scale * factor)))
        self.scale_value.fill_(self._state.scale)
        return True

    def kick(self, factor: float) -> None:
        """Multiply the scale when the running step is over: its gradients must be divided by what multiplied the loss.

        From any thread; kicks within a step multiply.
        """
        self._kicks.append(factor)

    def put(self, scale: float) -> None:
        """Set the scale between two steps; the count of finite steps starts again."""
        self._state = self._state._replace(scale=scale, decided=scale, good=0)
        self.scale_value.fill_(scale)


class LiveExplorer(Explorer):
    """A real training on the digits at O2 in float16 whose scale can be steered while it runs."""

    controls = ("scale_factor", "scale_window", "floor_exponent")
    actions = {"Train": "train", "Stop": "stop", "Scale x 2^10": "kick_up", "Scale / 2^10": "kick_down"}
    scale_factor = Int(2, min=2, max=16).tag(label="scale_factor", unit="times")
    scale_window = Int(20, min=1, max=240).tag(label="scale_window", unit="steps")
    floor_exponent = Int(0, min=-14, max=10).tag(label="floor, 2 to the")

    def __init__(self, **params: object) -> None:
        self.run: Run | None = None
        self.steps = LIVE_STEPS
        self.recorded = recorded_run()
        super().__init__(**params)
        self._scaler = SteeredScaler(self.policy)

    def policy(self) -> ScalePolicy:
        """The policy of the sliders now; it starts at 2^16."""
        factor = float(self.scale_factor)
        floor = 2.0**self.floor_exponent
        return ScalePolicy.by_factor(2.0**16, factor, self.scale_window, floor)

    def train(self) -> None:
        """Train in the background."""
        self.start(self._training)

    def kick_up(self) -> None:
        """Multiply the scale by 2^10 from the next step on."""
        self._kick(2.0**10)

    def kick_down(self) -> None:
        """Divide the scale by 2^10 from the next step on."""
        self._kick(2.0**-10)

    def _kick(self, factor: float) -> None:
        if not self.busy:
            raise ValueError("press Train first: this moves the scale of a training that is running")
        self._scaler.kick(factor)
        self.touch()

    def _training(self) -> Iterator[float]:
        with self.lock:
            self._scaler = SteeredScaler(self.policy)
        for run in training("O2", self._scaler, steps=self.steps):
            self.run = run
            yield len(run.losses) / self.steps

    def summary(self) -> str:
        settings = f"factor {self.scale_factor}, window {self.scale_window}, floor 2^{self.floor_exponent}"
        if self.run is None or not self.run.losses:
            return f"Set to {settings}: press Train, and move the sliders while it trains."
        right = "" if self.run.accuracy is None else f", {percent(self.run.accuracy)} of the test digits right"
        return (
            f"Set to {settings}; after {counted(len(self.run.losses), 'step')}: loss {self.run.losses[-1]:.2f}, "
            f"scale {exponent(self.run.scales[-1])}, {counted(len(self.run.skipped), 'step')} skipped{right}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [self.run.row()] if self.run and self.run.losses else []
