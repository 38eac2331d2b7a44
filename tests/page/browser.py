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
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--force-color-profile=srgb"),
]

NARROW = 732  # pixels that JupyterLab leaves to the output of a cell in a window of 900, its side bars closed

SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # views below the fold are on the page too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

# What is on the page: every widget output with its controls and pictures.
OUTLINE = """() => [...document.querySelectorAll('.jp-Cell')].map((cell, index) => ({
  index,
  controls: ['.mpk .handle', '.mpk input[type=range]', 'select', 'input:not([type=range])', 'button', '.mpk summary',
             '.mpk .pick[tabindex="0"]']
    .flatMap((kind) => [...cell.querySelectorAll('.jp-OutputArea ' + kind)])
    .filter((e) => e instanceof SVGElement || e.offsetParent !== null)
    .map((e, n) => {
      e.setAttribute('data-control', index + '-' + n);
      const kind = e.matches('.handle, [type=range]') ? 'slider' : e.matches('button, summary, .pick') ? 'button'
        : e.matches('select') ? 'select' : e.type;
      const named = e.labels && e.labels.length ? e.labels[0].textContent : '';
      return {id: index + '-' + n, kind, disabled: !!e.disabled, focusable: e.tabIndex >= 0,
              name: (e.getAttribute('aria-label') || named || e.title || e.textContent).trim()};
    }),
  pictures: [...cell.querySelectorAll('.jp-OutputArea :is(img, svg[role=img])')]
    .map((e) => e.getAttribute('alt') || e.getAttribute('aria-label') || ''),
})).filter((cell) => cell.controls.length || cell.pictures.length)"""

# Everything a reader sees of a cell's view (pictures, status line, table, the bar of what is done), as one short hash;
# when a key went down.
SIGHT = """addEventListener('keydown', (event) => {
  window.__pressed = event.timeStamp;
}, true);
const sights = new WeakMap(); // written anew only where something has moved since: it is looked at in every frame
window.__sight = (index) => {
  const cell = document.querySelectorAll('.jp-Cell')[index];
  let seen = sights.get(cell);
  if (!seen) {
    seen = {observer: new MutationObserver(() => { seen.moved = true; })};
    seen.observer.observe(cell, {subtree: true, childList: true, attributes: true, characterData: true});
    sights.set(cell, seen);
  } else if (!seen.observer.takeRecords().length && !seen.moved) {
    window.__shown = seen.text;
    return seen.hash;
  }
  const all = (what, of) => [...cell.querySelectorAll('.jp-OutputArea ' + what)].map(of).join('|');
  const words = (what) => all(what, (e) => e.textContent);
  const drawn = all(':is(svg[role=img], .handle)', (e) => e.innerHTML.replaceAll(' style=""', ''));
  const bar = all('progress', (e) => (e.hidden ? '' : e.value));
  const text = [all('img', (e) => e.src), drawn, bar, words('[role=status]'), words('table')].join('#');
  window.__shown = text;
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return Object.assign(seen, {text, moved: false, hash: text.length + ':' + (hash >>> 0)}).hash;
}"""

# What the page has asked of the kernel and not yet got done: the end of waiting, on a quick machine and on a busy one.
PENDING = """() => { const session = window.jupyterapp.shell.currentWidget.sessionContext.session;
  window.__pending = new Set();
  window.__values = [];
  session.anyMessage.connect((_, {msg, direction}) => {
    if (direction === 'send' && msg.header.msg_type === 'comm_msg')
      for (const [name, value] of Object.entries(msg.content.data.state || msg.content.data.content || {}))
        if (['value', 'ask', 'index'].includes(name)) window.__values.push(value);
    const ahead = direction === 'send' && 'wish' in (msg.content?.data?.state || {}); // changes nothing that is seen
    if (direction === 'send' && msg.channel === 'shell' && !ahead) window.__pending.add(msg.header.msg_id);
    if (direction === 'recv' && msg.header.msg_type === 'status' && msg.content.execution_state === 'idle')
      window.__pending.delete(msg.parent_header.msg_id);
  }); }"""

# Whether the kernel, a view of the cell, or what one of its buttons started is under way.
AT_WORK = """window.__atWork = (index) => window.__pending.size > 0 || !!document.querySelectorAll('.jp-Cell')[index]
  .querySelector('.mpk[aria-busy=true], .mpk progress:not([hidden])');"""
PATIENCE = 300_000.0  # ms for whatever is waited for: a busy machine is ten times as slow
LOOKS = 6  # without news before the end is believed: on a busy machine a tenth of a second is one frame of the page

# Milliseconds from the last key until the cell looks different from `before`; null once nothing has been under way for
# `patience` ms.
WATCH = """([index, before, patience, timeout, looks]) => new Promise((done) => {
  const start = performance.now();
  let busy = start, calm = 0;
  const look = () => {
    const now = performance.now();
    calm += 1;
    if (window.__atWork(index)) { busy = now; calm = 0; }
    if (window.__sight(index) !== before) done(now - window.__pressed);
    else if ((now - busy > patience && calm > looks) || now - start > timeout) done(null);
    else requestAnimationFrame(look);
  };
  look();
})"""

# What the cell shows when nothing has been under way, and picture and focus have been the same, for `quiet` ms.
SETTLED = """([index, quiet, timeout, looks]) => new Promise((done) => {
  const start = performance.now();
  let last = window.__sight(index), held = document.activeElement, since = start, calm = 0;
  const look = () => {
    const now = performance.now(), seen = window.__sight(index), focus = document.activeElement;
    calm += 1;
    if (seen !== last || focus !== held || window.__atWork(index)) { last = seen; held = focus; since = now; calm = 0; }
    if ((now - since > quiet && calm > looks) || now - start > timeout) done(seen);
    else requestAnimationFrame(look);
  };
  look();
})"""

