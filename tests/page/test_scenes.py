"""Every view, at its opening and after each try, on a bare page: words lie apart, every ring can be grabbed."""

from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import LOOK, NARROW
from scenes import page
from support import openings

from mpkit.view.page import Page

pytestmark = pytest.mark.browser
ROOM = 600  # pixels between the bars of JupyterLab
HEIGHTS = """() => [...document.querySelectorAll("section")].map((view) => [view.title,
  view.querySelector(".mpk-status").getBoundingClientRect().bottom - view.getBoundingClientRect().top])"""
FAULTS = Path(__file__).with_name("faults.js").read_text("utf-8")


THEMES = {  # where a page stands -> its html, its body, its colour
    "JupyterLab, light": ("", "data-jp-theme-light=true", "white"),
    "JupyterLab, dark": ("", "data-jp-theme-light=false", "#111"),
    "Colab, dark": ("theme=dark", "", "#383838"),
    "VS Code, dark": ("", "class=vscode-dark", "#1e1e1e"),
    "VS Code, high contrast": ("", "class=vscode-high-contrast", "black"),
}


def shown():
    """(name, page) of every view as its lesson opens it, and of all that it asks to try there, with its table."""
    for name, make in openings():
        for label in ("Reset", *(attempt["say"] for attempt in make().tries)):
            view = make()
            view.press(label)
            page = Page(view)
            page.ask({"table": True})
            yield f"{name}, {label}", page


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return tmp_path_factory.mktemp("scenes"), dict(shown())


@pytest.fixture
def opened(every, headless):
    """Opens pages in a theme, by a width."""
    held = headless.new_context()

    def open_(names, theme, width):
        file = every[0] / "all.html"
        file.write_text(page([every[1][name] for name in names], *THEMES[theme], names=names), encoding="utf-8")
        tab, problems = held.new_page(), []
        tab.set_viewport_size({"width": width, "height": 900})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(file.as_uri())
        tab.wait_for_function("window.done", timeout=300_000)
        return tab, problems

    yield open_
    held.close()


@pytest.mark.parametrize("width", [1280, NARROW, 390])
def test_words_lie_apart_and_every_ring_can_be_grabbed(every, opened, width):
    tab, problems = opened(every[1], "JupyterLab, light", width)
    assert (tab.evaluate(FAULTS), problems) == ([], [])


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_in_any_theme(every, opened, theme):
    tab, _ = opened([name for name in every[1] if name.endswith(", Reset")], theme, 1280)
    tab.evaluate("() => document.querySelectorAll('.mpk details').forEach((more) => { more.open = true; })")
    tab.evaluate(Axe().axe_script)
    assert tab.evaluate(LOOK, [{"include": [[".mpk"]]}, {}]) == []


def test_a_view_fits_a_screen_of_720_pixels_with_its_buttons_and_its_sentence(every, opened):
    tab, _ = opened(every[1], "JupyterLab, light", 1130)  # the width that JupyterLab leaves of 1280
    assert {name: high for name, high in tab.evaluate(HEIGHTS) if high > ROOM} == {}


def test_a_picture_wider_than_the_screen_shows_its_ring_while_it_plays(every, opened):
    tab, _ = opened(["05_training_step: phases(), Reset"], "JupyterLab, light", 390)
    typed, word = tab.locator(".mpk-player input[type=number]"), tab.locator(".mpk-status b")
    typed.fill("-3")
    typed.press("Enter")
    assert word.inner_text()
    tab.get_by_role("button", name="Reset").click()
    assert not word.inner_text()
    tab.get_by_role("button", name="Play").click()
    tab.get_by_role("button", name="Reset").click()
    assert tab.get_by_role("button", name="Play").count() == 1  # it does not play on
    typed.fill("6")
    typed.press("Enter")
    ring, stage = (tab.locator(name).bounding_box() for name in (".now", ".mpk-stage"))
    assert 0 <= ring["x"] - stage["x"] <= stage["width"] - ring["width"]


def test_values_are_read_by_arrow_keys_and_the_sentence_comes_back(every, opened):
    tab, _ = opened(["01_number_formats: ranges(exponent=0), Reset"], "JupyterLab, light", 1280)
    status = tab.locator(".mpk-status")
    said = status.inner_text()
    tab.locator(".mpk-over").press("ArrowRight")
    assert "magnitude" in status.inner_text()
    tab.locator("summary").focus()
    assert status.inner_text() == said


def test_the_tip_of_a_vector_stays_above_its_axis(every, opened):
    tab, _ = opened(["adasum: pair(angle=120), Reset"], "JupyterLab, light", 1280)
    ring = tab.locator("[data-name=b]")
    for _ in range(20):
        ring.press("ArrowDown")
    assert ring.get_attribute("aria-valuetext").endswith(", 0")


def test_a_ring_from_beyond_the_edge_is_under_the_pointer_after_100_pixels(every, opened):
    name = next(name for name in every[1] if "one huge batch in 16" in name)
    tab, _ = opened([name], "JupyterLab, light", 1280)
    ring = tab.locator("[data-name=window]")
    at = ring.locator("circle").bounding_box()
    tab.mouse.move(at["x"] + 8, at["y"] + 8)
    tab.mouse.down()
    tab.mouse.move(at["x"] + 16, at["y"] + 8)
    assert 350 < int(ring.get_attribute("aria-valuenow")) < 400
    tab.mouse.move(at["x"] + 308, at["y"] + 8)
    assert abs(ring.locator("circle").bounding_box()["x"] - at["x"] - 300) < 8


def test_a_line_drawn_fast_slowly_or_backwards_is_straight_and_the_same(every, opened):
    tab, _ = opened(["02_rounding: totals(), Reset"] * 3, "JupyterLab, light", 1280)
    tab.evaluate("() => models.forEach((model) => { model.send = (told) => { model.told ??= told; }; })")
    ends = ((300, 250), (700, 90))
    for k, ((start, end), moves) in enumerate(((ends, 3), (ends, 300), (ends[::-1], 7))):
        tab.locator(".mpk-over").nth(k).scroll_into_view_if_needed()
        box = tab.locator(".mpk-over").nth(k).bounding_box()
        tab.mouse.move(box["x"] + start[0], box["y"] + start[1])
        tab.mouse.down()
        tab.mouse.move(box["x"] + end[0], box["y"] + end[1], steps=moves)
        tab.mouse.up()
    drawn = tab.evaluate("() => models.map((model) => Object.values(model.told.ask.set.drawn))")
    fast, slow, back = (line[1:-1] for line in drawn)  # the first and the last point lie beside its ends
    assert fast == slow == back
    assert np.ptp(np.diff(fast)) < 0.03
