"""Models of lesson 02: where each mode sends a number, the staircase, and four ways to add tiny updates."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from traitlets import Bool, Enum, Float, Int, Unicode

from mpkit.explorers.base import Explorer, counted
from mpkit.explorers.formats import neighbour, read_number, short, store, value_of
from mpkit.formats import FloatFormat, get_format
from mpkit.rounding import MODES, round_to, ulp

NARROW = ["fp16", "bf16", "e5m2", "e4m3fn", "e3m2", "e2m3", "e2m1"]


class ModesExplorer(Explorer):
    """A number between two neighbours, and where every mode sends it."""

    controls = ("fmt", "lower", "offset", "negative")
    actions = {"Halfway": "halfway"}
    fmt = Enum(NARROW, "fp16").tag(label="format")
    lower = Unicode("1").tag(label="lower neighbour")
    offset = Float(0.375, min=0.0, max=1.0).tag(label="distance above it", unit="ulp", step=1 / 32)
    negative = Bool(False).tag(label="negative number")

    def compute(self) -> None:
        fmt = self.format = get_format(self.fmt)
        value = abs(read_number(self.lower))
        if not value <= fmt.max:
            raise ValueError(f"the lower neighbour must be at most {fmt.max:g} in {self.fmt}, got {self.lower}")
        wide = torch.tensor(value, dtype=torch.float64)
        self.near = float(round_to(wide, fmt, "toward_zero"))
        self.gap = float(ulp(torch.tensor(self.near, dtype=torch.float64), fmt))
        sign = -1.0 if self.negative else 1.0
        self.x = sign * (self.near + self.offset * self.gap)
        ends = (sign * self.near, sign * (self.near + self.gap))
        self.left, self.right = min(ends), max(ends)
        x = torch.tensor(self.x, dtype=torch.float64)
        self.results = {mode: float(round_to(x, fmt, mode)) for mode in MODES if mode != "stochastic"}
        self.share_right = (self.x - self.left) / self.gap
        self.reached = self._reached(self.left), self._reached(self.right)
        self.chance_up = self.share_right
        if self.reached[0] == self.reached[1]:  # a format that saturates has one value for both
            self.chance_up = float(self.negative)

    def _reached(self, end: float) -> float:
        """What is stored of a neighbour: itself, or beyond the largest number what the format has in its place."""
        return float(round_to(torch.tensor(end, dtype=torch.float64), self.format))

    def parity(self, value: float) -> str:
        """ "even" or "odd" fraction field; "too large" beyond max."""
        if abs(value) > self.format.max:
            return "too large"
        return "odd" if store(value, self.format) & 1 else "even"

    def halfway(self) -> None:
        """Put the number on the tie."""
        self.set(offset=0.5)

    def summary(self) -> str:
        told = ", ".join(f"{mode} {self._short(value)}" for mode, value in self.results.items())
        return f"{self._short(self.x)} {self._place()}: {told}; stochastic {self._drawn()}."

    def _short(self, value: float) -> str:
        """A number in as many digits as tell the number from its neighbours."""
        ends = {self.left, self.right} - {self.x}
        enough = (d for d in range(7, 17) if short(self.x, d) not in {short(end, d) for end in ends})
        return short(value, next(enough, 17))

    def _place(self) -> str:
        """Where the number lies among the values of the format."""
        largest, sign = self.format.max, "-" if self.negative else ""
        if abs(self.x) > largest:
            side = "below -" if self.negative else "above "
            return f"lies {side}{self._short(largest)}, the {'lowest' if sign else 'largest'} number of {self.fmt}"
        if self.x in (self.left, self.right):
            return f"is a number of {self.fmt} ({self.parity(self.x)})"
        ends = (f"{self._short(end)} ({self.parity(end)})" for end in (self.left, self.right))
        return f"lies between {' and '.join(ends)} of {self.fmt}"

    def _drawn(self) -> str:
        """What stochastic rounding gives, in a sentence."""
        low, high = self.reached
        if low == high or self.chance_up in (0, 1):
            return f"gives {self._short(high if self.chance_up else low)} always"
        if abs(self.x) > self.format.max:
            return f"gives {self._either()}"
        return f"goes up with probability {self._chance()}"

    def _chance(self) -> str:
        """The probability of going up; what may fail is not told as 1."""
        told = f"{self.chance_up:.5g}"
        return "above 0.9999" if told == "1" else told

    def _either(self) -> str:
        low, high = map(self._short, self.reached)
        return f"{high} with probability {self._chance()}, else {low}"

    def table(self) -> list[dict[str, Any]]:
        def off(value: float) -> str:
            return "" if math.isnan(value) else f"{(value - self.x) / self.gap:+.3g}" if value != self.x else "0"

        exact = [{"mode": m, "result": self._short(v), "error, ulp": off(v)} for m, v in self.results.items()]
        drawn = self._drawn()
        result = drawn.removeprefix("gives ").removesuffix(" always") if " always" in drawn else self._either()
        error = "0 on average" if self.reached == (self.left, self.right) else ""
        return [*exact, {"mode": "stochastic", "result": result, "error, ulp": error}]


class StaircaseExplorer(Explorer):
    """The graph of rounding, and the ulp as a function of the magnitude."""

    controls = ("fmt", "mode", "span")
    fmt = Enum(["e2m1", "e2m3", "e3m2", "e4m3fn", "e5m2", "bf16", "fp16"], "e3m2").tag(label="format")
    mode = Enum([mode for mode in MODES if mode != "stochastic"], "nearest_even").tag(label="mode")
    span = Int(2, min=-8, max=6).tag(label="shown up to 2 to the")

    def compute(self) -> None:
        fmt = self.format = get_format(self.fmt)
        self.limit = 2.0**self.span
        self.x = np.linspace(-self.limit, self.limit, 4097)
        x = torch.from_numpy(self.x)
        self.y = round_to(x, fmt, self.mode, overflow="saturate").numpy()
        self.magnitudes = self.limit * 2.0 ** (np.arange(-640, 0) / 64)  # the powers of two themselves are among them
        self.ulps = ulp(torch.from_numpy(self.magnitudes), fmt).numpy()
        values = fmt.values()
        self.steps = len(values[values.isfinite() & (values.abs() <= self.limit)].unique())  # 0 and -0 are one step

    def summary(self) -> str:
        low, high = (f"2^{math.log2(gap):g}" for gap in (self.ulps.min(), self.ulps.max()))
        grown = f"grows from {low} to {high}" if low != high else f"stays {low}"
        largest = self.format.max
        end = f"2^{self.span}" if self.limit <= largest else f"{largest:g}, the largest number"
        return (
            f"{self.fmt}, {self.mode}: {counted(self.steps, 'value')} within ±2^{self.span}. Between the magnitudes "
            f"2^{self.span - 10} and {end}, the ulp {grown}."
        )

    def table(self) -> list[dict[str, Any]]:
        changes = np.flatnonzero(np.diff(self.ulps)) + 1
        return [
            {"from magnitude": f"{self.magnitudes[i]:.4g}", "ulp": f"{self.ulps[i]:.4g}"}
            for i in (0, *changes.tolist())
        ]


SCHEMES = ("nearest", "master", "kahan", "stochastic")
STEPS = 2000


def kahan_add(total: Tensor, lost: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Add x to a total, carrying in `lost` what the rounding of the sum took away.

    Shapes:  all (*) of one float dtype, in which every operation rounds -> (new total, new lost), same dtype.
    Source:  W. Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965) 40.
    """
    corrected = x - lost
    new = total + corrected
    return new, (new - total) - corrected


