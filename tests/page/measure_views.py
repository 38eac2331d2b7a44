"""How quick the views are in a real JupyterLab: `python tests/page/measure_views.py --out data/benchmarks/views.json`.

One browser, one JupyterLab; with `--old COMMIT`, a commit before views were functions of `mpkit/lessons`, lesson 04 is
measured of both, in turn, from a copy of that commit in a temporary folder. Medians; needs Chromium and git.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from browser import CHROMIUM, QUIET, Lab, Page
from playwright.sync_api import sync_playwright
from support import ROOT

from mpkit.view.views import Maker

DYNAMICS = {
    None: "from mpkit.lessons.dynamic_scale import dynamics as view\nview()",
    "old": "from mpkit.widgets.scaling import dynamics_view as view\nview()",
}
HANDLES = {None: ("window", "factor", "puts"), "old": ("scale_window", "scale_factor", "init_exponent")}
"""Of a window, a factor and a scale, now and in a commit before."""


def views() -> dict[str, tuple[str, bool]]:
    """Every view that opens without being told anything -> (the code that shows it, whether it plays)."""
    import mpkit.lessons

    found = {}
    for module in iter_modules(mpkit.lessons.__path__):
        for name, maker in vars(import_module(f"mpkit.lessons.{module.name}")).items():
            if isinstance(maker, Maker) and maker.__module__.endswith(f".{module.name}"):
                code = f"from mpkit.lessons.{module.name} import {name}\n{name}()"
                found[f"{module.name}.{name}"] = code, bool(maker().sheet.step)
    return found


FRAMES = """([cell, wait]) => new Promise((done) => {
  const area = document.querySelectorAll('.jp-Cell')[cell].querySelector('.jp-OutputArea');
  let changed = false, offered = 0, drawn = 0;
  const watch = new MutationObserver(() => { changed = true; });
  watch.observe(area, {subtree: true, attributes: true, childList: true, characterData: true});
  const start = performance.now();
  const look = (now) => { offered++; drawn += changed; changed = false;
    if (now - start < wait) return requestAnimationFrame(look);
    watch.disconnect();
    done([drawn, offered, now - start]); };
  requestAnimationFrame(look); })"""
PRESSED = """(cell) => {
  let turns = 0;
  const before = window.__sight(cell);
  // A timer set in a frame runs after all that this frame draws.
  const look = () => requestAnimationFrame(() => { turns++; setTimeout(() => {
    if (window.__sight(cell) !== before) window.__frames = turns; else if (turns < 300) look(); }); });
  window.__frames = null;
  addEventListener('keydown', look, {capture: true, once: true}); }"""
"""From the next key: count the frames until a cell has changed."""
TOP = """(cell) => { const output = document.querySelectorAll('.jp-Cell')[cell];
  const picture = output.querySelector('.jp-OutputArea :is(.mpk-stage, img)');
  return picture.getBoundingClientRect().top - output.querySelector('.jp-OutputArea').getBoundingClientRect().top; }"""


class Wire:
    """Bytes on the kernel's socket."""

    def __init__(self, page: Any) -> None:
        self.bytes = 0
        page.on("websocket", lambda socket: [socket.on(kind, self._count) for kind in ("framesent", "framereceived")])

    def _count(self, payload: Any) -> None:
        self.bytes += len(payload)


