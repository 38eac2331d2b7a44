"""The labs: solutions earn every point, releases tell nothing, and an error costs what it should."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from itertools import pairwise
from tempfile import TemporaryDirectory

import labs
import nbformat
import pytest
import yaml
from support import ROOT
from variants import LABS, Draw, varied

SEEDS = range(1, 1 + int(os.environ.get("MPKIT_LAB_VARIANTS", "2")))
SOURCES = {path.stem[:5]: path for path in labs.sources()}


@pytest.fixture(params=SOURCES)
def source(request):
    return nbformat.read(SOURCES[request.param], as_version=4)


def graded(notebook):
    return [c for c in notebook.cells if labs.mark(c).get("grade")]


def test_the_labs_are_there():
    assert set(SOURCES) >= {"lab01", "lab02", "lab03", "lab04", "lab05", "lab06", "lab07"}
    assert set(SOURCES) == set(WRONG)


def test_every_question_has_a_prompt_an_answer_and_visible_and_hidden_tests(source):
    ids = [labs.mark(c)["grade_id"] for c in source.cells if labs.mark(c)]
    assert len(set(ids)) == len(ids)
    questions = {re.fullmatch(r"lab\d\d_(q\d)_(prompt|answer|text|visible|hidden2?)", name).group(1) for name in ids}
    lab = ids[0][:5]
    for question in questions:
        parts = {name.split("_")[2] for name in ids if f"_{question}_" in name}
        assert parts == {"prompt", "text"} or {"prompt", "answer", "visible", "hidden"} <= parts, (lab, question)
    assert all(labs.mark(c)["schema_version"] == 3 and labs.mark(c)["points"] > 0 for c in graded(source))


def test_a_hidden_test_leaves_a_comment_that_names_what_is_checked(source):
    for cell in labs.release(source).cells:
        if labs.mark(cell).get("grade") and cell.cell_type == "code":
            assert cell.source.strip(), labs.mark(cell)["grade_id"]
            assert "assert" in cell.source or cell.source.startswith("# Checked here: ")
            assert "all tests pass" not in cell.source


def test_the_stored_source_earns_every_point(source):
    scores = [labs._scored(cell) for cell in graded(source)]  # nbval proves that the stored outputs are true
    assert all(s.points == s.possible for s in scores if s.points is not None)
    assert 15 <= sum(s.possible for s in scores) <= 40


def test_a_release_has_no_solution_no_hidden_test_and_no_output(source):
    student = labs.release(source)
    text = "\n".join(c.source for c in student.cells)
    for cell in source.cells:
        for region in re.findall(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END", cell.source, re.S):
            secret = [line.strip() for line in region.splitlines() if len(line.strip()) > 25]
            assert not any(line in text for line in secret), "a line of a solution or hidden test is in the release"
    assert "BEGIN" not in text
    assert all(not c.outputs and c.execution_count is None for c in student.cells if c.cell_type == "code")
    assert sum("raise NotImplementedError" in c.source for c in student.cells) == sum(
        labs.mark(c).get("grade_id", "").endswith("_answer") for c in source.cells
    )


def test_a_release_imports_nothing_that_only_its_hidden_tests_use(source):
    code = "\n".join(c.source for c in labs.release(source).cells if c.cell_type == "code")
    text = "\n".join(c.source for c in labs.release(source).cells)
    for line in re.findall(r"^(?:from \S+ )?import .+$", code, re.M):
        for name in re.findall(r"\w+", line.split(" as ")[-1].split("import")[-1]):
            assert len(re.findall(rf"\b{name}\b", text)) > 1, (
                f"{name} is imported for a hidden test: it gives the answer away"
            )


def test_students_find_every_lab_as_it_is_released_and_no_solution_beside_it():
    """`make labs` writes them; a source that changed without it would leave students with the old lab."""
    for path in SOURCES.values():
        stored = nbformat.read(ROOT / "notebooks" / "labs" / path.name, as_version=4)
        assert stored == labs.release(nbformat.read(path, as_version=4)), "run: make labs"
    theirs = [p for p in (ROOT / "notebooks").rglob("*") if p.is_file() and labs.HERE not in p.parents]
    named = [p for p in theirs if p.suffix in (".ipynb", ".py", ".md")]
    assert len(named) > len(SOURCES)
    assert not [p.name for p in named if "### BEGIN SOLUTION" in p.read_text("utf-8")]


def test_nbgrader_makes_the_same_release(source):
    preprocessors = pytest.importorskip("nbgrader.preprocessors", reason="nbgrader is the extra `course`")
    theirs = nbformat.from_dict(source)
    for step in (preprocessors.LockCells(), preprocessors.ClearSolutions(), preprocessors.ClearHiddenTests()):
        theirs, _ = step.preprocess(theirs, {})
    ours = labs.release(source)
    for a, b in zip(ours.cells, theirs.cells):
        assert a.source.rstrip() == b.source.rstrip()


def test_an_unclosed_region_is_refused(source):
    for cell in source.cells:
        cell.source = cell.source.replace("### END SOLUTION", "")
    with pytest.raises(ValueError, match="needs ### BEGIN SOLUTION and ### END SOLUTION"):
        labs.release(source)


def failed(notebook):
    """The graded cells of a notebook that fail, run here one after the other as nbval would: fast, and no sandbox."""
    space, found = {"__name__": "__main__"}, set()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(compile(cell.source, cell.id, "exec"), space)
            except Exception:
                assert labs.mark(cell), f"a cell that is given fails: {cell.source}"
                found.add(labs.mark(cell)["grade_id"])
    for folder in (thing for thing in space.values() if isinstance(thing, TemporaryDirectory)):
        folder.cleanup()
    return found


def graded_tests(notebook):
    return {labs.mark(cell)["grade_id"] for cell in graded(notebook) if cell.cell_type == "code"}


def test_nothing_is_earned_until_something_is_solved(source):
    assert graded_tests(source) <= failed(labs._merged(labs.release(source), source))


def only(lab, question):
    """A lab of one question: its set-up and the question's own cells."""
    source = nbformat.read(SOURCES[lab], as_version=4)
    source.cells = [c for c in source.cells if f"_{question}_" in labs.mark(c).get("grade_id", f"_{question}_")]
    return source


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ('"slow": {"lr": 0.1}', "float32 and slow train in the same way"),
        ('"slow": {"lr": 0.3}, "bf16 O2": {"level": "O2"}, "again": {"lr": 0.3}', "slow and again train in the same"),
        ('"slow": {"lr": 0.2, "batch": 16}', "slow differs from the baseline in ['batch', 'lr'] at once"),
    ],
)
def test_who_has_changed_what_is_the_same_in_all_cells_is_told_that_grading_has_not(cells, said):
    source = only("lab06", "q5")
    submission = nbformat.from_dict(source)
    by = {labs.mark(c).get("grade_id", c.id): c for c in submission.cells}
    by["c21"].source = by["c21"].source.replace('"lr": 0.1', '"lr": 0.5')
    by["lab06_q5_answer"].source = f'def grid():\n    return {{"float32": {{}}, {cells}}}, list(range(5)), "float32"'
    note = labs.grade(submission, source)[-1].note
    assert said in note
    assert "What a cell does not name is taken from USUAL as the lab gives it, even if you have changed it." in note


