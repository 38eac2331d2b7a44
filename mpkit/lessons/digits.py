"""The training that the lessons share: the 784-512-512-10 network on the digits, at any level, with any scaler."""

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import data_dir, digits
from mpkit.device import default_device
from mpkit.formats import FP16, FloatFormat
from mpkit.networks import Network
from mpkit.record import Trace
from mpkit.scalers import LossScaler, all_finite

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


class Run(NamedTuple):
    """What happened in one training so far.

    Args:
        level, dtype:  casting level and 16-bit format.
        losses:        loss of each step (nats).
        scales:        loss scale used in each step (dimensionless).
        skipped:       numbers of the steps without an update, from 0.
        accuracy:      share of the test digits that are right at the end; None while training.
    """

    level: str
    dtype: str
    losses: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()
    accuracy: float | None = None


def computed_in(dtype: str, device: torch.device) -> torch.dtype | FloatFormat:
    """What a training here computes in. On a CPU float16 is emulated inside float32.

    Most processors have no products in float16, and torch is then about five times as slow as an emulation with the
    same range and the same rounding.
    """
    return (FP16 if device.type == "cpu" else torch.float16) if dtype == "float16" else torch.bfloat16


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
    order, run = torch.Generator().manual_seed(seed), Run(level, dtype)
    batches = (batch for _ in count() for batch in torch.randperm(len(images), generator=order).split(BATCH))
    for number, batch in zip(range(steps), batches):
        scale = float(scaler.scale_value)
        loss, finite = train_step(network, optimizer, scaler, images[batch], labels[batch])
        right = accuracy(network) if number == steps - 1 else None
        skipped = run.skipped if finite else (*run.skipped, number)
        run = Run(level, dtype, (*run.losses, float(loss)), (*run.scales, scale), skipped, right)
        yield run


def accuracy(network: nn.Module) -> float:
    """Share of the 297 test digits that the network names rightly."""
    images, labels = (t.to(default_device()) for t in digits("test"))
    with torch.no_grad():
        return float((network(images).argmax(1) == labels).float().mean())


@cache
def recorded_run(steps: int = STEPS) -> Run:
    """The first steps of the training recorded in `data/traces/mlp_digits.npz`, for a view that has none of its own.

    It was trained with momentum, which `training` has not.
    """
    trace = Trace.load(data_dir() / "traces" / "mlp_digits.npz").before(steps)
    skipped = tuple(i for i, bad in enumerate(trace.overflow) if bad)
    return Run("recorded", "float16", tuple(trace.loss.tolist()), tuple(trace.scale.tolist()), skipped)
