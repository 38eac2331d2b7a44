"""Living views on a bare page without Jupyter, drawn by scene.js: to look at them, and to film one.

`python tests/page/scenes.py FOLDER [NAME ...]` draws every view, or those whose names hold a NAME, as pages 1280, 900
and 390 pixels wide, light and dark, and as notebooks store them. Needs Chromium and playwright.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from mpkit.view.page import HERE, Page, stylesheet
from mpkit.view.views import Maker

LIGHT, DARK = ("data-jp-theme-light=true", "data-jp-theme-light=false")
COLOURS = {LIGHT: "white", DARK: "#111"}
SIZES = [(width, body) for width in (1280, 900, 390) for body in (LIGHT, DARK)]
SYNCED = ("spec", "controls", "tries", "state", "index", "message", "rows")
MODEL = """
const source = document.getElementById("scene").textContent;
const { default: scene } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
const alive = (_, v) => (v?.bytes64 === undefined ? v
  : new DataView(Uint8Array.from(atob(v.bytes64), (c) => c.charCodeAt(0)).buffer));
window.models = JSON.parse(document.getElementById("states").textContent, alive).map((state) => {
  const heard = {}, el = document.body.appendChild(document.createElement("section"));
  el.title = state.title ?? "";
  const model = { get: (name) => state[name], set: (name, v) => { state[name] = v; }, save_changes() {}, send() {},
    on: (kind, does) => { (heard[kind] ??= []).push(does); }, off() {},
    put(name, v) { state[name] = v; (heard["change:" + name] ?? []).forEach((does) => does()); } };
  scene.render({ model, el });
  return model;
});
const drawn = () => document.querySelectorAll(".mpk-over[viewBox]").length === models.length;
while (!drawn()) await new Promise(requestAnimationFrame);
window.done = true;"""


def views() -> Iterator[tuple[str, Maker]]:
    """(topic.name, maker) of every view."""
    lessons = import_module("mpkit.lessons")
    for module in iter_modules(lessons.__path__):
        for name, maker in vars(import_module(f"mpkit.lessons.{module.name}")).items():
            if isinstance(maker, Maker) and maker.__module__.endswith(f".{module.name}"):
                yield f"{module.name}.{name}", maker


def page(
    shown: Sequence[Page], html: str = "", body: str = LIGHT, colour: str = "white", names: Sequence[str] = ()
) -> str:
    """HTML of some living views, whose models are `window.models`; nothing answers what a reader asks."""

    def plain(value: Any) -> Any:
        return {"bytes64": base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)

    states = [{name: getattr(one, name) for name in SYNCED} for one in shown]
    for state, name in zip(states, names):
        state["title"] = name
    told = json.dumps(states, default=plain).replace("</", "<\\/")
    dark = "--jp-content-font-color1:#fff;--jp-layout-color0:#111" if body == DARK else ""
    script = (HERE / "scene.js").read_text(encoding="utf-8")
    return (
        f"<!doctype html><html lang=en {html}><meta charset=utf-8><title>views</title><style>{stylesheet()} "
        f"body {{ {dark}; margin: 8px; background: {colour} }}</style><body {body}>"
        f"<script type=text/plain id=scene>{script}</script><script type=application/json id=states>"
        f"{told}</script><script type=module>{MODEL}</script>"
    )


def sheets(folder: Path, wanted: Sequence[str]) -> None:
    """PNGs of each view: the stored picture, and the page at every size and theme."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from browser import CHROMIUM, QUIET
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as tool:
        tab = tool.chromium.launch(executable_path=CHROMIUM, args=QUIET).new_page()
        for name, maker in views():
            if wanted and not any(word in name for word in wanted):
                continue
            view, file = maker(), folder / "page.html"
            (folder / f"{name}.png").write_bytes(view.png())
            for width, body in SIZES:
                tab.set_viewport_size({"width": width, "height": 500})
                file.write_text(page([Page(view)], "", body, COLOURS[body]), encoding="utf-8")
                tab.goto(file.as_uri())
                tab.wait_for_function("window.done")
                tab.screenshot(
                    path=folder / f"{name}_{width}_{'dark' if body == DARK else 'light'}.png", full_page=True
                )


if __name__ == "__main__":
    sheets(Path(sys.argv[1]), sys.argv[2:])
