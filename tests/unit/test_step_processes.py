"""Two processes: one decision, the same weights; large, sparse, missing and uneven gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import Written, in_processes, join_group
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from mpkit import optimizers
from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from mpkit.step.distributed import average_, mean_

RANKS = 2
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")


def large(rank):
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    p.grad = torch.full_like(p, 40000.0)
    average_([p])
    summed = [torch.full((2,), 40000.0, dtype=torch.float16)]
    mean_(summed)
    return [p.grad, summed[0]]


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)
        self.shift = nn.Parameter(torch.zeros(2))
        nn.init.zeros_(self.table.weight)

    def forward(self, rows):
        found = 0.0 if rows is None else self.table(rows).sum()
        return found + self.shift.sum()


def sparse(rank, optimizer="lazy", steps=((([0, 1]), ([1, 3])), ((None), ([4])))):
    """Row 1 is met by both in the first step, row 4 by process 1 alone in the second, row 2 by none."""
    net = Rows()
    made = optimizers.LazyAdam(net.parameters(), 0.1)
    cell = TrainOneStepWithLossScaleCell(net, made, DynamicLossScaleUpdateCell(8.0, 2, 10))
    layouts = []
    for rows in steps:
        cell(None if rows[rank] is None else torch.tensor(rows[rank]))
        layouts.append(torch.tensor(net.table.weight.grad.is_sparse))
    return [net.table.weight.detach(), net.shift.detach(), net.table.weight.grad.to_dense(), *layouts]


def joined(rank):
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(2, 1))
    network = nn.Sequential(net, Sum())
    made = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    cell = TrainOneStepWithLossScaleCell(network, made, DynamicLossScaleUpdateCell(8.0, 2, 2))
    with Join([net]):
        for _ in range(2 + 2 * rank):
            cell(torch.ones(3, 2))
    return [*(p.detach() for p in net.parameters()), torch.tensor(float(cell.index))]


def sixteen_bits(rank):
    """Micro-batches of a bfloat16 weight in a DistributedDataParallel: 1/1024 at a time, which bfloat16 sums lose."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(net.weight)
    network = nn.Sequential(DistributedDataParallel(net), Sum())
    cell = TrainOneStepCell(network, torch.optim.SGD(net.parameters(), 1.0), accumulation_steps=1024)
    for _ in range(1024):
        cell(torch.full((1, 1), 1.0 + rank, dtype=torch.bfloat16))
    return [net.weight.detach()]


def outside(rank):
    """A parameter beside the DistributedDataParallel, whose gradient overflows in process 1 alone."""
    replica, own = DistributedDataParallel(nn.Linear(1, 1)), nn.Parameter(torch.ones(1))
    network = Written(lambda m, x: m.replica(torch.ones(1, 1)).sum() + (m.own * x).sum(), replica=replica, own=own)
    made = torch.optim.SGD(network.parameters(), 0.1, fused=True)
    cell = TrainOneStepWithLossScaleCell(network, made, torch.tensor(8.0))
    return [cell(torch.tensor([torch.inf if rank else 1.0])).overflow]


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


WAYS = {f.__name__: f for f in (large, sparse, joined, sixteen_bits, outside)}


def all_ways(rank):
    return {name: way(rank) for name, way in WAYS.items()}


def worker(rank, folder):
    join_group(rank, all_ways, folder, RANKS)
    threads = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]  # Linux
    Path(folder, f"{rank}.threads").write_text("\n".join(threads))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(worker, str(folder), count=RANKS)
    ends = [{"threads after the end": (folder / f"{rank}.threads").read_text().split()} for rank in range(RANKS)]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) | ends[rank] for rank in range(RANKS)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc, which Linux has")
def test_nothing_of_gloo_lives_on_when_the_group_is_destroyed(results):
    """A thread of gloo that outlives the group can abort the process at its very end, when all is done."""
    for rank in range(RANKS):
        threads = results[rank]["threads after the end"]
        assert threads
        assert not [name for name in threads if "gloo" in name]


def test_the_mean_of_large_float16_gradients_does_not_overflow(results):
    for mean in results[0]["large"]:
        assert mean.tolist() == [40000.0, 40000.0]


def test_sparse_gradients_are_averaged_and_stay_sparse(results):
    weight, shift, grad, *layouts = results[1]["sparse"]
    assert all(layouts)
    assert grad[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]
    table, dense = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(2))
    reference = optimizers.LazyAdam([table, dense], 0.1)
    for rows, values in (([0, 1, 3], [0.5, 1.0, 0.5]), ([4], [0.5])):
        table.grad = torch.sparse_coo_tensor([rows], torch.tensor(values)[:, None].expand(-1, 2), (5, 2))
        dense.grad = torch.ones(2)
        reference.step()
    torch.testing.assert_close(weight, table.detach())
    torch.testing.assert_close(shift, dense.detach())
    assert weight[2].tolist() == [0.0, 0.0]


def test_uneven_inputs_inside_join_come_to_an_end(results):
    assert [results[rank]["joined"][-1].item() for rank in range(RANKS)] == [2.0, 4.0]
    for a, b in zip(results[0]["joined"][:-1], results[1]["joined"][:-1]):
        assert torch.equal(a, b)


def test_sixteen_bit_micro_batches_are_summed_in_float32_and_averaged_once(results):
    assert [results[rank]["sixteen_bits"][0].item() for rank in range(RANKS)] == [-1.5, -1.5]


def test_an_overflow_outside_of_the_replica_skips_the_step_everywhere(results):
    assert [bool(results[rank]["outside"][0]) for rank in range(RANKS)] == [True, True]
