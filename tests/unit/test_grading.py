"""Grading: every file ends in the table, one bad answer costs its own question, and attacks earn nothing."""

import csv
import json
import os
import subprocess
import sys
from copy import deepcopy
from functools import cache

import grading
import labs
import nbformat
import pytest
from support import until

from mpkit import handin

SETUP = "import math\nlimits = [5]\ndef twice(x):\n    return 2 * x\ndef at_one(f):\n    return f(1.0)"
ANSWERS = {
    "q1": "def f(x):\n    ### BEGIN SOLUTION\n    return 2.0 * x + 1\n    ### END SOLUTION",
    "q2": "def g(words):\n    ### BEGIN SOLUTION\n    return words[::-1]\n    ### END SOLUTION",
}
TESTS = {
    "q1": """assert f(1.0) == 3.0, "twice and one more"
### BEGIN HIDDEN TESTS
assert [f(float(x)) for x in range(3)] == [1.0, 3.0, 5.0], "twice and one more"
assert f.each(range(4)) == [twice(x) + 1 for x in range(4)] and limits == [5]
assert at_one(f) == 3.0 and not names_used(f, 1.0) & {"float16", "mpkit", "getattr"}
### END HIDDEN TESTS""",
    "q2": "### BEGIN HIDDEN TESTS\nassert g(['a', 'b']) == ['b', 'a']\n### END HIDDEN TESTS",
}
RIGHT = "def f(x):\n    return 2.0 * x + 1"
OTHER = "def g(words):\n    return words[::-1]"


def cell(kind, source, **mark):
    """A cell with nbgrader's mark."""
    base = {"schema_version": 3, "locked": False, "task": False, "grade": False, "solution": False}
    metadata = {"nbgrader": base | mark} if mark else {}
    make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
    return make(source, metadata=metadata)


@cache
def lab():
    """A small lab: two questions for the machine, one for a person."""
    cells = [cell("code", "variant = 0"), cell("code", SETUP)]
    for name, answer in ANSWERS.items():
        cells.append(cell("code", answer, grade_id=f"lab_{name}_answer", solution=True))
        cells.append(cell("code", TESTS[name], grade_id=f"lab_{name}_hidden", grade=True, points=3, locked=True))
    text = "### BEGIN SOLUTION\nwhy\n### END SOLUTION"
    cells.append(cell("markdown", text, grade_id="lab_q3_text", solution=True, grade=True, points=2))
    return nbformat.v4.new_notebook(cells=cells)


def submission(first=RIGHT, second=OTHER, change=None):
    """What a student hands in; `change` may edit the notebook."""
    notebook = labs.release(deepcopy(lab()), 0)
    notebook.cells[2].source, notebook.cells[4].source = first, second
    if change:
        change(notebook)
    return notebook


def points(notebook, seconds=20):
    """(points of both questions, notes)."""
    source = handin.read_text(nbformat.writes(lab()))
    graded = grading.grade(handin.read_text(nbformat.writes(notebook)), source, seconds=seconds)
    return [graded.points["lab_q1"], graded.points["lab_q2"]], graded.notes


