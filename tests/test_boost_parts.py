"""The parts of the boosts by themselves, where their answers turn."""

from __future__ import annotations

import inspect
import math
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpkit.boost.dim_reduce import DimReduce, WeightSnapshots
from mpkit.boost.dim_reduce.descent import DimReduceSGD, _RandomState, _undisturbed
from mpkit.boost.dim_reduce.pca import pca_matrix, prepare_pca
from mpkit.boost.grad_freeze import FreezeOpt, cell, split_learning_rates
from mpkit.boost.grad_freeze.stages import expected_saving, index_probabilities, stage_costs
from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.boost.updates import DimReduceUpdate, FrozenUpdate
from mpkit.step import distributed
from mpkit.step.scaling import scaling_of
from mpkit.step.update import Update


class Bare(torch.optim.Optimizer):
    """An optimizer of somebody's own, with the options that it has."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),  # no rate is rate 1, no momentum and no decay are none
        ({"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}, True),
        ({"lr": 2.0}, False),
        ({"momentum": 0.5}, False),
        ({"weight_decay": 0.5}, False),
        ({"lr": 1.0, "betas": (0.9, 0.99)}, False),
    ],
    ids=str,
)
def test_dim_reduce_takes_whatever_applies_the_move_as_it_is(options: dict[str, Any], taken: bool) -> None:
    net = nn.Linear(2, 1, bias=False)
    made = lambda: DimReduce(net, Bare([net.weight], options), [net.weight], torch.eye(2), n_components=2)  # noqa: E731
    if taken:
        assert made().rho == 0.55
        return
    with pytest.raises(ValueError, match="needs plain SGD with lr 1"):
        made()


def test_the_optimizer_that_is_made_for_it_applies_the_move_as_it_is() -> None:
    net = nn.Linear(2, 1, bias=False)
    made = DimReduceSGD([net.weight], torch.eye(2), 0.25)
    DimReduce(net, made, [net.weight], made.pca_mat_local, n_components=2, alpha=made.dim_reduce_alpha)
    assert (made.param_groups[0]["lr"], made.dim_reduce, type(made).__name__) == (1.0, True, "SGD")


def test_every_trial_of_every_step_repeats_the_dropout_of_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, here played by a dict; outside of the trials the numbers go on."""
    on_gpu = {"cuda:0": torch.tensor([0])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d: on_gpu[str(d)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, d: on_gpu.update({str(d): state.clone()}))
    net = nn.Dropout(0.5)
    random = _RandomState(torch.device("cuda:0"))
    net.register_forward_pre_hook(random)
    x, seen = torch.ones(64), []
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))
    for step in range(3):
        on_gpu["cuda:0"].fill_(step)
        seen.append(net(x))
        state = torch.get_rng_state()
        for _ in range(2):
            on_gpu["cuda:0"].fill_(-1)
            with _undisturbed(net, random):
                assert on_gpu["cuda:0"].item() == step
                assert torch.equal(net(x), seen[-1])
            assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_every_trial_draws_the_same_numbers_where_a_loss_calls_the_network_twice() -> None:
    """What a trial draws on its way must not become the state that the next trial begins with."""
    net, x = nn.Dropout(0.5), torch.ones(64)
    random = _RandomState(torch.device("cpu"))
    net.register_forward_pre_hook(random)
    net(x)
    net(x)
    trials = []
    for _ in range(3):
        with _undisturbed(net, random):
            trials.append(torch.stack([net(x), net(x)]))
    assert torch.equal(trials[0], trials[1])
    assert torch.equal(trials[0], trials[2])
    assert not torch.equal(trials[0][0], trials[0][1])


