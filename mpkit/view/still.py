"""The sheet as a still picture: matplotlib draws what a notebook stores, from the same data as the page."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer, Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path
from PIL import Image

from mpkit.view.sheet import ROLES, Sheet, item
from mpkit.view.words import raised

PT = 0.72  # points per pixel at 100 dots per inch
STEPS = {"mid": "steps-mid", "post": "steps-post", None: "default"}


class Still:
    """A picture that never moves: a PNG for the eye, its sentence as text for screen readers and tests.

    >>> see = Sheet()
    >>> see.say("an empty picture")
    >>> Still(see)
    an empty picture
    """

    def __init__(self, sheet: Sheet) -> None:
        self.png, self.sentence = png(sheet.spec), sheet.sentence()

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return static_bundle(self.png, self.sentence)


def static_bundle(picture: bytes, sentence: str) -> dict[str, Any]:
    """What a page without a kernel shows: the picture with its sentence below, or either alone.

    JupyterLab and nbconvert give an `image/png` neither text alternative nor caption, so the same picture is there as
    HTML too, in which a living view finds it. 256 colours are enough for a chart and make it a third of the size.
    """
    out, image = io.BytesIO(), Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    data, alt, told = base64.b64encode(out.getvalue()).decode(), html.escape(sentence), html.escape(raised(sentence))
    shown = f'<img alt="{alt}" src="data:image/png;base64,{data}" style="max-width:100%">'
    return {
        "text/html": f'<figure class="mpk-still" style="margin:0">{shown}<figcaption>{told}</figcaption></figure>',
        "image/png": data,
        "text/plain": sentence,
    }


def png(spec: dict[str, Any], index: int = 0) -> bytes:
    """The picture of a sheet's spec at one step."""
    out = io.BytesIO()
    figure(spec, index).savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def figure(spec: dict[str, Any], index: int = 0) -> Figure:
    """The sheet at one step as a matplotlib figure."""
    fig = Figure(figsize=(spec["width"] / 100, (spec["height"] + 26) / 100), dpi=100, facecolor="white")
    legend, step = dict[str, Any](), spec.get("index")
    for panel in spec["panels"]:
        axes = fig.add_axes(_place(spec, panel))
        _axes(axes, panel, index)
        for z, mark in enumerate(panel["marks"]):
            follows = mark["type"] == "rule" and mark["at"] == "index"
            if step and (follows or mark.get("name") == step["name"]):
                mark = mark | {"at": index + step["first"]}
            first, last = mark.get("only", (index, index))
            if not first <= index <= last:
                continue
            artist = _mark(axes, mark, index, 2 + 0.01 * z, panel)
            if mark.get("label") and not mark.get("quiet") and not mark.get("tag") and artist is not None:
                legend.setdefault(raised(mark["label"]), artist)
        for line in axes.lines:
            if line.get_marker() != "None":  # a mark on the edge is whole, as in the page
                line.set_clip_box(axes.bbox.padded(9))
    if legend:
        look: dict[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.8}
        fig.legend(legend.values(), legend, loc="upper left", ncols=7, borderaxespad=0.1, **look)
    return fig


def colour(role: str | None) -> str | tuple[float, float, float]:
    """The colour of a role or of its tint, on paper."""
    base, _, share = (role or "none").partition("/")
    found = ROLES[base][0] if base in ROLES else base
    if not share:
        return found
    red, green, blue = (1 - float(share) * (1 - part) for part in to_rgb(found))
    return red, green, blue


def _place(spec: dict[str, Any], p: dict[str, Any]) -> tuple[float, float, float, float]:
    width, height, total = spec["width"], spec["height"], spec["height"] + 26
    (x0, x1, y0, y1), (up, right, down, left) = p["place"], p["pad"]
    x0, x1, y0, y1 = width * x0 + left, width * x1 - right, height * y0 + up, height * y1 - down
    if p.get("equal"):
        long, high = (abs(p[k]["hi"] - p[k]["lo"]) for k in ("x", "y"))
        unit = min((x1 - x0) / long, (y1 - y0) / high)
        x1, y1 = x0 + unit * long, y0 + unit * high
    return x0 / width, (height - y1) / total, (x1 - x0) / width, (y1 - y0) / total


