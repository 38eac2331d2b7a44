"""Optimizers after what people do to them: groups added later, options changed, copies, casts, hooks, odd shapes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.schedules import ListedLR, WarmUpLR

WAYS = ("stochastic", "kahan")


def bfloat16_weights(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))


def stepped(optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step()


# --- bfloat16 weights without a master copy


@pytest.mark.parametrize("make", [opt.Adam, opt.AdaMax, opt.Lamb, opt.ASGD, opt.SGD], ids=lambda make: make.__name__)
def test_an_optimizer_of_ours_counts_its_steps_on_bfloat16_weights(make):
    torch.manual_seed(0)
    p = nn.Parameter((1 + torch.rand(64)).bfloat16())
    wide = nn.Parameter(p.detach().float())
    low, high = opt.BFloat16Weights(make([p], 1e-2), "kahan"), make([wide], 1e-2)
    for gradient in torch.randn(8, 64).bfloat16():
        p.grad, wide.grad = gradient, gradient.float()
        low.step()
        high.step()
    exact = p.detach().double() + low.state_dict()["lost"][0].double()
    # the wide run never rounds to bfloat16; Kahan's remainder keeps 16 bits, eight times
    assert (exact - wide.detach().double()).abs().max() < 8 * 2.0**-16 * 2
    assert low.optimizer.param_groups[0]["updates"] == low.state_dict()["inner"]["param_groups"][0]["updates"] == 8


@pytest.mark.parametrize("adds", [lambda o: o, lambda o: o.optimizer], ids=["outside", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_added_to_bfloat16_weights_is_trained_and_saved(way, adds):
    def made() -> opt.BFloat16Weights:
        optimizer = opt.BFloat16Weights(torch.optim.SGD([bfloat16_weights()], 0.5, momentum=0.5), way)
        adds(optimizer).add_param_group({"params": [bfloat16_weights(2.0)], "lr": 0.25})
        return optimizer

    optimizer, other = made(), made()
    stepped(optimizer)
    first, second = (group["params"][0] for group in optimizer.param_groups)
    assert (first.tolist(), second.tolist()) == ([0.5] * 4, [1.75] * 4)
    assert {p.dtype for p in (first, second)} == {torch.bfloat16}
    other.load_state_dict(optimizer.state_dict())
    stepped(other, 0.0)
    assert other.param_groups[1]["params"][0].tolist() == [2.0 - 0.25 * 0.5] * 4  # the momentum of the step before


def test_a_scheduler_of_the_optimizer_inside_reaches_bfloat16_weights():
    p = bfloat16_weights()
    inner = torch.optim.SGD([p], 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    optimizer = opt.BFloat16Weights(inner, "kahan")
    for want in (0.0, -0.5, -0.75):
        stepped(optimizer)
        scheduler.step()
        assert p.tolist() == [want] * 4


def test_a_momentum_from_before_goes_on_in_bfloat16_weights():
    p, q = bfloat16_weights(), bfloat16_weights()
    inner, plain = (torch.optim.SGD([w], 0.5, momentum=0.5) for w in (p, q))
    stepped(inner)
    stepped(plain)
    stepped(opt.BFloat16Weights(inner, "kahan"))
    stepped(plain)
    assert p.tolist() == q.tolist() == [-0.25] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_bfloat16_weights_trains_itself_on_the_same_bits(way, copied):
    generator = torch.Generator().manual_seed(1)
    optimizer = opt.BFloat16Weights(opt.Adam([bfloat16_weights()], 1e-3), way, generator=generator)
    stepped(optimizer)
    twin = copied(optimizer)
    before = optimizer.param_groups[0]["params"][0].clone()
    for _ in range(5):
        stepped(twin)
    assert torch.equal(before, optimizer.param_groups[0]["params"][0])
    for _ in range(5):
        stepped(optimizer)
    assert torch.equal(twin.param_groups[0]["params"][0], optimizer.param_groups[0]["params"][0])


def test_an_error_inside_leaves_bfloat16_weights_in_their_place():
    p = bfloat16_weights()
    optimizer = opt.BFloat16Weights(opt.SGD([p], 1.0, gradient_transform=lambda grads, params, group: 1 / 0), "kahan")
    with pytest.raises(ZeroDivisionError):
        stepped(optimizer)
    assert optimizer.param_groups[0]["params"] == [p]
    assert p.tolist() == [1.0] * 4


# --- groups and options that come later


def test_the_rate_of_a_group_added_later_is_shown():
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = opt.Momentum([first], 0.125, 0.9)
    assert optimizer.get_lr().item() == 0.125
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert [rate.item() for rate in optimizer.get_lr()] == [0.125, 0.5]
    assert [rate.item() for rate in copy.deepcopy(optimizer).get_lr()] == [0.125, 0.5]


def test_a_list_of_rates_of_another_length_is_refused_in_a_group_added_later():
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = opt.Momentum([first], [0.1, 0.2], 0.9)
    with pytest.raises(ValueError, match="one length in all groups"):
        optimizer.add_param_group({"params": [second], "lr": [0.1, 0.2, 0.3]})
    assert len(optimizer.param_groups) == 1
    assert not optimizer.rates_grouped


SWITCHES = {  # optimizer, what is switched on later, to what
    "SGD": (lambda p: opt.SGD(p, 0.25), "momentum", 0.5),
    "RMSProp": (lambda p: opt.RMSProp(p, 0.25), "momentum", 0.5),
    "RMSProp centered": (lambda p: opt.RMSProp(p, 0.25), "centered", True),
    "Adam": (lambda p: opt.Adam(p, 0.25), "use_amsgrad", True),
    "AdaFactor": (lambda p: opt.AdaFactor(p, beta1=0.0), "beta1", 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SWITCHES)
def test_an_option_that_needs_state_may_be_switched_on_and_off(name, dtype):
    make, key, value = SWITCHES[name]
    first, late = (nn.Parameter(torch.ones(2, 2, dtype=dtype)) for _ in range(2))
    optimizer = make([first, late])
    off = optimizer.param_groups[0][key]
    for setting, params in ((off, [first]), (value, [first]), (off, [first, late]), (value, [first, late])):
        optimizer.param_groups[0][key] = setting
        for p in params:
            p.grad = torch.ones_like(p)
        before = [p.clone() for p in params]
        optimizer.step()
        assert all((p < old).all() and p.isfinite().all() for p, old in zip(params, before))


def test_a_momentum_switched_on_later_starts_as_torch_s():
    p, q = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(2))
    ours, theirs = opt.SGD([p], 0.25), torch.optim.SGD([q], 0.25)
    for momentum in (0.0, 0.5, 0.5):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
            stepped(optimizer)
    assert p.tolist() == q.tolist()


# --- rates, shapes and gradients at the edges


def test_lars_with_clipping_leaves_weights_of_zero_alone_while_a_warm_up_is_at_zero():
    zeros, ones = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = opt.LARS(opt.Momentum([zeros, ones], WarmUpLR(0.1, 2), 0.0), use_clip=True)
    stepped(optimizer)
    assert zeros.tolist() == [[0.0] * 2] * 2
    assert ones.tolist() == [[1.0] * 2] * 2
    stepped(optimizer)
    assert zeros.tolist() == [[0.0] * 2] * 2
    assert ones.isfinite().all()
    assert (ones < 1).all()


@pytest.mark.parametrize("rates", [torch.tensor([0.5, 0.25]), np.array([0.5, 0.25]), [0.5, 0.25], (0.5, 0.25)])
def test_adafactor_takes_every_kind_of_rate(rates):
    p = nn.Parameter(torch.ones(2))
    optimizer = opt.AdaFactor([p], rates, relative_step=False)
    assert isinstance(optimizer.param_groups[0]["lr"], ListedLR)
    assert optimizer.get_lr().item() == 0.5


def test_adafactor_refuses_an_empty_list_of_rates():
    with pytest.raises(ValueError, match="at least one entry"):
        opt.AdaFactor([nn.Parameter(torch.ones(2))], [], relative_step=False)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), ()], ids=str)
@pytest.mark.parametrize("make", [opt.AdaFactor, opt.Adam, opt.Rprop, lambda p: opt.Lamb(p, 0.1)])
def test_a_parameter_without_values_is_no_obstacle(make, shape):
    empty, full = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(2))
    optimizer = make([empty, full])
    for _ in range(2):
        stepped(optimizer)
    assert full.isfinite().all()
    assert (full < 1).all()
    assert empty.isfinite().all()


def test_centered_rmsprop_survives_gradients_that_do_not_change():
    torch.manual_seed(0)
    p, gradient = nn.Parameter(torch.ones(1000)), torch.rand(1000) * 1000
    optimizer = opt.RMSProp([p], 0.01, centered=True)
    for _ in range(200):  # the mean square and the square of the mean meet, and differ by roundings of either sign
        p.grad = gradient
        optimizer.step()
    spread = optimizer.state[p]["square"] - optimizer.state[p]["mean"] ** 2
    assert (spread < 0).any()
    assert p.isfinite().all()


def test_ftrl_refuses_a_rate_that_came_down_to_zero_before_anything_moves():
    p = nn.Parameter(torch.ones(2))
    optimizer = opt.FTRL([p], learning_rate=0.5)
    stepped(optimizer)
    before, state = p.tolist(), {name: x.tolist() for name, x in optimizer.state[p].items()}
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match="end above 0"):
        stepped(optimizer)
    assert p.tolist() == before
    assert {name: x.tolist() for name, x in optimizer.state[p].items()} == state
    assert optimizer.global_step == 1


# --- hooks of others around loading


def test_hooks_around_loading_see_the_whole_state_and_have_the_last_word():
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = opt.Momentum([p], 0.25, 0.5)
    stepped(optimizer)
    saved = optimizer.state_dict()

    def doubled(_, state):
        assert state["global_step"] == 1
        state = copy.deepcopy(state)
        state["state"][0]["velocity"] *= 2
        return state

    def counted(loaded):
        assert loaded.state[p]["velocity"].dtype == torch.float32
        assert loaded.global_step == 1
        loaded.state[p]["velocity"] += 1

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(counted)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["velocity"].tolist() == [3.0, 3.0]
    copy.deepcopy(optimizer).load_state_dict(saved)  # nothing of ours is left among the hooks
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_what_a_hook_makes_of_a_state_is_checked_before_anything_is_loaded():
    p = nn.Parameter(torch.ones(2))
    optimizer = opt.Momentum([p], 0.25, 0.5)
    stepped(optimizer)
    saved = optimizer.state_dict()
    stepped(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "global_step": -1})
    with pytest.raises(ValueError, match="global_step"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["global_step"] == before["global_step"] == 2
    assert torch.equal(after["state"][0]["velocity"], before["state"][0]["velocity"])
