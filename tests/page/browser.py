"""A real JupyterLab in headless Chromium, for the browser tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from forked_kernels import offered
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from support import LESSONS, ROOT

# labs have no views; what they print is tested without a browser
NOTEBOOKS = [path.relative_to(ROOT / "notebooks").as_posix() for path in LESSONS]
# the first is Chromium without its window: the same pages for three quarters of the work
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--force-color-profile=srgb"),
]

NARROW = 732  # pixels that JupyterLab leaves to the output of a cell in a window of 900, its side bars closed

SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # views below the fold are on the page too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

PATIENCE = 300_000.0  # ms for whatever is waited for: a busy machine is ten times as slow
LOOKS = 6  # without news before the end is believed: on a busy machine a tenth of a second is one frame of the page

# Asks axe: [[rule, element], ...] of what is wrong; nothing is made of what is right, a quarter of its work.
LOOK = """async ([context, options]) => {
  const seen = await axe.run(context, { ...options, reporter: 'no-passes', selectors: false, elementRef: false });
  return seen.violations.flatMap((rule) => rule.nodes.map((node) => [rule.id, node.html.slice(0, 200)])); }"""

HARMLESS = ("favicon", "Failed to load resource: net::ERR_BLOCKED", "[DEP")


class Lab:
    """JupyterLab on a free port of this machine, serving a copy of the notebooks, ended by its own process id."""

    def __init__(self, scratch: Path) -> None:
        self.root, self.token = scratch / "root", secrets.token_hex(8)
        shutil.copytree(ROOT / "notebooks", self.root / "notebooks")
        for plugin, settings in SETTINGS.items():
            file = scratch / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(settings))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        folders = {
            f"JUPYTER{key}_DIR": str(scratch / key.strip("_").lower() / "") for key in ("_CONFIG", "_DATA", "_RUNTIME")
        }
        self.tab: Tab | None = None
        environment = dict(
            os.environ,
            **folders,
            **offered(),
            JUPYTERLAB_SETTINGS_DIR=str(scratch / "settings"),
            JUPYTERLAB_WORKSPACES_DIR=str(scratch / "workspaces"),
            IPYTHONDIR=str(scratch / "ipython"),
            MPKIT_DATA=os.environ.get("MPKIT_DATA", str(ROOT / "data")),
        )
        self._log = (scratch / "server.log").open("wb")
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
        command += [f"--IdentityProvider.token={self.token}", "--expose-app-in-browser", "--ServerApp.port_retries=0"]
        self._process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=self._log, stderr=self._log)
        self._wait(scratch)

    def _wait(self, scratch: Path) -> None:
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"{self.base}/api/status?token={self.token}", timeout=2).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        self.close()
        raise RuntimeError("JupyterLab did not start:\n" + (scratch / "server.log").read_text()[-2000:])

    def url(self, notebook: str) -> str:
        """The page of one notebook alone."""
        return f"{self.base}/doc/tree/notebooks/{notebook}?token={self.token}"

    def end_kernel(self, notebook: str) -> None:
        """End a notebook's kernel."""
        for session in self._ask("GET", "sessions"):
            if session["path"] == f"notebooks/{notebook}":
                self._ask("DELETE", f"sessions/{session['id']}")

    def _ask(self, method: str, what: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.base}/api/{what}", headers=headers, method=method)
        ) as answer:
            return json.loads(answer.read() or "null")

    def close(self) -> None:
        """End the server that this object started."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def written(lab: Lab, name: str, sources: list[str]) -> Path:
    """A notebook of these cells in the folder that Jupyter serves."""
    cells = [
        {"id": f"c{i}", "cell_type": "code", "metadata": {}, "outputs": [], "source": text, "execution_count": None}
        for i, text in enumerate(sources)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path = lab.root / "notebooks" / name
    path.write_text(json.dumps(notebook))
    return path


class Tab:
    """JupyterLab in one tab, in which one notebook after the other is opened, with everything that goes wrong in it."""

    def __init__(self, lab: Lab, context: Any, notebook: str) -> None:
        self.lab, self.problems, self.outside = lab, list[str](), list[str]()
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.add_init_script(path=Path(__file__).with_name("lab.js"))
        self.page.route("**/*", self._route)
        self.page.goto(lab.url(notebook), wait_until="domcontentloaded")

    def _console(self, message: Any) -> None:
        if message.type == "error" and not any(word in message.text for word in HARMLESS):
            self.problems.append(f"console: {message.text[:300]}")

    def _route(self, route: Any) -> None:
        if route.request.url.startswith((self.lab.base, "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()


class Page:
    """One notebook in the tab of this worker."""

    def __init__(self, lab: Lab, context: Any, notebook: str) -> None:
        self.lab, self.notebook = lab, notebook
        if lab.tab is None:
            lab.tab = Tab(lab, context, notebook)
        else:
            lab.tab.page.evaluate("(path) => __open(path)", f"notebooks/{notebook}")
            lab.tab.page.wait_for_function("window.__opened", timeout=PATIENCE)
            assert lab.tab.page.evaluate("window.__opened") == "yes"
        self.page, self.problems, self.outside = lab.tab.page, lab.tab.problems, lab.tab.outside
        self.page.wait_for_function("() => __ready()", timeout=PATIENCE)
        self.page.evaluate("() => __listen()")

    def run_all(self, timeout: float = PATIENCE) -> None:
        """Run every cell and wait until the kernel rests."""
        self.page.evaluate("() => __runAll()")
        for condition in ("() => window.__ran", "() => __ready()"):
            self.page.wait_for_function(condition, timeout=timeout, polling=100)
        with contextlib.suppress(PlaywrightTimeout):  # counts arrive after the kernel rests; the caller names gaps
            self.page.wait_for_function("() => __allRan()", timeout=60_000, polling=100)
        self.settled(0, quiet=0.3)  # the last widgets are drawn

    def cells(self) -> list[dict[str, Any]]:
        """Type, execution count, tags and errors of every cell."""
        return self.page.evaluate("() => __cells()")

    def outline(self) -> list[dict[str, Any]]:
        """Cells with controls or pictures."""
        return self.page.evaluate("() => __outline()")

    def explains(self, cell: int) -> bool:
        """Whether the view says why an input or a button had no effect."""
        return self.page.evaluate(
            "(cell) => !!document.querySelectorAll('.jp-Cell')[cell].querySelector('[role=status] b')", cell
        )

    def control(self, control: dict[str, Any]) -> Any:
        """The element of a control; a view that was drawn anew is marked anew."""
        if not self.page.locator(f'[data-control="{control["id"]}"]').count():
            self.outline()
        return self.page.locator(f'[data-control="{control["id"]}"]')

    def changed(self, cell: int, before: str, patience: float = 0.25) -> float | None:
        """Milliseconds from the key until the cell differs from `before`; None if the kernel is done before."""
        return self.page.evaluate("(asked) => __watch(asked)", [cell, before, 1000 * patience, PATIENCE, LOOKS])

    def settled(self, cell: int, quiet: float = 0.1) -> str:
        """What the cell shows once the kernel is done and the cell has not changed for `quiet` seconds."""
        return self.page.evaluate("(asked) => __settled(asked)", [cell, 1000 * quiet, PATIENCE, LOOKS])

    def __enter__(self) -> Page:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        """Close the notebook and end its kernel; after a failure the whole tab is closed, so that nothing is left."""
        if self.problems or self.outside or failure is not None:
            self.page.close()
            self.lab.tab = None
        else:
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")
        self.lab.end_kernel(self.notebook)


SILENT = {"Stop", "10× as fast"}  # with nothing going on they have nothing to change

PLAY = ("Play", "Pause")


def press(page, control, *keys):
    """Focus a control and press keys."""
    if page.page.evaluate("(id) => __focus(id)", control["id"]) is None:  # drawn anew, or not to be reached yet
        page.control(control).focus()
    for key in keys:
        page.page.keyboard.press(key)


def poke(page, cell, control, patience=0.25):
    """Use a control by keyboard as its kind demands; milliseconds until the reader sees a change, or None."""
    tries = {"button": [["Enter"]], "checkbox": [["Space"]], "slider": [["ArrowRight"], ["ArrowLeft"]]}.get(
        control["kind"], [["ArrowUp", "Enter"], ["ArrowDown", "Enter"]]
    )
    press(page, control)
    if len(tries) == 2 and (page.page.evaluate("(id) => __focus(id)", control["id"]) or {}).get("top"):
        tries.reverse()
    for keys in tries:
        before = page.page.evaluate("(cell) => window.__sight(cell)", cell)
        press(page, control, *keys)
        shown = page.changed(cell, before, patience)
        if shown is not None:
            return shown
    return None


def by_name(cell, name):
    return next((c for c in cell["controls"] if c["name"] == name and c["kind"] == "button"), None)


def visit(lab: Lab, context: Any, notebook: str) -> None:
    """Open a notebook, run it, use every control, and assert that all of it works."""
    with Page(lab, context, notebook) as page:
        page.run_all()
        cells = [c for c in page.cells() if c["type"] == "code" and not c["empty"]]
        expected = {c["index"] for c in cells if "raises-exception" in c["tags"]}
        assert {c["index"]: c["errors"] for c in cells if c["errors"] and c["index"] not in expected} == {}
        assert [c["index"] for c in cells if not c["ran"]] == [], "cells that did not run"
        assert page.page.evaluate("window.__values") == [], "views that were only opened changed values by themselves"
        for cell in page.outline():
            assert all(len(alt) > 10 for alt in cell["pictures"]), f"a picture without text in cell {cell['index']}"
            use(page, cell)
        assert page.problems == []
        assert page.outside == []


def use(page, cell):
    """Use every control of one cell."""
    index, dead = cell["index"], []
    reset, stop = by_name(cell, "Reset"), by_name(cell, "Stop")
    first = None
    if reset:
        press(page, reset, "Enter")
        first, shown = page.settled(index), page.page.evaluate("window.__shown")
        cell = next(c for c in page.outline() if c["index"] == index)  # other choices may be made now
    sliders = [c for c in cell["controls"] if c["kind"] == "slider"]
    for control in cell["controls"]:
        if control["disabled"] or control["name"] in SILENT:
            continue
        assert control["focusable"], f"{control['name']} cannot be reached by keyboard"
        assert control["kind"] == "slider" or control["name"], f"a {control['kind']} of cell {index} has no name"
        if control["kind"] == "text":
            continue  # what can be typed depends on the lesson: its own test does that
        if reset and not page.control(control).is_visible():  # what was chosen since has hidden it
            press(page, reset, "Enter")
            page.settled(index)
        if control["name"] == "Reset" and sliders:
            poke(page, index, sliders[-1])  # so that there is something to undo
            page.settled(index)
        starts = control["kind"] == "button" and (stop or control["name"] in PLAY)
        if poke(page, index, control, patience=3 if starts else 0.25) is None and not page.explains(index):
            dead.append(control["name"] or control["kind"])
        if control["name"] in PLAY:  # asked and pressed at once: it may just reach the end, and would begin anew
            page.control(control).evaluate("(button) => button.textContent === 'Pause' && button.click()")
        if control["kind"] == "checkbox":
            press(page, control, "Space")  # back again: other controls may depend on it
        if control["name"] == "Show as table":
            press(page, control, "Enter")  # hides it
        if control["kind"] == "button":
            page.page.evaluate("(cell) => __end(cell)", index)  # whatever the button started
        page.settled(index, quiet=0.3 if starts else 0.1)
    assert dead == [], f"controls of cell {index} that change nothing: {dead}"
    if reset and not stop:
        press(page, reset, "Enter")
        same, now = page.settled(index) == first, page.page.evaluate("window.__shown")
        at = next((k for k, (a, b) in enumerate(zip(shown, now)) if a != b), 0)
        parts = f"{shown[max(0, at - 100) : at + 200]!r} and then {now[max(0, at - 100) : at + 200]!r}"
        assert same, f"cell {index}: the same settings show another picture: {parts}"
