"""The static site, opened from its folder without a network: everything on every page answers, nothing complains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import CHROMIUM, LOOK, QUIET
from support import ROOT

from mpkit.view.quiz import verdict

pytest.importorskip("sphinx", reason="the extra `site` is not installed")
sys.path.append(str(ROOT / "notebooks" / "site"))
publish = __import__("publish")

pytestmark = pytest.mark.browser
PAGES = [path.relative_to(ROOT / publish.UNDER).with_suffix(".html").as_posix() for path in publish.lessons()]
FEW = 8
"""Pictures of a view: the machinery is the same as with hundreds, and what is missing is said in words."""

MOVES = (Path(__file__).parent / "moves.js").read_text("utf-8")


def made(folder):
    """The whole site in a folder, with few pictures of each view, by the command that readers give."""
    command = [sys.executable, ROOT / "notebooks" / "site" / "publish.py", folder, "--most", str(FEW)]
    subprocess.run(command, check=True, timeout=3600, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; MPKIT_SITE names one that was made before."""
    there = os.environ.get("MPKIT_SITE")
    return Path(there) if there else made(tmp_path_factory.mktemp("site") / "pages")


@pytest.fixture(scope="module")
def offline(chromium):
    browser = chromium.launch(executable_path=CHROMIUM, args=QUIET)
    yield browser.new_context(viewport={"width": 1280, "height": 1000}, offline=True)
    browser.close()


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
        page.goto((site / name).as_uri())
        return page

    yield open_
    page.close()
    assert problems == []


def alive(page):
    """The views of a page, all of them brought to life."""
    boxes = page.locator("[data-view]")
    for k in range(boxes.count()):
        boxes.nth(k).scroll_into_view_if_needed()
        page.wait_for_function(
            "(k) => 'alive' in document.querySelectorAll('[data-view]')[k].dataset", arg=k, timeout=120_000
        )
    return boxes


@pytest.mark.parametrize("name", PAGES)
def test_every_control_of_a_lesson_answers_without_a_kernel(opened, name):
    page = opened(name)
    views = alive(page)
    stored = (ROOT / publish.UNDER / name).with_suffix(".ipynb").read_text("utf-8")
    assert views.count() + page.locator("figure.mpk-still").count() == stored.count("<figure")
    for k in range(views.count()):
        found = views.nth(k).evaluate(MOVES)
        assert found["dead"] == [], f"view {k + 1}"
        assert found["left"], "Reset brings the opening picture"
        assert found["moves"] > 1
    for theme in ("light", "dark"):
        page.evaluate("(theme) => { document.body.dataset.theme = theme; }", theme)
        page.evaluate(Axe().axe_script)
        violated, _ = page.evaluate(LOOK, [{"exclude": []}, {"preload": False}])
        assert violated == [], theme
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 1000})


def answers(truth, hints):
    """What a reader may write: the truth, and each wrong answer that a hint is for."""
    yield ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)
    for wrong, _ in hints:
        if not isinstance(wrong, dict) and wrong != []:
            yield ", ".join(map(str, wrong)) if isinstance(wrong, list) else str(wrong)


@pytest.mark.parametrize("name", PAGES)
def test_predictions_and_questions_are_told_as_in_a_notebook(opened, name):
    page = opened(name)
    for asked in page.locator("[data-quiz=predict]").all():
        first = asked.locator("button").first
        first.click()
        assert asked.locator("[role=status]").text_content().startswith("You predicted (a)")
    forms = page.locator("[data-quiz=answer]").all()
    for form in forms:
        topic, question = form.get_attribute("data-name").split()
        known = publish.words(topic)["question"][question]
        for text in answers(known["truth"], known.get("hints", ())):
            form.locator("input").fill(text)
            form.locator("button").click()
            assert form.locator("[role=status]").text_content() == verdict(topic, question, text)[1], text


def test_the_same_commit_gives_the_same_bytes(site, tmp_path):
    """Made again by another process, in which words have other hashes."""
    again = made(tmp_path / "again")
    files = {p.relative_to(site): p for p in site.rglob("*") if p.is_file()}
    assert {p.relative_to(again) for p in again.rglob("*") if p.is_file()} == set(files)
    assert [str(n) for n, p in files.items() if p.read_bytes() != (again / n).read_bytes()] == []


def test_pages_lead_to_each_other_and_to_the_reference(site, opened):
    page = opened("index.html")
    for name in PAGES:
        assert page.locator(f'a[href="{name}"]').count(), name
    assert "mpkit.html" in (site / "reference.html").read_text()
    for module in ("policies", "scalers", "casting"):
        assert "DynamicLossScaler" in (site / "reference" / "mpkit" / "scalers.html").read_text(), module
    page.goto((site / "search.html").as_uri() + "?q=hysteresis")
    page.wait_for_selector("ul.search li", timeout=60_000)
    outside = re.compile(r'(?:src|href)="https?://(?!github\.com|colab\.|mybinder\.|arxiv\.)[^"]*"')
    assert {
        m[0]
        for p in site.glob("*.html")
        for m in outside.finditer(p.read_text())
        if "stylesheet" in m[0] or m[0].startswith("src")
    } == set()
