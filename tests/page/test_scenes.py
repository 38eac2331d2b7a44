"""Every view, at its opening and after each try, on a bare page: words lie apart, every ring can be grabbed."""

from pathlib import Path

import pytest
from browser import CHROMIUM, QUIET
from scenes import page, views

from mpkit.view.page import Page

pytestmark = pytest.mark.browser
ROOM = 600  # pixels between the bars of JupyterLab
HEIGHTS = """() => [...document.querySelectorAll("section")].map((view) => [view.title,
  view.querySelector(".mpk-status").getBoundingClientRect().bottom - view.getBoundingClientRect().top])"""
FAULTS = Path(__file__).with_name("faults.js").read_text("utf-8")


def shown():
    """(name, page) of every view and of all that its words ask to try."""
    for name, maker in views():
        yield name, Page(maker())
        for attempt in maker().tries:
            view = maker()
            view.press(attempt["say"])
            yield f"{name}, {attempt['say']}", Page(view)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    file, (names, pages) = tmp_path_factory.mktemp("scenes") / "all.html", zip(*shown())
    file.write_text(page(pages, names=names), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("width", [1280, 900, 390])
def test_words_lie_apart_and_every_ring_can_be_grabbed(every, chromium, width):
    browser = chromium.launch(executable_path=CHROMIUM, args=QUIET)
    tab, problems = browser.new_page(viewport={"width": width, "height": 900}), []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(every)
    tab.wait_for_function("window.done", timeout=300_000)
    assert (tab.evaluate(FAULTS), problems) == ([], [])
    browser.close()


def test_a_view_fits_a_screen_of_720_pixels_with_its_buttons_and_its_sentence(every, chromium):
    browser = chromium.launch(executable_path=CHROMIUM, args=QUIET)
    tab = browser.new_page(viewport={"width": 1130, "height": ROOM})  # what JupyterLab leaves of 1280 x 720
    tab.goto(every)
    tab.wait_for_function("window.done", timeout=300_000)
    assert {name: high for name, high in tab.evaluate(HEIGHTS) if high > ROOM} == {}
    browser.close()
