"""Every committed trace loads, is documented, and is reproduced by a replay of the policy that was really used."""

import json
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import numpy as np
import pytest
from support import ROOT

from mpkit.policies import ScalePolicy
from mpkit.record import Trace
from mpkit.replay import replay

FOLDER = ROOT / "data" / "traces"
FILES = sorted(FOLDER.glob("*.npz"))


def test_there_are_traces_and_each_is_documented():
    assert len(FILES) >= 6
    text = (FOLDER / "README.md").read_text()
    maker = (FOLDER / "make_traces.py").read_text()
    for path in FILES:
        assert f"`{path.name}`" in text, f"{path.name} has no line in data/traces/README.md"
        assert f"def {path.stem}(" in maker, f"nothing in make_traces.py makes {path.name}"
        assert path.stat().st_size < 400_000
    assert sum(path.stat().st_size for path in FILES) < 2_000_000


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_policy_really_used_gives_the_recorded_scale_and_skips(path):
    trace = Trace.load(path)
    policy = ScalePolicy(**(trace.meta["policy"] | {"layers": ()}))
    row = replay(trace, policy, scales=True).iloc[0]
    np.testing.assert_array_equal(row["scale"], trace.scale)
    assert row["skipped"] == trace.overflow.sum()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_trace_is_whole_and_says_what_made_it(path):
    trace = Trace.load(path)
    assert len(trace) >= 200
    assert json.loads(json.dumps(trace.meta))["what"]
    assert trace.meta["made_by"] == "data/traces/make_traces.py"
    part = trace.gradients
    total = part.counts.sum(axis=2) + part.zeros + part.nonfinite
    assert ((total == part.size) | (total == 0)).all()
    finite = part.nonfinite.sum(axis=1) == 0
    assert (finite == ~trace.overflow[trace.rows]).all()


class Told(Exception):
    """Raised in place of a training, with its description."""


def told(*given: object, **_options: object) -> Trace:
    raise Told(given[3])


@pytest.fixture(scope="module")
def makers() -> dict[str, Callable[..., Trace]]:
    """The functions that make the traces, told not to train."""
    spec = spec_from_file_location("make_traces", FOLDER / "make_traces.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.train = told
    module.data = SimpleNamespace(digits=module.data.digits, mnist=module.data.digits)  # MNIST may not be here
    shown = {f.__name__: lambda f=f: f(told) for f in module.SHOWN}
    return module.MAKERS | shown


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_trace_describes_itself_as_its_maker_does(path, makers):
    with pytest.raises(Told) as what:
        makers[path.stem]()
    assert Trace.load(path).meta["what"] == str(what.value)


def test_the_outliers_that_overflow_are_counted_in_the_table_of_the_runs():
    trace = Trace.load(FOLDER / "rare_outliers.npz")
    outliers = np.arange(15, len(trace), 16)
    skipped = np.flatnonzero(trace.overflow)
    assert set(skipped) < set(outliers), "not every outlier overflows: a small scale bears it"
    assert trace.scale[-1] == 2.0 ** (16 - len(skipped))
    line = f"{len(skipped)} of these {len(outliers)} batches overflow and halve the scale"
    assert line in (FOLDER / "README.md").read_text()
