"""Freezing: which layers stand still, that the backward pass really stops, and what it combines with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpkit import networks, optimizers
from mpkit.boost import FreezeOpt, GradientFreeze
from mpkit.boost.grad_freeze import expected_saving, freeze_cell, stage_costs, stages_by_module
from mpkit.step import TrainOneStepCell

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "torch fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "mpkit Momentum": lambda p: optimizers.Momentum(p, 0.1, 0.9, weight_decay=0.01),
    "mpkit Adam": lambda p: optimizers.Adam(p, 0.01),
    "mpkit LARS": lambda p: optimizers.LARS(optimizers.Momentum(p, 0.1, 0.9)),
}


class Loss(nn.Module):
    """Three linear layers and a squared error; counts the gradients that reach each layer's output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        self.reached: Counter[int] = Counter()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda _, i=i: self.reached.update([i]))
        return (x - y).square().mean()


def groups_of(net: Loss) -> list[list[nn.Parameter]]:
    parameters = list(net.parameters())
    return [parameters[i:] for i in (0, 2, 4)]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 3, generator=generator)


# stages and groups


def test_a_stage_is_a_weight_layer_and_the_normalisation_after_it() -> None:
    net = networks.resnet18(width=4)
    names = {id(p): name for name, p in net.named_parameters()}
    stages = [[names[id(p)] for p in stage] for stage in stages_by_module(net)]
    assert len(stages) == 21
    assert stages[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert ["layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias"] in stages
    assert stages[-1] == ["fc.weight", "fc.bias"]
    assert len(stages_by_module(networks.LeNet5())) == 5


def test_more_groups_than_stages_warn_and_freeze_all_the_same() -> None:
    net = networks.LeNet5()
    freeze = GradientFreeze(10, 1, 0.5, 20)
    with pytest.warns(UserWarning, match="10 freeze groups were asked for and the network has 5 stages"):
        _, optimizer = freeze.freeze_generate(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert len(optimizer.groups) == 5
    by_name = GradientFreeze(10, 1, 0.5, 20, faithful=True).split_parameters_groups(net, 10)
    assert {len(g) for g in by_name} == {8}  # MindSpore's: every group is the whole network


# sequences


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("groups", [1, 2, 10])
def test_a_strategy_is_as_long_as_the_training_and_full_as_often_as_asked(kind: int, share: float, groups: int) -> None:
    steps = 2000
    freeze = GradientFreeze(groups, kind, share, steps)
    sequence = freeze.generate_freeze_index_sequence(groups, kind, share, steps)
    assert len(sequence) == steps
    assert set(sequence) <= set(range(groups))
    near = 1 / groups if kind == 0 else 0.001  # type 0: whole cycles
    assert sequence.count(0) / steps == (1.0 if groups == 1 else pytest.approx(share, abs=near))


def test_what_cannot_be_frozen_is_refused_by_name() -> None:
    GradientFreeze(1, "any", 0.5, 5)  # type: ignore[arg-type]  # one group never freezes
    with pytest.raises(ValueError, match="ReLU has no trainable parameter"):
        GradientFreeze(2, 1, 0.5, 5).split_parameters_groups(nn.ReLU(), 2)


# steps


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_frozen_parameters_stand_still_and_the_backward_pass_ends_before_them(name: str, faithful: bool) -> None:
    net = Loss()
    strategy = [0, 2, 1, 0]
    optimizer = FreezeOpt(MAKERS[name](net.parameters()), groups_of(net), strategy, faithful=faithful)
    for step in range(6):  # around the end of the strategy
        index = optimizer.index
        assert index == strategy[step % 4]
        before = [p.detach().clone() for p in net.parameters()]
        net.reached.clear()
        with optimizer.frozen():
            loss = net(*batch(step))
        loss.backward()
        assert sorted(net.reached) == list(range(index, 3))  # no gradient ever reaches a frozen layer's output
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters())]
        assert moved == [i >= 2 * index for i in range(6)]
        optimizer.zero_grad()
    assert all(p.requires_grad for p in net.parameters())


def test_the_hook_freezes_inside_any_train_cell_and_thaws_after_an_error() -> None:
    net = Loss()
    optimizer = FreezeOpt(MAKERS["torch SGD"](net.parameters()), groups_of(net), [2, 0])
    cell = TrainOneStepCell(net, optimizer, hooks=[optimizer.hook()])
    cell(*batch())
    assert sorted(net.reached) == [2]
    net.reached.clear()
    optimizer.step_index = 0
    with pytest.raises(TypeError):
        cell(1)
    cell(*batch())
    assert sorted(net.reached) == [2]
    assert all(p.requires_grad for p in net.parameters())


def test_a_sum_over_processes_is_divided_only_where_a_mean_is_asked_for() -> None:
    optimizer = FreezeOpt(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0))
    for mean, degree, divisor in ((None, 4, 1), (True, 4, 4), (True, None, None)):  # None: as many as there are
        (cell,) = freeze_cell(True, Loss(), optimizer, 1.0, None, False, mean, degree)
        assert cell.step.updates[0].degree == divisor  # type: ignore[attr-defined]


# the formula


def test_a_frozen_stage_spares_its_weight_and_the_way_into_the_next() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 2))
    convolution, first, second = 16 * 18, 32 * 5, 5 * 2
    assert stage_costs(net, torch.zeros(2, 1, 6, 6)) == [convolution + first, first + second, second]


def test_the_expected_saving_is_the_average_over_a_long_strategy() -> None:
    costs, groups, share, steps = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], 3, 0.5, 30_000
    stride = len(costs) // groups
    for kind in (0, 1):
        sequence = GradientFreeze(groups, kind, share, steps).generate_freeze_index_sequence(groups, kind, share, steps)
        saved = np.mean([sum(costs[: v * stride]) for v in sequence]) / sum(costs)
        assert expected_saving(costs, groups, kind, share) == pytest.approx(saved, rel=0.03)
    assert expected_saving(costs, 1, 1, 0.5) == 0
    with pytest.raises(ValueError, match="a stage for each group"):
        expected_saving(costs, 8, 1, 0.5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_group_that_is_added_is_trained_on_every_step_and_what_was_left_out_is_not(inside):
    first, left_out, added = everything = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    inner = torch.optim.SGD([first, left_out], 1.0)
    freezing = FreezeOpt(inner, [[first]])
    with pytest.raises(ValueError, match=r"indices 0\.\.0"):
        FreezeOpt(inner, [[first]], [1])
    (inner if inside else freezing).add_param_group({"params": [added]})
    assert freezing.still() == [left_out]
    for p in everything:
        p.grad = torch.ones(1)
    freezing.step()
    assert [p.item() for p in everything] == [-1.0, 0.0, -1.0]
