"""What a scaled training step costs beside the bare float32 step and torch's GradScaler, and how often it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpkit import optimizers as own
from mpkit.bench._measure import Row, interleaved, rebuilt
from mpkit.networks import Network
from mpkit.policies import preset
from mpkit.scalers import DynamicLossScaler, DynamicLossScaleUpdateCell, PolicyLossScaler
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

GROUP = "training step"
GOAL = 1.07
"""A scaled step may cost this much of the bare one, and never more than GradScaler's."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "default SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "fused Adam": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "default Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "mpkit Momentum": lambda p: own.Momentum(p, 0.01, 0.9),
    "mpkit Adam": lambda p: own.Adam(p, 1e-3),
}
"""Torch's default ones are skipped by the host, which costs one read per step; the others skip on the device."""
CASES = (*((name, 64) for name in OPTIMIZERS), ("fused SGD", 256))
Step = Callable[[], object]


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value on the host, each of which waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def contenders(device: torch.device, optimizer: str, batch: int) -> dict[str, Step]:
    """The same step of the 784-512-512-10 network, in float32, by different hands; the first is the bare one."""
    x = torch.rand(batch, 1, 28, 28, device=device)
    y = torch.randint(10, (batch,), device=device)
    loss_fn = nn.CrossEntropyLoss()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Network().to(device)
        return net, OPTIMIZERS[optimizer](net.parameters())

    def bare() -> Step:
        net, opt = made()

        def step() -> Tensor:
            opt.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            opt.step()
            return loss

        return step

    def grad_scaler() -> Step:
        net, opt = made()
        scaler = torch.amp.GradScaler(device.type)

        def step() -> Tensor:
            opt.zero_grad()
            loss = loss_fn(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss

        return step

    def ours(sense: object) -> Step:
        net, opt = made()
        cell = TrainOneStepWithLossScaleCell(WithLossCell(net, loss_fn), opt, sense)
        return lambda: cell(x, y)

    return {
        "bare float32": bare(),
        "torch GradScaler": grad_scaler(),
        "mpkit, update cell": ours(DynamicLossScaleUpdateCell(2.0**16, 2, 2000)),
        "mpkit, DynamicLossScaler": ours(DynamicLossScaler(2.0**16, 2, 2000)),
        "mpkit, torch's policy": ours(PolicyLossScaler(preset("torch"))),
    }


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Time of a step, and host reads per step, for every optimizer of `OPTIMIZERS`."""
    builds = 3 if quick else 9
    return [row for case in CASES for row in rebuilt(lambda case=case: _measured(device, *case), builds)]  # type: ignore[misc]


def _measured(device: torch.device, optimizer: str, batch: int) -> list[Row]:
    steps = contenders(device, optimizer, batch)
    goals = {name: GOAL for name in steps if name.startswith("mpkit")}
    reads = {name: f"{_reads(step):g} host reads per step" for name, step in steps.items()}
    case = f"MLP 784-512-512-10, batch {batch}, {optimizer}"
    return interleaved(GROUP, case, steps, rounds=15, inner=5, device=device, goals=goals, notes=reads)


def _reads(step: Step, steps: int = 10) -> float:
    step()
    with HostReads() as reads:
        for _ in range(steps):
            step()
    return reads.count / steps
