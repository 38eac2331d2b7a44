"""bfloat16 weights without a master copy: rounding bit for bit torchao's, updates that arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import archives, floats
from torch import nn

from mpkit.boost import FreezeOpt
from mpkit.optimizers import BFloat16Weights, stochastic_bf16
from mpkit.optimizers.bf16 import _nearest_bf16

GOLDEN = [z for _, z in archives("x", "r", "rounded")]


@pytest.mark.parametrize("z", GOLDEN)
def test_stochastic_rounding_with_given_bits_is_torchao_s(z):
    got = stochastic_bf16(floats(z["x"]), torch.from_numpy(z["r"].astype(np.int32)))
    assert np.array_equal(got.view(torch.int16).numpy().view(np.uint16), z["rounded"])


def test_the_mean_is_exact_and_special_values_stay():
    x = torch.full((1 << 16,), 1 + 2.0**-9)  # a quarter of the gap 2^-7 above 1
    y = stochastic_bf16(x, torch.arange(1 << 16, dtype=torch.int32))
    assert set(y.tolist()) == {1.0, 1 + 2.0**-7}
    assert y.double().mean() == 1 + 2.0**-9  # every value of the 16 bits once: no luck in it
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # cut to 16 bits this would be inf
    assert stochastic_bf16(payload).isnan().all()
    assert str(stochastic_bf16(special).tolist()) == "[nan, inf, -inf, 0.0, -0.0]"


def drifted(way: str | None, steps: int = 2000, step: float = 1e-4) -> torch.Tensor:
    torch.manual_seed(0)
    start = (1 + torch.rand(512)).bfloat16()
    w = nn.Parameter(start.clone())
    inner = torch.optim.SGD([w], lr=step)
    optimizer = inner if way is None else BFloat16Weights(inner, way, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    return w.detach().double() - start.double()


def test_small_updates_arrive():
    assert drifted(None, 50).abs().max() == 0  # plain bfloat16 forgets them all
    assert (drifted("kahan", 500) + 0.05).abs().max() < 2.0**-8 + 500 * 2.0**-17  # half a gap of w, and of c each step
    exact, noise = drifted("stochastic", 500).mean(), 2.0**-7 * (500 * 1e-4 / 2.0**-7 / 512) ** 0.5
    assert abs(exact + 0.05) < 4 * noise


def test_a_kahan_step_changes_weight_and_remainder_by_the_update():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(1000).bfloat16())
    optimizer = BFloat16Weights(torch.optim.SGD([w], lr=1.0), "kahan")
    for _ in range(20):
        before = w.double() + optimizer.state_dict()["lost"][0].double()
        w.grad = (torch.randn(1000) * 1e-3).bfloat16()
        optimizer.step()
        after = w.double() + optimizer.state_dict()["lost"][0].double()
        error = (after - (before - w.grad.double())).abs()
        assert (error <= 2.0**-16 * w.abs().double() + 2.0**-24).all()


@pytest.mark.filterwarnings("ignore")  # torch.compile has some of its own
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_kahan_step_keeps_what_rounding_lost(backend):
    torch.compiler.reset()
    w = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = BFloat16Weights(torch.optim.SGD([w], lr=2.0**-12), "kahan")
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(64):
        w.grad = torch.ones_like(w)
        step()
    assert set(w.tolist()) == {1 - 64 * 2.0**-12}
    torch.compiler.reset()


def test_rounding_in_bits_is_torch_s_cast():
    x = torch.cat([torch.arange(0, 2**32, 65521).to(torch.int32), torch.arange(0x3F808000, 0x3F828000, 2**14)])
    x = torch.cat([x.to(torch.int32), torch.tensor([0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 1, 0x8000, 0x8001])]).int()
    values = torch.cat([x.view(torch.float32), -x.view(torch.float32)])
    values = values[~values.isnan()]
    assert torch.equal(_nearest_bf16(values), values.bfloat16().float())
    assert _nearest_bf16(torch.tensor([torch.nan])).isnan()


@pytest.mark.parametrize("before", [1000.0, -1000.0, 3.0e38])
@pytest.mark.parametrize("after", [0.0, 2.0**-7, -2.0])
def test_a_weight_that_somebody_writes_leaves_no_remainder_of_the_old_one(before, after):
    w = nn.Parameter(torch.tensor([before], dtype=torch.bfloat16))
    optimizer = BFloat16Weights(torch.optim.SGD([w], lr=1.0), "kahan")
    w.grad = torch.tensor([-1.0 if before > 0 else 1.0], dtype=torch.bfloat16) * abs(before) * 2.0**-9
    optimizer.step()
    if before > 3e38:  # past the largest number the weight is inf and what was lost NaN
        for _ in range(8):
            optimizer.step()
        assert w.isinf()
    with torch.no_grad():
        w.fill_(after)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert w.item() == after


@pytest.mark.parametrize("way", ["stochastic", "kahan"])
def test_adam_resumes_bit_for_bit_and_schedulers_reach_it(way):
    def made() -> tuple[nn.Module, BFloat16Weights]:
        torch.manual_seed(0)
        net = nn.Linear(8, 4).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(3)
        return net, BFloat16Weights(torch.optim.AdamW(net.parameters(), 1e-2), way, generator=generator)

    def train(net: nn.Module, optimizer: BFloat16Weights, start: int) -> None:
        for step in range(start, start + 4):
            optimizer.zero_grad()
            net(torch.full((2, 8), 0.1 * step, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()

    net, optimizer = made()
    train(net, optimizer, 0)
    other, resumed = made()
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(net, optimizer, 4)
    train(other, resumed, 4)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))
    assert all(p.dtype is torch.bfloat16 for p in net.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.clone() for p in net.parameters()]
    train(net, optimizer, 8)
    if way == "kahan":
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    assert optimizer.optimizer.param_groups[0]["lr"] == 0


def test_an_optimizer_that_has_made_steps_goes_on_in_float32():
    w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    inner = torch.optim.Adam([w])
    w.grad = torch.full_like(w, 3.0)
    inner.step()
    first = inner.state[w]["exp_avg"].float()
    optimizer = BFloat16Weights(inner, "kahan")
    optimizer.step()
    (state,) = inner.state.values()
    assert {x.dtype for x in state.values()} == {torch.float32}
    assert torch.equal(state["exp_avg"], first.lerp(w.grad.float(), 0.1))  # in bfloat16 this would be 0.5703125
    assert state["exp_avg"].bfloat16().float().ne(state["exp_avg"]).all()


def test_bad_input_is_refused_with_the_way_out():
    low = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    for wrong, error, words in (
        (lambda: BFloat16Weights([low]), TypeError, "torch.optim.Optimizer"),
        (lambda: BFloat16Weights(torch.optim.SGD([low]), "nearest"), ValueError, "kahan"),
        (lambda: BFloat16Weights(torch.optim.SGD([nn.Parameter(torch.ones(1))])), ValueError, "bfloat16"),
        (lambda: BFloat16Weights(torch.optim.LBFGS([low])), TypeError, "LBFGS calls the loss several times"),
        (lambda: BFloat16Weights(FreezeOpt(torch.optim.SGD([low]))), TypeError, "FreezeOpt.BFloat16Weights"),
        (lambda: stochastic_bf16(low), TypeError, "float32"),
        (lambda: stochastic_bf16(torch.ones(2), torch.ones(1)), ValueError, "shape"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    optimizer = BFloat16Weights(torch.optim.SGD([low]), "kahan")
    with pytest.raises(ValueError, match="way"):
        BFloat16Weights(torch.optim.SGD([low]), "stochastic").load_state_dict(optimizer.state_dict())
