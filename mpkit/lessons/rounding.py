"""Lesson 02: where each mode sends a number, the staircase, and four ways to add tiny updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.formats import FloatFormat, get_format
from mpkit.lessons.formats import neighbour, store, value_of
from mpkit.replay.percent import percent
from mpkit.rounding import MODES, round_to, ulp
from mpkit.view import Choice, Range, Sheet, Stroke, Text, view
from mpkit.view.answers import read_number
from mpkit.view.parts import guessed, prediction, typed_line
from mpkit.view.sheet import DASHES, GLYPHS, SERIES, linear, log2, names
from mpkit.view.words import counted

NARROW = ["fp16", "bf16", "e5m2", "e4m3fn", "e3m2", "e2m3", "e2m1"]
FORMATS = Choice({n: n for n in NARROW}, "format")
EXACT = [mode for mode in MODES if mode != "stochastic"]


# ---- numbers
def kahan_add(total: Tensor, lost: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Add x to a total, carrying in `lost` what the rounding of the sum took away.

    Shapes:  all (*) of one float dtype, in which every operation rounds -> (new total, new lost), same dtype.
    Source:  W. Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965) 40.
    """
    corrected = x - lost
    new = total + corrected
    return new, (new - total) - corrected


SCHEMES = ("nearest", "master", "kahan", "stochastic")
STEPS = 2000


@lru_cache(maxsize=64)
def added(fmt_name: str, update: float, steps: int = STEPS, seed: int = 0) -> dict[str, np.ndarray]:
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


def running_sum(values: Tensor) -> Tensor:
    """Sum one by one, each total rounded to the dtype of the values; (N,) -> (N,) totals of the same dtype."""
    total, every = torch.zeros((), dtype=values.dtype), []
    for value in values:
        total = total + value
        every.append(total)
    return torch.stack(every)


def grid_around(value: float, fmt: FloatFormat, count: int = 2) -> list[float]:
    """The stored value with `count` neighbours on each side, ascending."""
    down, up = [store(value, fmt)], [store(value, fmt)]
    for _ in range(count):
        below, above = neighbour(down[-1], fmt, False), neighbour(up[-1], fmt, True)
        down += [] if below is None else [below]
        up += [] if above is None else [above]
    return [value_of(pattern, fmt) for pattern in (*reversed(down), *up[1:])]


# ---- where each mode sends a number
@view(
    fmt=FORMATS,
    lower=Text("lower neighbour"),
    offset=Range(0.0, 1.0, 1 / 32, "distance above it, ulp"),
    negative="negative number",
)
def modes(see: Sheet, fmt="fp16", lower="1", offset=0.375, negative=False) -> None:
    """A number between its neighbours, and where every mode sends it.

    Numbers: `x left right results` (mode -> value) and `chance`, with which stochastic rounding goes up.
    """
    form = get_format(fmt)
    value = abs(read_number(lower))
    if not value <= form.max:
        raise ValueError(f"the lower neighbour must be at most {form.max:g} in {fmt}, got {lower}")
    near = float(round_to(torch.tensor(value, dtype=torch.float64), form, "toward_zero"))
    gap = float(ulp(torch.tensor(near, dtype=torch.float64), form))
    sign = -1.0 if negative else 1.0
    x = sign * (near + offset * gap)
    left, right = sorted((sign * near, sign * (near + gap)))
    wide = torch.tensor([x, left, right], dtype=torch.float64)
    results = {mode: float(round_to(wide[0], form, mode)) for mode in EXACT}
    reached = [float(v) for v in round_to(wide[1:], form)]  # beyond the largest number what the format has in its place
    chance = (x - left) / gap if reached[0] != reached[1] else float(negative)
    _rows(see, form, (x, left, right), results, reached, chance, negative)
    grip: dict[str, Any] = {"cross": -0.75, "step": 1 / 32, "note": f"{x:.7g}"}
    grip |= {"base": 1, "slope": -1} if negative else {}
    see.panels[0].handle("x", "offset", offset, 0, 1, "distance above the lower neighbour, ulp", **grip)
    see.buttons["Halfway"] = {"offset": 0.5}

    def told(v: float) -> str:
        """In as many digits as tell the number from its neighbours."""
        ends = {left, right} - {x}
        enough = (d for d in range(7, 17) if f"{x:.{d}g}" not in {f"{end:.{d}g}" for end in ends})
        return f"{v:.{next(enough, 17)}g}"

    sure = reached[0] == reached[1] or chance in (0, 1)
    odds = "above 0.9999" if f"{chance:.5g}" == "1" else f"{chance:.5g}"
    drawn = f"{told(reached[bool(chance)])} always" if sure else f"{told(reached[1])} with probability {odds}"
    place = f"lies between {told(left)} ({_parity(left, form)}) and {told(right)} ({_parity(right, form)}) of {fmt}"
    if abs(x) > form.max:
        place = f"lies beyond {told(math.copysign(form.max, x))}, the last number of {fmt}"
    elif x in (left, right):
        place = f"is a number of {fmt} ({_parity(x, form)})"
    listed = ", ".join(f"{mode} {told(v)}" for mode, v in results.items())
    numbers: dict[str, Any] = {"x": x, "left": left, "right": right, "results": results, "chance": chance}
    see.say(f"{told(x)} {place}: {listed}; stochastic gives {drawn}.", **numbers)
    off = {m: "" if math.isnan(v) else f"{(v - x) / gap:+.3g}" if v != x else "0" for m, v in results.items()}
    see.rows = [{"mode": m, "result": told(v), "error, ulp": off[m]} for m, v in results.items()]
    see.rows += [{"mode": "stochastic", "result": drawn, "error, ulp": "" if sure else "0 on average"}]


