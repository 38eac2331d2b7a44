"""DistributedDataParallel and FSDP2 over two gloo processes at every level."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from support import in_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpkit.casting import LEVELS, auto_mixed_precision
from mpkit.formats import E5M2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))


def gradients(rank: int) -> dict[Any, list[Tensor]]:
    results: dict[Any, list[Tensor]] = {}
    for level in LEVELS:
        for dtype in (torch.bfloat16, E5M2):
            net = auto_mixed_precision(network(), level, dtype)
            parallel = DistributedDataParallel(net)
            parallel(batches()[rank]).float().square().sum().backward()
            results[level, str(dtype)] = [p.grad for p in net.parameters()]
            sharded = auto_mixed_precision(network(), level, dtype)
            for layer in (*sharded.children(), sharded):
                fully_shard(layer)
            sharded(batches()[rank]).float().square().sum().backward()
            results["sharded", level, str(dtype)] = [p.grad.full_tensor() for p in sharded.parameters()]
    return results


def test_gradients_are_the_mean_of_both_processes_at_every_level(tmp_path: Path, one_thread: None) -> None:
    first, second = in_group(gradients, tmp_path)
    for level in LEVELS:
        for dtype in (torch.bfloat16, E5M2):
            alone = []
            for batch in batches():
                net = copy.deepcopy(auto_mixed_precision(network(), level, dtype))
                net(batch).float().square().sum().backward()
                alone.append([p.grad for p in net.parameters()])
            for a, b, x, y in zip(first[level, str(dtype)], second[level, str(dtype)], *alone):
                assert a.dtype is torch.float32
                assert torch.equal(a, b)
                torch.testing.assert_close(a, (x + y) / 2, rtol=1e-6, atol=1e-6)
            for a, b in zip(first["sharded", level, str(dtype)], first[level, str(dtype)]):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