@pytest.mark.parametrize("context", [None, SimpleNamespace(loss=None, inputs=())], ids=["none", "without a loss"])
def test_dim_reduce_needs_the_loss_of_a_step(context: Any) -> None:
    update = DimReduceUpdate(Update(torch.optim.SGD([nn.Parameter(torch.ones(1))])), SimpleNamespace(weights=[]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="run it through a train cell"):
        update.apply(context, None)
    update.apply(context, torch.tensor(1.0))  # a step that is skipped needs none


def test_a_normalised_layer_keeps_the_bias_only_if_asked_to() -> None:
    linear = nn.Linear(2, 3)
    assert NormalizedLinear.of(linear).bias is None
    assert NormalizedLinear.of(linear, True).bias is linear.bias


def test_what_freezing_a_stage_saves_in_multiply_adds() -> None:
    """Its own weight gradient and the input gradient of the layer after it, of one sample."""
    dense = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for batch in (1, 5):
        assert stage_costs(dense, torch.ones(batch, 3)) == [3 * 4 + 4 * 2, 4 * 2]
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 5))
    assert stage_costs(image, torch.ones(2, 1, 5, 5)) == [3 * 3 * 18 + 18 * 5, 18 * 5]  # 3 x 3 places


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"growth": 1.0}, None),
        ({"growth": 1 - 2.0**-20}, ValueError),
        ({"shrink": 2.0**-20}, None),
        ({"shrink": 0.0}, ValueError),
        ({"shrink": 1.0}, ValueError),
        ({"min_scale": 4.0, "max_scale": 4.0}, None),
        ({"min_scale": 0.0}, None),
        ({"min_scale": 4.5, "max_scale": 4.25}, ValueError),
        ({"max_scale": math.inf}, None),
        ({"max_scale": Decimal("Infinity")}, TypeError),
    ],
    ids=str,
)
def test_the_bounds_of_a_group_scale_at_their_edges(options: dict[str, Any], error: type[Exception] | None) -> None:
    if error is None:
        assert GroupLossScaleManager(4.0, **options).get_loss_scale() == 4.0
        return
    with pytest.raises(error, match=r"need|must"):
        GroupLossScaleManager(4.0, **options)


def test_a_manager_without_groups_yet_has_no_scale_and_saves_its_table_alone() -> None:
    manager = GroupLossScaleManager(4.0)
    assert (manager.table.tolist(), manager.scales.tolist()) == ([1.0, 1.0], [])
    assert manager.passed.tolist() == [[True, True]] * 2
    assert manager.get_drop_overflow_update() is True
    manager.set_loss_scale_status(2, 8.0)
    assert list(manager.state_dict()) == ["table"]
    assert manager.table.tolist() == [1.0, 8.0, 8.0, 1.0]
    manager.set_loss_scale_status(0, 8.0)
    assert manager.table.tolist() == [1.0, 1.0]


def test_a_marker_names_groups_that_there_are() -> None:
    """With two groups 1 and 2 are theirs, 0 and 3 are outside."""
    manager = GroupLossScaleManager(4.0)
    manager.set_loss_scale_status(2, 4.0)
    x = torch.ones(2)
    for known in range(4):
        for pair in ((known, 1), (1, known)):
            assert torch.equal(manager(x, *pair), x)
        for strange in (-1, 4):
            for pair in ((known, strange), (strange, known)):
                with pytest.raises(ValueError, match=r"a marker names groups 0\.\.3"):
                    manager(x, *pair)


@pytest.mark.parametrize(
    ("options", "over"), [({}, 4), ({"degree": 8}, 8), ({"mean": False}, 1), ({"mean": False, "degree": 8}, 1)], ids=str
)
def test_a_sum_over_processes_is_divided_by_the_degree_or_their_number(
    options: dict[str, Any], over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(cell, "mean_", lambda tensors, degree: seen.append((list(tensors), degree)))
    grads: list[Tensor] = [torch.ones(2)]
    cell.reduce_(grads, **options)
    assert seen == [(grads, over)]


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_a_group_that_overflowed_in_another_process_overflowed(
    elsewhere: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [[nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2))]]
    for (p,) in groups:
        p.grad = torch.ones(2)
    scaling = scaling_of(GroupLossScaleManager(8.0, groups), torch.device("cpu"))
    monkeypatch.setattr(distributed, "several_processes", lambda: True)
    monkeypatch.setattr(distributed, "agree_", lambda found: found.clamp_(elsewhere))
    found = scaling.unscale_([p.grad for (p,) in groups if p.grad is not None], torch.tensor(1.0))
    assert scaling.group_overflow is not None
    assert scaling.group_overflow.tolist() == [elsewhere > 0] * 2
    assert found.item() == elsewhere


