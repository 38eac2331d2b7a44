"""A view is a function of its parameters: it draws a sheet. Whatever the reader does sets parameters, and it is called
again.

    @view(window=(1, 400), run=["a", "b"])
    def scale(see, window=50, run="a", hold=False): ...

    scale(window=20).numbers["finite"]

Controls are declared as in ipywidgets' `interact` (see `controls`). A handle, a box that is pressed, a button and the
pen name the parameters that they set. What `see.play` plays the page moves alone: the sheet must not depend on that
parameter but in its columns and its handle.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mpkit.arguments import check_choice
from mpkit.view.controls import Control, control
from mpkit.view.sheet import Sheet
from mpkit.view.words import words

AT_WORK = "it is still at work; press Stop first"
EVERY = 0.25
"""Seconds between two pictures of work that goes on in the background."""

Work = Callable[[Callable[[], dict[str, Any]]], Iterator[dict[str, Any]]]


class Maker:
    """What `view` makes of a function that draws: called with parameters it gives a `View`."""

    def __init__(self, draw: Callable[..., None], controls: Mapping[str, Any]) -> None:
        self.draw, self.__doc__, self.__name__, self.__module__ = draw, draw.__doc__, draw.__name__, draw.__module__
        given = list(inspect.signature(draw).parameters.values())[1:]
        self.defaults: dict[str, Any] = {p.name: p.default for p in given}
        if unknown := set(controls) - set(self.defaults):
            raise ValueError(f"{draw.__name__} has no parameter {min(unknown)!r} to control")
        self.controls: dict[str, Control] = {n: control(controls.get(n), v) for n, v in self.defaults.items()}

    def __call__(self, **params: Any) -> View:
        return View(self, params)


def view(**controls: Any) -> Callable[[Callable[..., None]], Maker]:
    """Makes the view of a function that draws on a `Sheet`; see the head of this file."""
    return lambda draw: Maker(draw, controls)


class View:
    """One drawing function with its parameters. In a notebook it shows itself, alive and stored.

    `numbers` are those that the sheet said; `sentence`, `message` (why something was refused), `params`, `png()`.
    Callbacks may come from several threads: `lock` guards all of it.
    """

    def __init__(self, maker: Maker, given: Mapping[str, Any]) -> None:
        self.maker, self.lock, self.listeners = maker, threading.RLock(), list[Callable[[], None]]()
        self.params, self.message, self.drawings = dict(maker.defaults), "", 0
        self.busy, self.progress, self.made = False, 0.0, set[str]()  # made: parameters that the running work has set
        self._worker: threading.Thread | None = None
        self._stop = threading.Event()
        self.sheet = Sheet()
        self._show(self.asked(given, self.params))
        self.opened = self.params
        told = words(maker.__module__).get("tries", {}).get(maker.__name__, [])
        self.tries = [one for one in told if one.get("when", {}).items() <= self.opened.items()]

    # ---- what the reader does
    def set(self, **changed: Any) -> None:
        """Change parameters, all or none; what is drawn by hand is added to, {} clears it.

        Raises ValueError where one is refused, and says why in `message`.
        """
        self._change(changed)

    def press(self, label: str) -> None:
        """Press the button of that label. Raises ValueError if there is none, or if what it does is refused.

        Reset gives the opening parameters, one of the `tries` these with some of them changed; while work goes on a try
        changes these alone. It is offered where the view was opened as its `when` says, or always without one. Stop
        ends the work after its present step.
        """
        opening = {"Reset": {}} | {told["say"]: told["set"] for told in self.tries}
        if label == "Stop":
            return self._stop.set()
        if label in opening:
            return self._change(opening[label], anew=not self.busy or label == "Reset")
        does = self.sheet.buttons[check_choice("a button", label, [*self.sheet.buttons, "Reset", "Stop"])]
        return self.start(does) if callable(does) else self.set(**does)

    def _change(self, changed: Mapping[str, Any], anew: bool = False) -> None:
        """Change some of the present parameters, or of the opening ones; not those that work has begun with."""
        with self._answering():
            held = self.sheet.idle if self.busy else set()
            if changed.keys() & held:
                raise ValueError(AT_WORK)
            kept = {n: self.params[n] for n in self.made | held}
            lost = anew and any(kept[n] != self.opened[n] for n in held)
            self._show(self.asked(changed, self.opened | kept if anew else self.params), AT_WORK * lost)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """One thing after the other; whatever comes of it is told, and why it was refused."""
        with self.lock:
            try:
                yield
            except ValueError as error:
                self.message = str(error)
                raise
            finally:
                for listener in list(self.listeners):
                    listener()

    # ---- parameters to picture
    def asked(self, changed: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of `base`, some of them changed. Raises ValueError where one is refused."""
        controls = self.maker.controls
        if unknown := set(changed) - set(controls):
            raise ValueError(f"there is no control {min(unknown)!r}; controls are {', '.join(controls)}")
        named = {n: f"{n} ({c.label})" if c.label else n for n, c in controls.items()}  # in Python and on the page
        return {**base, **{n: controls[n].check(named[n], v, base[n]) for n, v in changed.items()}}

    def drawn(self, params: Mapping[str, Any]) -> Sheet:
        """The sheet of some parameters."""
        sheet = Sheet(self.busy)
        self.maker.draw(sheet, **params)
        return sheet

    def _show(self, params: dict[str, Any], message: str = "") -> None:
        """Draw first, then assign all: what is refused or interrupted on the way leaves everything as it was."""
        step = self.sheet.step and self.sheet.step["name"]
        moved = {n for n, v in params.items() if v is not self.params[n] and v != self.params[n]}
        if self.drawings == 0 or not moved or moved - {step}:
            self.sheet, self.drawings = self.drawn(params), self.drawings + 1
        self.params, self.message = params, message

    # ---- what is seen
    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers by name, as the sheet said them."""
        return self.sheet.numbers

    @property
    def index(self) -> int:
        """The place of the step shown among those that are played."""
        play = self.sheet.step
        return int(min(max(self.params[play["name"]] - play["first"], 0), play["count"] - 1)) if play else 0

    def go(self, index: int) -> None:
        """Show another place of the steps that are played."""
        if play := self.sheet.step:
            self.set(**{play["name"]: index + play["first"]})

    @property
    def sentence(self) -> str:
        """The sentence under the picture."""
        return self.sheet.sentence(self.index)

    def table(self) -> list[dict[str, Any]]:
        """The data on screen, one dict per row."""
        return self.sheet.table(self.index)

    def png(self) -> bytes:
        """The picture as it would be stored now."""
        from mpkit.view.still import png  # matplotlib: not for numbers alone

        return png(self.sheet.spec, self.index)

    def __repr__(self) -> str:
        return self.sentence if self.sheet.stored is None else self.sheet.stored

    def _ipython_display_(self) -> None:
        from mpkit.view.page import Page, show  # widgets and pictures: not for numbers alone
        from mpkit.view.still import static_bundle

        show(static_bundle(self.png(), repr(self)), Page(self))

    # ---- work in the background
    def start(self, work: Work) -> None:
        """Run work in the background. Raises ValueError if some is going on."""
        with self._answering():
            if self.busy:
                raise ValueError(AT_WORK)
            self._stop.clear()
            self.message, self.progress, self.busy = "", 0.0, True
            self._worker = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._worker.start()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the background work has ended, or after `timeout` seconds."""
        if self._worker is not None:
            self._worker.join(timeout)

    def _run(self, work: Work) -> None:
        last, said, fresh = 0.0, "", dict[str, Any]()
        try:
            self._take(fresh)  # the picture of a view that is at work
            for changes in work(lambda: self.params | fresh):
                fresh.update(changes)
                self.made |= changes.keys() & self.params.keys()
                if self._stop.is_set():
                    break
                if time.monotonic() - last >= EVERY:
                    self._take(fresh)
                    last = time.monotonic()
            self._take(fresh)
        except Exception as error:  # a thread has nobody to raise to: the reader gets the reason
            said = f"{type(error).__name__}: {error}"
        with self._answering():
            self.busy, self.made = False, set()
            self._show(self.params, said or self.message.replace(AT_WORK, ""))

    def _take(self, fresh: dict[str, Any]) -> None:
        self.progress = fresh.pop("progress", self.progress)
        with self._answering():  # what was refused meanwhile stays told
            self._show(self.asked(fresh, self.params), self.message)
        fresh.clear()
