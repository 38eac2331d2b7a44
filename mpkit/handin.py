"""A lab as it is handed in: what a notebook's file holds, its answers, its variant; `mpkit check` tells it the student.

The grader reads submissions with the same functions, so that both say the same sentence about the same file.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STUB = "YOUR CODE HERE"
TEXT_STUB = "YOUR ANSWER HERE"
SIGNS = {b"PK": "a zip archive", b"%PDF": "a PDF", b"\x89PNG": "a picture", b"\xff\xd8": "a picture"}


@dataclass
class Answers:
    """What a submission says to each question of a lab; `notes` are sentences about what stands in a strange place."""

    code: dict[str, list[str]] = field(default_factory=dict)  # question -> its cells in their order
    text: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> dict[str, Any]:
    """The notebook in a file, each source one string.

    Raises:  ValueError with one sentence for a file that is no whole notebook: what it is, where, and the way out;
             OSError where it cannot be read.
    """
    raw = path.read_bytes()
    if not raw.strip():
        raise ValueError("the file is empty: save the notebook once more and hand that in")
    if kind := next((kind for sign, kind in SIGNS.items() if raw.startswith(sign)), ""):
        raise ValueError(f"not a notebook: {kind}; hand in the .ipynb file itself")
    encoding = json.detect_encoding(raw)
    try:
        return read_text(raw.decode(encoding))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is no {encoding.upper()}: save it once more in Jupyter") from None


def read_text(text: str) -> dict[str, Any]:
    """The notebook that a text is, as `read`; cells of the format before 2015 are found too."""
    if re.match(r"\s*<(?!<)", text):
        raise ValueError("not a notebook: HTML; download the .ipynb file itself, not the page that shows it")
    if conflict := re.search(r"^(<{7} |={7}$|>{7} )", text, re.M):
        line = text.count("\n", 0, conflict.start()) + 1
        raise ValueError(f"merge conflict in line {line}: keep one of the two versions there, then save it in Jupyter")
    try:
        notebook = json.loads(text)
    except RecursionError:
        raise ValueError("not a notebook: it is nested too deeply; save it once more in Jupyter") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"damaged in line {line}, perhaps cut off: save it once more in Jupyter") from None
    try:
        sheet = notebook["worksheets"][0] if "worksheets" in notebook else notebook
        return {"cells": [_whole(cell) for cell in sheet["cells"] if isinstance(cell, dict)]}
    except (KeyError, IndexError, TypeError):
        raise ValueError("not a notebook: JSON without cells; hand in the .ipynb file itself") from None


def _whole(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell with a kind, metadata and a source that is one string, whatever an editor has made of it."""
    source, metadata = cell.get("source", cell.get("input")), cell.get("metadata")
    lines = source if isinstance(source, list) else [source]
    return {
        "cell_type": str(cell.get("cell_type")),
        "id": cell.get("id"),
        "metadata": metadata if isinstance(metadata, dict) else {},
        "source": "".join(line for line in lines if isinstance(line, str)),
    }


def mark(cell: Any) -> dict[str, Any]:
    """What nbgrader has written on a cell, or an empty dict."""
    found = cell["metadata"].get("nbgrader")
    return found if isinstance(found, dict) else {}


def is_answer(cell: Any) -> bool:
    return bool(mark(cell).get("solution"))


def is_parameters(cell: Any) -> bool:
    """Whether a cell holds nothing but the number of the variant."""
    return re.fullmatch(r"variant = \d+", cell["source"].strip()) is not None


def defined(source: str) -> set[str]:
    """The functions and classes that code defines at its top level; none where it is no Python."""
    try:
        tree = ast.parse(re.sub(r"^\s*[%!?].*$", "", source, flags=re.M))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}


def answers(submission: Any, lab: Any) -> Answers:
    """The cells of a submission that answer each question of the lab; cells that were added go with the next answer.

    An answer is known by the name that nbgrader gave it, by its cell's id, or by the function that it defines, so that
    editors which drop one of the three lose nobody a point. What Jupyter does not run counts only where no code does.
    """
    questions = {mark(cell)["grade_id"]: cell for cell in lab["cells"] if is_answer(cell)}
    found, held = Answers(), {name: list[Any]() for name in questions}
    added, last = list[str](), ""
    for cell in submission["cells"]:
        own, code = _of_lab(cell, lab, questions), cell["cell_type"] == "code"
        name = mark(own).get("grade_id", "") if own else ""
        if name in questions:
            held[name].append(cell)
            if code and questions[name]["cell_type"] == "code":
                found.code[name] = [*found.code.get(name, []), *added, cell["source"]]
                added, last = [], name
        elif own is None and code and not is_parameters(cell):
            added.append(cell["source"])
    if last:  # what was added below the last answer
        found.code[last] += added
    for name, cells in held.items():
        running = sum(cell["cell_type"] == "code" for cell in cells)
        if not cells:
            found.notes.append(f"{name} is missing: it was deleted")
        elif questions[name]["cell_type"] != "code":
            found.text[name] = "\n\n".join(cell["source"] for cell in cells if cell["source"])
        elif not running:
            found.code[name] = [cells[-1]["source"]]
            found.notes.append(f"{name} stands in a cell that Jupyter does not run: change it to a code cell")
        elif running > 1:
            found.notes.append(f"{name} is answered by more than one code cell: all ran, the last one counts")
    return found


