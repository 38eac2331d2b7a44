"""Scenes of lesson 01: a bit row over a number line, ranges on one axis, gradients over the range of a format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.formats import FORMATS, FloatFormat, get_format
from mpkit.plots.scene import DASHES, GLYPHS, SERIES, Panel, Scene, linear, log2, names, power_of_two, space

if TYPE_CHECKING:
    from mpkit.explorers import formats as explorers  # upward: the types of its arguments

KIND_ROLES = {"normal": "normal", "subnormal": "subnormal", "zero": "zero", "inf": "overflow", "nan": "overflow"}


def field_of(index: int, fmt: FloatFormat) -> str:
    """The field that one bit belongs to."""
    return "fraction" if index < fmt.fraction_bits else "exponent" if index < fmt.bits - 1 else "sign"


FATES = ("zero", "subnormal", "normal", "overflow")


def edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """The powers of two below which a magnitude becomes zero, is subnormal, fits."""
    return fmt.min_subnormal_exponent - 1, fmt.min_exponent, fmt.max_exponent + 1


def zones(ends: Iterable[float]) -> list[tuple[float | None, str]]:
    """The roles of bars over an axis of powers of two, for `Panel.bars`; the ends are exponents."""
    return list(zip((*map(float, ends), None), FATES))


def regions(panel: Panel, axis: str, lost: float, normal: float, overflow: float, /, **said: str) -> None:
    """Colour and name zero, subnormal, normal and overflow along an axis of powers of two; the edges are exponents.

    `said` are other names of the four, "" for none.
    """
    ends = sorted((panel.given[axis]["lo"], panel.given[axis]["hi"]))
    look = {"anchor": "end"} if axis == "y" else {}  # bars begin at the left
    for role, low, high in zip(FATES, (ends[0], lost, normal, overflow), (lost, normal, overflow, ends[1])):
        panel.span(axis, low, high, f"{role}/0.14", said.get(role, role), **look)


def histogram(scene: Scene, panel: Panel, shares: np.ndarray, lowest: float, fmt: FloatFormat, **look: object) -> None:
    """Percent of magnitudes in each power of two from `lowest` on, a row for each step, coloured by the format.

    They travel once, a byte each. `look` as in `Panel.bars`.
    """
    kept = scene.keep("shares", np.round(255 * shares / shares.max()).astype(np.uint8))
    at = lowest + 0.5 + np.arange(shares.shape[1])
    look = {"width": 1, "label": "share, %", "quiet": True} | look
    panel.bars(kept, at, unit=shares.max() / 255, zones=zones(edges(fmt)), **look)


def bits_scene(data: explorers.BitsExplorer) -> Scene:
    """The bits as buttons; the whole format in powers of two; the value among its neighbours, true to scale."""
    scene = Scene(height=490, rows=(1.1, 1.1, 1.5))
    _bit_row(scene, data)
    _whole_format(scene, data)
    _neighbours(scene, data)
    return scene


def _bit_row(scene: Scene, data: explorers.BitsExplorer) -> None:
    fmt, bits = data.format, data.format.bits
    panel = scene.panel(bare=True, x=space(0, 32), y=space(-1.4, 1.9))
    places, left = np.arange(bits), (32 - bits) / 2
    fields = [field_of(bits - 1 - i, fmt) for i in range(bits)]
    on = [data.bit(bits - 1 - i) for i in range(bits)]
    roles = {"sign": "ink", "exponent": KIND_ROLES[data.fields.kind], "fraction": "reference"}
    panel.boxes(
        *(left + places + 0.06, [0] * bits, left + places + 0.94, [1] * bits),
        fill=[f"{roles[f]}/0.35" if b else "paper" for f, b in zip(fields, on)],
        edge=["muted" if roles[f] == "subnormal" else roles[f] for f in fields],  # yellow is too pale for a line
        width=1.8,
        radius=3,
        text=[str(b) for b in on],
        names=[f"bit {bits - 1 - i}, {f}" for i, f in zip(places, fields)],
        pick="toggle",
        keys=[int(bits - 1 - i) for i in places],
        size=13,
        quiet=True,
    )
    look: dict[str, Any] = {"color": "muted", "anchor": "start"}
    below = {**look, "valign": "top"}
    panel.text("sign", left + 0.1, -0.2, **below)
    panel.text(f"exponent, {_bits(fmt.exponent_bits)}", left + 1.1, 1.15, valign="bottom", **look)
    panel.text(f"fraction, {_bits(fmt.fraction_bits)}", left + 1.1 + fmt.exponent_bits, -0.2, **below)
    panel.text(data.formula(), 16, -1.1, size=15)


def _bits(count: int) -> str:
    return f"{count} bit{'s' * (count != 1)}"


def _whole_format(scene: Scene, data: explorers.BitsExplorer) -> None:
    fmt = data.format
    least = fmt.min_subnormal_exponent
    low, high = least - 2, fmt.max_exponent + 3
    combs = high - low < 60  # more would run together
    title = f"all of {fmt.name}; {'long ticks are powers' if combs else 'each tick is a power'} of two"
    panel = scene.panel(1, title=title, x=log2("magnitude", low, high), y=space(0, 1))
    narrow = () if combs else ("zero", "subnormal", "overflow")  # no room for their names
    regions(panel, "x", least, fmt.min_exponent, fmt.max_exponent + 1, **dict.fromkeys(narrow, ""))
    panel.points([0.28] * len(data.binades), data.binades, "ink", glyph="|", size=6, width=1.2)
    if combs:
        teeth = [math.log2(1 + k / 2**bits) + e for e, bits in data.teeth for k in range(1, 2**bits)]
        panel.points([0.22] * len(teeth), teeth, "muted", glyph="|", size=3, width=1)
    if data.value and math.isfinite(data.value):
        power = math.floor(math.log2(abs(data.value)))
        lead = math.log2(abs(data.value)) - power
        grip = {"base": lead, "cross": 0.28, "gesture": True, "look": "glides"}
        panel.handle("x", "shift_to", power, least, fmt.max_exponent, "power of two of the number", **grip)


def _neighbours(scene: Scene, data: explorers.BitsExplorer) -> None:
    if data.fields.value is None:
        panel = scene.panel(2, bare=True, x=space(0, 1), y=space(0, 1))
        panel.text(f"{data.value} has no neighbours to round to", 0.5, 0.6, size=13)
        return
    low, high = data.window
    label = "value; drag the ring: what is stored jumps from tick to tick"
    axis: dict[str, Any] = {"label": label, "lo": low, "hi": high}
    middle = [data.value + k * (high - low) / 5 for k in (-2, -1, 0, 1, 2)]
    axis["ticks"] = [[v, f"{v:.{data.digits}g}"] for v in middle]
    panel = scene.panel(2, title=f"its neighbours; one ulp is {data.gap:.4g}", x=axis, y=space(0, 1.4))
    for height, name, values, stored in ((0.42, data.fmt, *data.near), (0.1, data.pinned, *data.pinned_near)):
        if name == "none":
            continue
        panel.points([height] * len(values), values, "ink", glyph="|", size=9, width=1.6)
        if low <= stored <= high:
            look = {"glyph": "D", "size": 4.5, "label": "stored", "told": f"{stored:.7g}"}
            panel.points([height], [stored], "reference", **look)
        near = any(low <= v <= high for v in values)
        text = name if near else f"{name} has no value so near"
        text += ", its nearest values" if len(values) > data.nearest else ""
        panel.text(text, low, height, anchor="start", valign="bottom", dy=-9, color="muted", halo=True)
    _gaps(panel, data)
    at = min(max(data.wanted, low), high)
    grip: dict[str, Any] = {"step": (high - low) / 160, "cross": 0.78}
    asked = f"asked for {data.asked()}"
    if at == data.wanted:
        grip["note"] = asked
    else:  # its name on the side that has room
        side = -12 if at == high else 12
        panel.text(f"{asked}, outside this picture", at, 0.78, color="own", halo=True, beside=side)
    panel.handle("x", "number", at, low, high, "number asked for", **grip)


def _gaps(panel: Panel, data: explorers.BitsExplorer) -> None:
    """One ulp as a bar that begins at the number, and the ulp of the number before, to the same scale."""
    away = -1 if data.fields.sign else 1  # from zero, where one ulp ends at the next number
    rows = (("gap before", data.gap_before, "reference"), ("gap now", data.gap, "own"))
    for row, (name, gap, role) in enumerate(rows[not data.gap_before :]):
        y = 1.28 - 0.22 * row
        end = min(max(data.value + away * gap, data.window[0]), data.window[1])
        cut = ", wider than this picture" if end != data.value + away * gap else ""
        bar = {"fill": f"{role}/0.5", "edge": role, "label": name, "told": f"{gap:.4g}", "quiet": True}
        panel.boxes([data.value], [y - 0.07], [end], [y + 0.07], **bar)
        panel.text(f"{name}: {gap:.4g}{cut}", data.value, y, color=role, halo=True, beside=-6 * away)


def ranges_scene(data: explorers.RangesExplorer) -> Scene:
    """The range of every format on one axis, and one magnitude with its fate in each."""
    fates = [data.fate(name) for name in data.kept]
    x = log2("magnitude", -152, 226, 24)
    x["ticks"] = [tick for tick in x["ticks"] if tick[0] <= 128]
    scene = Scene(height=370)
    y = names(list(data.kept), down=True)
    title = "a power of two left of a bar becomes zero, one right of it overflows"
    panel = scene.panel(title=title, x=x, y=y, pad=[28, 14, 42, 60])
    for row, name in enumerate(data.kept):
        fmt = get_format(name)
        ends = [math.log2(v) for v in (fmt.min_subnormal, fmt.min_normal, fmt.max)]
        least, normal = map(power_of_two, (fmt.min_subnormal_exponent, fmt.min_exponent))
        parts = (
            (ends[0], ends[1], "subnormal", "/", f"{least} to {normal}"),
            (ends[1], ends[2], "normal", None, f"{normal} to {fmt.max:.5g}"),
        )
        for low, high, role, hatch, told in parts:
            look = {"fill": f"{role}/0.45", "edge": "muted", "hatch": hatch, "label": role, "told": told}
            panel.boxes([low], [row - 0.3], [high], [row + 0.3], **look)
        kept = data.kept[name]
        ink = "overflow" if kept < 0 else "zero" if kept == 0 else "ink"
        panel.text(fates[row], 133, row, anchor="start", color=ink)
    panel.handle("x", "exponent", data.exponent, -152, 130, "magnitude, 2 to the")
    return scene


def gradients_scene(data: explorers.GradientsExplorer) -> Scene:
    """The exponent histogram of scaled gradients over the regions of one format; the histogram can be dragged."""
    low, high, top = -50, 32, 26
    fmt, scene = data.format, Scene(height=360)
    scene.play("step", "training step", len(data.shares), every=120)
    x, y = log2("magnitude of loss scale × gradient", low, high, 8), linear("share of the gradients, %", 0, top, 4)
    panel = scene.panel(title=f"the gradients of a step, times the loss scale, in {fmt.name}", x=x, y=y)
    regions(panel, "x", *edges(fmt))
    histogram(scene, panel, 100 * data.shares, data.exponents[0], fmt)
    peak = float(data.exponents[data.shares.mean(0).argmax()]) - data.scale_exponent
    grip = {"base": peak + 0.5, "cross": 17.8, "note": f"× {power_of_two(data.scale_exponent)}"}
    panel.handle("x", "scale_exponent", data.scale_exponent, 0, 30, "loss scale, 2 to the", **grip)
    return scene


def precision(shown: tuple[str, ...] = ("fp32", "fp16", "bf16", "e5m2", "e4m3fn")) -> Scene:
    """The gap to the next value relative to the value itself, over the whole range of each format."""
    scene = Scene(height=360)
    x, y = log2("magnitude", -152, 130, 24), log2("ulp / magnitude", -25, 1, 4)
    panel = scene.panel(title="lower is finer; flat where numbers are normal, rising where subnormal", x=x, y=y)
    for name, color, dash, glyph in zip(shown, SERIES, DASHES, GLYPHS):
        fmt = FORMATS[name]
        powers = np.arange(fmt.min_subnormal_exponent, fmt.max_exponent + 1)
        relative = np.maximum(powers, fmt.min_exponent) - fmt.fraction_bits - powers
        look = {"dash": dash, "glyph": glyph, "every": max(1, len(powers) // 6)}
        panel.line(relative, powers, color, label=name, tag=True, **look)
    return scene
