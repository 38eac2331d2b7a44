"""Slides from lessons as they are stored: `python notebooks/instructor/slides.py [LESSON ...] [--to FOLDER]`.

One HTML file for each lesson (00, 04, 05 and 09 when none is named), which needs no network: the goals, every
prediction as a question to the room, every picture with its sentence. The arrow keys or Page Down go on; the browser
prints a slide on a page. Pictures and words are those of the lesson, so slides cannot grow old.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent
USUAL = ("00", "04", "05", "09")
STYLE = """
html { scroll-snap-type: y mandatory; font: 2.4vh/1.4 sans-serif; color: #1f1f1f; background: #fff; }
body { margin: 0; }
section { box-sizing: border-box; min-height: 100vh; padding: 5vh 7vw; scroll-snap-align: start; break-after: page; }
h1 { font-size: 5vh; } h2 { font-size: 3.6vh; } img { display: block; max-width: 100%; max-height: 62vh; margin: auto; }
figure { margin: 0; } figcaption { margin-top: 2vh; } li { margin: 1vh 0; }
"""


def slides(notebook: Any) -> Iterator[tuple[str, str]]:
    """(title, body as HTML) of every slide of a stored lesson, in order."""
    title = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ (.*)", cell.source, re.M)
            if cell.source.startswith("# "):
                goals = "".join(
                    f"<li>{_plain(goal)}</li>" for goal in re.findall(r"^\* (.*(?:\n  .*)*)", cell.source, re.M)
                )
                yield headings[0], f"<p>After this lesson you can</p><ul>{goals}</ul>"
            title = headings[-1] if headings else title
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            text = "".join(data.get("text/plain", ""))
            if text.startswith("Predict: "):
                question, *answers = text.removeprefix("Predict: ").splitlines()
                choices = "".join(f"<p>{escape(answer.strip())}</p>" for answer in answers)
                yield "What do you predict?", f"<p><b>{escape(question)}</b></p>{choices}"
            elif "image/png" in data:
                png = "".join(data["image/png"].split())
                words = escape(text)
                picture = f'<img alt="{words}" src="data:image/png;base64,{png}">'
                yield title, f"<figure>{picture}<figcaption>{words}</figcaption></figure>"


def _plain(markdown: str) -> str:
    """A line of Markdown as HTML: code and bold stay, links become their words."""
    text = escape(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split())))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", re.sub(r"\*\*([^*]*)\*\*", r"<b>\1</b>", text))


def page(path: Path) -> str:
    """The whole file of slides for one stored lesson."""
    shown = list(slides(nbformat.read(path, as_version=4)))
    sections = "\n".join(
        f"<section><h{1 + (i > 0)}>{_plain(t)}</h{1 + (i > 0)}>{b}</section>" for i, (t, b) in enumerate(shown)
    )
    head = f'<meta charset="utf-8"><title>{escape(shown[0][0])}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n{sections}\n</body></html>\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", default=USUAL, help="numbers of lessons; 00 04 05 09 when none is named")
    parser.add_argument("--to", type=Path, default=HERE / "slides", help="folder to write into")
    options = parser.parse_args()
    paths = {path.stem[:2]: path for path in sorted(HERE.parent.glob("[0-9][0-9]_*.ipynb"))}
    unknown = [number for number in options.lessons if number not in paths]
    if unknown:
        parser.error(f"lessons are {', '.join(paths)}, got {', '.join(unknown)}")
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--to names no folder that can be written: {error}")
    for number in options.lessons:
        target = options.to / f"{paths[number].stem}.html"
        target.write_text(page(paths[number]), encoding="utf-8")
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
