"""Three training steps with every tensor on the `meta` device, the stand-in for a GPU: a read on the host raises there,
and so does an operation between devices. Every cast, scaler and optimizer of the public lists comes up, with and
without boost, each with changing partners.
"""

import itertools

import pytest
import torch
from torch import nn

from mpkit import optimizers
from mpkit.boost import AutoBoost, BoostTrainOneStepWithLossScaleCell
from mpkit.casting import auto_mixed_precision, cast_like
from mpkit.casting.levels import LEVELS
from mpkit.casting.presets import PRESETS
from mpkit.casting.recipe import RECIPES
from mpkit.policies import FRAMEWORKS, preset
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
)
from mpkit.schedules import PolynomialDecayLR
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

NEEDED = {
    "jmp": {"loss_scale": 1024.0},
    "mindspore_cell": {"loss_scale_value": 1024.0, "scale_factor": 2.0, "scale_window": 2},
    "mindspore_scaler": {"scale_value": 1024.0, "scale_factor": 2, "scale_window": 2},
}
LAYERWISE = {"fairscale_layerwise"}  # a scale for each layer: not for one loss
SCALERS = {
    "DynamicLossScaler": lambda: DynamicLossScaler(1024, 2, 2),
    "StaticLossScaler": lambda: StaticLossScaler(1024),
    "DynamicLossScaleUpdateCell": lambda: DynamicLossScaleUpdateCell(1024.0, 2, 2),
    "FixedLossScaleUpdateCell": lambda: FixedLossScaleUpdateCell(1024.0),
    **{
        name: lambda name=name: PolicyLossScaler(preset(name, **NEEDED.get(name, {})))
        for name in FRAMEWORKS
        if name not in LAYERWISE
    },
}
ARGUMENTS = {"Lamb": (0.1,), "Momentum": (0.1, 0.9)}
OPTIMIZERS = [
    name
    for name in optimizers.__all__
    if isinstance(getattr(optimizers, name), type)
    and issubclass(getattr(optimizers, name), optimizers.Optimizer)
    and name != "Optimizer"
]
CASTS = [*LEVELS, *PRESETS, *RECIPES]


def cast(network: nn.Module, name: str) -> nn.Module:
    return auto_mixed_precision(network, name) if name in LEVELS else cast_like(network, name)


def combinations() -> list[tuple[str, str, str, bool]]:
    """Every member of each list at least once, partners in turn."""
    lists = (CASTS, list(SCALERS), OPTIMIZERS, [False, True, True])
    longest = max(map(len, lists)) * 2
    return [row for row, _ in zip(zip(*map(itertools.cycle, lists)), range(longest))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("casting", "scaling", "optimizer", "boost"), combinations())
def test_three_steps_read_nothing_on_the_host(casting, scaling, optimizer, boost):
    with torch.device("meta"):
        network = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)
        )
        x, y = torch.empty(32, 32), torch.empty(32, 32)
    cast(network, casting)
    made = getattr(optimizers, optimizer)(list(network.parameters()), *ARGUMENTS.get(optimizer, ()))
    sense = SCALERS[scaling]()
    if not boost:
        cell = TrainOneStepWithLossScaleCell(WithLossCell(network, nn.MSELoss()), made, sense)
    else:
        network, made = AutoBoost("O1").network_auto_process_train(network, made)
        cell = BoostTrainOneStepWithLossScaleCell(WithLossCell(network, nn.MSELoss()), made, sense)
    for _ in range(3):
        loss, overflow, scale = cell(x, y)
    assert (loss.device.type, overflow.device.type, scale.device.type) == ("meta",) * 3
    assert all(p.device.type == "meta" for p in network.parameters())
    with pytest.raises(RuntimeError, match="meta"):  # so this device does refuse a read
        loss.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_decay_and_a_rate_that_change_are_not_read_on_the_host(optimizer):
    weights = [nn.Parameter(torch.ones(3, 2, device="meta")), nn.Parameter(torch.ones(2, device="meta"))]
    decay = 0.1 if optimizer == "SGD" else lambda step: 0.1 / (1 + step)
    options = {}
    if optimizer not in ("AdaFactor", "FTRL"):  # one has its own rate, which changes, the other takes a fixed one
        options["learning_rate"] = PolynomialDecayLR(0.1, 0.01, 3, 1.0)
    if optimizer == "Momentum":
        options["momentum"] = 0.9
    made = getattr(optimizers, optimizer)([{"params": weights, "weight_decay": decay}], **options)
    made.found_inf = torch.zeros((), device="meta")
    for _ in range(3):
        for p in weights:
            p.grad = torch.ones_like(p)
        made.step()
