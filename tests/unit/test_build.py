"""The parts of a step by themselves, where their answers turn: what other processes bring, where a scale comes from."""

from __future__ import annotations

import pytest
import torch
from support import Op
from torch import Tensor, nn

from mpkit.boost import BoostTrainOneStepCell
from mpkit.casting import LEVELS
from mpkit.step import TrainOneStepCell, build_train_network


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_casts_results_computes_the_loss_in_float32(level: str) -> None:
    """MindSpore's build_train_network: at O0 and O1 the loss takes what the network and the label are."""
    net = nn.Linear(3, 2)
    loss = Op(lambda out, label: (out - label).square().mean())  # torch 2.11 has no gradient of its own for two dtypes
    cell = build_train_network(net, torch.optim.SGD(net.parameters(), 0.1), loss, level)
    out = cell(torch.ones(4, 3), torch.ones(4, 2, dtype=torch.float64))
    dtype = torch.float64 if level in ("O0", "O1") else torch.float32
    assert (out if isinstance(out, Tensor) else out.loss).dtype is dtype


@pytest.mark.parametrize(
    ("boost_level", "flags", "kind"),
    [
        ("O0", {"mode": "manual"}, TrainOneStepCell),
        ("O0", {"mode": "manual", "grad_accumulation": True}, BoostTrainOneStepCell),
        ("O1", {"mode": "manual"}, BoostTrainOneStepCell),
    ],
)
def test_a_boost_level_or_an_algorithm_that_is_on_makes_a_boost_cell(boost_level, flags, kind):
    net = nn.Linear(3, 2)
    config = {"boost": flags, "grad_accumulation": {"grad_accumulation_step": 2}}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert type(build_train_network(net, optimizer, None, "O0", boost_level, boost_config_dict=config)) is kind
