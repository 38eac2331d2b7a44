"""What every optimizer must do, and what the golden data does not reach."""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpkit import optimizers as opt
from mpkit.optimizers import base
from mpkit.schedules import CosineDecayLR, PolynomialDecayLR, WarmUpLR, lambda_lr

Make = Callable[..., torch.optim.Optimizer]

MEMBERS: dict[str, Make] = {
    "Momentum": lambda p, lr=0.1, **kw: opt.Momentum(p, lr, 0.9, **kw),
    "Momentum-nesterov": lambda p, lr=0.1, **kw: opt.Momentum(p, lr, 0.9, use_nesterov=True, **kw),
    "SGD": lambda p, lr=0.1, **kw: opt.SGD(p, lr, **kw),
    "SGD-dampening": lambda p, lr=0.1, **kw: opt.SGD(p, lr, 0.9, 0.3, **kw),
    "Adam": lambda p, lr=0.1, **kw: opt.Adam(p, lr, **kw),
    "Adam-nesterov": lambda p, lr=0.1, **kw: opt.Adam(p, lr, use_nesterov=True, **kw),
    "Adam-amsgrad": lambda p, lr=0.1, **kw: opt.Adam(p, lr, use_amsgrad=True, **kw),
    "LazyAdam": lambda p, lr=0.1, **kw: opt.LazyAdam(p, lr, **kw),
    "AdamOffload": lambda p, lr=0.1, **kw: opt.AdamOffload(p, lr, **kw),
    "AdamWeightDecay": lambda p, lr=0.1, **kw: opt.AdamWeightDecay(p, lr, **kw),
    "AdaMax": lambda p, lr=0.1, **kw: opt.AdaMax(p, lr, **kw),
    "RMSProp": lambda p, lr=0.1, **kw: opt.RMSProp(p, lr, **kw),
    "RMSProp-centered": lambda p, lr=0.1, **kw: opt.RMSProp(p, lr, momentum=0.5, centered=True, **kw),
    "Adagrad": lambda p, lr=0.1, **kw: opt.Adagrad(p, 0.1, lr, **kw),
    "Adagrad-from-0": lambda p, lr=0.1, **kw: opt.Adagrad(p, 0.0, lr, **kw),
    "Adadelta": lambda p, lr=0.1, **kw: opt.Adadelta(p, lr, **kw),
    "ASGD": lambda p, lr=0.1, **kw: opt.ASGD(p, lr, t0=2.0, **kw),
    "Rprop": lambda p, lr=0.1, **kw: opt.Rprop(p, lr, **kw),
    "FTRL": lambda p, lr=0.1, **kw: opt.FTRL(p, 0.1, lr, l1=0.01, l2=0.01, **kw),
    "ProximalAdagrad": lambda p, lr=0.1, **kw: opt.ProximalAdagrad(p, 0.1, lr, 0.01, 0.01, **kw),
    "AdaFactor": lambda p, lr=0.1, **kw: opt.AdaFactor(p, lr, relative_step=False, **kw),
    "AdaFactor-relative": lambda p, lr=None, **kw: opt.AdaFactor(p, None, beta1=0.0, **kw),
    "Lamb": lambda p, lr=0.1, **kw: opt.Lamb(p, lr, **kw),
    "LARS": lambda p, lr=0.1, **kw: opt.LARS(opt.Momentum(p, lr, 0.9, **kw)),
    "LARS-clip": lambda p, lr=0.1, **kw: opt.LARS(opt.SGD(p, lr, **kw), use_clip=True),
}
FIXED_RATE = {"FTRL", "AdaFactor-relative"}
DECAYING = {name for name in MEMBERS if not name.startswith("AdaFactor")}
SIGNED = {"master", "velocity", "moment1", "mean", "before", "average", "linear"}
SHAPES = [(3, 4), (5,), (2, 3, 2, 2), (1, 1), ()]


@pytest.fixture(params=MEMBERS)
def name(request) -> str:
    return request.param


