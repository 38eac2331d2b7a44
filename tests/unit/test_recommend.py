# ruff: noqa: E501  (one trace per line reads best)
"""What to train with after a recorded run: scale, policy, format and recipe."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded import trace_of
from test_diagnose import chain, rows
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.diagnose import Recommendation, recommend, stale_scales
from mpkit.diagnose.words import said as words
from mpkit.policies import ScalePolicy
from mpkit.record import AmaxTrace, Recorder, Trace
from mpkit.replay import replay
from mpkit.scalers import PolicyLossScaler
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell


class Outlier(nn.Module):
    calls = 0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(out, target) * 2.0**-10 * (2.0**30 if self.calls % 6 == 0 else 1)


def test_recommend_ends_a_planted_collapse_of_the_policy():
    def run(policy):
        network, scaler = auto_mixed_precision(chain(nn.ReLU()), "O2"), PolicyLossScaler(policy)
        recorder, whole = Recorder(network, scaler=scaler), WithLossCell(network, Outlier())
        sgd = torch.optim.SGD(network.parameters(), 0.01)
        step = TrainOneStepWithLossScaleCell(whole, sgd, scaler, hooks=[recorder], clip_norm=1.0)
        for _ in range(240):
            step(*rows())
        return recorder.trace()

    sunk = run(ScalePolicy(init_scale=2.0**16, growth_interval=2000))
    assert sunk.scale[-1] < 2.0**0
    advice = recommend(sunk)
    assert advice.dtype == "fp16"
    cured = run(advice.policy)
    assert cured.scale[-1] >= 2**4 * sunk.scale[-1]
    assert not replay(cured, advice.policy)["collapsed"][0]
    assert replay(sunk, {"old": ScalePolicy(init_scale=2.0**16), "new": advice.policy})["policy"][0] == "new"


said = partial(words, "recommend")
ONE, FAR, IN_BF16 = torch.ones(1), torch.tensor([1.0, 2.0**-33]), said("bf16")
OUTPUTS = [torch.tensor([top]) for top in (65504.0, 65505.0, math.nan, 1e5, 1e6)]  # the first is float16's largest
LOSS = np.array([1.0, 1.0, math.nan, 1.0, math.inf, 1.0, 1.0, 1.0])


def spread(key: str, share: str, lost: str, static: float = 2.0**15) -> str:
    return said(key, spread=said("spread", static=static, share=share), lost=lost)


def tiny(count: int) -> Trace:
    return trace_of([torch.cat([torch.ones(100 - count), torch.full((count,), 2.0**-45)])] * 4)


@pytest.mark.parametrize(
    ("trace", "dtype", "static", "window", "reasons"),
    [
        (trace_of([ONE] * 8), "fp16", 2.0**15, 10, [spread("loses", "0 %", "0 %"), said("skipped", skipped=0, steps=8)]),
        (trace_of([ONE] * 999 + [ONE * 2**10]), "fp16", 2.0**15, 500, [spread("loses", "0.1 %", "0 %"), said("skipped", skipped=2, steps=1000)]),
        (trace_of([ONE] * 997 + [ONE * 2**10] * 3), "fp16", 2.0**5, 500, [spread("loses", "0 %", "0 %", 2.0**5), said("skipped", skipped=1, steps=1000)]),
        (trace_of(([ONE] * 9 + [ONE * 2**20]) * 2, scale=2.0**-20), "fp16", 2.0**15, 10, [spread("loses", "10.0 %", "0 %"), said("skipped", skipped=2, steps=20)]),
        (trace_of([ONE * 2**29] * 8, scale=2.0**-20), "fp16", 2.0**-14, 10, [spread("loses", "0 %", "0 %", 2.0**-14), said("skipped", skipped=0, steps=8)]),
        (trace_of([ONE * 2**-32] * 8), "fp16", 2.0**24, 2, [spread("loses", "0 %", "0 %", 2.0**24), said("skipped", skipped=0, steps=8)]),
        (trace_of([ONE * 2**30, ONE * 0] * 4, scale=2.0**-20), "bf16", None, None, [said("too_large", lowest=2.0**-14), IN_BF16]),
        (tiny(5), "fp16", 2.0**15, 5, [spread("loses", "0 %", "5.0 %"), said("skipped", skipped=0, steps=4)]),
        (tiny(6), "bf16", None, None, [spread("too_wide", "0 %", "6.0 %"), IN_BF16]),
        (trace_of(([FAR] * 3 + [FAR * torch.tensor([2.0**10, 1.0])]) * 5), "fp16", 2.0**15, 5, [spread("loses", "25.0 %", "0 %"), said("skipped", skipped=5, steps=20)]),
        (trace_of([ONE] * 8, activations=trace_of([OUTPUTS]).gradients), "bf16", None, None, [*(said("output_left", name=n) for n in "abc"), IN_BF16]),
        (trace_of([ONE] * 8, loss=LOSS), "bf16", None, None, [said("loss_not_finite", count=2, first=2), IN_BF16]),
    ],
)  # fmt: skip
def test_what_is_advised_and_why(trace: Trace, dtype: str, static: Any, window: Any, reasons: list[str]) -> None:
    ends = {"init_scale": static, "min_scale": 2.0**-14, "max_scale": 2.0**24, "name": "recommended"}
    policy = window and ScalePolicy(growth_interval=window, **ends)
    advice = recommend(trace)
    assert advice == Recommendation(dtype, static, policy, tuple(reasons))
    scale = said("scale", static=static, policy=policy) if policy else said("no_scale")
    assert str(advice) == "\n  ".join([said("summary", dtype=dtype, scale=scale), *reasons])


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
