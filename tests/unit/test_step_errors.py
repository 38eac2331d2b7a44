"""Training goes on rightly after what people do to it: weights changed from outside, errors, copies, other dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from support import assert_same
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import AutoBoost, FreezeOpt
from mpkit.model import Model
from mpkit.networks import resnet18
from mpkit.scalers import DynamicLossScaler, FixedLossScaleManager
from mpkit.step import Hook, ScaledStep, TrainOneStepCell, build_train_network


def one_weight(dtype=torch.float32, value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


def fail(_):
    raise RuntimeError("out of memory")


class TwoLayers(nn.Module):
    """The second layer has its gradient before the first one's fails. One number each: exact on any machine."""

    fails = False

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x):
        hidden = self.first * x
        if self.fails:
            hidden.register_hook(fail)
        return (self.last * hidden).sum()


def test_an_error_in_the_middle_of_an_accumulation_counts_nothing_twice():
    net, x = TwoLayers(), torch.ones(1)
    cell = TrainOneStepCell(net, torch.optim.SGD(net.parameters(), 1.0), accumulation_steps=2)
    cell(x)
    net.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        cell(x)
    assert cell.pending == 0
    net.fails = False
    for _ in range(2):
        cell(x)
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


def test_a_step_by_hand_is_given_up_where_an_optimizer_fails():
    a, b, step = two_optimizers()
    step.backward((a + b).sum())
    with pytest.raises(RuntimeError, match="no disk"):
        step.update()
    step.optimizers[1].broken = False
    step.backward((a + b).sum())  # the next step is a whole one
    step.update()
    assert (a.item(), b.item()) == (0.0, 0.5)


# --- a failed set-up leaves no trace


