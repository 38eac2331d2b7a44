"""What the texts beside the lessons say of files, of the order of lessons, and of where data come from."""

import hashlib
import re
from pathlib import Path

import pytest
from support import ROOT

TEXTS = ("README.md", "CONTRIBUTING.md", "notebooks/README.md", "notebooks/instructor/INSTRUCTOR.md", "data/README.md")
EXAMPLES = {
    "benchmarks/gpu-<name>.json",
    "data/benchmarks/gpu-<name>.json",
    "check/lesson_NN.py",
    "mpkit/lessons/<topic>.toml",
}
EXAMPLES |= {"lab02_loss_scaling_lin.ipynb", "points.texts.md", ".github/workflows/course.yml"}  # what a reader makes
HOMES = ("", "mpkit", "notebooks", "mpkit/view", "notebooks/instructor", "data")  # where a text may begin its names


@pytest.mark.parametrize("text", TEXTS)
def test_every_file_that_a_text_names_exists(text):
    named = re.findall(
        r"`([\w./<>-]+\.(?:py|md|json|yml|toml|npz|ipynb|zip|js|txt|gif))`", (ROOT / text).read_text("utf-8")
    )
    assert named
    assert [n for n in set(named) - EXAMPLES if not any((ROOT / home / n).exists() for home in HOMES)] == []


def test_no_path_through_the_lessons_comes_to_one_before_those_that_it_needs():
    """*What if* needs *Scaler zoo*, which the student's path and the plan of the course left out."""
    readme = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(?:(\d\d) )?(.*?)\]\(.*\| \d+ \| (.*?) \|$", readme, re.M)
    lesson = re.compile("|".join(rf"(?<!lab )\b{number or title}\b" for number, title, _ in rows))
    needs = {number or title: set(lesson.findall(before)) for number, title, before in rows}
    student = readme[readme.index("* **Student.**") : readme.index("* **Engineer")]
    plans = re.findall(r"^\*\*Three weeks[^\0]*?$\n\n", (ROOT / TEXTS[3]).read_text("utf-8"), re.M)
    assert len(needs) == 22
    assert len(plans) == 1
    for path in (student, *re.split(r"\*\*One week\*\*", plans[0])):
        read = list(dict.fromkeys(lesson.findall(path)))
        assert len(read) >= 5
        late = {name: needs[name] - set(read[:i]) for i, name in enumerate(read)}
        assert not {name: missing for name, missing in late.items() if missing}


def test_every_stored_file_has_its_origin():
    """views.json had none, and the digests of the traces were promised and not there."""
    data = ROOT / "data"
    text = (data / "README.md").read_text("utf-8") + (data / "traces" / "README.md").read_text("utf-8")
    stored = [
        path for path in data.rglob("*") if path.suffix in {".npz", ".zip", ".gif", ".md"} and path.name != "README.md"
    ]
    stored += [path for path in data.glob("benchmarks/*.json") if not path.name.startswith(("cpu_", "gpu-"))]
    by_bench = {"boost.json"}  # of `python -m mpkit.bench`, which has one row
    assert [path.name for path in stored if path.name not in by_bench and path.name not in text] == []
    row = next(line for line in text.splitlines() if line.startswith("| `digits.npz`"))
    assert f"file `{hashlib.sha256((data / 'digits.npz').read_bytes()).hexdigest()}`" in row
    assert "in each file's row" not in text or "SHA" in Path(data / "traces" / "README.md").read_text("utf-8")


def test_the_list_of_changes_has_one_form():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n- ")[2]
    assert [line for line in changes.splitlines()[1:] if line and not line.startswith(("- ", "  "))] == []
