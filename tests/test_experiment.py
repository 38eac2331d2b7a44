"""The engine of experiments on runs that cost nothing: keys, resume, failures, stop, several processes, times apart."""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT

from mpkit.experiment import Results, experiment
from mpkit.experiment.identity import Description, name_of, without_torch
from mpkit.experiment.store import Folder, Outcome, canonical
from mpkit.formats import FP16
from mpkit.policies import preset
from mpkit.record import Ranges, Trace


def quiet(run, grid, **options):
    return experiment(run, grid, progress=False, **options)


def counting(folder, answer=lambda seed, x: {"y": 10 * x + seed}):
    """A run that leaves a mark for every call, in whatever process."""

    def run(seed, x):
        (Path(folder) / f"{x}-{seed}-{time.time_ns()}").touch()
        return answer(seed, x)

    return run


def calls(folder):
    return sorted(p.name.rsplit("-", 1)[0] for p in Path(folder).iterdir())


@pytest.fixture
def marks(tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def test_every_combination_runs_from_every_seed(tmp_path):
    def run(seed, a, b):
        return {"y": f"{a}{b}{seed}" == "x21", "loss": [a == "x", seed]}

    results = quiet(run, {"a": ["w", "x"], "b": [1, 2]}, seeds=3, folder=tmp_path)
    frame = results.frame
    assert len(frame) == 12
    assert frame[frame.y == 1][["a", "b", "seed"]].values.tolist() == [["x", 2, 1]]
    assert results.labels == ["a=w, b=1", "a=w, b=2", "a=x, b=1", "a=x, b=2"]
    assert results.series("a=x, b=1", "loss", 2).tolist() == [1, 2]
    assert repr(results) == "12 runs of 4 cells from 3 seeds"
    assert "times can be compared" in results.note


def test_a_list_of_cells_and_chosen_seeds():
    results = quiet(lambda seed, x=0, y=0: {"z": x + y + seed}, [{"x": 1}, {"y": 5}, {}], seeds=[7, 3])
    assert results.frame[["cell", "seed", "z"]].values.tolist() == [
        ["x=1", 7, 8.0],
        ["x=1", 3, 4.0],
        ["y=5", 7, 12.0],
        ["y=5", 3, 8.0],
        ["(no arguments)", 7, 7.0],
        ["(no arguments)", 3, 3.0],
    ]


def test_named_cells_keep_their_names_and_a_name_can_be_the_baseline():
    results = quiet(lambda seed, x: {"y": x}, {"one": {"x": 1}, "two": {"x": 2}}, seeds=2, baseline="two")
    assert results.labels == ["one", "two"]
    assert results.summary("y")["difference"].iloc[0] == -1
    with pytest.raises(TypeError, match="names of cells are strings"):
        quiet(lambda seed: {}, {1: {}, 2: {}})


def test_results_travel_as_one_zip_file(tmp_path):
    results = quiet(timed, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f", n_jobs=2)
    quiet(lambda seed, z: {}, {"z": [1]}, seeds=1, folder=tmp_path / "f")  # another grid in the folder
    results.save(tmp_path / "a.zip")
    assert Results.load(tmp_path / "a.zip").frame.equals(results.frame)
    with pytest.raises(ValueError, match=r"must end in \.zip"):
        results.save(tmp_path / "a.tar")


def test_what_is_finished_is_not_run_again_and_what_is_new_is(tmp_path, marks):
    run = counting(marks)
    quiet(run, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f")
    assert len(calls(marks)) == 4
    again = quiet(run, {"x": [1, 2, 3]}, seeds=3, folder=tmp_path / "f")
    assert calls(marks) == [f"{x}-{s}" for x in (1, 2, 3) for s in range(3)]
    assert again.values("x=2", "y") == {0: 20.0, 1: 21.0, 2: 22.0}
    assert Results.load(tmp_path / "f").frame.equals(again.frame)


def test_a_run_that_raises_is_kept_with_its_traceback_and_runs_again_only_when_asked(tmp_path, marks):
    def answer(seed, x):
        if x == 2 and seed == 1:
            raise OverflowError("the weights are gone")
        return {"y": x}

    run = counting(marks, answer)
    results = quiet(run, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f")
    ((cell, seed), text) = next(iter(results.failures.items()))
    assert (cell, seed) == ("x=2", 1)
    assert "OverflowError: the weights are gone" in text
    assert "1 of 4 runs failed" in results.note
    assert len(results.frame) == 4
    quiet(run, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f")
    assert len(calls(marks)) == 4
    quiet(run, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f", retry=True)
    assert calls(marks).count("2-1") == 2
    assert len(calls(marks)) == 5


@pytest.mark.parametrize("result", [3, {"y": "text"}, {"y": [[None]]}, None, {"y": {"deep": 1}}, {"y": object()}])
def test_a_run_that_returns_something_else_fails_where_its_author_sees_it(result):
    results = quiet(lambda seed: result, [{}], seeds=1)
    assert "TypeError: a run returns" in results.failures["(no arguments)", 0]


def test_numbers_that_are_not_finite_survive_the_file_and_none_is_no_number(tmp_path):
    quiet(lambda seed: {"a": float("nan"), "b": -float("inf"), "c": None, "d": True}, [{}], seeds=1, folder=tmp_path)
    row = Results.load(tmp_path).frame.iloc[0]
    assert np.isnan(row.a)
    assert row.b == -np.inf
    assert np.isnan(row.c)
    assert row.d == 1


def small_trace():
    whole = dict.fromkeys(("loss", "scale", "lr", "grad_norm", "seconds"), np.array([1.0, 2.0]))
    return Trace(
        step=np.arange(2), overflow=np.array([True, False]), **whole, gradients=Ranges.empty(("w",)), format="fp16"
    )


def test_a_trace_is_a_result_and_comes_back(tmp_path):
    quiet(lambda seed: small_trace(), [{}], seeds=1, folder=tmp_path)
    results = Results.load(tmp_path)
    assert results.frame.iloc[0][["skipped", "final_loss", "last_scale"]].tolist() == [1, 2.0, 2.0]
    assert results.trace(0).scale.tolist() == [1.0, 2.0]
    assert results.series(0, "loss").tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="at most one Trace"):
        Outcome({"a": small_trace(), "b": small_trace()})


def test_nothing_stored_is_a_pickle(tmp_path):
    quiet(lambda seed: {"y": 1, "s": [1, 2], "t": small_trace()}, [{}], seeds=1, folder=tmp_path)
    for path in tmp_path.iterdir():
        assert path.suffix in (".json", ".npz") or path.name == "token"
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                assert all(file[name].dtype.kind != "O" for name in file.files)


def test_results_do_not_depend_on_order_or_on_what_drew_random_numbers_before():
    def run(seed, x):
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002
        return {f"d{i}": d for i, d in enumerate(draws)} | {"threads": torch.get_num_threads()}

    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    first = quiet(run, {"x": [1, 2]}, seeds=3).frame
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]
    second = quiet(run, {"x": [2, 1]}, seeds=[2, 1, 0]).frame
    for x in (1, 2):
        for seed in range(3):
            rows = [f[(f.x == x) & (f.seed == seed)][["d0", "d1", "d2"]].values.tolist() for f in (first, second)]
            assert rows[0] == rows[1]
    assert set(first.threads) == {1.0}


def test_cells_of_a_seed_come_in_random_order_before_those_of_the_next(tmp_path):
    seen = []

    def run(seed, x):
        seen.append((seed, x))
        return {}

    quiet(run, {"x": list(range(6))}, seeds=4)
    assert [s for s, _ in seen] == [s for s in range(4) for _ in range(6)]
    orders = [[x for s, x in seen if s == seed] for seed in range(4)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_changed_code_is_noticed_said_and_run_again_while_the_old_cells_stay(tmp_path):
    def first(seed, x):
        return {"y": helper_a(x)}

    def second(seed, x):
        return {"y": helper_b(x)}

    second.__qualname__, second.__module__ = first.__qualname__, first.__module__
    quiet(first, {"x": [1]}, seeds=2, folder=tmp_path)
    with pytest.warns(RuntimeWarning, match="2 finished cells .* the code of run has changed; they are kept"):
        results = quiet(second, {"x": [1]}, seeds=2, folder=tmp_path)
    assert set(results.frame.y) == {2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(quiet(first, {"x": [1]}, seeds=2, folder=tmp_path).frame.y) == {1.0}


def helper_a(x):
    """One version of a helper."""
    return x


def helper_b(x):
    return x + 1


def source(text):
    """A function from source text, as a cell of a notebook makes one."""
    space = {"__name__": "__main__"}
    exec(text, space)
    return space["run"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def run(seed):\n return 1", "def run(seed):\n return 2"),
        ("def run(seed, k=1):\n return k", "def run(seed, k=2):\n return k"),
        ("K = 1\ndef run(seed):\n return K", "K = 2\ndef run(seed):\n return K"),
        ("def f():\n return 1\ndef run(seed):\n return f()", "def f():\n return 2\ndef run(seed):\n return f()"),
        ("def g():\n k = 1\n def run(seed):\n  return k\n return run\nrun = g()",
         "def g():\n k = 2\n def run(seed):\n  return k\n return run\nrun = g()"),
        ("class A:\n def f(self):\n  return 1\ndef run(seed):\n return A().f()",
         "class A:\n def f(self):\n  return 2\ndef run(seed):\n return A().f()"),
        ("class B:\n k = 1\nclass A(B):\n pass\ndef run(seed):\n return A.k",
         "class B:\n k = 2\nclass A(B):\n pass\ndef run(seed):\n return A.k"),
        ("run = lambda seed: [i + 1 for i in (1, 2)]", "run = lambda seed: [i + 2 for i in (1, 2)]"),
        ("import math\ndef run(seed):\n return math.sin(1)", "import math\ndef run(seed):\n return math.cos(1)"),
        ("import torch\nT = torch.zeros(3)\ndef run(seed):\n return T",
         "import torch\nT = torch.ones(3)\ndef run(seed):\n return T"),
    ],
)  # fmt: skip
def test_the_key_of_code_changes_with_what_it_does(old, new):
    keys = [canonical(Description()(source(text))) for text in (old, new)]
    assert keys[0] != keys[1]
    assert keys[0] == canonical(Description()(source("\n\n# moved down, with a comment\n" + old)))


def test_code_that_refers_to_itself_or_each_other_has_a_key():
    text = "class A:\n def f(self):\n  return run\ndef g(n):\n return run(n) if n else A\ndef run(seed):\n return g(0)"
    assert canonical(Description()(source(text))) == canonical(Description()(source(text)))


def described():
    return canonical(Description()([keyed, FP16, preset("torch"), {"a", "b"}]))


def test_the_key_is_the_same_in_another_process():
    paths = [str(ROOT), str(ROOT / "tests")]
    code = f"import sys; sys.path[:0] = {paths}; from test_experiment import *; print(described())"
    # another seed of the hash than here: sets of strings in another order
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
    ).stdout
    assert told.strip() == described() != ""


def keyed(seed):
    return {"in": seed in {"a", "b", "c"}, "x": helper_a(torch.ones(2))}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (np.arange(3), np.arange(3).astype(np.float32)),
        (torch.float16, "float16"),
        (1, True),
        (1, 1.5),
        ("nan", float("nan")),
        (FP16, "fp16"),
        (preset("torch"), preset("apex")),
        (functools.partial(helper_a, 1), functools.partial(helper_a, 2)),
        ({"a": 1}, {"a": 2}),
        (torch.nn.Linear, torch.nn.Conv2d),
        (torch.utils.data.TensorDataset(torch.zeros(2)), torch.utils.data.TensorDataset(torch.ones(2))),
    ],
)
def test_different_values_have_different_descriptions_and_equal_ones_equal(one, other):
    assert canonical(Description()(one)) != canonical(Description()(other))
    assert canonical(Description()(one)) == canonical(Description()(one))


def test_values_have_short_names():
    names = [torch.float16, FP16, helper_a, functools.partial(helper_a, x=1), preset("torch"), 1e-3, None, (1, 2)]
    assert [name_of(Description()(v)) for v in names] == [
        *("float16", "fp16", "helper_a", "helper_a(x=1)", "torch", "0.001", "None", "(1, 2)")
    ]


@pytest.mark.parametrize("damage", ["cut", "flip", "swap", "series cut", "series gone"])
def test_a_damaged_file_is_said_and_its_cell_run_again(tmp_path, marks, damage):
    run = counting(marks, lambda seed, x: {"y": x, "s": list(range(99))})
    quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f")
    files = sorted((tmp_path / "f").glob("*-*.json"))
    series = sorted((tmp_path / "f").glob("*.npz"))
    data = files[0].read_bytes()
    if damage == "cut":
        files[0].write_bytes(data[:-7])
    elif damage == "flip":
        files[0].write_bytes(data.replace(b'"y":', b'"z":'))
    elif damage == "swap":
        files[0].write_bytes(files[1].read_bytes())
    elif damage == "series cut":
        series[0].write_bytes(series[0].read_bytes()[:-1])
        with pytest.raises(ValueError, match="is not what the run wrote; delete it"):
            [Results.load(tmp_path / "f").series(cell, "s") for cell in (0, 1)]
    else:
        series[0].unlink()
    with pytest.warns(RuntimeWarning, match="run again"):
        results = quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f")
    assert len(calls(marks)) == 3
    assert results.values(0, "y") == {0: 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f").frame) == 2
    assert len(calls(marks)) == 3


def test_ctrl_c_keeps_what_is_done_and_the_same_call_goes_on(tmp_path, marks):
    state = {"interrupt": True}

    def answer(seed, x):
        if x == 2 and seed == 1 and interrupted():
            raise KeyboardInterrupt
        return {"y": x}

    def interrupted():
        return state.pop("interrupt", False)

    run = counting(marks, answer)
    state_key = canonical(Description()(run))
    results = quiet(run, {"x": [1, 2]}, seeds=3, folder=tmp_path / "f")
    assert results.stopped
    assert 2 <= len(results) <= 3
    assert "are not done; the same call goes on with them" in results.note
    state["interrupt"] = False  # as before the first call had changed it, or the code would count as changed
    state["interrupt"] = True
    assert canonical(Description()(run)) == state_key
    state.pop("interrupt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `state` is part of the code of `run`, and it has changed
        results = quiet(run, {"x": [1, 2]}, seeds=3, folder=tmp_path / "f")
    assert not results.stopped
    assert len(results) == 6


def test_a_file_named_stop_ends_it_and_the_next_call_goes_on(tmp_path):
    folder = tmp_path / "f"

    def run(seed, x):
        if seed == 1 and x == stop_at.x:
            (folder / "stop").touch()
        return {"y": x}

    stop_at = threading.local()
    stop_at.x = 2
    results = quiet(run, {"x": [1, 2, 3]}, seeds=3, folder=folder)
    assert results.stopped
    assert 4 <= len(results) <= 6
    stop_at.x = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = quiet(run, {"x": [1, 2, 3]}, seeds=3, folder=folder)
    assert not results.stopped
    assert len(results) == 9


def test_a_function_is_told_of_every_finished_run(tmp_path):
    told = []
    experiment(
        lambda seed, x: {"y": x}, {"x": [5, 6]}, seeds=2, progress=lambda done, all, row: told.append((done, all, row))
    )
    assert [(done, total) for done, total, _ in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted((row.cell["x"], row.seed) for _, _, row in told) == [(5, 0), (5, 1), (6, 0), (6, 1)]


def test_the_bar_counts_runs_and_failures(capsys):
    def run(seed):
        if seed:
            raise ValueError("no")
        return {}

    experiment(run, [{}], seeds=2)
    assert "2/2" in (err := capsys.readouterr().err)
    assert "failed=1" in err


def test_two_calls_at_once_share_the_cells_of_a_folder(tmp_path, marks):
    run = counting(marks, lambda seed, x: time.sleep(0.02) or {"y": x})
    found = []
    both = [
        threading.Thread(target=lambda: found.append(quiet(run, {"x": [1, 2, 3]}, seeds=4, folder=tmp_path / "f")))
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [len(r) for r in found] == [12, 12]
    assert calls(marks) == sorted(f"{x}-{s}" for x in (1, 2, 3) for s in range(4))  # each once
    assert found[0].frame.equals(found[1].frame)
    assert not list((tmp_path / "f").glob("*.lock"))


def test_half_written_files_of_the_dead_are_swept_and_young_ones_left(tmp_path):
    place = Folder(tmp_path)
    place.create()
    old, young = tmp_path / ".a.json.1.x.tmp", tmp_path / ".b.json.2.y.tmp"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (time.time() - 90_000,) * 2)
    place.sweep()
    assert not old.exists()
    assert young.exists()


def test_a_draft_that_another_call_puts_in_place_meanwhile_is_none_to_sweep(tmp_path, monkeypatch):
    place = Folder(tmp_path)
    place.create()
    draft = tmp_path / ".experiment.json.1.x.part"
    draft.write_text("{}")
    seen = os.scandir

    @contextlib.contextmanager
    def then_it_is_moved(path):
        with seen(path) as entries:
            found = list(entries)
        draft.replace(tmp_path / "experiment.json")
        yield iter(found)

    monkeypatch.setattr(os, "scandir", then_it_is_moved)
    place.sweep(older_than=-1.0)
    assert (tmp_path / "experiment.json").read_text() == "{}"


def timed(seed, x, only_time=False):
    return {"seconds_per_step": float(x)} if only_time else {"seconds_per_step": 99.0, "accuracy": x + seed}


def test_times_are_measured_apart_when_runs_share_the_machine_and_the_result_says_so(tmp_path):
    results = quiet(timed, {"x": [1, 2]}, seeds=2, folder=tmp_path, n_jobs=2)
    assert results.values("x=2", "seconds_per_step") == {0: 2.0, 1: 2.0}
    assert results.values("x=2", "accuracy") == {0: 2.0, 1: 3.0}
    assert results.note == "seconds_per_step from separate, short runs, one at a time; all else from runs side by side."
    assert not results.frame.alone.any()
    assert Results.load(tmp_path).frame.equals(results.frame)
    alone = quiet(timed, {"x": [1, 2]}, seeds=2)
    assert alone.values("x=2", "seconds_per_step") == {0: 99.0, 1: 99.0}
    assert alone.frame.alone.all()


def test_a_run_that_cannot_time_itself_is_said_to_be_not_comparable_and_its_numbers_do_not_change(tmp_path):
    def run(seed, x):
        return {"y": torch.rand(()).item() + x, "threads": torch.get_num_threads()}

    several = quiet(run, {"x": [1, 2, 3]}, seeds=2, n_jobs=2)
    assert "Times cannot be compared: 6 of 6 runs had other runs beside them" in several.note
    one = quiet(run, {"x": [1, 2, 3]}, seeds=2)
    assert several.frame[["y", "threads"]].equals(one.frame[["y", "threads"]])


def test_workers_that_do_not_see_the_folder_send_their_cells_back(tmp_path, monkeypatch):
    from mpkit.experiment import worker

    monkeypatch.setattr(Folder, "token", property(lambda self: "another machine"))
    monkeypatch.setattr(Folder, "create", lambda self: self.path.mkdir(parents=True, exist_ok=True))
    place = Folder(tmp_path)
    monkeypatch.setattr(worker, "Folder", lambda path: type("Far", (), {"token": ""})())
    results = quiet(lambda seed, x: {"y": x}, {"x": [1, 2]}, seeds=1, folder=tmp_path)
    assert results.frame.y.tolist() == [1, 2]
    assert len(place.names()) == 2


@pytest.mark.parametrize(
    ("grid", "error", "sentence"),
    [
        ({}, ValueError, None),
        ([], ValueError, "the grid is empty"),
        ({"x": []}, ValueError, "every list of the grid needs a value"),
        ({"x": "O2"}, TypeError, r"must be a list of values, got 'O2'; write \['O2'\]"),
        ({"x": 3}, TypeError, "must be a list of values"),
        ("x", TypeError, "a dict of lists, a list of dicts or a dict of dicts"),
        ({"x": [1], "seed": [1]}, ValueError, "a grid must not set seed"),
        ([{1: 2}], TypeError, "names of arguments in a grid are strings, got 1"),
        ([{"x": 1}, {"x": 1}], ValueError, "twice"),
        ({"x": [torch.nn.Linear(1, 1)]}, TypeError, "pass what builds it"),
        ({"x": [iter([])]}, TypeError, "pass a function that builds the object"),
        ({"z": [1]}, TypeError, "cannot be called as"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(tmp_path, grid, error, sentence):
    if grid == {}:
        assert len(quiet(lambda seed: {}, grid, seeds=1)) == 1  # the one cell without arguments
        return
    folder = tmp_path / "f"
    with pytest.raises(error, match=sentence):
        quiet(lambda seed, x: {}, grid, folder=folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"seeds": 0}, ValueError, "must be at least 1, or a list of .* got 0$"),
        ({"seeds": [1, 1]}, ValueError, "different whole numbers"),
        ({"seeds": [-1]}, ValueError, "whole numbers from 0"),
        ({"seeds": 1.5}, TypeError, "how many"),
        ({"seeds": ["a"]}, TypeError, "whole numbers"),
        ({"n_jobs": 0}, ValueError, "number of processes"),
        ({"n_jobs": 1.0}, TypeError, "an int or None"),
        ({"baseline": 7}, ValueError, "from 0 to 1"),
        ({"baseline": {"x": 9}}, ValueError, "no cell of the grid has x=9"),
        ({"baseline": "x"}, ValueError, "must be one of the cells x=1; x=2"),
        ({"baseline": 1.5}, TypeError, "a dict of arguments"),
        ({"folder": __file__}, ValueError, "is a file"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options, error, sentence):
    ran = []
    with pytest.raises(error, match=sentence):
        quiet(lambda seed, x: ran.append(1) or {}, {"x": [1, 2]}, **options)
    assert not ran
    with pytest.raises(TypeError, match="run must be a function"):
        quiet(3, {"x": [1]})


def test_an_empty_folder_holds_no_experiment(tmp_path):
    with pytest.raises(FileNotFoundError, match="makes one"):
        Results.load(tmp_path)


def test_the_file_is_plain_json_that_others_can_read(tmp_path):
    quiet(lambda seed, x: {"y": x}, {"x": [4]}, seeds=1, folder=tmp_path)
    (path,) = tmp_path.glob("*-*.json")
    held = json.loads(path.read_text())
    assert held["row"]["cell"] == {"x": 4}
    assert held["row"]["numbers"] == {"y": 4}
    assert set(held["row"]["versions"]) >= {"python", "torch", "numpy", "mpkit"}


def test_a_gpu_each(tmp_path, monkeypatch):
    from mpkit.experiment import worker

    monkeypatch.setenv("MPKIT_DEVICE", "cpu")
    taken = []
    for _ in range(2):  # two workers that live at the same time
        monkeypatch.setattr(worker, "_device", None)
        worker._take_device(2, str(tmp_path))
        import os

        taken.append((os.environ["MPKIT_DEVICE"], worker._device))
    assert [name for name, _ in taken] == ["cuda:0", "cuda:1"]
    for _, held in taken:
        held.close()


def test_code_that_cannot_reach_torch_is_told_from_code_that_may():
    def light(seed):
        import json

        return {"y": len(json.dumps(seed))}

    def heavy(seed):
        import torch

        return torch.rand(1)

    for run, expected in ((light, True), (heavy, False), (keyed, False), (lambda seed: quiet, False)):
        describe = Description()
        describe(run)
        assert without_torch(describe.libraries) is expected


def test_a_worker_starts_without_torch():
    code = "import sys, mpkit.experiment.worker; print({'torch', 'numpy', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_what_a_run_sets_for_the_whole_process_is_undone_for_the_next():
    def settings():
        return {
            "dtype": float(torch.get_default_dtype() == torch.float32),
            "device": float(torch.get_default_device().type == "cpu"),
            "matmul": float(torch.get_float32_matmul_precision() == "highest"),
            "grad": float(torch.is_grad_enabled()),
            "deterministic": float(torch.are_deterministic_algorithms_enabled()),
            "divide": float(np.geterr()["divide"] == "raise"),
        }

    def run(seed):
        found = settings()
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        np.seterr(divide="raise")
        return found

    before = settings()
    frame = experiment(run, [{}], seeds=2, progress=False).frame
    assert [{name: row[name] for name in before} for row in frame.to_dict("records")] == [before, before]
    assert settings() == before