def _axes(axes: Any, p: dict[str, Any], index: int) -> None:
    moved = index if p["x"].get("follow") else 0
    axes.set(xlim=(p["x"]["lo"] + moved, p["x"]["hi"] + moved), ylim=(p["y"]["lo"], p["y"]["hi"]), facecolor="none")
    axes.set_title(p.get("title", ""), loc="left", fontsize=10 / 13 * p.get("title_size", 13), fontweight="bold")
    axes.set_axisbelow(True)
    if p.get("bare"):
        return axes.set_axis_off()
    axes.spines[["top", "right"]].set_visible(False)
    for which, side, drawn in (("x", "bottom", axes.xaxis), ("y", "left", axes.yaxis)):
        axis, (low, high) = p[which], sorted(getattr(axes, f"get_{which}lim")())
        shown = [(v, "" if axis.get("blank") else t) for v, t in axis["ticks"] if low - 1e-9 <= v <= high + 1e-9]
        slant: dict[str, Any] = {"rotation": axis["slant"], "ha": "right"} if axis.get("slant") else {}
        drawn.set_ticks([v for v, _ in shown], [t for _, t in shown], fontsize=9, **slant)
        axes.spines[side].set_visible(not axis.get("hidden"))
        if not axis.get("hidden"):
            drawn.set_label_text(axis.get("label", ""), fontsize=9)
            drawn.grid(color=ROLES["grid"][0], lw=0 if axis.get("bare") else 0.6)
    if not p["y"].get("hidden"):  # at the left edge of the panel, as in the page
        axes.yaxis.set_label_coords((18 - p["pad"][3]) / axes.get_window_extent().width, 0.5)


def _shown(m: dict[str, Any], index: int, n: int) -> slice:
    if m.get("show") == "at":
        return slice(index, index + 1)
    if m.get("show") == "upto":
        return slice(0, int(np.searchsorted(m["since"], index, "right")) if "since" in m else index + 1)
    return slice(0, n)


def _mark(axes: Axes, m: dict[str, Any], index: int, z: float, p: dict[str, Any]) -> Artist | Container | None:
    kind: str = m["type"]
    look: dict[str, Any] = {"zorder": z}
    if kind in ("line", "points", "pen"):
        return _line(axes, m, index, look)
    if kind == "band":
        x = np.arange(np.size(m["y"])) if m.get("x") is None else m["x"]
        return axes.fill_between(x, m["y"], m["y2"], step=m.get("step"), color=colour(m["color"]), lw=0, **look)
    if kind == "rule":
        line = axes.axvline if m["axis"] == "x" else axes.axhline
        return line(m["at"], color=colour(m["color"]), lw=PT * m.get("width", 1.2), ls=_dash(m.get("dash")), **look)
    if kind == "boxes":
        return _boxes(axes, m, index, z)
    if kind == "bars":
        return _bars(axes, m, index, look)
    if kind == "handle":
        _handle(axes, m, index, z + 8, p)  # as in the page, words lie above all shapes, and handles above all words
    elif kind == "text":
        for k, text in enumerate(m["text"]):
            stands = _standing(axes, m, text)
            if stands and (m.get("show") != "at" or k == index):
                x, y, ink = (item(m.get(name), k) for name in ("x", "y", "color"))
                _words(axes, x, y, text, {**stands, "color": ink}, z + 4)
    return None


