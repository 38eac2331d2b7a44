"""Lesson 01: a number and its bits, its neighbours, its fate in every format, and the gaps between numbers."""

import math
import re
from typing import Any

import numpy as np
import torch

from mpkit.formats import FORMATS, FP16, FloatFormat, get_format
from mpkit.rounding import round_to
from mpkit.view import Choice, Range, Sheet, Stroke, Text, counted, linear, log2, names, power_of_two, space, view
from mpkit.view.answers import read_number
from mpkit.view.parts import edges, prediction, regions
from mpkit.view.words import FLOAT32_MAX

NAMES = [name for name in FORMATS if name != "fp64"]
OTHERS = ("e5m2fnuz", "e4m3fnuz", "e4m3b11fnuz", "e3m4", "binary8p3se", "binary8p4se", "binary8p5se")
BOX = {n: n for n in NAMES} | {n: f"other: {n}" for n in OTHERS}


# ---- numbers
def store(value: float, fmt: FloatFormat) -> int:
    """The pattern of a number in a format, rounded to nearest even, overflow by the format's own rule."""
    return int(fmt.encode(round_to(torch.tensor(value, dtype=torch.float64), fmt)))


def value_of(pattern: int, fmt: FloatFormat) -> float:
    """The value of one pattern."""
    return float(fmt.decode(torch.tensor(pattern)))


def beside(pattern: int, fmt: FloatFormat, steps: range) -> list[float]:
    """The values that lie so many steps of the format from that of a pattern, ascending; NaN beyond the ends."""
    sign = 1 << (fmt.bits - 1)
    places = (-(pattern - sign) if pattern & sign else pattern) + torch.tensor(steps)  # from zero
    last = store(math.inf if fmt.has_inf else fmt.max, fmt)
    values = fmt.decode(places.abs().clamp(max=last)).double() * torch.where(places < 0, -1, 1)
    return values.where(places.abs() <= last, math.nan).tolist()


def bits_kept(fmt: FloatFormat, exponent: int) -> int:
    """Significant bits of numbers in [2**exponent, 2**(exponent+1)): 0 where they are lost, -1 where they overflow."""
    if exponent > fmt.max_exponent:
        return -1
    return max(0, fmt.fraction_bits + 1 - max(0, fmt.min_exponent - exponent))


def fate(fmt: FloatFormat, exponent: int) -> str:
    """What one format does to 2**exponent, in words."""
    kept = bits_kept(fmt, exponent)
    if kept < 0:
        return {"inf": "overflows to inf", "nan": "overflows to NaN"}.get(fmt.overflow, f"becomes {fmt.max:g}")
    if kept == 0:  # exactly half the smallest subnormal is a tie, and 0 is even
        return "becomes 0"
    return f"{kept} of {fmt.fraction_bits + 1} bits" + (", subnormal" if exponent < fmt.min_exponent else "")


def format_rows() -> list[dict[str, Any]]:
    """One row per named format: widths, extremes, gap at 1."""
    return [
        {"format": f.name, "bits": f.bits, "exponent": f.exponent_bits, "fraction": f.fraction_bits,
         "smallest subnormal": f"{f.min_subnormal:.4g}", "smallest normal": f"{f.min_normal:.4g}",
         "largest": f"{f.max:.6g}", "gap at 1": f"2^-{f.fraction_bits}", "beyond largest": f.overflow}
        for f in map(get_format, NAMES)
    ]  # fmt: skip


def everywhere(number: float) -> list[dict[str, Any]]:
    """The same number in every format, a row each."""
    rows = []
    for fmt in map(get_format, NAMES):
        row = {"format": fmt.name, "value": "no NaN", "pattern, hex": "", "kind": "", "relative error": ""}
        if fmt.has_nan or not math.isnan(number):
            pattern = store(number, fmt)
            off = abs((value := value_of(pattern, fmt)) - number) / (abs(number) or 1)
            row |= {"value": f"{value:.9g}", "pattern, hex": f"{pattern:0{-(-fmt.bits // 4)}x}"}
            row |= {"kind": fmt.fields(pattern).kind, "relative error": f"{off:.2g}" if off < math.inf else ""}
        rows.append(row)
    return rows


