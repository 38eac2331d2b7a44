"""The first training: the 784-512-512-10 network on the digits, at any casting level, with a dynamic loss scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Enum, Int

from mpkit.casting import LEVELS, auto_mixed_precision
from mpkit.data import data_dir, digits
from mpkit.device import default_device
from mpkit.explorers.base import Explorer, counted
from mpkit.formats import FP16, FloatFormat
from mpkit.networks import Network
from mpkit.record import Trace
from mpkit.scalers import DynamicLossScaler, LossScaler, all_finite

DTYPES = ("float16", "bfloat16")
BATCH, RATE, STEPS = 64, 0.1, 240


def train_step(
    network: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, images: Tensor, labels: Tensor
) -> tuple[Tensor, bool]:
    """One step of mixed-precision training, in eight phases: the loss, and whether all gradients were finite."""
    optimizer.zero_grad()
    parameters = list(network.parameters())  # 1 keep weights in float32
    output = network(images)  # 2 forward in float16
    loss = F.cross_entropy(output, labels)  # 3 loss in float32
    scaler.scale(loss).backward()  # 4 scaled backward pass
    scaled = [parameter.grad for parameter in parameters]  # 5 gradients in float32
    true = scaler.unscale(scaled)  # 6 divide by the scale
    finite = all_finite(true)  # 7 update if all are finite
    if finite:
        for parameter, grad in zip(parameters, true):
            parameter.grad = grad
        optimizer.step()
    scaler.adjust(finite)  # 8 adjust the scale
    return loss.detach(), bool(finite)


@dataclass
class Run:
    """What happened in one training.

    Args:
        level, dtype:  casting level and 16-bit format.
        losses:        loss of each step (nats).
        scales:        loss scale used in each step (dimensionless).
        skipped:       numbers of the steps without an update, from 0.
        accuracy:      share of the test digits that are right at the end; None while training.
    """

    level: str
    dtype: str
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    accuracy: float | None = None

    def row(self) -> dict[str, Any]:
        """The run as a line of a table, rounded for reading; the digits differ from machine to machine."""
        return {
            "level": self.level,
            "first loss": round(self.losses[0], 1),
            "last loss": round(sum(self.losses[-24:]) / len(self.losses[-24:]), 1),
            "accuracy": None if self.accuracy is None else round(self.accuracy, 2),
            "last scale": _power(self.scales[-1]),
            "skipped": len(self.skipped),
        }


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.4g}"


def computed_in(dtype: str, device: torch.device) -> torch.dtype | FloatFormat:
    """What a training here computes in. On a CPU float16 is emulated inside float32.

    Most processors have no products in float16, and torch is then about five times as slow as an emulation with the
    same range and the same rounding.
    """
    if dtype == "float16":
        return FP16 if device.type == "cpu" else torch.float16
    return torch.bfloat16


def training(
    level: str, scaler: LossScaler, *, dtype: str = "float16", steps: int = STEPS, seed: int = 0
) -> Iterator[Run]:
    """Train on the digits and yield the `Run` so far after every step, a new one: whoever holds it may read it while
    the training goes on. The accuracy is there after the last.

    Source:  the network, the scaler and the order of the step are those of the MindSpore tutorial
             "automatic mixed precision"; the images are the 1,797 digits in `data/`.
    """
    device = default_device()
    torch.manual_seed(seed)
    network = auto_mixed_precision(Network().to(device), level, computed_in(dtype, device))
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    images, labels = (t.to(device) for t in digits("train"))
    order = torch.Generator().manual_seed(seed)
    run = Run(level, dtype)
    batches: Iterator[Tensor] = iter(())
    for number in range(steps):
        batch = next(batches, None)
        if batch is None:  # a new epoch, shuffled anew
            batches = iter(torch.randperm(len(images), generator=order).split(BATCH))
            batch = next(batches)
        scale = float(scaler.scale_value)
        loss, finite = train_step(network, optimizer, scaler, images[batch], labels[batch])
        losses, scales = [*run.losses, float(loss)], [*run.scales, scale]
        right = accuracy(network) if number == steps - 1 else None
        run = Run(level, dtype, losses, scales, run.skipped if finite else [*run.skipped, number], right)
        yield run


def trained(level: str, scaler: LossScaler, **options: Any) -> Run:
    """`training` to its end."""
    *_, run = training(level, scaler, **options)
    return run


def accuracy(network: nn.Module) -> float:
    """Share of the 297 test digits that the network names rightly."""
    images, labels = (t.to(default_device()) for t in digits("test"))
    with torch.no_grad():
        return float((network(images).argmax(1) == labels).float().mean())


@cache
def recorded_run(steps: int = STEPS) -> Run:
    """The first steps of the training recorded in `data/traces/mlp_digits.npz`, for a view that has none of its own."""
    trace = Trace.load(data_dir() / "traces" / "mlp_digits.npz").before(steps)
    skipped = [i for i, bad in enumerate(trace.overflow) if bad]
    return Run("recorded", "float16", trace.loss.tolist(), trace.scale.tolist(), skipped)


class StartExplorer(Explorer):
    """Set a level and a scaler, press Train, and compare with the run before."""

    controls = ("level", "dtype", "init_exponent", "scale_factor", "scale_window")
    actions = {"Train": "train", "Stop": "stop"}
    level = Enum([name for name in LEVELS if name != "auto"], "O2").tag(label="casting level")
    dtype = Enum(DTYPES, "float16").tag(label="16-bit format")
    init_exponent = Int(16, min=0, max=30).tag(label="initial scale, 2 to the", unit="")
    scale_factor = Int(2, min=2, max=16).tag(label="scale_factor", unit="times")
    scale_window = Int(50, min=1, max=240).tag(label="scale_window", unit="steps")

    def __init__(self, **params: object) -> None:
        self.run: Run | None = None
        self.before: Run | None = None
        self.recorded, self.steps = recorded_run(), STEPS
        super().__init__(**params)

    def scaler(self) -> DynamicLossScaler:
        """The scaler of the present settings."""
        return DynamicLossScaler(2.0**self.init_exponent, self.scale_factor, self.scale_window)

    def compute(self) -> None:
        """The plan: the scale of each step if nothing overflowed."""
        scaler, self.plan, self.grown = self.scaler(), [], 0
        for _ in range(STEPS):
            self.plan.append(float(scaler.scale_value))
            scaler.adjust(torch.tensor(True))
            self.grown += float(scaler.scale_value) > self.plan[-1]  # the last step may fill a window too

    def train(self) -> None:
        """Train in the background; the finished run becomes the one to compare with."""
        self.start(self._training)

    def _training(self) -> Iterator[float]:
        with self.lock:
            settings = (self.level, self.scaler(), self.dtype)
            self.before, self.run = self.run, None
        steps = self.steps
        for self.run in training(settings[0], settings[1], dtype=settings[2], steps=steps):
            yield len(self.run.losses) / steps

    def summary(self) -> str:
        settings = (
            f"{self.level} in {_used(self.level, self.dtype)}; the scale starts at 2^{self.init_exponent} and is "
            f"multiplied by {self.scale_factor} after {counted(self.scale_window, 'finite step')}"
        )
        if self.run is None or not self.run.losses:
            return f"Set to {settings}. {self._grows()} Press Train."
        return f"Set to {settings}. {_told(self.run)}" + (f" Before: {_told(self.before)}" if self.before else "")

    def _grows(self) -> str:
        return f"Without an overflow it would be multiplied {counted(self.grown, 'time')} in {STEPS} steps."

    def table(self) -> list[dict[str, Any]]:
        return [{"run": name, **run.row()} for name, run in (("this", self.run), ("before", self.before)) if run]


def _used(level: str, dtype: str) -> str:
    """The format that a level computes in: O0 casts nothing."""
    return "float32" if level == "O0" else dtype


def _told(run: Run) -> str:
    end = f"accuracy {run.accuracy:.2f}" if run.accuracy is not None else f"loss {run.losses[-1]:.2f}"
    return (
        f"{run.level} {_used(run.level, run.dtype)}, {counted(len(run.losses), 'step')}: {end}, "
        f"{len(run.skipped)} skipped, last scale {_power(run.scales[-1])}."
    )
