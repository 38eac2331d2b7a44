"""Slides hold what the stored lesson holds: its goals, its questions without their answers, its pictures."""

import re
import subprocess
import sys
from html import escape, unescape

import nbformat
import pytest
import slides
from support import LESSONS, ROOT

from mpkit.view.words import words

NAMED = {slides.called(path): path for path in LESSONS}


@pytest.mark.parametrize("number", list(NAMED))
def test_every_picture_and_question_of_a_lesson_is_a_slide(number):
    notebook = nbformat.read(NAMED[number], as_version=4)
    shown = list(slides.slides(notebook))
    outputs = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    pictures = [data["text/plain"] for data in outputs if "image/png" in data]
    questions = [data["text/plain"] for data in outputs if data.get("text/plain", "").startswith("Predict: ")]
    assert len(shown) == 1 + len(pictures) + 2 * len(questions)
    page = slides.page(NAMED[number])
    assert page.count("<section>") == len(shown)
    assert all(f"<figcaption>{escape(sentence)}</figcaption>" in page for sentence in pictures)
    assert all(question.splitlines()[0].removeprefix("Predict: ") in unescape(page) for question in questions)
    asked = re.findall(r'quiz\.predict\("(\w+)", "(\w+)"\)', "\n".join(c.source for c in notebook.cells))
    told = [body for title, body in shown if title == "So it is"]
    for (topic, name), body in zip(asked, told, strict=True):
        prediction = words(topic)["predict"][name]
        right = ord(prediction["right"]) - ord("a")
        reasons = [" ".join(reason.split()) for _, reason in prediction["choices"]]
        assert [k for k, reason in enumerate(reasons) if reason in unescape(body)] == [right]
        assert sum(reasons[right] in unescape(body) for _, body in shown) == 1, "a slide gives an answer away"
    assert not re.search(r"https?://", page)
    assert page.count("<li>") >= 2
    assert "*" not in "".join(re.findall(r"<li>.*?</li>", page)), "a mark of Markdown is on a slide"


SETTINGS = {  # what a question needs: the end of the text that stands before it
    "00": ["trained five times, from different random weights.</p>", "it raises the scale until a gradient becomes"],
    "03": ["look at the gradients that flow back between its layers.</p>"],
    "04": ["between 2¹⁸ and 2²¹. The scaler has factor 2 and window 50."],
    "08": ["which takes a logarithm.</li></ul><p>Two of the four fail in float32 as well.</p>"] * 2,
    "optimizer": ["<code>eps</code> is there to prevent a division by 0.</p>"],
    "scaler_zoo": ["with a growth interval of 20 steps.</p>", "loss &lt; 0.5 * scale else scale</pre>"],
    "tensor_scales": ["divided by the largest amax of the history.</p>"],
    "blocks": ["0, 0.5, 1, 1.5, 2, 3, 4 and 6, with its sign.</p>"] * 2,
    "three_products": ["says how the numbers of every linear layer are cast.</p>"],
    "your_own_experiment": ["e5m1, which has one fraction bit."],
}


@pytest.mark.parametrize("number", list(NAMED))
def test_a_question_stands_below_its_setting(number):
    """The slides of 03 and 04 asked about a network and a ceiling of which they had said nothing."""
    asked = [body for title, body in slides.slides(nbformat.read(NAMED[number], as_version=4)) if "predict?" in title]
    for text, body in zip(SETTINGS.get(number, ()), asked, strict=number in SETTINGS):
        assert body.index(text) < body.rindex("<p><b>")
    for body in asked:
        assert not re.search(r"\b(cells?|buttons?)\b", body), "a slide has neither"
        assert "*" not in re.sub(r"<(code|pre)>.*?</\1>", "", body, flags=re.S), "a mark of Markdown is on a slide"


def test_the_usual_lessons_are_written_and_others_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["slides.py", "--to", str(tmp_path)])
    assert slides.main() == 0
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["00", "03", "04", "07"]
    monkeypatch.setattr("sys.argv", ["slides.py", "5"])
    with pytest.raises(SystemExit):
        slides.main()
    assert "lessons are 00, 01" in capsys.readouterr().err


@pytest.mark.parametrize("taken", ["file", "03_vanishing_gradients.html"])
def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, capsys, taken):
    """A traceback where the folder was there and a file in it could not be written."""
    (tmp_path / "file").touch()
    (tmp_path / "03_vanishing_gradients.html").mkdir()
    monkeypatch.setattr("sys.argv", ["slides.py", "03", "--to", str(tmp_path / taken if taken == "file" else tmp_path)])
    with pytest.raises(SystemExit):
        slides.main()
    assert "--to needs a folder that can be written" in capsys.readouterr().err


def test_without_nbformat_the_environment_is_named():
    code = "import sys; sys.modules['nbformat'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    for script in ("slides", "labs"):
        path = ROOT / "notebooks" / "instructor" / f"{script}.py"
        ended = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert ended.returncode == 1
        assert re.fullmatch(r"mpkit: .*nbformat.* source .venv/bin/activate.*\n", ended.stderr), ended.stderr


@pytest.fixture
def screen(chromium):
    """A full-HD page."""
    from browser import CHROMIUM, QUIET

    with chromium.launch(executable_path=CHROMIUM, args=QUIET) as browser:
        yield browser.new_page(viewport={"width": 1920, "height": 1080})


@pytest.mark.browser
@pytest.mark.parametrize("number", slides.USUAL)
def test_slides_fill_the_screen_turn_by_key_and_print_one_a_page(screen, tmp_path, number):
    """Pictures were half as wide as a full-HD screen, Left and Right did nothing, lesson 07 printed on five pages."""
    file = tmp_path / "slides.html"
    file.write_text(slides.page(NAMED[number]), "utf-8")
    screen.goto(file.as_uri())
    heights = screen.evaluate("[...document.querySelectorAll('section')].map((s) => s.getBoundingClientRect().height)")
    assert heights == [1080] * len(heights)
    sizes = screen.evaluate("[...document.images].map((i) => Math.min(i.width / 1920, i.height / 1080 * 1.6))")
    assert min(sizes) > 0.8, "a picture takes less than half of the height or four fifths of the width"
    shown = 0
    keys = [("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowDown", 1), ("ArrowUp", -1), ("PageDown", 1), ("PageUp", -1)]
    for key, turn in [*keys, *[("Space", 1)] * len(heights)]:
        screen.keyboard.press(key)
        shown = min(shown + turn, len(heights) - 1)
        assert screen.evaluate("scrollY") == 1080 * shown, key
    for landscape in (False, True):
        printed = screen.pdf(format="A4", landscape=landscape)
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == len(heights)
