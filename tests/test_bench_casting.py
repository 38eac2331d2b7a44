"""The casts that the benchmark writes into layers by hand are those that a level finds: an oracle nobody derived."""

import copy

import pytest
import torch

from mpkit.bench._by_hand import by_hand
from mpkit.bench.casting import _small
from mpkit.casting import auto_mixed_precision

CASES = {case.split(" b")[0]: (network, inputs) for case, network, inputs, _, _ in _small()}


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