def _standing(axes: Axes, m: dict[str, Any], text: str) -> dict[str, Any] | None:
    """As in the page a region's name lies in it, stands where that is too narrow, is left out where it has no room."""
    if "room" not in m:
        return m
    (axis, low, high), lines = m["room"], text.split("\n")
    extent, (a, b) = axes.get_window_extent(), getattr(axes, f"get_{axis}lim")()
    room = abs((high - low) / (b - a)) * (extent.width if axis == "x" else extent.height)
    if room >= (7.7 * max(map(len, lines)) if axis == "x" else 14.4 * len(lines)):
        return m
    return m | m["narrow"] if axis == "x" and room > 15 else None


def _dash(name: str | None) -> str | tuple[int, tuple[float, ...]]:
    return name or "-" if name in (None, "--", "-.", ":") else (0, tuple(map(float, name.split())))


def _line(axes: Axes, m: dict[str, Any], index: int, look: dict[str, Any]) -> Line2D:
    n = max(np.size(m.get("x", ())), np.size(m["y"]))
    part = _shown(m, index, n)
    x, y = (np.broadcast_to(np.arange(n) if m.get(k) is None else m[k], n)[part] for k in ("x", "y"))
    color = colour(item(m["color"], int(m["hue"][index]) if "hue" in m else index))
    points = m["type"] == "points"
    ends = {"marker": m.get("glyph", "o" if points else None), "ms": 2 * PT * m.get("size", 4)}
    ends |= {"mfc": colour(m["fill"]) if "fill" in m else color, "markevery": m.get("every", 1)}
    style = {"ls": "none"} if points else {"ls": _dash(m.get("dash")), "lw": PT * m.get("width", 2)}
    style |= {"mew": PT * m.get("width", 2), "drawstyle": STEPS[m.get("step")]}
    for at, up, share in zip(x, y, m["ring"][part] if "ring" in m else ()):
        for until, role in ((1.0, "grid"), (float(share), "normal")):
            arc = {"marker": Path.arc(90 - 360 * until, 90), "ms": 2 * PT * (m.get("size", 4) + 6), "mfc": "none"}
            axes.plot([at], [up], mec=colour(role), mew=3, **arc, **look)
    if m.get("head"):
        arrow: dict[str, Any] = {"arrowstyle": "-|>", "color": color, "lw": PT * m["width"], "mutation_scale": 12}
        axes.annotate("", (x[1], y[1]), (x[0], y[0]), arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0}, **look)
        return Line2D([], [])
    return axes.plot(x, y, color=color, gid=m["type"], **style, **ends, **look)[0]


def _boxes(axes: Axes, m: dict[str, Any], index: int, z: float) -> Patch | None:
    n, hatch = max(np.size(m[k]) for k in ("x0", "y0", "x1", "y1")), m.get("hatch")
    shapes = list[Patch]()
    for k in range(n)[_shown(m, index, n)]:
        x0, y0, x1, y1, fill, edge = (item(m.get(name), k) for name in ("x0", "y0", "x1", "y1", "fill", "edge"))
        style: dict[str, Any] = {"fc": colour(fill), "ec": colour(edge or ("muted" if hatch else "none")), "zorder": z}
        style |= {"lw": PT * m.get("width", 1.0 if edge or hatch else 0), "ls": _dash(m.get("dash"))}
        corner, size = (min(x0, x1), min(y0, y1)), (abs(x1 - x0), abs(y1 - y0))
        shapes.append(Rectangle(corner, *size, hatch="///" if hatch else None, **style))
        axes.add_patch(shapes[-1])
        if m.get("text"):
            look = {"size": m.get("size", 12), "halo": hatch}
            _words(axes, (x0 + x1) / 2, (y0 + y1) / 2, m["text"][k], look, z + 0.005)
    return shapes[0] if shapes else None


