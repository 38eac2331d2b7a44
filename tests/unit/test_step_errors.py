"""Training goes on rightly after what people do to it: weights changed from outside, errors, copies, other dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from support import assert_same
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    FreezeOpt,
)
from mpkit.model import Model
from mpkit.networks import resnet18
from mpkit.scalers import (
    DynamicLossScaler,
    FixedLossScaleManager,
)
from mpkit.step import ScaledStep, TrainOneStepCell, WithLossCell, build_train_network


def one_weight(dtype=torch.float32, value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


# --- accumulation


def test_boosts_accumulation_clips_the_mean_and_not_its_parts():
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.zero_()
    boost = AutoBoost(
        "O1",
        {
            "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True},
            "grad_accumulation": {"grad_accumulation_step": 2},
        },
    )
    cell = BoostTrainOneStepCell(
        WithLossCell(net, Output()), torch.optim.SGD(net.parameters(), 1.0), boost=boost, clip_norm=2.0
    )
    for x in (8.0, -6.0):  # the gradients; their mean is 1, their parts clipped to 2 have the mean 0
        cell(torch.tensor([[x]]), None)
    assert net.weight.item() == -1.0


class Output(nn.Module):
    def forward(self, output, _label):
        return output.sum()


class Fails(torch.autograd.Function):
    """Passes x on; the backward pass raises when told to."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            Fails.now = False
            raise RuntimeError("out of memory")
        return grad


