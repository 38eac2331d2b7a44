"""Schedules, policies, recordings and replays at their edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpkit import schedules
from mpkit.policies import ScalePolicy, preset
from mpkit.record import Recorder, Trace
from mpkit.replay import replay, sweep, sweep_tensor_scales


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
