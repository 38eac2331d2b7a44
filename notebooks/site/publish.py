"""The course as static pages that need no kernel and no network: `python notebooks/site/publish.py FOLDER`.

    lessons    read as they are stored; nothing of them runs but the calls that make views (`pictures.py`)
    Sphinx     with myst-nb and furo makes pages, contents, search and the dark theme of them
    pdoc       makes the reference of the library's docstrings
    page.js    stands in for the kernel, `scene.js` draws, both as in Jupyter

README.md says why these generators. Links lead to the repository that pyproject.toml names.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import html
import importlib
import json
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import tomllib
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import pictures  # noqa: E402  (the folder of this file)

import mpkit  # noqa: E402
from mpkit.view.quiz import predicted  # noqa: E402
from mpkit.view.sheet import ROLES  # noqa: E402
from mpkit.view.views import Maker, View  # noqa: E402
from mpkit.view.words import raised, words  # noqa: E402

VIEW = ROOT / "mpkit" / "view"
UNDER = "notebooks"
"""The folder of the lessons, in the repository and here."""
MORE = {"view", "lessons"}
"""Modules of the library that its reference leaves out: the machine of the lessons."""


@cache
def addresses() -> dict[str, str]:
    """Where the repository is, and its lessons on hosts that run them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        repository = tomllib.load(file)["project"]["urls"]["Repository"]
    owner = repository.removeprefix("https://github.com/")
    return {
        "repository": f"{repository}/blob/main/",
        "Colab": f"https://colab.research.google.com/github/{owner}/blob/main/",
        "Binder": f"https://mybinder.org/v2/gh/{owner}/main?urlpath=lab/tree/",
    }


def lessons() -> list[Path]:
    """All lessons: the spine, then those of each theme."""
    return [p for g in ("[0-9]*.ipynb", "more/**/*.ipynb") for p in sorted((ROOT / UNDER).glob(g))]


HEAVIEST = 1500
"""kB, compressed, of a page of the course with all its pictures."""
REFERENCE = """# Reference

<a href="reference/mpkit.html">Every public name of the library</a>, with its shapes, units, errors and sources.
"""


# ---- cells
def data(value: object) -> str:
    """A script element that holds a value; JSON has no inf and NaN, words stand for them."""
    text = json.dumps(pictures.plain(value), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def predict(topic: str, name: str) -> str:
    """A prediction: its question, until the page makes the buttons of it."""
    note = predicted(topic, name)
    says = [[text.replace("Run the next cells: they", "The next results") for text in row] for row in note["says"]]
    asked = f'<p class="mpk-still"><b>Predict.</b> {html.escape(note["ask"])}</p>'
    return f'<div class="mpk-quiz" data-quiz="predict">{asked}{data(note | {"says": says})}</div>'


def answer(topic: str, name: str, value: object = None) -> str:
    """A question with a line for the answer."""
    asked = words(topic)["question"][name]
    right = raised(asked["right"].format(truth=asked["truth"]))
    known = {"truth": asked["truth"], "hint": raised(asked["hint"]), "rel": asked.get("rel", 1e-9), "right": right}
    known |= {"hints": [[wrong, raised(says)] for wrong, says in asked.get("hints", ())]}
    label = f"<label><b>Question.</b> {html.escape(raised(asked['ask']))} <input autocomplete=off></label>"
    inside = f'{label} <button>Check</button><p role="status"></p>{data(known)}'
    return f'<form class="mpk-quiz" data-quiz="answer" data-name="{topic} {name}">{inside}</form>'


def judge(lesson: str, *_: object) -> str:
    """What a task in Python needs."""
    links = " or ".join(f'<a href="{addresses()[host]}{lesson}">{host}</a>' for host in ("Colab", "Binder"))
    text = "This task is written in Python, which needs a kernel. Open the lesson in"
    return f'<p class="mpk-quiz">{text} {links}, or run <code>make lab</code>.</p>'


def calls(tree: ast.Module) -> list[ast.Call]:
    """The calls whose results a cell shows: as statements of their own, or by the name of its last line."""
    shown = [line.value for line in tree.body if isinstance(line, ast.Expr)]
    given = {ast.unparse(line.targets[0]): line.value for line in tree.body if isinstance(line, ast.Assign)}
    if shown and isinstance(shown[-1], ast.Name):
        shown[-1] = given.get(shown[-1].id, shown[-1])
    return [value for value in shown if isinstance(value, ast.Call)]


def page(path: Path, views: Path, most: int | None = None) -> tuple[Any, list[dict[str, Any]]]:
    """(the notebook as Sphinx reads it, what its views weigh); the tables of the views go into a folder."""
    lesson, notebook = path.relative_to(ROOT).as_posix(), nbformat.read(path, 4)
    names, shown = dict[str, Any](), dict[str, list[View]]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, path)
            continue
        tree = ast.parse(re.sub(r"(?m)^[%!]", "#", cell.source))
        imports = [line for line in tree.body if isinstance(line, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), lesson, "exec"), names)
        made = list[str]()
        for call in calls(tree):
            name, maker = ast.unparse(call.func), names.get(ast.unparse(call.func))
            value = lambda call=call: eval(compile(ast.Expression(call), lesson, "eval"), names)  # noqa: E731
            given = [ast.literal_eval(a) for a in call.args[:2]] if name in ("quiz.predict", "quiz.answer") else []
            if isinstance(maker, Maker):
                alike = shown.setdefault(f"{path.stem}-{maker.__name__}", [])
                still = next(o.data["text/html"] for o in cell.outputs if "text/html" in o.get("data", {}))
                which = f'data-view="{path.stem}-{maker.__name__}" data-start="{len(alike)}"'
                alike.append(value())
                made.append(f'<div class="mpk-view" {which}>{still}</div>')
            elif name == "quiz.predict":
                made.append(predict(*given))
            elif name == "quiz.answer":
                made.append(answer(*given))
            elif name == "quiz.judge":
                made.append(judge(lesson))
        for output in cell.outputs:  # a head without words, in the corner, would be read out as one
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = output.data["text/html"].replace("<th></th>", "<td></td>")
        if made:
            cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": "\n".join(made)})]
    hosts = " · ".join(f"[{host}]({addresses()[host]}{lesson})" for host in ("Colab", "Binder"))
    head, _, rest = notebook.cells[0].source.partition("\n")
    opens = f"Pictures move and questions answer here; to run and change the code, open the lesson in {hosts}."
    notebook.cells[0].source = f"{head}\n\n{opens}\n{rest}"
    return notebook, [
        {"view": view} | pictures.write(alike, views / f"{view}.js", most) for view, alike in shown.items()
    ]


