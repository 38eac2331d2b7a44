"""Lesson 02: where each mode sends a number, and four ways to add tiny updates."""

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.formats import FloatFormat, get_format
from mpkit.lessons.formats import store
from mpkit.rounding import MODES, Mode, round_to
from mpkit.view import Choice, Panel, Range, Sheet, Stroke, Text, linear, names, percent, prediction, read_number, view

NARROW = ["fp16", "bf16", "e5m2", "e4m3fn", "e3m2", "e2m3", "e2m1"]
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


STEPS = 2000


@lru_cache(maxsize=64)
def added(fmt_name: str, update: float, steps: int = STEPS, seed: int = 0) -> dict[str, np.ndarray]:
    """A weight that starts at 1 and receives `steps` equal updates, in four schemes and exactly.

    "nearest" and "stochastic" round each new weight once, from float64; "kahan" is 16-bit arithmetic, so
    it rounds the update first; "master" adds in float32 and rounds only the copy that a network would compute with.

    Returns:  (steps + 1,) float64 weights for each scheme and "exact".
    """
    fmt, generator, one = get_format(fmt_name), torch.Generator().manual_seed(seed), torch.ones(()).double()
    small, every = torch.tensor(update).to(fmt.torch_dtype), [update] * steps

    def summed(mode: Mode) -> np.ndarray:
        sums = accumulate(every, lambda w, x: round_to(w + x, fmt, mode, generator=generator), initial=one)
        return np.array([w.item() for w in sums])

    master = np.cumsum(np.array([1.0, *every], dtype=np.float32), dtype=np.float32)
    held = torch.ones_like(small), torch.zeros_like(small)
    kahan = accumulate([small] * steps, lambda held, x: kahan_add(held[0], held[1], x), initial=held)
    return {
        "nearest": summed("nearest_even"),
        "master": round_to(torch.from_numpy(master), fmt).double().numpy(),
        "kahan": np.array([w.item() for w, _ in kahan]),
        "stochastic": summed("stochastic"),
        "exact": 1.0 + update * np.arange(steps + 1),
    }


# ---- where each mode sends a number
@view(
    fmt=Choice({n: n for n in NARROW}, "format"),
    lower=Text("neighbour nearer to 0"),
    offset=Range(0.0, 1.0, 1 / 32, "distance beyond it, ulp"),
    negative="negative number",
)
def modes(see: Sheet, fmt="fp16", lower="1", offset=0.375, negative=False) -> None:
    """A number between its neighbours, and where every mode sends it.

    Numbers: `x left right results` (mode -> value) and `chance`, with which stochastic rounding goes up.
    """
    form, sign = get_format(fmt), -1.0 if negative else 1.0
    value = read_number(lower)
    if not 0 <= value <= form.max:
        raise ValueError(f"need a neighbour from 0 to {form.max:g} in {fmt}, got {lower}; tick the box for the minus")
    near = float(round_to(torch.tensor(value, dtype=torch.float64), form, "toward_zero"))
    gap = form.ulp(near)
    x, (left, right) = sign * (near + offset * gap), sorted((sign * near, sign * (near + gap)))
    wide = torch.tensor([x, left, right], dtype=torch.float64)
    results = {mode: float(round_to(wide[0], form, mode)) for mode in EXACT}
    reached = round_to(wide[1:], form).tolist()  # beyond the largest number what the format has in its place
    chance = (x - left) / gap if reached[0] != reached[1] else float(negative)
    odds = {v: p for v, p in zip(reached, (1 - chance, chance)) if p}
    panel = _rows(see, form, (x, left, right), results, odds, negative)
    grip: dict[str, Any] = {"cross": -0.75, "step": 1 / 32} | ({"base": 1, "slope": -1} if negative else {})
    panel.handle("x", "offset", offset, 0, 1, "distance beyond the neighbour nearer to 0, ulp", note=f"{x:.7g}", **grip)
    told: dict[str, str] = {mode: f"{v:.8g}" for mode, v in results.items()}
    told["stochastic"] = " or ".join(f"{v:.8g} ({percent(p, 1)})" for v, p in odds.items())
    ends = " and ".join(f"{v:.8g} ({_parity(v, form)})" for v in (left, right))
    every = f"{x:.8g}, between {ends} in {fmt}: " + ", ".join(f"{mode} {result}" for mode, result in told.items())
    other = "" if near == value else f"{lower} is no number of {fmt}; the next one nearer to 0 is {near:.8g}. "
    see.say(f"{other}{every}.", x=x, left=left, right=right, results=results, chance=chance)
    see.rows = [{"mode": mode, "result": result} for mode, result in told.items()]


def _parity(value: float, fmt: FloatFormat) -> str:
    """ "even" or "odd" fraction field; "too large" beyond max."""
    return "too large" if abs(value) > fmt.max else "odd" if store(value, fmt) & 1 else "even"


