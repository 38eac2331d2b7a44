"""Optimizers go on rightly after what others do to weights and dtypes: written to, cast, float64, other defaults."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from oracles import FIXED_RATE, MEMBERS
from support import assert_same
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import GroupLossScaleManager
from mpkit.policies import preset
from mpkit.scalers import DynamicLossScaleManager, DynamicLossScaler, PolicyLossScaler, check_and_unscale_
from mpkit.schedules import CosineDecayLR


def one_weight(dtype=torch.float32, value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


def stepped(optimizer, p, gradient, found=None):
    p.grad = torch.full_like(p, gradient)
    optimizer.found_inf = None if found is None else torch.full((), found, dtype=torch.float32)
    optimizer.step()
    return p.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("found", [None, 0.0])
@pytest.mark.parametrize("make", [lambda p: opt.Momentum(p, 0.125, 0.0), lambda p: opt.SGD(p, 0.125)])
def test_a_sixteen_bit_weight_written_from_outside_is_where_training_goes_on(make, found, dtype):
    p = one_weight(dtype)
    optimizer = make([p])
    assert stepped(optimizer, p, 1.0, found) == -0.125
    for write in (
        lambda: p.data.copy_(torch.tensor([5.0])),  # .data: the version counter does not see it
        lambda: p.data.fill_(5.0),
        lambda: setattr(p, "data", torch.full((1,), 5.0, dtype=dtype)),
    ):
        write()
        assert stepped(optimizer, p, 0.0, found) == 5.0
        assert stepped(optimizer, p, 8.0, found) == 4.0


def test_a_network_cast_after_its_optimizer_was_used_trains_on():
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(1.0)
    optimizer = opt.Momentum(net.parameters(), 0.5, 0.0)
    stepped(optimizer, net.weight, 1.0)
    net.half()
    assert stepped(optimizer, net.weight, 1.0) == 0.0
    assert optimizer.state[net.weight]["master"].dtype == torch.float32
    net.float()
    assert stepped(optimizer, net.weight, 1.0) == -0.5
    assert "master" not in optimizer.state[net.weight]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [lambda p: opt.Momentum(p, CosineDecayLR(0.0, 0.1, 4), 0.9, weight_decay=lambda k: 0.1 * (k + 1)), opt.AdaFactor],
)
def test_a_compiled_step_follows_schedules_and_decay_functions(make):
    torch.compiler.reset()
    a, b = one_weight(value=2.0), one_weight(value=2.0)
    compiled, eager = make([a]), make([b])
    step = torch.compile(compiled.step, backend="eager", fullgraph=True)
    for _ in range(5):
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        step()
        eager.step()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert compiled.global_step == eager.global_step
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lazy_adam_moves_the_entries_of_a_gradient_with_several_sparse_axes(dtype):
    p, whole = (nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for _ in range(2))
    at = torch.tensor([[0, 1, 1], [0, 1, 2]])
    values = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    lazy, adam = opt.LazyAdam([p], 0.1), opt.Adam([whole], 0.1)
    for _ in range(2):
        p.grad = torch.sparse_coo_tensor(at, values, (2, 3))
        whole.grad = p.grad.to_dense()
        lazy.step()
        adam.step()
    assert (p != 0).sum() == 3
    assert torch.equal(p, whole)  # where there is no gradient Adam does not move either, from zero moments


@pytest.mark.usefixtures("flags")
def test_a_schedule_on_the_device_gives_float64_weights_all_their_digits():
    p = one_weight(torch.float64)
    optimizer = opt.SGD([p], CosineDecayLR(0.0, 0.1, 10))
    assert stepped(optimizer, p, 1.0, 0.0) == -0.1
    expected = -0.1 - 0.05 * (1 + math.cos(math.pi / 10))
    assert stepped(optimizer, p, 1.0, 0.0) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("size", [2, 2**17], ids=["small", "in lots of its own"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["Momentum", "Adam", "Lamb", "LARS", "AdaFactor"])
def test_a_sparse_gradient_is_refused_before_anything_moves(kind, grouped, size):
    a, b = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(3, 2))
    optimizer = MEMBERS[kind]([{"params": [a]}, {"params": [b]}] if grouped else [a, b])
    before = copy.deepcopy(optimizer.state_dict())
    a.grad, b.grad = torch.ones_like(a), torch.ones(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        optimizer.step()
    assert (a == 1).all()
    assert_same(optimizer.state_dict(), before)


# --- torch's default dtype


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def trained_under(name):
    """Weights after steps with a skip among them; everything is made inside, with an explicit dtype."""
    p = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float32).view(3, 4))
    options = {} if name in FIXED_RATE else {"lr": CosineDecayLR(0.0, 0.1, 10)}
    optimizer = MEMBERS[name]([p], **options)
    for step, found in enumerate((0.0, 1.0, 0.0, 0.0)):
        p.grad = torch.full_like(p, 0.3) * (step + 1)
        optimizer.found_inf = torch.full((), found, dtype=torch.float32)
        optimizer.step()
    return p.detach(), dict(optimizer.state[p])


def scaled_run():
    found = []
    policies = [PolicyLossScaler(preset(name)) for name in ("torch", "megatron")]
    for scaler in (*policies, DynamicLossScaler(8.0, 2, 2)):
        for finite in (True, False, True, True):
            scaler.adjust(torch.tensor(finite))
            found.append(scaler.scale_value.clone())
    cell, scale = DynamicLossScaleManager(8.0, 2, 2).get_update_cell(), torch.tensor(8.0, dtype=torch.float32)
    for overflow in (False, False, True):
        cell(scale, torch.tensor(overflow))
        found.append(scale.clone())
    mixed = [torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)]
    found += [check_and_unscale_(mixed, torch.tensor(4.0, dtype=torch.float32)), *mixed]
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float32))
    groups = GroupLossScaleManager(8.0, [[weight]])
    weight.grad = torch.ones_like(weight)
    groups.unscale_and_update_()
    return [*found, groups.scales.clone()]


WORK = {**{name: partial(trained_under, name) for name in MEMBERS}, "scales": scaled_run}


@pytest.mark.usefixtures("flags", "default_dtype")
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_optimizers_and_scales_do_not_look_at_the_default_dtype(work):
    under = work()
    torch.set_default_dtype(torch.float32)
    assert_same(under, work())  # of the same dtype, too
