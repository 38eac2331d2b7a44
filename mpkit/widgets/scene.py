"""The view of an explorer: one widget that draws its scene in the page, with its controls, its sentence, its table."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from traitlets import Bool, Dict, Float, HasTraits, Int, List, Unicode

from mpkit.arguments import check_choice, is_number
from mpkit.explorers.base import Explorer
from mpkit.plots.scene import ROLES, Scene
from mpkit.plots.static import png, static_bundle
from mpkit.widgets import ahead

try:
    from anywidget import AnyWidget as _Widget
except ImportError:  # what is stored still shows, with a word on what is missing
    _Widget = HasTraits  # type: ignore[assignment,misc]

HERE = Path(__file__).parent
MISSING = "This picture moves where anywidget is installed: pip install anywidget, then start the kernel again."
DARK_JUPYTER = 'body[data-jp-theme-light="false"]'
DARK_ELSEWHERE = (
    'html[theme="dark"]',  # Colab
    "body.vscode-dark",
    "body.vscode-high-contrast:not(.vscode-high-contrast-light)",
)


def stylesheet() -> str:
    """scene.css after the colours of the roles, on a light and on a dark page.

    In Jupyter ink and paper are the page's. On other dark pages they are our own: what those have of Jupyter's
    variables are the light ones, and VS Code lays every widget on white.
    """
    light, dark = ("".join(f"--mk-{role}:{pair[i]};" for role, pair in ROLES.items()) for i in (0, 1))
    page = "--mk-ink:var(--jp-content-font-color1, {});--mk-paper:var(--jp-layout-color0, {});"
    page = page.format(ROLES["ink"][0], ROLES["paper"][0])
    themes = f".mpk {{{light}{page}}}\n{DARK_JUPYTER} .mpk {{{dark}{page}}}\n"
    themes += f":is({', '.join(DARK_ELSEWHERE)}) .mpk {{{dark}}}\n"
    return themes + (HERE / "scene.css").read_text(encoding="utf-8")


class View(_Widget):
    """Draws `scene(explorer)`; what the reader does arrives as messages, and sets parameters or calls methods (`ask`).

    A change of a parameter sends the whole trajectory once; the page plays, scrubs and reads values by itself. The
    page has one question under way at a time and knows by its number when it was answered, so that none gets lost:
    of a trait ipywidgets sends the latest value alone. When
    the reader comes near a handle (`wish`), the pictures of its other values are sent `ahead`, so that
    dragging it asks nothing. The stored output is picture and sentence, so a reader without a kernel, a screen reader
    and nbval all see what the view shows. A refused value is put back and the reason shown.
    """

    _esm = HERE / "scene.js"
    _css = stylesheet()
    spec = Dict().tag(sync=True)
    kept = Dict().tag(sync=True)
    controls: Any = List().tag(sync=True)
    state = Dict().tag(sync=True)
    index = Int(0).tag(sync=True)
    wish = Dict().tag(sync=True)
    ahead = Dict().tag(sync=True)
    sentence: Any = List().tag(sync=True)
    rows: Any = List().tag(sync=True)

    def __init__(self, explorer: Explorer, scene: Callable[[Any], Scene]) -> None:
        self.explorer, self.scene = explorer, scene
        self._drawn: Any = None
        self._table = False
        with explorer.lock:
            play = scene(explorer).step or {}
        self._step = play["name"] if play.get("name") in explorer.controls else None
        self._first = play.get("first", 0)
        super().__init__(controls=self._form())
        explorer.observe(self.redraw, ["revision", "message", "busy"])  # when all is computed
        if hasattr(self, "on_msg"):
            self.on_msg(self._heard)
        self.observe(lambda change: self._send_ahead(change["new"]), "wish")
        if self._step:
            self.observe(lambda change: self.ask({self._step: change["new"] + self._first}), "index")
        self.redraw()
        self._open()

    def close(self) -> None:
        """Take the view off the page; its explorer goes on without it."""
        with contextlib.suppress(ValueError):  # it was closed before
            self.explorer.unobserve(self.redraw, ["revision", "message", "busy"])
        if _Widget is not HasTraits:
            cast(Any, super()).close()

    def redraw(self, _: object = None) -> None:
        """Send what has changed: the scene if a parameter other than the step did, sentence and state; one message."""
        with self.explorer.lock, self._together():
            state = self.explorer.state()
            key = [v for k, v in state.items() if k != self._step], self.explorer.changes
            if key != self._drawn or self._step is None:
                self._drawn, spec = None, self.scene(self.explorer).spec()
                self.kept, self.spec = spec.pop("kept"), spec
                self._drawn = key  # now, not before: an interrupt between the two would leave the picture old
            if "index" in self.spec:  # a step is shown, of an explorer's control or of the page alone
                wanted = state[self._step] - self._first if self._step else self.index
                self.index = min(wanted, self.spec["index"]["count"] - 1)
            extra = {"busy": self.explorer.busy, "progress": self.explorer.progress, "idle": list(self.explorer.idle())}
            extra["tokens"] = {name: self._token(self.explorer, name) for name in ("", *self.explorer.ahead)}
            words = {k: str(v) if hasattr(self.explorer.traits()[k], "values") else v for k, v in state.items()}
            self.state = {k: v for k, v in words.items() if k != self._step} | extra  # a choice is known by its name
            self.sentence = [self.summary(), self.explorer.message]
            self.rows = self.data() if self._table else []

    def _open(self) -> None:
        """A step that the page alone knows begins at its end: all of the run is seen."""
        if self._step is None and "index" in self.spec:
            self.index = self.spec["index"]["count"] - 1

    def _together(self) -> Any:
        return self.hold_sync() if hasattr(self, "hold_sync") else self.hold_trait_notifications()

    def summary(self) -> str:
        """The sentence on screen."""
        return self.explorer.summary()

    def data(self) -> list[dict[str, Any]]:
        """The data on screen, one dict per row."""
        return self.explorer.table()

    def png(self) -> bytes:
        """The picture as it would be stored now."""
        return png(self.spec | {"kept": self.kept}, self.index)

    def press(self, label: str) -> None:
        """Press the button of that label. Raises ValueError if there is none."""
        buttons = {c["label"]: c["name"] for c in self.controls if c["kind"] == "button"}
        self.ask({buttons[check_choice("a button", label, buttons)]: True})

    def __repr__(self) -> str:
        return self.explorer.stored()

    def _repr_mimebundle_(self, **kwargs: object) -> Any:
        if _Widget is HasTraits:
            return static_bundle(self.png(), f"{self.explorer.stored()} {MISSING}")
        data, metadata = cast(Any, super())._repr_mimebundle_(**kwargs)
        return data | static_bundle(self.png(), self.explorer.stored()), metadata

    def _token(self, explorer: Explorer, name: str = "") -> str:
        """A name for all that the scene depends on, or for all but one parameter."""
        given = [v for k, v in explorer.state().items() if k not in (self._step, name)]
        return f"{hash(repr((given, explorer.changes, explorer.memory))) & 0xFFFFFFFF:x}"

    def _send_ahead(self, wish: dict[str, Any]) -> None:
        """Send pictures of other values of a parameter, or of what a gesture can ask for now; not those it `have`s.

        They hold while the page's state has the same `token`, and at step `index` if that matters.
        """
        name, have = wish["name"], wish.get("have", [])
        with self.explorer.lock:
            base, spec, index = copy.copy(self.explorer), self.spec, self.index  # a copy that nobody observes
            shown = {"kept": self.kept, "spec": spec}
        mark, places = ahead.positions(spec, self.controls, name)
        told: dict[str, Any] = {"name": name, "token": self._token(base, name), "full": self._token(base)}
        if mark and mark.get("gesture"):
            told["index"] = index
        if self.explorer.busy or name not in base.ahead:
            places = []
        now = (mark or {}).get("at", getattr(base, name, 0.0))
        now = now if isinstance(now, float | int) else 0.0
        left = [place for place in ahead.nearest(places, now) if place not in have]
        values, trees = list[float](), list[Any]()
        end = time.monotonic() + ahead.PATIENCE
        while left and time.monotonic() < end:
            other, place = copy.copy(base), left.pop(0)
            value = 2.0**place if mark and mark.get("log2") else place
            try:
                self._do(other, name, [index, value] if "index" in told else value)
            except ValueError:
                continue  # the kernel says why when the reader asks for it
            if not other.message:
                tree = self.scene(other).spec()
                trees.append({"kept": tree.pop("kept"), "spec": tree})
                values.append(place)
        self.ahead = {**told, "values": values, "whole": not left, "data": ahead.packed(shown, trees)}

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the page has saved, but for its step: that comes with each question, and a saved one may be older."""
        cast(Any, super()).set_state({name: value for name, value in sync_data.items() if name != "index"})

    def _heard(self, _: object, question: dict[str, Any], __: object) -> None:
        """One question of the page, with the step that it shows; whatever comes of it, the page may ask the next."""
        try:
            self.index = question.get("index", self.index)
            self.ask(question["ask"])
        finally:
            cast(Any, self).send({"done": question["n"]})

    def ask(self, what: dict[str, Any]) -> None:
        """What the reader did: name of a control, button or gesture -> value."""
        explorer = self.explorer
        with explorer.lock:
            for name, value in what.items():
                if name == "table":
                    self._table = bool(value)
                    self.redraw()
                elif name == "reset":
                    explorer.reset()
                    self._open()
                elif name in explorer.controls:
                    try:
                        self._do(explorer, name, value)
                    except ValueError:  # the explorer kept its state and says why in its message
                        self._drawn = None
                        self.redraw()
                else:
                    self._do(explorer, name, value)

    @staticmethod
    def _do(explorer: Explorer, name: str, value: Any) -> None:
        """Set a control as the page names its values, press a button, make a gesture; anything else is left alone."""
        if name in explorer.actions.values():
            explorer.act(name)
        elif name in explorer.gestures:
            explorer.act(name, *(value if isinstance(value, list) else [value]))
        if name not in explorer.controls:
            return
        trait: Any = explorer.traits()[name]
        if isinstance(trait, Unicode) and is_number(value) and abs(value) < 1e308:  # from a handle
            value = f"{value:.9g}"
        elif isinstance(trait, Int | Float) and is_number(value) and value == value:
            value = min(max(value, trait.min), trait.max)  # a handle may be pulled over the end
            value = round(value) if isinstance(trait, Int) else value
        if values := getattr(trait, "values", None):  # the page knows words only
            value = next((v for v in values if str(v) == str(value)), value)
        if getattr(explorer, name) != value:
            explorer.set(**{name: value})

    def _form(self) -> list[dict[str, Any]]:
        rows = []
        for name in self.explorer.controls:
            trait: Any = self.explorer.traits()[name]
            tags = trait.metadata
            if tags.get("hidden") or name == self._step:
                continue
            row = {"name": name, "label": tags.get("label", name) + (f", {tags['unit']}" if tags.get("unit") else "")}
            if values := getattr(trait, "values", None):
                shown = tags.get("names", {})
                row |= {"kind": "choice", "options": [[str(shown.get(v, v)), str(v)] for v in values]}
            elif isinstance(trait, Bool):
                row |= {"kind": "checkbox"}
            elif isinstance(trait, Int | Float):
                if None in (trait.min, trait.max) or not math.isfinite(trait.min + trait.max):
                    raise ValueError(f"the control {name} needs a min and a max, between which its slider moves")
                grid = _grid(trait)
                even = math.isclose(step := grid[1] - grid[0], grid[-1] - grid[-2], abs_tol=1e-9)
                row |= {"kind": "range", "grid": grid, "step": float(f"{step:.6g}") if even else "any"}
                row |= {"wide": 3 + max(len(f"{v:.9g}") for v in grid)}  # digits, and room for the arrows
            else:
                row |= {"kind": "text"}
            rows.append(row | ({"costly": True} if tags.get("costly") else {}))
        rows += [{"name": method, "label": text, "kind": "button"} for text, method in self.explorer.actions.items()]
        return [*rows, *([{"name": "reset", "label": "Reset", "kind": "button"}] if self.explorer.controls else [])]


