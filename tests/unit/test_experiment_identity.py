"""Whether a stored result is still that of the code: what a run refers to, wherever it stands, and nothing else."""

import dataclasses
import enum
import functools
import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT
from torch.utils.data import DataLoader, TensorDataset

from mpkit.experiment import experiment
from mpkit.experiment.identity import canonical, described, is_installed, name_of, versions
from mpkit.formats import FP16
from mpkit.policies import preset


def key_of(value):
    return canonical(described(value))


def source(text, name="run", **space):
    """What a source text makes, as a cell of a notebook does."""
    exec(text, space := {"__name__": "__main__", **space})
    return space[name]


ONE, TWO = "def f():\n return 1", "def f():\n return 2"
USES_F = "from own_part import f\ndef run(seed):\n return f()"
THROUGH = "import own_part\ndef run(seed):\n return own_part.f()"


@pytest.fixture
def key(tmp_path, monkeypatch):
    """The key of `run` in a script whose own modules are these files."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(script, **files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('_of_', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        is_installed.cache_clear()
        found = key_of(source(script))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("own_part", "own_deep", "colorsys")]:
            del sys.modules[name]
        return found

    yield of
    is_installed.cache_clear()


CACHED = "import functools\nclass S:\n @functools.cached_property\n def a(self):\n  return 1"
DISPATCHED = "from functools import *\n@singledispatch\ndef f(x): return 0\n@f.register\ndef _(x: int): return 1"
CALLED = "from dataclasses import *\n@dataclass\nclass F:\n def __call__(self):\n  return 1\nf = F()\nf.k = 1"
EDITS = {  # how the code of one's own module is reached -> script, its text, what is edited there, what it becomes
    "attribute": (THROUGH, ONE, "1", "2"),
    "imported inside": ("def run(seed):\n import own_part\n return own_part.f()", ONE, "1", "2"),
    "from inside": ("def run(seed):\n from own_part import f\n return f()", ONE, "1", "2"),
    "a cached property": ("from own_part import S\ndef run(seed):\n return S().a", CACHED, "1", "2"),
    "a cache": (USES_F, f"import functools\n@functools.cache\n{ONE}", "1", "2"),
    "a dispatch": (USES_F, DISPATCHED, "1", "2"),
    "an object": (USES_F, CALLED, "f.k = 1", "f.k = 2"),
    "a signature": (USES_F, "def f(*a, **k):\n return len(a)", "*a, **k", "a, k"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_ones_own_module_is_noticed_however_it_is_reached(key, name):
    script, old, part, edited = EDITS[name]
    new = old.replace(part, edited)
    assert key(script, own_part=old) == key(script, own_part=old) != key(script, own_part=new)


def test_an_edit_behind_a_module_in_a_package_or_in_one_named_as_one_of_pythons_is_noticed_and_no_other(key):
    of = {"own_part": "import own_deep\ndef f():\n return own_deep.f()"}
    assert key(THROUGH, own_deep=ONE, **of) != key(THROUGH, own_deep=TWO, **of)
    more = f"{of['own_part']}\ndef g():\n return 3"
    assert key(THROUGH, own_deep=ONE, **of) == key(THROUGH, own_deep=ONE, own_part=more)
    inside = "import own_part.deep\ndef run(seed):\n return own_part.deep.f()"
    files = [{"own_part_of___init__": "", "own_part_of_deep": text} for text in (ONE, TWO)]
    assert key(inside, **files[0]) != key(inside, **files[1])
    script = "from colorsys import f\ndef run(seed):\n return f()"
    assert key(script, colorsys=ONE) != key(script, colorsys=TWO)


def helper(x):
    """One version of a helper."""
    return x


PAIRS = [
    (torch.empty(2, device="meta"), torch.empty(3, device="meta")),
    (np.random.default_rng(0), np.random.default_rng(1)), ({"k": 1}.get, {"k": 2}.get),
    (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 3j]).conj()),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)), (torch.float16, "float16"), (1, True),
    ("nan", float("nan")), (FP16, "fp16"), (functools.partial(helper, 1), functools.partial(helper, 2)),
    *(tuple(enum.Enum("Mode", {"A": value}).A for value in (1, 2)),),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_different_values_have_different_keys_and_equal_ones_equal(one, other):
    assert key_of(one) == key_of(one) != key_of(other)
    keys = []
    for held in (one, other):  # in what a run refers to, beside a thing without content
        box = {"lock": sys.stdout, "held": held}
        keys.append(key_of(lambda seed, box=box: box))
    assert keys[0] != keys[1]


def test_objects_that_a_run_refers_to_count_by_their_content():
    net = torch.nn.Linear(1, 1)

    @dataclasses.dataclass
    class Holder:
        k: int

        def run(self, seed):
            return {"y": net(torch.ones(1, 1)) * self.k}

    keys = {key_of(Holder(k).run) for k in (1, 2, 2)}
    net.weight.data += 1
    assert len(keys | {key_of(Holder(2).run)}) == 3


CIRCLE = """
def f(n): return g(n) if n else h(n)
def g(n): return h(n) if n else f(n)
def h(n): return f(n) if n else g(n)
class A:
 def f(self): return run