@pytest.fixture(params=["on a device", "at hand"])
def flags(request, monkeypatch) -> str:
    """A CPU reads `found_inf`, which waits for nothing there; a device decides for itself, here played by the CPU."""
    if request.param == "on a device":
        monkeypatch.setattr(base, "AT_HAND", frozenset())
    return request.param


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> list[nn.Parameter]:
    """Parameters of several ranks; the first two hold a -0.0, a 0.0 and a subnormal each."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    for p in params[:2]:
        p.view(-1)[:3] = torch.tensor([-0.0, 0.0, -6e-8])
    return [nn.Parameter(p.to(device)) for p in params]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def bits(t: Tensor) -> Tensor:
    return t.detach().cpu().clone().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def snapshot(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Bit patterns of weights and state."""
    state = [t for p in params for t in optimizer.state.get(p, {}).values()]
    return [bits(t) for t in [*params, *state]]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, found: float | None = None
) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.found_inf = None if found is None else torch.full((1,), found, device=params[0].device)
        optimizer.step()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# --- the contract


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("at", "decay"), [(0, 0.0), (3, 0.01)])
def test_a_skipped_step_changes_no_bit(name, at, decay, dtype):
    params = parameters(dtype)
    optimizer = MEMBERS[name](params, weight_decay=decay)
    train(optimizer, params, range(at), found=0.0)
    if not at:  # state begins with the first step, applied or not: let it begin under a skip
        give_gradients(params, 0)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
    with torch.no_grad():
        params[1][0] = -0.0
    for key in SIGNED & optimizer.state[params[1]].keys():
        optimizer.state[params[1]][key][0] = -0.0  # m * 1 + 0.0 would lose this sign
    before = snapshot(optimizer, params)

    for bad in (math.inf, math.nan):
        for p in params:
            p.grad = torch.full_like(p, bad)
        optimizer.found_inf = torch.full((1,), 2.0)  # GradScaler adds the flags of several devices
        optimizer.step()

    assert same(snapshot(optimizer, params), before)
    assert optimizer.global_step == at


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("found", [None, 0.0])
def test_weight_decay_may_meet_nothing_but_gammas_and_betas(name, found):
    def trained(decay):
        params = parameters()[:2]
        train(MEMBERS[name](list(zip(("gamma", "beta"), params)), weight_decay=decay), params, range(3), found)
        return [bits(p) for p in params]

    exempt = getattr(getattr(opt, name.split("-")[0]), "decay_filter", False)  # LARS asks a filter of its own
    assert same(trained(0.01), trained(0.0)) == exempt


@pytest.mark.usefixtures("flags")
def test_a_skip_leaves_no_trace_in_later_steps(name):
    clean, bumpy = parameters(), parameters()
    a, b = MEMBERS[name](clean), MEMBERS[name](bumpy)
    train(a, clean, range(4), found=0.0)
    train(b, bumpy, range(2), found=0.0)
    for p in bumpy:
        p.grad = torch.full_like(p, math.nan)
    b.found_inf = torch.ones(())
    b.step()
    train(b, bumpy, range(2, 4), found=0.0)
    assert same(snapshot(a, clean), snapshot(b, bumpy))


@pytest.mark.usefixtures("flags")
def test_host_and_device_counters_give_the_same_weights(name):
    on_host, on_device = parameters(), parameters()
    train(MEMBERS[name](on_host, weight_decay=0.01), on_host, range(6))
    train(MEMBERS[name](on_device, weight_decay=0.01), on_device, range(6), found=0.0)
    for a, b in zip(on_host, on_device):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