class TwoLayers(nn.Module):
    """The second layer has its gradient before the first one's fails. One number each: exact on any machine."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(1, 1)) for _ in range(2))

    def forward(self, x):
        return (self.last * Fails.apply(self.first * x.view(1, 1))).sum()


def test_an_error_in_the_middle_of_an_accumulation_counts_nothing_twice():
    net = TwoLayers()
    cell = TrainOneStepCell(net, torch.optim.SGD(net.parameters(), 1.0), accumulation_steps=2)
    cell(torch.ones(1, 1))
    Fails.now = True
    with pytest.raises(RuntimeError, match="out of memory"):
        cell(torch.ones(1, 1))
    assert cell.pending == 0
    for _ in range(2):
        cell(torch.ones(1, 1))
    assert net.last.item() == net.first.item() == 0.0


# --- a step by hand


class Breaks(torch.optim.SGD):
    broken = True

    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("no disk")
        return super().step(closure)


def two_optimizers():
    a, b = one_weight(value=1.0), one_weight(value=1.0)
    return a, b, ScaledStep([torch.optim.SGD([a], 0.5), Breaks([b], 0.5)], torch.tensor(4.0))


def test_a_step_by_hand_goes_on_where_an_optimizer_failed():
    a, b, step = two_optimizers()
    step.backward((a + b).sum())
    with pytest.raises(RuntimeError, match="no disk"):
        step.update()
    assert (a.item(), b.item()) == (0.5, 1.0)
    step.optimizers[1].broken = False
    step.update()
    assert (a.item(), b.item()) == (0.5, 0.5)
    step.backward((a + b).sum())  # and the next step is a whole one
    step.update()
    assert (a.item(), b.item()) == (0.0, 0.0)


def test_a_failed_step_by_hand_can_be_given_up():
    a, b, step = two_optimizers()
    step.backward((a + b).sum())
    with pytest.raises(RuntimeError, match="no disk"):
        step.update()
    with pytest.raises(RuntimeError, match="drop"):
        step.backward((a + b).sum())
    step.drop()
    step.optimizers[1].broken = False
    step.backward((a + b).sum())
    step.update()
    assert (a.item(), b.item()) == (0.0, 0.5)


def test_a_refused_state_changes_nothing_of_a_step_by_hand():
    def made():
        a, b = one_weight(), one_weight()
        optimizers = [opt.Momentum([a], 0.1, 0.9), opt.Adam([b], 0.1)]
        return a, b, ScaledStep(optimizers, DynamicLossScaler(8.0, 2, 2))

    a, b, step = made()
    step.backward((a + b).sum())
    step.update()
    other = made()[2]
    before = copy.deepcopy(other.state_dict())
    for change in (
        lambda state: state["optimizers"][1].update(param_groups=[]),
        lambda state: state["optimizers"].reverse(),
        lambda state: state["rule"].pop("counter"),
        lambda state: state.update(scale=torch.ones(3)),
    ):
        saved = copy.deepcopy(step.state_dict())
        change(saved)
        with pytest.raises((ValueError, RuntimeError)):
            other.load_state_dict(saved)
        assert_same(other.state_dict(), before)
    other.load_state_dict(step.state_dict())
    assert_same(other.state_dict(), step.state_dict())


# --- a failed set-up leaves no trace


def shape_of(net, optimizer):
    groups = [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
    return [(name, id(m), sorted(vars(m))) for name, m in net.named_modules()], groups, len(vars(optimizer))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metrics": {"accurcy"}}, ValueError),
        ({"metrics": 5}, TypeError),
        ({"clip_norm": -1.0}, ValueError),
        ({"clip_norm": "x"}, TypeError),
        ({"clip_norm": 1.0, "loss_scale_manager": FixedLossScaleManager(8.0, False)}, ValueError),
        ({"accumulation_steps": 0}, ValueError),
        ({"hooks": None}, TypeError),
        ({"eval_indexes": [1]}, ValueError),
        ({"eval_network": 5}, TypeError),
        ({"boost_config_dict": {"grad_freeze": {"param_groups": 0}}}, ValueError),
        ({"boost_config_dict": {"boost": {"mode": "manual", "dim_reduce": True}}}, ValueError),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_that_cannot_be_made_changes_nothing(level, options, error):
    torch.manual_seed(0)
    net = resnet18(width=2)
    optimizer = opt.Momentum(net.parameters(), 0.1, 0.9)
    before = shape_of(net, optimizer)
    with pytest.raises(error):
        Model(net, nn.CrossEntropyLoss(), optimizer, **{"amp_level": level, "boost_level": "O1", **options})
    assert shape_of(net, optimizer) == before
    x = torch.zeros(2, 3, 8, 8)
    assert net(x).dtype == torch.float32


def test_an_optimizer_that_cannot_step_is_refused_before_the_network_is_touched():
    net = resnet18(width=2)
    optimizer = torch.optim.LBFGS(net.parameters())
    before = shape_of(net, optimizer)
    with pytest.raises(TypeError, match="closure"):
        build_train_network(net, optimizer, nn.CrossEntropyLoss(), "O2", "O1")
    assert shape_of(net, optimizer) == before


# --- checkpoints of others

KINDS = {
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: opt.Adam(p, 0.1),
    "AdamWeightDecay": lambda p: opt.AdamWeightDecay(p, 0.1),
    "torch SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, 0.1),
    "LARS": lambda p: opt.LARS(opt.SGD(p, 0.1)),
    "FreezeOpt": lambda p: FreezeOpt(opt.RMSProp(p, 0.1)),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_checkpoint_of_another_optimizer_is_a_value_error_and_changes_nothing(saved, here, tmp_path):
    def made(kind, seed):
        torch.manual_seed(seed)
        net = nn.Linear(2, 1)
        return Model(net, nn.MSELoss(), KINDS[kind](net.parameters()))

    batches = [(torch.ones(4, 2), torch.zeros(4, 1))]
    first = made(saved, 0)
    first.train(1, batches)
    first.save(tmp_path / "c")
    second = made(here, 1)
    if here == saved:
        second.load(tmp_path / "c")
        assert_same(second.train_network.state_dict(), first.train_network.state_dict())
        return
    before = copy.deepcopy(second.train_network.state_dict())
    with pytest.raises(ValueError, match="optimizer"):
        second.load(tmp_path / "c")
    assert_same(second.train_network.state_dict(), before)
    second.train(1, batches)


# --- checkpoints


ALIKE = {  # of two rules the groups and the tensors are the same
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "LARS": lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
    "AdamWeightDecay": lambda p: opt.AdamWeightDecay(p, 0.1),
    "Lamb": lambda p: opt.Lamb(p, 0.1),
    "FreezeOpt": lambda p: FreezeOpt(opt.AdamWeightDecay(p, 0.1)),
    "FreezeOpt of Lamb": lambda p: FreezeOpt(opt.Lamb(p, 0.1)),
}


@pytest.mark.parametrize(("one", "other"), [*zip([*ALIKE][::2], [*ALIKE][1::2]), *zip([*ALIKE][1::2], [*ALIKE][::2])])
def test_the_state_of_another_rule_with_the_same_tensors_is_refused(one, other, tmp_path):
    saving, loading = ([one_weight(value=1.0)] for _ in range(2))
    first, second = ALIKE[one](saving), ALIKE[other](loading)
    step, refuses = (ScaledStep(optimizer, torch.tensor(2.0)) for optimizer in (first, second))
    with pytest.raises(ValueError, match=r"^the saved optimizer is a \w+"):
        refuses.load_state_dict(step.state_dict())
    nets = [nn.Linear(1, 1) for _ in range(2)]
    models = [Model(net, nn.MSELoss(), ALIKE[name](list(net.parameters()))) for net, name in zip(nets, (one, other))]
    models[0].train(1, [(torch.ones(1, 1), torch.ones(1, 1))])
    models[0].save(tmp_path / "c")
    before = copy.deepcopy(models[1].train_network.state_dict())
    with pytest.raises(ValueError, match=r"^the saved optimizer is a \w+"):
        models[1].load(tmp_path / "c")
    assert_same(models[1].train_network.state_dict(), before)


def test_the_state_of_a_subclass_is_one_of_its_kind():
    class Mine(opt.Momentum):
        """With a method of the user's."""

    steps = [ScaledStep(kind([one_weight()], 0.1, 0.9), torch.tensor(2.0)) for kind in (Mine, opt.Momentum)]
    steps[0].load_state_dict(steps[1].state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    state = steps[1].state_dict()
    for wrong, error in ((5, TypeError), ([5], TypeError), ([[5]], TypeError), ([[[]]], ValueError), ([], ValueError)):
        with pytest.raises(error, match="kinds"):
            steps[1].load_state_dict({**state, "kinds": wrong})