def read(number: str, fmt: FloatFormat) -> tuple[float, int]:
    """(the number, its pattern); nan(0x7e01) stands for one NaN. Raises ValueError."""
    payload = re.fullmatch(r"nan\((0x[0-9a-f]+)\)", number)
    value = math.nan if payload else read_number(number)
    if math.isnan(value) and not fmt.has_nan:
        raise ValueError(f"{fmt.name} has no NaN; choose another format or another number")
    if value == 0 and re.search("[1-9]", re.split("[eE^*]", number)[0]):
        raise ValueError(f"{number} lies below every format here; the smallest number of fp32 is 2^-149")
    pattern = int(payload[1], 16) if payload else -1
    known = 0 <= pattern < 2**fmt.bits and fmt.fields(pattern).kind == "nan"
    return value, pattern if known else store(value, fmt)


# ---- sixteen bits that can be pressed
@view(
    fmt=Choice(BOX, "format"),
    number=Text("number"),
    pinned=Choice({"none": "none"} | BOX, "a second format beneath"),
)
def bits(see: Sheet, fmt="fp16", number="0.1", pinned="bf16") -> None:
    """The bits as buttons; the whole format in powers of two; the value among its neighbours, true to scale.

    Numbers: `value pattern gap below above error`, NaN where there are none.
    """
    form = get_format(fmt)
    near, pattern = read(number, form)
    value, kind = value_of(pattern, form), form.fields(pattern).kind
    below, above = beside(pattern, form, range(-1, 2, 2))
    shown = value if math.isfinite(value) else math.copysign(form.max, value)  # beyond the end its last number
    gap = math.nan if kind == "nan" else form.ulp(shown)
    wide = max(18, form.bits + 2)
    see.grid(480, rows=(1.1, 1.1, 1.5), least=28 * wide + 20)  # a finger hits boxes of 24 pixels
    see.rows = everywhere(near)
    _bit_row(see, form, pattern, wide)
    _whole_format(see, form, shown, kind == "nan")
    if kind == "nan":
        empty = see.panel(2, bare=True, x=space(0, 1), y=space(0, 1))
        empty.text(f"{value} has no neighbours to round to", 0.5, 0.6, size=13)
        told = "not a number"
    else:
        _neighbours(see, form, pinned, shown, near, number, gap)
        error = f"off by {value - near:.3g}" if value != near else "exact"
        error = f"the largest number is {form.max:g}" if math.isinf(value) or math.isinf(near) else error
        digits = 9 if form.fraction_bits > 20 else 7
        ends = " and ".join(f"{v:.{digits}g}" if v == v else "none" for v in (below, above))
        told = f"{error}; neighbours {ends}, ulp {gap:.4g}"
    text, split = f"{pattern:0{form.bits}b}", 1 + form.exponent_bits
    see.say(
        f"{number} in {fmt} is {value!r}, bits {text[0]} {text[1:split]} {text[split:]}: {told}.",
        value=value, pattern=pattern, gap=gap, below=below, above=above, error=abs(value - near),
    )  # fmt: skip


