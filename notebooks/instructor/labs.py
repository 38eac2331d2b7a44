"""Release and grade the labs without a server: `python notebooks/instructor/labs.py release|grade ...`.

The sources beside this file carry nbgrader's cell metadata (schema 3), so nbgrader can run a course with them as they
are. This script does the two steps that a small course needs, with nbformat alone; answers run in `sandbox.py`:

    release [--variant N] [--to FOLDER]          what students get: no solutions, no hidden tests, no outputs
    grade SUBMISSION [...] [--variant N] [--csv] points per question, by the tests of the source, never the submission's

A release goes to notebooks/labs. That of a variant (`variants.py`: other formats, numbers, traces, faults) goes to
notebooks/labs/variant-N, and its solutions go to notebooks/instructor/variant-N.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import errno
import os
import re
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import nbformat
except ModuleNotFoundError as missing:
    sys.exit(f"mpkit: {missing}; first run make lab once, then: source .venv/bin/activate")

HERE = Path(__file__).resolve().parent
STUB = {"code": "# YOUR CODE HERE\nraise NotImplementedError()", "markdown": "YOUR ANSWER HERE"}
_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION$.*?^[ \t]*### END SOLUTION$", re.M | re.S)
_HIDDEN = re.compile(r"^[ \t]*### BEGIN HIDDEN TESTS$.*?^[ \t]*### END HIDDEN TESTS$\n?", re.M | re.S)


@dataclass(frozen=True)
class Score:
    """Points of one graded cell; `note` is the message of the failed check, or "by hand" for free text."""

    grade_id: str
    points: float | None
    possible: float
    note: str = ""


def sources() -> list[Path]:
    """The instructor's labs."""
    return sorted(HERE.glob("lab[0-9][0-9]_*.ipynb"))


def source(path: Path, variant: int = 0) -> Any:
    """The instructor's notebook of one lab, as it stands or in a variant."""
    notebook = nbformat.read(path, as_version=4)
    if not variant:
        return notebook
    from variants import varied  # here: grading without variants needs nbformat alone

    return varied(notebook, variant)


def mark(cell: Any) -> dict[str, Any]:
    """The nbgrader metadata of a cell, or an empty dict."""
    found = cell.metadata.get("nbgrader")
    return found if isinstance(found, dict) else {}


def release(notebook: Any) -> Any:
    """The student version of a source: solutions become stubs, hidden tests and outputs go, prompts are locked.

    Raises:  ValueError if a solution or hidden-test region is not closed, or an answer cell has no region.
    """
    student = deepcopy(notebook)
    for cell in student.cells:
        if mark(cell).get("solution"):
            if cell.cell_type == "markdown" and "### BEGIN SOLUTION" not in cell.source:
                cell.source = STUB["markdown"]
            elif not _SOLUTION.search(cell.source):
                raise ValueError(f"{mark(cell)['grade_id']} needs ### BEGIN SOLUTION and ### END SOLUTION lines")
            cell.source = _SOLUTION.sub(lambda m, c=cell: _indented(STUB[c.cell_type], m.group(1)), cell.source)
        if mark(cell).get("grade") and not mark(cell).get("solution"):
            cell.source = _HIDDEN.sub("", cell.source).rstrip("\n")
        if mark(cell).get("locked"):
            cell.metadata["editable"] = cell.metadata["deletable"] = False
        if re.search(r"### (BEGIN|END) (SOLUTION|HIDDEN TESTS)", cell.source):
            raise ValueError(f"{mark(cell).get('grade_id', cell.id)} has a BEGIN or END line without its partner")
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return student


def _indented(text: str, indent: str) -> str:
    return "\n".join(indent + line for line in text.splitlines())


def grade(submission: Any, source: Any, timeout: int = 60) -> list[Score]:
    """Run the submission's own cells with the source's tests, and score every graded cell.

    A test cell is all or nothing. Given cells that the student edited or deleted (tests, prompts, set-up) are restored
    from the source; cells that the student added run behind the answer in front of them, or before the one that follows
    (`_parts`). A cell that takes longer than `timeout` seconds is interrupted and fails; where an answer ends its
    process, what follows earns nothing.
    All of it runs in a sandbox, see `sandbox.py`: an answer may use of mpkit what the solution of its question uses.

    Raises:  ValueError if an answer cell of the source is missing in the submission; RuntimeError if the lab's own
             set-up cell fails, which is the grading machine's fault and must cost nobody a point.
    """
    import sandbox  # here: a release, also where the wheel is built, needs nbformat alone

    merged, solutions = _merged(submission, source), _solutions(source)
    cells = [cell for cell in merged.cells if cell.cell_type == "code"]
    given = {cell.id for cell in source.cells}
    steps = [_step(cell, given, solutions) for cell in cells]
    trees = [sandbox.ast.parse(text) for text in solutions.values()]
    expected = {name: sandbox.names_in(tree) for tree in trees for name in sandbox.bound(tree)}
    ends = sandbox.run(steps, expected, timeout)
    if ends[0]:
        raise RuntimeError(f"the set-up cell of the lab fails here ({ends[0]}); grade where mpkit[lab] is installed")
    notes, refused, before = {}, "", ""
    for cell, step, end in zip(cells, steps, ends):
        if step.kind == "answer":  # of the cells of one answer, the last that failed
            refused = end or (refused if before == "answer" else "")
        before = step.kind
        notes[cell.id] = "did not run: an answer above ended the process" if end is None else end
        if end and step.kind == "test" and refused:
            notes[cell.id] = f"{end} (the answer: {refused})"
    return [_scored(cell, notes.get(cell.id, "")) for cell in merged.cells if mark(cell).get("grade")]


