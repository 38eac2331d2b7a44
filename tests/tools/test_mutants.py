"""The tool that makes mutants: what it changes, what it leaves alone, and that its verdicts are those of the tests."""

import json
import re
import subprocess
import sys
import time

import mutants
import pytest
from support import ROOT


def changes(source):
    return {(m.old, m.new) for m in mutants.mutants_of(source, "mpkit/x.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y = a + b", {("a + b", "a - b")}),
        ("y = a < b <= c", {("a < b <= c", "a <= b <= c"), ("a < b <= c", "a < b < c")}),
        ("y = a and not b", {("a and (not b)", "a or not b"), ("not b", "b")}),
        ("y = -x * 2.5", {("-x * 2.5", "-x / 2.5"), ("-x", "x"), ("2.5", "5.0")}),
        ("y = f(True, 0, 0.0)", {("True", "False"), ("0", "1"), ("0.0", "1.0")}),
        ('def f(x: Literal[1] = 2) -> "3": return x', {("2", "3")}),
        ('"""1 + 2"""\nraise ValueError(f"{1 + 2}")\nt = f"{1 + 2}"\nwarn(x, stacklevel=2)', set()),
        ("@dataclass(frozen=True)\nclass A:\n    isinstance(x, int | str)", set()),
    ],
)
def test_one_change_at_a_time_and_none_in_words(source, expected):
    assert changes(source) == expected


def test_a_mutant_is_the_source_with_that_one_change():
    source = 'x = "größer"; y = (x +\n     1)  # reason\n'
    (plus, one) = sorted(mutants.mutants_of(source, "mpkit/x.py"), key=lambda m: m.new)[::-1]
    assert plus.applied(source.encode()).decode() == 'x = "größer"; y = ((x - 1))  # reason\n'
    assert one.applied(source.encode()).decode() == 'x = "größer"; y = (x +\n     (2))  # reason\n'


def test_every_module_of_the_table_has_mutants_and_tests_of_its_own():
    every = mutants.all_mutants(ROOT, list(mutants.OWN))
    assert {m.module for m in every} == set(mutants.OWN)
    for module in mutants.OWN:
        assert all(mutants.files_of(ROOT, module, contract) for contract in (False, True))
    assert len(mutants.outdated(every)) < len(mutants.EQUIVALENT) / 2  # a run names those whose line has changed
    assert all(len(reason) > 20 for reason in mutants.EQUIVALENT.values())


def test_tests_that_start_processes_are_asked_last_of_what_all_others_let_pass(tmp_path, monkeypatch):
    apart = "tests/unit/test_step_processes.py"
    for name in ("mpkit/step.py", "tests/unit/test_step.py", apart):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    mutant, asked = mutants.all_mutants(tmp_path, ["step"])[0], []
    monkeypatch.setattr(mutants, "passes", lambda some, limit: asked.append(some) or True)
    reached = mutants.Reached({"one": 0.1}, {mutant.file: {1: ["one"]}})
    assert not mutants.kills(mutant, tmp_path, reached, contract=False)
    assert asked == [["one"], [apart]]


def test_an_entry_stands_for_its_mutant_or_for_the_line_of_a_constant(monkeypatch):
    every = mutants.mutants_of("FEW = 2**14  # why\nMORE = 2**14\ndef f(a):\n    return a + 1\n", "mpkit/x.py")
    names = {m.new: m.name for m in every if "MORE" not in m.text}
    line = "mpkit/x.py : FEW = 2**14 # why => *"
    single = names["a - 1"]
    monkeypatch.setattr(mutants, "EQUIVALENT", {line: "a reason", single: "its own", "gone => *": "", "gone => 1": ""})
    found = mutants.excused([m.name for m in every])
    assert found == {name: "its own" if name == single else "a reason" for name in found}
    assert {m.new for m in every if m.name in found} == {"2 * 14", "3", "15", "a - 1"}
    assert mutants.outdated(every) == {"gone => *", "gone => 1"}


