"""The static site, opened from its folder without a network: everything on every page answers, nothing complains.

The site that is made here has few pictures, and moves the views of three lessons. MPKIT_SITE=FOLDER tries everything on
one that `make site` has made.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import LOOK
from support import ROOT

from mpkit.view.quiz import verdict

pytest.importorskip("sphinx", reason="the extra `site` is not installed")
sys.path.append(str(ROOT / "notebooks" / "site"))
publish = __import__("publish")

pytestmark = pytest.mark.browser
PAGES = [path.relative_to(ROOT / publish.UNDER).with_suffix(".html").as_posix() for path in publish.lessons()]
MADE = os.environ.get("MPKIT_SITE")
FEW = ["--most", "4", "--only", "00", "04", "adasum"]
"""The machinery is the same as with hundreds of pictures, and what is missing is said in words."""
MOVED = [page for page in PAGES if MADE or page.rpartition("/")[2].startswith(tuple(FEW[3:]))]
MOVES = (Path(__file__).parent / "moves.js").read_text("utf-8")
# nothing but colours is another in the dark; those of the views are asked in five themes elsewhere, of all of them
THEMES = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}


def made(folder, *few):
    """The whole site in a folder, by the command that readers give."""
    command = [sys.executable, ROOT / "notebooks" / "site" / "publish.py", folder, *few]
    subprocess.run(command, check=True, timeout=3600, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site; MPKIT_SITE names one that was made before."""
    return Path(MADE) if MADE else made(tmp_path_factory.mktemp("site") / "pages", *FEW)


@pytest.fixture(scope="session")
def offline(headless):
    return headless.new_context(viewport={"width": 1280, "height": 1000}, offline=True)


@pytest.fixture
def opened(site, offline):
    """Opens a page, and knows at the end that nothing complained and nothing was asked of anybody else."""
    page, problems = offline.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or problems.append(request.url)
    )
    page.on("requestfailed", lambda request: problems.append(request.url))

    def open_(name):
        page.goto(f"{site.as_uri()}/{name}")
        return page

    yield open_
    page.close()
    assert problems == []


@pytest.mark.parametrize("name", PAGES)
def test_a_lesson_answers_without_a_kernel(opened, name):
    page = opened(name)
    views = alive(page)
    stored = (ROOT / publish.UNDER / name).with_suffix(".ipynb").read_text("utf-8")
    assert views.count() + page.locator("figure.mpk-still").count() == stored.count("<figure")
    if name in MOVED:
        for k in range(views.count()):
            found = views.nth(k).evaluate(MOVES)
            assert found["dead"] == [], f"view {k + 1}"
            assert found["left"], "Reset brings the opening picture"
            assert found["moves"] > 1
    is_told_as_in_a_notebook(page)
    assert violations(page, list(THEMES) if name in MOVED else ["light"]) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def alive(page):
    """The views of a page, all of them brought to life."""
    boxes = page.locator("[data-view]")
    for k in range(boxes.count()):
        boxes.nth(k).scroll_into_view_if_needed()
        page.wait_for_function(
            "(k) => 'alive' in document.querySelectorAll('[data-view]')[k].dataset", arg=k, timeout=120_000
        )
    return boxes


SMALL = """() => [...document.querySelectorAll(".pick, .handle, .mpk :is(button, select, summary, input)")]
  .filter((n) => n.checkVisibility({ visibilityProperty: true })).map((n) => [n, n.getBoundingClientRect()])
  .filter(([, b]) => b.width && Math.min(b.width, b.height) < 23.9).map(([n]) => n.outerHTML)"""


@pytest.mark.parametrize("name", ["01_number_formats", "07_boost_levels"])
def test_a_finger_finds_24_pixels_of_all_that_it_can_set(site, headless, name):
    held = headless.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True, offline=True)
    page = held.new_page()
    page.goto(f"{site.as_uri()}/{name}.html")
    views = alive(page)
    if MADE and name.startswith("01"):
        views.first.locator("select").first.select_option("fp32")
        page.wait_for_function("document.querySelectorAll('[data-view] .pick').length >= 32")
    assert page.locator(".pick").count()
    assert page.evaluate(SMALL) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    held.close()


def violations(page, themes=tuple(THEMES)):
    """(theme, element) of all that axe finds on a page in some themes."""
    page.add_style_tag(content="* { transition: none !important }")  # or axe may see a colour between two themes
    page.evaluate(Axe().axe_script)
    found = []
    for theme in themes:
        page.emulate_media(color_scheme=theme)
        page.evaluate("(theme) => { document.body.dataset.theme = theme; }", theme)
        violated = page.evaluate(LOOK, [{"exclude": []}, {"preload": False} | THEMES[theme]])
        found += [(theme, *one) for one in violated]
    return found


def is_told_as_in_a_notebook(page):
    """Every prediction is made, every question answered: with the truth, and wrongly."""
    for asked in page.locator("[data-quiz=predict]").all():
        asked.locator("button").first.click()
        assert asked.locator("[role=status]").text_content().startswith("You predicted (a)")
    for form in page.locator("[data-quiz=answer]").all():
        topic, question = form.get_attribute("data-name").split()
        known = publish.words(topic)["question"][question]
        for text in answers(known["truth"], known.get("hints", ())):
            told = form.evaluate(ANSWER, text)
            assert told == verdict(topic, question, text)[1], text


ANSWER = """(form, text) => { form.querySelector("input").value = text; form.querySelector("button").click();
  return form.querySelector("[role=status]").textContent; }"""


def answers(truth, hints):
    """What a reader may write: the truth, and each wrong answer that a hint is for."""
    yield ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)
    for wrong, _ in hints:
        if not isinstance(wrong, dict) and wrong != []:
            yield ", ".join(map(str, wrong)) if isinstance(wrong, list) else str(wrong)


def test_the_same_commit_gives_the_same_bytes(site, tmp_path):
    """Made again by another process, in which words have other hashes."""
    again = made(tmp_path / "again", *(() if MADE else FEW))
    files = {p.relative_to(site): p for p in site.rglob("*") if p.is_file()}
    assert {p.relative_to(again) for p in again.rglob("*") if p.is_file()} == set(files)
    assert [str(n) for n, p in files.items() if p.read_bytes() != (again / n).read_bytes()] == []


def test_pages_lead_to_each_other_and_to_the_reference(site, opened):
    page = opened("index.html")
    for name in PAGES:
        assert page.locator(f'a[href="{name}"]').count(), name
    assert violations(page) == []
    assert "mpkit.html" in (site / "reference.html").read_text()
    page = opened("search.html?q=hysteresis")
    page.wait_for_selector("ul.search li", timeout=60_000)
    assert violations(page) == []
    page = opened("reference/mpkit/scalers.html")
    assert page.locator("#DynamicLossScaler").count()
    assert violations(page) == []
    outside = re.compile(r'(?:src|href)="https?://(?!github\.com|colab\.|mybinder\.|arxiv\.)[^"]*"')
    assert {
        m[0]
        for p in site.glob("*.html")
        for m in outside.finditer(p.read_text())
        if "stylesheet" in m[0] or m[0].startswith("src")
    } == set()