def _parity(value: float, fmt: FloatFormat) -> str:
    """ "even" or "odd" fraction field; "too large" beyond max."""
    return "too large" if abs(value) > fmt.max else "odd" if store(value, fmt) & 1 else "even"


def _rows(see: Sheet, form: FloatFormat, place: Any, results: Any, reached: Any, chance: float, minus: bool) -> None:
    """One row for each mode with an arrow to its result, the last one with the odds of stochastic rounding."""
    x, left, right = place
    gap, at = right - left, (x - left) / (right - left)
    see.grid(380)
    axis = linear("position between the two neighbours, ulp", -0.3, 1.3, 6)
    rows = names([mode.replace("_", " ") for mode in [*results, "stochastic"]], down=True, bare=False) | {"hi": -1.7}
    panel = see.panel(title=f"two neighbours in {form.name}, and where each mode goes", x=axis, y=rows)
    for edge, value in ((0, left), (1, right)):
        panel.rule("x", edge, "ink", width=1.6)
        panel.text(f"{value:.7g}\n{_parity(value, form)}", edge, -1.2, size=13, beside=8 if edge else -8)

    def arrival(value: float) -> tuple[float, str]:
        """Its place and colour: inf and NaN lie beyond the neighbour that is too large."""
        return ((value - left) / gap, "reference") if math.isfinite(value) else (-0.06 if minus else 1.06, "overflow")

    for row, result in enumerate(results.values()):
        end, color = arrival(result)
        if end != at:
            panel.arrow((at, row), (end, row), color, width=2.2)
        panel.points([row], [end], color, size=6)
        if color == "overflow":
            panel.text(f"{result:g}", end, row, color=color, beside=-10 if minus else 10)
    for side, odds in enumerate((1 - chance, chance)):
        end, color = arrival(reached[side])
        over = color == "overflow" and odds
        if odds:
            panel.points([len(results)], [end], color, size=2 + 6 * math.sqrt(odds))
        words = f"{percent(odds)} {reached[side]:g}" if over else percent(odds)
        panel.text(
            words, end if over else side, len(results), color=color if over else "ink", beside=14 if side else -14
        )
    panel.rule("x", at, "own", dash=":", width=1.4)


