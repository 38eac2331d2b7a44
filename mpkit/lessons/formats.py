"""Lesson 01: a number and its bits, its neighbours, its fate in every format, and the gaps between numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from mpkit.formats import FORMATS, FP16, FloatFormat, get_format
from mpkit.rounding import round_to
from mpkit.view import Choice, Range, Sheet, Stroke, Text, view
from mpkit.view.answers import read_number
from mpkit.view.parts import edges, prediction, regions
from mpkit.view.sheet import Panel, log2, names, power_of_two, space

NAMES = [name for name in FORMATS if name != "fp64"]
OTHERS = ("e5m2fnuz", "e4m3fnuz", "e4m3b11fnuz", "e3m4", "binary8p3", "binary8p4", "binary8p5")
BOX = {n: n for n in NAMES} | {n: f"other: {n}" for n in OTHERS}
KIND_ROLES = {"normal": "normal", "subnormal": "subnormal", "zero": "zero", "inf": "overflow", "nan": "overflow"}


# ---- numbers
def store(value: float, fmt: FloatFormat) -> int:
    """The pattern of a number in a format, rounded to nearest even, overflow by the format's own rule."""
    return int(fmt.encode(round_to(torch.tensor(value, dtype=torch.float64), fmt)))


def value_of(pattern: int, fmt: FloatFormat) -> float:
    """The value of one pattern."""
    return float(fmt.decode(torch.tensor(pattern)))


def neighbour(pattern: int, fmt: FloatFormat, up: bool) -> int | None:
    """The pattern of the next larger or smaller value; None beyond the ends and at NaN."""
    sign = 1 << (fmt.bits - 1)
    fields = fmt.fields(pattern)
    if fields.kind == "nan":
        return None
    magnitude = pattern & (sign - 1)
    if magnitude == 0:
        return 1 if up else sign + 1
    beside = (magnitude + 1 if up != bool(fields.sign) else magnitude - 1) + fields.sign * sign
    if beside == sign and fmt.fields(sign).kind == "nan":  # there is no minus zero: above the last negative number is 0
        return 0
    return None if fmt.fields(beside % (2 * sign)).kind == "nan" or (beside ^ pattern) & sign else beside


def around(value: float, fmt: FloatFormat, low: float, high: float, most: int = 60) -> list[float]:
    """The values of a format within a window, at most `most` on each side of the stored one, ascending."""
    first = store(min(max(value, low, -fmt.max), high, fmt.max), fmt)
    found = {value_of(first, fmt)}
    for up in (False, True):
        at: int | None = first
        for _ in range(most):
            at = None if at is None else neighbour(at, fmt, up)
            if at is None or not low <= (beside := value_of(at, fmt)) <= high:
                break
            found.add(beside)
    return sorted(v for v in found if low <= v <= high)


def bits_kept(fmt: FloatFormat, exponent: int) -> int:
    """Significant bits of numbers in [2**exponent, 2**(exponent+1)): 0 where they are lost, -1 where they overflow."""
    if exponent > fmt.max_exponent:
        return -1
    return max(0, fmt.fraction_bits + 1 - max(0, fmt.min_exponent - exponent))


