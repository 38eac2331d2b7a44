"""The notebooks of `more` in a real JupyterLab, and what a reader's JupyterLab does to a view."""

import os
import subprocess
import sys

import pytest
from browser import NARROW, NOTEBOOKS, PATIENCE, Page, visit, written
from forked_kernels import offered

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("notebook", [name for name in NOTEBOOKS if "/" in name])
def test_a_notebook_of_more_runs_and_its_controls_work_by_keyboard(lab, context, notebook):
    visit(lab, context, notebook)


FAST = [
    "from mpkit.lessons.dynamic_scale import dynamics\nfrom mpkit.lessons.formats import bits",
    "shown = bits(number='0')\nshown",
    "played = dynamics(step=200)\nplayed",
]
TOLD = """async (code) => { let text = '';
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({code});
  future.onIOPub = (m) => { if (m.header.msg_type === 'stream') text += m.content.text; };
  await future.done;
  return text.trim(); }"""

# Pixels from a place to the line that the pen draws.
OFF = """([x, y]) => { const line = document.querySelector('.mpk-stage [data-mark=pen]'), to = line.getScreenCTM();
  const off = (k) => { const p = line.getPointAtLength(k).matrixTransform(to); return Math.hypot(p.x - x, p.y - y); };
  return Math.min(...Array.from({ length: Math.ceil(line.getTotalLength()) }, (_, k) => off(k))); }"""


def test_what_is_done_faster_than_the_kernel_answers_arrives(lab, context):
    """A drag over forty values, two strokes of the pen, a number and an end: ipywidgets would drop most of them."""
    written(lab, "fast.ipynb", FAST)
    with Page(lab, context, "fast.ipynb") as opened:
        opened.run_all()
        page, told = opened.page, lambda code: opened.page.evaluate(TOLD, code)
        for bit in (0, *range(6, 16)):
            page.locator(".pick[data-for=bits]").nth(bit).click(force=True)
        opened.settled(1)
        assert told("print(f'{shown.numbers[\"pattern\"]:016b}')") == "1000001111111111"

        number = page.locator("[data-control=number]")
        number.fill("0.75")
        number.press("Enter")
        opened.settled(1)
        assert told("print(shown.params['number'])") == "0.75"

        grip = page.locator("[data-name=window]")
        grip.scroll_into_view_if_needed()
        at = grip.locator("circle").bounding_box()
        page.mouse.move(at["x"] + 7, at["y"] + 7)
        page.mouse.down()
        page.mouse.move(at["x"] + 127, at["y"] + 7, steps=40)
        page.mouse.up()
        opened.settled(2, quiet=0.3)
        assert told("print(played.params['window'])") == grip.get_attribute("aria-valuenow") != "50"

        box = page.locator(".mpk-over").nth(1).bounding_box()
        for start in (100, 300):
            page.mouse.move(box["x"] + start, box["y"] + 60)
            page.mouse.down()
            page.mouse.move(box["x"] + start + 60, box["y"] + 90, steps=12)
            opened.settled(2, quiet=0.3)  # drawn anew while the pen is down
            page.mouse.move(box["x"] + start + 62, box["y"] + 91)
            off = page.evaluate(OFF, [box["x"] + start + 62, box["y"] + 91])
            page.mouse.up()
            assert off < 4, "the pen is where the mouse is"
        opened.settled(2, quiet=0.3)
        gaps = "drawn = sorted(played.params['drawn'])\nprint(sum(b - a > 1 for a, b in zip(drawn, drawn[1:])))"
        assert told(gaps) == "1"  # two strokes, each whole

        step, said = page.locator(".mpk-player input[type=number]").last, page.locator("[role=status] b").last
        for typed, told_then in (("99999", "This is a whole number from 0 to 399."), ("2.5", "This is"), ("17", "")):
            step.fill(typed)
            step.press("Enter")
            assert said.text_content().startswith(told_then)
        opened.settled(2)
        assert said.text_content() == ""
        assert told("print(played.params['step'])") == "17"

        before = page.viewport_size
        page.set_viewport_size({"width": 900, "height": 1600})
        opened.settled(2)
        assert page.locator(".mpk-stage").last.bounding_box()["width"] >= NARROW  # what the tests of scenes take it for
        page.set_viewport_size(before)
    page.wait_for_timeout(300)  # pictures of other values were on their way: none asks a kernel that has gone for more
    assert opened.problems == []


ONE = [
    "from mpkit.view import quiz\nfrom mpkit.lessons.dynamic_scale import dynamics\nshown = dynamics(step=200)",
    "shown",
    "quiz.predict('start', 'overflow')",
]
ASKED = "Predict: In float16, a gradient entry of 2.0"
SESSION = "window.jupyterapp.shell.currentWidget.sessionContext"


def test_a_view_whose_kernel_has_gone_says_so_and_still_plays(lab, context):
    written(lab, "gone.ipynb", ONE)
    with Page(lab, context, "gone.ipynb") as opened:
        opened.run_all()
        page = opened.page
        page.evaluate(f"() => {SESSION}.session.kernel.restart()")
        handle, said = page.locator("[data-name=window]"), page.locator(".mpk [role=status] b")
        said.filter(has_text="Run its cell again").wait_for(timeout=PATIENCE)
        sentence = page.locator(".mpk [role=status] span")
        before, at = sentence.text_content(), handle.get_attribute("aria-valuenow")
        page.locator(".mpk-player input[type=range]").press("ArrowLeft")
        assert "Step 199" in sentence.text_content() != before
        handle.press("ArrowLeft")
        assert handle.get_attribute("aria-valuenow") == at, "a handle stays where the picture has it"
        assert "Run its cell again" in said.text_content()
        page.locator(".mpk > button").first.click()
        told = page.locator(".mpk > p[role=status]").text_content()
        assert told.startswith("You predicted (a)."), "a prediction needs no kernel"


def test_a_saved_notebook_that_is_opened_again_keeps_its_picture(lab, context):
    path = written(lab, "kept.ipynb", ONE)
    with Page(lab, context, "kept.ipynb") as opened:
        opened.run_all()
        still = opened.page.locator("figure.mpk-still")
        assert still.count() == 1
        assert not still.is_visible(), "the living view hides the stored one"
        assert not opened.page.get_by_text(ASKED).is_visible()
        opened.page.evaluate(f"() => {SESSION.removesuffix('.sessionContext')}.context.save()")
    assert "mpk-still" in path.read_text()
    with Page(lab, context, "kept.ipynb") as again:
        again.page.locator("figure.mpk-still img").wait_for(timeout=PATIENCE)
        again.page.wait_for_timeout(3000)  # JupyterLab looks for a widget for two seconds
        assert again.page.evaluate("() => document.querySelector('figure.mpk-still img').naturalWidth") > 300
        assert again.page.get_by_text(ASKED).is_visible()
        assert not again.page.locator(":text('Error displaying widget'):visible").count()


def test_a_page_made_by_nbconvert_shows_the_picture(lab, context):
    path = written(lab, "page.ipynb", ONE)
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--execute", "--to", "html", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=os.environ | offered())
    page = context.new_page()
    try:
        page.goto(path.with_suffix(".html").as_uri(), wait_until="domcontentloaded")
        page.wait_for_timeout(500)
        picture = page.locator("figure.mpk-still img")
        assert picture.is_visible()
        assert picture.bounding_box()["height"] > 200
        assert "Step 200" in page.locator("figure.mpk-still figcaption").text_content()
        assert page.get_by_text(ASKED).is_visible()
    finally:
        page.close()