def linked(text: str, path: Path) -> str:
    """Words whose links lead to pages of the site or to the repository, and whose pictures from outside are names."""
    text = re.sub(r"!\[([^\]]*)\]\(https?:[^)]*\)", r"\1", text)

    def led(found: re.Match[str]) -> str:
        to = (path.parent / found[1]).resolve()
        if to == ROOT / UNDER / "README.md":  # the first page
            return f"]({os.path.relpath(to.with_name('index.md'), path.parent)}{found[2] or ''})"
        if to in lessons() or not to.is_relative_to(ROOT):
            return found[0]
        return f"]({addresses()['repository']}{to.relative_to(ROOT).as_posix()}{found[2] or ''})"

    return re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", led, text)


# ---- the generators
def contents() -> str:
    """The first page: the lessons' README, with the menu of all lessons."""
    themes = dict[str, list[str]]()
    for path in lessons():
        place = path.relative_to(ROOT / UNDER)
        theme = place.parent.name.replace("_", " ").capitalize() or "The course"
        themes.setdefault(theme, []).append(place.with_suffix("").as_posix())
    themes["The library"] = ["Reference <reference>"]
    tree = "\n```{{toctree}}\n:hidden:\n:caption: {}\n{}\n```\n"
    menu = "".join(tree.format(theme, "\n".join(each)) for theme, each in themes.items())
    readme = ROOT / UNDER / "README.md"
    return linked(readme.read_text("utf-8"), readme) + menu


def stylesheet() -> str:
    """scene.css in furo's colours: its dark theme is chosen, or the reader's own."""
    light, dark = (
        "".join(f"--mk-{r}:{pair[i]};" for r, pair in ROLES.items() if r not in ("ink", "paper")) for i in (0, 1)
    )
    page = "--mk-ink:var(--color-foreground-primary);--mk-paper:var(--color-background-primary);"
    themes = f".mpk {{{light}{page}}}\nbody[data-theme=dark] .mpk {{{dark}}}\n"
    themes += f"@media (prefers-color-scheme: dark) {{ body:not([data-theme=light]) .mpk {{{dark}}} }}\n"
    return themes + (VIEW / "scene.css").read_text("utf-8") + (HERE / "page.css").read_text("utf-8")


def script() -> str:
    """scene.js as it is and the stand-in of the kernel in one classic script, as a folder's pages have no modules."""
    scene = (VIEW / "scene.js").read_text("utf-8").replace("export default { render };", "return { render, unpacked };")
    own = "".join((HERE / name).read_text("utf-8") for name in ("quiz.js", "page.js"))
    return f'(() => {{\n"use strict";\nconst {{ render, unpacked }} = (() => {{\n{scene}}})();\n{own}}})();\n'


def sphinx(source: Path, to: Path) -> None:
    """Pages of what lies in a folder."""
    from sphinx.application import Sphinx

    config = {
        "project": "mpkit", "author": "The mpkit contributors", "html_title": "mpkit", "html_theme": "furo",
        "extensions": ["myst_nb", "mathml"], "html_math_renderer": "mathml", "myst_heading_anchors": 3,
        "nb_execution_mode": "off", "nb_merge_streams": True, "exclude_patterns": ["_static"],
        "html_static_path": ["_static"], "html_css_files": ["mpkit.css"],
        "html_js_files": [("mpkit.js", {"defer": "defer"})], "html_copy_source": False, "html_show_sourcelink": False,
        "html_show_copyright": False, "html_show_sphinx": False, "html_show_search_summary": False,
    }  # fmt: skip
    app = Sphinx(source, None, to, source.parent / "doctrees", "html", config, status=None, warningiserror=True)
    app.build(force_all=True)
    if app.statuscode:
        raise ValueError("Sphinx has warned; its words stand above")
    (to / ".buildinfo").unlink()


