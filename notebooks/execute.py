"""Run notebooks in a fresh kernel and store their outputs: `python notebooks/execute.py [FILE ...] [--check]`.

Prints the difference of every text output for review. `--check` stores nothing and exits with 1 if a text differs.
Widget state is not stored: static pages then fall back to the picture and the sentence of each view.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def texts(notebook: Any) -> list[str]:
    """What nbval compares, cell by cell."""
    found = []
    for number, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                text = output.text
            elif output.output_type == "error":
                text = f"{output.ename}: {output.evalue}"
            else:
                text = output.get("data", {}).get("text/plain", "")
            found += [f"[{number + 1}] {line}" for line in "".join(text).splitlines()]
    return found


def execute(path: Path) -> tuple[Any, list[str], float]:
    """(the executed notebook, the difference of its texts, seconds)."""
    notebook = nbformat.read(path, as_version=4)
    before = texts(notebook)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    tidy(notebook)
    after = texts(notebook)
    return notebook, list(difflib.unified_diff(before, after, "stored", "fresh", lineterm="", n=0)), seconds


def tidy(notebook: Any) -> None:
    """Keep what readers and nbval need: no timings, no widget state, the same kernel name everywhere."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.metadata.pop("execution", None)
        cell.metadata["slideshow"] = {"slide_type": slide_type(cell, number)}
        cell.setdefault("id", f"cell-{number:02d}")
        if cell.get("outputs"):  # a living view stands beside its stored picture, in an output of its own
            living = {"application/vnd.jupyter.widget-view+json"}
            cell.outputs = [o for o in cell.outputs if o.get("data", {}).keys() - living or not o.get("data")]
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            if output.output_type == "error":  # a traceback names the folders of the machine
                output.traceback = [f"{output.ename}: {output.evalue}"]


def slide_type(cell: Any, number: int) -> str:
    """How `jupyter nbconvert --to slides` shows a cell: a heading begins a slide, the set-up is left out."""
    if cell.cell_type == "code":
        return "skip" if number == 1 else "-"
    return "slide" if cell.source.startswith("#") else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="notebooks; all lessons when none is named")
    parser.add_argument("--check", action="store_true", help="store nothing, exit with 1 if a text differs")
    options = parser.parse_args()
    from mpkit.files import write_whole  # here: who takes this file for its `texts` may bring an mpkit of its own

    if missing := [path for path in options.files if not path.is_file()]:
        parser.error(f"there is no notebook {missing[0]}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    changed = 0
    for path in options.files or sorted([*HERE.glob("*.ipynb"), *HERE.glob("more/*/*.ipynb")]):
        notebook, difference, seconds = execute(path)
        print(f"{path.name}: {seconds:.1f} s, {len(difference)} lines of text differ", flush=True)
        print("\n".join(difference[:80]))
        changed += bool(difference)
        if not options.check:
            text = nbformat.writes(notebook) + "\n"
            write_whole(path, lambda file, text=text: file.write(text.encode()))
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