def _of_lab(cell: Any, lab: Any, answers_of: dict[str, Any]) -> Any:
    """The cell of the lab that a cell of a submission is; None for one that was added."""
    name, number = mark(cell).get("grade_id"), cell.get("id") or cell["metadata"].get("id")
    for own in lab["cells"]:
        same = bool(own["source"].strip()) and cell["source"].strip() == own["source"].strip()
        if mark(own).get("grade_id") == name if name else (number and own.get("id") == number) or same:
            return own
    written = defined(cell["source"]) if cell["cell_type"] == "code" else set()
    return next((own for own in answers_of.values() if written & defined(own["source"])), None)


def variant_of(submission: Any) -> int | None:
    """The number in the cell that says `variant = 7`; None where that cell is gone."""
    found = [cell["source"] for cell in submission["cells"] if is_parameters(cell)]
    return int(found[0].split("=")[1]) if found else None


def lab_of(submission: Any, labs: dict[str, Any], name: str = "") -> str:
    """Which lab a submission is: the one most of whose answers it holds, where several have as many the file's name.

    Raises:  ValueError if it holds no answer of any.
    """
    found = {lab: answers(submission, source) for lab, source in labs.items()}
    held = {lab: len(each.code) + len(each.text) for lab, each in found.items()}
    if not any(held.values()):
        raise ValueError("no cell of it answers a question of a lab: copy the answers into the released notebook")
    return max(held, key=lambda lab: (held[lab], lab[:5] in name.lower()))


def released(folder: Path) -> dict[str, Any]:
    """Name -> notebook of the labs in a folder."""
    return {path.stem: read(path) for path in sorted(folder.glob("lab[0-9][0-9]_*.ipynb"))}


def findings(path: Path, labs: dict[str, Any]) -> list[str]:
    """What stands against handing a file in, in sentences; an empty list when nothing does.

    Raises:  ValueError, OSError as `read` and `lab_of`.
    """
    submission = read(path)
    lab = labs[lab_of(submission, labs, path.name)]
    found = answers(submission, lab)
    told = list(found.notes)
    told += [f"{name} is not answered yet" for name, cells in found.code.items() if STUB in cells[-1]]
    told += [f"{name} is empty" for name, text in found.text.items() if not text.replace(TEXT_STUB, "").strip()]
    if variant_of(submission) is None and any(map(is_parameters, lab["cells"])):
        told.append("the cell `variant = ...` is gone: copy it again from the lab that you were given")
    return told + _run(path)


def _run(path: Path) -> list[str]:
    """What goes wrong when the notebook runs from top to bottom in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    code = [cell["source"] for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in code])
    try:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.resolve().parent)}}).execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        told = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        ran = sum(cell.execution_count is not None for cell in notebook.cells)
        return [f"from top to bottom it stops in code cell {ran}: {told.strip().splitlines()[0][:200]}"]
    return []


def main(arguments: Sequence[str] = ()) -> int:
    """`mpkit check FILE [...]`: 0 where every file can be handed in."""
    from mpkit.lab import installed_lessons, shipped_lessons

    parser = argparse.ArgumentParser(prog="mpkit check", description="Can a lab be handed in as it is?")
    parser.add_argument("files", nargs="+", type=Path, help="notebooks of labs")
    options = parser.parse_args(list(arguments))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        labs = released((installed_lessons() or shipped_lessons(Path(scratch))) / "labs")
    for path in options.files:
        try:
            told = findings(path, labs)
        except (ValueError, OSError) as error:
            told = [str(error)]
        print(f"{path.name}: {'can be handed in' if not told else f'{len(told)} to look at'}")
        print(*(f"  {sentence}" for sentence in told), sep="\n", end="\n" if told else "")
        wrong += bool(told)
    return int(wrong > 0)
