"""Bugs planted in the library one at a time (planted_bugs.toml): the contract notices each, or the units of its lesson.

A lab that is about the bug notices, too: its solutions, right as they are, do not earn every point any more.
"""

import os
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from mutants import OWN, copied, files_of
from support import ROOT

BUGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def ids(what):
    return what.replace(" ", "-")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project, in which a bug stands as long as its test runs."""
    return copied(ROOT, tmp_path_factory.mktemp("planted"))


@contextmanager
def planted(what, tree):
    bug = BUGS[what]
    source = tree / "mpkit" / bug["file"]
    text = source.read_text()
    source.write_text(text.replace(bug["right"], bug["wrong"]))
    try:
        yield bug
    finally:
        source.write_text(text)


def ran(tree, folder, *program):
    """A Python program that finds the planted bug."""
    variables = os.environ | {"PYTHONPATH": str(tree), "MPKIT_DATA": str(ROOT / "data")}
    return subprocess.run([sys.executable, *program], cwd=tree / folder, env=variables, capture_output=True)


def test_every_bug_can_be_planted():
    """A line that has changed is told at once."""
    found = {what: (ROOT / "mpkit" / bug["file"]).read_text().count(bug["right"]) for what, bug in BUGS.items()}
    assert {what: count for what, count in found.items() if count != 1} == {}


GRADED = """import sys; import grading; from mpkit import handin
source = handin.read(grading.HERE / sys.argv[1])
found = grading.grade(source, source)
sys.exit(found.points != found.possible)"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what, bug in BUGS.items() if "lab" in bug], ids=ids)
def test_a_lab_notices(what, tree):
    with planted(what, tree) as bug:
        ended = ran(tree, "notebooks/instructor", "-c", GRADED, f"{bug['lab']}.ipynb")
    assert ended.returncode == 1, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", BUGS, ids=ids)
def test_the_contract_notices(what, tree):
    module = BUGS[what]["file"].partition("/")[0].removesuffix(".py")
    own = f"tests/unit/lessons/test_{Path(BUGS[what]['file']).stem}.py"
    nearest = files_of(tree, module, contract=True) if module in OWN else [[own]] if (tree / own).exists() else []
    with planted(what, tree):
        for files in (*nearest, ["tests/unit/lessons"] if module == "lessons" else ["tests/contract"]):
            ended = ran(tree, ".", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files)
            if ended.returncode:
                break
    assert ended.returncode == 1, f"the contract does not notice: {what}"
    assert b"ERROR collecting" not in ended.stdout, "the bug must not already keep the package from being imported"
