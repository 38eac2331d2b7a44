"""The formulas: beside torch bit for bit, and beside their papers in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from oracles import MEMBERS, Make
from stepping import give_gradients, parameters, same, snapshot, stepped
from support import assert_same
from torch import Tensor, nn

from mpkit import optimizers as opt
from mpkit.optimizers import base
from mpkit.schedules import WarmUpLR


def both(name: str, *args: Any, **options: Any) -> tuple[Make, Make]:
    """Our rule and torch's, with the same arguments."""
    ours, theirs = getattr(opt, name), getattr(torch.optim, name)
    return lambda p: ours(p, *args, **options), lambda p: theirs(p, *args, **options)


TWINS: dict[str, tuple[Make, Make]] = {
    "Momentum": (lambda p: opt.Momentum(p, 0.03, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.03, 0.9, 0, 0.01)),
    "Momentum-nesterov": (
        lambda p: opt.Momentum(p, 0.03, 0.9, 0.01, use_nesterov=True),
        lambda p: torch.optim.SGD(p, 0.03, 0.9, 0, 0.01, nesterov=True),
    ),
    "SGD": both("SGD", 0.03),
    "SGD-dampening": both("SGD", 0.03, 0.9, 0.3, 0.01),
    "SGD-nesterov": both("SGD", 0.03, 0.9, nesterov=True),
    "Adadelta": both("Adadelta", 0.5, 0.8, weight_decay=0.01),
    "ASGD": both("ASGD", 0.03, 0.01, t0=20.0, weight_decay=0.01),
    "Rprop": both("Rprop", 0.03),
}


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("foreach", [True, None], ids=["foreach", "default"])
def test_the_same_bits_as_torch_over_200_steps(twin, foreach):
    if twin == "ASGD" and not foreach:
        pytest.skip("torch's own two ASGD implementations differ in the last bit")
    mine, theirs = parameters(), parameters()
    ours, torchs = TWINS[twin][0](mine), TWINS[twin][1](theirs)
    for group in torchs.param_groups:
        group["foreach"] = foreach
    for step in range(200):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs):
        assert torch.equal(a, b)


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