def test_rates_are_split_to_as_many_groups_as_there_may_be() -> None:
    assert split_learning_rates([0.1, 0.2], [0, 99], 100)[98:] == [[0.1, 0.2], [0.2]]
    with pytest.raises(ValueError, match=r"at most the steps, or 2\*\*20"):
        split_learning_rates([0.1], [0], 2**20 + 1)


def test_a_rank_waits_half_an_hour_for_the_matrix_of_another() -> None:
    assert inspect.signature(prepare_pca).parameters["timeout"].default == 30 * 60


def test_a_snapshot_is_saved_every_ten_steps() -> None:
    assert inspect.signature(WeightSnapshots).parameters["every"].default == 10


class Told:
    """An update that keeps what it was asked to average."""

    hooks = ()
    optimizer = None

    def reduce(self, parameters: Any = None) -> None:
        self.parameters = parameters


def test_a_frozen_step_averages_what_it_trains_unless_told_what() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [list(net[0].parameters()), list(net[1].parameters())]
    freezing = FreezeOpt(torch.optim.SGD(net.parameters(), 0.1), groups, [1])
    inner = Told()
    update = FrozenUpdate(inner, freezing)  # type: ignore[arg-type]
    update.reduce()
    assert [id(p) for p in inner.parameters] == [id(p) for p in groups[1]]
    update.reduce(groups[0])
    assert inner.parameters is groups[0]


def test_a_state_from_before_steps_were_counted_has_none() -> None:
    p = nn.Parameter(torch.zeros(1))
    freezing = FreezeOpt(torch.optim.SGD([p], 0.1), [[p]])
    saved = freezing.state_dict()
    del saved["steps"]
    freezing.load_state_dict(saved)
    assert freezing.steps == 0


def test_a_normalized_layer_begins_as_a_linear_one_does() -> None:
    """So MindSpore and torch draw it: uniform within 1 / sqrt(in_features)."""
    torch.manual_seed(3)
    normalized = NormalizedLinear(16, 8)
    torch.manual_seed(3)
    linear = nn.Linear(16, 8)
    assert torch.equal(normalized.weight, linear.weight)


def test_the_random_directions_come_from_seed_zero() -> None:
    data = np.random.default_rng(5).normal(size=(40, 60))  # no direction stands out, so that the draws are seen
    found = pca_matrix(data, 3)
    np.testing.assert_array_equal(found, pca_matrix(data, 3, generator=np.random.default_rng(0)))
    assert not np.array_equal(found, pca_matrix(data, 3, generator=np.random.default_rng(1)))


@pytest.mark.parametrize("freeze_type", [0, 1])
@pytest.mark.parametrize(("groups", "frozen"), [(1, 0.0), (2, 0.25), (4, 0.25)])
def test_two_groups_are_enough_to_save_something(freeze_type: int, groups: int, frozen: float) -> None:
    """The first stage costs a quarter and stands still in every step that is not a full one, if it can."""
    costs = [1.0, 3.0] if groups < 4 else [1.0, 0.0, 0.0, 3.0]
    saved = expected_saving(costs, groups, freeze_type, 0.5)
    chance = sum(index_probabilities(max(groups, 2), freeze_type))
    assert saved == pytest.approx(0.5 * frozen * chance, rel=1e-12)