class Maker(Protocol):
    """Makes a view; its parameters are those of the view's explorer."""

    def __call__(self, **params: object) -> View: ...


def plain(explorer: type[Explorer], scene: Callable[[Any], Scene], says: str) -> Maker:
    """What makes the view of an explorer that needs nothing but a scene, under the scene's own name."""

    def make(**params: object) -> View:
        return View(explorer(**params), scene)

    make.__module__ = scene.__module__.replace(".plots.", ".widgets.")
    make.__name__ = make.__qualname__ = scene.__name__.removesuffix("_scene") + "_view"
    make.__doc__ = f"{says}; parameters as `{explorer.__name__}`."
    return make


def _grid(trait: Any) -> list[float]:
    """The values of a slider, ascending: its limits, and the whole steps from the default, in the trait's scale."""
    scale = trait.metadata.get("scale", "linear")
    step = trait.metadata.get("step", 1 if scale != "linear" or isinstance(trait, Int) else 0.01)
    there, back = {
        "linear": (float, float),
        "log2": (math.log2, lambda exponent: 2.0**exponent),
        "log10": (math.log10, lambda exponent: 10.0**exponent),
    }[scale]
    low, start, high = there(trait.min), there(float(trait.default_value)), there(trait.max)
    first, last = math.ceil((low - start) / step - 1e-9), math.floor((high - start) / step + 1e-9)
    positions = (round(start + i * step, 12) for i in range(first, last + 1))
    if isinstance(trait, Int):
        values: Any = (round(round(back(x), 6)) for x in positions)  # 12.5 is a tie, whatever the last bit
    else:  # powers with a whole exponent are exact, others have four digits
        values = (back(x) if scale == "linear" or x.is_integer() else float(f"{back(x):.4g}") for x in positions)
    return sorted({trait.min, trait.max, *(min(max(v, trait.min), trait.max) for v in values)})
