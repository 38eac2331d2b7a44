"""What recording costs a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from mpkit import data
from mpkit.bench._measure import Row, interleaved, rebuilt
from mpkit.networks import Network
from mpkit.record import Recorder
from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

Build = Callable[[torch.device, int | None], Callable[[], object]]
GOALS = {"recorded, every=1": 1.5, "recorded, every=20": 1.05}


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """The 784-512-512-10 step (batch 64, float32, fused SGD) bare and with all its gradients recorded."""
    builds = 3 if quick else 9
    rows = rebuilt(lambda: _measured("training cell", _cell, device), builds)
    return rows + rebuilt(lambda: _measured("plain loop, GradScaler", _loop, device), builds)


def _measured(title: str, build: Build, device: torch.device) -> list[Row]:
    contenders = {
        "bare": build(device, None),
        "recorded, every=1": build(device, 1),
        "recorded, every=20": build(device, 20),
    }
    case = f"MLP step batch 64, {title}"
    return interleaved("record", case, contenders, rounds=11, inner=20, device=device, goals=GOALS)


def _parts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Network, torch.optim.Optimizer]:
    images, labels = data.digits()
    network = Network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, fused=True)
    return images[:64].to(device), labels[:64].to(device), network, optimizer


def _cell(device: torch.device, every: int | None) -> Callable[[], object]:
    x, y, network, optimizer = _parts(device)
    hooks = [] if every is None else [Recorder(network, every=every)]
    rule = DynamicLossScaleUpdateCell(2.0**10, 2, 1000)
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(network, torch.nn.CrossEntropyLoss()), optimizer, rule, hooks=hooks
    ).to(device)
    return lambda: cell(x, y)


def _loop(device: torch.device, every: int | None) -> Callable[[], object]:
    x, y, network, optimizer = _parts(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    recorder = None if every is None else Recorder(network, optimizer, scaler, every=every)

    def step() -> None:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if recorder is not None:
            recorder.record(loss)
        scaler.step(optimizer)
        scaler.update()

    return step