@lru_cache(maxsize=64)
def updates(fmt_name: str, update: float, steps: int = STEPS, seed: int = 0) -> dict[str, np.ndarray]:
    """A weight that starts at 1 and receives `steps` equal updates, in four schemes and exactly.

    "nearest" and "kahan" are torch's own 16-bit arithmetic, "stochastic" is emulated; "master" keeps weight and update
    in float32 and rounds only the copy that a network would compute with. The update is rounded first elsewhere too.

    Returns:  (steps + 1,) float64 weights for each of `SCHEMES` and "exact".
    """
    fmt = get_format(fmt_name)
    generator = torch.Generator().manual_seed(seed)
    small = torch.tensor(update).to(fmt.torch_dtype)
    nearest = kahan = torch.ones_like(small)
    lost, noisy, wide = torch.zeros_like(small), torch.ones(()), small.float()
    rows = [(1.0, 1.0, 1.0)]
    for _ in range(steps):
        nearest = nearest + small
        kahan, lost = kahan_add(kahan, lost, small)
        noisy = round_to(noisy + wide, fmt, "stochastic", generator=generator)
        rows.append((nearest.item(), kahan.item(), noisy.item()))
    columns = np.array(rows)
    master = np.cumsum(np.array([1.0] + [update] * steps, dtype=np.float32), dtype=np.float32)
    return {
        "nearest": columns[:, 0],
        "master": round_to(torch.from_numpy(master), fmt).double().numpy(),
        "kahan": columns[:, 1],
        "stochastic": columns[:, 2],
        "exact": 1.0 + update * np.arange(steps + 1),
    }


