"""Three training steps with every tensor on the `meta` device, the stand-in for a GPU: a read on the host raises there,
and so does an operation between devices. Every cast, scaler and optimizer of the public lists comes up with every
boost and without one, each time with other partners; hypothesis draws more.

Two boosts are left out because their docstrings say what they read: accumulation beside a scaler, whose counter
decides in Python, and dim_reduce, whose line search compares losses.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import policy_of
from support import tries
from torch import nn

from mpkit import optimizers
from mpkit.boost import AutoBoost, BoostTrainOneStepWithLossScaleCell
from mpkit.casting import LEVELS, PRESETS, RECIPES, auto_mixed_precision, cast_like
from mpkit.policies import FRAMEWORKS
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
)
from mpkit.schedules import PolynomialDecayLR
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

LAYERWISE = {"fairscale_layerwise"}  # a scale for each layer: not for one loss
SCALERS = {
    "DynamicLossScaler": lambda: DynamicLossScaler(1024, 2, 2),
    "StaticLossScaler": lambda: StaticLossScaler(1024),
    "DynamicLossScaleUpdateCell": lambda: DynamicLossScaleUpdateCell(1024.0, 2, 2),
    "FixedLossScaleUpdateCell": lambda: FixedLossScaleUpdateCell(1024.0),
    **{name: lambda name=name: PolicyLossScaler(policy_of(name)) for name in FRAMEWORKS if name not in LAYERWISE},
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


BOOSTS = {
    "none": None,
    **{level: lambda level=level: AutoBoost(level) for level in AutoBoost.levels if level != "O0"},
    "tuned": lambda: AutoBoost("O1", {"boost": {"mode": "tuned"}}),
    "mostly frozen": lambda: AutoBoost("O1", {"grad_freeze": {"param_groups": 3, "freeze_p": 0.1, "total_steps": 4}}),
}


def combinations() -> list[tuple[str, str, str, str]]:
    """Every member of each list with every boost, the other partners in turn."""
    lists = (CASTS, list(SCALERS), OPTIMIZERS)
    length = max(map(len, lists))
    turned = [
        [part[(i + 5 * k * j) % len(part)] for j, part in enumerate(lists)]
        for k in range(len(BOOSTS))
        for i in range(length)
    ]
    return [(*row, boost) for row, boost in zip(turned, (name for name in BOOSTS for _ in range(length)))]


def test_every_member_comes_up_with_every_boost():
    pairs = {(member, row[3]) for row in combinations() for member in row[:3]}
    assert pairs == set(itertools.product((*CASTS, *SCALERS, *OPTIMIZERS), BOOSTS))
    assert len({row[:3] for row in combinations()}) == len(combinations())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("casting", "scaling", "optimizer", "boost"), combinations())
def test_three_steps_read_nothing_on_the_host(casting, scaling, optimizer, boost):
    three_steps(casting, scaling, optimizer, boost)


@pytest.mark.filterwarnings("ignore")
@tries(0.1)
@given(
    st.sampled_from(CASTS), st.sampled_from(sorted(SCALERS)), st.sampled_from(OPTIMIZERS), st.sampled_from([*BOOSTS])
)
def test_no_other_combination_reads_more(casting, scaling, optimizer, boost):
    three_steps(casting, scaling, optimizer, boost)


def three_steps(casting, scaling, optimizer, boost):
    with torch.device("meta"):
        network = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)
        )
        x, y = torch.empty(32, 32), torch.empty(32, 32)
    cast(network, casting)
    made = getattr(optimizers, optimizer)(list(network.parameters()), *ARGUMENTS.get(optimizer, ()))
    sense = SCALERS[scaling]()
    if boost == "none":
        cell = TrainOneStepWithLossScaleCell(WithLossCell(network, nn.MSELoss()), made, sense)
    else:
        chosen = BOOSTS[boost]()
        network, made = chosen.network_auto_process_train(network, made)
        cell = BoostTrainOneStepWithLossScaleCell(WithLossCell(network, nn.MSELoss()), made, sense, boost=chosen)
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
