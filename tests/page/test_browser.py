"""Every notebook in a real JupyterLab: it runs, nothing complains, every control moves what the reader sees."""

import json

import pytest
from browser import NARROW, NOTEBOOKS, Page, visit

pytestmark = pytest.mark.browser  # all in one file: a second JupyterLab with its page would cost 20 s


@pytest.mark.parametrize(("notebook", "following"), list(zip(NOTEBOOKS, [*NOTEBOOKS[1:], ""])), ids=NOTEBOOKS)
def test_a_notebook_runs_and_its_controls_work_by_keyboard(lab, context, notebook, following):
    visit(lab, context, notebook, following)


FAST = [
    "from mpkit.widgets.formats import bits_view\nfrom mpkit.widgets.scaling import dynamics_view",
    "bits = bits_view(number='0')\nbits",
    "dynamics = dynamics_view(step=200)\ndynamics",
]
TOLD = """async (code) => { let text = '';
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({code});
  future.onIOPub = (m) => { if (m.header.msg_type === 'stream') text += m.content.text; };
  await future.done;
  return text.trim(); }"""


def test_what_is_done_faster_than_the_kernel_answers_arrives(lab, context):
    """Eleven bits at once, a drag over forty values, two strokes of the pen: ipywidgets would drop most of them."""
    cells = [
        {"id": f"c{i}", "cell_type": "code", "metadata": {}, "outputs": [], "source": text, "execution_count": None}
        for i, text in enumerate(FAST)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (lab.root / "notebooks" / "fast.ipynb").write_text(json.dumps(notebook))
    opened = Page(lab, context, "fast.ipynb")
    try:
        opened.run_all()
        page, told = opened.page, lambda code: opened.page.evaluate(TOLD, code)
        page.evaluate(
            "() => document.querySelectorAll('.pick[data-for=toggle]').forEach((node) => {"
            " if (node.key < 10 || node.key === 15) node.dispatchEvent(new MouseEvent('click', {bubbles: true})); })"
        )
        opened.settled(1)
        assert told("print(f'{bits.explorer.pattern:016b}')") == "1000001111111111"

        number = page.locator("[data-control=number]")
        number.fill("0.75")
        number.press("Enter")
        opened.settled(1)
        assert told("print(bits.explorer.value)") == "0.75"

        grip = page.locator("[data-name=scale_window]")
        grip.scroll_into_view_if_needed()
        at = grip.locator("circle").bounding_box()
        page.mouse.move(at["x"] + 7, at["y"] + 7)
        page.mouse.down()
        page.mouse.move(at["x"] + 127, at["y"] + 7, steps=40)
        page.mouse.up()
        opened.settled(2, quiet=0.3)
        assert told("print(dynamics.explorer.scale_window)") == grip.get_attribute("aria-valuenow") != "50"

        box = page.locator(".mpk-over").nth(1).bounding_box()
        for start in (100, 300):
            page.mouse.move(box["x"] + start, box["y"] + 60)
            page.mouse.down()
            page.mouse.move(box["x"] + start + 60, box["y"] + 90, steps=12)
            page.mouse.up()
        opened.settled(2, quiet=0.3)
        gaps = "drawn = sorted(dynamics.explorer.drawn)\nprint(sum(b - a > 1 for a, b in zip(drawn, drawn[1:])))"
        assert told(gaps) == "1"  # two strokes, each whole

        before = page.viewport_size
        page.set_viewport_size({"width": 900, "height": 1600})
        opened.settled(2)
        assert page.locator(".mpk-stage").last.bounding_box()["width"] >= NARROW  # what the tests of scenes take it for
        page.set_viewport_size(before)
    finally:
        opened.close()
    page.wait_for_timeout(300)  # pictures of other values were on their way: none asks a kernel that has gone for more
    assert opened.problems == []
