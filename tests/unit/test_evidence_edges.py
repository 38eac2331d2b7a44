"""Recordings and replays at their edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpkit.policies import ScalePolicy, preset
from mpkit.record import Recorder, Trace
from mpkit.replay import replay, sweep, sweep_tensor_scales


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
