"""The engine of experiments on runs that cost nothing: cells, resume, failures, stop, several processes, files."""

import json
import os
import random
import time
import warnings

import numpy as np
import pytest
import torch

from mpkit.experiment import Results, experiment


def quiet(run, grid, **options):
    return experiment(run, grid, progress=False, **options)


@pytest.fixture
def counted(tmp_path):
    """Runs that leave a mark for every call, in whatever process; `counted.calls()` are the marks, as cell-seed."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def of(answer=lambda seed, x: {"y": 10 * x + seed}):
        def run(seed, x):
            (marks / f"{x}-{seed}-{time.time_ns()}").touch()
            return answer(seed, x)

        return run

    of.calls = lambda: sorted(p.name.rsplit("-", 1)[0] for p in marks.iterdir())
    of.folder = tmp_path / "cells"
    return of


@pytest.mark.parametrize(
    ("grid", "options", "labels"),
    [
        ({"a": ["w", "x"], "b": [1, 2]}, {"seeds": 3}, ["a=w, b=1", "a=w, b=2", "a=x, b=1", "a=x, b=2"]),
        ([{"a": "w"}, {"b": 5}, {}], {"seeds": [7, 3]}, ["a=w", "b=5", "(no arguments)"]),
        ({"one": {"a": "x"}, "two": {"b": 9}}, {"seeds": 2, "baseline": "two"}, ["one", "two"]),
        ({}, {"seeds": 1}, ["(no arguments)"]),
    ],
)
def test_every_cell_of_a_grid_runs_from_every_seed(grid, options, labels):
    results = quiet(lambda seed, a="", b=0: {"y": f"{a}{b}{seed}" == "x21", "loss": [a == "x", seed]}, grid, **options)
    seeds = options["seeds"] if isinstance(options["seeds"], list) else list(range(options["seeds"]))
    frame = results.frame
    assert frame[["cell", "seed"]].values.tolist() == [[label, seed] for label in labels for seed in seeds]
    assert frame[frame.y == 1][["cell", "seed"]].values.tolist() == [["a=x, b=2", 1]] * ("a=x, b=2" in labels)
    assert results.series(labels[-1], "loss", seeds[-1]).tolist() == [labels[-1].startswith("a=x"), seeds[-1]]
    assert repr(results) == f"{len(frame)} runs of {len(labels)} cells from {len(seeds)} seeds"
    assert "times can be compared" in results.note
    baseline = options.get("baseline", labels[0])
    assert results.summary("y")["verdict"].tolist().index("baseline") == labels.index(baseline)


def test_a_run_that_raises_is_kept_with_its_traceback_and_runs_again_only_when_asked(counted):
    def answer(seed, x):
        if x == 2 and seed == 1:
            raise OverflowError("the weights are gone")
        return {"y": x}

    for options, count in (({}, 4), ({}, 4), ({"retry": True}, 5)):
        results = quiet(counted(answer), {"x": [1, 2]}, seeds=2, folder=counted.folder, **options)
        assert len(counted.calls()) == count
    assert "OverflowError: the weights are gone" in results.failures["x=2", 1]
    assert "1 of 4 runs failed" in results.note
    assert counted.calls().count("2-1") == 2


@pytest.mark.parametrize("result", [3, {"y": "text"}, {"y": [[None]]}, None, {"y": {"deep": 1}}])
def test_a_run_that_returns_something_else_fails_where_its_author_sees_it(result):
    results = quiet(lambda seed: result, [{}], seeds=1)
    assert "TypeError: a run returns" in results.failures["(no arguments)", 0]


def test_a_run_is_one_file_without_a_pickle_and_comes_back_as_it_was(tmp_path):
    numbers = {"a": float("nan"), "b": -float("inf"), "c": None, "d": True}
    quiet(lambda seed, x: {**numbers, "file": [1, 2]}, {"x": [4]}, seeds=1, folder=tmp_path)
    (path,) = tmp_path.glob("*.npz")
    with np.load(path, allow_pickle=False) as held:
        assert all(held[name].dtype.kind != "O" for name in held.files)
        head = json.loads(str(held["head"]))
    assert (head["cell"], set(head["versions"]) >= {"python", "torch", "numpy", "mpkit"}) == ({"x": 4}, True)
    results = Results.load(tmp_path)
    np.testing.assert_array_equal(list(results.frame.iloc[0][list("abcd")]), [np.nan, -np.inf, np.nan, 1.0])
    assert results.series(0, "file").tolist() == [1, 2]


def test_results_do_not_depend_on_order_or_on_what_drew_random_numbers_before():
    def run(seed, x):
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002
        return {f"d{i}": d for i, d in enumerate(draws)} | {"threads": torch.get_num_threads()}

    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    first = quiet(run, {"x": [1, 2]}, seeds=3).frame
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]
    second = quiet(run, {"x": [2, 1]}, seeds=[2, 1, 0]).frame
    drawn = [f.sort_values(["x", "seed"])[["d0", "d1", "d2"]].values.tolist() for f in (first, second)]
    assert drawn[0] == drawn[1]
    assert set(first.threads) == {1.0}


def test_cells_of_a_seed_come_in_random_order_before_those_of_the_next_and_each_is_told():
    seen, told = [], []
    experiment(
        lambda seed, x: seen.append((seed, x)) or {}, {"x": list(range(6))}, seeds=4,
        progress=lambda done, all, row: told.append((done, all, row.seed, row.cell["x"])),
    )  # fmt: skip
    assert [s for s, _ in seen] == [s for s in range(4) for _ in range(6)]
    orders = [[x for s, x in seen if s == seed] for seed in range(4)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert told == [(i + 1, 24, seed, x) for i, (seed, x) in enumerate(seen)]


def test_the_bar_counts_runs_and_failures(capsys):
    experiment(lambda seed: {} if seed == 0 else {}["no"], [{}], seeds=2)
    assert "2/2" in (err := capsys.readouterr().err)
    assert "failed=1" in err


def test_changed_code_is_noticed_said_and_run_again_while_the_old_cells_stay(tmp_path):
    def made(helper):
        def run(seed, x):
            return {"y": helper(x)}

        return quiet(run, {"x": [1]}, seeds=2, folder=tmp_path).frame.y.tolist()

    made(abs)
    with pytest.warns(RuntimeWarning, match="the code of run"):
        assert made(lambda x: x + 1) == [2.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(abs) == [1.0, 1.0]


def test_a_word_of_the_readers_own_stands_for_the_code(counted):
    for k, version, count in ((1, "a", 2), (2, "a", 2), (2, "b", 4), (3, "a", 4)):
        run = counted(lambda seed, x, k=k: {"y": k})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet(run, {"x": [1, 2]}, seeds=1, folder=counted.folder, version=version)
        assert len(counted.calls()) == count


@pytest.mark.parametrize("how", ["Ctrl-C", "a progress that returns False"])
def test_what_is_stopped_keeps_what_is_done_and_the_same_call_goes_on(counted, tmp_path, how):
    def answer(seed, x):
        if how == "Ctrl-C" and x == 2 and seed == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return {"y": x}

    run, options = counted(answer), {"seeds": 3, "folder": counted.folder}
    told = (lambda done, *_: done < 5) if "False" in how else False
    results = experiment(run, {"x": [1, 2, 3]}, progress=told, **options)
    assert results.stopped
    assert 3 <= len(results) <= 6
    assert "are not done" in results.note
    (tmp_path / "again").touch()
    results = quiet(run, {"x": [1, 2, 3]}, **options)
    assert (results.stopped, len(results)) == (False, 9)
    assert len(counted.calls()) == 9 + (how == "Ctrl-C")


def test_several_processes_give_the_same_numbers_and_times_that_cannot_be_compared():
    def run(seed, x):
        return {"y": torch.rand(()).item() + x, "threads": torch.get_num_threads()}

    several = quiet(run, {"x": [1, 2, 3]}, seeds=2, n_jobs=2)
    assert "Times cannot be compared: 6 of 6 runs had other runs beside them" in several.note
    one = quiet(run, {"x": [1, 2, 3]}, seeds=2)
    assert several.frame[["y", "threads"]].equals(one.frame[["y", "threads"]])


def test_a_cell_that_ends_its_process_is_a_failed_run_and_the_others_are_made(monkeypatch):
    monkeypatch.setattr("mpkit.experiment.worker.DEATHS", 1)  # each costs a start of joblib's workers
    results = quiet(lambda seed, x: os._exit(1) if x == 2 else {"y": x}, {"x": [1, 2, 3]}, seeds=1, n_jobs=2)
    assert results.values("x=3", "y") == {0: 3.0}
    assert "killed" in results.failures["x=2", 0]


WRONG = {
    ValueError: [
        {"grid": []}, {"grid": {"x": []}}, {"grid": {"x": [1], "seed": [1]}}, {"grid": [{"x": 1}, {"x": 1}]},
        {"seeds": 0}, {"seeds": [1, 1]}, {"seeds": [-1]}, {"n_jobs": 0}, {"baseline": 7},
        {"baseline": {"x": 9}}, {"folder": __file__},
    ],
    TypeError: [
        {"grid": {"x": "O2"}}, {"grid": {"x": {1, 2}}}, {"grid": [{1: 2}]}, {"grid": {1: {}, 2: {}}},
        {"grid": {"x": [torch.nn.Linear(1, 1)]}}, {"grid": {"x": [iter([])]}}, {"grid": {"z": [1]}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "error"), [(wrong, error) for error, every in WRONG.items() for wrong in every])
def test_what_is_wrong_is_refused_before_anything_runs(tmp_path, wrong, error):
    ran, folder = [], tmp_path / "f"
    given = {"run": lambda seed, x: ran.append(1) or {}, "grid": {"x": [1, 2]}, "folder": folder, **wrong}
    with pytest.raises(error, match=r"\w+ .*\w+"):
        quiet(**given)
    assert not ran
    assert not folder.exists()


SETTINGS = {
    "dtype": lambda: torch.get_default_dtype() == torch.float32,
    "device": lambda: torch.as_tensor(torch.empty(0, device="meta")).is_meta,  # a device that is set would fetch it
    "matmul": lambda: torch.get_float32_matmul_precision() == "highest",
    "grad": torch.is_grad_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "divide": lambda: np.geterr()["divide"] == "raise",
}


def test_what_a_run_sets_for_the_whole_process_is_undone_for_the_next():
    def run(seed):
        found = {name: float(read()) for name, read in SETTINGS.items()}
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        np.seterr(divide="raise")
        return found

    before = [float(read()) for read in SETTINGS.values()]
    assert quiet(run, [{}], seeds=2).frame[list(SETTINGS)].values.tolist() == [before, before]
    assert [float(read()) for read in SETTINGS.values()] == before


def test_results_travel_as_one_zip_file(tmp_path):
    results = quiet(lambda seed, x: {"y": x + seed, "s": [x, 1]}, {"x": [1, 2]}, seeds=2, folder=tmp_path / "f")
    assert Results.load(tmp_path / "f").frame.equals(results.frame)
    quiet(lambda seed, z: {}, {"z": [1]}, seeds=1, folder=tmp_path / "f")  # another grid in the folder
    results.save(tmp_path / "a.zip")
    back = Results.load(tmp_path / "a.zip")
    assert back.frame.equals(results.frame)
    assert back.series(1, "s", 1).tolist() == [2, 1]
    with pytest.raises(ValueError, match="zip"):
        results.save(tmp_path / "a.tar")


@pytest.mark.parametrize("damage", ["cut", "swap", "other"])
def test_a_damaged_file_is_said_and_its_cell_run_again(counted, damage):
    run = counted(lambda seed, x: {"y": x, "s": list(range(99))})
    quiet(run, {"x": [1, 2]}, seeds=1, folder=counted.folder)
    files = sorted(counted.folder.glob("*.npz"))
    if damage == "other":
        np.savez(files[0], head=np.array("{}"))
    else:
        files[0].write_bytes(files[0].read_bytes()[:-7] if damage == "cut" else files[1].read_bytes())
    with pytest.warns(RuntimeWarning, match="run again"):
        results = quiet(run, {"x": [1, 2]}, seeds=1, folder=counted.folder)
    assert len(counted.calls()) == 3
    assert results.values(0, "y") == {0: 1.0}