HARMLESS = {
    "as the solution": RIGHT,
    "magics": "%matplotlib inline\n" + RIGHT + "\nr = %timeit -o -n1 -r1 f(1.0)\nf?",
    "a cell magic": "%%time\n" + RIGHT,
    "a shell line": "!echo installed\n" + RIGHT,
    "help and a guard": RIGHT + "\nhelp(f)\nif __name__ == '__main__':\n    print(f(2.0))",
    "a star import": "from math import *\n" + RIGHT,
    "pandas, plot": f"import pandas, matplotlib.pyplot as p\np.plot([1, 2]); p.show()\n{RIGHT}\npandas.Series(f(1.0))",
    "a class": "class Line:\n    def __call__(self, x):\n        return 2.0 * x + 1\nf = Line()",
    "NumPy's number": "import numpy as np\ndef f(x):\n    return np.float64(2.0) * x + 1",
    "global and eval": "a = 1\ndef f(x):\n    global a\n    a = 1\n    return 2.0 * x + eval('a')",
    "much printing": RIGHT + "\nprint('x' * 10**7)",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_python_that_jupyter_runs_costs_nobody_a_point(name):
    assert points(submission(HARMLESS[name])) == ([3, 3], [])


def edit(cells):
    return lambda notebook: cells(notebook.cells)


def first(kind, source):
    """A cell that answers the first question."""
    return cell(kind, source, grade_id="lab_q1_answer", solution=True)


def without(*keys):
    def change(notebook):
        for each in notebook.cells:
            for key in keys:
                each.metadata.pop(key, None) if key == "nbgrader" else each.pop(key, None)

    return change


def in_two_cells():
    """An answer and, before it, a cell with the helper that it calls."""
    return [cell("code", "def h(x):\n    return x + 1"), first("code", "def f(x):\n    return h(2.0 * x)")]


FORMS = {
    "no nbgrader marks": (without("nbgrader"), []),
    "tests edited": (edit(lambda cells: setattr(cells[3], "source", "pass")), []),
    "tests deleted": (edit(lambda cells: cells.__delitem__(3)), []),
    "an older try as Markdown below": (edit(lambda c: c.insert(3, first("markdown", "def f(x):\n    return 0"))), []),
    "a helper in a cell before": (edit(lambda c: c.__setitem__(slice(2, 3), in_two_cells())), []),
    "answered twice": (edit(lambda c: c.insert(3, first("code", RIGHT))), ["more than one code cell"]),
    "only as Markdown": (edit(lambda c: c.__setitem__(2, first("markdown", RIGHT))), ["does not run"]),
    "a null source": (edit(lambda c: c.insert(2, cell("code", ""))), []),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_counts_however_its_notebook_was_saved(name):
    change, told = FORMS[name]
    earned, notes = points(submission(change=change))
    assert earned == [3, 3]
    assert len(notes) == len(told)
    assert all(word in note for word, note in zip(told, notes))


@pytest.mark.parametrize("how", ["no ids", "lists of lines", "format 3", "no metadata"])
def test_an_answer_counts_in_every_dialect_of_the_format(how):
    notebook = json.loads(nbformat.writes(submission()))
    for each in notebook["cells"]:
        if how == "no ids":
            each.pop("id")
        if how == "lists of lines":
            each["source"] = each["source"] if isinstance(each["source"], list) else each["source"].splitlines(True)
        if how == "no metadata":
            each.pop("metadata")
        if how == "format 3" and each["cell_type"] == "code":
            each["input"] = each.pop("source")
    if how == "format 3":
        notebook = {"worksheets": [{"cells": notebook["cells"]}], "nbformat": 3}
    found = grading.grade(handin.read_text(json.dumps(notebook)), handin.read_text(nbformat.writes(lab())))
    assert found.points == {"lab_q1": 3, "lab_q2": 3}


ONE_LOST = {  # a first answer that goes wrong -> what its question's note says; the second question keeps its points
    "wrong": ("def f(x):\n    return x", "twice and one more"),
    "raises": ("def f(x):\n    return 1 / 0", "ZeroDivisionError"),
    "a syntax error": ("def f(x:\n    return 1", "SyntaxError"),
    "deleted": ("", "f"),
    "endless": ("while True:\n    pass", "was stopped after 3 s"),
    "endless when asked": ("def f(x):\n    while True:\n        pass", "was stopped after 3 s"),
    "ends its process": ("import os\nos._exit(0)", "ended its process"),
    "ends it when asked": ("def f(x):\n    import os\n    os._exit(0)", "ended its process"),
    "leaves": ("def f(x):\n    raise SystemExit", "f"),
    "a lone surrogate": ("def f(x):\n    raise ValueError('\\ud800 \\x1b[2J')", "gave nothing that can be read"),
    "all memory": ("def f(x):\n    return len(bytearray(2**37))", "MemoryError"),
    "a large file": ("def f(x):\n    open('big', 'wb').write(bytes(2**28))\n    return 2.0 * x + 1", "f"),
}


@pytest.mark.parametrize("name", ONE_LOST)
def test_an_answer_that_goes_wrong_costs_its_own_question(name):
    if name in ("all memory", "a large file"):
        pytest.importorskip("resource", reason="limits of a process are Unix's")
    first, said = ONE_LOST[name]
    earned, notes = points(submission(first), seconds=3)
    assert earned == [0, 3]
    assert said in " ".join(notes)


def test_a_question_that_uses_an_earlier_answer_is_tested_with_a_right_one():
    for first in ("", "def f(x):\n    return 0.0"):
        assert points(submission(first, "def g(words):\n    return words[:: -int(f(0.0))]"))[0] == [0, 3]


WRONG = "def f(x):\n    return 0.0"
ANY = "class Any(float):\n    __hash__ = None\n    def __eq__(self, other):\n        return True\n"
ATTACKS = {
    "equal to everything": ANY + "def f(x):\n    return Any()",
    "a list equal to everything": "class L(list):\n    __eq__ = lambda self, other: True\ndef f(x):\n    return L()",
    "built-ins of one's own": f"import builtins as b\nb.all = lambda _: True\nb.float = lambda x: Any()\n{WRONG}",
    "a patched module": "import math\nmath.isclose = lambda a, b: True\n" + WRONG,
    "a patched json": "import json\njson.dumps = lambda *a, **k: '[[1.0, 3.0, 5.0], []]'\n" + WRONG,
    "a patched display": "import IPython.display as d\nd.display = lambda *a, **k: None\n" + WRONG,
    "no assert": "from IPython import get_ipython\nget_ipython().ast_transformers.append(None)\n" + WRONG,
    "the lab's own function": "def twice(x):\n    return -1.0\ndef at_one(f):\n    return 3.0\n" + WRONG,
    "the lab's own data": "limits[:] = [6]\n" + WRONG,
    "a fixed list of answers": "def f(x):\n    return {0.0: 1.0, 1.0: 3.0}.get(x, 0.0)",
    "what the caller holds": "import sys\ndef f(x):\n    return sys._getframe(1).f_locals.get('_want', 0.0)",
    "the files of the tests": f"import glob\ndef f(x):\n    return float(len(glob.glob('{labs.HERE}/*')))",
    "the environment": "import os\ndef f(x):\n    return float(len([k for k in os.environ if 'ANSWER' in k]))",
    "the grader's process": "import os\ndef f(x):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(8) and 0.0",
    "another answer when asked": "import inspect\ndef f(x):\n    return 3.0 if inspect.stack()[1:] else 2.0 * x + 1",
    "a value that overflows JSON": "def f(x):\n    return 10**5000",
    "a value without an end": "a = []\na.append(a)\ndef f(x):\n    return a",
    "a very long value": "def f(x):\n    return 'x' * 2**24",
    "float16 behind two names": "import numpy as np\nh = np.float16\ndef f(x):\n    return float(2 * h(x) + 1)",
    "the library behind a helper": "def h(x):\n    import mpkit\n    return 2.0 * x\ndef f(x):\n    return h(x) + 1",
    "no watching": "import sys\nsys.setprofile = None\ndef f(x):\n    return getattr(float(2 * x + 1), 'real')",
    "a fork": "import os\nif os.fork() == 0:\n    import time; time.sleep(600)\n" + WRONG,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing(name):
    if name == "a fork" and sys.platform == "win32":
        pytest.skip("no forks on Windows")
    earned, notes = points(submission(ATTACKS[name]), seconds=10)
    assert earned[0] == 0
    assert notes
    assert earned[1] == 3


@pytest.mark.skipif(not grading.walls(), reason="this system shuts no process in")
def test_a_submission_sees_no_network_no_other_process_and_no_tests(tmp_path):
    (tmp_path / "secret").write_text("x")
    session = grading.Session(20, (tmp_path, labs.HERE))
    try:
        both = f"[os.listdir({str(tmp_path)!r}), os.listdir({str(labs.HERE)!r})]"
        looks = f"import os, socket\ndef files():\n    return {both}\n"
        looks += "def others():\n    return len([p for p in os.listdir('/proc') if p.isdigit()])"
        assert session.run(looks) == ""
        assert session.ask("files", [[]], {})[0] == [[[], []]]
        assert session.ask("others", [[]], {})[0][0] <= 3
        assert "OSError" in session.run("socket.create_connection(('127.0.0.1', 80))")
    finally:
        session.close()


WHOLE = nbformat.writes(submission())
FILES = {  # name of a file -> (its bytes, what its row says)
    "good.ipynb": (WHOLE.encode(), "graded"),
    "mark.ipynb": (b"\xef\xbb\xbf" + WHOLE.encode(), "graded"),
    "wide.ipynb": (WHOLE.encode("utf-16"), "graded"),
    "empty.ipynb": (b"", "the file is empty"),
    "page.ipynb": (b"<!doctype html><html></html>", "not a notebook: HTML"),
    "a.zip": (b"PK\x03\x04 ...", "not a notebook: an archive"),
    "conflict.ipynb": (b"{\n<<<<<<< HEAD\n" + WHOLE.encode(), "merge conflict in line 2"),
    "cut.ipynb": (WHOLE[: len(WHOLE) // 2].encode(), "damaged in line"),
    "other.ipynb": (b'{"cells": [{"cell_type": "code", "source": null}, null]}', "no cell of it answers"),
    "data.ipynb": (b'{"a": 1}', "JSON without cells"),
    "deep.ipynb": (b"[" * 100000, "damaged in line"),
    "latin.ipynb": (WHOLE.replace("words", "w\u00f6rds").encode("latin-1"), "no UTF-8"),
    "=cmd|' calc'!A0.ipynb": (b"", "the file is empty"),
    "\x1b[2Jred.ipynb": (b"", "the file is empty"),
    os.fsdecode("作业".encode("gbk")) + ".ipynb": (b"", "the file is empty"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such names of files")
def test_every_file_ends_in_the_table(tmp_path, monkeypatch, capsys):
    folder, table = tmp_path / "handed in", tmp_path / "points.csv"
    folder.mkdir()
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    source = handin.read_text(nbformat.writes(lab()))
    monkeypatch.setattr(handin, "released", lambda _: {"lab": source})
    monkeypatch.setattr(sys, "argv", ["labs.py", "grade", str(folder), "--csv", str(table), "--variant", "0"])
    labs.main()
    text = table.read_bytes()
    assert text.startswith(b"\xef\xbb\xbf")  # by which a spreadsheet knows UTF-8
    rows = list(csv.DictReader(text.decode("utf-8-sig").splitlines()))
    told = {handin.printable(name): said for name, (_, said) in FILES.items()}
    assert {row["file"] for row in rows} == set(told)
    assert [row for row in rows if told[row["file"]] not in row["status"]] == []
    graded = {(row["1"], row["2"], row["total"], row["of"]) for row in rows if row["status"] == "graded"}
    assert graded == {("3", "3", "6", "6")}
    assert not any(c in text for c in b"\x1b\0")
    assert not any(row["file"].startswith("=") for row in rows)
    texts = (tmp_path / "points.texts.md").read_text(encoding="utf-8")
    assert "why" in texts
    assert texts.count("**empty**") == 3
    assert "\x1b" not in capsys.readouterr().out


def test_a_variant_that_was_not_given_out_or_is_gone_is_named(tmp_path):
    def row(change):
        nbformat.write(submission(change=change), tmp_path / "mine.ipynb")
        sources = {"lab": handin.read_text(nbformat.writes(lab()))}
        return labs.graded_row(tmp_path / "mine.ipynb", sources, 7, 20)[0]

    assert "variant 3, not 7" in row(lambda n: setattr(n.cells[0], "source", "variant = 3"))["status"]
    assert "gone" in row(lambda n: n.cells.pop(0))["status"]


def test_a_machine_that_cannot_run_the_lab_gives_nobody_a_zero():
    source = deepcopy(lab())
    source.cells[1].source = "import no_such_module"
    with pytest.raises(RuntimeError, match="mpkit"):
        grading.grade(handin.read_text(WHOLE), handin.read_text(nbformat.writes(source)))


@pytest.mark.skipif(not grading.walls(), reason="this system shuts no process in")
def test_a_killed_grader_leaves_no_kernel_behind():
    """A batch that an instructor kills must not leave what students started."""

    def children(pid):
        found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        return [each for child in found for each in (child, *children(child))]

    code = "import grading, time\nwith grading.kernel(20):\n    print(flush=True)\n    time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=labs.HERE) as grader:
        assert grader.stdout.readline()
        below = children(grader.pid)
        assert len(below) >= 2
        grader.kill()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below))