CHECKED = re.compile(r"(?:typing\.)?Annotated\[((?:[^\[\]]|\[[^\]]*\])*?), (?:functools\.partial\()?<function [^\]]*\]")
"""A type with the function that checks it: who reads the reference needs the type; the function tells an address."""


def reference(to: Path) -> None:
    """The reference of the library, its lazy names brought in first."""
    import pdoc

    for name in mpkit.__all__:
        setattr(mpkit, name, getattr(mpkit, name))
    every = [m.name for m in pkgutil.iter_modules(mpkit.__path__) if not m.name.startswith("_") and m.name not in MORE]
    public = [f"mpkit.{name}" for name in every if hasattr(importlib.import_module(f"mpkit.{name}"), "__all__")]
    pdoc.render.configure(docformat="google", show_source=False, footer_text="mpkit", template_directory=HERE / "pdoc")
    told = pdoc.doc.formatannotation
    pdoc.doc.formatannotation = lambda value: CHECKED.sub(r"\1", told(value))
    with warnings.catch_warnings(action="ignore"):  # it does not know names of annotations that tuples take over
        pdoc.pdoc("mpkit", *public, output_directory=to)


UNNAMED = {  # what a screen reader misses in the generators' pages
    r'(class="caption" role="heading")': r'\1 aria-level="2"',
    r'<div id="search-results">': r"<h1>Search</h1>\g<0>",
    r'<aside class="sidebar-drawer"': r'\g<0> aria-label="All pages"',
    r'<aside class="toc-drawer[^"]*"': r'\g<0> aria-label="On this page"',
    r'(?s)(<a href="#" class="back-to-top.*?</a>)': r'<nav aria-label="Back to top">\1</nav>',
    r'<a class="headerlink" href="#([^"]+)">(?=</a>)': r'<a class="headerlink" href="#\1" aria-label="Link to \1">',
    r'<h6( id="[^"]*">.*?)</h6>': r'<h2 class="part"\1</h2>',
}


def named(to: Path) -> None:
    """Give names to what has none."""
    for path in to.rglob("*.html"):
        text = path.read_text("utf-8")
        for found, better in UNNAMED.items():
            text = re.sub(found, better, text)
        path.write_text(text, "utf-8")


def build(to: Path, most: int | None = None, only: list[str] | None = None) -> list[dict[str, Any]]:
    """Write the site into an empty folder; what the views of each kind weigh.

    With `only`, views of the lessons whose names begin so can be moved; the others have the picture they open with.
    """
    if to.exists() and any(to.iterdir()) and not (to / "searchindex.js").exists():
        raise FileExistsError(f"{to} is there and no site of ours; name another folder, or an empty one")
    shutil.rmtree(to, ignore_errors=True)
    chosen = lessons()
    each = [most if not only or path.stem.startswith(tuple(only)) else 0 for path in chosen]
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "source"
        (source / "_static" / "views").mkdir(parents=True)
        with ProcessPoolExecutor(2) as pool:
            pages = list(pool.map(page, chosen, repeat(source / "_static" / "views"), each))
        for path, (notebook, _) in zip(chosen, pages):
            place = source / path.relative_to(ROOT / UNDER)
            place.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, place)
        (source / "index.md").write_text(contents(), "utf-8")
        (source / "reference.md").write_text(REFERENCE, "utf-8")
        (source / "_static" / "mpkit.css").write_text(stylesheet(), "utf-8")
        (source / "_static" / "mpkit.js").write_text(script(), "utf-8")
        sphinx(source, to)
        reference(to / "reference")
    named(to)
    for path, (_, weights) in zip(chosen, pages):
        made = to / path.relative_to(ROOT / UNDER).with_suffix(".html")
        weight = len(gzip.compress(made.read_bytes(), mtime=0)) / 1000 + sum(view["kB"] for view in weights)
        if weight > HEAVIEST:
            raise ValueError(
                f"{path.name} weighs {weight:.0f} kB, more than {HEAVIEST}; give it fewer pictures in PLANS"
            )
    return [weight for _, weights in pages for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, help="about so many pictures of each view")
    parser.add_argument("--only", nargs="*", metavar="LESSON", help="views of these can be moved, 04 say")
    options = parser.parse_args()
    try:
        weights = build(options.folder, options.most, options.only)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"mpkit: {error}")
    for weight in weights:
        print(" ".join(f"{k} {v}" for k, v in weight.items()))
    print(f"mpkit: the site is in {options.folder}; open {options.folder / 'index.html'}")


if __name__ == "__main__":
    main()