def run64(make: Make, steps: int = 5) -> tuple[Tensor, list[Tensor], Tensor]:
    """Float64 start, gradients and end of one (4, 6) weight."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    grads = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(steps)]
    p = nn.Parameter(start.clone())
    optimizer = make([("layer.weight", p)])
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return start, grads, p.detach()


def test_lamb_formula():
    start, grads, got = run64(lambda p: opt.Lamb(p, 0.05, 0.8, 0.95, 1e-3, 0.02))
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate(grads, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        r = (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-3) + 0.02 * w
        w = w - 0.05 * (w.norm() / r.norm()) * r
    torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


def test_lamb_ratio_is_one_where_the_weight_or_the_update_is_zero():
    still = nn.Parameter(torch.ones(3))
    still.grad = torch.zeros(3)
    opt.Lamb([still], 0.1).step()
    assert still.tolist() == [1, 1, 1]
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, -2.0, 0.5])
    opt.Lamb([p], 0.1, eps=1e-12).step()
    torch.testing.assert_close(p.detach(), -0.1 * p.grad.sign())  # m' / sqrt(v') is the sign at the first step
    small = nn.Parameter(torch.tensor([0.5]))
    small.grad = torch.ones(1)
    opt.Lamb([small], 1.0, eps=1e-12).step()
    assert small.item() == pytest.approx(0.0, abs=1e-6)  # as far as it is long


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("applied", [0, 9_000, 40_000])
@pytest.mark.parametrize(
    "kind", [{"learning_rate": 0.03, "relative_step": False}, {}, {"warmup_init": True}, {"scale_parameter": False}]
)
def test_adafactor_formula(shape, on_device, applied, kind, monkeypatch):
    """Shazeer and Stern 2018, algorithms 4 and 5, in float64, every number another one than the default."""
    if on_device:
        monkeypatch.setattr(base, "AT_HAND", frozenset())
    eps1, eps2, clip, decay_rate, beta1, decay = 1e-3, 0.2, 0.4, 0.6, 0.7, 0.05
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(shape, generator=generator, dtype=torch.float64) / 5  # its mean square is about eps2 squared
    p, m, second = nn.Parameter(w.clone()), torch.zeros_like(w), 0.0
    settings = {"eps": (eps1, eps2), "clip_threshold": clip, "decay_rate": decay_rate, "beta1": beta1}
    optimizer = opt.AdaFactor([p], weight_decay=decay, **settings, **kind)
    optimizer.param_groups[0]["updates"] = applied  # its own rate falls with the root of the step after 10,000
    optimizer.found_inf = torch.zeros(()) if on_device else None
    for t in range(applied + 1, applied + 7):
        g = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        p.grad = g.clone()
        optimizer.step()
        rate = kind.get("learning_rate") or min(1e-6 * t if kind.get("warmup_init") else 1e-2, 1 / math.sqrt(t))
        rate *= 1.0 if kind.get("scale_parameter") is False else max(eps2, float(w.square().mean().sqrt()))
        b2 = 1 - t**-decay_rate
        second = b2 * second + (1 - b2) * (g * g + eps1)  # its means are what the factored moment averages
        spread = second
        if len(shape) > 1:
            row, column = second.mean(-1, keepdim=True), second.mean(-2, keepdim=True)
            spread = row * column / row.mean(-2, keepdim=True)
        step = g / spread.sqrt()
        step = step * rate / max(1.0, float(step.square().mean().sqrt()) / clip)
        m = beta1 * m + (1 - beta1) * step
        w = w - decay * rate * w - m
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-15)


def test_adafactor_divides_by_no_loss_scale() -> None:
    """As in MindSpore; the first eps makes the step depend on how large the gradients are."""
    pair = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p, scale in zip(pair, (1.0, 1024.0)):
        optimizer = opt.AdaFactor([p], eps=(1e-3, 1e-3), loss_scale=scale)
        p.grad = torch.tensor([1.0, 2.0, -3.0])
        optimizer.step()
    assert torch.equal(*pair)
    assert not torch.equal(pair[0], torch.ones(3))


def test_a_static_scale_of_two_is_divided_out_of_gradients_alone() -> None:
    p = nn.Parameter(torch.ones(1))
    stepped(opt.SGD([p], 1.0, weight_decay=0.5, loss_scale=2.0), 0.5)
    assert p.item() == 1 - 0.25 - 0.5


def test_groups_are_decayed_whatever_the_names_in_them() -> None:
    first, added = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = opt.SGD([{"params": [("beta", first)]}], 1.0, weight_decay=0.5)
    optimizer.add_param_group({"params": [("gamma", added)]})
    stepped(optimizer, 0.0)
    assert (first.item(), added.item()) == (0.5, 0.5)


@pytest.mark.parametrize("clip", [False, True])
def test_lars_formula(clip):
    def make(p: Any) -> opt.LARS:
        inner = opt.Momentum(p, 0.05, 0.9, weight_decay=0.02, loss_scale=2.0)
        return opt.LARS(inner, epsilon=1e-3, coefficient=0.5, use_clip=clip)

    start, grads, got = run64(make)
    w, v = start.clone(), torch.zeros_like(start)
    for g in (grad / 2 for grad in grads):
        q = 0.5 * w.norm() / (g.norm() + 0.02 * w.norm() + 1e-3)
        q = torch.clamp(q / 0.05, max=1.0) if clip else q
        v = 0.9 * v + q * (g + 0.02 * w)
        w = w - 0.05 * v
    torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


def test_lars_with_clipping_leaves_weights_of_zero_alone_while_a_warm_up_is_at_zero():
    zeros, ones = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = opt.LARS(opt.Momentum([zeros, ones], WarmUpLR(0.1, 2), 0.0), use_clip=True)
    stepped(optimizer)
    assert (zeros.tolist(), ones.tolist()) == ([[0.0] * 2] * 2, [[1.0] * 2] * 2)
    stepped(optimizer)
    assert zeros.tolist() == [[0.0] * 2] * 2
    assert ones.isfinite().all()
    assert (ones < 1).all()


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


def test_adagrad_without_update_slots_keeps_its_accumulator():
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = opt.Adagrad([p], 0.25, 0.1, update_slots=False)
    for _ in range(3):
        stepped(optimizer, 2.0)
    assert p.item() == pytest.approx(1.0 - 3 * 0.1 * 2.0 / 0.5)


@pytest.mark.parametrize("make", [opt.Adagrad, opt.ProximalAdagrad])
@pytest.mark.parametrize(("accum", "moved"), [(0.0, 0.1), (1.0, 0.1 / math.sqrt(2))])
def test_a_weight_without_gradient_stays_where_the_sum_starts_at_0(make: Any, accum: float, moved: float) -> None:
    """Its 0 / 0 is no NaN; beside it a gradient of 1 moves by lr / sqrt(accum + 1)."""
    p = nn.Parameter(torch.tensor([0.5, 0.5], dtype=torch.float64))
    p.grad = torch.tensor([0.0, 1.0], dtype=torch.float64)
    make([p], accum, 0.1).step()
    assert p.tolist() == pytest.approx([0.5, 0.5 - moved], abs=1e-15)


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


def test_lazy_adam_touches_only_the_rows_of_a_sparse_gradient():
    table = nn.Embedding(6, 3, sparse=True)
    dense = nn.Parameter(table.weight.detach().clone())
    lazy = opt.LazyAdam(table.parameters(), 0.1, weight_decay=0.01)
    eager = opt.Adam([dense], 0.1, weight_decay=0.01)
    for rows in ([0, 2, 2], [2, 5]):
        lazy.zero_grad()
        (table(torch.tensor(rows)) ** 2).sum().backward()
        lazy.step()
        dense.grad = table.weight.grad.to_dense()
        eager.step()
    untouched = torch.tensor([1, 3, 4])
    assert not lazy.state[table.weight]["moment1"][untouched].any()
    torch.testing.assert_close(table.weight[2].detach(), dense[2].detach())  # in every gradient: the same as Adam
    assert not torch.equal(table.weight[0].detach(), dense[0].detach())  # Adam moved on without a gradient
    with pytest.raises(RuntimeError, match="LazyAdam"):
        opt.Adam(table.parameters()).step()


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


@pytest.mark.parametrize("at_hand", [frozenset(), base.AT_HAND], ids=["on a device", "at hand"])
def test_a_skipped_sparse_step_changes_no_bit(at_hand, monkeypatch):
    monkeypatch.setattr(base, "AT_HAND", at_hand)
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = opt.LazyAdam(table.parameters(), 0.1)
    (table(torch.tensor([0, 2])) ** 2).sum().backward()
    optimizer.step()
    before = snapshot(optimizer, [table.weight])
    table.weight.grad.mul_(math.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(snapshot(optimizer, [table.weight]), before)


def test_lars_leaves_bias_and_layer_norm_alone():
    named = [(n, nn.Parameter(torch.ones(2))) for n in ("fc.weight", "fc.bias", "LayerNorm.weight")]
    optimizer = opt.LARS(opt.SGD(named, 1.0, weight_decay=0.5), coefficient=1e-9)
    stepped(optimizer, 0.25)
    moved = {n: float(p.detach()[0]) for n, p in named}
    assert moved == {"fc.weight": pytest.approx(1.0), "fc.bias": 0.75, "LayerNorm.weight": 0.75}


def test_ftrl_refuses_a_rate_that_came_down_to_zero_before_anything_moves():
    p = nn.Parameter(torch.ones(2))
    optimizer = opt.FTRL([p], learning_rate=0.5)
    stepped(optimizer)
    before = snapshot(optimizer, [p])
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match="end above 0"):
        stepped(optimizer)
    assert same(snapshot(optimizer, [p]), before)
    assert optimizer.global_step == 1
