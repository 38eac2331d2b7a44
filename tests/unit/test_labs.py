"""The labs: their solutions earn every point in every variant, mistakes lose theirs, releases tell nothing."""

import json
import os
import sys
import tomllib
from pathlib import Path

import grading
import labs
import nbformat
import pytest
from forked_kernels import offered

from mpkit import handin
from mpkit.handin import is_answer, is_parameters, mark

SOURCES = {path.stem[:5]: path for path in sorted(labs.HERE.glob("lab[0-9][0-9]_*.ipynb"))}
TRIED = tomllib.loads(Path(__file__).with_name("lab_answers.toml").read_text(encoding="utf-8"))
VARIANTS = range(int(os.environ.get("MPKIT_LAB_VARIANTS", "2")))


def solved(lab, variant=0):
    """A submission that answers everything as the source does."""
    notebook = handin.read(SOURCES[lab])
    for cell in notebook["cells"]:
        if is_parameters(cell):
            cell["source"] = f"variant = {variant}"
    return notebook


def code_cells(lab, question):
    """The test cells of one question."""
    return [
        cell
        for cell in handin.read(SOURCES[lab])["cells"]
        if cell["cell_type"] == "code" and mark(cell).get("grade") and f"_{question}_" in mark(cell)["grade_id"]
    ]


@pytest.fixture
def quick(monkeypatch):
    """Kernels that begin with torch at hand, where they can be forked; what walls are for is said in `test_grading`."""
    if found := offered().get("JUPYTER_PATH"):
        spec = json.loads(Path(found, "kernels", "python3", "kernel.json").read_text(encoding="utf-8"))
        monkeypatch.setattr(grading, "KERNEL", spec["argv"][:-1])
        monkeypatch.setattr(grading, "walls", list)
        monkeypatch.setenv("JUPYTER_PATH", found)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lab", SOURCES)
def test_the_solutions_earn_every_point(lab, variant, request):
    if (lab, variant) != ("lab06", 0):  # this one, which makes experiments, runs behind the walls
        request.getfixturevalue("quick")
    graded = grading.grade(solved(lab, variant), handin.read(SOURCES[lab]))
    assert (graded.points, graded.notes, graded.variant) == (graded.possible, [], variant)
    assert graded.texts
    assert all(graded.texts.values())


@pytest.mark.parametrize("lab", ["lab01", "lab02"])
def test_what_is_released_earns_nothing_and_every_failure_says_why(lab, quick):
    released = labs.release(nbformat.read(SOURCES[lab], as_version=4))
    graded = grading.grade(handin.read_text(nbformat.writes(released)), handin.read(SOURCES[lab]))
    assert sum(graded.points.values()) == 0
    assert all("NotImplementedError" in note for note in graded.notes)


@pytest.fixture(scope="module", params=SOURCES)
def bench(request):
    """(lab, notes): `notes(question, right, wrong)` are those of a question's tests after this change of its answer."""
    lab, source = request.param, handin.read(SOURCES[request.param])
    answers = {mark(cell)["grade_id"]: cell["source"] for cell in source["cells"] if is_answer(cell)}
    session = grading.Session(60, (labs.HERE,))
    for cell in source["cells"]:
        shows = "show" in cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and not mark(cell).get("grade") and not shows:
            session.answered([cell["source"]], cell) if is_answer(cell) else session.given(cell["source"])

    def notes(question, right, wrong):
        own = answers[f"{lab}_{question}_answer"]
        assert own.count(right) == 1, right
        said = [session.run(own.replace(right, wrong))]
        said += [session.tested(cell) for cell in code_cells(lab, question)]
        session.run(own)
        return list(filter(None, said))

    yield lab, notes
    session.close()


@pytest.mark.skipif(not os.environ.get("MPKIT_LAB_ANSWERS"), reason="6 minutes: MPKIT_LAB_ANSWERS=1 tries all rows")
def test_a_mistake_loses_points_and_a_right_answer_in_another_form_does_not(bench):
    lab, notes = bench
    rows = [(kind, question, *row) for question, of in TRIED[lab].items() for kind in of for row in of[kind]]
    assert [(row, said) for row in rows if bool(said := notes(*row[1:])) != (row[0] == "wrong")] == []


@pytest.mark.parametrize("lab", SOURCES)
def test_a_release_has_no_solution_and_students_find_it_as_it_is_released(lab):
    source = nbformat.read(SOURCES[lab], as_version=4)
    released, solutions = labs.release(source), [c.source for c in source.cells if is_answer(c)]
    text = nbformat.writes(released)
    assert not [mark for mark in ("BEGIN SOLUTION", "BEGIN HIDDEN", "names_used", "there(", "each(") if mark in text]
    assert not [cell.source for cell in released.cells if cell.source in solutions]
    assert not any(cell.get("outputs") for cell in released.cells)
    assert (labs.HERE.parent / "labs" / SOURCES[lab].name).read_text(encoding="utf-8").rstrip() == text.rstrip()


def test_a_release_of_a_variant_differs_in_one_number(tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "write_releases", None)
    for arguments in (["--variant", "-1"], ["somewhere"]):
        monkeypatch.setattr(sys, "argv", ["labs.py", "release", *arguments])
        with pytest.raises(SystemExit):
            labs.main()
    monkeypatch.undo()
    labs.write_releases(7, tmp_path)
    for path in (tmp_path / "variant-7").iterdir():
        assert handin.variant_of(handin.read(path)) == 7
        plain = (labs.HERE.parent / "labs" / path.name).read_text(encoding="utf-8")
        assert path.read_text(encoding="utf-8") == plain.replace("variant = 0", "variant = 7")


def test_the_notes_for_instructors_state_the_points_of_every_lab():
    notes = (labs.HERE / "INSTRUCTOR.md").read_text(encoding="utf-8")
    assert len(notes.encode()) <= 9000
    for lab, path in SOURCES.items():
        cells = [cell for cell in handin.read(path)["cells"] if mark(cell).get("grade")]
        points = {
            kind: sum(mark(c)["points"] for c in cells if c["cell_type"] == kind) for kind in ("code", "markdown")
        }
        (row,) = [line for line in notes.splitlines() if line.startswith(f"| {lab[3:]} ")]
        assert f"| {points['code']} + {points['markdown']} |" in row


def test_check_tells_a_student_what_stands_against_handing_in(tmp_path, capsys, quick):
    released = Path(labs.HERE.parent, "labs", "lab01_formats.ipynb")
    handed = tmp_path / "lab01_lin.ipynb"
    handed.write_bytes(released.read_bytes())
    assert handin.main([str(handed)]) == 1
    said = capsys.readouterr().out
    assert "lab01_q1_answer is not answered yet" in said
    assert "lab01_q6_text is empty" in said
    assert "NotImplementedError" in said
    nbformat.write(nbformat.read(SOURCES["lab01"], as_version=4), handed)
    assert handin.main([str(handed)]) == 1  # its hidden tests, which only grading can run, are no part of a submission
    notebook = nbformat.read(handed, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "HIDDEN" not in cell.source]
    nbformat.write(notebook, handed)
    capsys.readouterr()
    assert handin.main([str(handed)]) == 0
    assert capsys.readouterr().out == "lab01_lin.ipynb: can be handed in\n"
