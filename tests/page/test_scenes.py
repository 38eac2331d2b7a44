"""Every view, at its opening and after each try, on a bare page: words lie apart, every ring can be grabbed."""

from pathlib import Path

import pytest
from browser import CHROMIUM, QUIET
from scenes import page, views

from mpkit.view.page import Page

pytestmark = pytest.mark.browser
FAULTS = Path(__file__).with_name("faults.js").read_text("utf-8")


def shown():
    """(name, page) of every view and of all that its words ask to try."""
    for name, maker in views():
        yield name, Page(maker())
        for number in range(len(maker().tries)):
            view = maker()
            view.attempt(number)
            yield f"{name}, try {number}", Page(view)


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