def test_only_constants_of_a_module_are_excused_by_their_line():
    """Whoever declares one shows that its value changes no number: a test sets it to small values."""
    lines = [name for name in mutants.EQUIVALENT if name.endswith(" => *")]
    assert lines
    constant = r"mpkit/\S+ : _?[A-Z_]+(, _?[A-Z_]+)* = [^\[\]]+ => \*"
    assert all(re.fullmatch(constant, name) for name in lines)


LIBRARY = """
from functools import cache
def unused(a):
    return a - 1
def half(a, by=2):
    return a // by
def elsewhere():
    return 3
TWICE = half(3) * 2
def interrupts(a):
    return a > 5
class Box:
    sides = 6
    def open(self):
        return self
@cache
def table():
    return [4]
"""
TESTS = """
import subprocess
import sys
from mpkit.formats import TWICE, Box, half, interrupts, table
def test_the_default():
    assert half(7) == 3
def test_a_table_made_by_the_import():
    assert TWICE == 2
def test_what_a_class_declares():
    assert vars(Box)["sides"] == 6
def test_a_method_of_it():
    assert Box().open()
def test_a_result_is_made_once():
    assert table() is table()
def test_and_kept_for_whom_it_matters():
    assert table() == [4]
def test_a_ctrl_c_that_nobody_catches():
    assert interrupts(6)
    if interrupts(5):
        raise KeyboardInterrupt
def test_another_process():
    subprocess.run([sys.executable, "-c", "from mpkit.formats import *; assert elsewhere() == 3"], check=True)
"""


def test_verdicts_and_an_untouched_checkout(tmp_path):
    files = {
        "mpkit/__init__.py": "",
        "mpkit/formats.py": LIBRARY,
        "tests/unit/test_formats.py": TESTS,
        "tests/unit/conftest.py": "import mpkit.formats",
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.', 'tests']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    code = "import sys, mutants; mutants.WARM = (); sys.exit(mutants.main())"
    asked = ["--only", "formats", "--root", str(tmp_path), "--write", str(tmp_path / "out.json")]
    command = [sys.executable, "-c", code, *asked]
    done = subprocess.run(command, cwd=ROOT / "tests" / "tools", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split("[")[0].strip() for line in done.stdout.splitlines() if "mpkit/formats.py:" in line)
    assert lines == [
        "killed    mpkit/formats.py:11 5 -> 6",
        "killed    mpkit/formats.py:11 a > 5 -> a >= 5",
        "killed    mpkit/formats.py:13 6 -> 7",
        "killed    mpkit/formats.py:18 4 -> 5",
        "killed    mpkit/formats.py:5 2 -> 3",  # a default
        "killed    mpkit/formats.py:6 a // by -> a / by",  # runs when the module is imported
        "killed    mpkit/formats.py:8 3 -> 4",  # in a process that a test starts
        "killed    mpkit/formats.py:9 2 -> 3",
        "killed    mpkit/formats.py:9 3 -> 4",
        "killed    mpkit/formats.py:9 half(3) * 2 -> half(3) / 2",
        "survived  mpkit/formats.py:4 1 -> 2",  # no test calls it
        "survived  mpkit/formats.py:4 a - 1 -> a + 1",
    ]
    assert "83.3% of 12 killed" in done.stdout
    assert (tmp_path / "mpkit/formats.py").read_text() == LIBRARY
    held = json.loads((tmp_path / "out.json").read_text())
    changed = [f"mpkit/formats.py unused: return a - 1 => return {wrong}" for wrong in ("a + 1", "a - 2")]
    assert sorted(held["survived"]) == changed


def test_a_mutant_that_waits_for_what_never_comes_is_not_waited_for(tmp_path):
    (tmp_path / "test_slow.py").write_text("import time\ndef test_it(): time.sleep(60)\n")
    began = time.monotonic()
    assert not mutants.passes([str(tmp_path / "test_slow.py")], seconds=0.3)
    assert time.monotonic() - began < 50