def _bit_row(see: Sheet, form: FloatFormat, pattern: int, wide: int) -> None:
    count, fields, left = form.bits, form.fields(pattern), (wide - form.bits) / 2
    row = see.panel(bare=True, x=space(0, wide), y=space(-1.4, 1.9))
    parts = ["sign"] + ["exponent"] * form.exponent_bits + ["fraction"] * form.fraction_bits
    roles = {"sign": "ink", "exponent": "overflow" if fields.value is None else fields.kind, "fraction": "reference"}
    text, places = f"{pattern:0{count}b}", left + np.arange(count)
    flipped = [pattern ^ 1 << count - 1 - i for i in range(count)]
    values = [value_of(p, form) for p in flipped]
    row.boxes(
        places + 0.06, [0] * count, places + 0.94, [1] * count,
        fill=[f"{roles[part]}/0.35" if b == "1" else "paper" for part, b in zip(parts, text)],
        edge=["muted" if roles[part] == "subnormal" else roles[part] for part in parts],  # yellow would be too pale
        width=1.8, text=list(text), size=13, quiet=True,
        names=[f"bit {count - 1 - i}, {part}" for i, part in enumerate(parts)],
        name="bits", sets=[{"number": f"nan({p:#x})" if v != v else repr(v)} for p, v in zip(flipped, values)],
    )  # fmt: skip
    exponent, fraction = counted(form.exponent_bits, "bit"), counted(form.fraction_bits, "bit")
    words = ["sign", f"exponent, {exponent}", f"fraction, {fraction}"]
    starts = left + 0.1 + np.array([0, 1, 1 + form.exponent_bits])
    row.text(words, starts, [-0.4, 1.4, -0.4], color="muted", anchor="start")
    if fields.value is None:
        ones = "exponent all ones" if form.specials == "ieee" else "exponent and fraction all ones"
        ones = "in the place of −0" if pattern == 1 << count - 1 else ones
        formula = f"{ones}: {'infinity' if fields.kind == 'inf' else 'not a number'}"
    else:
        lead, power = (1, fields.exponent - form.bias) if fields.exponent else (0, form.min_exponent)
        sum_ = f"({lead} + {fields.fraction}/{2**form.fraction_bits})"
        formula = f"{'−' if fields.sign else '+'} {power_of_two(power)} × {sum_}, {fields.kind}"
    row.text(formula, left + count / 2, -1.1, size=15)


def _whole_format(see: Sheet, form: FloatFormat, value: float, nan: bool) -> None:
    least, most = form.min_subnormal_exponent, form.max_exponent
    title = f"all of {form.name}; each tick is a power of two"
    beyond = 4 + (most - least) // 20  # room for the names of both ends
    whole = see.panel(1, title=title, x=log2("magnitude", least - beyond, most + beyond), y=space(0, 1))
    regions(whole, "x", *edges(form), **{"subnormal": ""} if form.fraction_bits < (most - least) / 10 else {})
    powers = range(least, most + 1)
    whole.points([0.28] * len(powers), powers, "ink", glyph="|", size=6, width=1.2)
    if value and not nan:
        now = math.floor(math.log2(abs(value)))
        moved = [{"number": repr(math.ldexp(value, p - now))} for p in powers]
        grip: dict[str, Any] = {"base": math.log2(abs(value)) - now, "cross": 0.28, "sets": moved, "look": "glides"}
        whole.handle("x", "power", now, least, most, "power of two of the number", **grip)


def _neighbours(see: Sheet, form: FloatFormat, pinned: str, value: float, near: float, number: str, gap: float) -> None:
    """The values around the number in two formats. The window is as wide for an odd as for the even exponent field
    below it, so that flipping the last bit of the exponent doubles the gaps that the reader sees."""
    field = form.fields(store(value, form)).exponent
    half = 20 * gap / (2 if field > 1 and field % 2 else 1)
    low, high = value - half, value + half
    x = linear("value; drag the ring: what is stored jumps from tick to tick", low, high, 5)
    rows = [(0.5, form.name), (0.1, pinned)][: 1 + (pinned != "none")]
    y = {"lo": 0, "hi": 1.4, "ticks": [[*row] for row in rows], "bare": True}
    line = see.panel(2, title=f"its neighbours; the gap, one ulp, is {gap:.4g}", x=x, y=y, pad=[28, 14, 46, 96])
    at = min(max(near, low), high)
    for height, name in rows:
        other = get_format(name)
        centre, stored = store(min(max(at, -other.max), other.max), other), store(near, other)
        values = [v for v in beside(centre, other, range(-60, 61)) if low <= v <= high]
        line.points([height] * len(values), values, "ink", glyph="|", size=9, width=1.6)
        if low <= (kept := value_of(stored, other)) <= high:
            line.points([height], [kept], "reference", glyph="D", size=4.5, label="stored", told=f"{kept:.7g}")
        text = f"{name}: nearest values" if len(values) > 60 else "" if values else f"{name} has no value so near"
        line.text(text, low, height, beside=6, dy=-17 if values else 0, color="muted", halo=True)
    # from zero, where one ulp ends at the next number, but not beyond what the picture can hold
    away = -1 if (math.copysign(1, value) < 0) != (abs(value) + gap > FLOAT32_MAX) else 1
    look = {"fill": "own/0.5", "edge": "own", "label": "gap", "told": f"{gap:.4g}", "quiet": True}
    line.boxes([value], [1.21], [value + away * gap], [1.35], **look)
    line.text(f"gap: {gap:.4g}", value, 1.28, color="own", halo=True, beside=-6 * away)
    note = f"asked for {number if len(number) <= 18 else f'about {near:.9g}'}"
    if at != near:  # its name on the side that has room
        line.text(f"{note}, outside this picture", at, 0.78, color="own", halo=True, beside=-12 if at == high else 12)
    grip = {"step": half / 80, "cross": 0.78, "note": note if at == near else None}
    line.handle("x", "number", at, low, high, "number asked for", **grip)


