"""A picture as data: panels with axes, marks of a few kinds, a sentence, numbers by name; no browser, no matplotlib.

Values are in the coordinates of their axis: on an axis of powers of two that is the exponent. Colours are roles (what a
thing means), "zero/0.3" is a tint of one. A mark with `show="upto"` reveals its items up to the step shown, with
`show="at"` only the item of that step; `only=(a, b)` shows a whole mark from step a to step b. Under the pointer a mark
with a label is read out by the number where it is drawn; `told`, one text or one an item, says it where that is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpkit.view.words import power_of_two

ROLES: dict[str, tuple[str, str]] = {  # on a light and on a dark page; Okabe and Ito 2008, "Color universal design"
    "ink": ("#1f1f1f", "#ececec"), "paper": ("#ffffff", "#111111"), "grid": ("#e4e4e4", "#383838"),
    "muted": ("#6e6e6e", "#a0a0a0"), "reference": ("#4d4d4d", "#c4c4c4"), "own": ("#a23b8f", "#e493cf"),
    "overflow": ("#d55e00", "#ff8a47"), "zero": ("#0072b2", "#4fb0ea"), "subnormal": ("#e69f00", "#e0a526"),
    "normal": ("#009e73", "#35c79c"),
}  # fmt: skip
GLYPHS = ("o", "s", "^", "D", "v")
_DASHES = {"zero": None, "overflow": "--", "normal": "-.", "own": ":", "ink": "6 2 1 2 1 2"}
LINES: list[dict[str, Any]] = [{"color": color, "dash": dash} for color, dash in _DASHES.items()]
"""Looks of lines that only have to differ."""
DIFFERENT = [look | {"glyph": glyph} for look, glyph in zip(LINES, GLYPHS)]
"""The same with a glyph of its own for each."""

_NUMBERS = {"x", "y", "y2", "x0", "y0", "x1", "y1", "at", "base", "cross"}
_NUMBERS |= {"values", "since", "ring", "hue", "rows", "shift", "codes"}
_LOOKS = {"type", "label", "color", "fill", "edge", "hatch", "dash", "width", "glyph", "size"}
Shares = Sequence[float]
_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")


def exponents(values: ArrayLike, low: float, high: float) -> np.ndarray:
    """Values -> positions on an axis of powers of two; zero, negative and infinite ones lie on its edges, NaN stays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log2(np.maximum(np.asarray(values, dtype=float), 0)), low, high)


def fitted(*series: ArrayLike, room: int = 2) -> tuple[int, int]:
    """The whole exponents around all positive finite values: the ends of an axis of what happens, with some room.

    >>> fitted([0.0, 3.0], [math.inf, 16.0], room=1), fitted([0.0])
    ((0, 5), (0, 20))
    """
    every = np.concatenate([np.ravel(np.asarray(s, dtype=float)) for s in series])
    every = np.log2(every[np.isfinite(every) & (every > 0)])
    return (math.floor(every.min()) - room, math.ceil(every.max()) + room) if every.size else (0, 20)


def _check_ends(label: str, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low != high):
        raise ValueError(f"the axis {label!r} needs two ends that are finite and not equal, got {low} and {high}")


def said(value: float, axis: Mapping[str, Any]) -> str:
    """A value of an axis in words: the name of its tick, a power, or a number of four digits."""
    value = float(value)
    if "names" in axis and 0 <= round(value) < len(axis["names"]):
        return str(axis["names"][round(value)])
    if axis.get("format") == "log2" and math.isfinite(value):
        return power_of_two(round(value, 1) + 0.0)
    return rounded(value)


def told(value: float, axis: Mapping[str, Any]) -> str:
    """The same as it is told beside a mark: what lies at an end of powers of two stands for all beyond it."""
    low, high = (axis["lo"] + 1e-6, axis["hi"] - 1e-6) if "format" in axis else (-math.inf, math.inf)
    edge = "≤ " if value < low else "≥ " if value > high else ""
    return edge + str(dict(axis.get("ticks", ())).get(float(value)) or said(value, axis))


