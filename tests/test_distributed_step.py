"""Two processes: an overflow on one skips the step on both, and both stay equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mpkit.step.distributed import average_

RANKS, STEPS = 2, 8
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def batch(step, rank):
    """Rank 1 has an inf in step 3; the batches of both ranks together are the batch of one process."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(RANKS, 6, 4, generator=generator), torch.randn(RANKS, 6, 2, generator=generator)
    if step == 3:
        x[1, 0, 0] = torch.inf
    return x[rank], y[rank]


def scaled_cell(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
    return TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.MSELoss()), optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 3)
    )


def own_reduction(rank):
    net = network()
    cell = scaled_cell(net)
    outcomes = [cell(*batch(step, rank)) for step in range(STEPS)]
    return net, outcomes


def data_parallel(rank):
    net = network()
    cell = scaled_cell(DistributedDataParallel(net))
    outcomes = [cell(*batch(step, rank)) for step in range(STEPS)]
    return net, outcomes


def accumulated(rank):
    net = network()
    wrapped = DistributedDataParallel(net)
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(wrapped, nn.MSELoss()),
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True),
        DynamicLossScaleUpdateCell(1024.0, 2, 3),
        accumulation_steps=2,
    )
    outcomes = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        cell(x[:3], y[:3])
        outcomes.append(cell(x[3:], y[3:]))
    return net, outcomes


def by_hand(rank):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
    step = ScaledStep(optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 3))
    outcomes = []
    for index in range(STEPS):
        x, y = batch(index, rank)
        loss = nn.functional.mse_loss(net(x), y)
        step.backward(loss)
        outcomes.append((loss.detach(), step.update(), step.scale.clone()))
    return net, outcomes


def unscaled(rank):
    net = network()
    cell = TrainOneStepCell(WithLossCell(net, nn.MSELoss()), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    for step in (0, 1, 2):
        cell(*batch(step, rank))
    return net, []


WAYS = {f.__name__: f for f in (own_reduction, data_parallel, accumulated, by_hand, unscaled)}


def worker(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results = {}
    for name, way in WAYS.items():
        net, outcomes = way(rank)
        results[name] = (
            [p.detach() for p in net.parameters()],
            [(bool(overflow), float(scale)) for _, overflow, scale in outcomes],
        )
    lonely = network()
    only_first = lonely.weight[0].sum() + lonely.bias[0]  # no product: the gradients are whole numbers on any machine
    (only_first if rank == 0 else lonely.bias.sum()).backward()  # rank 1 has no weight gradient
    average_(lonely.parameters())
    results["lonely"] = [p.grad for p in lonely.parameters()]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    threads = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]  # Linux
    Path(folder, f"{rank}.threads").write_text("\n".join(threads))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(worker, str(folder), count=RANKS)
    ends = [{"threads after the end": (folder / f"{rank}.threads").read_text().split()} for rank in range(RANKS)]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) | ends[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("way", ["own_reduction", "data_parallel", "accumulated", "by_hand"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(results, way):
    flags = [step == 3 for step in range(STEPS)]
    scales = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0]
    for rank in range(RANKS):
        assert results[rank][way][1] == list(zip(flags, scales))


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_end_with_the_same_weights_bit_for_bit(results, way):
    for a, b in zip(results[0][way][0], results[1][way][0]):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_like_one_process_with_both_batches(results, way):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(3 if way == "unscaled" else STEPS):
        if step == 3:
            continue
        both = [torch.cat(parts) for parts in zip(batch(step, 0), batch(step, 1))]
        optimizer.zero_grad()
        nn.functional.mse_loss(net(both[0]), both[1]).backward()
        optimizer.step()
    for got, want in zip(results[0][way][0], net.parameters()):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-6)


def test_a_gradient_missing_on_one_rank_counts_as_zero(results):
    for rank in range(RANKS):
        weight, bias = results[rank]["lonely"]
        assert weight.tolist() == [[0.5] * 4, [0.0] * 4]
        assert bias.tolist() == [1.0, 0.5]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc, which Linux has")
def test_nothing_of_gloo_lives_on_when_the_group_is_destroyed(results):
    """A thread of gloo that outlives the group can abort the process at its very end, when all is done."""
    for rank in range(RANKS):
        threads = results[rank]["threads after the end"]
        assert threads
        assert not [name for name in threads if "gloo" in name]
