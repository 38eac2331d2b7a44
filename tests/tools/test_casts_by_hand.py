"""The casts that the benchmark writes into layers by hand are those that a level finds: an oracle nobody derived."""

import copy

import pytest
import torch
from casts_by_hand import by_hand

from mpkit.casting import auto_mixed_precision
from mpkit.networks import Network, TinyGPT, resnet18

CASES = {
    "784-512-512-10": (Network(), torch.rand(64, 1, 28, 28)),
    "ResNet-18 width 8": (resnet18(width=8), torch.rand(16, 3, 32, 32)),
    "GPT d64": (TinyGPT(vocabulary=64, context=32, width=64, heads=4, layers=2), torch.randint(0, 64, (8, 32))),
}


@pytest.mark.parametrize("level", ["O1", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_casts_by_hand_and_by_level_give_the_same_bits(case: str, level: str) -> None:
    network, inputs = CASES[case]
    hand, cast = by_hand(network, level), auto_mixed_precision(copy.deepcopy(network), level, torch.bfloat16)
    results = [net(inputs[:4]) for net in (hand, cast)]
    assert results[0].dtype is results[1].dtype
    assert torch.equal(*results)
    for result in results:
        result.float().square().sum().backward()
    for ours, theirs in zip(cast.parameters(), hand.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert ours.grad.abs().sum() > 0
