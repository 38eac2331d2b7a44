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
_FIRST_BYTES = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


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
    for sign, kind in SIGNS.items():
        if raw.startswith(sign):
            raise ValueError(f"not a notebook: {kind}; hand in the .ipynb file itself")
    return read_text(_decoded(raw))


def read_text(text: str) -> dict[str, Any]:
    """The notebook that a text is, as `read`."""
    if text.lstrip().startswith("<") and not text.startswith("<<<<<<<"):
        raise ValueError("not a notebook: HTML; download the .ipynb file itself, not the page that shows it")
    conflict = re.search(r"^(<{7} |={7}$|>{7} )", text, re.M)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        raise ValueError(f"merge conflict in line {line}: keep one of the two versions there, then save it in Jupyter")
    try:
        notebook = json.loads(text)
    except RecursionError:
        raise ValueError("not a notebook: it is nested too deeply; save it once more in Jupyter") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"damaged in line {line}, perhaps cut off: save it once more in Jupyter") from None
    return _whole(notebook)


def _decoded(raw: bytes) -> str:
    """The text of a file in whichever encoding an editor has saved it."""
    encoding = next((name for first, name in _FIRST_BYTES if raw.startswith(first)), "utf-8")
    if encoding == "utf-8" and b"\0" in raw[:4]:  # UTF-16 without a mark: every second byte of JSON's first ones is 0
        encoding = "utf-16-le" if raw[1:2] == b"\0" else "utf-16-be"
    try:
        return raw.decode(encoding).lstrip("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is no {encoding.upper()}: save it once more in Jupyter") from None


def _whole(notebook: Any) -> dict[str, Any]:
    """The notebook with a kind, metadata and a source in each cell; cells of the format before 2015 are found too."""
    sheets = notebook.get("worksheets") if isinstance(notebook, dict) else None
    sheet = sheets[0] if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict) else notebook
    cells = sheet.get("cells") if isinstance(sheet, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook: JSON without cells; hand in the .ipynb file itself")
    whole = []
    for cell in cells:
        if not isinstance(cell, dict):
            continue
        source = cell.get("source", cell.get("input"))
        lines = source if isinstance(source, list) else [source]
        metadata = cell.get("metadata")
        whole.append(
            {
                "cell_type": str(cell.get("cell_type")),
                "id": cell.get("id"),
                "metadata": metadata if isinstance(metadata, dict) else {},
                "source": "".join(line for line in lines if isinstance(line, str)),
            }
        )
    return {"cells": whole}


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
    found, kept, waiting, asleep = Answers(), set[str](), list[str](), dict[str, str]()
    names = {mark(cell)["grade_id"]: cell for cell in lab["cells"] if is_answer(cell)}
    for cell in submission["cells"]:
        own = _of_lab(cell, lab, names)
        name = mark(own).get("grade_id", "") if own else ""
        if name in names and names[name]["cell_type"] != "code":
            kept.add(name)
            found.text[name] = "\n\n".join(filter(None, (found.text.get(name, ""), cell["source"])))
        elif name in names and cell["cell_type"] != "code":
            asleep[name] = cell["source"]
        elif name in names:
            if name in kept:
                found.notes.append(f"{name} is answered by more than one code cell: all ran, the last one counts")
            kept.add(name)
            found.code[name] = [*found.code.get(name, []), *waiting, cell["source"]]
            waiting = []
        elif own is None and cell["cell_type"] == "code" and not is_parameters(cell):
            waiting.append(cell["source"])
    last = next((name for name in reversed(found.code)), None)
    if waiting and last:  # added below the last answer
        found.code[last] += waiting
    for name, source in asleep.items():
        if name not in found.code:
            found.code[name] = [source]
            found.notes.append(f"{name} stands in a cell that Jupyter does not run: change it to a code cell")
    found.notes += [f"{name} is missing: it was deleted" for name in names if name not in {*found.code, *found.text}]
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
    held = {}
    for lab, source in labs.items():
        found = answers(submission, source)
        held[lab] = (len(found.code) + len(found.text), lab[:5] in name.lower())
    best = max(held, key=lambda lab: held[lab], default="")
    if not best or held[best][0] == 0:
        raise ValueError("no cell of it answers a question of a lab: copy the answers into the released notebook")
    return best


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
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.resolve().parent)}})
    try:
        client.execute()
    except CellExecutionError as error:
        told = f"{error.ename}: {error.evalue}".strip().splitlines()[0][:200]
        ran = sum(cell.execution_count is not None for cell in notebook.cells)
        return [f"from top to bottom it stops in code cell {ran}: {told}"]
    except (CellTimeoutError, DeadKernelError) as error:
        return [f"from top to bottom it does not come to its end: {str(error).splitlines()[0]}"]
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
