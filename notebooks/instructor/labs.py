"""Release and grade the labs without a server: `python notebooks/instructor/labs.py release|grade ...`.

    release [--variant N] [--to FOLDER]      what students get: no solutions, no hidden tests, no results
    grade FOLDER_OR_FILE [...] [--csv FILE]  a row for each file: points of each question, total, status in words

The sources beside this file carry nbgrader's marks (schema 3). A release goes to notebooks/labs, that of a variant to
notebooks/labs/variant-N. Answers run as `grading.py` says; free texts are written beside the table, for reading.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
try:
    import nbformat
    import pandas as pd

    from mpkit import handin
except ModuleNotFoundError as missing:
    sys.exit(f"mpkit: {missing}; first run make lab once, then: source .venv/bin/activate")

COLUMNS = ("file", "lab", "variant", *map(str, range(1, 10)), "total", "of", "by hand", "status")


def release(notebook: Any, variant: int = 0) -> Any:
    """The student's version of a source, by nbgrader's own preprocessors, with the number of its variant."""
    from nbgrader.preprocessors import ClearHiddenTests, ClearOutput, ClearSolutions, LockCells

    student = nbformat.from_dict(notebook)
    for step in (LockCells, ClearSolutions, ClearOutput, ClearHiddenTests):
        student, _ = step().preprocess(student, {})
    for cell in student.cells:
        cell.source = f"variant = {variant}" if handin.is_parameters(cell) else cell.source.rstrip("\n")
    return student


def write_releases(variant: int, to: Path) -> None:
    """What students get of every lab, each made before the first is written.

    Raises:  ValueError for the folder of the sources, or a variant below 0.
    """
    if variant < 0:
        raise ValueError(f"a variant is a whole number from 0, got {variant}; 0 is the labs as they stand")
    if to.resolve() == HERE:
        raise ValueError(f"{to} holds the solutions, which the released labs would replace; name another folder")
    sources = {path.name: nbformat.read(path, as_version=4) for path in sorted(HERE.glob("lab[0-9][0-9]_*.ipynb"))}
    texts = {to / name: nbformat.writes(release(notebook, variant)) for name, notebook in sources.items()}
    to.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        print(f"released {path.parent.name}/{path.name}")


def graded_row(path: Path, labs: dict[str, Any], given_out: int | None, seconds: float) -> tuple[dict[str, Any], Any]:
    """(what the table says of one file, what was graded or None)."""
    import grading

    try:
        submission = handin.read(path)
        lab = handin.lab_of(submission, labs, path.name)
        found = grading.grade(submission, lab, labs[lab], seconds=seconds, hidden=(HERE, path.resolve().parent))
    except Exception as error:  # one bad file must not cost the others their points
        known = isinstance(error, ValueError | OSError | RuntimeError)
        return {"status": f"{'' if known else type(error).__name__ + ': '}{error}"}, None
    sums = {"total": found.points, "of": found.possible, "by hand": found.by_hand}
    row = {"lab": lab, "variant": "" if found.variant is None else found.variant}
    row |= {name.rpartition("q")[2]: f"{points:g}" for name, points in found.points.items()}
    row |= {column: f"{sum(points.values()):g}" for column, points in sums.items()}
    notes = list(found.notes)
    if found.variant is None:
        notes.insert(0, "the cell `variant = ...` is gone: graded as variant 0")
    elif given_out not in (None, found.variant):
        notes.insert(0, f"it is variant {found.variant}, and variant {given_out} was given out")
    return row | {"status": "; ".join(notes) or "graded"}, found


def files_in(named: list[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file that was named, and of every one in a named folder that is not hidden."""
    for place in named:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            name = str(path.relative_to(place)) if place.is_dir() else path.name
            if path.is_file() and (path == place or not any(part.startswith(".") for part in Path(name).parts)):
                yield name, path


def printable(text: object) -> str:
    """Words of strangers as one line that neither ends a batch nor rewrites a terminal, nor is a formula in a sheet."""
    told = "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in str(text))
    return f"'{told}" if told[:1] in ("=", "+", "@") else told


def texts_of(found: dict[str, Any], labs: dict[str, Any]) -> str:
    """Every free text beside the rubric of its question, as Markdown; empty ones are marked."""
    parts = []
    for lab in sorted({graded.lab for graded in found.values()}):
        for cell in labs[lab]["cells"]:
            if not (handin.is_answer(cell) and cell["cell_type"] == "markdown"):
                continue
            name = handin.mark(cell)["grade_id"].rpartition("_")[0]
            rubric = cell["source"].replace("### BEGIN SOLUTION", "").replace("### END SOLUTION", "").strip()
            parts.append(f"# {name}: {handin.mark(cell)['points']:g} points\n\n{rubric}")
            for file, graded in found.items():
                text = graded.texts.get(name, "").replace(handin.TEXT_STUB, "").strip()
                lines = "\n".join(f"> {printable(line)}" for line in text.splitlines())
                parts += [f"## {file}\n\n{lines or '**empty**'}"] if graded.lab == lab else []
    return "\n\n".join(parts) + "\n"


def grade(named: list[Path], given_out: int | None, table: Path | None, seconds: float) -> None:
    """Grade every file; its row is shown, and the table written anew, as soon as it is known."""
    labs, rows, found = handin.released(HERE), [], {}
    for file, path in files_in(named):
        row, graded = graded_row(path, labs, given_out, seconds)
        rows.append({key: printable(value) for key, value in ({"file": file} | row).items()})
        name, status = rows[-1]["file"], rows[-1]["status"]
        print(f"{name}: {row['total']} of {row['of']}, {status}" if graded else f"{name}: {status}", flush=True)
        if graded:
            found[name] = graded
        if table:
            pd.DataFrame(rows, columns=COLUMNS).to_csv(table, index=False, encoding="utf-8-sig")
            table.with_suffix(".texts.md").write_text(texts_of(found, labs), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_release = commands.add_parser("release", help="write the student versions")
    to_release.add_argument("--variant", type=int, default=0, help="its number; 0 is the labs as they stand")
    to_release.add_argument("--to", type=Path, help="folder for them (default: notebooks/labs, or variant-N in it)")
    to_grade = commands.add_parser("grade", help="points of submissions")
    to_grade.add_argument("submissions", nargs="+", type=Path, help="folders and files")
    to_grade.add_argument("--variant", type=int, help="the one that was given out; others are named in their row")
    to_grade.add_argument("--csv", type=Path, help="the table, for a spreadsheet; free texts go beside it")
    to_grade.add_argument("--seconds", type=float, default=60, help="a cell is stopped after this time")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.command == "release":
        usual = HERE.parent / "labs" / (f"variant-{options.variant}" if options.variant else "")
        try:
            write_releases(options.variant, options.to or usual)
        except (OSError, ValueError) as error:
            sys.exit(f"nothing was released: {error}")
        return 0
    if missing := [str(path) for path in options.submissions if not path.exists()]:
        parser.error(f"there is no {printable(', '.join(missing))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import grading

    if not grading.walls():
        print("this system shuts no process in: grade strangers' files in a container (INSTRUCTOR.md)", file=sys.stderr)
    grade(options.submissions, options.variant, options.csv, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
