"""What an outside reader broke in experiments, schedules, policies, recordings and replays."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpkit import data as data_module
from mpkit import schedules
from mpkit.experiment import Results, command, experiment, train
from mpkit.policies import ScalePolicy, preset
from mpkit.record import Recorder, Trace
from mpkit.replay import replay, sweep, sweep_tensor_scales

# --- experiments


def made(run: Callable[..., Any], grid: Any = None, **options: Any) -> Results:
    return experiment(run, {"x": [1]} if grid is None else grid, **{"seeds": 1, "progress": False, **options})


def plain(seed: int, x: Any) -> dict[str, float]:
    return {"y": 1.0}


def test_sys_exit_ends_its_cell_alone() -> None:
    def run(seed: int, x: int) -> dict[str, float]:
        if x == 1:
            sys.exit("this script gives up")
        return {"y": 2.0}

    results = made(run, {"x": [1, 2]})
    assert "this script gives up" in results.failures["x=1", 0]
    assert results.values("x=2", "y") == {0: 2.0}


def test_what_cannot_be_stored_fails_its_cell_alone() -> None:
    def run(seed: int, x: int) -> Any:
        trace = recorded(1)
        object.__setattr__(trace, "meta", {"network": object()} if x == 1 else {})
        return trace

    results = made(run, {"x": [1, 2]})
    assert "not JSON serializable" in results.failures["x=1", 0]
    assert len(results.trace("x=2")) == 1


def test_a_series_may_have_the_name_of_an_argument_of_numpy() -> None:
    results = made(lambda seed, x: {"file": [1, 2], "allow_pickle": [3.0]})
    assert results.series(0, "file").tolist() == [1, 2]
    assert results.series(0, "allow_pickle").tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_numbers_and_series_in_formats_that_numpy_lacks(dtype: torch.dtype) -> None:
    results = made(lambda seed, x: {"y": torch.tensor(1.5).to(dtype), "ys": torch.tensor([0.5, 2.0]).to(dtype)})
    assert results.values(0, "y") == {0: 1.5}
    assert results.series(0, "ys").tolist() == [0.5, 2.0]


def test_seeds_of_numpy_and_too_large_ones() -> None:
    assert made(plain, seeds=np.arange(2)).frame["seed"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="below 2"):
        made(plain, seeds=[2**64])


def test_a_number_called_like_a_column_is_not_lost() -> None:
    results = made(lambda seed, x: {"error": 0.25, "x": 7.0})
    row = results.frame.iloc[0]
    assert (row["error"], row["error (result)"], row["x"], row["x (result)"]) == ("", 0.25, 1, 7.0)
    assert results.summary("error")["mean"].tolist() == [0.25]
    assert made(lambda seed, alone: {"y": 1.0}, {"alone": [5]}).frame["alone (argument)"].tolist() == [5]


@pytest.mark.parametrize("key", ["tensor", "array", "partial"])
def test_a_dict_with_a_key_of_the_description(key: str) -> None:
    assert made(plain, {"x": [{key: 1}, {key: 2}]}).labels == [f"x={{{key}: 1}}", f"x={{{key}: 2}}"]


def test_long_doubles_are_values() -> None:
    assert len(made(plain, {"x": [np.longdouble(1), np.longdouble("1e-4000")]}).labels) == 2


def times(factor: float) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**arguments: Any) -> dict[str, float]:
            return {name: factor * value for name, value in function(**arguments).items()}

        return wrapper

    return decorate


class Slotted:
    __slots__ = ("value",)


class Held(Slotted):
    def __init__(self, value: int) -> None:
        self.value = value


def test_a_decorator_belongs_to_the_code(tmp_path: Path) -> None:
    assert made(times(2)(plain), folder=tmp_path).values(0, "y") == {0: 2.0}
    with pytest.warns(RuntimeWarning, match="code of run has changed"):
        assert made(times(3)(plain), folder=tmp_path).values(0, "y") == {0: 3.0}


def test_slots_belong_to_a_value() -> None:
    results = made(lambda seed, x: {"y": x.value}, {"x": [Held(1), Held(2)]})
    assert results.frame["y"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("values", [{"framework": "torch"}, {"O0", "O2"}, b"ab", np.array(2.0)])
def test_what_is_no_list_of_values(values: Any) -> None:
    with pytest.raises(TypeError, match="must be a list"):
        made(lambda seed, **cell: {"y": 1.0}, {"level": ["O0"], "s": values})


def test_a_run_that_changes_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(seed: int, x: int) -> dict[str, float]:
        os.chdir(tmp_path / "elsewhere")
        return {"y": float(x)}

    assert len(made(run, folder="runs")) == 1
    assert len(Results.load(tmp_path / "runs")) == 1


def test_the_home_folder_has_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    made(plain, folder="~/runs")
    assert len(Results.load(tmp_path / "runs")) == len(Results.load("~/runs")) == 1
    monkeypatch.setenv("MPKIT_DATA", "~/data")
    for root in ("~/data/mnist", None):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / "data" / "mnist")):
            data_module.mnist(root)


def test_a_folder_that_is_called_like_a_zip_file(tmp_path: Path) -> None:
    made(plain, folder=tmp_path / "runs.zip")
    assert len(Results.load(tmp_path / "runs.zip")) == 1


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, path = made(plain), tmp_path / "runs.zip"
    results.save(path)
    whole = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space"):
        results.save(path)
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["runs.zip"]


@pytest.mark.parametrize("data", [lambda: iter([(torch.ones(2, 3), torch.tensor([0, 1]))]), []])
def test_a_run_without_batches_ends(data: Any) -> None:
    with pytest.raises(ValueError, match="gave no batch"):
        train(lambda: nn.Linear(3, 2), data=data, epochs=1)


def asked(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"seeds": 1, "grid": {"x": [1]}, "run": f"{__name__}:{plain.__name__}", **keys}))
    return path


def test_a_metric_of_no_run_hides_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = asked(tmp_path, run="builtins:dict", grid={"x": ["no number"]}, metrics=["accuracy"])
    assert command.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "no run returned 'accuracy'" in out
    assert "failed: x=no number, seed 0: TypeError" in out


def test_show_tells_the_metrics_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = asked(tmp_path, run="builtins:dict", grid={"x": [1], "y": [2]}, metrics=["y"])
    assert command.main([str(path)]) == 0
    first = capsys.readouterr().out
    assert "\ny\n" in first
    assert command.main([str(path), "--show"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("keys", [{"metrics": "accuracy"}, {"metrics": [1]}, {"run": None}, {"run": 5}])
def test_a_grid_file_of_wrong_kinds(keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(asked(tmp_path, **keys))]) == 2
    assert f"'{next(iter(keys))}' must be" in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_named_cells_take_what_is_fixed() -> None:
    cells = command.cells({"fixed": {"lr": 0.1, "x": 0}, "grid": {"a": {"x": 1}, "b": {}}})
    assert cells == {"a": {"lr": 0.1, "x": 1}, "b": {"lr": 0.1, "x": 0}}


# --- schedules


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        (schedules.ExponentialDecayLR(0.1, 2.0, 1), 5000),
        (schedules.NaturalExpDecayLR(0.1, 2.0, 1), -5000),
        (schedules.ExponentialDecayLR(0.1, 0.5, 2, True), math.inf),
        (schedules.ExponentialDecayLR(0.1, 0.5, 2, True), math.nan),
    ],
)
def test_a_number_gives_what_a_tensor_gives(schedule: schedules.LearningRateSchedule, step: float) -> None:
    expected = schedule(torch.tensor(step)).item()
    assert schedule(step) == pytest.approx(expected, nan_ok=True)


def test_a_list_of_rates_beyond_a_float() -> None:
    assert schedules.exponential_decay_lr(0.1, 2.0, 2000, 1, 1)[-1] == math.inf


def test_steps_of_numpy_are_not_narrower() -> None:
    schedule = schedules.CosineDecayLR(0.0, 0.1, 10)
    for step in (np.float16(3), np.float32(3), np.int8(3), np.array(3)):
        assert schedule(step) == schedule(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("step", [None, "x", [1, 2], np.arange(3)])
def test_what_is_no_step(step: Any) -> None:
    for schedule in (schedules.CosineDecayLR(0.0, 0.1, 10), schedules.ListedLR((0.1,))):
        with pytest.raises(TypeError, match="a step is a number or a tensor"):
            schedule(step)


def test_rates_are_finite_and_lists_are_lists() -> None:
    with pytest.raises(ValueError, match="finite"):
        schedules.InverseDecayLR(0.1, math.inf, 2)
    with pytest.raises(ValueError, match="at most"):
        schedules.piecewise_constant_lr([10**12], [0.1])
    with pytest.raises(TypeError, match="values must be a list"):
        schedules.ListedLR(5)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.5)
    for wrong in (5, lambda step: 0.1):
        with pytest.raises(TypeError, match="schedule must be a LearningRateSchedule"):
            schedules.lambda_lr(optimizer, wrong)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- policies


@pytest.mark.parametrize("key", ["hold_at_overflow", "refill_on_growth", "raise_at_min", "delayed", "flush_subnormal"])
def test_flags_of_a_policy_are_flags(key: str) -> None:
    for value in ("no", None, 0.5, 2):
        wrong: dict[str, Any] = {key: value}
        with pytest.raises(TypeError, match=f"{key} must be True or False"):
            ScalePolicy(**wrong)


@pytest.mark.parametrize("key", ["init_count", "first_growth_lag", "next_growth_lag"])
def test_counts_of_a_policy_are_whole(key: str) -> None:
    for value, error in ((0.5, ValueError), (math.nan, ValueError), ("1", TypeError), (None, TypeError)):
        wrong: dict[str, Any] = {key: value}
        with pytest.raises(error, match=key):
            ScalePolicy(**wrong)


# --- recordings and replays


def recorded(steps: int, every: int = 1, start: int = 0) -> Trace:
    network = nn.Linear(2, 2)
    recorder = Recorder(network, every=every)
    recorder.load_state_dict({"index": start})
    for _ in range(steps):
        network.zero_grad()
        loss = network(torch.ones(1, 2)).sum()
        loss.backward()
        recorder.record(loss)
    return recorder.trace()


@pytest.mark.parametrize(
    ("scale", "error"),
    [(-1.0, ValueError), (math.nan, ValueError), ("x", TypeError), (torch.ones(2), ValueError), (10**400, ValueError)],
)
def test_a_scale_is_refused_in_its_step(scale: Any, error: type[Exception]) -> None:
    network = nn.Linear(2, 2)
    recorder = Recorder(network)
    loss = network(torch.ones(1, 2)).sum()
    loss.backward()
    with pytest.raises(error, match="scale must"):
        recorder.record(loss, scale=scale)
    with pytest.raises(TypeError, match="unscaled must be"):
        recorder.record(loss, unscaled="no")  # type: ignore[arg-type]
    recorder.record(loss, scale=math.inf)
    assert recorder.trace().scale.tolist() == [math.inf]


def test_without_histograms_only_skipped_steps_are_lost() -> None:
    trace = recorded(3, every=10, start=5)
    assert not len(trace.gradients.step)
    frame = replay(trace, preset("torch"))
    assert frame["lost"].tolist() == [0.0]
    assert math.isnan(frame["flushed"][0])


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_short_trace_of_skipped_steps_collapses(steps: int) -> None:
    frame = replay(recorded(steps), ScalePolicy.fixed(2.0**40), fmt="fp16")
    assert frame["skipped"].tolist() == [steps]
    assert frame["collapsed"].tolist() == [True]
    assert "skipped" in frame["why"][0]


def test_settings_of_a_sweep() -> None:
    assert sweep(recorded(2), init=np.array(2.0))["init"].tolist() == [2.0]
    for key in ("history_len", "margin", "algorithm"):
        wrong: dict[str, Any] = {key: "max" if key == "algorithm" else 16}
        with pytest.raises(TypeError, match=f"{key} must be a list"):
            sweep_tensor_scales([1.0, 2.0], **wrong)