def test_a_network_of_ones_own_may_stand_in_a_grid():
    source = only("lab06", "q5")
    submission = nbformat.from_dict(source)
    answer = next(c for c in submission.cells if labs.mark(c).get("solution"))
    answer.source = """def mine():
    return Network(inputs=64, hidden=8)


def grid():
    cells = {"O0": {}, "O2": {"level": "O2"}}
    return {name: {"network": mine} | cell for name, cell in cells.items()}, [1, 2, 3, 4, 5], "O0"
"""
    assert [s.note for s in labs.grade(submission, source)] == ["", ""]


def test_what_an_answer_raises_is_said_in_every_test_of_a_question():
    source = only("lab05", "q1")
    submission = nbformat.from_dict(source)
    answer = next(c for c in submission.cells if labs.mark(c).get("solution"))
    answer.source = "def current_scale(x, largest):\n    return min(largest / x.abs().max().item(), TOP)"
    visible, hidden = labs.grade(submission, source)
    assert visible.note == ""
    told = "current_scale(tensor of shape (3, 2), 448.0) raised ZeroDivisionError: float division by zero"
    assert hidden.note == told.replace("tensor of shape (3, 2)", "tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])")


def without_words(code):
    """What code does: its tree without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def test_every_lab_has_variants():
    assert set(LABS) == set(SOURCES)


def test_neighbouring_variants_differ_in_every_choice():
    for count in range(2, 25):
        drawn = [Draw("lab", seed).choice(range(count)) for seed in range(10 * count)]
        assert all(one != other for one, other in pairwise(drawn))
        assert all(set(drawn[i : i + count]) == set(range(count)) for i in range(0, len(drawn), count))


@pytest.mark.parametrize("lab", LABS)
def test_neighbouring_variants_ask_for_other_numbers(lab):
    drawn = [LABS[lab](Draw(lab, seed)) for seed in range(1, 31)]
    assert all(one != other for one, other in pairwise(drawn))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lab", LABS)
def test_a_variant_is_earned_by_its_own_solution_and_by_no_other(lab, seed):
    """MPKIT_LAB_VARIANTS=20 tries the first twenty variants of each lab."""
    source = nbformat.read(SOURCES[lab], as_version=4)
    own, other = varied(source, seed), varied(source, seed - 1)
    assert own == varied(source, seed), "a number gives the same variant each time"
    assert failed(own) == set()
    if seed == 1:
        assert graded_tests(own) <= failed(labs._merged(labs.release(own), own))
    answers, theirs = labs._solutions(own), labs._solutions(other)
    differ = {name for name in answers if without_words(answers[name]) != without_words(theirs[name])}
    if seed == 1:
        assert differ, "the first variant asks nothing new"
    lost = {name.rsplit("_", 1)[0] for name in failed(labs._merged(other, own))}
    assert {name.removesuffix("_answer") for name in differ} - lost == set()


def test_a_variant_of_a_source_that_changed_is_refused():
    source = nbformat.read(SOURCES["lab01"], as_version=4)
    for cell in source.cells:
        cell.source = cell.source.replace("65520", "65 520")
    with pytest.raises(ValueError, match=r"lab01, q3: the source lacks '65520', which variants.py replaces"):
        varied(source, 1)
    with pytest.raises(ValueError, match="whole number from 0, got -1"):
        varied(source, -1)


def test_a_variant_is_released_with_its_solutions_aside_and_graded_as_that_variant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(labs, "sources", lambda: [SOURCES["lab04"]])
    monkeypatch.setattr("sys.argv", ["labs.py", "release", "--variant", "3", "--to", str(tmp_path / "out")])
    home, name = labs.HERE, SOURCES["lab04"].name
    monkeypatch.setattr(labs, "HERE", tmp_path)
    assert labs.main() == 0
    monkeypatch.setattr(labs, "HERE", home)
    released = nbformat.read(tmp_path / "out" / name, as_version=4)
    assert released == labs.release(nbformat.read(tmp_path / "variant-3" / name, as_version=4))
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["labs.py", "grade", str(tmp_path / "variant-3" / name)])
    assert labs.main() == 0
    assert "lab04_boost: 22 of 22 points" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["labs.py", "grade", "--variant", "4", str(tmp_path / "out" / name)])
    assert labs.main() == 1
    assert "it is variant 3, and variant 4 was given out" in capsys.readouterr().err
    released.metadata["mpkit_variant"] = "3"
    with pytest.raises(ValueError, match="the file says '3'"):
        labs.variant_of(released)


# answer cell -> (what a student writes wrong, by replacing text of the solution; the cells that must then fail)
WRONG = {
    "lab01": {
        "q1": (
            ("fraction * 2.0 ** (1 - bias)", "fraction * 2.0**-bias"),
            {"hidden"},
        ),  # subnormals have exponent -14, not -15
        # truncated, not rounded: every test of q3, and none of q4 and q5, which use it
        "q3": (("nearest = round(x / gap) * gap", "nearest = int(x / gap) * gap"), {"visible", "hidden", "hidden2"}),
        "q2": (("2 ** (exponent_bits - 1) - 1", "2 ** (exponent_bits - 1)"), {"visible", "hidden"}),  # bias off by one
    },
    "lab02": {
        "q2": (("max(floor, scale / factor)", "scale / factor"), {"hidden", "hidden2"}),  # no floor
        "q3": (("        return False\n", "        pass\n"), {"hidden"}),  # checks, and updates all the same
        "q1": (("gradient[gradient != 0]", "gradient.flatten()"), {"visible", "hidden"}),  # zeros counted as lost
        "q5": (("int(factor), int(window)", "8, 50"), {"hidden", "hidden2"}),  # two good numbers, and no search
    },
    "lab03": {
        "q1": (("nn.BatchNorm1d | nn.LayerNorm)", "nn.BatchNorm1d)"), {"hidden"}),  # forgets the layer norm
        "q2": (
            ("fl(fl(fl(x) @ fl(weight).T) + fl(bias))", "fl(fl(x) @ fl(weight).T + fl(bias))"),
            {"visible", "hidden"},
        ),
        "q5": (("room - (top + 1)", "room - top - 2"), {"hidden"}),  # one power too small
        "q6": ((".astype(int).max()", ".astype(int).min()"), {"hidden2"}),  # the smallest window, not the largest
    },
    "lab04": {
        "q1": (("range(1, grad.ndim)", "range(0, grad.ndim)"), {"visible", "hidden"}),  # one mean for everything
        "q3": (("range(1, groups)", "range(0, groups)"), {"visible", "hidden"}),  # the indices begin at 1
        "q5": (("a.double(), b.double()", "a, b"), {"hidden2"}),  # inner products in the updates' own dtype
    },
    "lab05": {
        "q1": (("min(largest / amax, TOP)", "largest / amax"), {"hidden"}),  # infinite in float32
        "q2": (("step - length)", "step - length + 1)"), {"visible", "hidden"}),  # a history one step too short
        "q4": (
            ("math.frexp(amax)[1] - 1", "math.floor(torch.tensor(amax).log2().item())"),
            {"hidden"},
        ),  # 9 for the number below 2^9
        "q6": (("exponent - (fraction == 0.5)", "exponent"), {"hidden"}),  # 6 s does not hold 6 s
    },
    "lab06": {
        "q1": (("(n - 1))", "n)"), {"visible", "hidden"}),  # the spread of a population, not of a sample
        "q2": (("middle - half > 0", "middle - half >= 0"), {"hidden"}),  # an end at 0 called better
        "q5": (('"dtype": "bf16"}', '"dtype": "bf16", "lr": 0.2}'), {"hidden"}),  # two changes at once
    },
    "lab07": {
        "q1": (("        synchronize()\n", ""), {"visible", "hidden"}),  # the clock is read before the work is done
        "q2": (("    scaler.unscale_(optimizer)\n", ""), {"hidden"}),  # clips the scaled gradients
        "q3": ((" if place not in own", ""), {"visible", "hidden"}),  # counts the weights
    },
}


@pytest.mark.parametrize("lab", WRONG)
def test_typical_mistakes_lose_exactly_their_points(lab):
    source = nbformat.read(SOURCES[lab], as_version=4)
    submission = nbformat.from_dict(source)
    expected = set()
    for question, ((right, wrong), failing) in WRONG[lab].items():
        cell = next(c for c in submission.cells if labs.mark(c).get("grade_id") == f"{lab}_{question}_answer")
        assert right in cell.source
        cell.source = cell.source.replace(right, wrong)
        expected |= {f"{lab}_{question}_{part}" for part in failing}
    # edited or deleted tests do not help: the tests of the source are run
    submission.cells = [c for c in submission.cells if not labs.mark(c).get("grade_id", "").endswith("_hidden")]
    scores = labs.grade(submission, source)
    assert {s.grade_id for s in scores if s.points == 0} == expected
    assert all(s.note for s in scores if s.points == 0)


# wrong, and once judged right: (lab, question, test that notices it, text of the solution, what it becomes)
EVERY = "if not all(bool(grad.isfinite().all()) for grad in grads):"
JOINT = "torch.nn.utils.clip_grad_norm_(network.parameters(), max_norm)"
TWO_SPELLINGS = """"half": {"level": "O2", "dtype": "float16"},
        "again": {"level": "O2", "dtype": __import__("torch").float16}"""
THIRD = '"e5m1 O2": {"level": "O2", "dtype": "e5m1", "scaler": "torch"}'
OTHERS = '"bf16 O2": {"level": "O2", "dtype": "bf16"},\n        ' + THIRD
CELLS = '"float32": {"level": "O0"},\n        ' + OTHERS
HALF = """"float32": {"level": "O2", "dtype": "float16"},
        "slow": {"level": "O2", "dtype": __import__("torch").float16, "lr": 0.05}"""
LATER = "        output = network(batch)\n    loss = F.cross_entropy(output"
SIMULATED = """scales, scale, good = [], 2.0**10, 0
    for finite in flags:
        good = (good + 1) % interval if finite else 0
        scale = scale / 2 if not finite else 2 * scale if not good else scale
        scales.append(scale)
    for finite in []:"""
SEARCH = "d = 2.0 ** math.floor(math.log2(w))\n    while rounded(w + d) != w:\n        d /= 2\n"
SEARCH_UP = "d = 2.0**-24\n    while rounded(w + 2 * d) == w:\n        d *= 2\n"
SHARES = "(cast == 0).double().mean().item(), cast.isinf().double().mean().item()"
TWICE = "    experiment(project, cells, seeds=seeds, progress=False)\n    return experiment"
NEARLY = [
    (
        "lab01",
        "q5",
        "hidden",
        "return total",
        "return rounded(math.fsum(values))",
    ),  # the exact sum, unrounded on its way
    ("lab01", "q5", "hidden", "rounded(rounded(t - total) - y)", "(t - total) - y"),  # more than FP16 holds
    ("lab01", "q1", "hidden", "    sign = -1", "    from mpkit.formats import FP16\n    sign = -1"),  # the library
    ("lab01", "q4", "hidden", SEARCH, SEARCH_UP),  # near the smallest normal number not even 2^-24 is lost
    ("lab02", "q1", "visible", SHARES, SHARES.replace(".item()", "")),  # tensors, not floats
    ("lab02", "q1", "hidden", "    cast =", "    gradient *= scale\n    cast ="),
    ("lab02", "q2", "hidden2", "scale / factor", "scale // factor"),
    ("lab02", "q2", "hidden2", "grown <= torch", "grown < torch"),  # the largest float32 number is not too large
    ("lab02", "q3", "hidden", EVERY, "if not loss.isfinite():"),  # a finite loss can have gradients that are not
    ("lab02", "q3", "hidden", EVERY, "if not grads[0].isfinite().all():"),  # one gradient of six
    ("lab02", "q3", "hidden", EVERY, "if any(bool(grad.isnan().any()) for grad in grads):"),  # NaN alone
    ("lab02", "q3", "hidden", EVERY, "if any(bool(grad.isinf().any()) for grad in grads):"),  # inf alone
    ("lab02", "q4", "hidden", JOINT, "[torch.nn.utils.clip_grad_norm_(p, max_norm) for p in network.parameters()]"),
    ("lab02", "q4", "hidden", JOINT, JOINT.replace("norm_", "value_")),  # each value alone
    ("lab03", "q1", "hidden", "nn.BatchNorm1d | nn.LayerNorm)", "nn.BatchNorm1d | nn.LayerNorm | nn.Conv2d)"),
    ("lab03", "q2", "hidden", "t.half().double()", "t.half().float()"),  # added up in float32
    ("lab03", "q3", "hidden", "scale=1024.0", "scale=1.0"),
    ("lab03", "q3", "hidden", "batch, loss_of", "batch, nn.functional.cross_entropy"),
    ("lab03", "q4", "hidden", "torch.float16)", "torch.bfloat16)"),  # another format
    ("lab03", "q4", "hidden", '"O2"', '"O1"'),  # another level
    ("lab03", "q4", "hidden", "    return network", "    network[1].weight.data /= 1000\n    return network"),
    (
        "lab03",
        "q4",
        "hidden",
        "    return network",
        "    network[3] = nn.Identity()\n    return network",
    ),  # another function
    ("lab03", "q5", "hidden", "np.asarray(trace.gradients.exponents)[used].max()", "trace.gradients.exponents[-1]"),
    ("lab03", "q6", "hidden", "nonfinite[row])[0]]", "nonfinite[row])[-1]]"),  # the last of the layers that broke
    (
        "lab03",
        "q6",
        "hidden",
        "np.flatnonzero(trace.activations.nonfinite[row])[0]",
        "trace.activations.nonfinite[row].argmax()",
    ),
    ("lab03", "q6", "hidden", "nonfinite[row])[0]]", "nonfinite.sum(0))[0]]"),  # a layer that broke in a later step
    ("lab03", "q6", "hidden", "np.flatnonzero(trace.activations.step == trace.step[broken[0]])[0]", "broken[0]"),
    (
        "lab04",
        "q2",
        "hidden",
        "for images, labels in batches:",
        "for images, labels in [tuple(map(torch.cat, zip(*batches)))]:",
    ),
    ("lab04", "q3", "hidden", "int(p *", "round(p *"),  # rounded to the nearest
    ("lab04", "q5", "hidden2", "a.double(), b.double()", "a.float(), b.float()"),  # wider, and not wide enough
    (
        "lab04",
        "q5",
        "hidden2",
        "    wide_a",
        "    if not (a * b).sum().isfinite():\n        return a\n    wide_a",
    ),  # one of the two, where the product overflows
    ("lab04", "q2", "hidden", "return total", "return total if len(batches) == 1 else []"),  # compared with nothing
    ("lab04", "q4", "hidden", "len(costs) // groups", "-(-len(costs) // groups)"),  # rounded up
    ("lab04", "q4", "hidden", "costs[: v * stride]", "costs[: round(v * len(costs) / groups)]"),  # rounded too late
    (
        "lab05",
        "q1",
        "hidden",
        "x.abs().max().item()",
        "max(abs(v) for v in x.flatten().tolist())",
    ),  # no NaN but a first
    ("lab05", "q1", "hidden", "x.abs().max().item()", "x.abs().max(0).values.flatten()[0].item()"),  # one column
    ("lab05", "q1", "hidden", "x.abs()", "x.abs_()"),
    ("lab05", "q2", "hidden", "largest / (margin", "448.0 / (margin"),
    (
        "lab05",
        "q2",
        "hidden",
        "return scales[: len(amaxes)]",
        "scales = scales[: len(amaxes)]\n    amaxes.clear()\n    return scales",
    ),
    ("lab05", "q3", "hidden", "largest * 1.000001", "largest * 1.0000001"),  # counts rounding errors
    ("lab05", "q4", "hidden", "block.abs().max()", "block.abs().sum()"),
    ("lab05", "q4", "hidden", "block.abs()", "block.abs_()"),
    ("lab05", "q5", "hidden", "torch.cat(parts)", "torch.cat(parts).double()"),
    ("lab05", "q6", "hidden", "block.abs()", "block.abs_()"),
    ("lab05", "q6", "hidden", "max(exponent - (fraction == 0.5), -127)", "(exponent - (fraction == 0.5))"),  # no floor
    ("lab06", "q1", "hidden", " and math.isfinite(base[s])", ""),
    ("lab06", "q1", "hidden", "if n < 2", "if len(own.keys() & base.keys()) < 2"),  # counted before nan is left out
    ("lab06", "q1", "hidden", "    mean =", "    own.clear()\n    mean ="),
    ("lab06", "q1", "hidden", "T[n - 1]", "T[2]"),
    ("lab06", "q1", "hidden", "return mean - half", "return min(mean - half, 0.0)"),
    ("lab06", "q2", "hidden", "middle + half < 0", "middle + half <= 0"),
    ("lab06", "q2", "hidden", "math.log2(comparisons)", "(comparisons.bit_length() - 1)"),
    ("lab06", "q2", "hidden", "math.log2(comparisons)", "math.ceil(math.log2(comparisons))"),
    ("lab06", "q5", "hidden", THIRD, '"e5m1 O2": {"levle": "O2"}'),
    ("lab06", "q5", "hidden", THIRD, '"e5m1 O2": {"level": "O2", "dtype": "e5m1x"}'),
    ("lab06", "q5", "hidden", THIRD, '"again": {"lr": 0.1}'),  # what `project` takes in any case
    ("lab06", "q5", "hidden", "list(range(5))", "[0.5 * i for i in range(5)]"),
    ("lab06", "q6", "hidden", "seeds=seeds", "seeds=len(seeds)"),
    ("lab06", "q6", "hidden", "project,", "train,"),  # its own data and epochs
    ("lab06", "q6", "hidden", "    return experiment", TWICE),
    (
        "lab06",
        "q6",
        "hidden",
        "project, cells,",
        "project, {'float32': {}, 'bf16 O2': {'level': 'O2', 'dtype': 'bf16'}},",
    ),
    ("lab06", "q5", "hidden", THIRD, '"bf16": {"dtype": "bf16"}'),  # at O0, where nothing is cast
    ("lab06", "q5", "hidden", THIRD, '"again": {"level": "O2", "dtype": "bf16"}'),  # a cell twice
    ("lab06", "q5", "hidden", THIRD, TWO_SPELLINGS),
    ("lab06", "q5", "hidden", THIRD, '"slow": {"lr": 0.05}'),  # two questions: a format in one cell, a rate in another
    ("lab06", "q5", "hidden", OTHERS, '"slow": {"lr": 0.05}, "freezing": {"boost": "grad_freeze"}'),
    ("lab06", "q6", "hidden", "progress=False", "progress=True"),
    ("lab06", "q6", "hidden", ", progress=False", ""),
    ("lab07", "q2", "hidden", "    optimizer.zero_grad()", "    optimizer.zero_grad()\n    batch.sub_(batch.mean())"),
    ("lab07", "q2", "hidden", "    return scaler", "    target.zero_()\n    return scaler"),
    ("lab07", "q3", "hidden", "        return t\n", "        x.held = [*getattr(x, 'held', ()), t]\n"),  # None
    ("lab07", "q3", "hidden", "        return t\n", "        return torch.zeros_like(t)\n"),
    ("lab07", "q3", "hidden", "lambda t: t)", "lambda t: None)"),
    ("lab07", "q3", "hidden", "    del output\n", "    x.zero_()\n"),
    ("lab07", "q1", "hidden", "statistics.median(times)", "min(times)"),
    (
        "lab07",
        "q1",
        "hidden",
        "work()\n    synchronize()\n    times",
        "work()\n    times",
    ),  # the warm-up is measured too
    ("lab07", "q1", "hidden", "median(", "median_low("),
    ("lab07", "q2", "hidden", "    with torch.autocast(DEVICE.type, dtype):\n        loss", "    loss"),
    ("lab07", "q2", "hidden", "(DEVICE.type, dtype)", "(DEVICE.type, torch.bfloat16)"),
    ("lab07", "q2", "hidden", "        loss = F.cross_entropy(network(batch)", LATER),
    ("lab07", "q2", "hidden", "(batch), target)", "(batch), target, reduction='sum')"),  # the same step, once clipped
    ("lab07", "q2", "hidden", "scaler.get_scale() >= before", "math.isfinite(loss.item())"),  # its gradients
    ("lab07", "q2", "hidden", ">= before", "== before"),  # a step that raises the scale is no skipped one
    ("lab07", "q3", "hidden", "t.untyped_storage().nbytes()", "t.nbytes"),  # a slice keeps its whole storage
    ("lab07", "q3", "hidden", "t.untyped_storage().nbytes()", "t.untyped_storage().nbytes() // t.element_size() * 4"),
    (
        "lab07",
        "q3",
        "hidden",
        "found[t.untyped_storage().data_ptr()]",
        "found[t.data_ptr()]",
    ),  # two halves of a storage
    ("lab07", "q3", "hidden", "network.parameters()}", "network.parameters() if p.requires_grad}"),
    ("lab07", "q4", "hidden", "for finite in flags:", "while flags:\n        finite = flags.pop(0)"),
    ("lab07", "q4", "hidden", "scales = []\n    for finite in flags:", SIMULATED),  # no GradScaler is asked
    ("lab07", "q4", "hidden", "scaler.step(", "scaler.unscale_("),  # the scale moves, and no weight
]
# right, in an unusual form, and once refused by a hidden test after the visible one had passed
LISTED = "[i for i, (amax, scale) in enumerate(zip(amaxes, scales)) if amax * scale > largest * 1.000001]"
ARRAY = "torch.tensor([a * s > largest * 1.000001 for a, s in zip(amaxes, scales)]).nonzero().flatten().numpy()"
SINGLE = "import numpy as np\n    return sum(np.float32(max(curve)) - np.float32(curve[-1]) for curve in curves)"
UNUSUAL = [
    ("lab01", "q1", "def decode", "from functools import lru_cache\n\n\n@lru_cache\ndef decode"),
    (
        "lab01",
        "q2",
        "return (2 - eps) * 2.0**bias, smallest, smallest * eps, eps",
        "return [(2 - eps) * 2.0**bias, smallest, smallest * eps, eps]",
    ),
    ("lab02", "q2", "return scale, counter", "return [scale, counter]"),
    ("lab02", "q1", f"return {SHARES}", f"return [{SHARES}]"),
    ("lab02", "q5", "return int(factor), int(window)", "return float(factor), float(window)"),
    ("lab03", "q3", "return report.verdict, report.module", "return [report.verdict, report.module]"),
    ("lab03", "q6", "int(table", "float(table"),
    ("lab04", "q2", "return total", "return (gradient for gradient in total)"),
    (
        "lab04",
        "q3",
        "return (cycle * (steps // len(cycle) + 1))[:steps]",
        "return tuple(cycle * (steps // len(cycle) + 1))[:steps]",
    ),
    ("lab05", "q2", "return scales[: len(amaxes)]", "return tuple(scales[: len(amaxes)])"),
    ("lab05", "q2", "return scales[: len(amaxes)]", "return torch.tensor(scales[: len(amaxes)])"),
    ("lab05", "q3", LISTED, ARRAY),
    ("lab05", "q3", LISTED, f"tuple({LISTED})"),
    ("lab06", "q3", "return sum(max(curve) - curve[-1] for curve in curves)", SINGLE),
    (
        "lab06",
        "q5",
        OTHERS,
        '"slow": {"lr": 0.05}, "slower": {"lr": 0.01}',
    ),  # 0.05 is `train`'s default, and not theirs
    ("lab06", "q5", CELLS, HALF),
    ("lab06", "q5", THIRD, '"mxfp8": {"recipe": "mxfp8"}'),  # formats all of them
    ("lab06", "q5", "same | cell", '{"network": lambda: Network(inputs=64, hidden=8)} | cell'),  # new ones
    ("lab07", "q2", "scaler.get_scale() >= before", "torch.tensor(scaler.get_scale() >= before)"),
    ("lab07", "q4", "return scales", "return tuple(scales)"),
    ("lab07", "q4", "return scales", "return torch.tensor(scales)"),
    ("lab06", "q5", '"float32": {"level": "O0"}', '"float32": {"level": "O0", "boost": "O0"}'),  # `train`'s own default
]


def failed_in(lab, question, old, new, variant=0):
    """The tests of one question, run alone, that fail when `new` stands in its solution for `old`."""
    source = varied(nbformat.read(SOURCES[lab], as_version=4), variant)
    cell = next(c for c in source.cells if labs.mark(c).get("grade_id") == f"{lab}_{question}_answer")
    assert cell.source.count(old) == 1
    cell.source = cell.source.replace(old, new)
    mine = graded_tests(source) | {f"{lab}_{question}_visible"}
    others = {name for name in mine if f"_{question}_" not in name}
    source.cells = [c for c in source.cells if labs.mark(c).get("grade_id") not in others]
    return failed(source)


@pytest.mark.parametrize(("lab", "question", "test", "right", "wrong"), NEARLY)
def test_a_mistake_that_is_nearly_right_loses_points(lab, question, test, right, wrong):
    assert failed_in(lab, question, right, wrong) == {f"{lab}_{question}_{test}"}


@pytest.mark.parametrize("variant", [0, 3, 4, 5])  # a step of 0.05, and of each length that a variant may ask for
def test_a_softmax_before_the_cross_entropy_loses_points_however_short_the_step_is(variant):
    lost = failed_in("lab07", "q2", "(batch), target)", "(batch).softmax(1), target)", variant)
    assert lost == {"lab07_q2_hidden"}


@pytest.mark.parametrize(("lab", "question", "usual", "unusual"), UNUSUAL)
def test_a_right_answer_in_another_form_earns_its_points(lab, question, usual, unusual):
    assert failed_in(lab, question, usual, unusual) == set()


@pytest.mark.parametrize(
    ("lab", "broken", "later"),
    [
        ("lab01", "q3", {"q4", "q5"}),
        ("lab04", "q5", {"q6"}),
        ("lab05", "q2", {"q3"}),
        ("lab05", "q4", {"q5"}),
    ],
)
def test_an_answer_that_defines_nothing_costs_no_hidden_test_of_a_later_question(lab, broken, later):
    source = nbformat.read(SOURCES[lab], as_version=4)
    cell = next(c for c in source.cells if labs.mark(c).get("grade_id") == f"{lab}_{broken}_answer")
    cell.source = "raise PermissionError('refused')"
    lost = {name for name in failed(source) if f"_{broken}_" not in name}
    assert lost <= {f"{lab}_{question}_visible" for question in later}


@pytest.mark.parametrize(
    "share",
    ["(groups - 1) * (p / (1 - p))", "(groups - 1) / (1 / p - 1) if p else 0", "(groups - 1) * p / (1 - p) + 1e-9"],
)
def test_the_freeze_sequence_does_not_hinge_on_a_last_bit(share):
    notebook = nbformat.read(SOURCES["lab04"], as_version=4)
    cell = next(c for c in notebook.cells if labs.mark(c).get("grade_id") == "lab04_q3_answer")
    assert "p * (groups - 1) / (1 - p)" in cell.source
    cell.source = cell.source.replace("p * (groups - 1) / (1 - p)", share)
    assert failed(notebook) == set()


def tiny(*answers, setup="limit = 3"):
    """A lab with one answer and one test per given code, and a submission in which a cell was added in front."""
    cells = [nbformat.v4.new_code_cell(setup)]
    for number, answer in enumerate(answers, 1):
        ids = {"schema_version": 3, "locked": False, "task": False}
        cells.append(nbformat.v4.new_code_cell(answer, metadata={"nbgrader": ids | {"grade_id": f"q{number}"}}))
        cells[-1].metadata.nbgrader |= {"grade": False, "solution": True}
        ids |= {"grade_id": f"q{number}_test", "grade": True, "solution": False, "points": number}
        cells.append(nbformat.v4.new_code_cell(f"assert q{number}() == limit", metadata={"nbgrader": ids}))
    source = nbformat.v4.new_notebook(cells=cells)
    submission = nbformat.from_dict(source)
    submission.cells.insert(1, nbformat.v4.new_code_cell("def helper():\n    return 3"))
    submission.cells[0].source = "limit = 'edited'"
    return submission, source


def test_added_cells_count_and_an_endless_loop_or_a_dead_process_costs_points_not_the_grading(monkeypatch):
    monkeypatch.setattr("sandbox.GRACE", 1.0)
    right, endless = "def q1():\n    return helper()", "def q2():\n    while True:\n        pass"
    deaf = "def q3():\n    while True:\n        try:\n            q2()\n        except:\n            pass"
    scores = labs.grade(*tiny(right, endless, deaf, "def q4():\n    return 3"), timeout=1)
    assert [s.points for s in scores] == [1, 0, 0, 0]
    assert scores[1].note == "q2() took too long"
    assert "ended the process" in scores[2].note
    assert "ended the process" in scores[3].note


def as_saved(submission, how):
    """As an editor or a student leaves a file."""
    for cell in submission.cells:
        if how == "ids and names lost":
            del cell["id"]
            cell.metadata = {}
        elif how == "names lost":
            cell.metadata = {}
        elif how == "odd names":
            cell.metadata["nbgrader"] = "x"
        elif how == "ids lost":
            del cell["id"]
        elif how == "Colab":
            cell.metadata["id"] = cell.pop("id")
    submission.nbformat_minor = 4 if "ids" in how or how == "Colab" else 5
    if how == "the other way round":
        submission.cells.reverse()
    return submission


@pytest.mark.parametrize("how", ["as released", "names lost", "odd names", "ids lost", "Colab", "the other way round"])
def test_an_answer_is_found_however_its_file_was_saved(how):
    """Colab and older editors write no ids: no file of theirs could be graded."""
    submission, source = tiny("def q1():\n    return 3", "def q2():\n    return 3")
    assert [s.points for s in labs.grade(as_saved(submission, how), source)] == [1, 2]


def test_a_file_in_which_nothing_is_known_is_told_so():
    submission, source = tiny("def q1():\n    return 3")
    with pytest.raises(ValueError, match="no cell of it is an answer of this lab"):
        labs.grade(as_saved(submission, "ids and names lost"), source)


def test_the_setup_of_a_file_without_ids_is_not_run_as_a_cell_that_was_added():
    submission, source = tiny("def q1():\n    return 3")
    submission.cells[0].source = source.cells[0].source
    merged = labs._merged(as_saved(submission, "ids lost"), source)
    assert [c.source for c in merged.cells].count("limit = 3") == 1


new = nbformat.v4.new_code_cell
STUBBED = labs.STUB["code"]


@pytest.mark.parametrize(
    ("before", "parts", "behind", "points", "note"),
    [
        ("", ["def half():\n    return 1.5", "def q1():\n    return 2 * half()"], "", 1, ""),  # split
        ("def two():\n    return 2", [STUBBED, "def q1():\n    return two() + 1"], "", 1, ""),  # copied
        ("", ["def q1():\n    return 3", STUBBED], "", 1, ""),
        ("", [STUBBED], "def q1():\n    return 3", 1, ""),  # answered in a cell of one's own
        ("", [STUBBED], "def q1():\n    return 4", 0, "AssertionError (the answer: NotImplementedError)"),
        (
            "",
            ["def q1():\n    return 4"],
            "1 / 0",
            0,
            "AssertionError (the answer: ZeroDivisionError: division by zero)",
        ),
    ],
)
def test_all_cells_of_an_answer_count(before, parts, behind, points, note):
    """Split or copied, an answer was its last cell alone, without what was added before the first."""
    submission, source = tiny("def q1():\n    return 0")
    (own,) = (c for c in submission.cells if labs.mark(c).get("solution"))
    at = submission.cells.index(own)
    copies = [new(text, metadata=own.metadata) for text in parts]
    submission.cells[at : at + 1] = [new(before), *copies, nbformat.v4.new_markdown_cell("so:"), new(behind)]
    (score,) = labs.grade(submission, source)
    assert (score.points, score.note) == (points, note)


def test_a_cell_behind_an_answer_may_use_what_the_answer_may():
    setup = "limit = 3\nfrom mpkit.arguments import check_number"
    submission, source = tiny("def q1():\n    return helper_behind()", setup=setup)
    submission.cells.insert(3, new("def helper_behind():\n    return check_number('x', 3)"))
    (score,) = labs.grade(submission, source)
    assert score.points == 0
    assert "check_number of the library is not for this question" in score.note


def test_a_code_cell_beside_a_text_is_none_of_it():
    submission, source = tiny("def q1():\n    return helper()")
    mark = {"schema_version": 3, "locked": False, "task": False, "solution": True, "grade": True, "points": 4}
    text = nbformat.v4.new_markdown_cell("words", metadata={"nbgrader": mark | {"grade_id": "text"}})
    for notebook, at in ((submission, 2), (source, 1)):  # in the submission, behind the helper
        notebook.cells.insert(at, text)
    submission.cells.insert(3, new("print(1)"))
    assert [(s.points, s.note) for s in labs.grade(submission, source)] == [(None, "by hand"), (1, "")]
    assert labs._parts(submission, source)["text"] == [(True, "words")]


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(labs, "grade", lambda submission, source: [labs.Score("q", 1, 2)])
    files = [tmp_path / student / "Lab01 formats.ipynb" for student in ("ann", "bob")]
    for file in files:
        file.parent.mkdir()
        file.write_text(nbformat.writes(nbformat.v4.new_notebook()))
    monkeypatch.setattr("sys.argv", ["labs.py", "grade", *map(str, files)])
    assert labs.main() == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        str(file.with_suffix("")) for file in files
    ]


def test_a_machine_that_cannot_run_the_lab_gives_nobody_a_zero():
    with pytest.raises(RuntimeError, match=r"set-up cell of the lab fails here \(ModuleNotFoundError"):
        labs.grade(*tiny("def q1():\n    return 3", setup="import no_such_module"))


def test_a_deleted_answer_is_named(source):
    submission = labs.release(source)
    submission.cells = [c for c in submission.cells if not labs.mark(c).get("grade_id", "").endswith("_q2_answer")]
    with pytest.raises(ValueError, match=r"no cell lab\d\d_q2_answer"):
        labs.grade(submission, source)


def test_the_commands_release_and_grade(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["labs.py", "release", "--to", str(tmp_path)])
    assert labs.main() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in labs.sources()]
    monkeypatch.setattr(labs, "grade", lambda submission, source: [labs.Score("lab01_q1_visible", 0, 2, "no")])
    monkeypatch.setattr("sys.argv", ["labs.py", "grade", str(tmp_path / "lab01_formats.ipynb")])
    assert labs.main() == 0
    assert "lab01_formats: 0 of 2 points, 0 more to grade by hand" in capsys.readouterr().out
    (tmp_path / "lab02_broken.ipynb").write_text("{")
    names = [str(tmp_path / name) for name in ("lab02_broken.ipynb", "lab01_formats.ipynb")]
    monkeypatch.setattr("sys.argv", ["labs.py", "grade", "--csv", *names])
    assert labs.main() == 1, "one file could not be read"
    shown = capsys.readouterr()
    assert "lab02_broken.ipynb was not graded" in shown.err
    assert shown.out.splitlines() == ["submission,cell,points,possible,note", "lab01_formats,lab01_q1_visible,0,2,no"]
    with pytest.raises(ValueError, match="must carry the name of one lab"):
        labs.source_of(tmp_path / "homework.ipynb")


def test_the_example_workflow_runs_the_two_commands_of_the_readme():
    steps = yaml.safe_load((labs.HERE / "course-ci.yml").read_text())["jobs"]["labs"]["steps"]
    commands = "\n".join(step.get("run", "") for step in steps)
    for command in ("make lab", "make test"):
        assert command in commands
        assert command in (ROOT / "README.md").read_text()


def test_the_notes_state_the_points_of_every_lab(source):
    possible = [labs._scored(cell) for cell in graded(source)]
    machine = sum(s.possible for s in possible if s.points is not None)
    hand = sum(s.possible for s in possible if s.points is None)
    number = labs.mark(graded(source)[0])["grade_id"][3:5]
    row = next(
        line for line in (labs.HERE / "INSTRUCTOR.md").read_text().splitlines() if line.startswith(f"| {number} ")
    )
    assert f"| {machine} + {hand} |" in row


def test_what_lab_07_asks_about_its_table_is_what_the_table_shows(monkeypatch):
    """At O1 and O2 the backward pass keeps more than half of the bytes of float32, of the images shown alone."""
    monkeypatch.setenv("MPKIT_DEVICE", "cpu")
    names: dict[str, object] = {}
    for cell in nbformat.read(SOURCES["lab07"], as_version=4).cells:
        if cell.cell_type == "code" and "HIDDEN TESTS" not in cell.source:
            exec(cell.source.split("shown(levels)")[0], names)
            names["shown"] = lambda table: None
    names |= {"STEPS": 1, "SHOWN": 64}
    told = names["levels"]().splitlines()
    kept = {tuple(line.split()[:2]): float(re.search(r"(\S+) MB kept", line)[1]) for line in told}
    values = {"perceptron": 64 * (784 + 512 + 512), "convolution": 64 * (784 + 8 * 14 * 14 + 16 * 7 * 7)}
    for network, count in values.items():
        assert kept[network, "O0:"] == round(4 * count / 1e6, 2)
        for level in ("O1:", "O2:"):
            assert kept[network, level] > 0.5 * kept[network, "O0:"]


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ("-3", "a variant is a whole number from 0, got -3"),
        ("2", "file/lab01_formats.ipynb cannot be written: Not a dir"),
    ],
)
def test_a_release_that_cannot_be_made_is_told_and_leaves_no_folder(variant, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(labs, "HERE", tmp_path / "instructor")
    monkeypatch.setattr(labs, "sources", SOURCES.values)
    monkeypatch.setattr("sys.argv", ["labs.py", "release", "--variant", variant, "--to", str(tmp_path / "file")])
    assert labs.main() == 1
    assert "nothing was released: " in (told := capsys.readouterr()).err
    assert says in told.err
    assert not told.out
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def blocked_by_a_folder(folder, monkeypatch):
    (folder / "lab04_boost.ipynb").mkdir()
    return "a folder stands in its place"


def blocked_when_it_takes_its_place(folder, monkeypatch):
    def replace(draft, path):
        if path.name == "lab04_boost.ipynb":
            raise PermissionError(13, "Permission denied", str(draft))
        put(draft, path)

    put = os.replace
    monkeypatch.setattr(labs.os, "replace", replace)
    return "Permission denied"


@pytest.mark.parametrize("variant", ["0", "2"])
@pytest.mark.parametrize("blocked", [blocked_by_a_folder, blocked_when_it_takes_its_place])
def test_a_release_that_is_blocked_at_one_file_changes_none(blocked, variant, tmp_path, monkeypatch, capsys):
    home = tmp_path / "instructor"
    (folder := tmp_path / "out").mkdir()
    (folder / "lab01_formats.ipynb").write_text("old")
    why = blocked(folder, monkeypatch)
    there = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(labs, "HERE", home)
    monkeypatch.setattr(labs, "sources", SOURCES.values)
    monkeypatch.setattr("sys.argv", ["labs.py", "release", "--variant", variant, "--to", str(folder)])
    assert labs.main() == 1
    told = capsys.readouterr()
    assert told.err == f"nothing was released: {folder / 'lab04_boost.ipynb'} cannot be written: {why}\n"
    assert not told.out
    assert sorted(tmp_path.rglob("*")) == there
    assert (folder / "lab01_formats.ipynb").read_text() == "old"


@pytest.mark.parametrize(("variant", "folder"), [(0, ""), (3, ""), (3, "variant-3")])
def test_a_release_never_takes_the_place_of_the_solutions(variant, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "HERE", tmp_path)
    with pytest.raises(ValueError, match="holds solutions, which the released labs would replace"):
        labs.write_releases(variant, tmp_path / folder)
    assert not [*tmp_path.iterdir()]


def test_a_reader_who_stops_early_gets_no_traceback():
    command = [sys.executable, str(labs.HERE / "labs.py"), "grade", "--csv", str(SOURCES["lab04"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as grading:
        assert grading.stdout is not None
        grading.stdout.close()  # as `| head -0` does
        assert grading.stderr is not None
        told = grading.stderr.read()
    assert (grading.returncode, told) == (141, "")


def test_an_answer_that_changes_the_images_in_place_costs_no_other_question():
    source = nbformat.read(SOURCES["lab03"], as_version=4)
    submission = nbformat.from_dict(source)
    cell = next(c for c in submission.cells if labs.mark(c).get("grade_id") == "lab03_q1_answer")
    cell.source = re.sub(r"^( +)(### BEGIN SOLUTION)", r"\1images.zero_()\n\1\2", cell.source, count=1, flags=re.M)
    assert "images.zero_()" in cell.source
    assert all(s.points in (s.possible, None) for s in labs.grade(submission, source))
