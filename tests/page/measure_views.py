"""How quick the views are in a real JupyterLab: `python tests/page/measure_views.py FILE`; medians.

Needs Chromium.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from browser import CHROMIUM, QUIET, Lab, Page, written
from playwright.sync_api import sync_playwright
from scenes import views

from mpkit.view.views import Maker

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


class Wire:
    """Bytes on the kernel's socket."""

    def __init__(self, page: Any) -> None:
        self.bytes = 0
        page.on("websocket", lambda socket: [socket.on(kind, self._count) for kind in ("framesent", "framereceived")])

    def _count(self, payload: Any) -> None:
        self.bytes += len(payload)


def presses(page: Page, wire: Wire, control: Any, times: int = 12) -> tuple[float, float, float]:
    """(milliseconds from an arrow key until the picture differs, frames until then, bytes on the wire), medians."""
    delays, frames, weights = [], [], []
    for i in range(times):
        before, sent = page.settled(0, quiet=0.3), wire.bytes
        page.page.evaluate(PRESSED, 0)
        control.press("ArrowRight" if i % 2 else "ArrowLeft")
        shown = page.changed(0, before, 2.0)
        page.settled(0, quiet=0.3)
        if shown is not None:
            delays.append(shown)
            frames.append(page.page.evaluate("window.__frames"))
            weights.append(wire.bytes - sent)
    if not delays:
        return (float("nan"),) * 3
    return statistics.median(delays), statistics.median(frames), statistics.median(weights)


def play(page: Page, wire: Wire, seconds: float = 3.0) -> dict[str, float]:
    """Frames a second that differ from the one before, those offered, and kB a second, after Play is pressed."""
    page.page.evaluate("document.activeElement.blur()")
    page.page.locator(".mpk-player input[type=range]").press("Home")
    page.settled(0, quiet=0.3)
    page.page.get_by_role("button", name="Play").click()
    sent = wire.bytes
    drawn, offered, took = page.page.evaluate(FRAMES, [0, 1000 * seconds])
    result = {"frames_per_second": 1000 * drawn / took, "offered": 1000 * offered / took}
    return result | {"kB_per_second": (wire.bytes - sent) / took}


def measured(lab: Lab, context: Any, wire: Wire, maker: Maker, controls: dict[str, str]) -> dict[str, float]:
    """A view in a notebook of its own: some of its controls, by CSS, and how it plays."""
    code = f"from {maker.__module__} import {maker.__name__} as view\nview()"
    with Page(lab, context, written(lab, "measured.ipynb", [code]).name) as page:
        page.run_all()
        found: dict[str, float] = {}
        for name, css in controls.items():
            control = page.page.locator(css)
            control.scroll_into_view_if_needed()
            numbers = presses(page, wire, control)
            found |= {f"{name}_{unit}": number for unit, number in zip(("ms", "frames", "bytes"), numbers)}
        return {k: float(f"{v:.4g}") for k, v in (found | play(page, wire)).items()}


def main() -> None:
    controls = {name: f"[data-name={name}]" for name in ("window", "factor", "puts")}
    controls |= {"step": ".mpk-player input[type=range]", "run": "[data-control=run]"}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tool:
        lab, window = Lab(Path(folder) / "lab"), {"width": 1280, "height": 1600}
        given: dict[str, Any] = {"executable_path": CHROMIUM, "args": QUIET, "viewport": window}
        context = tool.chromium.launch_persistent_context(Path(folder) / "profile", **given)
        try:
            with Page(lab, context, "00_start_here.ipynb"):
                pass  # the page of Jupyter is loaded before anything is timed
            assert lab.tab is not None
            wire = Wire(lab.tab.page)
            found = {
                name: measured(lab, context, wire, maker, controls if name == "dynamic_scale.dynamics" else {})
                for name, maker in views()
                if maker().sheet.step
            }
        finally:
            context.close()
            lab.close()
    found["meta"] = {"load_at_the_end": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} processors"}
    found["meta"] |= {name: version(name) for name in ("jupyterlab", "ipywidgets", "anywidget")}
    Path(sys.argv[-1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