def _solutions(source: Any) -> dict[str, str]:
    """Question -> the code that answers it in the source."""
    marked = [(mark(cell), cell) for cell in source.cells if cell.cell_type == "code"]
    return {m["grade_id"]: cell.source for m, cell in marked if m.get("solution")}


def _step(cell: Any, given: set[str], solutions: dict[str, str]) -> Any:
    from sandbox import Step

    if mark(cell).get("solution"):
        return Step("answer", cell.source, solutions[mark(cell)["grade_id"]])
    if cell.id not in given:
        return Step("answer", cell.source)
    return Step("test" if mark(cell).get("grade") else "given", cell.source)


def _merged(submission: Any, source: Any) -> Any:
    """The source with the student's answers, and with the code cells that the student added around them."""
    parts, merged, cells = _parts(submission, source), deepcopy(source), []
    if not parts:
        raise ValueError(
            "no cell of it is an answer of this lab: it is another lab, or its cells were copied into a new notebook "
            "(copy the answers into the released one)"
        )
    for cell in merged.cells:
        if mark(cell).get("solution"):
            name = mark(cell)["grade_id"]
            if name not in parts:
                raise ValueError(
                    f"the submission has no cell {name}: it was deleted; copy it again from the released notebook"
                )
            *first, (_, cell.source) = parts[name]
            cells += [nbformat.v4.new_code_cell(text, metadata=_own(cell) if own else {}) for own, text in first]
        cells.append(cell)
    merged.cells = cells
    for cell in (c for c in merged.cells if c.cell_type == "code"):
        cell.outputs, cell.execution_count = [], None
    return merged


def _own(cell: Any) -> dict[str, Any]:
    """The metadata of one more cell of the same answer, which earns nothing by itself."""
    return {"nbgrader": {**mark(cell), "grade": False}}


def _parts(submission: Any, source: Any) -> dict[str, list[tuple[bool, str]]]:
    """Answer -> its cells in their order: (whether the cell is the answer's own, its text); the last is.

    An answer that was split or copied has several of its own, and so it has those that the student added between it
    and the lab's next cell. What was added elsewhere is not its own and stands before it.
    """
    parts: dict[str, list[tuple[bool, str]]] = {}
    waiting, name = list[tuple[bool, str]](), ""
    for cell in submission.cells:
        found = _of_lab(cell, source)
        if found is not None and mark(found).get("solution"):
            name = mark(found)["grade_id"]
            if found.cell_type == "code":
                parts[name] = [*parts.get(name, []), *waiting, (True, cell.source)]
                waiting = []
            else:  # what stands around it is none of its text
                parts[name], name = [(True, cell.source)], ""
        elif found is not None:
            name = ""
        elif cell.cell_type == "code":
            (parts[name] if name else waiting).append((bool(name), cell.source))
    return parts


def _of_lab(cell: Any, source: Any) -> Any:
    """The cell of the source that a cell of a submission is, None for one that was added.

    It is known by the name that nbgrader gave it; where an editor has dropped that, by its id, which Colab keeps among
    the metadata; and a cell without a name also by its text, because editors that know no ids drop them.
    """
    name, number = mark(cell).get("grade_id"), cell.get("id", cell.metadata.get("id"))
    for own in source.cells:
        same = cell.source.strip() == own.source.strip() and not mark(own)
        if mark(own).get("grade_id") == name if name else own.id == number or same:
            return own
    return None


def _scored(cell: Any, note: str = "") -> Score:
    name, possible = mark(cell)["grade_id"], mark(cell)["points"]
    if mark(cell).get("solution"):
        return Score(name, None, possible, "by hand")
    return Score(name, 0 if note else possible, possible, note)


def source_of(submission: Path) -> Path:
    """The source that a submission was released from: the file of the same name, or beginning with the same labNN."""
    found = [s for s in sources() if s.stem[:5] in submission.stem.lower()]
    if len(found) != 1:
        names = ", ".join(s.stem for s in sources())
        raise ValueError(f"{submission.name} must carry the name of one lab ({names}), as in lab01_formats_lin.ipynb")
    return found[0]


def variant_of(submission: Any, given_out: int | None = None) -> int:
    """The variant that a submission was released as; ValueError if another one was given out."""
    number = submission.metadata.get("mpkit_variant", 0)
    if type(number) is not int or number < 0:
        raise ValueError(f"a variant is a whole number from 0, and the file says {number!r}")
    if given_out not in (None, number):
        raise ValueError(f"it is variant {number}, and variant {given_out} was given out")
    return number


