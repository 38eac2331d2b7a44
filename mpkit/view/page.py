"""A view in the page: a widget that `scene.js` draws, over the picture and the sentence that a page stores."""

from __future__ import annotations

import contextlib
import html
import time
import zlib
from pathlib import Path
from typing import Any, cast

from anywidget import AnyWidget
from traitlets import Bytes, Dict, Int, List, Unicode

from mpkit.view import ahead
from mpkit.view.controls import Stroke
from mpkit.view.sheet import ROLES
from mpkit.view.words import raised

AT_MOST = 400
"""Places of a control whose pictures travel ahead: those around the present one."""
BYTES = 25_000
"""The weight of one message; the page then wishes for the next."""
PATIENCE = 0.05
"""Seconds of work for one message: a question in between is not kept waiting."""
HERE = Path(__file__).parent
_OUTPUT = ".jp-OutputArea-child"
HIDES_ERROR = f"<style>{_OUTPUT}:has(.mpk-still) + {_OUTPUT} .jupyter-widgets:not(:has(*)) {{display: none}}</style>"
DARK_JUPYTER = 'body[data-jp-theme-light="false"]'
DARK_ELSEWHERE = 'html[theme="dark"], body.vscode-dark, body.vscode-high-contrast:not(.vscode-high-contrast-light)'


def stylesheet() -> str:
    """scene.css after the colours of the roles, on a light and on a dark page.

    In Jupyter ink and paper are the page's. On other dark pages (the first is Colab's) they are our own: what those
    have of Jupyter's variables are the light ones, and VS Code lays every widget on white.
    """
    light, dark = ("".join(f"--mk-{role}:{pair[i]};" for role, pair in ROLES.items()) for i in (0, 1))
    page = "--mk-ink:var(--jp-content-font-color1, {});--mk-paper:var(--jp-layout-color0, {});"
    page = page.format(ROLES["ink"][0], ROLES["paper"][0])
    themes = f".mpk {{{light}{page}}}\n{DARK_JUPYTER} .mpk {{{dark}{page}}}\n"
    themes += f":is({DARK_ELSEWHERE}) .mpk {{{dark}}}\n"
    return themes + (HERE / "scene.css").read_text(encoding="utf-8")


def show(stored: dict[str, Any], widget: AnyWidget) -> None:
    """Display what a page stores, then the widget, which hides it while it lives.

    Two outputs, because a page that has no model for a widget shows an error in its place, and not what stands beside
    it in the same output. JupyterLab's error, words alone where a widget would be, is hidden by a style that is stored.
    """
    from IPython.display import display

    data, metadata = cast(Any, widget._repr_mimebundle_())
    kind = "application/vnd.jupyter.widget-view+json"
    display(stored | {"text/html": stored["text/html"] + HIDES_ERROR}, raw=True)
    display({kind: data[kind]}, metadata=metadata, raw=True)


class Note(AnyWidget):
    """Words in a page that asks its kernel nothing: figures, or a prediction with its answers and all that is told.

    `stored` is what a page without a living one shows.
    """

    _esm = HERE / "scene.js"
    _css = stylesheet()
    stored = Unicode()
    note = Dict().tag(sync=True)

    def _ipython_display_(self) -> None:
        lines = "<br>".join(html.escape(self.stored).splitlines())
        show({"text/html": f'<div class="mpk-still">{lines}</div>', "text/plain": self.stored}, self)


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
        play, controls = view.sheet.step or {"name": None}, view.maker.controls
        rows = {n: c.row(view.maker.defaults[n]) for n, c in controls.items() if n != play["name"]}
        named = {n: {"name": n, "label": controls[n].label or n.replace("_", " ")} for n in rows}
        lines = [named[n] | row for n, row in rows.items() if row]
        super().__init__(controls=lines, tries=[told["say"] for told in view.tries])
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
                self.spec = ahead.packed(view.sheet.spec)
                self._seen = view.drawings  # now, not before: an interrupt between the two would leave the picture old
            self.index, self.message = view.index, view.message
            named = {c["name"]: (view.params[c["name"]], c["kind"] in ("choice", "text")) for c in self.controls}
            self.state = {
                "values": {n: str(v) if as_text else v for n, (v, as_text) in named.items()},
                "idle": sorted(view.sheet.idle),
                "buttons": [*view.sheet.buttons, *(["Stop"] if view.busy else []), "Reset"],
                "busy": view.busy,
                "progress": view.progress,
                "params": self._params(),
            }
            rows = view.table() if self._table else []
            self.rows = [{k: raised(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]

    def _params(self) -> dict[str, int]:
        """A short name for the value of each parameter but the step: a picture holds while they are the same."""
        play = (self.view.sheet.step or {}).get("name")
        return {n: zlib.crc32(repr(v).encode()) for n, v in self.view.params.items() if n != play}

    def _send_ahead(self, wish: dict[str, Any]) -> None:
        """Send pictures of the other places of a control, a handle or boxes, the nearest first; not those it `have`s.

        They hold while all parameters but those that it `moves` are the same; what a gesture does, at this step alone.
        """
        view, name = self.view, wish["name"]
        with view.lock:
            base, shown, params = view.params, view.sheet.spec, self._params()
            does = {} if view.busy else ahead.moves(view, name)
            told: dict[str, Any] = {"name": name, "params": params, "moves": [*set().union(*does.values())]}
            told |= {"index": view.index} if isinstance(view.maker.controls.get(name), Stroke) else {}
        trees, end = dict[float, Any](), time.monotonic() + PATIENCE
        for place in [place for place in [*does][:AT_MOST] if place not in wish["have"]]:
            with contextlib.suppress(ValueError):  # the kernel says why when the reader asks for it
                trees[place] = view.drawn(view.asked(does[place], base)).spec
            if time.monotonic() > end:
                break
        while trees:
            data = ahead.packed([*ahead.differences([shown, *trees.values()])])
            if len(data) <= BYTES or len(trees) == 1:
                self.ahead = {**told, "values": [*trees], "data": data}
                break
            trees = dict([*trees.items()][: len(trees) // 2])

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
        """What the reader did: `set` parameters, `press` a button or what is to be tried, open the `table`."""
        with contextlib.suppress(ValueError):  # the view kept its parameters and says why in its message
            if "set" in what:
                self.view.set(**what["set"])
            if "press" in what:
                self.view.press(what["press"])
            if "table" in what:
                self._table = bool(what["table"])
                self.redraw()