def fate(fmt: FloatFormat, exponent: int) -> str:
    """What one format does to 2**exponent, in words."""
    kept = bits_kept(fmt, exponent)
    if kept < 0:
        over = {"inf": "overflows to inf", "nan": "overflows to NaN", "saturate": f"becomes {fmt.max:g}"}
        return over[fmt.overflow]
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
            value = value_of(pattern, fmt)
            off = abs(value - number) / (abs(number) or 1)
            row |= {"value": f"{value:.9g}", "pattern, hex": f"{pattern:0{-(-fmt.bits // 4)}x}"}
            row |= {"kind": fmt.fields(pattern).kind, "relative error": f"{off:.2g}" if math.isfinite(off) else ""}
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

    Numbers: `value pattern gap below above error`, the last ones NaN where there are none.
    """
    form = get_format(fmt)
    near, pattern = read(number, form)
    value, fields = value_of(pattern, form), form.fields(pattern)
    sides = {"below": neighbour(pattern, form, False), "above": neighbour(pattern, form, True)}
    wide = max(18, form.bits + 2)
    see.grid(490, rows=(1.1, 1.1, 1.5), least=28 * wide + 20)  # a finger hits boxes of 24 pixels
    see.rows = everywhere(near)
    _bit_row(see.panel(bare=True, x=space(0, wide), y=space(-1.4, 1.9)), form, pattern)
    shown = value if math.isfinite(value) else math.copysign(form.max, value)  # beyond the end its last number
    _whole_format(see, form, shown, fields.kind == "nan")
    text = f"{pattern:0{form.bits}b}"
    told = f"{text[0]} {text[1 : 1 + form.exponent_bits]} {text[1 + form.exponent_bits :]}"
    found: dict[str, Any] = {"value": value, "pattern": pattern}
    found |= dict.fromkeys(("gap", "below", "above", "error"), math.nan)
    if fields.kind == "nan":
        empty = see.panel(2, bare=True, x=space(0, 1), y=space(0, 1))
        empty.text(f"{value} has no neighbours to round to", 0.5, 0.6, size=13)
        return see.say(f"{number} in {fmt} is {value} (bits {told}).", **found)
    gap = found["gap"] = form.ulp(shown)
    _neighbours(see, form, pinned, (shown, near, number), gap)
    if fields.kind == "inf":
        return see.say(f"{number} in {fmt} is {value} (bits {told}): the largest number is {form.max:g}.", **found)
    found |= {name: value_of(p, form) for name, p in sides.items() if p is not None} | {"error": abs(value - near)}
    digits = 9 if form.fraction_bits > 20 else 7
    error = f"off by {value - near:.3g}" if value != near else "exactly"
    error = f"{fmt} has no inf" if math.isinf(near) else error
    kind = "zero" if fields.kind == "zero" else f"a {fields.kind} number"
    below, above = ("none" if p is None else f"{found[name]:.{digits}g}" for name, p in sides.items())
    head = f"{number} in {fmt} is {value!r} ({error}), {kind}: bits {told}"
    see.say(f"{head}; neighbours {below} and {above}, ulp {gap:.4g}.", **found)


def written(pattern: int, fmt: FloatFormat) -> str:
    """A pattern as the number that stands for it."""
    value = value_of(pattern, fmt)
    return f"nan({pattern:#x})" if math.isnan(value) else repr(value)


def _bit_row(row: Panel, form: FloatFormat, pattern: int) -> None:
    count, fields, left = form.bits, form.fields(pattern), (max(18, form.bits + 2) - form.bits) / 2
    parts = ["sign"] + ["exponent"] * form.exponent_bits + ["fraction"] * form.fraction_bits
    roles = {"sign": "ink", "exponent": KIND_ROLES[fields.kind], "fraction": "reference"}
    text, places = f"{pattern:0{count}b}", left + np.arange(count)
    row.boxes(
        places + 0.06, [0] * count, places + 0.94, [1] * count,
        fill=[f"{roles[part]}/0.35" if b == "1" else "paper" for part, b in zip(parts, text)],
        edge=["muted" if roles[part] == "subnormal" else roles[part] for part in parts],  # yellow would be too pale
        width=1.8, text=list(text), size=13, quiet=True,
        names=[f"bit {count - 1 - i}, {part}" for i, part in enumerate(parts)],
        name="bits", sets=[{"number": written(pattern ^ 1 << count - 1 - i, form)} for i in range(count)],
    )  # fmt: skip
    look: dict[str, Any] = {"color": "muted", "anchor": "start"}
    many = ["1 bit" if n == 1 else f"{n} bits" for n in (form.exponent_bits, form.fraction_bits)]
    row.text("sign", left + 0.1, -0.2, valign="top", **look)
    row.text(f"exponent, {many[0]}", left + 1.1, 1.15, valign="bottom", **look)
    row.text(f"fraction, {many[1]}", left + 1.1 + form.exponent_bits, -0.2, valign="top", **look)
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
    combs = most - least < 55  # more would run together
    title = f"all of {form.name}; {'long ticks are powers' if combs else 'each tick is a power'} of two"
    whole = see.panel(1, title=title, x=log2("magnitude", least - 4, most + 3), y=space(0, 1))
    narrow = {} if combs else dict.fromkeys(("zero", "subnormal", "overflow"), "")  # no room for their names
    regions(whole, "x", *edges(form), **narrow)
    powers = range(least, most + 1)
    whole.points([0.28] * len(powers), powers, "ink", glyph="|", size=6, width=1.2)
    if combs:
        fine = [(e, 2 ** min(2, bits_kept(form, e) - 1)) for e in powers]
        teeth = [e + math.log2(1 + k / n) for e, n in fine for k in range(1, n)]
        whole.points([0.22] * len(teeth), teeth, "muted", glyph="|", size=3, width=1)
    if value and not nan:
        now = math.floor(math.log2(abs(value)))
        moved = [{"number": repr(math.ldexp(value, p - now))} for p in powers]
        grip: dict[str, Any] = {"base": math.log2(abs(value)) - now, "cross": 0.28, "sets": moved, "look": "glides"}
        whole.handle("x", "power", now, least, most, "power of two of the number", **grip)


def _neighbours(see: Sheet, form: FloatFormat, pinned: str, asked: Any, gap: float) -> None:
    """The values around the number in two formats. The window is as wide for an odd as for the even exponent field
    below it, so that flipping the last bit of the exponent doubles the gaps that the reader sees."""
    value, near, number = asked
    field = form.fields(store(value, form)).exponent
    half = 20 * gap / (2 if field > 1 and field % 2 else 1)
    low, high, digits = value - half, value + half, 9 if form.fraction_bits > 20 else 7
    label = "value; drag the ring: what is stored jumps from tick to tick"
    ticks = [[v, f"{v:.{digits}g}"] for v in (value + k * half / 2.5 for k in (-2, -1, 0, 1, 2))]
    axis = {"label": label, "lo": low, "hi": high, "ticks": ticks}
    beside = {"ticks": [[0.42, form.name], [0.1, pinned if pinned != "none" else ""]], "bare": True}
    title = f"its neighbours; the gap, one ulp, is {gap:.4g}"
    line = see.panel(2, title=title, x=axis, y={"lo": 0, "hi": 1.4, **beside}, pad=[28, 14, 46, 84])
    for height, name in ((0.42, form.name), (0.1, pinned)):
        if name == "none":
            continue
        other = get_format(name)
        values = around(near if math.isfinite(near) else value, other, low, high)
        stored = value_of(store(min(max(near, -other.max), other.max), other), other)
        line.points([height] * len(values), values, "ink", glyph="|", size=9, width=1.6)
        if low <= stored <= high:
            line.points([height], [stored], "reference", glyph="D", size=4.5, label="stored", told=f"{stored:.7g}")
        text = "" if values else f"{name} has no value so near"
        text = "its nearest values" if len(values) > 60 else text
        line.text(text, low, height, anchor="start", valign="bottom", dy=-9, color="muted", halo=True)
    away = -1 if math.copysign(1, value) < 0 else 1  # from zero, where one ulp ends at the next number
    look = {"fill": "own/0.5", "edge": "own", "label": "gap", "told": f"{gap:.4g}", "quiet": True}
    line.boxes([value], [1.21], [value + away * gap], [1.35], **look)
    line.text(f"gap: {gap:.4g}", value, 1.28, color="own", halo=True, beside=-6 * away)
    at = min(max(near, low), high)
    words = f"asked for {number if len(number) <= 18 else f'about {near:.9g}'}"
    if at != near:  # its name on the side that has room
        line.text(f"{words}, outside this picture", at, 0.78, color="own", halo=True, beside=-12 if at == high else 12)
    note = words if at == near else None
    line.handle("x", "number", at, low, high, "number asked for", step=half / 80, cross=0.78, note=note)


# ---- the ranges of all formats
@view(exponent=Range(-152, 130, label="magnitude, 2 to the"))
def ranges(see: Sheet, exponent=-20) -> None:
    """One magnitude on the axes of all formats. Numbers: `kept`, significant bits by format (0 lost, -1 overflows)."""
    x = log2("magnitude", -152, 226, 24)
    x["ticks"] = [tick for tick in x["ticks"] if tick[0] <= 128]
    see.grid(370)
    title = "a power of two left of a bar becomes zero, one right of it is too large"
    panel = see.panel(title=title, x=x, y=names(NAMES, down=True), pad=[28, 14, 42, 60])
    kept, fates = {}, {}
    for row, fmt in enumerate(map(get_format, NAMES)):
        ends = [math.log2(v) for v in (fmt.min_subnormal, fmt.min_normal, fmt.max)]
        least, normal = map(power_of_two, (fmt.min_subnormal_exponent, fmt.min_exponent))
        parts = (
            (ends[0], ends[1], "subnormal", "/", f"{least} to {normal}"),
            (ends[1], ends[2], "normal", None, f"{normal} to {fmt.max:.5g}"),
        )
        for low, high, role, hatch, told in parts:
            look = {"fill": f"{role}/0.45", "edge": "muted", "hatch": hatch, "label": role, "told": told}
            panel.boxes([low], [row - 0.3], [high], [row + 0.3], **look)
        kept[fmt.name], fates[fmt.name] = bits_kept(fmt, exponent), fate(fmt, exponent)
        ink = "overflow" if kept[fmt.name] < 0 else "zero" if kept[fmt.name] == 0 else "ink"
        panel.text(fates[fmt.name].partition(",")[0], 133, row, anchor="start", color=ink)
    panel.handle("x", "exponent", exponent, -152, 130, "magnitude, 2 to the")
    told = "; ".join(f"{name} {fates[name]}" for name in ("fp32", "fp16", "bf16", "e5m2", "e4m3fn"))
    see.rows = [{"format": name, f"2^{exponent}": fates[name]} for name in NAMES]
    see.say(f"2^{exponent} = {2.0**exponent:.4g}: {told}.", kept=kept)


# ---- predict: draw the gap
POWERS, ENDS = np.arange(-24, 16), (-30.0, 10.0)
GAPS = np.maximum(POWERS, FP16.min_exponent) - FP16.fraction_bits


@view(typed="or type it: 2 to the ..., nine gaps at equal distances from 2^-24 to 2^15", drawn=Stroke(40, *ENDS))
def gaps(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """A prediction that is drawn: the gap from each power of two to the next number of float16, from that of 1 on.

    Numbers: `guess truth near`.
    """
    see.grid(380, 900)
    axis = names([power_of_two(int(e)) for e in POWERS], "number", bare=False)
    panel = see.panel(x=axis | {"ticks": axis["ticks"][::4]}, y=log2("gap to the next number of float16", *ENDS))
    prediction(see, panel, "formats.gaps", GAPS, first=0, ends=ENDS, start=-10, points=9, within=0.5,
               typed=typed, drawn=drawn, shown=shown)  # fmt: skip
    if shown:
        panel.line(GAPS, color="reference", width=2.6, label="gap")
    one = int(np.flatnonzero(POWERS == 0)[0])
    panel.points([GAPS[one]], [one], "reference", glyph="s", size=5, label="gap at 1")
