"""Schedules beyond the golden data: laws, composition, tensors, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import without_a_wait

from mpkit import schedules as s

SCHEDULES: dict[str, s.LearningRateSchedule] = {
    "exponential": s.ExponentialDecayLR(0.5, 0.9, 3), "exponential-stair": s.ExponentialDecayLR(0.5, 0.9, 3, True),
    "natural": s.NaturalExpDecayLR(0.5, 0.2, 3), "natural-stair": s.NaturalExpDecayLR(0.5, 0.2, 3, True),
    "inverse": s.InverseDecayLR(0.5, 0.9, 3), "inverse-stair": s.InverseDecayLR(0.5, 0.9, 3, True),
    "cosine": s.CosineDecayLR(0.01, 0.5, 20), "polynomial": s.PolynomialDecayLR(0.5, 0.01, 20, 0.7),
    "polynomial-update": s.PolynomialDecayLR(0.5, 0.01, 6, 2.0, True), "warm-up": s.WarmUpLR(0.5, 10),
    "listed": s.ListedLR(tuple(0.1 * k for k in range(30))),
    "chained": s.WarmUpLR(0.5, 5).then(s.CosineDecayLR(0.0, 0.5, 20), at=5),
}  # fmt: skip


@pytest.fixture(params=SCHEDULES)
def schedule(request) -> s.LearningRateSchedule:
    return SCHEDULES[request.param]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_tensor_of_steps_gives_the_rates_of_its_elements(schedule, dtype):
    steps = torch.arange(30, dtype=dtype).reshape(5, 6)
    rates = schedule(steps)
    assert (rates.shape, rates.dtype) == (steps.shape, torch.float32)
    want = torch.tensor([schedule(int(k)) for k in steps.flatten()], dtype=torch.float64)
    assert torch.equal(rates.flatten(), want.float())
    assert schedule(torch.tensor(7)).shape == ()


@pytest.mark.gpu
def test_a_schedule_stays_on_the_gpu(schedule):
    steps = torch.arange(30, device="cuda")
    schedule(steps)  # a list of rates is copied there once
    with without_a_wait():
        rates = schedule(steps)
    torch.testing.assert_close(rates.cpu(), schedule(steps.cpu()), rtol=1e-6, atol=1e-8)


def test_a_chain_of_a_list_needs_no_entry_after_its_switch():
    chain = s.ListedLR((0.1, 0.2)).then(s.WarmUpLR(1.0, 2), at=2)
    assert chain(torch.arange(4)).tolist() == pytest.approx([0.1, 0.2, 0.0, 0.5])
    assert [*map(chain, range(4)), s.WarmUpLR(1.0, 2)(0.5)] == [0.1, 0.2, 0.0, 0.5, 0.25]


def test_a_list_raises_past_its_end_and_a_tensor_keeps_the_last():
    listed = s.ListedLR((0.2, 0.1))
    with pytest.raises(RuntimeError, match="2 rates, none for step 2"):
        listed(2)
    assert listed(torch.tensor([0, 1, 5])).tolist() == pytest.approx([0.2, 0.1, 0.1])


def test_a_list_is_told_by_its_rates_alone():
    listed, used = s.ListedLR([1, 0.5]), s.ListedLR((1.0, 0.5))
    used(torch.tensor(1))  # copies the rates to a device and keeps them
    assert s.WarmUpLR(1.0, 2**62)(2**61) == 0.5
    assert (listed, repr(used)) == (used, "ListedLR(values=(1.0, 0.5))")
    with pytest.raises(TypeError, match="positional"):
        s.ListedLR((0.1,), {})


def test_one_schedule_per_group_drives_a_torch_optimizer():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=1.0)
    scheduler = s.lambda_lr(optimizer, [s.WarmUpLR(0.1, 2), s.InverseDecayLR(0.1, 1.0, 1)])
    seen = []
    for _ in range(3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [[0.0, 0.1], [0.05, 0.05], [0.1, pytest.approx(0.1 / 3)]]
    scheduler.load_state_dict(scheduler.state_dict())


def test_numbers_of_numpy_compute_in_as_many_bits_as_those_of_python():
    """np.float16 times 90,000 is inf, and np.int8(10) times 200 does not exist."""
    steps = (0, 7, 2000, 90_000)
    for make in (
        lambda f, i: s.WarmUpLR(f(0.125), i(100)),
        lambda f, i: s.NaturalExpDecayLR(f(0.125), f(0.5), i(10), True),
        lambda f, i: s.ExponentialDecayLR(f(0.125), f(0.5), i(10)),
        lambda f, i: s.InverseDecayLR(f(0.125), f(0.5), i(10)),
        lambda f, i: s.CosineDecayLR(f(0.0), f(0.125), i(100)),
        lambda f, i: s.PolynomialDecayLR(f(0.125), f(0.0), i(100), f(0.5), True),
        lambda f, i: s.WarmUpLR(f(0.125), 4).then(s.WarmUpLR(f(0.25), 4), i(100)),
    ):
        own, given = make(float, int), make(np.float16, np.int8)
        assert [given(step) for step in steps] == [own(step) for step in steps]
        assert torch.equal(given(torch.tensor(steps)), own(torch.tensor(steps)))
    for rates in (
        lambda f, i: s.exponential_decay_lr(f(0.125), f(0.75), i(100), i(3), i(7)),
        lambda f, i: s.polynomial_decay_lr(f(0.125), f(0.0), i(100), i(3), i(7), f(1.5)),
        lambda f, i: s.cosine_decay_lr(f(0.0), f(0.125), i(100), i(3), i(7)),
        lambda f, i: s.piecewise_constant_lr([i(2), i(4)], [f(0.5), f(0.25)]),
    ):
        assert rates(np.float16, np.int8) == rates(float, int)


def test_lambda_lr_writes_no_rate_before_every_schedule_has_answered():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.3)
    before = copy.deepcopy(optimizer.param_groups)
    with pytest.raises(NotImplementedError):
        s.lambda_lr(optimizer, s.LearningRateSchedule())
    assert str(optimizer.param_groups) == str(before)


def test_lambda_lr_keeps_a_rate_that_is_a_tensor_and_each_group_its_own():
    """torch's optimizers put one tensor into all groups, and its schedulers write into it."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    rate = torch.tensor(0.3)
    optimizer = torch.optim.Adam([{"params": [w]} for w in weights], lr=rate, capturable=True)
    s.lambda_lr(optimizer, [s.ListedLR([0.5]), s.ListedLR([0.25])])
    found = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(lr, torch.Tensor) for lr in found)
    assert [lr.item() for lr in found] == [0.5, 0.25]
    assert rate == torch.tensor(0.3)


