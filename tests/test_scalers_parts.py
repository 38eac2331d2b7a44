"""The parts of the scalers by themselves, where their answers turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mpkit.policies import ScalePolicy, preset
from mpkit.policies.rule import stack
from mpkit.scalers import DynamicLossScaler, PolicyLossScaler
from mpkit.scalers.kernel import fused_rule


def tensors(thing: Any) -> list[torch.Tensor]:
    """Every tensor among the attributes of an object, and in the tuples among them."""
    found = [v for value in vars(thing).values() for v in (value if isinstance(value, tuple) else [value])]
    return [v for v in found if isinstance(v, torch.Tensor)]


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
    before = tensors(scaler)
    loss = torch.ones((), device="meta")
    scaler.scale(loss if scaler.scale_value.numel() == 1 else (loss, loss))
    assert len(tensors(scaler)) == len(before)
    assert {t.device.type for t in tensors(scaler)} == {"meta"}
    policy = vars(scaler).get("_policy")
    if policy is not None and policy.shape:
        assert policy.init_scale.device.type == "meta"


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
