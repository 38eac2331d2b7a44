"""The parts of the scalers by themselves, where their answers turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mpkit.policies import ScalePolicy, preset, tensor_scale_preset
from mpkit.policies.rule import stack
from mpkit.scalers import DynamicLossScaler, PolicyLossScaler
from mpkit.scalers.kernel import fused_rule
from mpkit.scalers.tensor_scale import TensorScaler


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicLossScaler(1024.0, 2, 3),
        lambda: PolicyLossScaler(preset("torch")),
        lambda: PolicyLossScaler(preset("deepspeed")),
        lambda: PolicyLossScaler(stack([ScalePolicy(), ScalePolicy(init_scale=2.0)])),
    ],
    ids=["dynamic", "fused", "by the rule", "several"],
)
def test_a_scaler_goes_where_the_loss_is_with_all_that_it_counts(make: Any) -> None:
    scaler = make()
    live, loss = scaler.live, torch.ones((), device="meta")
    scaler.scale(loss if scaler.scale_value.numel() == 1 else (loss, loss))
    held = [v for v in vars(live).values() if isinstance(v, torch.Tensor)]
    assert {t.device.type for t in [*held, *live.counts.values()]} == {"meta"}
    if live.shape:
        assert live.policy.init_scale.device.type == "meta"


def test_a_divisor_that_rounds_differently_is_left_to_the_rule() -> None:
    """s / d beside s * (1 / d): a divisor near s / t, with t between two float32, sends the two to different sides."""
    generator = torch.Generator().manual_seed(0)
    tie = 2 * torch.randint(2**23, 2**24, (4000,), generator=generator).double() + 1  # 25 bits, the last one set
    scale = torch.randint(2**23, 2**24, (4000,), generator=generator).double()
    divisor = scale / tie
    differ = (scale / divisor).float() != (scale * (1 / divisor)).float()
    assert differ.any()
    worst = float(divisor[differ][0])
    thirds = ScalePolicy(backoff_factor=1.0, backoff_divisor=3.0, min_scale=1.0)
    assert fused_rule(thirds) is not None
    assert fused_rule(replace(thirds, backoff_divisor=worst)) is None


def test_a_tensors_scaler_waits_for_its_step_to_end_once_it_has_seen_something() -> None:
    scaler = TensorScaler(tensor_scale_preset("te_delayed", amax_history_len=2))
    assert (scaler.pending, float(scaler.amax), float(scaler.scale)) == (False, 0.0, 1.0)
    for amax in (3.5, 1.0):
        scaler.observe_(torch.tensor(amax))
    assert (scaler.pending, float(scaler.amax), float(scaler.scale)) == (True, 3.5, 1.0)
    scaler.update_()
    assert (scaler.pending, float(scaler.amax), float(scaler.scale)) == (False, 0.0, 448 / 3.5)
