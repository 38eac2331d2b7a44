"""A lab as it is handed in: what a notebook's file holds, its answers, its variant; `mpkit check` tells it the student.

The grader reads submissions with the same functions, so that both say the same sentence about the same file.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STUB = "YOUR CODE HERE"
TEXT_STUB = "YOUR ANSWER HERE"
BROKEN = {  # what stands in a file that is no notebook -> what is told of it
    r"\A\s*\Z": "the file is empty: save the notebook once more and hand that in",
    r"\A(PK|%PDF|\udc89PNG|\udcff\udcd8)": "not a notebook: an archive, a PDF or a picture; hand in the .ipynb file",
    r"\A\s*<(?!<)": "not a notebook: HTML; download the .ipynb file itself, not the page that shows it",
    r"(?m)^(<{7} |={7}$|>{7} )": "merge conflict in line {}: keep one of the two versions, then save it in Jupyter",
    r"[\udc80-\udcff]": "line {} is no UTF-8: save it once more in Jupyter",
}


def read(path: Path) -> dict[str, Any]:
    """The notebook in a file, each source one string.

    Raises:  ValueError with one sentence for a file that is no whole notebook: what it is, where, and the way out;
             OSError where it cannot be read.
    """
    raw = path.read_bytes()
    encoding = json.detect_encoding(raw)
    return read_text(raw.decode(encoding, "surrogateescape" if encoding.startswith("utf-8") else "replace"))


def read_text(text: str) -> dict[str, Any]:
    """The notebook that a text is, as `read`; cells of the format before 2015 are found too."""
    for pattern, told in BROKEN.items():
        if found := re.search(pattern, text):
            raise ValueError(told.format(text.count("\n", 0, found.start()) + 1))
    try:
        notebook = json.loads(text)
        sheet = notebook["worksheets"][0] if "worksheets" in notebook else notebook
        return {"cells": [_whole(cell) for cell in sheet["cells"] if isinstance(cell, dict)]}
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"damaged in line {line}, perhaps cut off: save it once more in Jupyter") from None
    except (KeyError, IndexError, TypeError):
        raise ValueError("not a notebook: JSON without cells; hand in the .ipynb file itself") from None


def _whole(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell with a kind, metadata and a source that is one string, whatever an editor has made of it."""
    source = cell.get("source", cell.get("input")) or ""  # a word, or a list of lines, in each of which null may stand
    return {
        "cell_type": str(cell.get("cell_type")),
        "id": cell.get("id"),
        "metadata": cell.get("metadata") or {},
        "source": "".join(line for line in source if isinstance(line, str)),
    }


def mark(cell: Any) -> dict[str, Any]:
    """What nbgrader has written on a cell, or an empty dict."""
    return cell["metadata"].get("nbgrader") or {}


def is_answer(cell: Any) -> bool:
    return bool(mark(cell).get("solution"))


def is_parameters(cell: Any) -> bool:
    """Whether a cell holds nothing but the number of the variant."""
    return re.fullmatch(r"variant *= *\d+", cell["source"].strip()) is not None


def defined(source: str) -> dict[str, Any]:
    """The functions and classes that code defines at its top level, as trees; none where it is no Python."""
    try:
        tree = ast.parse(re.sub(r"^\s*[%!?].*$", "", source, flags=re.M))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def answers(submission: Any, lab: Any) -> tuple[dict[str, list[str]], list[str]]:
    """(the sources that answer each question of the lab, what stands in a strange place, in sentences).

    An answer is known by the name that nbgrader gave it, by its cell's id, or by the function that it defines, so that
    editors which drop one of the three lose nobody a point. What Jupyter does not run counts only where no code does.
    Cells that were added go with the next answer, those below the last one with that.
    """
    questions = {mark(cell)["grade_id"]: cell for cell in lab["cells"] if is_answer(cell)}
    texts = {name for name, cell in questions.items() if cell["cell_type"] != "code"}
    held, found = ({name: list[Any]() for name in questions} for _ in range(2))
    notes, added, last = list[str](), list[str](), list[str]()
    for cell in submission["cells"]:
        own = _of_lab(cell, lab, questions)
        name = mark(own).get("grade_id") if own else None
        if name in questions:
            held[name].append(cell)
        elif own or is_parameters(cell):
            continue
        if cell["cell_type"] == "code" and name not in texts:
            added.append(cell["source"])
            if name:
                found[name] += added
                added, last = [], found[name]
    last += added
    if variant_of(submission) is None and any(map(is_parameters, lab["cells"])):
        notes.append("the cell `variant = ...` is gone, which counts as variant 0: copy it from the lab you were given")
    for name, cells in held.items():
        running = sum(cell["cell_type"] == "code" for cell in cells)
        if not cells:
            notes.append(f"{name} is missing: it was deleted")
        elif name in texts:
            found[name] = [cell["source"] for cell in cells]
        elif not running:
            found[name] = [cells[-1]["source"]]
            notes.append(f"{name} stands in a cell that Jupyter does not run: change it to a code cell")
        elif running > 1:
            notes.append(f"{name} is answered by more than one code cell: all ran, the last one counts")
    return found, notes


