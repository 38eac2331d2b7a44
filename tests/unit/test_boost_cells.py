"""The boost train cells: what they return, what they combine, and that levels reach them from above."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpkit import networks, optimizers
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GroupLossScaleManager,
    LessBN,
)
from mpkit.boost.adasum import AdaSumUpdate
from mpkit.boost.dim_reduce import DimReduce, DimReduceUpdate, WeightSnapshots
from mpkit.boost.freeze_opt import Freeze
from mpkit.boost.grad_accumulation import Accumulate
from mpkit.model import Model
from mpkit.scalers import DynamicLossScaleManager
from mpkit.step import StepOutcome, TrainOneStepCell, WithLossCell, build_train_network
from mpkit.step.update import Update, Wrapped

MANUAL_OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": False}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def loss_net(net: nn.Module | None = None) -> WithLossCell:
    return WithLossCell(net or mlp(), nn.MSELoss())


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return optimizers.Momentum(net.parameters(), 0.05, 0.9)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def assert_same(a: list[Tensor], b: list[Tensor], **tolerance: float) -> None:
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def test_the_named_methods_say_when_they_do_not_apply() -> None:
    net = loss_net()
    marked: Any = momentum(net)
    marked.adasum = True  # asks for it, but this is one process
    cell = BoostTrainOneStepCell(net, marked)
    assert (cell.check_adasum_enable(), cell.check_dim_reduce_enable()) == (False, False)
    loss = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="accumulation is off"):
        cell.gradient_accumulation_process(loss, [], loss, *batch())
    with pytest.raises(RuntimeError, match="AdaSum is off"):
        cell.adasum_process(loss, [])


def test_the_accumulation_method_takes_gradients_from_outside() -> None:
    net, flags = loss_net(), {**MANUAL_OFF, "grad_accumulation": True}
    boost = AutoBoost("O0", {"boost": flags, "grad_accumulation": {"grad_accumulation_step": 2}})
    cell = BoostTrainOneStepCell(net, torch.optim.SGD(net.parameters(), lr=1.0), boost=boost)
    before, loss = weights(net), torch.tensor(3.0)
    for factor in (1.0, 3.0):
        grads = [torch.full_like(p, factor) for p in net.parameters()]
        assert cell.gradient_accumulation_process(loss, grads, torch.tensor(1.0), *batch()) is loss
    assert_same(weights(net), [p - 2.0 for p in before])


# group loss scale


def test_the_flag_needs_a_manager_and_every_parameter_a_group() -> None:
    boost = AutoBoost("O0", {"boost": {**MANUAL_OFF, "loss_scale_group": True}})
    net = loss_net()
    with pytest.raises(TypeError, match="scale_sense must be a GroupLossScaleManager, got Tensor"):
        BoostTrainOneStepWithLossScaleCell(net, momentum(net), torch.tensor(1.0), boost=boost)
    manager = GroupLossScaleManager(64.0, [list(net.parameters())])
    cell = BoostTrainOneStepWithLossScaleCell(net, momentum(net), manager, boost=boost)
    cell(*batch())
    net.backbone.append(nn.Linear(2, 2))
    cell.optimizer.add_param_group({"params": net.backbone[-1].parameters()})
    with pytest.raises(ValueError, match="2 trained parameters stand in no loss scale group"):
        cell(*batch())


# dim_reduce


def test_dim_reduce_takes_scaled_gradients_and_skips_an_overflow(tmp_path: Path) -> None:
    bare = mlp()
    net = loss_net(bare)
    plain = TrainOneStepCell(net, momentum(net), hooks=[WeightSnapshots(bare, tmp_path, every=1)])
    for _ in range(6):
        plain(*batch(0))
    settings = {"n_components": 3, "weight_load_dir": str(tmp_path), "alpha": 0.02, "timeout": 5}
    boost = AutoBoost("O0", {"boost": {**MANUAL_OFF, "dim_reduce": True}, "dim_reduce": settings})
    _, optimizer = boost.network_auto_process_train(bare, torch.optim.SGD(bare.parameters(), lr=0.5))
    cell = BoostTrainOneStepWithLossScaleCell(net, optimizer, torch.tensor(1024.0), boost=boost)
    assert cell.check_dim_reduce_enable()
    assert (optimizer.param_groups[0]["lr"], cell.dim_reduce.alpha, optimizer.dim_reduce) == (1.0, 0.02, True)
    with pytest.raises(RuntimeError, match="through a train cell"):
        cell.step.updates[0].apply(None, None)
    losses = [cell(*batch(0)).loss.item() for _ in range(8)]
    assert losses[-1] < losses[0]
    before, (x, y) = weights(net), batch()
    assert cell(x, y * float("inf")).overflow
    assert_same(weights(net), before, rtol=0, atol=0)


# reach


def test_build_train_network_reaches_boost() -> None:
    net, config = networks.resnet18(width=4), {"grad_freeze": {"total_steps": 12}}
    cell = build_train_network(net, momentum(net), nn.CrossEntropyLoss(), boost_level="O1", boost_config_dict=config)
    assert (type(cell), type(cell.network.backbone)) == (BoostTrainOneStepCell, LessBN)
    assert len(cell.optimizer.strategy) == 12
    assert isinstance(cell(torch.randn(2, 3, 8, 8), torch.tensor([0, 1])), StepOutcome)
    assert type(build_train_network(net, momentum(net), nn.CrossEntropyLoss())) is TrainOneStepCell


@pytest.mark.parametrize("options", [{}, {"loss_scale_manager": DynamicLossScaleManager(2.0**8)}])
def test_a_model_trains_and_evaluates_with_boost(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = networks.resnet18(width=4, classes=2, in_channels=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    options["boost_config_dict"] = {
        "boost": {"mode": "manual", "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": 2},
    }
    model = Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"acc"}, boost_level="O1", **options)
    labels = torch.arange(8) % 2
    images = torch.randn(8, 1, 8, 8) + labels.view(-1, 1, 1, 1).float() * 2
    model.train(30, [(images, labels)])
    assert model.eval([(images, labels)])["acc"] > 0.8


@pytest.mark.gpu
def test_o1_on_a_gpu_trains_as_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        cell, data = boosted_resnet(device)
        losses = [cell(*data).loss.item() for _ in range(6)]
        results.append((losses, [p.cpu() for p in weights(cell.network)]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    assert_same(results[0][1], results[1][1], rtol=1e-2, atol=1e-3)


def boosted_resnet(device: str = "cpu", level: str = "O1") -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    net, boost = networks.resnet18(width=2), AutoBoost(level, {"grad_freeze": {"total_steps": 6, "freeze_p": 0.5}})
    data = [torch.randn(2, 3, 8, 8).to(device), torch.tensor([0, 1]).to(device)]
    net.to(device)
    network, optimizer = boost.network_auto_process_train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return BoostTrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer), data


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_a_copied_cell_goes_on_as_the_original(copied: Any) -> None:
    """Freezing and centralization too: torch optimizers lose their hooks when they are copied."""
    cell, data = boosted_resnet()
    cell(*data)
    twin = copied(cell)
    for _ in range(4):
        cell(*data)
        twin(*data)
    assert_same(weights(cell.network), weights(twin.network), rtol=0, atol=0)


def test_o2_on_one_process_is_o1() -> None:
    """What O2 adds, AdaSum, merges the updates of several processes."""
    (one, data), (two, _) = boosted_resnet(), boosted_resnet(level="O2")
    for _ in range(4):
        one(*data)
        two(*data)
    assert_same(weights(one.network), weights(two.network), rtol=0, atol=0)


def test_a_failed_pass_leaves_nothing_frozen() -> None:
    cell, (x, y) = boosted_resnet()
    cell(x, y)
    place = cell.optimizer.step_index
    assert cell.optimizer.index > 0
    with pytest.raises(RuntimeError, match="size"):
        cell(x[:, :2], y)
    assert all(p.requires_grad for p in cell.network.parameters())
    assert cell.optimizer.step_index == place


# what goes together


def test_updates_wrap_each_other_in_an_order_that_makes_sense_and_in_no_other() -> None:
    weight = nn.Parameter(torch.zeros(1))
    freezing = FreezeOpt(torch.optim.SGD([weight], 1.0))
    plain = Update(freezing)
    kinds = (Freeze, AdaSumUpdate, DimReduceUpdate)
    inside = {kind.what: type(kind.what, (Wrapped,), {"what": kind.what}) for kind in kinds}
    for kind, others in zip(kinds, ("AdaSum", "freezing", "")):
        assert {*inside} - {*kind.refuses} == {others} - {""}
    with pytest.raises(ValueError, match="freezing cannot stand around dimension reduction: it needs the gradient"):
        Freeze(inside["AdaSum"](inside["dimension reduction"](plain)), freezing)
    Freeze(inside["AdaSum"](plain), freezing)
    reduction = DimReduce(nn.Module(), freezing, [weight], torch.ones(1, 1), 1)
    for around in (lambda inner: Freeze(inner, freezing), lambda inner: DimReduceUpdate(inner, reduction)):
        Accumulate(around(plain), 2)
        with pytest.raises(ValueError, match="cannot stand around accumulation"):
            around(Accumulate(plain, 2))
