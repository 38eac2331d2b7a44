"""Release and grade the labs without a server: `python notebooks/instructor/labs.py release|grade ...`.

    release [--variant N]                    what students get: no solutions, no hidden tests, no results
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
os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    import grading
    import nbformat
    import pandas as pd

    from mpkit import handin
except ModuleNotFoundError as missing:
    sys.exit(f"mpkit: {missing}; first run make lab once, then: source .venv/bin/activate")

COLUMNS = ("file", "lab", "variant", *map(str, range(1, 10)), "total", "of", "status")


def release(notebook: Any, variant: int = 0) -> Any:
    """The student's version of a source, by nbgrader's own preprocessors, with the number of its variant."""
    from nbgrader.preprocessors import ClearHiddenTests, ClearOutput, ClearSolutions, LockCells

    student = nbformat.from_dict(notebook)
    for step in (LockCells, ClearSolutions, ClearOutput, ClearHiddenTests):
        student, _ = step().preprocess(student, {})
    for cell in student.cells:
        cell.source = f"variant = {variant}" if handin.is_parameters(cell) else cell.source.rstrip("\n")
    return student


def write_releases(variant: int, labs: Path = HERE.parent / "labs") -> None:
    """What students get of every lab, into a folder, or into variant-N in it."""
    to = labs / f"variant-{variant}" if variant else labs
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("lab[0-9][0-9]_*.ipynb")):
        text = nbformat.writes(release(nbformat.read(path, as_version=4), variant))
        (to / path.name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        print(f"released {to.name}/{path.name}")


def graded_row(path: Path, labs: dict[str, Any], given_out: int | None, seconds: float) -> tuple[dict[str, Any], Any]:
    """(what the table says of one file, what was graded or None)."""
    try:
        submission = handin.read(path)
        lab = handin.lab_of(submission, labs, path.name)
        found = grading.grade(submission, labs[lab], seconds=seconds, hidden=(HERE, path.resolve().parent))
    except Exception as error:  # one bad file must not cost the others their points
        return {"status": str(error) if isinstance(error, ValueError | OSError | RuntimeError) else repr(error)}, None
    row: Any = {"lab": lab, "variant": found.variant, "total": found.points.total(), "of": found.possible.total()}
    row |= {name.rpartition("q")[2]: points for name, points in found.points.items()}
    other = [f"it is variant {found.variant}, not {given_out}"] if given_out not in (None, found.variant) else []
    return row | {"status": "; ".join([*other, *found.notes]) or "graded"}, found


def files_in(named: list[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file that was named, and of every one in a named folder that is not hidden."""
    for place in named:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            name = path.relative_to(place if place.is_dir() else place.parent)
            if path.is_file() and (path == place or not any(part.startswith(".") for part in name.parts)):
                yield str(name), path


def texts_of(found: dict[str, Any], labs: dict[str, Any]) -> str:
    """Every free text beside the rubric of its question, as Markdown; empty ones are marked."""
    parts = []
    for cell in (cell for lab in labs.values() for cell in lab["cells"] if handin.is_answer(cell)):
        name = handin.mark(cell)["grade_id"].rpartition("_")[0]
        texts = {file: graded.texts[name] for file, graded in found.items() if name in graded.texts}
        if texts:
            rubric = cell["source"].replace("### BEGIN SOLUTION", "").replace("### END SOLUTION", "").strip()
            parts.append(f"# {name}: {handin.mark(cell)['points']:g} points\n\n{rubric}")
        for file, text in texts.items():
            lines = text.replace(handin.TEXT_STUB, "").strip().splitlines()
            told = "\n".join(f"> {handin.printable(line)}" for line in lines)
            parts.append(f"## {file}\n\n{told or '**empty**'}")
    return "\n\n".join(parts) + "\n"


def grade(named: list[Path], given_out: int | None, table: Path | None, seconds: float) -> None:
    """Grade every file; its row is shown, and the table written anew, as soon as it is known."""
    labs, rows, found = handin.released(HERE), [], {}
    for file, path in files_in(named):
        row, graded = graded_row(path, labs, given_out, seconds)
        rows.append({key: handin.printable(value) for key, value in ({"file": file} | row).items()})
        name, status = rows[-1]["file"], rows[-1]["status"]
        print(f"{name}: {row['total']:g} of {row['of']:g}, {status}" if graded else f"{name}: {status}", flush=True)
        found |= {name: graded} if graded else {}
        if table:
            pd.DataFrame(rows, columns=COLUMNS).to_csv(table, index=False, encoding="utf-8-sig")
            table.with_suffix(".texts.md").write_text(texts_of(found, labs), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("release", "grade"))
    parser.add_argument("submissions", nargs="*", type=Path, help="files and folders to grade")
    parser.add_argument("--variant", type=int, help="to release (default 0: as they stand), or that was given out")
    parser.add_argument("--csv", type=Path, help="the table, for a spreadsheet; free texts go beside it")
    parser.add_argument("--seconds", type=float, default=60, help="a cell is stopped after this time")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.command == "release":
        variant = options.variant or 0
        if variant < 0 or options.submissions:
            parser.error("release takes nothing but --variant, a whole number from 0")
        return write_releases(variant)
    missing = ", ".join(str(path) for path in options.submissions if not path.exists())
    if missing or not options.submissions:
        parser.error(f"grade needs files and folders that are there, got {handin.printable(missing) or 'none'}")
    if not grading.walls():
        print("this system shuts no process in: grade strangers' files in a container (INSTRUCTOR.md)", file=sys.stderr)
    grade(options.submissions, options.variant, options.csv, options.seconds)


if __name__ == "__main__":
    main()
