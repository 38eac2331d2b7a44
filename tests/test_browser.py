"""Every notebook in a real JupyterLab: it runs, nothing complains, and every control moves what the reader sees."""

import statistics

import pytest
from browser import CHROMIUM, QUIET, Lab, Page
from support import ROOT

pytestmark = pytest.mark.browser
NOTEBOOKS = sorted(p.relative_to(ROOT / "notebooks").as_posix() for p in (ROOT / "notebooks").rglob("[0-9l]*.ipynb"))
SILENT = {"Stop"}  # with nothing going on it has nothing to change


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; install the package chromium to run the browser tests")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def context(lab, tmp_path_factory):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            args=QUIET,
            viewport={"width": 1280, "height": 1600},
        )
        yield context
        context.close()


def press(page, cell, control, key):
    """Focus a control, press a key; milliseconds until the reader sees a change (None if there is none)."""
    element = page.control(control)
    element.focus()
    before = page.sight(cell)
    element.press(key)
    return page.changed(cell, before)


def poke(page, cell, control):
    """Use a control by keyboard as its kind demands; (milliseconds or None)."""
    if control["kind"] == "button":
        return press(page, cell, control, "Enter")
    if control["kind"] == "checkbox":
        return press(page, cell, control, "Space")
    if control["kind"] == "text":
        return 0.0  # what can be typed depends on the lesson: its own test does that
    for key in {"slider": ("ArrowRight", "ArrowLeft"), "select": ("ArrowDown", "ArrowUp")}.get(
        control["kind"], ("ArrowUp", "ArrowDown")
    ):
        element = page.control(control)
        element.focus()
        before = page.sight(cell)
        element.press(key)
        if control["kind"] == "number":
            element.press("Enter")
        shown = page.changed(cell, before, timeout=5)
        if shown is not None:
            return shown
    return None


def by_name(cell, name):
    return next((c for c in cell["controls"] if c["name"] == name and c["kind"] == "button"), None)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_and_its_controls_work_by_keyboard(lab, context, notebook, record_property):
    page = Page(lab, context, notebook)
    try:
        page.run_all()
        cells = [c for c in page.cells() if c["type"] == "code" and not c["empty"]]
        expected = {c["index"] for c in cells if "raises-exception" in c["tags"]}
        assert {c["index"]: c["errors"] for c in cells if c["errors"] and c["index"] not in expected} == {}
        assert all(c["ran"] for c in cells)
        delays: list[float] = []
        for cell in page.outline():
            assert all(len(alt) > 10 for alt in cell["pictures"]), f"a picture without text in cell {cell['index']}"
            delays += use(page, cell)
        assert page.problems == []
        assert page.outside == []
        if delays:
            record_property("slider_to_picture_ms", round(statistics.median(delays)))
            print(f"{notebook}: slider to picture {statistics.median(delays):.0f} ms (median of {len(delays)})")
    finally:
        page.close()


def use(page, cell):
    """Use every control of one cell; the delays of its sliders, in milliseconds."""
    index, delays, dead = cell["index"], [], []
    reset = by_name(cell, "Reset")
    first = None
    if reset:
        press(page, index, reset, "Enter")
        first = page.settled(index)
    sliders = [c for c in cell["controls"] if c["kind"] == "slider"]
    for control in cell["controls"]:
        if control["disabled"] or control["play"] or control["chosen"] or control["name"] in SILENT:
            continue
        assert control["focusable"], f"{control['name']} cannot be reached by keyboard"
        assert control["kind"] == "slider" or control["name"], f"a {control['kind']} of cell {index} has no name"
        if control["name"] in ("Reset", "Back to start") and sliders:
            poke(page, index, sliders[-1])  # so that there is something to undo
            page.settled(index)
        delay = poke(page, index, control)
        if delay is None and not page.explains(index):
            dead.append(control["name"] or control["kind"])
        elif control["kind"] == "slider" and delay is not None:
            delays.append(delay)
        if control["name"] == "Play or pause":
            press(page, index, control, "Enter")
        stop = by_name(cell, "Stop")
        if stop and control["kind"] == "button":
            page.control(stop).press("Enter")  # whatever the button started
        page.settled(index, quiet=0.15)
    assert dead == [], f"controls of cell {index} that change nothing: {dead}"
    if reset and not by_name(cell, "Stop"):
        table = next((c for c in cell["controls"] if c["name"] in ("Show as table", "Hide table")), None)
        if table and "<" not in first and page.control(table).text_content() == "Hide table":
            press(page, index, table, "Enter")
        press(page, index, reset, "Enter")
        assert page.settled(index) == first, f"cell {index}: the same settings show another picture"
    return delays
