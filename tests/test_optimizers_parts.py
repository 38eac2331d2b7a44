"""Optimizers where a formula turns, and what a shorter name stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.optimizers import base
from mpkit.optimizers.arguments import coming_rate, listed
from mpkit.optimizers.saved import check_saved
from mpkit.schedules import ListedLR


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("applied", [9_000, 40_000])
def test_adafactors_own_rate_falls_with_the_root_of_the_step_after_ten_thousand(
    applied: int, warmup: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shazeer and Stern 2018: min(1e-2, 1 / sqrt(t)), or min(1e-6 t, 1 / sqrt(t)); a constant gradient moves by it."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = opt.AdaFactor([p], beta1=0.0, scale_parameter=False, warmup_init=warmup)
    p.grad = torch.full((3,), 0.5, dtype=torch.float64)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["global_step"] = saved["param_groups"][0]["updates"] = applied
    optimizer.load_state_dict(saved)
    if on_device:
        monkeypatch.setattr(base, "AT_HAND", frozenset())
        optimizer.found_inf = torch.zeros(())
    before = p.detach().clone()
    optimizer.step()
    t = applied + 1
    rate = min(1e-6 * t if warmup else 1e-2, 1 / math.sqrt(t))
    torch.testing.assert_close(before - p.detach(), torch.full_like(before, rate), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (opt.AdamOffload, {"use_lazy": True}),
        (opt.LazyAdam, {"use_offload": True}),
        (opt.AdamOffload, {"use_amsgrad": True}),
        (opt.LazyAdam, {"use_amsgrad": True}),
    ],
)
def test_the_short_names_of_adam_are_adam_with_their_flag(make: Any, given: dict[str, bool]) -> None:
    """So what Adam refuses beside that flag they refuse too."""
    with pytest.raises(ValueError, match="exclude each other"):
        make([nn.Parameter(torch.zeros(1))], **given)


@pytest.mark.parametrize("power", [0.0, -0.5, -1.0, -1.5])
def test_ftrl_for_other_powers_than_the_root(power: float) -> None:
    """McMahan et al. 2013, algorithm 1, in float64."""
    lr, l1, l2, accum = 0.3, 0.2, 0.05, 0.4
    p = nn.Parameter(torch.tensor([0.7, -0.2], dtype=torch.float64))
    optimizer = opt.FTRL([p], accum, lr, power, l1, l2)
    w, n, z = p.detach().clone(), torch.full((2,), accum, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for g in torch.tensor([[1.5, -0.3], [-0.4, 0.9], [0.2, 2.0]], dtype=torch.float64):
        p.grad = g.clone()
        optimizer.step()
        grown = n + g * g
        z = z + g - (grown**-power - n**-power) / lr * w
        n = grown
        w = torch.where(z.abs() > l1, -(z - z.sign() * l1) / (n**-power / lr + 2 * l2), 0.0)
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make", [opt.Adagrad, opt.ProximalAdagrad])
@pytest.mark.parametrize(("accum", "moved"), [(0.0, 0.1), (1.0, 0.1 / math.sqrt(2))])
def test_a_weight_without_gradient_stays_where_the_sum_starts_at_0(make: Any, accum: float, moved: float) -> None:
    """Its 0 / 0 is no NaN; beside it a gradient of 1 moves by lr / sqrt(accum + 1)."""
    p = nn.Parameter(torch.tensor([0.5, 0.5], dtype=torch.float64))
    p.grad = torch.tensor([0.0, 1.0], dtype=torch.float64)
    make([p], accum, 0.1).step()
    assert p.tolist() == pytest.approx([0.5, 0.5 - moved], abs=1e-15)


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


@pytest.mark.parametrize("saved", [{"state": {}}, {"param_groups": []}, [], None])
def test_what_is_no_state_of_an_optimizer_is_told_from_one_of_another(saved: object) -> None:
    with pytest.raises(ValueError, match="needs what state_dict"):
        check_saved(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), saved)


@pytest.mark.parametrize("way", ["stochastic", "kahan"])
def test_bfloat16_weights_hold_no_float32_copy_between_steps(way: Any) -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = opt.BFloat16Weights(opt.SGD([p], 0.1), way)
    stands_in = list(optimizer._wide.values())
    for _ in range(2):
        assert [t.numel() for t in stands_in] == [0]
        p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [t.numel() for t in stands_in] == [0]


@pytest.mark.parametrize("name", ["epsilon", "coefficient"])
def test_the_numbers_of_lars_are_above_zero(name: str) -> None:
    inner = opt.Momentum([nn.Parameter(torch.ones(2))], 0.1, 0.9)
    with pytest.raises(ValueError, match=name):
        opt.LARS(inner, **{name: 0.0})


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan, -1e-30, 10**400])
def test_a_rate_is_finite_and_not_negative(rate: float) -> None:
    with pytest.raises(ValueError, match="a learning rate must be at least 0 and finite"):
        opt.SGD([nn.Parameter(torch.zeros(1))], rate)


def test_a_rate_of_zero_is_a_rate() -> None:
    assert opt.SGD([nn.Parameter(torch.zeros(1))], 0).param_groups[0]["lr"] == 0.0


def test_plain_descent_in_float32_keeps_no_state_and_in_float16_its_masters() -> None:
    wide, narrow = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float16))
    for p, kept in ((wide, []), (narrow, ["master"])):
        optimizer = opt.SGD([p], 0.1)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert [key for state in optimizer.state_dict()["state"].values() for key in state] == kept
        assert len(optimizer.state) == len(kept)


def test_adafactor_divides_by_no_loss_scale() -> None:
    """As in MindSpore; the first eps makes the step depend on how large the gradients are."""
    pair = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p, scale in zip(pair, (1.0, 1024.0)):
        optimizer = opt.AdaFactor([p], eps=(1e-3, 1e-3), loss_scale=scale)
        p.grad = torch.tensor([1.0, 2.0, -3.0])
        optimizer.step()
    assert torch.equal(*pair)
    assert not torch.equal(pair[0], torch.ones(3))


@pytest.mark.parametrize("on_device", [False, True])
def test_asgd_begins_to_average_after_t0_steps_as_torch_does(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(2))
    a, b = opt.ASGD([ours], 0.1, t0=2.0), torch.optim.ASGD([theirs], 0.1, t0=2.0)
    if on_device:
        monkeypatch.setattr(base, "AT_HAND", frozenset())
        a.found_inf = torch.zeros(())
    for step in range(7):
        ours.grad = theirs.grad = torch.tensor([0.5, step - 3.0], dtype=torch.float64)
        a.step()
        b.step()
        # eta is a float32 here, and a rate of 0.1 is moved by at most its last bit
        torch.testing.assert_close(a.state[ours]["average"], b.state[theirs]["ax"], rtol=0, atol=7 * 4 * 0.1 * 2.0**-23)


@pytest.mark.parametrize("counts_all", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_steps_are_counted_on_the_host_as_far_as_it_knows_them(
    on_device: bool, counts_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it can read the flag a skipped step writes nothing; where not, only the device knows which ones counted."""
    if on_device:
        monkeypatch.setattr(base, "AT_HAND", frozenset())
    p = nn.Parameter(torch.zeros(2))
    optimizer = opt.Momentum([p], 0.1, 0.9, count_skipped=counts_all)
    for skip in (False, True, False):
        p.grad, optimizer.found_inf, version = torch.ones(2), torch.tensor(float(skip)), p._version
        optimizer.step()
        assert (p._version == version) == (skip and not on_device)
    assert optimizer.global_step == (3 if counts_all else 2)
    assert int(optimizer.param_groups[0]["updates"]) == 2
    assert type(optimizer._counts["global_step"]) is (int if counts_all or not on_device else torch.Tensor)
    assert type(optimizer.param_groups[0]["updates"]) is (torch.Tensor if on_device else int)


@pytest.mark.parametrize("params", [torch.ones(2), "weight", {"weight": torch.ones(2)}, 3], ids=str)
def test_parameters_come_in_a_list(params: Any) -> None:
    """A tensor, a text and a mapping could be gone through too, and would give something else."""
    with pytest.raises(TypeError, match=r"must be an iterable of parameters, got .*; put it into a list"):
        listed(params, "params")


@pytest.mark.parametrize(
    ("group", "rate"),
    [
        ({"lr": 0.0}, 0.0),
        ({"lr": 1.0, "relative_step": True}, 1.0),
        ({"lr": 0.0, "relative_step": True}, math.nan),
        ({"lr": 0.0, "relative_step": False}, 0.0),
        ({"lr": torch.tensor([0.5])}, 0.5),
        ({"lr": torch.tensor([0.5, 0.25])}, math.nan),
        ({}, math.nan),
    ],
    ids=str,
)
def test_the_coming_rate_is_none_where_the_steps_are_relative_or_the_rate_is_no_number(group: Any, rate: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert float(coming_rate(optimizer, group)) == pytest.approx(rate, nan_ok=True, abs=0, rel=0)