def item(values: Any, i: int) -> Any:
    """Item `i` of several, the last of all that follow, or what stands for all of them."""
    return values[min(i, len(values) - 1)] if np.ndim(values) else values


def log2(label: str, low: float, high: float, every: int | None = None, **more: object) -> dict[str, Any]:
    """An axis of powers of two."""
    _check_ends(label, low, high)
    every = every or next((k for k in (1, 2, 4, 8, 12, 16, 24, 32, 48) if (high - low) / k <= 8), 256)
    ticks = [[e, power_of_two(e)] for e in range(math.ceil(low / every) * every, math.floor(high + 1e-9) + 1, every)]
    return {"label": label, "lo": low, "hi": high, "ticks": ticks, "format": "log2", **more}


def linear(label: str, low: float, high: float, count: int = 6, **more: object) -> dict[str, Any]:
    """An axis with round ticks, about `count` of them; it may run downwards."""
    _check_ends(label, low, high)
    raw = abs(high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= raw * (1 - 1e-9))
    first, last = math.ceil(min(low, high) / step - 1e-9), math.floor(max(low, high) / step + 1e-9)
    ticks = [[k * step, f"{k * step:.10g}"] for k in range(first, last + 1)]
    return {"label": label, "lo": low, "hi": high, "ticks": ticks, **more}


def names(labels: Sequence[Any], label: str = "", *, down: bool = False, **more: object) -> dict[str, Any]:
    """An axis of categories 0, 1, 2 ...; `down` puts the first at the top."""
    texts = list(map(str, labels))
    low, high = (len(texts) - 0.5, -0.5) if down else (-0.5, len(texts) - 0.5)
    ticks = [[i, text] for i, text in enumerate(texts)]
    return {"label": label, "lo": low, "hi": high, "ticks": ticks, "names": texts, "bare": True, **more}


def space(low: float, high: float) -> dict[str, Any]:
    """An axis without ticks, line or name."""
    return {"lo": low, "hi": high, "ticks": [], "hidden": True}


def filled(column: Any, form: str, index: int) -> str:
    """One item of a column in words, exactly as the page writes it."""
    value = item(column, index)
    if isinstance(value, str):
        return value
    value = float(np.float32(value)) if np.ndim(column) else float(value)  # as it travels
    if form.startswith(".") and math.isfinite(value):
        return str(Decimal(value).quantize(Decimal(1).scaleb(-int(form[1:-1])), ROUND_HALF_UP))
    return f"2^{rounded(value)}" if form == "2^" and math.isfinite(value) else rounded(value)