# ---- the ranges of all formats
@view(exponent=Range(-152, 130, label="magnitude, 2 to the"))
def ranges(see: Sheet, exponent=-20) -> None:
    """One magnitude on the axes of all formats. Numbers: `kept`, significant bits by format (0 lost, -1 overflows)."""
    x = log2("magnitude", -152, 250, 24)
    x["ticks"] = [tick for tick in x["ticks"] if tick[0] <= 128]
    see.grid(370)
    title = "a power of two left of a bar becomes zero, one right of it is too large"
    panel = see.panel(title=title, x=x, y=names(NAMES, down=True), pad=[28, 14, 42, 66])
    forms, rows = [get_format(name) for name in NAMES], np.arange(len(NAMES))
    least, normal, top = np.log2([(f.min_subnormal, f.min_normal, f.max) for f in forms]).T
    for low, high, role, hatch in ((least, normal, "subnormal", "/"), (normal, top, "normal", None)):
        told = [f"{power_of_two(round(a, 2))} to {power_of_two(round(b, 2))}" for a, b in zip(low, high)]
        look = {"fill": f"{role}/0.45", "edge": "muted", "hatch": hatch, "label": role, "told": told}
        panel.boxes(low, rows - 0.3, high, rows + 0.3, **look)
    kept, fates = {f.name: bits_kept(f, exponent) for f in forms}, {f.name: fate(f, exponent) for f in forms}
    for row, (held, words) in enumerate(zip(kept.values(), fates.values())):
        ink = "overflow" if held < 0 else "ink" if held else "zero"
        panel.text(words.partition(",")[0].removeprefix("overflows "), 133, row, beside=8, color=ink)
    panel.handle("x", "exponent", exponent, -152, 130, "magnitude, 2 to the")
    see.rows = [{"format": name, f"2^{exponent}": fates[name]} for name in NAMES]
    some = "; ".join(f"{name} {fates[name]}" for name in ("fp32", "fp16", "bf16", "e5m2", "e4m3fn"))
    see.say(f"2^{exponent} = {2.0**exponent:.{6 if 0 < exponent < 20 else 4}g}: {some}.", kept=kept)


# ---- predict: draw the gap
POWERS, ENDS = np.arange(-24, 16), (-30.0, 10.0)  # 1 is number 24
GAPS = np.maximum(POWERS, FP16.min_exponent) - FP16.fraction_bits


@view(typed="or type it: 2 to the ..., at 2^-24, 2^-19, 2^-14 ... 2^11 and 2^15", drawn=Stroke(40, *ENDS))
def gaps(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """A prediction that is drawn: the gap from each power of two to the next number of float16, from that of 1 on.

    Numbers: `guess truth near`.
    """
    axis = names([power_of_two(int(e)) for e in POWERS], "number", bare=False)
    panel = see.panel(x=axis | {"ticks": axis["ticks"][::4]}, y=log2("gap to the next number of float16", *ENDS))
    prediction(see, panel, "formats.gaps", GAPS, first=0, ends=ENDS, start=-10, at=[*range(0, 36, 5), 39],
               within=0.5, typed=typed, drawn=drawn, shown=shown)  # fmt: skip
    if shown:
        panel.line(GAPS, color="reference", width=2.6, label="gap")
    panel.points([GAPS[24]], [24], "reference", glyph="s", size=5, label="gap at 1")
