"""Slides hold what the stored lesson holds: its goals, its questions without their answers, its pictures."""

import re
from html import escape, unescape
from importlib import import_module

import nbformat
import pytest
import slides
from support import ROOT

LESSONS = {path.stem[:2]: path for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}


@pytest.mark.parametrize("number", sorted(LESSONS))
def test_every_picture_and_question_of_a_lesson_is_a_slide(number):
    notebook = nbformat.read(LESSONS[number], as_version=4)
    shown = list(slides.slides(notebook))
    outputs = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    pictures = [data["text/plain"] for data in outputs if "image/png" in data]
    questions = [data["text/plain"] for data in outputs if data.get("text/plain", "").startswith("Predict: ")]
    assert len(shown) == 1 + len(pictures) + len(questions)
    page = slides.page(LESSONS[number])
    assert page.count("<section>") == len(shown)
    assert all(f"<figcaption>{escape(sentence)}</figcaption>" in page for sentence in pictures)
    assert all(question.splitlines()[0].removeprefix("Predict: ") in unescape(page) for question in questions)
    for prediction in import_module(f"mpkit.check.lesson_{number}").PREDICTIONS.values():
        assert not any(word in unescape(page) for _, word in prediction.choices), "a slide gives an answer away"
    assert not re.search(r"https?://", page)
    assert page.count("<li>") >= 2


def test_the_usual_lessons_are_written_and_others_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["slides.py", "--to", str(tmp_path)])
    assert slides.main() == 0
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["00", "04", "05", "09"]
    monkeypatch.setattr("sys.argv", ["slides.py", "5"])
    with pytest.raises(SystemExit):
        slides.main()
    assert "lessons are 00, 01" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["slides.py", "--to", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        slides.main()
    assert "--to names no folder that can be written" in capsys.readouterr().err
