"""Rates, groups, decay and options, and what is refused: TypeError for kinds, ValueError for ranges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from stepping import parameters, train
from torch import nn

from mpkit import optimizers as opt
from mpkit.optimizers.arguments import coming_rate
from mpkit.schedules import ListedLR, WarmUpLR

P = parameters()
CHANGING = [{"params": [P[0]], "lr": [0.1, 0.2]}]


BAD: list[tuple[str, Callable[[], Any], type[Exception]]] = [
    ("params none", lambda: opt.Adam(None), ValueError),
    ("params empty", lambda: opt.Adam([]), ValueError),
    ("params one tensor", lambda: opt.Adam(P[0]), TypeError),
    ("params a set", lambda: opt.Momentum({P[0]}, 0.1, 0.9), TypeError),
    ("params mixed", lambda: opt.Adam([P[0], {"params": [P[1]]}]), TypeError),
    ("params integer", lambda: opt.Adam([torch.ones(2, dtype=torch.int32)]), TypeError),
    ("one parameter twice", lambda: opt.Adam([{"params": [P[0]]}, {"params": [P[0]]}]), RuntimeError),
    ("group without params", lambda: opt.Adam([{"lr": 0.1}]), KeyError),
    ("group empty", lambda: opt.Adam([{"params": []}]), ValueError),
    ("group key unknown", lambda: opt.Adam([{"params": [P[0]], "grad_centralizaiton": True}]), KeyError),
    ("centralization 1", lambda: opt.Adam([{"params": [P[0]], "grad_centralization": 1}]), TypeError),
    ("order beside lr", lambda: opt.Adam([{"params": [P[0]]}, {"order_params": [P[0]], "lr": 1.0}]), ValueError),
    ("order too short", lambda: opt.Adam([{"params": [P[0], P[1]]}, {"order_params": [P[0]]}]), ValueError),
    ("order foreign", lambda: opt.Adam([{"params": [P[0]]}, {"order_params": [P[1]]}]), ValueError),
    ("order twice", lambda: opt.Adam([{"params": [P[0]]}, *[{"order_params": [P[0]]}] * 2]), ValueError),
    ("order alone", lambda: opt.Adam([{"order_params": [P[0]]}]), ValueError),
    ("lr negative", lambda: opt.Adam([P[0]], -0.1), ValueError),
    ("lr none", lambda: opt.Adam([P[0]], None), TypeError),
    ("lr string", lambda: opt.Adam([P[0]], "0.1"), ValueError),
    ("lr two axes", lambda: opt.Adam([P[0]], torch.ones(2, 2)), ValueError),
    ("lr lists unequal", lambda: opt.SGD([{"params": [P[i]], "lr": [0.1] * (i + 1)} for i in (0, 1)]), ValueError),
    ("decay negative", lambda: opt.Adam([P[0]], weight_decay=-1.0), ValueError),
    ("decay function for SGD", lambda: opt.SGD([P[0]], weight_decay=lambda step: 0.1), TypeError),
    ("group decay for SGD", lambda: opt.SGD([{"params": P, "weight_decay": lambda step: 0.1}]), TypeError),
    ("loss scale 0", lambda: opt.Adam([P[0]], loss_scale=0), ValueError),
    ("option unknown", lambda: opt.Adam([P[0]], foreach=True), TypeError),
    ("faithful 1", lambda: opt.Adam([P[0]], faithful=1), TypeError),
    ("momentum int", lambda: opt.Momentum([P[0]], 0.1, 1), TypeError),
    ("nesterov without momentum", lambda: opt.SGD([P[0]], nesterov=True), ValueError),
    ("nesterov with dampening", lambda: opt.SGD([P[0]], 0.1, 0.9, 0.1, nesterov=True), ValueError),
    ("amsgrad and lazy", lambda: opt.Adam([P[0]], use_amsgrad=True, use_lazy=True), ValueError),
    ("lazy and offload", lambda: opt.Adam([P[0]], use_lazy=True, use_offload=True), ValueError),
    ("asgd t0 int", lambda: opt.ASGD([P[0]], t0=10), TypeError),
    ("etas list", lambda: opt.Rprop([P[0]], etas=[0.5, 1.2]), TypeError),
    ("ftrl lr int", lambda: opt.FTRL([P[0]], learning_rate=1), TypeError),
    ("ftrl lr list", lambda: opt.FTRL([P[0]], learning_rate=[0.1]), ValueError),
    ("adafactor lr and relative", lambda: opt.AdaFactor([P[0]], 0.1), ValueError),
    ("adafactor neither", lambda: opt.AdaFactor([P[0]], relative_step=False), ValueError),
    ("adafactor warmup", lambda: opt.AdaFactor([P[0]], 0.1, relative_step=False, warmup_init=True), ValueError),
    ("adafactor lr of a group", lambda: opt.AdaFactor([{"params": [P[0]], "lr": 0.1}]), ValueError),
    ("lars filter 3", lambda: opt.LARS(opt.SGD(P), lars_filter=3), TypeError),
    ("lars of lamb", lambda: opt.LARS(opt.Lamb(P, 0.1)), TypeError),
    ("lars clip with a changing group", lambda: opt.LARS(opt.SGD(CHANGING), use_clip=True), ValueError),
    ("lr of a stranger", lambda: opt.Adam([P[0]]).get_lr_parameter(P[1]), ValueError),
    ("lr of a number", lambda: opt.Adam([P[0]]).get_lr_parameter(1), TypeError),
]


@pytest.mark.parametrize(("call", "error"), [pytest.param(call, error, id=id) for id, call, error in BAD])
def test_bad_input_is_refused_with_the_kind_of_the_reference(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("inside", [torch.optim.SGD, lambda p: opt.LARS(opt.SGD(p))])
def test_lars_says_what_it_wraps(inside):
    with pytest.raises(TypeError, match="LARS wraps an mpkit optimizer"):
        opt.LARS(inside(P))


# optimizer: its number -> the ends of its range that belong to it, and those that do not
FROM_0, ABOVE_0, BETWEEN_0_AND_1 = ([0], [-1e-9]), ([], [0]), ([], [0.0, 1.0])
ADAM = {"beta1": BETWEEN_0_AND_1, "beta2": BETWEEN_0_AND_1, "eps": ABOVE_0}
PENALTIES = {"l1": FROM_0, "l2": FROM_0}
ENDS = {
    "RMSProp": {"decay": ([0], [1]), "momentum": FROM_0, "epsilon": ABOVE_0},
    "Adagrad": {"accum": FROM_0},
    "Adadelta": {"rho": ([0, 1], [-1e-9, 1 + 1e-9]), "epsilon": ABOVE_0},
    "ProximalAdagrad": {"accum": FROM_0, **PENALTIES},
    "FTRL": {"initial_accum": FROM_0, **PENALTIES, "lr_power": ([0], [1e-9]), "learning_rate": ([], [0.0])},
    **dict.fromkeys(("Adam", "AdaMax", "Lamb", "AdamWeightDecay"), ADAM),
    "AdaFactor": dict.fromkeys(("beta1", "weight_decay"), ([0], [-1e-9, 1]))
    | {"eps": ([], [(0, 1e-3), (1e-30, 0)]), "clip_threshold": ABOVE_0, "decay_rate": ABOVE_0},
    "SGD": {"momentum": FROM_0, "dampening": FROM_0},
    "Momentum": {"momentum": ([0.0], [-1e-9])},
    "Rprop": {"etas": ([], [(0.0, 1.2), (1.0, 1.2), (0.5, 1.0)]), "step_sizes": ([], [(0.0, 1.0), (1.0, 1.0)])},
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_range(name):
    def make(**given: Any) -> None:
        needed = {"momentum": 0.9} if name == "Momentum" else {}
        rate = {"learning_rate": 0.1} if name in ("Lamb", "Momentum") else {}
        getattr(opt, name)([P[0]], **(rate | needed | given))

    for key, (taken, refused) in ENDS[name].items():
        for value in taken:
            make(**{key: value})
        for value in refused:
            with pytest.raises(ValueError, match=r"must|need"):
                make(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        ("lr", None, TypeError, "lr must be a number, got None"),
        ("lr", "0.1", ValueError, "got '0.1'"),
        ("weight_decay", [0.1], TypeError, "weight_decay must be a number, got"),
        ("weight_decay", None, TypeError, "weight_decay must be a number, got None"),
    ],
)
def test_what_is_no_rate_or_no_decay_is_refused_before_any_group_moves(key, value, error, says):
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = opt.SGD([{"params": [w], "lr": 0.5, "weight_decay": 0.25} for w in weights], 0.1)
    optimizer.param_groups[1][key] = value
    for weight in weights:
        weight.grad = torch.ones(1)
    with pytest.raises(error, match=says):
        optimizer.step()
    assert ([w.item() for w in weights], optimizer.global_step) == ([1.0, 1.0], 0)


class Warm(opt.Adam):
    """A user's rule, in a module that knows no annotation of mpkit."""

    warmth: bool = False