def write_releases(variant: int, to: Path) -> None:
    """What students get of every lab; of a variant also its sources with solutions, beside this file. All or nothing.

    Raises:  ValueError for a variant below 0, a folder that holds solutions, or a source that cannot be released;
             OSError, which names the file, where one cannot be written: then all files are as they were.
    """
    if variant < 0:
        raise ValueError(f"a variant is a whole number from 0, got {variant}; 0 is the labs as they stand")
    solved = HERE / f"variant-{variant}"
    if to.resolve() in (HERE, solved):
        raise ValueError(f"{to} holds solutions, which the released labs would replace; name another folder")
    texts, released = {}, []
    for path in sources():
        notebook = source(path, variant)
        texts[to / path.name] = nbformat.writes(release(notebook))
        if variant:
            texts[solved / path.name] = nbformat.writes(notebook)
        released.append(f"released {to.name}/{path.name}")
    write_all(texts)
    print(*released, sep="\n")
    if variant:
        print(f"solutions are in {solved.parent.name}/{solved.name}")


def write_all(texts: dict[Path, str]) -> None:
    """Write all files, or none: first a draft beside each place, then every draft takes its place.

    Raises:  OSError, which names the file that cannot be written: then all files and folders are as they were.
    """
    made: list[Path] = []
    before: dict[Path, bytes | None] = {}
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in texts}
    path = Path()
    try:
        for path, text in texts.items():
            for folder in reversed([f for f in path.parents if not f.exists()]):
                folder.mkdir()
                made.append(folder)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder stands in its place")
            drafts[path].write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        for path, draft in drafts.items():
            old = path.read_bytes() if path.exists() else None
            os.replace(draft, path)
            before[path] = old
    except BaseException as error:
        for done, old in before.items():
            done.unlink() if old is None else done.write_bytes(old)
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()
        for folder in reversed(made):
            folder.rmdir()
        if isinstance(error, OSError):
            raise type(error)(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_release = commands.add_parser("release", help="write the student versions")
    to_release.add_argument("--variant", type=int, default=0, help="its number; 0 is the labs as they stand")
    to_release.add_argument("--to", type=Path, help="folder for them (default: notebooks/labs, or variant-N in it)")
    to_grade = commands.add_parser("grade", help="points of submissions")
    to_grade.add_argument("submissions", nargs="+", type=Path)
    to_grade.add_argument(
        "--variant", type=int, help="refuse submissions of another one (default: grade each as it says)"
    )
    to_grade.add_argument("--csv", action="store_true", help="one line per graded cell, for a spreadsheet")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.command == "release":
        usual = HERE.parent / "labs"
        to = options.to or (usual / f"variant-{options.variant}" if options.variant else usual)
        try:
            write_releases(options.variant, to)
        except (OSError, ValueError) as error:
            print(f"nothing was released: {error}", file=sys.stderr)
            return 1
        return 0
    if options.csv:
        csv.writer(sys.stdout).writerow(["submission", "cell", "points", "possible", "note"])
    ungraded, names = 0, names_of(options.submissions)
    for path, name in names.items():
        try:
            submission = nbformat.read(path, as_version=4)
            scores = grade(submission, source(source_of(path), variant_of(submission, options.variant)))
        except Exception as error:  # one bad file must not cost the others their points
            told = f"{type(error).__name__}: " * (not isinstance(error, ValueError | OSError | RuntimeError)) + str(
                error
            )
            print(f"{name}{path.suffix} was not graded: {told}".splitlines()[0], file=sys.stderr, flush=True)
            ungraded += 1
            continue
        show(name, scores, options.csv)
    return int(ungraded > 0)


def names_of(submissions: list[Path]) -> dict[Path, str]:
    """What each submission is called: its file's name, with the folders where others have the same.

    >>> list(names_of([Path("ann/lab01.ipynb"), Path("bob/lab01.ipynb"), Path("lab01_eve.ipynb")]).values())
    ['ann/lab01', 'bob/lab01', 'lab01_eve']
    """
    stems = [path.stem for path in submissions]
    return {p: p.stem if stems.count(p.stem) == 1 else p.with_suffix("").as_posix() for p in submissions}


def show(name: str, scores: list[Score], as_csv: bool) -> None:
    """One submission on the screen, or as lines for a spreadsheet."""
    if as_csv:
        for s in scores:
            points = "" if s.points is None else s.points
            csv.writer(sys.stdout).writerow([name, s.grade_id, points, s.possible, s.note])
        return
    for s in scores:
        if s.note:
            print(f"  {s.grade_id}: {s.points or 0:g} of {s.possible:g}  {s.note}")
    automatic = [s for s in scores if s.points is not None]
    total, possible = sum(s.points or 0 for s in automatic), sum(s.possible for s in automatic)
    by_hand = sum(s.possible for s in scores if s.points is None)
    print(f"{name}: {total:g} of {possible:g} points, {by_hand:g} more to grade by hand", flush=True)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:  # nobody reads on, as behind `| head`; Python would write the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