# Gives a control the focus, as the Tab key does; what it says of itself, or null where it does not take the focus.
FOCUS = """(id) => { const e = document.querySelector(`[data-control="${id}"]`);
  if (!e) return null;
  if (document.activeElement !== e) e.focus();
  const top = e.matches('.handle') ? +e.getAttribute('aria-valuenow') >= +e.getAttribute('aria-valuemax')
    : e.max !== undefined && +e.value >= +e.max;
  return document.activeElement === e ? {top} : null; }"""

CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells
  .map((c, index) => ({index, type: c.cell_type, ran: c.execution_count, tags: c.metadata.tags || [],
    empty: !(Array.isArray(c.source) ? c.source.join('') : c.source).trim(),
    errors: (c.outputs || []).filter((o) => o.output_type === 'error').map((o) => o.ename + ': ' + o.evalue)}))"""

READY = """() => { const w = window.jupyterapp && window.jupyterapp.shell.currentWidget;
  const k = w && w.sessionContext && w.sessionContext.session && w.sessionContext.session.kernel;
  return !!(w && w.content && w.content.model && w.content.widgets.length && k && k.status === 'idle'); }"""

ALL_RAN = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells.every((c) =>
  c.cell_type !== 'code' || c.execution_count || !(Array.isArray(c.source) ? c.source.join('') : c.source).trim())"""

# One page of JupyterLab serves all notebooks of a worker: loading it anew for each takes seconds.
# What is on its way is kept by the page and asked for again and again: a promise that only the browser's debugger holds
# may be collected as garbage before it is kept.
OPEN = """(path) => { const app = window.jupyterapp;
  const opening = async () => {
    const opened = await app.commands.execute('docmanager:open', {path});
    await opened.context.ready;
    app.shell.activateById(opened.id); };
  window.__opened = null;
  window.__opening = opening().then(() => { window.__opened = 'yes'; }, (e) => { window.__opened = String(e); }); }"""

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
        self.page.add_init_script(f"{SIGHT};\n{AT_WORK}")
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
            lab.tab.page.evaluate(OPEN, f"notebooks/{notebook}")
            lab.tab.page.wait_for_function("window.__opened", timeout=PATIENCE)
            assert lab.tab.page.evaluate("window.__opened") == "yes"
        self.page, self.problems, self.outside = lab.tab.page, lab.tab.problems, lab.tab.outside
        self.page.wait_for_function(READY, timeout=PATIENCE)
        self.page.evaluate(PENDING)

    def run_all(self, timeout: float = PATIENCE) -> None:
        """Run every cell and wait until the kernel rests."""
        self.page.evaluate(
            "() => { window.__ran = false; window.jupyterapp.commands.execute('notebook:run-all-cells')"
            ".finally(() => { window.__ran = true; }); }"
        )
        for condition in ("() => window.__ran", READY):
            self.page.wait_for_function(condition, timeout=timeout, polling=100)
        with contextlib.suppress(PlaywrightTimeout):  # counts arrive after the kernel rests; the caller names gaps
            self.page.wait_for_function(ALL_RAN, timeout=60_000, polling=100)
        self.settled(0, quiet=0.3)  # the last widgets are drawn

    def cells(self) -> list[dict[str, Any]]:
        """Type, execution count, tags and errors of every cell."""
        return self.page.evaluate(CELLS)

    def outline(self) -> list[dict[str, Any]]:
        """Cells with controls or pictures."""
        return self.page.evaluate(OUTLINE)

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
        return self.page.evaluate(WATCH, [cell, before, 1000 * patience, PATIENCE, LOOKS])

    def settled(self, cell: int, quiet: float = 0.1) -> str:
        """What the cell shows once the kernel is done and the cell has not changed for `quiet` seconds."""
        return self.page.evaluate(SETTLED, [cell, 1000 * quiet, PATIENCE, LOOKS])

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
    if page.page.evaluate(FOCUS, control["id"]) is None:  # drawn anew, or not to be reached yet
        page.control(control).focus()
    for key in keys:
        page.page.keyboard.press(key)


def poke(page, cell, control, patience=0.25):
    """Use a control by keyboard as its kind demands; milliseconds until the reader sees a change, or None."""
    tries = {"button": [["Enter"]], "checkbox": [["Space"]], "slider": [["ArrowRight"], ["ArrowLeft"]]}.get(
        control["kind"], [["ArrowUp", "Enter"], ["ArrowDown", "Enter"]]
    )
    press(page, control)
    if len(tries) == 2 and (page.page.evaluate(FOCUS, control["id"]) or {}).get("top"):
        tries.reverse()
    for keys in tries:
        before = page.page.evaluate("(cell) => window.__sight(cell)", cell)
        press(page, control, *keys)
        shown = page.changed(cell, before, patience)
        if shown is not None:
            return shown
    return None


END = """(cell) => [...document.querySelectorAll('.jp-Cell')[cell].querySelectorAll('.mpk button')]
  .find((button) => button.textContent === 'Stop')?.click()"""


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
            page.page.evaluate(END, index)  # whatever the button started
        page.settled(index, quiet=0.3 if starts else 0.1)
    assert dead == [], f"controls of cell {index} that change nothing: {dead}"
    if reset and not stop:
        press(page, reset, "Enter")
        same, now = page.settled(index) == first, page.page.evaluate("window.__shown")
        at = next((k for k, (a, b) in enumerate(zip(shown, now)) if a != b), 0)
        parts = f"{shown[max(0, at - 100) : at + 200]!r} and then {now[max(0, at - 100) : at + 200]!r}"
        assert same, f"cell {index}: the same settings show another picture: {parts}"