def _bars(axes: Axes, m: dict[str, Any], index: int, look: dict[str, Any]) -> BarContainer:
    values, row = np.asarray(m["values"]).reshape(-1, m["count"]), item(m.get("rows", index), index)
    heights = values[min(int(row), len(values) - 1)] * m.get("unit", 1.0)
    at = np.asarray(m["at"]) + item(m.get("shift", 0.0), index)
    zones = m.get("zones", [(None, m.get("fill", "own"))])
    fill = [colour(next(role for end, role in zones if end is None or a < end)) for a in at]
    draw = axes.bar if m.get("axis", "x") == "x" else axes.barh
    edge: dict[str, Any] = {"edgecolor": colour(m.get("edge", "muted")), "lw": PT}
    edge |= {"hatch": "///"} if m.get("hatch") else {}
    heights = np.where(heights == 0, np.nan, heights)  # nothing to be seen, but in the legend
    return draw(at, heights, m.get("width", 0.8), color=fill, **edge, **look)


def _handle(axes: Axes, m: dict[str, Any], index: int, z: float, p: dict[str, Any]) -> None:
    ball: dict[str, Any] = {"marker": "o", "ms": 9, "mfc": "white", "mec": colour("own"), "mew": 1.8, "clip_on": False}
    stem: dict[str, Any] = {"color": colour("own"), "lw": 1.1, "ls": (0, (5, 3)), "zorder": z}
    if m["axis"] == "xy":
        axes.plot(*m["at"], zorder=z + 1, **ball)
        return
    across, own, high = m["axis"] == "x", p[m["axis"]], axes.get_window_extent().height
    base, cross = item(m.get("base", 0.0), index), item(m.get("cross"), index)
    at = np.clip(base + m.get("slope", 1) * item(m["at"], index), *sorted((own["lo"], own["hi"])))
    whole, left = cross is None, cross is None and not across
    if whole:  # off the title, as in the page
        cross = p["x"]["hi"] if left else np.interp((1 - 4 / high, 4 / high)["foot" in m], (0, 1), axes.get_ylim())
    ends = np.array([(base, cross), (at, cross)])[:, :: 1 if across else -1]
    ends[:, 0] += axes.get_xlim()[0] - p["x"]["lo"]
    x, y = ends[1]
    if whole:
        axes.axvline(x, **stem) if across else axes.axhline(y, **stem)
    elif m.get("stem"):
        axes.plot(*ends.T, **stem)
    if m.get("look") != "plain":
        axes.plot(x, y, zorder=z + 1, **ball)
    if m.get("note"):
        far, up = axes.transLimits.transform((x, y)) * (1, high)
        before = {"anchor": "end", "dx": -12, "dy": 0 if across else 9 if up > 20 else -9}  # above a line are others
        stemmed = across and m.get("stem")
        after = {"dx": 12, "dy": 0 if across else -9}
        shift = before if left or (stemmed and far > 0.15) else {"dy": -15} if stemmed else after
        _words(axes, x, y, m["note"], {"color": "own", "anchor": "start", "halo": True, **shift}, z)


def _words(axes: Axes, x: float, y: float, text: str, m: dict[str, Any], z: float) -> None:
    ink, own = to_rgb(colour("ink")), to_rgb(colour(m.get("color") or "ink"))
    look: dict[str, Any] = {"fontsize": PT * m.get("size", 12) + 0.4, "fontweight": m.get("weight", "normal")}
    look |= {"ha": {"start": "left", "middle": "center", "end": "right"}[m.get("anchor", "middle")]}
    look |= {"va": {"middle": "center"}.get(m.get("valign", "middle"), m.get("valign"))}
    look |= {"xycoords": "axes fraction"} if m.get("frame") else {}
    look |= {"rotation": m["rotate"], "rotation_mode": "anchor"} if m.get("rotate") else {}
    look |= {"annotation_clip": False} if m.get("frame") or m.get("free") else {}
    look |= {"bbox": {"fc": "white", "ec": "none", "pad": 1}} if m.get("halo") else {}
    color = [0.7 * c + 0.3 * i for c, i in zip(own, ink)]
    away: dict[str, Any] = {"xytext": (PT * m.get("dx", 0), -PT * m.get("dy", 0)), "textcoords": "offset points"}
    axes.annotate(raised(text), (x, y), color=color, zorder=z + 0.5, **away, **look)