def notebook(lab: Lab, name: str, sources: list[str], source: Path | None = None) -> str:
    """Write a notebook with the cells `sources`, of this library or of the one in a folder."""
    start = (
        "import sys"
        if source is None
        else (
            "import sys\nfor name in [n for n in sys.modules if n.split('.')[0] == 'mpkit']: del sys.modules[name]\n"
            f"sys.path.insert(0, {str(source)!r})"
        )
    )
    cells = [
        {"id": f"c{i}", "cell_type": "code", "metadata": {}, "outputs": [], "source": text, "execution_count": None}
        for i, text in enumerate([start, *sources])
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    text = json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    (lab.root / "notebooks" / name).write_text(text)
    return name


def presses(page: Page, wire: Wire, cell: int, control: Any, times: int) -> tuple[float, float, float]:
    """(milliseconds from an arrow key until the picture differs, frames until then, bytes on the wire), medians."""
    delays, frames, weights = [], [], []
    for i in range(times):
        before, sent = page.settled(cell, quiet=0.3), wire.bytes
        page.page.evaluate(PRESSED, cell)
        control.press("ArrowRight" if i % 2 else "ArrowLeft")
        shown = page.changed(cell, before, 2.0)
        page.settled(cell, quiet=0.3)
        if shown is not None:
            delays.append(shown)
            frames.append(page.page.evaluate("window.__frames"))
            weights.append(wire.bytes - sent)
    if not delays:
        return (float("nan"),) * 3
    return statistics.median(delays), statistics.median(frames), statistics.median(weights)


def play(page: Page, wire: Wire, cell: int, seconds: float = 3.0) -> dict[str, float]:
    """Frames a second that differ from the one before, those offered, and kB a second, after Play is pressed."""
    area = page.page.locator(".jp-Cell").nth(cell)
    button = area.get_by_role("button", name="Play")
    if not button.count():
        button = area.locator("button").filter(has=page.page.locator(".fa-play")).first
    page.page.evaluate("document.activeElement.blur()")
    first = area.locator(".mpk-player input[type=range], .noUi-handle").last
    first.press("Home")
    page.settled(cell, quiet=0.3)
    button.click()
    sent = wire.bytes
    drawn, offered, took = page.page.evaluate(FRAMES, [cell, 1000 * seconds])
    result = {"frames_per_second": 1000 * drawn / took, "offered": 1000 * offered / took}
    result["kB_per_second"] = (wire.bytes - sent) / took
    pause = area.get_by_role("button", name="Pause")
    if pause.count():
        pause.click()
    page.settled(cell, quiet=0.3)
    return result


def dynamics(lab: Lab, context: Any, wire: Wire, source: Path | None, times: int) -> dict[str, float]:
    """Lesson 04: a parameter, the step, play, the picture's place."""
    age = source and "old"
    page = Page(lab, context, notebook(lab, "dynamics.ipynb", [DYNAMICS[age]], source))
    try:
        page.run_all()
        area = page.page.locator(".jp-Cell").nth(1)
        window, factor, scale = (area.locator(f"[data-name={name}]") for name in HANDLES[age])
        step = area.locator(".mpk-player input[type=range]")
        window.scroll_into_view_if_needed()
        found: dict[str, float] = {"picture_offset_px": page.page.evaluate(TOP, 1)}
        for name, control in (("window", window), ("factor", factor), ("scale", scale), ("step", step)):
            delay, frames, weight = presses(page, wire, 1, control, times)
            found |= {f"{name}_ms": delay, f"{name}_frames": frames, f"{name}_bytes": weight}
        return found | play(page, wire, 1)
    finally:
        page.close()


def ten(lab: Lab, context: Any) -> float:
    """Seconds until a page with the first ten views has run and is drawn."""
    page = Page(lab, context, notebook(lab, "ten.ipynb", [code for code, _ in list(views().values())[:10]]))
    try:
        start = time.perf_counter()
        page.run_all()
        return time.perf_counter() - start
    finally:
        page.close()


def checked_out(commit: str, folder: Path) -> Path:
    """The sources of a commit."""
    data = subprocess.run(["git", "archive", commit, "mpkit", "data"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--old", default="", help="a commit with mpkit/widgets; empty: none is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=8, help="keys pressed for every control and round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tool:
        scratch = Path(folder)
        kinds: dict[str, Path | None] = {"now": None}
        if options.old:
            kinds["old"] = checked_out(options.old, scratch / "old")
        lab = Lab(scratch / "lab")
        context = tool.chromium.launch_persistent_context(
            scratch / "profile", executable_path=CHROMIUM, args=QUIET, viewport={"width": 1280, "height": 1600}
        )
        try:
            Page(lab, context, "00_start_here.ipynb").close()  # the page of Jupyter is loaded before anything is timed
            assert lab.tab is not None
            wire = Wire(lab.tab.page)
            runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind, source in kinds.items():
                    row = dynamics(lab, context, wire, source, options.times)
                    runs[kind].append(row)
                    print(kind, rounded(runs[kind][-1]), flush=True)
            seconds = statistics.median(ten(lab, context) for _ in range(options.rounds))
            moving = {}
            for view, (code, plays) in views().items():
                if not plays:
                    continue
                page = Page(lab, context, notebook(lab, "moving.ipynb", [code]))
                try:
                    page.run_all()
                    moving[view] = play(page, wire, 1) | {"picture_offset_px": page.page.evaluate(TOP, 1)}
                finally:
                    page.close()
                print(view, rounded(moving[view]), flush=True)
        finally:
            context.close()
            lab.close()
    load = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} processors"
    meta: dict[str, Any] = {
        "made_by": "python tests/page/measure_views.py",
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    meta |= {"versions": {name: version(name) for name in ("jupyterlab", "ipywidgets", "anywidget", "matplotlib")}}
    meta |= {"load_at_the_end": load, "rounds": options.rounds, "old": options.old}
    lesson = {kind: median_of(rows) for kind, rows in runs.items()}
    options.out.write_text(
        json.dumps(rounded({"meta": meta, "lesson_05": lesson, "ten_views_s": seconds, "animated": moving}), indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
