"""What every picture shares: colours, axes in powers of two, and quick redrawing of the parts that move."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Hashable
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

# Okabe and Ito 2008, "Color universal design"; orange and sky are for filled areas with a dark outline only
BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#6E6E6E"
LINES = (BLUE, VERMILION, GREEN, PURPLE, BLACK)
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

STYLE: Any = {  # matplotlib types its keys one by one
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.labelsize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.unicode_minus": True,
}


class Picture:
    """A figure whose static part is drawn once and whose moving part is redrawn at every change.

    A subclass implements `layout(figure, data)` (axes, labels, regions, and `self.moving(artist)` for every artist
    that will change) and `update(data)` (new data into those artists). Where the axes themselves must change with
    the data, `frame(data)` returns a hashable that differs then, and the layout is done again.

    The figure has a fixed size, is drawn with Agg and without pyplot, and the same data always give the same bytes.
    """

    size = (7.2, 3.6)
    """Width and height in inches at 100 dots per inch."""

    def __init__(self) -> None:
        self._moving: list[Artist] = []
        self._background: Any = None
        self._frame: Hashable = object()
        self.figure = Figure(figsize=self.size, dpi=100, layout="constrained")
        self._canvas = FigureCanvasAgg(self.figure)

    def layout(self, figure: Figure, data: Any) -> None:
        """Axes, labels, static parts; registers what moves."""
        raise NotImplementedError

    def update(self, data: Any) -> None:
        """Put new data into the moving artists."""

    def frame(self, data: Any) -> Hashable:
        """What the static part depends on."""
        return None

    def moving(self, *artists: Any) -> Any:
        """Register artists that change; returns the artist (or the tuple)."""
        for artist in artists:
            artist.set_animated(True)
            artist.set_in_layout(False)  # or the first data shown would decide about the margins for good
            self._moving.append(artist)
        return artists[0] if len(artists) == 1 else artists

    def png(self, data: Any) -> bytes:
        """The picture of `data` as an RGB PNG."""
        with mpl.rc_context(STYLE):
            frame = self.frame(data)
            if self._background is None or frame != self._frame:
                self.figure.clear()
                self._moving = []
                self.layout(self.figure, data)
                self.update(data)
                self._canvas.draw()  # animated artists are left out of this
                self._background, self._frame = self._canvas.copy_from_bbox(self.figure.bbox), frame
            else:
                self.update(data)
                self._canvas.restore_region(self._background)
            for artist in sorted(self._moving, key=lambda a: a.get_zorder()):
                self.figure.draw_artist(artist)
            return encode(self._canvas)


class Still:
    """A finished figure with its sentence: a PNG for the eye, the sentence as text for screen readers and tests.

    >>> still(Figure(figsize=(2, 1)), "an empty figure")
    an empty figure
    """

    def __init__(self, png: bytes, sentence: str) -> None:
        self.png, self.sentence = png, sentence

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return static_bundle(self.png, self.sentence)


def image_tag(png: bytes, alt: str) -> str:
    """An HTML image that carries its data and its text alternative."""
    source = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{source}" style="max-width:100%">'


def static_bundle(png: bytes, sentence: str) -> dict[str, Any]:
    """What a page without a kernel shows: the picture with its sentence below, or either alone.

    JupyterLab and nbconvert give an `image/png` neither text alternative nor caption, so the same picture is there as
    HTML too. 256 colours are enough for a chart and make it a third of the size.
    """
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        out, "png", optimize=True
    )
    small = out.getvalue()
    caption = f"<figcaption>{html.escape(sentence)}</figcaption>"
    return {
        "text/html": f'<figure style="margin:0">{image_tag(small, sentence)}{caption}</figure>',
        "image/png": base64.b64encode(small).decode(),
        "text/plain": sentence,
    }


def still(figure: Figure, sentence: str) -> Still:
    """A figure that was drawn by hand -> what a notebook cell ends with."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Still(encode(canvas), sentence)


def new_figure(width: float = 7.2, height: float = 3.6) -> Figure:
    """An empty figure in the style of the lessons, in inches; for pictures that never change."""
    with mpl.rc_context(STYLE):
        return Figure(figsize=(width, height), dpi=100, layout="constrained")


def encode(canvas: FigureCanvasAgg) -> bytes:
    """What is on the canvas as an RGB PNG; compression level 1 costs a tenth of level 9 and 20 % more bytes."""
    out = io.BytesIO()
    Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB").save(
        out, "png", compress_level=1
    )
    return out.getvalue()


def power_of_two(exponent: float) -> str:
    """2^n in superscript digits: power_of_two(-14) is 2⁻¹⁴."""
    return "2" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def log2_axis(axes: Axes, which: str, low: int, high: int, every: int | None = None) -> None:
    """Give an axis ("x" or "y") a base-2 scale from 2^low to 2^high with powers of two as ticks."""
    every = every or max(1, (high - low) // 8)
    getattr(axes, f"set_{which}scale")("log", base=2)
    getattr(axes, f"set_{which}lim")(2.0**low, 2.0**high)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator([2.0**e for e in range(low, high + 1, every)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power_label(value)))


def _power_label(value: float) -> str:
    import math

    return power_of_two(math.log2(value)) if value > 0 else "0"
