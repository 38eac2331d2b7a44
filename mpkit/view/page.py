"""A view in the page: a widget that `scene.js` draws, over the picture and the sentence that a page stores."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, cast

from anywidget import AnyWidget
from ipywidgets import VBox, Widget
from traitlets import Bytes, Dict, Int, List, Unicode

from mpkit.view import ahead
from mpkit.view.controls import Choice, Range, Stroke
from mpkit.view.sheet import ROLES
from mpkit.view.still import static_bundle

HERE = Path(__file__).parent
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


def show(view: Any) -> None:
    """Display a `View`: first what a page stores, then the widget, which hides it while it lives.

    Two outputs, because a page that has no model for a widget shows an error in its place, and not what stands beside
    it in the same output.
    """
    from IPython.display import display

    data, metadata = cast(Any, Page(view)._repr_mimebundle_())
    kind = "application/vnd.jupyter.widget-view+json"
    for bundle in (static_bundle(view.png(), repr(view)), {kind: data[kind]}):
        display(bundle, metadata=metadata if kind in bundle else {}, raw=True)


class Stored(VBox):
    """Widgets whose form on a page without a kernel is a text."""

    def __init__(self, text: str, *children: Widget) -> None:
        self.text = text
        super().__init__(children)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **kwargs: object) -> Any:  # ipywidgets cuts the text off after 110 characters
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self.text}


class Page(AnyWidget):
    """Shows a `View`; what the reader does arrives as messages, and sets parameters.

    A change sends the whole trajectory once; the page plays, scrubs and reads values by itself. The page has one
    question under way at a time and knows by its number when it was answered, so that none gets lost: of a trait
    ipywidgets sends the latest value alone. When the reader comes near a control (`wish`), the pictures of its other
    values are sent `ahead`, so that dragging it asks nothing.
    """

    _esm = HERE / "scene.js"
    _css = stylesheet()
    spec = Bytes().tag(sync=True)
    controls: Any = List().tag(sync=True)
    tries: Any = List().tag(sync=True)
    state = Dict().tag(sync=True)
    index = Int(0).tag(sync=True)
    wish = Dict().tag(sync=True)
    ahead = Dict().tag(sync=True)
    message = Unicode().tag(sync=True)
    rows: Any = List().tag(sync=True)

    def __init__(self, view: Any) -> None:
        self.view, self._seen, self._table = view, -1, False
        play = view.sheet.step or {}
        rows = [
            {"name": n, "label": c.label or n.replace("_", " "), **c.row(view.maker.defaults[n])}
            for n, c, _ in view.controlled()
            if n != play.get("name")
        ]
        super().__init__(controls=[r for r in rows if r["kind"] != "hidden"], tries=[t["say"] for t in view.tries])
        self.on_msg(self._heard)
        self.observe(lambda change: self._send_ahead(change["new"]), "wish")
        self.redraw()
        view.listeners.append(self.redraw)

    def close(self) -> None:
        """Take the widget off the page; its view goes on without it."""
        with contextlib.suppress(ValueError):  # it was closed before
            self.view.listeners.remove(self.redraw)
        super().close()

    def redraw(self) -> None:
        """Send what has changed, in one message."""
        view = self.view
        with view.lock, self.hold_sync():
            if view.drawings != self._seen:
                self.spec = ahead.packed(view.sheet.spec())
                self._seen = view.drawings  # now, not before: an interrupt between the two would leave the picture old
            self.index, self.message = view.index, view.message
            told = {n: str(v) if isinstance(c, Choice) else v for n, c, v in view.controlled()}
            self.state = {
                "values": told,
                "idle": sorted(view.sheet.idle),
                "buttons": [*view.sheet.buttons, *(["Stop"] if view.busy else []), "Reset"],
                "busy": view.busy,
                "progress": view.progress,
                "tokens": {name: self._token(name) for name in ("", *self._moved())},
            }
            self.rows = view.table() if self._table else []

    def _moved(self) -> dict[str, set[str]]:
        """What can be sent ahead -> the parameters that it moves."""
        table = self.view.maker.controls
        found = {n: {n} for n, c in table.items() if isinstance(c, Stroke) or (isinstance(c, Range) and not c.costly)}
        for mark in (m for panel in self.view.sheet.panels for m in panel.marks):
            if mark.get("sets"):
                found[mark["name"]] = set().union(*mark["sets"])
        return found

    def _token(self, name: str = "") -> str:
        """A name for all that the picture depends on, or for all but what `name` moves."""
        view, play = self.view, self.view.sheet.step
        hidden = {play["name"] if play else ""} | (self._moved()[name] if name else set())
        return f"{hash(repr([(n, v) for n, v in view.params.items() if n not in hidden])) & 0xFFFFFFFF:x}"

    def _send_ahead(self, wish: dict[str, Any]) -> None:
        """Send pictures of other values of a parameter, or of what a gesture can ask for now; not those it `have`s.

        They hold while the page's state has the same `token`, and at step `index` if that matters.
        """
        view, name, have = self.view, wish["name"], wish.get("have", [])
        with view.lock:
            if name not in self._moved():
                return
            shown = view.sheet.spec()
            mark, places = ahead.positions(shown, self.controls, name)
            told: dict[str, Any] = {"name": name, "token": self._token(name), "full": self._token()}
            index, now = self.index, (mark or {}).get("at", view.params.get(name))
        if mark and mark.get("gesture"):
            told["index"] = index
        left = [] if view.busy else [place for place in ahead.nearest(places, now) if place not in have]
        trees, end = dict[float, Any](), time.monotonic() + ahead.PATIENCE
        while left and time.monotonic() < end:
            place = left.pop(0)
            with contextlib.suppress(ValueError):  # the kernel says why when the reader asks for it
                trees[place] = view.drawn(view.asked(*ahead.change(mark, name, place, index))).spec()
        data = ahead.packed([*ahead.differences([shown, *trees.values()])])
        self.ahead = {**told, "values": [*trees], "whole": not left, "data": data}

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the page has saved, but for its step: that comes with each question, and a saved one may be older."""
        super().set_state({name: value for name, value in sync_data.items() if name != "index"})

    def _heard(self, _: object, question: dict[str, Any], __: object) -> None:
        """One question of the page, with the step that it shows; whatever comes of it, the page may ask the next."""
        try:
            if "index" in question:
                self.view.go(question["index"])
            self.ask(question["ask"])
        finally:
            self.send({"done": question["n"]})

    def ask(self, what: dict[str, Any]) -> None:
        """What the reader did: `set` and `add` parameters, `press` a button, `try` something, open the `table`."""
        view = self.view
        with contextlib.suppress(ValueError):  # the view kept its parameters and says why in its message
            if "set" in what:
                view.set(**what["set"])
            if "add" in what:
                view.add(**what["add"])
            if "press" in what:
                view.press(what["press"])
            if "try" in what:
                view.attempt(what["try"])
            if "table" in what:
                self._table = bool(what["table"])
                self.redraw()
