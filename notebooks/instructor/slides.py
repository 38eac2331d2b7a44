"""Slides of lessons by nbconvert: `python notebooks/instructor/slides.py [LESSON ...] [--to FOLDER] [--reveal URL]`.

One HTML file for each lesson (00, 03, 04 and 07 when none is named): its cells as `jupyter nbconvert --to slides` shows
them, without code, and below each prediction a slide with its answer, which the notebook itself keeps behind a button.
Pictures stand in the file. What turns the pages comes from the network; --reveal names another copy of reveal.js.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
try:
    import nbformat
    from nbconvert import SlidesExporter
    from nbconvert.preprocessors import Preprocessor

    from mpkit.view.words import words
except ModuleNotFoundError as missing:
    sys.exit(f"mpkit: {missing}; first run make lab once, then: source .venv/bin/activate")

LESSONS = {
    p.stem[:2] if p.stem[0] == "0" else p.stem: p
    for p in sorted(HERE.parent.glob("**/*.ipynb"))
    if p.parent == HERE.parent or HERE.parent / "more" in p.parents
}


class Answers(Preprocessor):
    """A slide with the right choice and its reason below each prediction."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        cells = []
        for cell in nb.cells:
            cells.append(cell)
            for topic, name in re.findall(r'predict\("(\w+)", "(\w+)"\)', cell.source):
                asked = words(topic)["predict"][name]
                choice, reason = asked["choices"][ord(asked["right"]) - ord("a")]
                text = f"## So it is\n\n**({asked['right']}) {choice}**\n\n{' '.join(reason.split())}"
                cells.append(nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": "slide"}}))
        nb.cells = cells
        return nb, resources


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", default=["00", "03", "04", "07"], help=f"some of {', '.join(LESSONS)}")
    parser.add_argument("--to", type=Path, default=HERE / "slides", help="folder to write into")
    parser.add_argument("--reveal", default="", help="address or folder of reveal.js (default: from the network)")
    options = parser.parse_args()
    if unknown := [lesson for lesson in options.lessons if lesson not in LESSONS]:
        parser.error(f"lessons are {', '.join(LESSONS)}, got {', '.join(unknown)}")
    exporter = SlidesExporter(
        exclude_input=True, exclude_output_prompt=True, reveal_scroll=True, preprocessors=[Answers]
    )
    exporter.reveal_url_prefix = options.reveal or exporter.reveal_url_prefix
    pages = {
        f"{LESSONS[lesson].stem}.html": exporter.from_filename(str(LESSONS[lesson]))[0] for lesson in options.lessons
    }
    try:
        options.to.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            (options.to / name).write_text(page, encoding="utf-8")
            print(f"wrote {options.to / name}")
    except OSError as error:
        parser.error(f"--to needs a folder that can be written: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
