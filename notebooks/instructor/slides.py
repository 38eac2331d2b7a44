"""Slides from lessons as they are stored: `python notebooks/instructor/slides.py [LESSON ...] [--to FOLDER]`.

One HTML file for each lesson (00, 03, 04 and 07 when none is named), which needs no network: the goals, every
prediction as a question to the room below what its section says before it, then its answer, every picture with its
sentence. The arrow
keys, Page Up, Page Down and the space bar turn the pages; the browser prints a slide on a page. Pictures and words are
those of the lesson, so slides cannot grow old. The title over a picture is that of its section in the lesson; what a
sentence asks to press or to drag stands there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

try:
    import nbformat

    from mpkit.view.words import words
except ModuleNotFoundError as missing:
    sys.exit(f"mpkit: {missing}; first run make lab once, then: source .venv/bin/activate")

HERE = Path(__file__).resolve().parent
USUAL = ("00", "03", "04", "07")
STYLE = """
html { scroll-snap-type: y mandatory; font: 3vh/1.35 sans-serif; color: #1f1f1f; background: #fff; }
body { margin: 0; }
section { box-sizing: border-box; min-height: 100vh; padding: 4vh 5vw; scroll-snap-align: start;
  break-inside: avoid; display: flex; flex-direction: column; }
section + section { break-before: page; }
h1 { font-size: 6vh; margin: 0 0 3vh; } h2 { font-size: 4.4vh; margin: 0 0 2vh; } li, p { margin: 1.5vh 0; }
figure { margin: 0; flex: 1 0 50vh; display: flex; flex-direction: column; }
img { flex: 1 0 30vh; height: 0; width: 100%; object-fit: contain; } figcaption { margin-top: 1vh; font-size: 2.6vh; }
footer { margin-top: auto; padding-top: 1vh; font-size: 2.2vh; color: #595959; }
@media print { section { height: 100vh; } }
"""
# Page by page, also by the Left and Right of a presenter's remote control, which scroll no page by themselves.
KEYS = """
const pages = document.querySelectorAll("section");
const turns = {ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1};
addEventListener("keydown", (event) => {
  if (!turns[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const now = [...pages].findLastIndex((page) => page.getBoundingClientRect().top < innerHeight / 2);
  pages[Math.min(Math.max(now + turns[event.key], 0), pages.length - 1)].scrollIntoView();
});
"""


def slides(notebook: Any) -> Iterator[tuple[str, str]]:
    """(title, body as HTML) of every slide of a stored lesson, in order."""
    title, setting = "", ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ (.*)", cell.source, re.M)
            if cell.source.startswith("# "):
                goals = "".join(
                    f"<li>{_plain(goal)}</li>" for goal in re.findall(r"^\* (.*(?:\n  .*)*)", cell.source, re.M)
                )
                yield headings[0], f"<p>After this lesson you can</p><ul>{goals}</ul>"
            title = headings[-1] if headings else title
            setting = _setting(cell.source) if headings else setting + _setting(cell.source)
            continue
        for output in cell.outputs:
            if output.output_type == "stream":
                setting += f"<pre>{escape(output.text.rstrip())}</pre>"
            data = output.get("data", {})
            text = "".join(data.get("text/plain", ""))
            if text.startswith("Predict: "):
                question, *answers = text.removeprefix("Predict: ").splitlines()
                choices = "".join(f"<p>{escape(answer.strip())}</p>" for answer in answers)
                asked = f"<p><b>{escape(question)}</b></p>"
                yield "What do you predict?", f"{setting}{asked}{choices}"
                yield "So it is", f"{asked}{_answer(cell.source)}"
            elif "image/png" in data:
                png = "".join(data["image/png"].split())
                words = escape(text)
                picture = f'<img alt="{words}" src="data:image/png;base64,{png}">'
                yield title, f"<figure>{picture}<figcaption>{words}</figcaption></figure>"


def _answer(source: str) -> str:
    """The right choice of the prediction that a cell asks, and its reason, as HTML."""
    topic, name = re.search(r'predict\("(\w+)", "(\w+)"\)', source).groups()
    asked = words(topic)["predict"][name]
    choice, reason = asked["choices"][ord(asked["right"]) - ord("a")]
    return f"<p>({asked['right']}) {escape(choice)}</p><p>{escape(' '.join(reason.split()))}</p>"


def _setting(markdown: str) -> str:
    """The paragraphs and lists under the last heading as HTML, without the sentences about cells and their buttons."""
    found = []
    for part in re.split(r"\n\n+", re.split(r"^#+ .*$", markdown, flags=re.M)[-1].strip()):
        if part.startswith("* "):
            items = re.split(r"^\* ", part, flags=re.M)[1:]
            found.append(f"<ul>{''.join(f'<li>{_plain(item)}</li>' for item in items)}</ul>")
            continue
        sentences = re.split(r"(?<=[.?!:]) (?=[A-Z])", " ".join(part.split()))
        kept = " ".join(s for s in sentences if not re.search(r"\b(cells?|buttons?)\b|^Predict", s))
        found.append(f"<p>{_plain(kept)}</p>" if kept else "")
    return "".join(found)


def _plain(markdown: str) -> str:
    """A line of Markdown as HTML: code, bold and emphasis stay, links become their words."""
    text = escape(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split())))
    for mark, tag in (("`", "code"), (r"\*\*", "b"), (r"\*", "em")):
        text = re.sub(rf"{mark}([^`*]+){mark}", rf"<{tag}>\1</{tag}>", text)
    return text


def called(path: Path) -> str:
    """The number of a lesson of the course, the file name of another."""
    return path.stem[:2] if path.stem[:2].isdigit() else path.stem


def page(path: Path) -> str:
    """The whole file of slides for one stored lesson."""
    shown = list(slides(nbformat.read(path, as_version=4)))
    sections = "\n".join(
        f"<section><h{1 + (i > 1)}>{_plain(title)}</h{1 + (i > 1)}>{body}"
        f"<footer>{called(path)} · {i} of {len(shown)}</footer></section>"
        for i, (title, body) in enumerate(shown, 1)
    )
    head = f'<meta charset="utf-8"><title>{escape(shown[0][0])}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>\n{sections}\n<script>{KEYS}</script></body></html>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "lessons",
        nargs="*",
        default=USUAL,
        help="00 to 08, or the file names of others, such as scaler_zoo; 00 03 04 07 when none is named",
    )
    parser.add_argument("--to", type=Path, default=HERE / "slides", help="folder to write into")
    options = parser.parse_args()
    paths = {called(path): path for below in ("", "more/*/") for path in sorted(HERE.parent.glob(f"{below}*.ipynb"))}
    unknown = [number for number in options.lessons if number not in paths]
    if unknown:
        parser.error(f"lessons are {', '.join(paths)}, got {', '.join(unknown)}")
    pages = {
        f"{paths[number].stem}.html": page(paths[number]) for number in options.lessons
    }  # all, before one is written
    try:
        options.to.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (options.to / name).write_text(text, encoding="utf-8")
            print(options.to / name)
    except OSError as error:
        parser.error(f"--to needs a folder that can be written: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
