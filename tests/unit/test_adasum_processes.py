"""Boost over several processes: AdaSum and DimReduce over gloo, against one process and against time.

Each rank is a process that runs a scenario and leaves what it saw in a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ROOT, in_group
from torch import Tensor, nn

from mpkit.boost.adasum import AdaSum, adasum
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.pca import row_block
from mpkit.step import WithLossCell

SHAPES = [(7, 5), (1, 9), (1,), (2, 3, 4), (), (3,)]


def deltas_of(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in deltas_of(1000)]


# What a rank does. Each returns something that torch.load(weights_only=True) reads back.


def merge(rank: int, world: int) -> dict[str, Any]:
    """Both exchanges, every division of the world into nodes of one rank, float32 and float16."""
    seen: dict[str, Any] = {}
    for exchange in ("halving", "full"):
        for dtype in (torch.float32, torch.float16):
            merger = AdaSum(rank, 1, world, weights(), exchange=exchange)
            zeros = [torch.zeros(s) for s in SHAPES]
            merged = merger([d.to(dtype) for d in deltas_of(rank)], zeros, zeros)
            seen[f"{exchange}-{dtype}"] = [-m for m in merged]
    return seen


def train(rank: int, world: int) -> list[Tensor]:
    """One whole step: nodes of two ranks when there are four, every rank with its own gradient."""
    devices = 2 if world == 4 else 1
    params = weights()
    optimizer = torch.optim.SGD(params, lr=0.5)
    for p, g in zip(params, deltas_of(rank)):
        p.grad = g
    AdaSum(rank, devices, world // devices, params).update_(optimizer.step)
    return [p.detach() for p in params]


def reduce_dimensions(rank: int, world: int) -> list[Tensor]:
    """Six steps, each rank with its part of the batch and its rows of five components."""
    return _descend(rank, world, slice(rank * 12 // world, (rank + 1) * 12 // world))


def _descend(rank: int, world: int, rows: slice) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(6, 4)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    x, y = (torch.randn(12, n, generator=generator)[rows] for n in (6, 4))
    pca = torch.linalg.qr(torch.randn(28, 5, generator=generator)).Q.T[row_block(5, rank, world)]
    cell, params = WithLossCell(net, nn.MSELoss()), list(net.parameters())
    reduce = DimReduce(cell, torch.optim.SGD(params, lr=1.0), params, pca, 5, alpha=0.1, rank=rank, rank_size=world)
    for _ in range(6):
        net.zero_grad()
        loss = cell(x, y)
        loss.backward()
        for p in params:
            if world > 1:
                dist.all_reduce(p.grad)
            p.grad /= world
        reduce(loss.detach(), [p.grad for p in params], None, None, x, y)
    return [*(p.detach() for p in params), reduce.inverse_hessian]


def mismatched(rank: int, world: int) -> list[str]:
    """What a process hears whose weight has another shape than that of another process."""
    try:
        AdaSum(rank, 1, world, [nn.Parameter(torch.zeros(3 + (rank == 1)))])
    except ValueError as error:
        return [str(error)]
    return []


def everything(rank: int, world: int) -> dict[str, Any]:
    return {act.__name__: act(rank, world) for act in (merge, train, reduce_dimensions, mismatched)}


@pytest.fixture(scope="module", params=[1, 2, 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """One launch of everything: (world, what each rank saw)."""
    world = request.param
    return world, in_group(partial(everything, world=world), tmp_path_factory.mktemp("world"), world)


def test_processes_merge_like_simulated_workers(run: tuple[int, list[dict[str, Any]]]) -> None:
    world, ranks = run[0], [seen["merge"] for seen in run[1]]
    exact = adasum([deltas_of(rank, torch.float64) for rank in range(world)])
    for name in ranks[0]:
        dtype = torch.float16 if "float16" in name else torch.float32
        simulated = adasum([[t.to(dtype).float() for t in deltas_of(rank)] for rank in range(world)])
        for seen in ranks:
            for got, first, want, tree in zip(seen[name], ranks[0][name], simulated, exact):
                assert torch.equal(got, first), "ranks disagree"
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
                if name.startswith("full"):
                    assert torch.equal(got, want)
                if dtype == torch.float32:
                    torch.testing.assert_close(got.double(), tree, rtol=1e-5, atol=1e-5)


def test_a_step_in_processes_equals_the_step_worked_out_in_one(run: tuple[int, list[dict[str, Any]]]) -> None:
    world, found = run[0], [seen["train"] for seen in run[1]]
    devices = 2 if world == 4 else 1
    members = [range(n, n + devices) for n in range(0, world, devices)]
    nodes = [[torch.stack(gs).mean(0) for gs in zip(*map(deltas_of, ranks))] for ranks in members]
    merged = adasum([[0.5 * g for g in grads] for grads in nodes])
    for seen in found:
        for got, w, m in zip(seen, weights(), merged):
            torch.testing.assert_close(got, w - m, rtol=1e-6, atol=1e-6)


def test_dimension_reduction_over_ranks_equals_one_process(run: tuple[int, list[dict[str, Any]]]) -> None:
    alone = _descend(0, 1, slice(None))  # five components: neither 2 nor 4 ranks divide them
    for seen in run[1]:
        for got, want in zip(seen["reduce_dimensions"], alone):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_other_shapes_in_another_process_are_told_to_all(run: tuple[int, list[dict[str, Any]]]) -> None:
    for seen in run[1]:
        assert "same parameters, in the same order" in "".join(seen["mismatched"]) or run[0] == 1


@pytest.mark.slow
def test_the_documented_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "notebooks" / "more" / "boost" / "torchrun_adasum.py")
    done = subprocess.run([*command, script], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks, AdaSum after every step"
    assert lines[-1] == "all ranks hold the same weights: True"
    first, *_, last = (float(line.split()[-1]) for line in lines[1:-1])
    assert last < 0.7 * first
