"""Bugs planted in the library, one at a time: the contract notices each, and so does a notebook or a graded lab.

The unit tests have no part in this. Each bug is what a hurried author would write. Its notebook runs with a copy of the
package that has the bug, and one of its cells must fail: a wrong output, or an error. Where a cell stores claims
instead of digits, a bug of its own shows that they still notice: that cell must be the first to fail.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants import OWN, copied, files_of
from other_machines import Variant, asked, started
from support import ROOT


@dataclass(frozen=True)
class Bug:
    """`right` stands once in `file`; with `wrong` in its place a cell of `notebook` fails, `cell` first if named."""

    what: str
    file: str
    right: str
    wrong: str
    notebook: str
    cell: int | None = None


LABS = LAB01, LAB02, LAB03, LAB04, LAB05, LAB06, LAB07 = tuple(
    f"instructor/lab0{name}"
    for name in ("1_formats", "2_loss_scaling", "3_casting_and_diagnosis", "4_boost", "5_scales", "6_project", "7_gpu")
)
BUGS = [
    Bug(
        "the NaN of E4M3 counted as its largest number",
        "formats.py",
        'high_nan = self.specials == "nan" or (self.has_nan and not self.signed)',
        "high_nan = self.has_nan and not self.signed",
        "01_number_formats",
    ),
    Bug(
        "subnormals one bit too fine",
        "formats.py",
        "return 2.0 ** (self.min_exponent - self.fraction_bits)",
        "return 2.0 ** (self.min_exponent - self.fraction_bits - 1)",
        LAB01,
    ),
    Bug(
        "a tie that goes to the even neighbour instead of away",
        "rounding.py",
        '    if mode == "nearest_even":\n        return y.round()',
        '    if mode in ("nearest_even", "nearest_away"):\n        return y.round()',
        "02_rounding",
    ),
    Bug(
        "a growth window one step too short",
        "policies/rule.py",
        "due = good == p.growth_interval\n",
        "due = good + 1 == p.growth_interval\n",
        LAB02,
    ),
    Bug(
        "a policy without the floor, in the rule and in its kernel",
        "policies/rule.py",
        "    return _at_least(shrunk, p.min_scale)",
        "    return shrunk",
        "04_dynamic_loss_scale",
    ),
    Bug(
        "half the smallest number not flushed",
        "replay/ceilings.py",
        "math.log2(fmt.min_subnormal) - 1 - np.log2(scales)",
        "math.log2(fmt.min_subnormal) - np.log2(scales)",
        LAB02,
    ),
    Bug(
        "an overflow check that sees NaN only",
        "scalers/finite.py",
        "torch.stack(_extremes(group)).isfinite().all()",
        "torch.stack(_extremes(group)).isnan().any().logical_not()",
        "00_start_here",
    ),
    Bug(
        "an update in spite of the overflow",
        "step/phases.py",
        "optimizer.found_inf = found_inf",
        "optimizer.found_inf = torch.zeros_like(found_inf)",
        "05_training_step",
    ),
    Bug(
        "O1 without the cast back to float32",
        "casting/rules.py",
        "return Rule(handlers, do.sparing_kernels(do.computed(low, WIDE)))",
        "return Rule(handlers, do.sparing_kernels(do.computed(low, low)))",
        "00_start_here",
    ),
    Bug(
        "a layer norm in float16 at O2",
        "casting/operations.toml",
        'black = "BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm"',
        'black = "BatchNorm1d BatchNorm2d BatchNorm3d"',
        LAB03,
    ),
    Bug(
        "Adam without one of its bias corrections",
        "optimizers/adam.py",
        "u.lr * root(unbiased(b2, u.t)) / unbiased(b1, u.t)",
        "u.lr * root(unbiased(b2, u.t))",
        "more/optimizers/optimizer",
    ),
    Bug(
        "a chained schedule one step late",
        "schedules.py",
        "if step < self.at else self.after.number(step - self.at)",
        "if step < self.at else self.after.number(max(step - self.at - 1, 0))",
        "more/optimizers/schedules_and_groups",
    ),
    Bug(
        "a freeze index shifted by one",
        "boost/grad_freeze/strategy.py",
        "cycle = [0] * full_steps(groups, freeze_p) + list(range(1, groups))",
        "cycle = [0] * full_steps(groups, freeze_p) + list(range(groups - 1))",
        LAB04,
    ),
    Bug(
        "a sign in AdaSum",
        "boost/adasum.py",
        "return 1 - torch.where(squares > 0, dot / (2 * squares), 0.0)",
        "return 1 + torch.where(squares > 0, dot / (2 * squares), 0.0)",
        LAB04,
    ),
    Bug(
        "one mean for all outputs in gradient centralization",
        "optimizers/arguments.py",
        "return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)",
        "return grad - grad.mean()",
        LAB04,
    ),
    Bug(
        "gradients divided by the next scale, not by the one that was used",
        "boost/group_loss_scale.py",
        "faithful: bool = False",
        "faithful: bool = True",
        "more/scalers/group_loss_scale",
    ),
    Bug(
        "a recorder that forgets to divide by the scale",
        "record/recorder.py",
        "factor = None if unscaled else _reciprocal(scale)",
        "factor = None",
        "more/evidence/what_if",
    ),
    Bug(
        "data blamed on the weights",
        "diagnose/run.py",
        'return ("weights_non_finite", None, inside) if inside else',
        'return ("weights_non_finite", None, inside or leaves) if inside or leaves else',
        LAB03,
    ),
    Bug(
        "amaxes that stay in the history for a step too long",
        "policies/tensor_scale.py",
        "torch.where(slots == last, newest, entries.roll(-1, -1))",
        "torch.where(slots == last, newest, entries)",
        "more/eight_and_four_bits/tensor_scales",
    ),
    Bug(
        "scales of MX blocks one power of two too large",
        "blocks/scales.py",
        "byte = (bits >> 23) - element.max_exponent",
        "byte = (bits >> 23) - element.max_exponent + 1",
        LAB05,
    ),
    # one for each cell that stores claims about live figures
    Bug(
        "the level of the run with the fewest right digits",
        "lessons/digits.py",
        "(network(images).argmax(1) == labels)",
        "(network(images).argmin(1) == labels)",
        "00_start_here",
        9,
    ),
    Bug(
        "a window that the view forgets",
        "lessons/start.py",
        "float(factor), window, 2.0",
        "float(factor), 50, 2.0",
        "00_start_here",
        15,
    ),
    Bug(
        "a mean square that is not rooted",
        "lessons/casting.py",
        ".square().mean().sqrt()\n    return",
        ".square().mean()\n    return",
        "06_casting_levels",
        5,
    ),
    Bug(
        "the layer before the one that is kept",
        "lessons/casting.py",
        "network.get_submodule(layers[kept - 1])",
        "network.get_submodule(layers[kept - 2])",
        "06_casting_levels",
        7,
    ),
    Bug(
        "gradients that are not rounded to their format",
        "rounding.py",
        "return tangents[0] if grad_fmt is None else quantize(tangents[0], grad_fmt, None, mode, overflow)",
        "return tangents[0]",
        "06_casting_levels",
    ),
    Bug(
        "a training that ignores the scale",
        "lessons/digits.py",
        "    loss, finite = train_step(network, optimizer, scaler,",
        "    loss, finite = train_step(network, optimizer, type(scaler)(1.0),",
        "03_vanishing_gradients",
    ),
    Bug(
        "a float16 that is bfloat16, in which nothing underflows",
        "lessons/digits.py",
        "        return FP16 if device.type",
        "        return torch.bfloat16 if device.type",
        "03_vanishing_gradients",
    ),
    Bug(
        "a step that reports that it was applied",
        "lessons/step.py",
        'done = "skipped" if walk.skipped else "applied"',
        'done = "applied"',
        "05_training_step",
    ),
    Bug(
        "a forward pass without its cast",
        "lessons/step.py",
        '    auto_mixed_precision(network, "O2")\n    if bad',
        '    auto_mixed_precision(network, "O0")\n    if bad',
        "05_training_step",
        3,
    ),
    Bug(
        "a step that goes uphill",
        "lessons/digits.py",
        "parameter.grad = grad\n",
        "parameter.grad = -grad\n",
        "05_training_step",
        6,
    ),
    Bug(
        "a cell that returns the scaled loss",
        "step/cells.py",
        "ctx.outcome = StepOutcome(loss, overflow, step.scaling.shown())",
        "ctx.outcome = StepOutcome(loss * step.scaling.shown(), overflow, step.scaling.shown())",
        "05_training_step",
    ),
    Bug(
        "the least likely digit counted as the answer",
        "lessons/optimizers.py",
        "(network(tests.flatten(1)).argmax(1) == truth)",
        "(network(tests.flatten(1)).argmin(1) == truth)",
        "more/optimizers/optimizer",
    ),
    Bug(
        "a static scale that the optimizer forgets",
        "lessons/optimizers.py",
        "Momentum(p, 0.05, 0.9, decay, scale)",
        "Momentum(p, 0.05, 0.9, decay)",
        "more/optimizers/optimizer",
        9,
    ),
    Bug(
        "an overflow check that sees NaN only, in a training",
        "scalers/finite.py",
        "torch.stack(_extremes(group)).isfinite().all()",
        "torch.stack(_extremes(group)).isnan().any().logical_not()",
        "more/scalers/scaler_zoo",
        16,
    ),
    Bug(
        "an overflow that leaves the count of finite steps as it was",
        "policies/rule.py",
        "    good = _where(bad, -1 * p.first_growth_lag, good)\n",
        "    good = _where(bad, state.good, good)\n",
        "more/scalers/scaler_zoo",
        2,
    ),
    Bug(
        "a frozen step in place of every full one",
        "boost/grad_freeze/optimizer.py",
        "        self.inside(opt)\n",
        "        self.inside(opt) if index else None\n",
        "07_boost_levels",
        9,
    ),
    Bug(
        "a sum of micro-gradients in place of their mean",
        "step/engine.py",
        "share = grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.parts",
        "share = grad.to(torch.promote_types(grad.dtype, torch.float32))",
        "07_boost_levels",
    ),
    Bug(
        "a cosine with a direction that is not the shared one",
        "lessons/adasum.py",
        "float(v @ common / v.norm())",
        "float(v @ updates[0] / v.norm())",
        "more/boost/adasum",
        9,
    ),
    Bug(
        "an inf that never reached the batch",
        "lessons/step.py",
        "images[0, 0, 0, 0] = torch.inf",
        "images[0, 0, 0, 0] = 1.0",
        "05_training_step",
    ),
    Bug(
        "a rate that one worker does not have",
        "lessons/adasum.py",
        "updates = [[rate * g for g",
        "updates = [[g for g",
        "more/boost/adasum",
        11,
    ),
    Bug(
        "gradients that are not rounded to the format",
        "lessons/group_scale.py",
        "kept = round_to(values * scales[batch::DISTINCT, i, None], FORMATS[fmt_name]) != 0",
        "kept = values * scales[batch::DISTINCT, i, None] != 0",
        "more/scalers/group_loss_scale",
    ),
    Bug(
        "one scale that follows the smallest of the groups",
        "lessons/group_scale.py",
        "largest = largest.max(axis=1, keepdims=True)",
        "largest = largest.min(axis=1, keepdims=True)",
        "more/scalers/group_loss_scale",
    ),
    Bug(
        "an advice that is lost",
        "diagnose/report.py",
        '        yield from cures or ["not_tried"',
        '        yield from ["not_tried"',
        "08_overflow_detective",
    ),
    Bug(
        "an interval of 90 % called one of 95 %",
        "experiment/statistics.py",
        "half = student_quantile(0.975, n - 1) * error",
        "half = student_quantile(0.95, n - 1) * error",
        "more/experiments/your_own_experiment",
    ),
    Bug(
        "Bonferroni in the place of Holm",
        "experiment/statistics.py",
        "min(1.0, p * (len(tested) - rank))",
        "min(1.0, p * len(tested))",
        "more/experiments/your_own_experiment",
    ),
    Bug(
        "a share of right answers called percent",
        "experiment/training.py",
        "total += 100 * float(((out.argmax(classes) == y) & counted).sum())",
        "total += float(((out.argmax(classes) == y) & counted).sum())",
        "more/experiments/your_own_experiment",
        15,
    ),
    Bug(
        "finished runs that are run again",
        "experiment/engine.py",
        " for stem, task in tasks.items() if stem not in rows}",
        " for stem, task in tasks.items()}",
        "more/experiments/your_own_experiment",
    ),
    Bug(
        "a level that never reaches the network",
        "experiment/parts.py",
        "auto_mixed_precision(net, level, format_of(dtype))",
        'auto_mixed_precision(net, "O0", format_of(dtype))',
        "more/experiments/your_own_experiment",
        19,
    ),
    Bug(
        "a spread that divides by n",
        "experiment/statistics.py",
        "statistics.fmean(differences), statistics.stdev(differences)",
        "statistics.fmean(differences), statistics.pstdev(differences)",
        LAB06,
    ),
    Bug(
        "a baseline by name that is always the first cell",
        "experiment/grid.py",
        "return [names.index(baseline)] * count",
        "return [0] * count",
        LAB06,
    ),
    Bug(
        "an overflow that quarters torch's scale",
        "policies/presets.py",
        '    "torch": _Row(\n        {"init_scale": 2.0**16, **_USUAL,',
        '    "torch": _Row(\n        {"init_scale": 2.0**16, **_USUAL, "backoff_factor": 0.25,',
        LAB07,
    ),
]


@pytest.fixture(scope="module")
def server():
    """A process that has imported everything but mpkit; each bug gets a fork of it."""
    with started(Variant("a bug", {"MPKIT_DATA": str(ROOT / "data")}), package="") as server:
        yield server
        server.stdin.close()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project, in which a bug stands as long as its test runs."""
    return copied(ROOT, tmp_path_factory.mktemp("planted"))


