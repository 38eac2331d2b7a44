"""Levels on a GPU: the numbers of the CPU within the low precision, and those of torch.autocast where lists agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_casting import CASTING_LEVELS, NETWORKS, made, tensors
from torch import nn

from mpkit.casting import auto_mixed_precision, cast_like, ledger

pytestmark = pytest.mark.gpu


def moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: moved(item) for key, item in value.items()}
    return type(value)(moved(item) for item in value) if isinstance(value, tuple | list) else value


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("level", CASTING_LEVELS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gpu_computes_what_the_cpu_computes(name: str, level: str) -> None:
    network, args, kwargs = made(name)
    auto_mixed_precision(network, level, torch.float16)
    on_gpu = copy.deepcopy(network).cuda()
    want, got = tensors(network(*args, **kwargs)), tensors(on_gpu(*moved(args), **moved(kwargs)))
    for a, b in zip(got, want):
        assert a.dtype is b.dtype
        if a.is_floating_point():
            torch.testing.assert_close(a.cpu().float(), b.float(), rtol=2**-7, atol=2**-7)


def test_a_norm_takes_its_low_input_with_float32_parameters_in_one_kernel() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "O2").cuda()
    with ledger(network) as book:
        network(torch.randn(2, 3, 8, 8, device="cuda"))
    assert [row.compute for row in book.rows] == ["float16", "float32"]
    assert not [cast for cast in book.casts if cast.module == "1"]


def test_the_torch_preset_is_autocast() -> None:
    network, args, _ = made("convolutional")
    network, args = network.cuda(), moved(args)
    with torch.autocast("cuda", torch.float16):
        want = network(*args)
    got = cast_like(network, "torch_autocast")(*args)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-10)
