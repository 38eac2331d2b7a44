"""The net under the notebooks: bugs planted in the library, one at a time, and a notebook that notices each.

The unit tests have no part in this. Each bug is what a hurried author would write. Its notebook runs under nbval with
a copy of the package that has the bug, and one of its cells must fail: a wrong output, or an assertion.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
from support import ROOT


@dataclass(frozen=True)
class Bug:
    """`right` stands once in `file`; with `wrong` in its place a cell of `notebook` fails."""

    what: str
    file: str
    right: str
    wrong: str
    notebook: str


LAB01, LAB02, LAB03, LAB04 = (
    f"labs/{name}" for name in ("lab01_formats", "lab02_loss_scaling", "lab03_casting_and_diagnosis", "lab04_boost")
)
# nothing but what the notebooks need: other plugins cost more than a second of each run
SPARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PLUGINS = ("-p", "nbval.plugin", "-p", "no:cacheprovider")

BUGS = [
    Bug(
        "the NaN of E4M3 counted as its largest number",
        "formats.py",
        'missing = 2 if self.specials == "nan" else 1',
        "missing = 1",
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
        "a tie that goes to even instead of away",
        "rounding.py",
        "return (y + torch.copysign(y.new_tensor(math.nextafter(0.5, 0.0)), y)).trunc()",
        "return y.round()",
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
        "a backoff without the floor",
        "policies/rule.py",
        "return _at_least(shrunk, p.min_scale)",
        "return shrunk",
        LAB02,
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
        "a scaler without the floor",
        "scalers/scaler.py",
        "torch.maximum(self.scale_value, found_inf, out=self.scale_value)",
        "pass",
        "05_dynamic_loss_scale",
    ),
    Bug(
        "an update in spite of the overflow",
        "step/phases.py",
        "optimizer.found_inf = found_inf",
        "optimizer.found_inf = torch.zeros_like(found_inf)",
        "06_training_step",
    ),
    Bug(
        "O1 without the cast back to float32",
        "casting/levels.py",
        "inside, outside = everything(low, torch.float32), white_operators(low, operators)",
        "inside, outside = everything(low), white_operators(low, operators)",
        "00_start_here",
    ),
    Bug(
        "a layer norm in float16 at O2",
        "casting/lists.py",
        "nn.BatchNorm3d, nn.LayerNorm)",
        "nn.BatchNorm3d)",
        LAB03,
    ),
    Bug(
        "Adam without one of its bias corrections",
        "optimizers/adam.py",
        "u.lr * root(unbiased(beta2, u.count)) / unbiased(beta1, u.count)",
        "u.lr * root(unbiased(beta2, u.count))",
        "07_optimizers_and_schedules",
    ),
    Bug(
        "a chained schedule one step late",
        "schedules.py",
        "at < self.at else self.after.rate(at - self.at)",
        "at < self.at else self.after.rate(at - self.at - 1)",
        "07_optimizers_and_schedules",
    ),
    Bug(
        "a freeze index shifted by one",
        "boost/grad_freeze/strategy.py",
        "cycle = [0] * zeros + list(range(1, groups))",
        "cycle = [0] * zeros + list(range(groups - 1))",
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
        'unscale_with: Literal["used", "updated"] = "used"',
        'unscale_with: Literal["used", "updated"] = "updated"',
        "13_group_loss_scale",
    ),
    Bug(
        "a recorder that forgets to divide by the scale",
        "record/recorder.py",
        "factor = None if unscaled else _reciprocal(scale)",
        "factor = None",
        "15_what_if",
    ),
    Bug(
        "data blamed on the weights",
        "diagnose/run.py",
        'if not name.startswith("batch")]',
        "if name]",
        LAB03,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "-"))
def test_a_notebook_notices(bug, tmp_path):
    shutil.copytree(ROOT / "mpkit", tmp_path / "mpkit")
    source = tmp_path / "mpkit" / bug.file
    text = source.read_text()
    assert text.count(bug.right) == 1, f"{bug.file} has changed: plant this bug anew"
    source.write_text(text.replace(bug.right, bug.wrong))
    notebook = f"notebooks/{bug.notebook}.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-x", "-v", "--tb=short", notebook],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | SPARE | {"PYTHONPATH": str(tmp_path), "MPKIT_DATA": str(ROOT / "data")},
    )
    print(done.stdout, done.stderr)
    cells = re.findall(r"::Cell (\d+) (PASSED|FAILED)", done.stdout)
    assert ("0", "PASSED") in cells, "the bug must not already keep the package from being imported"
    assert cells[-1][1] == "FAILED", f"{notebook} does not notice: {bug.what}"