BAD: dict[type[Exception], list[Callable[[], Any]]] = {  # what one wrong argument alone does not show, see the contract
    TypeError: [
        *(lambda k=k: k(1, 0.5, 3) for k in (s.ExponentialDecayLR, s.NaturalExpDecayLR, s.InverseDecayLR)),
        lambda: s.ExponentialDecayLR(0.1, 0.5, 3.0), lambda: s.ExponentialDecayLR(0.1, 0.5, True),
        lambda: s.ExponentialDecayLR(0.1, 0.5, 3, 1), lambda: s.exponential_decay_lr(1, 0.5, 9, 3, 1),
        lambda: s.exponential_decay_lr(0.1, 0.5, 9, 3.0, 1), lambda: s.cosine_decay_lr(0.0, 1, 9, 3, 1),
        lambda: s.polynomial_decay_lr(0.1, 0.0, 9, 3, 1, 1.0, 1), lambda: s.piecewise_constant_lr([2], [1]),
        lambda: s.WarmUpLR(0.1, 3).then([0.1], at=3),
        lambda: s.lambda_lr(torch.optim.SGD([torch.ones(1)], 0.1), [0.1]),
    ],
    ValueError: [
        *(lambda k=k: k(0.0, 0.5, 3) for k in (s.ExponentialDecayLR, s.NaturalExpDecayLR, s.InverseDecayLR)),
        lambda: s.ExponentialDecayLR(0.1, 0.0, 3), lambda: s.ExponentialDecayLR(0.1, 0.5, 0),
        lambda: s.inverse_decay_lr(0.1, 0.5, 0, 3, 1), lambda: s.CosineDecayLR(-0.1, 0.1, 3),
        lambda: s.CosineDecayLR(0.1, 0.1, 3), lambda: s.PolynomialDecayLR(0.1, -0.1, 3, 1.0),
        lambda: s.PolynomialDecayLR(0.1, 0.0, 3, 0.0), lambda: s.WarmUpLR(0.1, 2**63),
        lambda: s.piecewise_constant_lr([2, 1], [0.1, 0.2]), lambda: s.piecewise_constant_lr([2], [0.1, 0.2]),
        lambda: s.piecewise_constant_lr([0], [0.1]), lambda: s.ListedLR(()), lambda: s.ListedLR((0.1, -0.1)),
        lambda: s.WarmUpLR(0.1, 3).then(s.WarmUpLR(0.1, 3), at=0),
        lambda: s.lambda_lr(torch.optim.SGD([torch.ones(1)], 0.1), []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", [2, [2]])
def test_milestones_and_rates_are_lists_of_one_length(steps):
    with pytest.raises((TypeError, ValueError), match=r"^milestone must be a list|got 1 milestones, 2 rates"):
        s.piecewise_constant_lr(steps, [0.1, 0.2])


@pytest.mark.parametrize(("error", "call"), [(error, call) for error, calls in BAD.items() for call in calls])
def test_bad_input_is_refused(error, call):
    with pytest.raises(error):
        call()