def rounded(value: float) -> str:
    """A number in words: four digits, ties away from zero, as JavaScript writes it.

    >>> rounded(0.5), rounded(1234.5), rounded(1e-9), rounded(-math.inf)
    ('0.5', '1235', '1e-9', '-inf')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    near = float(Context(4, ROUND_HALF_UP).create_decimal(value))
    if near == 0 or 1e-6 <= abs(near) < 1e21:
        return np.format_float_positional(near, trim="-")
    return repr(near).replace("e-0", "e-")


def numbers(value: Any) -> Any:
    """Numbers as they are drawn and travel: one alone, several as float32, or as bytes where they are; words stay."""
    if isinstance(value, str) or (np.ndim(value) == 0 and math.isfinite(value)):
        return value if isinstance(value, str) else float(value)
    array = np.atleast_1d(value).ravel()
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def _column(values: Any) -> Any:
    """A column of a sentence as it travels: numbers, or words once each with their places."""
    if isinstance(values, str) or np.asarray(values).dtype.kind in "fiub":
        return numbers(values)
    words, codes = np.unique(np.asarray(values, dtype=str), return_inverse=True)
    return {"words": words.tolist(), "codes": numbers(codes)}


class Panel:
    """One pair of axes; every method adds a mark."""

    def __init__(self, **given: Any) -> None:
        self.given, self.marks = given, list[dict[str, Any]]()

    def add(self, kind: str, **mark: object) -> None:
        """A mark of a kind that both renderers know; None leaves a property out."""
        given = {k: numbers(v) if k in _NUMBERS else v for k, v in mark.items() if v is not None}
        self.marks.append({"type": kind, **given})

    def line(self, y: ArrayLike, x: ArrayLike | None = None, color: str = "own", **look: object) -> None:
        """A line through (x, y), x = 0, 1, 2 ... by default; `step` "mid" or "post" makes stairs of it. One point is a
        dot, as a line of it would not be seen."""
        self.add("line", x=x, y=y, color=color, **{"glyph": "o" if np.size(y) == 1 else None} | look)

    def points(self, y: ArrayLike, x: ArrayLike | None = None, color: object = "own", **look: object) -> None:
        """Glyphs at (x, y); `ring` (0 to 1) fills a ring around each, `hue` is the number of its colour of several."""
        self.add("points", x=x, y=y, color=color, **look)

    def crosses(self, y: ArrayLike, steps: ArrayLike, label: str = "", color: str = "overflow", **look: object) -> None:
        """An x on the line `y` at each of some steps; nothing where there is none."""
        if np.size(steps):
            look = {"glyph": "x", "size": 5, "label": label or None} | look
            self.points(np.asarray(y)[np.asarray(steps)], steps, color, **look)

    def band(self, y: ArrayLike, y2: ArrayLike, color: str = "overflow/0.15", **look: object) -> None:
        """The area between two lines."""
        self.add("band", y=y, y2=y2, color=color, **look)

    def span(self, axis: str, low: float, high: float, color: str, text: str = "", **look: object) -> None:
        """A region across the panel, named at its top (axis "x") or left (axis "y"); nothing where it is empty.

        On axis "y" `anchor="end"` names it at the right. Where the name has no room it stands upright, or is left out.
        `label` names it in the legend instead.
        """
        x, y = self.given["x"], self.given["y"]
        a, b = sorted((self.given[axis]["lo"], self.given[axis]["hi"]))
        low, high = max(low, a), min(high, b)
        if high <= low:
            return
        across = ([low], [y["lo"]], [high], [y["hi"]]) if axis == "x" else ([x["lo"]], [low], [x["hi"]], [high])
        self.boxes(*across, fill=color, label=look.get("label"), quiet="label" not in look)
        room: dict[str, Any] = {"room": [axis, low, high], "valign": "top"}
        if text and axis == "x":
            room["narrow"] = {"valign": "middle", "rotate": 90, "anchor": "end", "dy": 8}
            self.text(text, (low + high) / 2, y["hi"], **room | {"dy": 4} | look)
        elif text:
            right = look.get("anchor") == "end"
            room |= {"anchor": "start", "dx": -6 if right else 6, "dy": 3}
            self.text(text, x["hi" if right else "lo"], high, **room | look)

    def rule(self, axis: str, at: float | str, color: str = "muted", **look: object) -> None:
        """A line across the panel at one value of an axis, or at the step shown: `at="index"`."""
        self.add("rule", axis=axis, at=at, color=color, **look)

    def text(self, text: str | Iterable[str], x: ArrayLike, y: ArrayLike, **look: Any) -> None:
        """Words; `beside` is how many pixels right of their place they begin or, below 0, left of it they end."""
        by = look.pop("beside", 0)
        look |= {"anchor": "end" if by < 0 else "start", "dx": by} if by else {}
        self.add("text", text=[text] if isinstance(text, str) else list(text), x=x, y=y, **look)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = "muted", **look: object) -> None:
        """An arrow from one place to another."""
        y, x = zip(start[::-1], end[::-1])
        self.add("line", x=x, y=y, color=color, head=True, **{"width": 1.5} | look)

    def boxes(self, x0: ArrayLike, y0: ArrayLike, x1: ArrayLike, y1: ArrayLike, **look: object) -> None:
        """Boxes with `fill`, `edge`, `text`; `sets`, one dict for each, are the parameters that a press of it sets."""
        self.add("boxes", x0=x0, y0=y0, x1=x1, y1=y1, **look)

    def bars(self, values: Any, at: Any = None, **look: object) -> None:
        """Bars of `values` at positions `at` (0, 1, 2 ...), on axis "x" upright, on "y" lying.

        Several rows of values, one for each step or `rows[step]`; `shift[step]` moves all of them along their axis;
        `zones`, a list of [up to, role] that ends with [None, role], colours each by where it then lies.
        """
        at = np.arange(np.shape(values)[-1]) if at is None else at
        self.add("bars", values=values, at=at, count=np.size(at), **look)

    def cells(self, values: ArrayLike, texts: Sequence[str], color: str = "zero", **look: object) -> None:
        """A heat map, row 0 at the top of an axis that runs downwards: the darker, the larger."""
        values = np.asarray(values, dtype=float)
        rows, cols = (a.ravel() for a in np.indices(values.shape))
        share = ((values - values.min()) / max(float(np.ptp(values)), 1e-12)).ravel()
        fill = [f"{color}/{0.06 + 0.54 * s:.2f}" for s in share]  # words stay readable, light and dark
        self.boxes(cols - 0.5, rows - 0.5, cols + 0.5, rows + 0.5, fill=fill, text=list(texts), **look)

    def table(self, index: int, titled: bool) -> list[dict[str, Any]]:
        """The labelled marks as rows of a table, one for each place on the x axis, at most about 60."""
        found, x = dict[str, dict[str, Any]](), self.given["x"]
        for m in self.marks:
            words, label = m.get("told"), m.get("label")
            ys, xs = m.get("y", m.get("codes", words)), m.get("x", m.get("x0"))
            if not label or ys is None or m["type"] not in ("line", "points", "pen", "boxes", "notes"):
                continue
            count = max(np.size(v) for v in (ys, xs) if v is not None)
            count = min(count, index + 1) if m.get("show") == "upto" and "since" not in m else count
            for i in range(0, count, max(1, count // 60)):
                place = said(item(xs, i) if xs is not None else i, x)
                own = words if not words or isinstance(words, str) else words[int(item(m.get("codes", i), i))]
                value = own or told(item(ys, i), self.given["y"])
                found.setdefault(place, {}).setdefault(item(label, i) if not isinstance(label, str) else label, value)
        head = {"panel": self.given.get("title", "")} if titled else {}
        return [head | {x.get("label") or "place": place, **cells} for place, cells in found.items()]

    def handle(self, axis: str, name: str, at: ArrayLike, low: float, high: float, label: str, **more: object) -> None:
        """A grip that the reader drags, or moves with the arrow keys, to set the parameter `name`.

        It lies at base + slope * value of its axis, "x" or "y", across the whole panel (`foot=True` puts its ring at
        the lower end) or, with `cross`, at one place of the other axis. On "xy" it is the tip of a vector: it sets its
        length, and `turns`, its angle in degrees. `log2=True` sets 2^value; `gesture=True` adds {step: value} to a
        parameter that is a `Stroke`; `note` is written beside it. `look` "plain" has no ring of its own, "glides" goes
        slowly to where it is sent. `sets`, one dict for each place, are the parameters that it sets in place of `name`.
        """
        self.add("handle", axis=axis, name=name, at=at, lo=low, hi=high, label=label, **{"step": 1, **more})


class Sheet:
    """What one call of a view draws: panels on a grid, sized in pixels; a sentence; numbers by name; buttons.

    buttons:  label -> the parameters that it sets, or work: a generator function that is called with `now`, which
              gives the parameters as they are at any time, and yields the parameters that change as it goes
              ({"progress": share} among them). It runs in the background.
    busy:     whether such work goes on.
    idle:     names of controls that change nothing as the others stand; they are hidden.
    rows:     the table for screen readers, one dict per row; None makes it of the labelled marks.
    """

    def __init__(self, busy: bool = False) -> None:
        self.panels: list[Panel] = []
        self.step: dict[str, Any] | None = None
        self.template, self.numbers = "", dict[str, Any]()
        self.stored: str | None = None
        self.buttons: dict[str, Any] = {}
        self.idle, self.busy = set[str](), busy
        self.rows: list[dict[str, Any]] | None = None
        self.grid()

    def grid(
        self, height: int = 360, width: int = 840, rows: Shares = (1,), cols: Shares = (1,), least: int = 280
    ) -> None:
        """The size of the picture in pixels, the shares of its rows and columns, and its `least` width: on a narrower
        page it is moved sideways. Beyond 680 it is what a finger needs, and with a mouse the page's width will do."""
        self.size, self.shares, self.least = (width, height), (list(rows), list(cols)), least

    def say(self, template: str, *, stored: str | None = None, **columns: Any) -> None:
        """The sentence under the picture, and the numbers that a notebook may ask the view for.

        `{name}` in it stands for that column: a number or a word, or one for each step, so that the sentence walks
        while steps are played. Numbers have four digits, `{name:2^}` is a power of two of that exponent and
        `{name:.1f}` a fixed number of digits. Columns that the template does not name are numbers of the view only.
        `stored` replaces it on a page without a kernel, where figures differ from machine to machine.
        """
        self.template, self.numbers, self.stored = template, columns, stored

    def sentence(self, index: int = 0) -> str:
        """The sentence at one step, as the page fills it."""
        return _FIELD.sub(lambda field: filled(self.numbers[field[1]], field[2] or "", index), self.template)

    def panel(self, row: int = 0, col: int = 0, rowspan: int = 1, colspan: int = 1, **given: Any) -> Panel:
        """A new panel; `x` and `y` are axes (`log2`, `linear`, `names`, `space`).

        Its `place` is the part of the picture that it has with its `pad`: left, right, top, bottom as shares.
        """
        across = self.shares[1], (col, col + colspan)
        down = self.shares[0], (row, row + rowspan)
        place = [sum(sizes[:end]) / sum(sizes) for sizes, ends in (across, down) for end in ends]
        self.panels.append(Panel(row=row, col=col, place=place, **given))
        return self.panels[-1]

    def play(self, name: str, label: str, count: int, every: int = 80, first: int = 0, on: Panel | None = None) -> None:
        """The steps of parameter `name` are `first`, `first` + 1 ...; the page plays and scrubs them by itself.

        `every` is the time of a step in milliseconds. It need not be time: any parameter whose values are all sent.
        A line with a handle stands at the step shown, `on` a panel whose x axis are the steps.
        """
        self.step = {"name": name, "label": label, "count": count, "every": every, "first": first}
        if on:
            on.rule("x", "index", "muted", dash=":")
            on.handle("x", name, np.arange(first, first + count), first, first + count - 1, label)

    def table(self, index: int = 0) -> list[dict[str, Any]]:
        """The `rows`, or else the labelled marks of each panel at one step, a row for each place on its x axis."""
        made = (row for p in self.panels for row in p.table(index, len(self.panels) > 1))
        rows = list(made) if self.rows is None else self.rows
        columns = {name: "" for row in rows for name in row}  # each row has all of them, or cells would change places
        return [columns | row for row in rows]

    @cached_property
    def spec(self) -> dict[str, Any]:
        """What both renderers get: dicts, lists, words, arrays. Nothing can be added to the sheet afterwards."""
        padded = [p for p in self.panels if "pad" not in p.given]
        for p in padded:
            p.given["pad"] = _pads(p)
        for own, sides in (("col", (1, 3)), ("row", (0, 2))):  # panels above one another start and end at the same x
            for p in padded:
                for i in sides:
                    p.given["pad"][i] = max(q.given["pad"][i] for q in padded if q.given[own] == p.given[own])
        for p in self.panels:
            self._tag(p)
        says = {name: _column(self.numbers[name]) for name, _ in _FIELD.findall(self.template)}
        spec: dict[str, Any] = {"width": self.size[0], "height": self.size[1], "least": self.least}
        spec |= {"panels": [{**p.given, "marks": p.marks} for p in self.panels], "legend": self._legend()}
        return spec | {"says": [self.template, says]} | ({"index": self.step} if self.step else {})

    def _legend(self) -> list[dict[str, Any]]:
        """A small mark of 26 x 12 pixels for every label that does not stand in the picture itself."""
        found: dict[str, dict[str, Any]] = {}
        for m in (m for p in self.panels for m in p.marks):
            named = m.get("label") and not m.get("quiet") and not m.get("tag")
            if named and m["type"] not in ("notes", "handle"):
                found.setdefault(m["label"], _sample(m))
        return list(found.values())

    def _tag(self, p: Panel) -> None:
        """Write the label of each tagged line at its end, moved apart so that no two overlap."""
        g = p.given
        pixels = self.size[1] * (g["place"][3] - g["place"][2]) - g["pad"][0] - g["pad"][2]
        tagged = [(m, m["y"][np.isfinite(m["y"])][-1:]) for m in p.marks if m.get("tag")]
        tagged = sorted(((m, last[0]) for m, last in tagged if last.size), key=lambda pair: pair[1])
        low, high = g["y"]["lo"], g["y"]["hi"]
        places = (np.array([last for _, last in tagged]) - low) / (high - low) * pixels
        for _ in range(60 if tagged else 0):
            places[0], places[-1] = max(places[0], 5), min(places[-1], pixels)  # none under the axis
            short = np.maximum(14 - np.diff(places), 0) / 2
            places[:-1] -= short
            places[1:] += short
        for place, (m, _) in zip(places, tagged):
            y, color = low + place / pixels * (high - low), m["color"].partition("/")[0]
            p.text(m["label"], g["x"]["hi"], y, color=color, beside=11, free=True)