class HostReads(TorchDispatchMode):
    """Counts the operations that read a tensor's value on the host."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("flags")
def test_a_step_that_may_skip_reads_nothing_on_the_host(name):
    params = parameters()
    rate = {} if name in FIXED_RATE else {"lr": CosineDecayLR(0.0, 0.1, 10)}
    optimizer = MEMBERS[name](params, weight_decay=0.01, **rate)
    give_gradients(params, 0)
    optimizer.found_inf = torch.zeros(())
    with HostReads() as counter:
        optimizer.step()
        optimizer.step()
    assert counter.reads == 0
    with counter:
        torch.ones(()).item()
    assert counter.reads == 1  # the counter counts


@pytest.mark.usefixtures("flags")
def test_torch_grad_scaler_drives_it_without_unscaling_first(name):
    params, plain = parameters(), parameters()
    optimizer, other = MEMBERS[name](params), MEMBERS[name](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(torch.ones(()))  # makes its scale tensor
        give_gradients(params, step, scaler.get_scale())
        give_gradients(plain, step)
        if step == 1:
            params[0].grad[0, 0] = math.inf
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.global_step == 2
    for a, b in zip(params, plain):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize(("found", "dtype"), [(None, torch.float32), (0.0, torch.float16)])
def test_a_loaded_state_continues_bit_for_bit(name, found, dtype):
    through, copied = parameters(dtype), parameters(dtype)
    whole, half = MEMBERS[name](through, weight_decay=0.01), MEMBERS[name](copied, weight_decay=0.01)
    train(whole, through, range(5), found)
    train(half, copied, range(3), found)
    file = io.BytesIO()
    torch.save({"opt": half.state_dict(), "net": copied}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = [nn.Parameter(p.detach().clone()) for p in loaded["net"]]
    resumed = MEMBERS[name](fresh)
    resumed.load_state_dict(loaded["opt"])
    assert resumed.global_step == 3
    train(resumed, fresh, range(3, 5), found)
    assert same(snapshot(whole, through), snapshot(resumed, fresh))
    assert resumed.state_dict()["global_step"] == 5


def test_a_loaded_state_shares_no_memory_with_the_file(name):
    params = parameters(torch.float16)
    optimizer = MEMBERS[name](params, weight_decay=0.01)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    before = snapshot(optimizer, params)
    for state in saved["state"].values():
        for tensor in state.values():
            tensor.zero_()
    assert same(snapshot(optimizer, params), before)


@pytest.mark.parametrize("kept", [1, 3])
def test_the_state_of_another_number_of_parameters_is_refused_in_our_words(name, kept):
    saved = MEMBERS[name](parameters()[:kept]).state_dict()
    with pytest.raises(ValueError, match=rf"groups of \[{kept}\] parameters, this \w+ of \[2\]; build it as it was"):
        MEMBERS[name](parameters()[:2]).load_state_dict(saved)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_continues_alike(name, copier):
    params = parameters()
    optimizer = MEMBERS[name](params, weight_decay=0.01)
    if name.startswith("LARS"):
        copied = copier((optimizer, params))
        assert copied[0].optimizer.gradient_rule.__self__ is copied[0]
    train(optimizer, params, range(2), found=0.0)
    other, theirs = copier((optimizer, params))
    assert other.global_step == 2
    train(optimizer, params, range(2, 4), found=0.0)
    train(other, theirs, range(2, 4), found=0.0)
    assert same(snapshot(optimizer, params), snapshot(other, theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_parameters_follow_a_float32_master(name, dtype):
    narrow = parameters(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    a, b = MEMBERS[name](narrow, weight_decay=0.01), MEMBERS[name](wide, weight_decay=0.01)
    for step in range(5):
        give_gradients(narrow, step)
        for p, q in zip(wide, narrow):
            p.grad = q.grad.float()
        a.step()
        b.step()
    for p, q in zip(wide, narrow):
        assert torch.equal(p.to(dtype), q)
        assert torch.equal(a.state[q]["master"], p)


@pytest.mark.parametrize("found", [None, 0.0])
def test_gradients_stay_as_they_were(name, found):
    params = parameters()
    optimizer = MEMBERS[name](params, weight_decay=0.1)
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.found_inf = None if found is None else torch.zeros(())
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before))


def test_a_closure_is_called_once_with_gradients_enabled(name):
    params = parameters()
    optimizer = MEMBERS[name](params)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert optimizer.global_step == 1


def test_parameters_without_gradient_are_left_out(name):
    params = parameters()
    optimizer = MEMBERS[name](params, weight_decay=0.1)
    give_gradients(params, 0)
    params[0].grad = None
    before = bits(params[0])
    optimizer.step()
    assert torch.equal(bits(params[0]), before)
    assert params[0] not in optimizer.state or not optimizer.state[params[0]]


def test_a_group_added_later_is_trained_from_its_own_first_step(name):
    params = parameters()
    fresh = nn.Parameter(torch.ones(3, 2))
    optimizer = MEMBERS[name](params)
    train(optimizer, params, range(3))
    optimizer.add_param_group({"params": [fresh]})
    alone = nn.Parameter(torch.ones(3, 2))
    other = MEMBERS[name]([alone])
    fresh.grad, alone.grad = torch.full_like(fresh, 0.5), torch.full_like(alone, 0.5)
    optimizer.step()
    other.step()
    assert torch.equal(fresh, alone)


@pytest.mark.parametrize("name", sorted(DECAYING - {"AdamWeightDecay", "Lamb"}))
def test_the_static_loss_scale_is_divided_out_after_decay_was_multiplied_by_it(name):
    if name in ("ASGD", "Rprop"):
        pytest.skip("the reference gives it no loss_scale")
    plain, scaled = parameters(), parameters()
    a = MEMBERS[name](plain, weight_decay=0.01)
    b = MEMBERS[name](scaled, weight_decay=0.01, loss_scale=256.0)
    for step in range(4):
        give_gradients(plain, step)
        give_gradients(scaled, step, 256.0)
        a.step()
        b.step()
    assert same(snapshot(a, plain), snapshot(b, scaled))  # a power of two is exact


# --- against torch


TWINS: dict[str, tuple[Make, Make]] = {
    "Momentum": (lambda p: opt.Momentum(p, 0.03, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.03, 0.9, 0, 0.01)),
    "Momentum-nesterov": (
        lambda p: opt.Momentum(p, 0.03, 0.9, 0.01, use_nesterov=True),
        lambda p: torch.optim.SGD(p, 0.03, 0.9, 0, 0.01, nesterov=True),
    ),
    "SGD": (lambda p: opt.SGD(p, 0.03), lambda p: torch.optim.SGD(p, 0.03)),
    "SGD-dampening": (lambda p: opt.SGD(p, 0.03, 0.9, 0.3, 0.01), lambda p: torch.optim.SGD(p, 0.03, 0.9, 0.3, 0.01)),
    "SGD-nesterov": (
        lambda p: opt.SGD(p, 0.03, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.03, 0.9, nesterov=True),
    ),
    "Adadelta": (
        lambda p: opt.Adadelta(p, 0.5, 0.8, weight_decay=0.01),
        lambda p: torch.optim.Adadelta(p, 0.5, 0.8, weight_decay=0.01),
    ),
    "ASGD": (
        lambda p: opt.ASGD(p, 0.03, 0.01, t0=20.0, weight_decay=0.01),
        lambda p: torch.optim.ASGD(p, 0.03, 0.01, t0=20.0, weight_decay=0.01, foreach=True),
    ),
    "Rprop": (lambda p: opt.Rprop(p, 0.03), lambda p: torch.optim.Rprop(p, 0.03)),
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


@pytest.mark.gpu
@pytest.mark.parametrize("twin", TWINS)
def test_within_a_millionth_of_torch_on_a_gpu(twin):
    mine, theirs = parameters(device="cuda"), parameters(device="cuda")
    ours, torchs = TWINS[twin][0](mine), TWINS[twin][1](theirs)
    for step in range(200):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_gpu_gives_the_weights_of_the_cpu_and_skips_without_a_host_read(name):
    here, there = parameters(), parameters(device="cuda")
    a, b = MEMBERS[name](here, weight_decay=0.01), MEMBERS[name](there, weight_decay=0.01)
    train(a, here, range(3), found=0.0)
    train(b, there, range(3), found=0.0)
    give_gradients(there, 3)
    there[0].grad.fill_(math.nan)
    before = snapshot(b, there)
    b.found_inf = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        b.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(snapshot(b, there), before)
    for p, q in zip(here, there):
        torch.testing.assert_close(p, q.cpu(), rtol=2e-5, atol=2e-6)


def test_adam_is_torchs_adam_with_eps_outside_the_bias_correction():
    mine, theirs = parameters(), parameters()
    ours, torchs = opt.Adam(mine, 0.03, eps=1e-3), torch.optim.Adam(theirs, 0.03, foreach=True)
    for step in range(50):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        torchs.param_groups[0]["eps"] = 1e-3 / math.sqrt(1 - 0.999 ** (step + 1))
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


# --- formulas that the reference could not run on a CPU, in float64 for one weight or one matrix


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


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "kind", [{"learning_rate": 0.03, "relative_step": False}, {}, {"warmup_init": True}, {"scale_parameter": False}]
)
def test_adafactor_formula(shape, on_device, kind, monkeypatch):
    """Shazeer and Stern 2018, algorithms 4 and 5, in float64, every number another one than the default."""
    if on_device:
        monkeypatch.setattr(base, "AT_HAND", frozenset())
    eps1, eps2, clip, decay_rate, beta1, decay = 1e-3, 0.2, 0.4, 0.6, 0.7, 0.05
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(shape, generator=generator, dtype=torch.float64) / 5  # its mean square is about eps2 squared
    p, m, second = nn.Parameter(w.clone()), torch.zeros_like(w), 0.0
    settings = {"eps": (eps1, eps2), "clip_threshold": clip, "decay_rate": decay_rate, "beta1": beta1}
    optimizer = opt.AdaFactor([p], weight_decay=decay, **settings, **kind)
    optimizer.found_inf = torch.zeros(()) if on_device else None
    for t in range(1, 7):
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


def test_lamb_ratio_is_one_where_the_weight_is_zero():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, -2.0, 0.5])
    opt.Lamb([p], 0.1, eps=1e-12).step()
    torch.testing.assert_close(p.detach(), -0.1 * p.grad.sign())  # m' / sqrt(v') is the sign at the first step


@pytest.mark.parametrize("clip", [False, True])
def test_lars_formula(clip):
    def make(p: Any) -> opt.LARS:
        inner = opt.Momentum(p, 0.05, 0.9, weight_decay=0.02, loss_scale=8.0)
        return opt.LARS(inner, epsilon=1e-3, coefficient=0.5, use_clip=clip)

    start, grads, got = run64(make)
    w, v = start.clone(), torch.zeros_like(start)
    for g in (grad / 8 for grad in grads):
        q = 0.5 * w.norm() / (g.norm() + 0.02 * w.norm() + 1e-3)
        q = torch.clamp(q / 0.05, max=1.0) if clip else q
        v = 0.9 * v + q * (g + 0.02 * w)
        w = w - 0.05 * v
    torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


def test_lars_leaves_bias_and_layer_norm_alone():
    named = [(n, nn.Parameter(torch.ones(2))) for n in ("fc.weight", "fc.bias", "LayerNorm.weight")]
    optimizer = opt.LARS(opt.SGD(named, 1.0, weight_decay=0.5), coefficient=1e-9)
    for _, p in named:
        p.grad = torch.full((2,), 0.25)
    optimizer.step()
    moved = {n: float(p.detach()[0]) for n, p in named}
    assert moved == {"fc.weight": pytest.approx(1.0), "fc.bias": 0.75, "LayerNorm.weight": 0.75}


def test_ftrl_follows_the_paper_for_both_signs_of_z():
    start, grads, got = run64(lambda p: opt.FTRL(p, 0.2, 0.3, -0.5, l1=0.4, l2=0.1))
    w, z, n = start.clone(), torch.zeros_like(start), torch.full_like(start, 0.2)
    for g in grads:
        new = n + g * g
        z = z + g - (new.sqrt() - n.sqrt()) / 0.3 * w
        n = new
        w = torch.where(z.abs() > 0.4, (z.sign() * 0.4 - z) / (n.sqrt() / 0.3 + 0.2), 0.0)
    assert (w == 0).any()
    assert ((z < -0.4).any(), (z > 0.4).any()) == (True, True)
    torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


def test_adagrad_without_update_slots_keeps_its_accumulator():
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = opt.Adagrad([p], 0.25, 0.1, update_slots=False)
    for _ in range(3):
        p.grad = torch.tensor([2.0])
        optimizer.step()
    assert p.item() == pytest.approx(1.0 - 3 * 0.1 * 2.0 / 0.5)


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


@pytest.mark.usefixtures("flags")
def test_a_skipped_sparse_step_changes_no_bit():
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = opt.LazyAdam(table.parameters(), 0.1)
    (table(torch.tensor([0, 2])) ** 2).sum().backward()
    optimizer.step()
    before = snapshot(optimizer, [table.weight])
    table.weight.grad.mul_(math.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(snapshot(optimizer, [table.weight]), before)


# --- rates, groups, decay


def net() -> nn.Module:
    return nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "norm": nn.LayerNorm(4), "fc": nn.Linear(4, 2)})


def test_groups_train_only_what_they_name():
    module = net()
    conv = [(n, p) for n, p in opt.trainable_params(module) if "conv" in n]
    optimizer = opt.Momentum([{"params": conv, "lr": 0.01}], 0.1, 0.9)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = {n for n, p in module.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {"conv.weight", "conv.bias"}


@pytest.mark.parametrize("faithful", [False, True])
def test_a_fixed_rate_beside_a_schedule_is_exact_unless_faithful(faithful):
    a, b = parameters()[:2]
    schedule = PolynomialDecayLR(0.1, 0.01, 4, 0.5)
    groups = [{"params": [a], "lr": 0.01, "weight_decay": 0.01}, {"params": [b], "lr": schedule}]
    optimizer = opt.Momentum([*groups, {"order_params": [b, a]}], 0.1, 0.9, faithful=faithful)
    assert [p is q for p, q in zip(optimizer.parameters, [b, a])] == [True, True]
    rates = optimizer.get_lr()
    assert [r.item() for r in rates] == pytest.approx([0.1, 0.01], rel=1e-5)
    assert rates[1].item() == (0.009999990463256836 if faithful else 0.009999999776482582)
    assert torch.equal(optimizer.get_lr_parameter(a), rates[1])
    assert [r.item() for r in optimizer.get_lr_parameter([b, a])] == [r.item() for r in rates]
    optimizer.step()
    optimizer.step()
    assert optimizer.get_lr()[0].item() == pytest.approx(0.0736396, abs=1e-7)


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("found", [None, 0.0])
def test_a_list_of_rates_must_cover_every_step(found):
    params = parameters()
    optimizer = opt.SGD(params, [0.3, 0.2])
    train(optimizer, params, range(2), found)
    with pytest.raises(RuntimeError, match="none for step 2"):
        train(optimizer, params, range(1), found)


def test_a_whole_number_is_a_rate_as_long_as_float64_holds_it():
    largest, weight = int(sys.float_info.max), nn.Parameter(torch.ones(1))
    assert opt.SGD([weight], learning_rate=largest).param_groups[0]["lr"] == sys.float_info.max
    with pytest.raises(ValueError, match="finite"):
        opt.SGD([weight], learning_rate=2 * largest)


@pytest.mark.usefixtures("flags")
def test_skipped_steps_do_not_use_up_a_list_of_rates():
    params = parameters()
    optimizer = opt.SGD(params, [0.3, 0.2])
    for found in (0.0, 1.0, 1.0, 0.0):
        train(optimizer, params, range(1), found)
    assert optimizer.global_step == 2


@pytest.mark.usefixtures("flags")
def test_the_caller_chooses_whether_a_skipped_step_advances_the_schedule():
    for count, want in ((False, 0.1), (True, 0.2)):
        params = parameters()
        optimizer = opt.Adam(params, WarmUpLR(1.0, 10), count_skipped=count)
        for found in (0.0, 1.0):
            train(optimizer, params, range(1), found)
        assert float(optimizer.get_lr()) == pytest.approx(want)
        assert int(optimizer.param_groups[0]["updates"]) == 1  # the bias correction never counts a skip


def test_decay_by_name_only_without_groups_and_biases_are_decayed():
    def moved(params: Any) -> set[str]:
        optimizer = opt.SGD(params, 1.0, weight_decay=0.5)
        for _, p in named:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return {n for n, p in named if p.detach()[0] != 1}

    names = ["fc.weight", "fc.bias", "bn.gamma", "bn.beta", "alphabeta"]
    named = [(n, nn.Parameter(torch.ones(2))) for n in names]
    assert moved(named) == {"fc.weight", "fc.bias"}
    named = [(n, nn.Parameter(torch.ones(2))) for n in names]
    assert moved([{"params": named}]) == set(names)
    named = [(n, nn.Parameter(torch.ones(2))) for n in names]
    assert moved([p for _, p in named]) == set(names)  # no names, no rule


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("found", [None, 0.0])
def test_weight_decay_can_be_a_function_of_the_step(found):
    p = nn.Parameter(torch.ones(1))
    optimizer = opt.Momentum([p], 1.0, 0.0, weight_decay=lambda step: 0.5 / (1 + step))
    for want in (0.5, 0.375):  # 1 (1 - 1/2), then 1/2 (1 - 1/4)
        p.grad = torch.zeros(1)
        optimizer.found_inf = None if found is None else torch.zeros(())
        optimizer.step()
        assert p.item() == want


def test_centralization_in_a_group_follows_decay_and_knows_the_reference_multiple():
    for shape, faithful, want in (((2, 3), False, True), ((2, 3), True, False), ((2, 16), True, True)):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = torch.ones(shape)
        opt.SGD([{"params": [p], "grad_centralization": True}], 1.0, faithful=faithful).step()
        assert (not p.any()) == want


def test_centralized_subtracts_the_mean_of_all_axes_but_the_first():
    g = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    got = opt.centralized(g)
    torch.testing.assert_close(got.mean((1, 2)), torch.zeros(3), rtol=0, atol=1e-7)
    torch.testing.assert_close(g - got, (g - got)[:, :1, :1].expand_as(g))
    assert opt.centralized(g[0, 0]) is not None
    assert torch.equal(opt.centralized(torch.arange(3.0)), torch.arange(3.0))


def test_a_gradient_transform_comes_after_decay_and_before_the_loss_scale():
    p = nn.Parameter(torch.ones(2))
    seen = []

    def transform(grads: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        assert params[0] is p
        seen.append(grads[0].clone())
        return [g + group["lr"] for g in grads]

    p.grad = torch.full((2,), 4.0)
    opt.SGD([p], 0.5, weight_decay=0.25, loss_scale=4.0, gradient_transform=transform).step()
    assert torch.equal(seen[0], torch.full((2,), 5.0))  # 4 + 0.25 * 4 * 1
    assert torch.equal(p.detach(), torch.full((2,), 1 - 0.5 * 5.5 / 4))


def test_trainable_and_untrainable_share_out_the_parameters():
    module = net()
    module["fc"].bias.requires_grad_(False)
    assert [n for n, _ in opt.untrainable_params(module)] == ["fc.bias"]
    assert [n for n, _ in opt.trainable_params(module)] == [n for n, _ in module.named_parameters() if n != "fc.bias"]


def test_a_schedule_drives_a_torch_optimizer():
    schedule = WarmUpLR(0.1, 4).then(CosineDecayLR(0.0, 0.1, 10), at=4)
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = lambda_lr(optimizer, schedule)
    for step in range(6):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(step))
        optimizer.step()
        scheduler.step()


def test_torchs_schedulers_drive_these_optimizers():
    params = parameters()
    optimizer = opt.Adam(params, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(optimizer, params, range(1))
    scheduler.step()
    assert float(optimizer.get_lr()) == pytest.approx(0.05)


# --- bad input


P = parameters()
BAD: list[tuple[str, Callable[[], Any], type[Exception]]] = [
    ("params none", lambda: opt.Adam(None), ValueError),
    ("params empty", lambda: opt.Adam([]), ValueError),
    ("params one tensor", lambda: opt.Adam(P[0]), TypeError),
    ("params number", lambda: opt.Adam(3), TypeError),
    ("params of numbers", lambda: opt.Adam([1.0]), TypeError),
    ("params mixed", lambda: opt.Adam([P[0], {"params": [P[1]]}]), TypeError),
    ("params integer", lambda: opt.Adam([torch.ones(2, dtype=torch.int32)]), TypeError),
    ("one parameter twice", lambda: opt.Adam([{"params": [P[0]]}, {"params": [P[0]]}]), RuntimeError),
    ("group without params", lambda: opt.Adam([{"lr": 0.1}]), KeyError),
    ("group empty", lambda: opt.Adam([{"params": []}]), ValueError),
    ("group key unknown", lambda: opt.Adam([{"params": [P[0]], "grad_centralizaiton": True}]), KeyError),
    ("centralization 1", lambda: opt.Adam([{"params": [P[0]], "grad_centralization": 1}]), TypeError),
    ("order beside lr", lambda: opt.Adam([{"params": [P[0]]}, {"order_params": [P[0]], "lr": 1.0}]), ValueError),
    ("order not iterable", lambda: opt.Adam([{"params": [P[0]]}, {"order_params": 1}]), TypeError),
    ("order too short", lambda: opt.Adam([{"params": [P[0], P[1]]}, {"order_params": [P[0]]}]), ValueError),
    ("order foreign", lambda: opt.Adam([{"params": [P[0]]}, {"order_params": [P[1]]}]), ValueError),
    ("order twice", lambda: opt.Adam([{"params": [P[0]]}, *[{"order_params": [P[0]]}] * 2]), ValueError),
    ("order alone", lambda: opt.Adam([{"order_params": [P[0]]}]), ValueError),
    ("lr negative", lambda: opt.Adam([P[0]], -0.1), ValueError),
    ("lr none", lambda: opt.Adam([P[0]], None), TypeError),
    ("lr string", lambda: opt.Adam([P[0]], "0.1"), ValueError),
    ("lr bool", lambda: opt.Adam([P[0]], True), TypeError),
    ("lr two axes", lambda: opt.Adam([P[0]], torch.ones(2, 2)), ValueError),
    ("lr lists unequal", lambda: opt.SGD([{"params": [P[i]], "lr": [0.1] * (i + 1)} for i in (0, 1)]), ValueError),
    ("decay negative", lambda: opt.Adam([P[0]], weight_decay=-1.0), ValueError),
    ("decay string", lambda: opt.Adam([P[0]], weight_decay="x"), TypeError),
    ("decay function for SGD", lambda: opt.SGD([P[0]], weight_decay=lambda step: 0.1), TypeError),
    ("loss scale 0", lambda: opt.Adam([P[0]], loss_scale=0), ValueError),
    ("loss scale negative", lambda: opt.Adam([P[0]], loss_scale=-1.0), ValueError),
    ("loss scale string", lambda: opt.Adam([P[0]], loss_scale="2"), TypeError),
    ("option unknown", lambda: opt.Adam([P[0]], foreach=True), TypeError),
    ("faithful 1", lambda: opt.Adam([P[0]], faithful=1), TypeError),
    ("momentum int", lambda: opt.Momentum([P[0]], 0.1, 1), TypeError),
    ("momentum negative", lambda: opt.Momentum([P[0]], 0.1, -0.9), ValueError),
    ("nesterov without momentum", lambda: opt.SGD([P[0]], nesterov=True), ValueError),
    ("nesterov with dampening", lambda: opt.SGD([P[0]], 0.1, 0.9, 0.1, nesterov=True), ValueError),
    ("beta1 1", lambda: opt.Adam([P[0]], beta1=1.0), ValueError),
    ("beta2 0", lambda: opt.AdaMax([P[0]], beta2=0.0), ValueError),
    ("beta1 int", lambda: opt.Lamb([P[0]], 0.1, beta1=1), TypeError),
    ("eps 0", lambda: opt.AdamWeightDecay([P[0]], eps=0.0), ValueError),
    ("amsgrad and lazy", lambda: opt.Adam([P[0]], use_amsgrad=True, use_lazy=True), ValueError),
    ("lazy and offload", lambda: opt.Adam([P[0]], use_lazy=True, use_offload=True), ValueError),
    ("rmsprop decay 1", lambda: opt.RMSProp([P[0]], decay=1.0), ValueError),
    ("rho 2", lambda: opt.Adadelta([P[0]], rho=2.0), ValueError),
    ("accum negative", lambda: opt.Adagrad([P[0]], -0.1), ValueError),
    ("asgd t0 int", lambda: opt.ASGD([P[0]], t0=10), TypeError),
    ("etas list", lambda: opt.Rprop([P[0]], etas=[0.5, 1.2]), TypeError),
    ("etas order", lambda: opt.Rprop([P[0]], etas=(1.2, 0.5)), ValueError),
    ("etas without growth", lambda: opt.Rprop([P[0]], etas=(0.5, 1.0)), ValueError),
    ("etas without shrinking", lambda: opt.Rprop([P[0]], etas=(1.0, 1.2)), ValueError),
    ("steps order", lambda: opt.Rprop([P[0]], step_sizes=(50.0, 1e-6)), ValueError),
    ("ftrl lr 0", lambda: opt.FTRL([P[0]], learning_rate=0.0), ValueError),
    ("ftrl lr int", lambda: opt.FTRL([P[0]], learning_rate=1), TypeError),
    ("ftrl lr list", lambda: opt.FTRL([P[0]], learning_rate=[0.1]), ValueError),
    ("ftrl lr of a group", lambda: opt.FTRL([{"params": [P[0]], "lr": 0.1}]), ValueError),
    ("ftrl power", lambda: opt.FTRL([P[0]], lr_power=0.5), ValueError),
    ("adafactor lr and relative", lambda: opt.AdaFactor([P[0]], 0.1), ValueError),
    ("adafactor neither", lambda: opt.AdaFactor([P[0]], relative_step=False), ValueError),
    ("adafactor warmup", lambda: opt.AdaFactor([P[0]], 0.1, relative_step=False, warmup_init=True), ValueError),
    ("adafactor decay 1", lambda: opt.AdaFactor([P[0]], weight_decay=1.0), ValueError),
    ("adafactor lr of a group", lambda: opt.AdaFactor([{"params": [P[0]], "lr": 0.1}]), ValueError),
    ("lars of torch", lambda: opt.LARS(torch.optim.SGD(P, 0.1)), TypeError),
    ("lars of lamb", lambda: opt.LARS(opt.Lamb(P, 0.1)), TypeError),
    (
        "lars clip with a changing group",
        lambda: opt.LARS(opt.SGD([{"params": [P[0]], "lr": [0.1, 0.2]}]), use_clip=True),
        ValueError,
    ),
    ("lr of a stranger", lambda: opt.Adam([P[0]]).get_lr_parameter(P[1]), ValueError),
    ("lr of a number", lambda: opt.Adam([P[0]]).get_lr_parameter(1), TypeError),
]


@pytest.mark.parametrize(("call", "error"), [pytest.param(call, error, id=id) for id, call, error in BAD])
def test_bad_input_is_refused_with_the_kind_of_the_reference(call, error):
    with pytest.raises(error):
        call()


# optimizer: its number -> the ends of its range that belong to it, and those that do not
ENDS = {
    "RMSProp": {"decay": ([0], [1]), "momentum": ([0], [-1e-9]), "epsilon": ([], [0])},
    "Adagrad": {"accum": ([0], [-1e-9])},
    "Adadelta": {"rho": ([0, 1], [-1e-9, 1 + 1e-9]), "epsilon": ([], [0])},
    "ProximalAdagrad": {"accum": ([0], [-1e-9]), "l1": ([0], [-1e-9]), "l2": ([0], [-1e-9])},
    "FTRL": {
        "initial_accum": ([0], [-1e-9]),
        "lr_power": ([0], [1e-9]),
        "l1": ([0], [-1e-9]),
        "l2": ([0], [-1e-9]),
        "learning_rate": ([], [0.0]),
    },
    "Adam": {"beta1": ([], [0.0, 1.0]), "beta2": ([], [0.0, 1.0]), "eps": ([], [0])},
    "AdaMax": {"beta1": ([], [0.0, 1.0]), "beta2": ([], [0.0, 1.0]), "eps": ([], [0])},
    "Lamb": {"beta1": ([], [0.0, 1.0]), "beta2": ([], [0.0, 1.0]), "eps": ([], [0])},
    "AdamWeightDecay": {"beta1": ([], [0.0, 1.0]), "beta2": ([], [0.0, 1.0]), "eps": ([], [0])},
    "AdaFactor": {
        "eps": ([], [(0, 1e-3), (1e-30, 0)]),
        "clip_threshold": ([], [0]),
        "decay_rate": ([], [0]),
        "beta1": ([0], [-1e-9, 1]),
        "weight_decay": ([0], [-1e-9, 1]),
    },
    "SGD": {"momentum": ([0], [-1e-9]), "dampening": ([0], [-1e-9])},
    "Momentum": {"momentum": ([0.0], [-1e-9])},
    "Rprop": {"etas": ([], [(0.0, 1.2), (1.0, 1.2), (0.5, 1.0)]), "step_sizes": ([], [(0.0, 1.0), (1.0, 1.0)])},
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_range(name):
    def make(**given: Any) -> None:
        needed = {"AdamWeightDecay": {}, "Momentum": {"momentum": 0.9}}.get(name, {})
        rate = {"learning_rate": 0.1} if name in ("Lamb", "Momentum") else {}
        getattr(opt, name)([P[0]], **(rate | needed | given))

    for key, (taken, refused) in ENDS[name].items():
        for value in taken:
            make(**{key: value})
        for value in refused:
            with pytest.raises(ValueError, match=r"must|need"):
                make(**{key: value})


def test_values_that_look_bad_but_are_legal():
    opt.Adam([P[0]], 0)
    opt.Adam([P[0]], torch.tensor(0.1))
    opt.Adam([P[0]], torch.tensor([0.1, 0.2]))
    opt.Momentum([P[0]], 0.1, 1.5)
    opt.SGD([P[0]], 0.1, 1)
    opt.Adam([P[0]], weight_decay=3, loss_scale=0.5)
    opt.Adam(p for p in P)
    opt.LARS(opt.SGD([P[0]]), lars_filter=lambda x: "bias" not in x.name)


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


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        ("lr", None, TypeError, "a learning rate is a number, a list, a tensor or a schedule, got None"),
        ("lr", "0.1", ValueError, "got the string '0.1'"),
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
    assert [w.item() for w in weights] == [1.0, 1.0]
    assert optimizer.global_step == 0
