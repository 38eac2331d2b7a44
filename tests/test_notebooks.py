"""What every notebook must look like before nbval may compare it. The rules stand in CONTRIBUTING.md."""

import ast
import base64
import re
import subprocess
import sys
from html import escape, unescape
from importlib import import_module

import nbformat
import pytest
from support import LESSONS, ROOT, openings

from mpkit.view.views import Maker
from mpkit.view.words import raised, words

FOLDER = ROOT / "notebooks"
LABS = sorted(FOLDER.glob("instructor/*.ipynb"))
NOTEBOOKS = [*LESSONS, *LABS]

TAGS = {"raises-exception", "show"}
IMPORTS = {"mpkit", "torch", "numpy", "pandas", "matplotlib", "ipywidgets", *sys.stdlib_module_names}
HEADINGS = ("Goal", "Predict", "Tweak", "Check yourself", "Summary")
FORBIDDEN = ("clear_output", "to_jshtml", "!pip", "%pip", "plt.show", "nbval-skip", "NBVAL_SKIP", "NBVAL_IGNORE")


def name(path):
    return path.stem


def code_cells(notebook):
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]


def views(notebook):
    """Names by which a notebook calls views: those that it imports of the lessons."""
    found = []
    for cell in code_cells(notebook):
        for node in (n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.ImportFrom)):
            if (node.module or "").startswith("mpkit.lessons."):
                module = import_module(node.module)
                found += [a.asname or a.name for a in node.names if isinstance(getattr(module, a.name), Maker)]
    return "|".join(found)


def said(output):
    """What a stored output holds as plain text."""
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


def prose(notebook):
    return "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")


