"""Two processes: gradients that are large, sparse, missing or uneven in number, and weights that AdaSum writes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import in_processes
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from mpkit import optimizers
from mpkit.boost import AdaSum
from mpkit.boost.grad_freeze import reduce_
from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from mpkit.step.distributed import average_

RANKS = 2
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")


class Branches(nn.Module):
    """`both` is used by every process, `first` by process 0, `nobody` by none."""

    def __init__(self):
        super().__init__()
        self.both, self.first, self.nobody = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, first):
        return (self.both + self.first if first else self.both).sum()


def large(rank):
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    p.grad = torch.full_like(p, 40000.0)
    average_([p])
    summed = [torch.full((2,), 40000.0, dtype=torch.float16)]
    reduce_(summed)
    return [p.grad, summed[0]]


def unused(rank):
    net = Branches()
    cell = TrainOneStepCell(net, optimizers.Momentum(net.parameters(), 0.5, 0.0, weight_decay=0.5))
    cell(rank == 0)
    return [p.detach() for p in net.parameters()]


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


def mixed(rank):
    """A gradient that is dense in one process and sparse in the other is dense in both."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3) if rank == 0 else torch.sparse_coo_tensor([[1]], [3.0], (3,))
    average_([p])
    return [p.grad]


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


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def merged(rank):
    found = []
    for make in (lambda p: optimizers.Momentum(p, 0.5, 0.0), lambda p: torch.optim.SGD(p, 0.5)):
        p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        made = make([p])
        adasum = AdaSum(rank, 1, RANKS, (p,))
        for _ in range(4):
            p.grad = torch.tensor([1.0, 2.0 * rank - 1.0], dtype=torch.float16)
            adasum.update_(made.step)
        found.append(p.detach())
    return found


WAYS = {f.__name__: f for f in (large, unused, sparse, mixed, joined, merged)}


def worker(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.save({name: way(rank) for name, way in WAYS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(worker, str(folder), count=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"joined"}))
def test_both_processes_end_alike(results, way):
    assert all(map(torch.equal, results[0][way], results[1][way]))


def test_the_mean_of_large_float16_gradients_does_not_overflow(results):
    for mean in results[0]["large"]:
        assert mean.tolist() == [40000.0, 40000.0]


def test_a_parameter_that_no_process_used_does_not_decay(results):
    both, first, nobody = (p.item() for p in results[0]["unused"])
    assert both == 1 - 0.5 * (1 + 0.5)
    assert first == 1 - 0.5 * (0.5 + 0.5)  # used by one of two: its gradient counts half
    assert nobody == 1.0


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


def test_a_gradient_of_two_layouts_becomes_dense(results):
    assert results[0]["mixed"][0].tolist() == [0.5, 2.0, 0.5]


def test_uneven_inputs_inside_join_come_to_an_end(results):
    assert [results[rank]["joined"][-1].item() for rank in range(RANKS)] == [2.0, 4.0]
    for a, b in zip(results[0]["joined"][:-1], results[1]["joined"][:-1]):
        assert torch.equal(a, b)


def test_what_adasum_writes_into_sixteen_bit_weights_is_kept(results):
    ours, theirs = results[0]["merged"]
    assert torch.equal(ours, theirs)
    assert ours[0] < -1.0
