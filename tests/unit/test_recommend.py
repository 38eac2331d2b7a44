"""What to train with after a recorded run: scale, policy, format and recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded import trace_of
from test_diagnose import chain, rows
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.diagnose import recommend, stale_scales
from mpkit.policies import ScalePolicy
from mpkit.record import AmaxTrace, Recorder
from mpkit.replay import replay
from mpkit.scalers import PolicyLossScaler
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell


def recorded(make, loss, steps=60, policy=None):
    network = auto_mixed_precision(make(), "O2")
    scaler = PolicyLossScaler(policy or ScalePolicy(init_scale=2.0**16, growth_interval=2000))
    recorder = Recorder(network, scaler=scaler)
    step = TrainOneStepWithLossScaleCell(
        WithLossCell(network, loss),
        torch.optim.SGD(network.parameters(), 0.01),
        scaler,
        hooks=[recorder],
        clip_norm=1.0,
    )
    for _ in range(steps):
        step(*rows())
    return recorder.trace()


class Outlier(nn.Module):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.calls = every, 0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(out, target) * 2.0**-10 * (2.0**30 if self.calls % self.every == 0 else 1)


def test_recommend_ends_a_planted_collapse_of_the_policy():
    def run(policy):
        return recorded(lambda: chain(nn.ReLU()), Outlier(6), steps=240, policy=policy)

    sunk = run(ScalePolicy(init_scale=2.0**16, growth_interval=2000))
    assert sunk.scale[-1] < 2.0**0
    advice = recommend(sunk)
    assert advice.dtype == "fp16"
    cured = run(advice.policy)
    assert cured.scale[-1] >= 2**4 * sunk.scale[-1]
    assert not replay(cured, advice.policy)["collapsed"][0]
    assert replay(sunk, {"old": ScalePolicy(init_scale=2.0**16), "new": advice.policy})["policy"][0] == "new"


def test_a_healthy_run_is_told_a_scale_that_does_not_overflow():
    trace = recorded(lambda: chain(nn.ReLU()), nn.CrossEntropyLoss())
    advice = recommend(trace)
    fixed = ScalePolicy.fixed(advice.static)
    row = replay(trace, fixed).iloc[0]
    assert (row["skipped"], advice.dtype) == (0, "fp16")
    assert row["flushed"] < 0.01


@pytest.mark.parametrize(("tiny", "dtype"), [(4, "fp16"), (5, "fp16"), (6, "bf16")])
def test_bf16_is_advised_where_more_than_a_twentieth_is_lost(tiny: int, dtype: str) -> None:
    gradient = torch.cat([torch.ones(100 - tiny), torch.full((tiny,), 2.0**-45)])
    advice = recommend(trace_of([gradient] * 8))
    assert advice.dtype == dtype
    said = "static scale 32768, or dynamic from 32768 with factor 2" if dtype == "fp16" else "no loss scale needed"
    assert str(advice).startswith(f"train in {dtype}: {said}")


def test_without_a_finite_step_the_scale_must_have_come_down_to_1() -> None:
    bad = [torch.full((3,), torch.inf)] * 4
    assert recommend(trace_of(bad, scale=1.0)).dtype == "bf16"
    for scale in (1.5, 2.0):
        with pytest.raises(ValueError, match="the ceiling is not known yet"):
            recommend(trace_of(bad, scale=scale))


def test_steps_whose_gradients_are_all_zero_say_nothing_about_a_scale() -> None:
    with pytest.raises(ValueError, match="all gradients of the 4 recorded steps are zero"):
        recommend(trace_of([torch.zeros(3)] * 4))
    some = [torch.full((3,), 2.0**-10), *[torch.zeros(3)] * 3]
    assert recommend(trace_of(some)).static == recommend(trace_of(some[:1] * 4)).static == 2.0**24
    half = [torch.zeros(3), torch.full((3,), torch.inf)] * 4  # no histogram shows how large the gradients were
    assert recommend(trace_of(half, scale=8.0)).static == 4.0


@pytest.mark.parametrize(("last", "stale"), [(1 + 2.0**-22, False), (1 + 3 * 2.0**-23, True)])
def test_one_last_bit_is_no_clipping(last: float, stale: bool) -> None:
    trace = AmaxTrace(("a.input",), np.array([[1.0], [1.0], [last]], dtype=np.float32))
    assert bool(stale_scales(trace)) == stale
