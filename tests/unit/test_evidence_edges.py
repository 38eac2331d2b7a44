"""Scales that a recorder is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from mpkit.record import Recorder


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