class UpdatesExplorer(Explorer):
    """2,000 tiny updates of one weight, drawn as far as `progress`."""

    controls = ("fmt", "update", "progress")
    fmt = Enum(["fp16", "bf16"], "fp16").tag(label="format")
    update = Float(1e-4, min=1e-6, max=1e-2).tag(label="update lr·g", scale="log10", step=0.25, costly=True)
    progress = Int(100, min=0, max=100).tag(label="shown, % of the run")

    def compute(self) -> None:
        self.paths = updates(self.fmt, self.update)
        self.shown = self.progress * STEPS // 100
        self.half_ulp = float(ulp(torch.ones(()), get_format(self.fmt))) / 2

    @property
    def digits(self) -> int:
        """Digits after the point that show one update."""
        return max(4, math.ceil(-math.log10(self.update) - 1e-9))

    def end(self, scheme: str) -> float:
        """The weight after the steps shown."""
        return float(self.paths[scheme][self.shown])

    def summary(self) -> str:
        relation = "below" if self.update < self.half_ulp else "at or above"
        told = ", ".join(f"{scheme} {self.end(scheme):.{self.digits}f}" for scheme in SCHEMES)
        return (
            f"{self.fmt}, {self.shown} updates of {self.update:.3g}, {relation} half an ulp of 1 "
            f"({self.half_ulp:.3g}): {told}; exact {self.end('exact'):.{self.digits}f}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": int(i), **{scheme: f"{self.paths[scheme][i]:.{self.digits}f}" for scheme in ("exact", *SCHEMES)}}
            for i in np.linspace(0, self.shown, 11).astype(int)
        ]


def running_sum(values: Tensor) -> Tensor:
    """Sum one by one, each total rounded to the dtype of the values; (N,) -> (N,) totals of the same dtype."""
    total, totals = torch.zeros((), dtype=values.dtype), []
    for value in values:
        total = total + value
        totals.append(total)
    return torch.stack(totals)


def grid_around(value: float, fmt: FloatFormat, count: int = 2) -> list[float]:
    """The stored value with `count` neighbours on each side, ascending."""
    down, up = [store(value, fmt)], [store(value, fmt)]
    for _ in range(count):
        below, above = neighbour(down[-1], fmt, False), neighbour(up[-1], fmt, True)
        down += [] if below is None else [below]
        up += [] if above is None else [above]
    return [value_of(pattern, fmt) for pattern in (*reversed(down), *up[1:])]