def run(seed): return f(seed), g(seed), h(seed), A
"""


def told(line, seed):
    """What a line prints in another process, whose sets of strings have another order."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    code = f"import sys; sys.path[:0] = {paths}; from test_experiment_identity import *; print({line})"
    ask = [sys.executable, "-c", code]
    return subprocess.run(ask, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout.strip()


def keyed(seed):
    return {"in": seed in {"a", "b", "c"}, "x": helper(torch.ones(2))}


def several():
    return key_of([keyed, source(CIRCLE), FP16, preset("torch"), {"a", "b"}])


def test_the_key_is_the_same_in_another_process_and_after_every_other_value():
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    assert told("several()", seed) == several() != ""


def test_of_mpkit_the_modules_count_that_are_used_and_those_that_they_import(monkeypatch):
    def after(edited):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", lambda path: str(path.name == edited).encode())
            return versions({"mpkit.experiment.training"})["mpkit"]

    edits = {name: after(name) for name in ("none.py", "sheet.py", "results.py", "levels.py", "training.py")}
    assert edits["none.py"] == edits["sheet.py"] == edits["results.py"] != edits["levels.py"]
    assert edits["training.py"] != edits["none.py"]


def test_a_name_that_is_only_an_attribute_is_not_the_variable_of_that_name():
    keys = [key_of(source("def run(seed):\n return seed.data", data=data)) for data in (1, 2)]
    assert keys[0] == keys[1]


def shuffled():
    data = TensorDataset(torch.arange(20.0))
    return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(0))


LOADER, DRAW = shuffled(), np.random.default_rng(0)


def test_a_run_sees_nothing_of_what_others_drew_or_changed(tmp_path):
    def run(seed, loader, config):
        order = [float(x) for (x,) in loader] + [float(x) for (x,) in LOADER]
        return {"order": sum(i * x for i, x in enumerate(order)), "lr": config.pop("lr"), "drawn": DRAW.normal()}

    grid = {"loader": [shuffled()], "config": [{"lr": 1.0}, {"lr": 2.0}]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frames = [experiment(run, grid, seeds=2, folder=tmp_path, progress=False).frame for _ in range(2)]
    assert frames[0].order.nunique() == frames[0].drawn.nunique() == 1
    assert frames[0].lr.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert grid["config"] == [{"lr": 1.0}, {"lr": 2.0}]
    assert frames[0].equals(frames[1])


def test_a_run_shares_its_data_and_copies_its_settings():
    kept = []
    given = {"data": torch.zeros(2), "config": {"lr": 1.0}}
    experiment(lambda seed, **own: kept.append(own) or {}, [given], seeds=1, progress=False)
    assert kept[0]["data"] is given["data"]
    assert kept[0]["config"] is not given["config"]


CODE = [  # source, what is edited in it, what it becomes
    ("def run(seed):\n return 1", "1", "2"),
    ("def run(seed, k=1):\n return k", "1", "2"),
    ("K = 1\ndef run(seed):\n return K", "1", "2"),
    (f"{ONE}\ndef run(seed):\n return f()", "1", "2"),
    ("def g():\n k = 1\n def run(seed):\n  return k\n return run\nrun = g()", "1", "2"),
    ("class A:\n def f(self):\n  return 1\ndef run(seed):\n return A().f()", "1", "2"),
    ("class B:\n k = 1\nclass A(B):\n pass\ndef run(seed):\n return A.k", "1", "2"),
    ("run = lambda seed: [i + 1 for i in (1, 2)]", "i + 1", "i + 2"),
    ("import math\ndef run(seed):\n return math.sin(1)", "sin", "cos"),
    ("import torch\nT = torch.zeros(3)\ndef run(seed):\n return T", "zeros", "ones"),
]


@pytest.mark.parametrize(("old", "part", "edited"), CODE)
def test_the_key_of_code_changes_with_what_it_does(old, part, edited):
    moved, new = f"\n\n# moved down, with a comment\n{old}", old.replace(part, edited)
    assert key_of(source(old)) == key_of(source(moved)) != key_of(source(new))


def test_values_have_short_names():
    values = [torch.float16, FP16, helper, functools.partial(helper, x=1), preset("torch"), 2.0**40, None, (1, 2)]
    names = ["float16", "fp16", "helper", "helper", "torch", "1.09951e+12", "None", "[1, 2]"]
    assert [name_of(described(v)) for v in values] == names