def _rows(see: Sheet, form: FloatFormat, place: Any, results: Any, odds: dict[float, float], minus: bool) -> Panel:
    """One row for each mode with an arrow to its result, the last one with the odds of stochastic rounding."""
    x, left, right = place
    see.grid(380)
    axis = linear("position between the two neighbours, ulp", -0.7, 1.7, 6)
    rows = names([mode.replace("_", " ") for mode in [*results, "stochastic"]], down=True, bare=False) | {"hi": -1.9}
    panel = see.panel(title=f"two neighbours in {form.name}, and where each mode goes", x=axis, y=rows)
    for edge, value in ((0, left), (1, right)):
        panel.rule("x", edge, "ink", width=1.6)
        told = next(text for text in (f"{value:.7g}", f"{value:.4g}") if len(text) < 11)  # two differ in these digits
        panel.text(f"{told}\n{_parity(value, form)}", edge, -1.4, size=13, beside=8 if edge else -8)
    at, last = (x - left) / (right - left), len(results)
    panel.line([-0.75, last + 0.5], [at, at], "own", dash=":", width=1.4)
    every = [(row, result, 0.5) for row, result in enumerate(results.values())]
    for row, result, share in every + [(last, result, share) for result, share in odds.items()]:
        fits = math.isfinite(result)  # inf and NaN lie beyond what is too large
        end = (result - left) / (right - left) if fits else -0.06 if minus else 1.06
        color, words = ("reference", "") if fits else ("overflow", f"{result:g}" + "\n" * (row == last))
        panel.points([row], [end], color, size=2 + 6 * math.sqrt(share))
        panel.text(words + percent(share, 1) * (row == last), end, row, color=color, beside=14 if end > 0.5 else -14)
        if row != last and end != at:
            panel.arrow((at, row), (end, row), color, width=2.2)
    return panel


# ---- weights that grow by tiny updates
LOOKS = {  # role, dash, glyph and its size, label; a diamond of Kahan is seen on the disc of the master
    "nearest": ("overflow", None, "s", 4, "16 bit, nearest"),
    "master": ("zero", "--", "o", 7, "float32 master"),
    "kahan": ("normal", "-.", "D", 3.5, "16 bit, Kahan"),
    "stochastic": ("own", None, "^", 4, "16 bit, stochastic"),
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
    at, half = np.arange(101) * STEPS // 100, get_format(fmt).ulp(1.0) / 2
    paths: dict[str, Any] = {name: path[at] for name, path in added(fmt, update).items()}
    end, top = paths["exact"][-1] - 1, max(float(path.max()) for path in paths.values()) - 1
    see.grid(380)
    see.play("progress", "% of the run", 101, every=80)
    x, y = linear("updates", 0, STEPS, 8), linear("weight", 1 - 0.08 * end, 1 + 1.08 * top, 5)
    where = f"{'below' if update < half else 'is' if update == half else 'above'} half an ulp of 1, {half:.8g}"
    shown = f"{update:.{8 if abs(update / half - 1) < 0.01 else 3}g}"
    panel = see.panel(title=f"a weight of 1 and 2,000 updates of {shown}, in four ways", x=x, y=y, pad=[28, 28, 46, 66])
    panel.line(paths["exact"], at, "reference", dash=":", width=1.6, label="exact")
    for scheme, (color, dash, glyph, size, label) in LOOKS.items():
        look = {"dash": dash, "glyph": glyph, "size": size, "every": 12}
        panel.line(paths[scheme], at, color, width=2.2, show="upto", label=label, **look)
    digits = max(4, math.ceil(-math.log10(update) - 1e-9))
    told = ", ".join(f"{scheme} {{{scheme}:.{digits}f}}" for scheme in LOOKS)
    see.say(
        f"{fmt}, {{done}} updates of {shown} ({where}): {told}; exact {{exact:.{digits}f}}.",
        done=at, half=half, **paths,
    )  # fmt: skip


# ---- predict: draw the sum
EACH, FIRST, ENDS = 100, 5, (0.0, 4200.0)


@lru_cache
def ones() -> np.ndarray:
    """(41,) the float16 sum of 0, 100, ... 4000 ones, added one by one."""
    every = accumulate(torch.ones(4000, dtype=torch.float16), torch.add, initial=torch.zeros(()).half())
    return np.array([total.item() for total in every])[::EACH]


@view(typed="or type it: the sums at 500, 1000, 1500 ... 4000 ones", drawn=Stroke(41, *ENDS))
def totals(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """A prediction that is drawn: the float16 sum of ones, from 500 to 4000 of them. Numbers: `guess truth near`."""
    axis = names([str(EACH * i) for i in range(41)], "ones added", bare=False)
    panel = see.panel(x=axis | {"ticks": axis["ticks"][::5]}, y=linear("sum in float16", *ENDS), pad=[28, 14, 46, 74])
    panel.rule("x", FIRST - 0.5, "muted", dash=":")
    told = prediction(see, panel, "rounding.totals", ones(), first=FIRST, ends=ENDS, start=500,
                      at=range(5, 41, 5), within=60, typed=typed, drawn=drawn, shown=shown)  # fmt: skip
    panel.line(ones()[:told], color="reference", width=2.6, label="sum in float16")
