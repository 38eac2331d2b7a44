"""Gradient accumulation: the mean of N micro-batches is one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpkit.boost import AutoBoost, BoostTrainOneStepCell
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.optimizers import Momentum
from mpkit.step import Hook, ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell
from mpkit.step.distributed import rank_and_size


def accumulating(steps: int) -> AutoBoost:
    flags = {"mode": "manual", "grad_accumulation": True}
    return AutoBoost("O0", {"boost": flags, "grad_accumulation": {"grad_accumulation_step": steps}})


def test_other_gradients_and_an_update_that_raises_leave_nothing_behind() -> None:
    net = nn.Linear(5, 3)
    fails = [True]

    def update() -> None:
        if fails and fails.pop():
            raise OSError("no answer from the other rank")

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulate = GradientAccumulation(2, optimizer)
    optimizer.step = update  # type: ignore[method-assign]
    loss, grads = torch.tensor(0.0), [torch.ones_like(p) for p in net.parameters()]
    for wrong in (grads[::-1], grads[:1]):
        with pytest.raises(ValueError, match=r"of the shapes \[\(3, 5\), \(3,\)\]"):
            accumulate(loss, wrong)
    accumulate(loss, grads)
    with pytest.raises(OSError, match="no answer"):
        accumulate(loss, grads)
    assert accumulate.counter == 0
    assert not any(t.any() for t in accumulate.accumulated)
    assert net.weight.grad is None
    assert not accumulate.flush()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    accumulate, before = GradientAccumulation(4, optimizer), net.bias.tolist()
    for _ in range(3):
        accumulate(loss, grads)
    assert accumulate.flush()
    assert net.bias.tolist() == pytest.approx([x - 1 for x in before])


def by_cell(weight: nn.Parameter, make: Any, parts: int) -> None:
    cell = TrainOneStepWithLossScaleCell(ones(weight), make([weight]), torch.tensor(1024.0), accumulation_steps=parts)
    for _ in range(parts):
        cell()


def by_hand(weight: nn.Parameter, make: Any, parts: int) -> None:
    step = ScaledStep(make([weight]), torch.tensor(1024.0))
    for _ in range(parts):
        step.backward(weight.sum() / parts)
    step.update()


def by_boost(weight: nn.Parameter, make: Any, parts: int) -> None:
    cell = BoostTrainOneStepCell(ones(weight), make([weight]), boost=accumulating(parts))
    for _ in range(parts):
        cell()


def ones(weight: nn.Parameter) -> nn.Module:
    """A loss whose gradient is 1."""
    return Written(lambda module: module.weight.sum(), weight=weight)


THOUSAND = [(dtype, 1024) for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.mark.parametrize("way", [by_cell, by_hand, by_boost])
@pytest.mark.parametrize(("dtype", "parts"), [*THOUSAND, (torch.float64, 3)])  # a third is one of float64
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 1.0, fused=True), lambda p: Momentum(p, 1.0, 0.0)])
def test_a_thousand_micro_batches_are_one_batch_in_every_dtype(way: Any, dtype: Any, parts: int, make: Any) -> None:
    """In bfloat16 a sum of 1/1024 stands still at 1/4, where its gap is 1/512."""
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    for update in (-1.0, -2.0):
        way(weight, make, parts)
        assert weight.item() == update
        assert weight.grad_dtype == dtype


def test_sums_of_two_micro_batches_are_16_bits_again_at_the_update_and_after_an_error() -> None:
    weight, hook, seen = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)), Hook(), []
    hook.after_unscale = lambda ctx: seen.append(weight.grad.dtype)  # type: ignore[method-assign, union-attr]
    optimizer = torch.optim.SGD([weight], 1.0)
    cell = TrainOneStepWithLossScaleCell(ones(weight), optimizer, torch.tensor(8.0), hooks=[hook], accumulation_steps=2)
    for _ in range(3):
        cell()
    hook.after_backward = lambda ctx: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        cell()
    assert [*seen, weight.grad.dtype, weight.grad_dtype] == [torch.bfloat16] * 3  # type: ignore[union-attr]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_weights_get_their_gradients_from_fsdp(group_of_one: None) -> None:
    net = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.zeros_(net.weight)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    step = ScaledStep(torch.optim.SGD(net.parameters(), 1.0), torch.tensor(8.0))
    for _ in range(2):
        step.backward(net(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    assert not step.update()
    assert net.weight.to_local().tolist() == [[-2.0, -2.0]]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("dtype", "parts", "sent"),
    [(torch.float32, 1, [1, 2, 3, 4]), (torch.float32, 2, [0, 1, 1, 2]), (torch.bfloat16, 2, [0, 0, 0, 0])],
)
def test_a_replica_sends_once_for_each_update_and_no_sums_of_16_bits(group_of_one, dtype, parts, sent):
    net, buckets, seen = DistributedDataParallel(nn.Linear(1, 1).to(dtype)), [], []

    def sends(_, bucket):
        buckets.append(bucket)
        (answer := torch.futures.Future()).set_result(bucket.buffer())
        return answer

    net.register_comm_hook(None, sends)
    network = Written(lambda module: module.net(torch.ones(1, 1, dtype=dtype)).sum(), net=net)
    cell = TrainOneStepCell(network, torch.optim.SGD(net.parameters(), 0.1), accumulation_steps=parts)
    for _ in sent:
        cell()
        seen.append(len(buckets))
    assert seen == sent
    assert rank_and_size() == (0, 1)
