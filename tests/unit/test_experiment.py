"""The engine of experiments on runs that cost nothing: keys, resume, failures, stop, several processes, times apart."""

import json
import os
import random
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from mpkit.experiment import Results, engine, experiment
from mpkit.experiment.store import Folder, Outcome
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
    with pytest.warns(RuntimeWarning, match="2 finished cells"):
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


def test_a_run_that_cannot_time_itself_is_said_to_be_not_comparable_and_its_numbers_do_not_change(tmp_path):
    def run(seed, x):
        return {"y": torch.rand(()).item() + x, "threads": torch.get_num_threads()}

    several = quiet(run, {"x": [1, 2, 3]}, seeds=2, n_jobs=2)
    assert "Times cannot be compared: 6 of 6 runs had other runs beside them" in several.note
    one = quiet(run, {"x": [1, 2, 3]}, seeds=2)
    assert several.frame[["y", "threads"]].equals(one.frame[["y", "threads"]])


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
        ({"x": [iter([])]}, TypeError, "pass what builds it"),
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


def test_results_travel_as_one_zip_file(tmp_path):
    results = quiet(lambda seed, x: {"y": x + seed, "s": [x, 1]}, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f")
    quiet(lambda seed, z: {}, {"z": [1]}, seeds=1, folder=tmp_path / "f")  # another grid in the folder
    results.save(tmp_path / "a.zip")
    back = Results.load(tmp_path / "a.zip")
    assert back.frame.equals(results.frame)
    assert back.series(1, "s", 1).tolist() == [2, 1]
    with pytest.raises(ValueError, match="zip"):
        results.save(tmp_path / "a.tar")


def test_a_run_is_one_file_without_a_pickle(tmp_path):
    quiet(lambda seed, x: {"y": 1, "file": [1, 2], "t": small_trace()}, {"x": [4]}, seeds=1, folder=tmp_path)
    (path,) = tmp_path.glob("*.npz")
    with np.load(path, allow_pickle=False) as held:
        assert all(held[name].dtype.kind != "O" for name in held.files)
        head = json.loads(str(held["head"]))
    assert (head["cell"], head["numbers"]) == ({"x": 4}, {"y": 1})
    assert set(head["versions"]) >= {"python", "torch", "numpy", "mpkit"}
    assert Results.load(tmp_path).series(0, "file").tolist() == [1, 2]


@pytest.mark.parametrize("damage", ["cut", "swap", "other"])
def test_a_damaged_file_is_said_and_its_cell_run_again(tmp_path, marks, damage):
    run = counting(marks, lambda seed, x: {"y": x, "s": list(range(99))})
    quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f")
    files = sorted((tmp_path / "f").glob("*.npz"))
    if damage == "cut":
        files[0].write_bytes(files[0].read_bytes()[:-7])
    elif damage == "swap":
        files[0].write_bytes(files[1].read_bytes())
    else:
        np.savez(files[0], head=np.array("{}"))
    with pytest.warns(RuntimeWarning, match="run again"):
        results = quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f")
    assert len(calls(marks)) == 3
    assert results.values(0, "y") == {0: 1.0}


def test_ctrl_c_keeps_what_is_done_and_the_same_call_goes_on(tmp_path, marks):
    def answer(seed, x):
        if x == 2 and seed == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return {"y": x}

    run = counting(marks, answer)
    results = quiet(run, {"x": [1, 2]}, seeds=3, folder=tmp_path / "f")
    assert results.stopped
    assert 2 <= len(results) <= 3
    assert "are not done" in results.note
    (tmp_path / "again").touch()
    results = quiet(run, {"x": [1, 2]}, seeds=3, folder=tmp_path / "f")
    assert not results.stopped
    assert len(results) == 6
    assert len(calls(marks)) == 7


def test_a_word_of_the_readers_own_stands_for_the_code(tmp_path, marks):
    for k, version, count in ((1, "a", 2), (2, "a", 2), (2, "b", 4), (3, "a", 4)):
        run = counting(marks, lambda seed, x, k=k: {"y": k})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet(run, {"x": [1, 2]}, seeds=1, folder=tmp_path / "f", version=version)
        assert len(calls(marks)) == count
    with pytest.raises(TypeError, match="version"):
        quiet(run, {"x": [1]}, version=2)


def test_workers_that_do_not_see_the_folder_send_their_cells_back(tmp_path, monkeypatch):
    write = Folder.write
    monkeypatch.setattr("mpkit.experiment.worker.Folder.write", lambda self, *file: None)  # on another machine
    work = engine.work

    def then_here(task):
        answer = work(task)
        monkeypatch.setattr(Folder, "write", write)
        return answer

    monkeypatch.setattr(engine, "work", then_here)
    results = quiet(lambda seed, x: {"y": x}, {"x": [1]}, seeds=1, folder=tmp_path)
    assert results.frame.y.tolist() == [1]
    assert len(Folder(tmp_path).names()) == 1


def test_a_cell_that_ends_its_process_is_a_failed_run_and_the_others_are_made(tmp_path):
    def run(seed, x):
        if x == 2:
            os._exit(1)
        return {"y": x}

    results = quiet(run, {"x": [1, 2, 3]}, seeds=1, n_jobs=2)
    assert results.values("x=3", "y") == {0: 3.0}
    ((cell, _), error) = next(iter(results.failures.items()))
    assert (cell, "killed" in error) == ("x=2", True)
