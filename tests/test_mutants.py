"""The tool that makes mutants: what it changes, what it leaves alone, and that its verdicts are those of the tests."""

import subprocess
import sys

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
        own = [n for n in mutants.test_files(ROOT, module) if "wrong_input" not in n and "meta_device" not in n]
        assert any(name.startswith("tests/") for name in own)
    assert set(mutants.EQUIVALENT) <= {m.name for m in every}, (
        "the line of an equivalent mutant has changed: look again"
    )


def test_verdicts_and_an_untouched_checkout(tmp_path):
    files = {
        "mpkit/__init__.py": "",
        "mpkit/formats.py": "def larger(a, b):\n    return a > b\n\n\ndef unused(a):\n    return a + 1\n",
        "tests/test_formats.py": "from mpkit.formats import larger\n\ndef test_it():\n    assert larger(2, 1)\n"
        "    assert not larger(1, 1)\n",
        "tests/mutants.py": (ROOT / "tests" / "mutants.py").read_text(),
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.', 'tests']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "import sys, mutants; mutants.WARM = (); mutants.CONTROL = 1; sys.exit(mutants.main())"
    asked = ["--only", "formats", "--root", str(tmp_path), "--write", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, *asked], cwd=ROOT / "tests", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split("[")[0].strip() for line in done.stdout.splitlines() if "mpkit/formats.py:" in line)
    assert lines == [
        "killed    mpkit/formats.py:2 a > b -> a >= b",
        "survived  mpkit/formats.py:6 1 -> 2",  # no test calls it
        "survived  mpkit/formats.py:6 a + 1 -> a - 1",
    ]
    assert "33.3% of 3 killed" in done.stdout
    assert (tmp_path / "mpkit/formats.py").read_text() == files["mpkit/formats.py"]