# ---- the graph of rounding
@view(
    fmt=Choice({n: n for n in reversed(NARROW)}, "format"),
    mode=Choice({m: m.replace("_", " ") for m in EXACT}, "mode"),
    span=Range(-8, 6, label="shown up to 2 to the"),
)
def staircase(see: Sheet, fmt="e3m2", mode="nearest_even", span=2) -> None:
    """Rounded against exact value, and the ulp against the magnitude. Numbers: `x y magnitudes ulps values`."""
    form, limit = get_format(fmt), 2.0**span
    x = np.linspace(-limit, limit, 4097)
    y = round_to(torch.from_numpy(x), form, mode, overflow="saturate").numpy()
    magnitudes = limit * 2.0 ** (np.arange(-640, 0) / 64)  # the powers of two themselves are among them
    ulps = ulp(torch.from_numpy(magnitudes), form).numpy()
    every = form.values()
    count = len(every[every.isfinite() & (every.abs() <= limit)].unique())  # 0 and -0 are one step
    see.grid(380, cols=(1.15, 1))
    across = linear("x", -limit, limit, 4)
    up = linear("rounded x", -1.1 * limit, 1.1 * limit, 4) | {"ticks": across["ticks"]}
    stairs = see.panel(title="rounding is a staircase", x=across, y=up)
    stairs.line([-limit, limit], [-limit, limit], "reference", dash=":", width=1.4, label="exact")
    at = _corners(y)[:: 2 if len(_corners(y)) > 2400 else 1]
    stairs.line(y[at], x[at], label="rounded")
    low, high = math.log2(ulps.min()), math.log2(ulps.max())
    right = log2("magnitude", span - 10, span, 2), log2("ulp", low - 1, high + 1)
    gaps = see.panel(0, 1, title="a step is one ulp high", x=right[0], y=right[1])
    held = magnitudes <= form.max  # beyond it there is no step
    at = _corners(ulps[held])
    gaps.line(np.log2(ulps[at]), np.log2(magnitudes[at]), "normal", label="ulp")
    if not held.all():
        largest = math.log2(form.max)
        gaps.rule("x", largest, "muted", dash=":")
        beside = 6 if largest < span - 4 else -6  # where there is room
        gaps.text("largest number", largest, low - 0.5, beside=beside, color="muted", halo=True)
    grown = f"grows from 2^{low:g} to 2^{high:g}" if low != high else f"stays 2^{low:g}"
    end = f"2^{span}" if limit <= form.max else f"{form.max:g}, the largest number"
    see.say(
        f"{fmt}, {mode}: {counted(count, 'value')} within ±2^{span}. Between the magnitudes 2^{span - 10} and {end}, "
        f"the ulp {grown}.",
        x=x, y=y, magnitudes=magnitudes, ulps=ulps, values=count,
    )  # fmt: skip
    changes = [0, *(np.flatnonzero(np.diff(ulps)) + 1).tolist()]
    see.rows = [{"from magnitude": f"{magnitudes[i]:.4g}", "ulp": f"{ulps[i]:.4g}"} for i in changes]


def _corners(values: np.ndarray) -> np.ndarray:
    """Where a staircase changes, with both ends: all that a line needs."""
    changes = np.flatnonzero(np.diff(values))
    return np.unique(np.concatenate([[0], changes, changes + 1, [len(values) - 1]]))


# ---- weights that grow by tiny updates
LOOKS = {  # role, dash, label
    "nearest": ("overflow", None, "16 bit, nearest"),
    "master": ("zero", "--", "float32 master"),
    "kahan": ("normal", "-.", "16 bit, Kahan"),
    "stochastic": ("own", None, "16 bit, stochastic"),
}


@view(
    fmt=Choice({"fp16": "fp16", "bf16": "bf16"}, "format"),
    update=Range(1e-6, 1e-2, 0.25, "update lr·g", log=10, costly=True),
    progress=(0, 100),
)
def updates(see: Sheet, fmt="fp16", update=1e-4, progress=100) -> None:
    """The weight after each of 2,000 tiny updates, in four schemes and exactly, as far as it is played.

    Numbers: `nearest master kahan stochastic exact`, the weight at each percent of the run; `half`, half an ulp of 1.
    """
    paths = added(fmt, update)
    at = np.arange(101) * STEPS // 100
    columns: dict[str, Any] = {name: path[at] for name, path in paths.items()}
    end, half = paths["exact"][-1] - 1, float(ulp(torch.ones(()), get_format(fmt))) / 2
    top = max(float(path.max()) for path in paths.values()) - 1
    see.grid(380)
    see.play("progress", "% of the run", 101, every=80)
    x, y = linear("updates", 0, STEPS, 8), linear("weight", 1 - 0.08 * end, 1 + 1.08 * max(top, end), 5)
    panel = see.panel(title=f"a weight of 1 gets 2,000 updates of {update:.3g}, kept in five ways", x=x, y=y)
    panel.line(columns["exact"], at, "reference", dash=":", width=1.6, label="exact", tag=True)
    for scheme, (color, dash, label) in LOOKS.items():
        panel.line(columns[scheme], at, color, dash=dash, width=2.2, show="upto", label=label, tag=True)
    last = [columns[s] - 1 for s in ("nearest", "exact")]  # beside the 1 a tiny change would not be seen
    words = "nearest has moved by {}, exact by {}"
    panel.text(words, 0.02, 1, values=last, frame=True, anchor="start", valign="top", dy=6, halo=True)
    digits = max(4, math.ceil(-math.log10(update) - 1e-9))
    relation = "below" if update < half else "at or above"
    told = ", ".join(f"{scheme} {{{scheme}:.{digits}f}}" for scheme in SCHEMES)
    see.say(
        f"{fmt}, {{done}} updates of {update:.3g}, {relation} half an ulp of 1 ({half:.3g}): {told}; exact "
        f"{{exact:.{digits}f}}.",
        done=at, half=half, **columns,
    )  # fmt: skip