def _sample(m: dict[str, Any]) -> dict[str, Any]:
    """The mark of a legend that looks like `m`."""
    first = {k: v[0] if isinstance(v, list | tuple) else v for k, v in m.items() if k in _LOOKS}
    if m["type"] in ("boxes", "bars"):
        fill = m["zones"][0][1] if "zones" in m else first.get("fill", "none" if "edge" in m else "own")
        frame = {"width": 3} if "edge" in m and "fill" not in m else {}
        box = {"type": "boxes", "fill": fill, "x0": [3], "y0": [1], "x1": [23], "y1": [11]}
        return {k: v for k, v in first.items() if k in ("label", "edge", "hatch")} | frame | box
    if m["type"] == "rule":
        return first | {"axis": "y", "at": 6}
    if m["type"] == "band":
        return first | {"x": [3, 23], "y": [1, 1], "y2": [11, 11]}
    x = [13] if m["type"] == "points" else [2, 24]
    return first | {"x": x, "y": [6] * len(x), "size": min(5, m.get("size", 4)), "every": 9}


def _pads(p: Panel) -> list[int]:
    """Room around a panel for title, tick names and labels: top, right, bottom, left."""
    g, tagged = p.given, max((len(m["label"]) for m in p.marks if m.get("tag")), default=0)
    up, right = 28 if g.get("title") else 10, 14 + (13 + round(7.7 * tagged) if tagged else 0)
    if g.get("bare"):
        return [up, 6, 6, 6]
    x, y = g["x"], g["y"]
    widest = max((len(text) for _, text in y["ticks"]), default=0)
    first = max((len(text) for v, text in x["ticks"] if v == x["lo"]), default=1)  # it begins left of the panel
    left = 4 * first if y.get("hidden") else 12 + 7 * widest + (20 if y.get("label") else 4)
    slant = 5 * max((len(text) for _, text in x["ticks"]), default=0) if x.get("slant") else 0
    down = 6 if x.get("hidden") else (8 if x.get("blank") else 24) + (18 if x.get("label") else 0) + slant
    return [up, right, down, left]