def opened(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.path = path
    return notebook


@pytest.fixture(params=NOTEBOOKS, ids=name)
def notebook(request):
    return opened(request.param)


@pytest.fixture(params=LESSONS, ids=name)
def lesson(request):
    return opened(request.param)


def test_it_is_valid_and_has_a_kernel_unique_ids_and_no_widget_state(notebook):
    path = notebook.pop("path")
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    ids = [c.id for c in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert path.stat().st_size <= 300_000


def test_every_cell_ran_in_order_without_an_error(notebook):
    cells = code_cells(notebook)
    if notebook.path in LABS:  # what they print is other for every answer
        assert [c for c in cells if c.outputs or c.execution_count] == []
        return
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        errors = [o.ename for o in cell.outputs if o.output_type == "error"]
        assert bool(errors) == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
        assert not any(o.output_type == "stream" and o.name == "stderr" for o in cell.outputs), cell.source


def test_cells_are_few_short_and_tagged_as_allowed(notebook):
    cells = code_cells(notebook)
    if notebook.path in LESSONS:
        assert len(cells) <= 25
    for cell in cells:
        assert set(cell.metadata.get("tags", [])) <= TAGS
        if notebook.path in LESSONS:
            assert len(cell.source.splitlines()) <= 15, cell.source


def test_imports_and_words_are_allowed(notebook):
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {n.split(".")[0] for n in names} <= IMPORTS, cell.source
        assert not any(word in cell.source for word in FORBIDDEN), cell.source
    text = prose(notebook) + "".join(c.source for c in code_cells(notebook))
    assert not re.search(r"(?<![\w.])/(home|root|tmp|Users|work)/", text)


def test_most_cells_print_or_return_what_nbval_can_compare(lesson):
    cells = [c for c in code_cells(lesson) if not c.metadata.get("nbgrader", {}).get("solution")]
    told = [[said(o) for o in c.outputs if o.output_type == "error" or said(o)] for c in cells]
    assert sum(map(bool, told)) >= 0.6 * len(cells)
    text = "\n".join(part for parts in told for part in parts)
    assert not re.search(r"0x[0-9a-f]{8,}|<[\w.]+ object at|\d+%\|", text), "an address or a progress bar is stored"


def test_every_picture_is_a_png_with_its_sentence(notebook):
    for cell in code_cells(notebook):
        shown = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        last = cell.source.strip().splitlines()[-1]
        if notebook.path in LESSONS and re.fullmatch(rf"\w*view|({views(notebook)})\(.*\)", last):
            assert shown, f"the view has no stored picture: {cell.source}"
        for output in shown:
            assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
            sentence = output.data["text/plain"]
            assert re.search(r"\d", sentence), f"the sentence states no number: {sentence!r}"
            assert not sentence.startswith("<"), f"a default repr instead of a sentence: {sentence!r}"
            assert f"<figcaption>{escape(raised(sentence))}</figcaption>" in output.data["text/html"]
        assert not any("image/svg+xml" in o.get("data", {}) for o in cell.outputs)


def test_a_lesson_asks_before_it_shows_and_keeps_tests_out(lesson):
    sources = [c.source for c in code_cells(lesson)]
    first = rf"quiz\.predict\(|my_verdicts = None|({views(lesson)})\(\)$"  # a drawing is asked for, too
    assert any(re.match(first, s) for s in sources)
    assert sum(len(re.findall(r"\bquiz\.judge\(", s)) for s in sources) == 1
    asserts = [node for s in sources for node in ast.walk(ast.parse(s)) if isinstance(node, ast.Assert)]
    assert asserts == [], "what a lesson promises is asserted in tests/unit/lessons"
    calls = [node for s in sources for node in ast.walk(ast.parse(s)) if isinstance(node, ast.Call)]
    answers = [call.args[2] for call in calls if ast.unparse(call.func).endswith(".answer") and len(call.args) > 2]
    assert all(ast.unparse(answer) in ("None", "my_verdicts") for answer in answers), "an answer stands on the page"


def test_nothing_on_the_page_answers_a_prediction(lesson):
    """Stored outputs and Run All printed the truth below each question. What would tell stands in `tells`."""
    asked = re.findall(r'quiz\.predict\("(\w+)", "(\w+)"\)', "\n".join(c.source for c in code_cells(lesson)))
    shown = [c.source for c in lesson.cells if c.cell_type == "markdown"]
    for cell in (c for c in code_cells(lesson) if not c.source.startswith("quiz.predict(")):
        shown += map(said, cell.outputs)
    page = " ".join("\n".join(shown).split())
    for topic, question in asked:
        prediction = words(topic)["predict"][question]
        right = dict(zip("abcdefgh", prediction["choices"]))[prediction["right"]][1]
        told = [*prediction.get("tells", []), " ".join(right.split())]
        assert not [text for text in told if text in page], f"{topic}.{question} is answered on the page"
        assert prediction.get("tells") or lesson.path.parent != FOLDER, f"{topic}.{question} needs `tells`"


def paragraphs(text):
    """Its paragraphs, items of lists and rows of tables."""
    return re.split(r"\n\n+|\n(?=\* |\d+\. |\|)", text)


def test_a_lesson_is_short_and_a_picture_comes_first(lesson):
    """22 lessons held 24,000 words, and the first picture of 00 came in cell 18."""
    read, pictures = 0, []
    for cell in lesson.cells:
        if cell.cell_type == "markdown":
            read += len(cell.source.split())
            assert max(len(part.split()) for part in paragraphs(cell.source)) <= 80, cell.source
        elif any("image/png" in o.get("data", {}) for o in cell.outputs):
            pictures.append(read)
    assert read <= (1300 if lesson.path.parent == FOLDER else 800)
    assert pictures[0] <= 200
    assert [*pictures, read][1] <= 700


def test_the_first_lesson_introduces_six_terms_at_most():
    text = prose(nbformat.read(LESSONS[0], as_version=4))
    terms = set(re.findall(r"\*\*([^*.]+)\*\*", text)) - {"Train"}
    assert len(terms) <= 6, terms


def test_at_most_three_tasks_with_one_press_each_stand_beside_a_view():
    beside = {call: len(make().tries) for call, make in openings()}
    assert sum(map(bool, beside.values())) > 20
    assert {call: count for call, count in beside.items() if count > 3} == {}
    for path in LESSONS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown" and "## Tweak" in cell.source:
                task = cell.source.split("## Tweak")[1].split("\n## ")[0]
                first = re.split(r"\n\n(?!\* )", task.strip())
                assert len(re.findall(r"^\* ", task, re.M)) <= 3, (path.name, first)


@pytest.mark.parametrize("path", [*LESSONS, *sorted(FOLDER.glob("labs/*.ipynb"))], ids=name)
def test_every_link_of_a_lesson_leads_to_a_file(path):
    for link in re.findall(r"\]\(([^)#:]+)\)", prose(nbformat.read(path, as_version=4))):
        assert (path.parent / link).exists(), link


def test_what_a_reader_does_with_a_view_changes_no_later_cell(lesson):
    """In 21 a moved step ended the next cell in a KeyError; cells of 05, 06 and 07 told what the reader had set."""
    called, made, shown, found = views(lesson), set(), set(), []
    for cell in code_cells(lesson):
        tree = ast.parse(cell.source)
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        shown -= stored
        read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        found += [f"{cell.id}: {used}" for used in read & shown]
        made -= stored
        for node in (n for n in tree.body if isinstance(n, ast.Assign)):
            if re.match(rf"({called})\(", ast.unparse(node.value)):
                made.add(ast.unparse(node.targets[0]))
        shown |= {ast.unparse(tree.body[-1])} & made
    assert not found, "take a view of the cell's own, which is not shown"


def test_a_lesson_has_its_title_and_parts(lesson):
    text = prose(lesson)
    number = f"{lesson.path.stem[:2]} · " if lesson.path.parent == FOLDER else ""
    assert re.match(rf"# {number}[A-Z]", text), text[:60]
    missing = [heading for heading in HEADINGS if not re.search(rf"^#+ .*{heading}", text, re.M | re.I)]
    assert missing == []


def test_exported_as_a_plain_page_every_view_shows_its_picture_and_sentence(notebook):
    from nbconvert.exporters import HTMLExporter

    notebook.pop("path")
    page = HTMLExporter(template_name="basic").from_notebook_node(notebook)[0]
    shown = [o.data for c in code_cells(notebook) for o in c.outputs if "image/png" in o.get("data", {})]
    sentences = [data["text/plain"] for data in shown]
    pictures = re.findall(r"<img [^>]*?>", page)
    assert len(pictures) == len(sentences)
    for picture, sentence in zip(pictures, sentences):
        assert f'alt="{sentence}"' in unescape(picture)
        assert f"<figcaption>{raised(sentence)}</figcaption>" in unescape(page)
    assert "$" not in prose(notebook), "a page without a network shows TeX as it is written: use plain text, as in 2⁻¹⁴"
    assert not re.search(r"""(?:src|href)=["']https?://(?!127\.0\.0\.1)[^"']*\.(?:js|css|png)""", page)


def test_sanitize_rules_are_in_pairs():
    lines = (ROOT / "tests" / "nbval_sanitize.cfg").read_text().splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("regex:")]
    assert all(lines[i + 1].startswith("replace: ") for i in rules)
    assert len(rules) == sum(line.startswith("replace:") for line in lines) == 1


def test_plain_pytest_collects_every_notebook():
    quick = ["-pno:cacheprovider", "--ignore-glob=*.py"]  # what is collected of modules has to be imported
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *quick, "notebooks"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    collected = {line.split("::")[0] for line in done.stdout.splitlines() if ".ipynb::" in line}
    assert collected == {path.relative_to(ROOT).as_posix() for path in LESSONS}  # the grader runs the labs


def test_the_table_of_lessons_says_what_their_headers_say():
    """Minutes, and which lessons one needs before."""
    table = (ROOT / "notebooks" / "README.md").read_text()
    rows = re.findall(r"^\| \[(?:(\d\d) )?(.*?)\]\((.*?)\) \| [^|]*\| (\d+) \| (.*?) \|$", table, re.MULTILINE)
    lesson = re.compile("|".join(rf"\b{number or title}\b" for number, title, *_ in rows))
    headers = {}
    for path in LESSONS:
        text = nbformat.read(path, as_version=4).cells[0].source
        minutes, needs = re.search(
            r"Time: (\d+) minutes\.\s+Prerequisites?:\s+(.*?)\.(?:\s|$)", text, re.DOTALL
        ).groups()
        before = re.sub(r"\(\S*\)", "", needs)
        headers[path.relative_to(FOLDER).as_posix()] = minutes, set(lesson.findall(before))
    assert {name: (minutes, set(lesson.findall(needs))) for *_, name, minutes, needs in rows} == headers
