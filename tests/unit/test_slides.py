"""Slides hold what the stored lesson holds: its questions, each with its answer behind it, and its pictures."""

import re
import subprocess
import sys
from html import unescape

import nbformat
import pytest
import slides
from support import ROOT

from mpkit.view.words import words


@pytest.mark.parametrize("lesson", slides.LESSONS)
def test_each_question_is_followed_by_its_answer_and_each_picture_is_there(lesson, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["slides.py", lesson, "--to", str(tmp_path)])
    assert slides.main() == 0
    page = unescape((tmp_path / f"{slides.LESSONS[lesson].stem}.html").read_text("utf-8"))
    cells = nbformat.read(slides.LESSONS[lesson], as_version=4).cells
    outputs = [o.data for c in cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    assert page.count("data:image/png;base64") >= sum("image/png" in data for data in outputs)
    asked = [found for c in cells for found in re.findall(r'predict\("(\w+)", "(\w+)"\)', c.source)]
    assert page.count("So it is") >= len(asked)
    for topic, name in asked:
        prediction = words(topic)["predict"][name]
        _, reason = prediction["choices"][ord(prediction["right"]) - ord("a")]
        reason = re.sub(r"[`*]", "", " ".join(reason.split()))[:20]
        assert reason in re.sub(r"<[^>]+>", "", page), "the reason stands in no stored lesson, on its slide alone"
    assert "import torch" not in page, "code is left out"


@pytest.mark.parametrize(("arguments", "told"), [(["5"], "lessons are 00, 01"), (["04", "--to", "FILE"], "--to needs")])
def test_what_cannot_be_written_is_told(tmp_path, monkeypatch, capsys, arguments, told):
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["slides.py", *(a.replace("FILE", str(tmp_path / "file")) for a in arguments)])
    with pytest.raises(SystemExit):
        slides.main()
    assert told in capsys.readouterr().err


def test_without_nbformat_the_environment_is_named():
    code = "import runpy, sys; sys.modules['nbformat'] = None; sys.path.insert(0, sys.argv[2])\n"
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    for script in ("slides", "labs"):
        path = ROOT / "notebooks" / "instructor" / f"{script}.py"
        ended = subprocess.run([sys.executable, "-c", code, path, path.parent], capture_output=True, text=True)
        assert ended.returncode == 1
        assert re.fullmatch(r"mpkit: .*nbformat.* source .venv/bin/activate.*\n", ended.stderr), ended.stderr