def shape_of(net, optimizer):
    groups = [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
    return [(name, id(m), sorted(vars(m))) for name, m in net.named_modules()], groups, len(vars(optimizer))


REFUSED = {
    ValueError: [
        {"metrics": {"accurcy"}}, {"clip_norm": -1.0}, {"clip_norm": 0.0}, {"accumulation_steps": 0},
        {"clip_norm": 1.0, "loss_scale_manager": FixedLossScaleManager(8.0, False)}, {"eval_indexes": [1]},
        {"boost_config_dict": {"grad_freeze": {"param_groups": 0}}},
        {"boost_config_dict": {"boost": {"mode": "manual", "dim_reduce": True}}},
    ],
    TypeError: [{"metrics": 5}, {"clip_norm": "x"}, {"hooks": None}, {"hooks": [1]}, {"eval_network": 5}],
}  # fmt: skip


@pytest.mark.parametrize(("options", "error"), [(given, error) for error, every in REFUSED.items() for given in every])
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


def test_what_no_level_reaches_and_what_would_train_nothing_is_refused_before_a_boost_changes_it():
    net = nn.DataParallel(resnet18(width=2))
    every, norm = opt.Momentum(net.parameters(), 0.1, 0.9), torch.optim.SGD(net.module.layer1[0].bn1.parameters(), 0.1)
    for error, optimizer, call in (
        (TypeError, every, lambda: build_train_network(net, every, nn.CrossEntropyLoss(), "O1", "O1")),
        (TypeError, every, lambda: build_train_network(net, every, None, "O0", "O1", cast_model_type=torch.float16)),
        (ValueError, norm, lambda: AutoBoost("O1").network_auto_process_train(net.module, norm)),
    ):
        before = shape_of(net, optimizer)
        with pytest.raises(error, match=r"DataParallel|less_bn"):
            call()
        assert shape_of(net, optimizer) == before


def test_a_manager_in_place_of_its_cell_is_refused():
    with pytest.raises(TypeError, match="update cell"):
        ScaledStep(torch.optim.SGD([one_weight()], 0.1), FixedLossScaleManager(8.0))


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
def test_the_state_of_another_rule_with_the_same_tensors_is_refused(one, other):
    saving, loading = ([one_weight(value=1.0)] for _ in range(2))
    first, second = ALIKE[one](saving), ALIKE[other](loading)
    step, refuses = (ScaledStep(optimizer, torch.tensor(2.0)) for optimizer in (first, second))
    with pytest.raises(ValueError, match=r"^the saved optimizer is a \w+"):
        refuses.load_state_dict(step.state_dict())


def test_the_state_of_a_subclass_is_one_of_its_kind():
    class Mine(opt.Momentum):
        """With a method of the user's."""

    steps = [ScaledStep(kind([one_weight()], 0.1, 0.9), torch.tensor(2.0)) for kind in (Mine, opt.Momentum)]
    steps[0].load_state_dict(steps[1].state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    state = steps[1].state_dict()
    for wrong, error in ((5, TypeError), ([5], ValueError), ([], ValueError)):
        with pytest.raises(error, match=r"kinds|the saved optimizer is a 5"):
            steps[1].load_state_dict({**state, "kinds": wrong})


# --- what rests, what is foreign, what does not go together


def test_an_optimizer_without_gradients_rests_and_all_of_them_are_an_error():
    a, b = one_weight(value=1.0), one_weight(value=1.0)
    optimizers = [torch.optim.SGD([a], 0.5, momentum=0.5), opt.Momentum([b], 0.5, 0.5)]
    step = ScaledStep(optimizers, DynamicLossScaler(8.0, 2, 1), skip="each")
    before = copy.deepcopy(optimizers[1].state_dict())
    step.backward(a.sum())
    assert not step.update()
    assert (a.item(), b.item(), step.scale.item()) == (0.5, 1.0, 16.0)
    assert_same(optimizers[1].state_dict(), before)
    elsewhere = one_weight(value=1.0)
    step.backward(elsewhere.sum())
    with pytest.raises(RuntimeError, match="SGD, Momentum"):
        step.update()
    whole = ScaledStep(optimizers, torch.tensor(8.0))
    whole.backward(a.sum())
    with pytest.raises(RuntimeError, match="Momentum"):
        whole.update()
    assert a.grad.item() == 8.0  # nothing was divided


def test_what_a_step_by_hand_refuses_leaves_its_sums_as_they_are():
    """256 + 0.75 + 0.75 is 258 in bfloat16, rounded once, and 256 where it is rounded on the way."""
    a, b = one_weight(torch.bfloat16), one_weight()
    step = ScaledStep([torch.optim.SGD([a], 1.0), torch.optim.SGD([b], 1.0)], torch.tensor(1.0))
    step.backward(a.sum() * 256)
    step.backward(a.sum() * 0.75)
    vector = torch.ones(2, requires_grad=True)
    for call in (step.unscale_, lambda: step.backward(5), lambda: step.backward(vector)):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=r"no parameter|the loss as|a scalar loss"):
            call()
    step.backward(a.sum() * 0.75 + b.sum())
    step.unscale_()
    assert a.grad.item() == 258.0
    with pytest.raises(ValueError, match="max_norm"):
        step.clip_(0.0)
    assert step.clip_(torch.inf) == torch.tensor([258.0, 1.0]).norm()


def test_gradients_of_a_plain_backward_pass_are_told_to_be_unscaled():
    a = one_weight(value=1.0)
    step = ScaledStep(torch.optim.SGD([a], 0.5), torch.tensor(8.0))
    a.sum().backward()
    with pytest.raises(RuntimeError, match="are unscaled"):
        step.update()
    assert (a.item(), a.grad.item()) == (1.0, 1.0)


class Counts(Hook):
    held = 0

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        if state["held"] < 0:
            raise ValueError("held is a count")
        self.held = state["held"]


def test_a_state_that_one_part_refuses_reaches_no_other_part():
    optimizers = [opt.Momentum([one_weight()], 0.1, 0.9), opt.Adam([one_weight()], 0.1)]
    step = ScaledStep(optimizers, scaler := DynamicLossScaler(8.0, 2, 2))
    step.hooks += [Counts(), Counts()]
    before = copy.deepcopy(step.state_dict())
    assert_same(before["rule"], [scaler.state_dict()])
    for change in (
        lambda state: state["optimizers"].reverse(),
        lambda state: state["rule"].clear(),
        lambda state: state["hooks"][1].update(held=-1),
    ):
        saved = copy.deepcopy(before)
        saved["hooks"] = [{"held": 7}, {"held": 8}]
        saved["optimizers"][0]["param_groups"][0]["momentum"] = 0.5
        change(saved)
        with pytest.raises((ValueError, TypeError)):
            step.load_state_dict(saved)
        assert_same(step.state_dict(), before)
    step.load_state_dict({**before, "hooks": [{"held": 7}, {"held": 8}]})
    assert [hook.held for hook in step.hooks] == [7, 8]
