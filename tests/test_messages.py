"""What a wrong argument is told: the kind of error, the name of the argument, what came; never a Python accident."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.arguments import check_choice, check_count, check_flags, check_float, check_kind, check_number
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    DimReduce,
    FreezeOpt,
    GradientFreeze,
    GroupLossScaleManager,
    freeze_cell,
)
from mpkit.boost.dim_reduce.snapshots import WeightSnapshots
from mpkit.data import data_dir
from mpkit.diagnose import diagnose, preflight
from mpkit.model import Model
from mpkit.policies import preset
from mpkit.record import Trace
from mpkit.replay import simulate, sweep
from mpkit.schedules import ExponentialDecayLR, ListedLR
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mpkit.step.health import why_skipped


def net():
    return nn.Linear(2, 1)


def sgd(n, lr=0.1):
    return torch.optim.SGD(n.parameters(), lr)


def freeze_opt():
    n = net()
    return n, FreezeOpt(sgd(n))


def dim_reduce(**options):
    n = net()
    return DimReduce(n, sgd(n, 1.0), list(n.parameters()), np.eye(3)[:2], **{"n_components": 2, **options})


def boosted(cell, *scale, **options):
    n = net()
    return cell(n, sgd(n), *scale, **options)


def built(**options):
    n = net()
    return Model(n, nn.MSELoss(), sgd(n), **options)


def pair():
    return list(net().named_parameters())


CASES = {
    "shrink": (lambda: GroupLossScaleManager(8.0, shrink="x"), TypeError, "shrink must be a number, got 'x'"),
    "growth": (lambda: GroupLossScaleManager(8.0, growth=None), TypeError, "growth must be a number, got None"),
    "min_scale": (lambda: GroupLossScaleManager(8.0, min_scale="x"), TypeError, "min_scale must be a number"),
    "max_scale": (lambda: GroupLossScaleManager(8.0, max_scale="x"), TypeError, "max_scale must be a number"),
    "max_scale nan": (lambda: GroupLossScaleManager(8.0, max_scale=math.nan), ValueError, "max_scale"),
    "rho": (lambda: dim_reduce(rho="x"), TypeError, "rho must be a number, got 'x'"),
    "gamma": (lambda: dim_reduce(gamma=None), TypeError, "gamma must be a number, got None"),
    "alpha": (lambda: dim_reduce(alpha="lr"), TypeError, "alpha must be a number, got 'lr'"),
    "sigma": (lambda: dim_reduce(sigma=[]), TypeError, r"sigma must be a number, got \[\]"),
    "n_components": (lambda: dim_reduce(n_components="2"), TypeError, "n_components must be an int"),
    "rank": (lambda: dim_reduce(rank="0"), TypeError, "rank must be an int"),
    "boost True": (
        lambda: boosted(BoostTrainOneStepWithLossScaleCell, torch.tensor(8.0), boost=True),
        TypeError,
        "boost must be an AutoBoost or None, got bool",
    ),
    "boost of the plain cell": (lambda: boosted(BoostTrainOneStepCell, boost="O1"), TypeError, "AutoBoost"),
    "no groups": (
        lambda: GradientFreeze(2, 0, 0.5, 4).split_parameters_groups(net(), 0),
        ValueError,
        "freeze_para_groups_number must be at least 1, got 0",
    ),
    "groups of a word": (
        lambda: GradientFreeze(2, 0, 0.5, 4).split_parameters_groups(net(), "2"),
        TypeError,
        "freeze_para_groups_number must be an int",
    ),
    "a network that is none": (
        lambda: GradientFreeze(2, 0, 0.5, 4).split_parameters_groups(None, 1),
        TypeError,
        "nn.Module",
    ),
    "faithful": (lambda: GradientFreeze(2, 0, 0.5, 4, faithful="x"), TypeError, "faithful must be True or False"),
    "faithful seed": (lambda: GradientFreeze(2, 0, 0.5, 4, faithful=True, seed=2**32), ValueError, r"below 2\*\*32"),
    "freeze total_steps": (lambda: GradientFreeze(2, 0, 0.5, "4"), TypeError, "total_steps must be an int"),
    "freeze_cell network": (
        lambda: freeze_cell(False, None, freeze_opt()[1], 1.0, None, False),
        TypeError,
        "network must be an nn.Module that returns the loss, got NoneType",
    ),
    "freeze_cell sens": (
        lambda: freeze_cell(False, net(), freeze_opt()[1], math.nan, None, False),
        ValueError,
        "sens must be in",
    ),
    "freeze_cell flag": (
        lambda: freeze_cell("no", net(), freeze_opt()[1], 1.0, None, False),
        TypeError,
        "reducer_flag must be True or False, got 'no'",
    ),
    "every nan": (lambda: WeightSnapshots(net(), "x", every=math.nan), TypeError, "every must be an int, got nan"),
    "every 0": (lambda: WeightSnapshots(net(), "x", every=0), ValueError, "every must be at least 1, got 0"),
    "lr_power None": (lambda: opt.FTRL(pair(), lr_power=None), TypeError, "lr_power must be a number, got None"),
    "lr_power 1": (lambda: opt.FTRL(pair(), lr_power=1.0), ValueError, "lr_power must be at most 0, got 1.0"),
    "lr inf": (lambda: opt.SGD(pair(), math.inf), ValueError, "learning rate must be at least 0 and finite, got inf"),
    "lr bytes": (lambda: opt.SGD(pair(), b"x"), TypeError, "learning rate is a number, .* got b'x'"),
    "lr with inf": (lambda: opt.SGD(pair(), [0.1, math.inf]), ValueError, "finite, got inf"),
    "group lr inf": (lambda: opt.SGD([{"params": pair(), "lr": math.inf}]), ValueError, "finite, got inf"),
    "transform": (lambda: opt.Adam(pair(), gradient_transform=5), TypeError, "gradient_transform must be .* got 5"),
    "cell hooks None": (lambda: boosted(TrainOneStepCell, hooks=None), TypeError, "hooks must be a list .* got None"),
    "cell hooks word": (lambda: boosted(TrainOneStepCell, hooks="x"), TypeError, "hooks must be a list .* got 'x'"),
    "cell hooks words": (lambda: boosted(TrainOneStepCell, hooks=["x"]), TypeError, "hooks must be a list"),
    "model hooks None": (lambda: built(hooks=None), TypeError, "hooks must be a list"),
    "metrics": (lambda: built(metrics=5), TypeError, "metrics must be a set of names, a dict or None, got 5"),
    "eval_network": (lambda: built(eval_network=5), TypeError, "eval_network must be an nn.Module or None, got int"),
    "scaled hooks": (
        lambda: boosted(TrainOneStepWithLossScaleCell, torch.tensor(8.0), hooks=5),
        TypeError,
        "hooks must be a list",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named_with_what_came(name):
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("content", [b"{broken", b"\xff\xfe\x00", b""])
def test_a_broken_json_file_is_named(content, tmp_path):
    path = tmp_path / "boost.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"boost\.json is no JSON file"):
        AutoBoost("O1", path)


def test_an_infinite_scale_is_called_what_it_is():
    n = net()
    assert "loss scale itself is inf" in why_skipped(n, math.inf)
    cell = TrainOneStepWithLossScaleCell(WithLossCell(n, nn.MSELoss()), sgd(n), torch.tensor(2.0))
    cell.scale_sense.fill_(math.inf)
    with pytest.raises(RuntimeError, match="the loss scale itself is inf"):
        Model(cell).train(1, [(torch.ones(1, 2), torch.ones(1, 1))])


def test_numpy_numbers_are_numbers():
    rate = np.float32(0.25)
    for given, want in (
        (rate, 0.25),
        (np.float64(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.array(0.25), 0.25),
    ):
        assert type(opt.SGD(pair(), given).param_groups[0]["lr"]) is float
        assert opt.SGD(pair(), given).param_groups[0]["lr"] == want
    listed = opt.SGD(pair(), np.array([0.5, 0.25], dtype=np.float32)).param_groups[0]["lr"]
    assert listed == ListedLR((0.5, 0.25))
    assert all(type(value) is float for value in listed.values)
    assert ExponentialDecayLR(rate, np.float32(0.5), 1)(1) == 0.125
    assert opt.Adam(pair(), 0.1, beta1=np.float32(0.5), weight_decay=rate).param_groups[0]["betas"][0] == 0.5


def test_the_checks_themselves():
    assert check_number("x", np.float32(0.5)) == 0.5
    assert check_float("x", 0.5) == 0.5
    assert check_count("x", np.int64(3)) == 3
    assert check_choice("x", "a", ("a", "b")) == "a"
    check_flags(x=True)
    check_kind("x", None, int, "an int", optional=True)
    for call, error in (
        (lambda: check_number("x", True), TypeError),
        (lambda: check_number("x", math.nan), ValueError),
        (lambda: check_number("x", math.inf), ValueError),
        (lambda: check_number("x", 0.0, open_low=True), ValueError),
        (lambda: check_float("x", 1), TypeError),
        (lambda: check_count("x", 1.0), TypeError),
        (lambda: check_count("x", True), TypeError),
        (lambda: check_choice("x", ["a"], ("a",)), TypeError),
        (lambda: check_choice("x", "b", ("a",)), ValueError),
        (lambda: check_flags(x=1), TypeError),
        (lambda: check_kind("x", None, int, "an int"), TypeError),
    ):
        with pytest.raises(error, match=r"^x must be"):
            call()


# --- schedulers and frameworks of others

WITH_MOMENTS = {
    "Adam": lambda p: opt.Adam(p, 0.1),
    "LazyAdam": lambda p: opt.LazyAdam(p, 0.1),
    "AdamWeightDecay": lambda p: opt.AdamWeightDecay(p, 0.1),
    "AdaMax": lambda p: opt.AdaMax(p, 0.1),
    "Lamb": lambda p: opt.Lamb(p, 0.1),
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "SGD": lambda p: opt.SGD(p, 0.1, 0.9),
    "LARS": lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
    "BFloat16Weights": lambda p: opt.BFloat16Weights(opt.Adam(p, 0.1)),
    "BFloat16Weights of torch": lambda p: opt.BFloat16Weights(torch.optim.SGD(p, 0.1, 0.9), "kahan"),
    "FreezeOpt": lambda p: FreezeOpt(opt.Adam(p, 0.1)),
}


@pytest.mark.parametrize("kind", WITH_MOMENTS)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=6),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=2),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_cyclic_schedulers_of_torch_drive_the_rate_and_the_momentum(kind, schedule):
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16 if "BFloat16" in kind else torch.float32))
    optimizer = WITH_MOMENTS[kind]([p])
    scheduler = schedule(optimizer)
    seen = []
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"][0] if "betas" in group else group["momentum"]))
        scheduler.step()
    twin = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, 0.9)
    want, scheduler = [], schedule(twin)
    for _ in range(4):
        twin.step()
        want.append((twin.param_groups[0]["lr"], twin.param_groups[0]["momentum"]))
        scheduler.step()
    np.testing.assert_allclose(seen, want, rtol=1e-12)
    assert p.isfinite().all()


def test_adam_uses_the_betas_of_its_group():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    changed, made = opt.Adam([a], 0.1), opt.Adam([b], 0.1, beta1=0.5, beta2=0.75)
    changed.param_groups[0]["betas"] = (0.5, 0.75)
    for step in range(3):
        a.grad, b.grad = torch.full((2,), step - 0.5), torch.full((2,), step - 0.5)
        changed.step()
        made.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: opt.Momentum(p, 0.1, 0.9),
        lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
        lambda p: FreezeOpt(opt.Momentum(p, 0.1, 0.9)),
    ],
    ids=["Momentum", "LARS", "FreezeOpt"],
)
def test_a_trainer_may_clip_inside_the_closure_of_an_unscaled_step(make):
    """Lightning clips there, and refuses an optimizer that says it will unscale: bf16-mixed has nothing to unscale."""
    p = nn.Parameter(torch.ones(2))
    optimizer = make([p])
    said = []

    def closure():
        p.grad = torch.ones(2)
        said.append(optimizer._step_supports_amp_scaling)

    optimizer.step(closure)
    optimizer.found_inf = torch.zeros(())
    optimizer.step(closure)
    assert said == [False, True]
    assert optimizer._step_supports_amp_scaling

    def fails():
        raise RuntimeError("in the closure")

    optimizer.found_inf = None
    with pytest.raises(RuntimeError, match="in the closure"):
        optimizer.step(fails)
    assert optimizer._step_supports_amp_scaling


def test_state_dict_hooks_of_lars_run():
    p = nn.Parameter(torch.ones(2))
    lars = opt.LARS(opt.Momentum([p], 0.1, 0.9))
    told = []
    lars.register_state_dict_pre_hook(lambda o: told.append("before saving"))
    lars.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    lars.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "more"})
    lars.register_load_state_dict_post_hook(lambda o: told.append("after loading"))
    state = lars.state_dict()
    assert state["more"] == 1
    lars.load_state_dict(state)
    assert told == ["before saving", "after loading"]


def test_the_tools_on_a_run_say_what_came():
    run = Trace.load(data_dir() / "traces" / "mlp_digits.npz").before(4)
    batch, policy = (torch.ones(3, 2), torch.ones(3, 1)), preset("torch")
    wrong = [
        (lambda: diagnose(net(), batch, lambda out, y: out - y), r"got a tensor of shape \(3, 1\); reduce"),
        (lambda: diagnose(net(), batch, lambda out, y: y.mean()), r"shape \(\) that depends on no parameter"),
        (lambda: diagnose(net(), batch, lambda out, y: 1.0), "depends on a parameter, got float"),
        (lambda: preflight(sgd(net()), net()), "got SGD and Linear"),
        (lambda: sweep(run, factor=[2.0, 0.5]), r"above 1, so that the scale moves, got factor=\[2.0, 0.5\]"),
        (lambda: run + replace(run, format="bf16"), r"got fp16 with\w* activations and bf16 with\w* activations"),
        (lambda: simulate(np.ones((4, 2)), policy), r"got shape \(4, 2\)$"),
        (lambda: simulate([1.0, math.nan], policy), r"got shape \(2,\) with NaN$"),
    ]
    for call, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said):
            call()