@dataclass(frozen=True)
class Hold(WarmUpLR):
    floor: float = 0.0


def test_a_subclass_elsewhere_may_take_one_more_argument() -> None:
    assert Warm([P[0]], 0.5, warmth=True).param_groups[0]["warmth"]
    assert Hold(0.5, 5, 0.25).floor == 0.25
    for call in (lambda: Warm([P[0]], 0.5, warmth=1), lambda: Warm([P[0]], 0.5, beta1=1), lambda: Hold("a", 5)):
        with pytest.raises(TypeError, match="must be"):
            call()


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan, -1e-30, 10**400])
def test_a_rate_is_finite_and_not_negative(rate: float) -> None:
    with pytest.raises(ValueError, match="learning_rate must"):
        opt.SGD([nn.Parameter(torch.zeros(1))], rate)


@pytest.mark.parametrize(
    "rates",
    [[0.5, 0.25], (0.5, 0.25), np.array([0.5, 0.25]), torch.tensor([0.5, 0.25])],
    ids=lambda r: type(r).__name__,
)
def test_rates_may_be_put_into_a_group_as_the_constructor_takes_them(rates):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = opt.SGD([weight], 1.0)
    optimizer.param_groups[0]["lr"] = rates
    weight.grad = torch.ones(1)
    assert optimizer.get_lr() == torch.tensor(0.5)
    optimizer.step()
    optimizer.step()
    assert weight.item() == -0.75