def sums(ways: Mapping[str, Any], exact: Any) -> Sheet:
    """Running totals over the number of terms, one line per way of summing."""
    see, at, exact = Sheet(), np.linspace(0, len(exact) - 1, 251).astype(int), np.asarray(exact)
    see.grid(340)
    x, y = linear("terms added", 0, len(exact)), linear("total", 0, 1.05 * float(exact.max()))
    panel = see.panel(title="running totals, and where they stall", x=x, y=y)
    panel.line(exact[at], at + 1, "reference", dash=":", width=1.4, label="exact")
    for (name, values), color, dash, glyph in zip(ways.items(), SERIES, DASHES, GLYPHS):
        look = {"dash": dash, "glyph": glyph, "every": 30}
        panel.line(np.asarray(values)[at], at + 1, color, label=name, tag=True, **look)
    return see


# ---- predict: draw the sum
EACH, FIRST, ENDS = 100, 6, (0.0, 4200.0)


@lru_cache
def ones() -> np.ndarray:
    """(41,) the float16 sum of 0, 100, ... 4000 ones, added one by one."""
    every = running_sum(torch.ones(4000, dtype=torch.float16)).float().numpy()
    return np.concatenate([[0.0], every[EACH - 1 :: EACH]])


@view(typed="or type it: seven sums at equal distances from 600 to 4000 ones", drawn=Stroke(41, *ENDS))
def totals(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """A prediction that is drawn: the float16 sum of ones, from 600 to 4000 of them. Numbers: `guess truth near`."""
    truth, count = ones(), 41 - FIRST
    values = typed_line(typed, 7, *ENDS, "seven sums such as 1000 1500 2000 2500 3000 3500 4000") if typed else None
    line = np.interp(np.arange(count), np.linspace(0, count - 1, 7), values) if values else None
    guess = guessed(np.full(count, 500.0), line, drawn, FIRST)
    see.grid(380, 900)
    axis = names([str(EACH * i) for i in range(41)], "ones added", bare=False)
    title = "your line and what happened" if shown else "draw the sum into the right part"
    y = linear("sum in float16", *ENDS)
    panel = see.panel(title=title, x=axis | {"ticks": axis["ticks"][::5]}, y=y, pad=[28, 14, 46, 74])
    panel.rule("x", FIRST - 0.5, "muted", dash=":")
    prediction(see, panel, guess, FIRST, shown, bool(typed or drawn), ENDS)
    panel.line(truth[: 41 if shown else FIRST], color="reference", width=2.6, label="sum in float16")
    near = int((np.abs(guess - truth[FIRST:]) <= 60).sum())
    numbers: dict[str, Any] = {"guess": guess, "truth": truth[FIRST:], "near": near}
    if not shown:
        known = (
            "Ones are added in float16, one by one. The first 500 sums are exact. How does it go on up to 4000 ones?"
        )
        return see.say(f"{known} Draw it, or type it. Then press Show what happened.", **numbers)
    happened = f"the sum is exact up to {truth.max():.0f} and stays there: 2049 is a tie that goes to the even 2048"
    head = f"At {near} of {count} points your line is within 60 of the sum."
    see.say(f"{head} {picture_of(guess)} What happened: {happened}.", **numbers)


def picture_of(guess: np.ndarray) -> str:
    """Which wrong picture of a long sum a drawing shows, if one of the usual ones."""
    exact = EACH * np.arange(FIRST, 41)
    first, second = guess[len(guess) // 2] - guess[0], guess[-1] - guess[len(guess) // 2]
    if (np.abs(guess - ones()[FIRST:]) <= 60).sum() >= 31:
        return "This is the right picture: exact up to 2048, and nothing after it."
    if np.abs(guess - exact).mean() < 120:
        return "You drew the exact sum. float16 holds 4000, but above 2048 it has no odd numbers: 2048 + 1 is a tie."
    if (guess - exact > 120).any():
        return "You drew a sum that is larger than the number of ones. No rounding here makes it larger."
    if (np.maximum.accumulate(guess) - guess > 60).any():
        return "You drew a sum that falls. It cannot fall: at worst, adding 1 changes nothing."
    if np.ptp(guess[-5:]) < 120:
        return f"You drew a sum that stops near {guess[-1]:.0f}. It does stop, where the gap becomes 2."
    drew = "You drew a sum that slows down." if second < 0.8 * first else "Look where the lines part."
    return f"{drew} Up to 2048 every sum is exact. After it each addition is lost as a whole."
