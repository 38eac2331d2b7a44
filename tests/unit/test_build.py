"""The parts of a step by themselves, where their answers turn: what other processes bring, where a scale comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpkit.step import build_train_network


class SquaredError(nn.Module):
    """torch 2.11 has no gradient of its own one for two dtypes."""

    def forward(self, out: Tensor, label: Tensor) -> Tensor:
        return (out - label).square().mean()


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("O0", torch.float64),
        ("O1", torch.float64),
        ("O2", torch.float32),
        ("O3", torch.float32),
        ("auto", torch.float32),
    ],
)
def test_a_level_that_casts_results_computes_the_loss_in_float32(level: str, dtype: torch.dtype) -> None:
    """MindSpore's build_train_network: at O0 and O1 the loss takes what the network and the label are."""
    net = nn.Linear(3, 2)
    cell = build_train_network(net, torch.optim.SGD(net.parameters(), 0.1), SquaredError(), level)
    out = cell(torch.ones(4, 3), torch.ones(4, 2, dtype=torch.float64))
    assert (out if isinstance(out, Tensor) else out.loss).dtype is dtype