RATES: list[tuple[dict[str, Any], float]] = [
    ({"lr": 0.0}, 0.0), ({"lr": 1.0, "relative_step": True}, 1.0), ({"lr": 0.0, "relative_step": True}, math.nan),
    ({"lr": 0.0, "relative_step": False}, 0.0), ({"lr": torch.tensor([0.5])}, 0.5),
    ({"lr": torch.tensor([0.5, 0.25])}, math.nan), ({}, math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("group", "rate"), RATES, ids=str)
def test_the_coming_rate_is_none_where_the_steps_are_relative_or_the_rate_is_no_number(group: Any, rate: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert float(coming_rate(optimizer, group)) == pytest.approx(rate, nan_ok=True, abs=0, rel=0)


@pytest.mark.parametrize("faithful", [None, False, True])
def test_the_roundings_of_mindspore_are_copied_only_when_asked_for(faithful: bool | None) -> None:
    """A fixed rate beside a schedule, as (lr + 1) - 1 in float32; gradients of 3 columns are centralized or not."""
    fixed, other = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [fixed], "lr": 1e-4, "grad_centralization": True}, {"params": [other], "lr": ListedLR((1.0,))}]
    options = {} if faithful is None else {"faithful": faithful}
    optimizer = opt.SGD(groups, **options)
    fixed.grad, other.grad = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.ones(1)
    optimizer.step()
    rate = (torch.tensor(1e-4) + 1 - 1).item() if faithful else 1e-4
    moved = torch.tensor([[1.0, 2.0, 3.0] if faithful else [-1.0, 0.0, 1.0]] * 2)
    torch.testing.assert_close(fixed.detach(), -rate * moved, rtol=1e-6, atol=0)
    assert not optimizer.count_skipped


@pytest.mark.usefixtures("flags")
def test_the_caller_chooses_whether_a_skipped_step_advances_the_schedule():
    for count, want in ((False, 0.1), (True, 0.2)):
        params = parameters()
        optimizer = opt.Adam(params, WarmUpLR(1.0, 10), count_skipped=count)
        for found in (0.0, 1.0):
            train(optimizer, params, range(1), found)
        assert float(optimizer.get_lr()) == pytest.approx(want)
        assert int(optimizer.param_groups[0]["updates"]) == 1  # the bias correction never counts a skip


def test_the_rate_of_a_group_added_later_is_shown():
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = opt.Momentum([first], 0.125, 0.9)
    assert optimizer.get_lr().item() == 0.125
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert [rate.item() for rate in optimizer.get_lr()] == [0.125, 0.5]
    assert [rate.item() for rate in copy.deepcopy(optimizer).get_lr()] == [0.125, 0.5]


def test_trainable_and_untrainable_share_out_the_parameters():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2))
    module[1].bias.requires_grad_(False)
    assert [n for n, _ in opt.untrainable_params(module)] == ["1.bias"]
    assert [n for n, _ in opt.trainable_params(module)] == ["0.weight", "0.bias", "1.weight"]


def test_a_group_added_later_starts_its_moments_afresh():
    (first,), fresh, alone = parameters()[:1], nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, other = opt.Adam([first]), opt.Adam([alone])
    train(optimizer, [first], range(3))
    optimizer.add_param_group({"params": [fresh]})
    fresh.grad, alone.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
    optimizer.step()
    other.step()
    assert torch.equal(fresh, alone)