@contextmanager
def planted(bug, tree):
    source = tree / "mpkit" / bug.file
    text = source.read_text()
    assert text.count(bug.right) == 1, f"{bug.file} has changed: plant this bug anew"
    source.write_text(text.replace(bug.right, bug.wrong))
    try:
        yield
    finally:
        source.write_text(text)


def test_every_bug_can_be_planted():
    """A line that has changed is told at once, not only in the commits whose turn the bug has."""
    gone = [bug.what for bug in BUGS if (ROOT / "mpkit" / bug.file).read_text().count(bug.right) != 1]
    assert gone == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if b.notebook not in LABS], ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_notebook_notices(bug, tree, server):
    notebook = ROOT / "notebooks" / f"{bug.notebook}.ipynb"
    with planted(bug, tree):
        differ = asked(server, notebook=str(notebook), package=str(tree), first=True)["differ"]
    assert differ, f"{notebook.name} does not notice: {bug.what}"
    assert differ[0]["cell"] not in (0, "process ended"), (
        "the bug must not already keep the package from being imported"
    )
    assert bug.cell in (None, differ[0]["cell"])


GRADED = """import sys; import grading; from mpkit import handin
source = handin.read(grading.HERE / sys.argv[1])
found = grading.grade(source, source)
sys.exit(found.points != found.possible)"""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if b.notebook in LABS], ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_lab_notices(bug, tree):
    """Its solutions, right as they are, do not earn every point any more."""
    with planted(bug, tree):
        program = [sys.executable, "-c", GRADED, f"{bug.notebook.removeprefix('instructor/')}.ipynb"]
        environment = os.environ | {"PYTHONPATH": str(tree), "MPKIT_DATA": str(ROOT / "data")}
        ended = subprocess.run(program, cwd=tree / "notebooks" / "instructor", env=environment, capture_output=True)
    assert ended.returncode == 1, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_the_contract_notices(bug, tree):
    """Or, where the bug is one of a lesson, the units of that lesson."""
    module = bug.file.partition("/")[0].removesuffix(".py")
    own = f"tests/unit/lessons/test_{Path(bug.file).stem}.py"
    nearest = files_of(tree, module, contract=True) if module in OWN else [[own]] if (tree / own).exists() else []
    everything = ["tests/unit/lessons"] if module == "lessons" else ["tests/contract"]
    with planted(bug, tree):
        for files in (*nearest, everything):
            program = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
            ended = subprocess.run(program, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True)
            if ended.returncode:
                break
    assert ended.returncode == 1, f"the contract does not notice: {bug.what}"
    assert b"ERROR collecting" not in ended.stdout, "the bug must not already keep the package from being imported"