def _of_lab(cell: Any, lab: Any, answers_of: dict[str, Any]) -> Any:
    """The cell of the lab that a cell of a submission is; None for one that was added."""
    name, number = mark(cell).get("grade_id"), cell.get("id") or cell["metadata"].get("id")
    for own in lab["cells"]:
        same = bool(own["source"].strip()) and cell["source"].strip() == own["source"].strip()
        if mark(own).get("grade_id") == name if name else (number and own.get("id") == number) or same:
            return own
    written = defined(cell["source"]) if cell["cell_type"] == "code" else {}
    return next((own for own in answers_of.values() if written.keys() & defined(own["source"]).keys()), None)


def variant_of(submission: Any) -> int | None:
    """The number in the cell that says `variant = 7`; None where that cell is gone."""
    return next((int(cell["source"].split("=")[1]) for cell in submission["cells"] if is_parameters(cell)), None)


def lab_of(submission: Any, labs: dict[str, Any], name: str = "") -> str:
    """Which lab a submission is: the one most of whose answers it holds, where several have as many the file's name.

    Raises:  ValueError if it holds no answer of any.
    """
    held = {lab: sum(map(bool, answers(submission, source)[0].values())) for lab, source in labs.items()}
    if not any(held.values()):
        raise ValueError("no cell of it answers a question of a lab: copy the answers into the released notebook")
    return max(held, key=lambda lab: (held[lab], lab[:5] in name.lower()))


def released(folder: Path) -> dict[str, Any]:
    """Name -> notebook of the labs in a folder."""
    return {path.stem: read(path) for path in sorted(folder.glob("lab[0-9][0-9]_*.ipynb"))}


def printable(text: object) -> str:
    """Words of strangers as one line that neither ends a batch nor rewrites a terminal, nor is a formula in a sheet."""
    told = "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in str(text))
    return f"'{told}" if told[:1] in ("=", "+", "-", "@") else told


def findings(path: Path, labs: dict[str, Any]) -> list[str]:
    """What stands against handing a file in, in sentences; an empty list when nothing does.

    Raises:  ValueError, OSError as `read` and `lab_of`.
    """
    submission = read(path)
    lab = labs[lab_of(submission, labs, path.name)]
    found, told = answers(submission, lab)
    told += [f"{name} is not answered yet" for name, sources in found.items() if STUB in "".join(sources)]
    empty = [name for name, sources in found.items() if sources and not "".join(sources).replace(TEXT_STUB, "").strip()]
    told += [f"{name} is empty" for name in empty]
    return told + _run(submission, path.resolve().parent)


def _run(submission: Any, folder: Path) -> list[str]:
    """What goes wrong when the notebook runs from top to bottom in a kernel of its own."""
    import nbformat
    from nbclient import execute

    cells = [nbformat.v4.new_code_cell(cell["source"]) for cell in submission["cells"] if cell["cell_type"] == "code"]
    try:
        execute(nbformat.v4.new_notebook(cells=cells), cwd=str(folder), timeout=300, extra_arguments=["--log-level=40"])
    except Exception as error:  # what an answer raised, or how its kernel ended
        told = f"{getattr(error, 'ename', type(error).__name__)}: {getattr(error, 'evalue', error)}".splitlines()[0]
        ran = sum(cell.execution_count is not None for cell in cells)
        return [f"from top to bottom it stops in code cell {ran}: {told[:200]}"]
    return []


def main(arguments: Sequence[str] = ()) -> int:
    """`mpkit check FILE [...]`: 0 where every file can be handed in."""
    from mpkit.lab import installed_lessons

    parser = argparse.ArgumentParser(prog="mpkit check", description="Can a lab be handed in as it is?")
    parser.add_argument("files", nargs="+", type=Path, help="notebooks of labs")
    labs = released((installed_lessons() or Path(__file__).resolve().parents[1] / "notebooks") / "labs")
    wrong = 0
    for path in parser.parse_args(list(arguments)).files:
        try:
            told = findings(path, labs)
        except (ValueError, OSError) as error:
            told = [str(error)]
        head = f"{path.name}: {f'{len(told)} to look at' if told else 'can be handed in'}"
        print(*map(printable, (head, *told)), sep="\n  ")
        wrong += bool(told)
    return int(wrong > 0)
