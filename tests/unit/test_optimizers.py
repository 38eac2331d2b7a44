"""What every optimizer does: skip, resume, be copied, follow a master, compile, go on after what others write."""

from __future__ import annotations

import copy
import io
import math
from functools import partial

import pytest
import torch
from oracles import FIXED_RATE, MEMBERS
from stepping import bits, give_gradients, parameters, same, snapshot, stepped, train
from support import assert_same, without_a_wait
from torch import Tensor, nn

from mpkit import optimizers as opt
from mpkit.boost import GroupLossScaleManager
from mpkit.optimizers import base
from mpkit.policies import preset
from mpkit.scalers import DynamicLossScaleManager, DynamicLossScaler, PolicyLossScaler, check_and_unscale_
from mpkit.schedules import CosineDecayLR, PolynomialDecayLR

SIGNED = {"master", "velocity", "moment1", "mean", "before", "average", "linear"}
DECAYING = {name for name in MEMBERS if not name.startswith("AdaFactor")}


@pytest.fixture(params=MEMBERS)
def name(request) -> str:
    return request.param


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
def test_host_and_device_counters_give_the_same_weights(name):
    on_host, on_device = parameters(), parameters()
    train(MEMBERS[name](on_host, weight_decay=0.01), on_host, range(6))
    train(MEMBERS[name](on_device, weight_decay=0.01), on_device, range(6), found=0.0)
    for a, b in zip(on_host, on_device):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("found", [None, 0.0])
def test_steps_write_to_the_same_memory_and_keep_no_more_of_it(name, found):
    """What the capture of a CUDA graph needs; on the meta device, which refuses every read as well."""
    params = [nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float16)) for shape in ((3, 4), (5,))]
    decay = {"weight_decay": 0.01} if name in DECAYING else {}
    rate = {} if name in FIXED_RATE else {"lr": PolynomialDecayLR(0.1, 0.01, 3, 1.0)}
    optimizer = MEMBERS[name](params, **decay, **rate)

    def kept() -> list[Tensor]:
        counts = [group["updates"] for group in optimizer.param_groups] + [optimizer._counts["global_step"]]
        state = [t for p in params for t in optimizer.state.get(p, {}).values()]
        return [t for t in [*params, *state, *counts] if isinstance(t, Tensor)]

    for step in range(4):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.found_inf = None if found is None else torch.empty((), device="meta")
        with torch.device("cpu"):  # where somebody has set a default device
            optimizer.step()
        if not step:
            held = kept()
    assert len(kept()) == len(held) > len(params)
    assert all(a is b for a, b in zip(kept(), held))


def test_an_optimizer_is_a_key_and_told_as_torch_s_are(name):
    optimizer = MEMBERS[name](parameters())
    assert {optimizer: name}[optimizer] == name
    assert repr(optimizer).startswith(f"{type(optimizer).__name__} (\nParameter Group 0\n")


@pytest.mark.parametrize("name", [name for name in MEMBERS if "-" not in name])
def test_a_step_that_may_skip_is_one_graph(name):
    made = []

    def counted(graph, inputs):
        made.append(graph)
        return graph

    pair = [(params, MEMBERS[name](params, weight_decay=0.01)) for params in (parameters()[:2], parameters()[:2])]
    torch._dynamo.reset()
    compiled = torch.compile(pair[0][1].step, fullgraph=True, backend=counted)
    for step in range(4):
        for (params, optimizer), call in zip(pair, (compiled, pair[1][1].step)):
            give_gradients(params, step)
            optimizer.found_inf = torch.full((), float(step == 2))
            call()
    assert len(made) == 2  # the first step begins the state
    assert pair[0][1].global_step == pair[1][1].global_step == 3
    for p, q in zip(pair[0][0], pair[1][0]):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


def test_a_large_tensor_moves_as_a_small_one(name, monkeypatch):
    pair = []
    for large in (base.LARGE, 4):
        monkeypatch.setattr(base, "LARGE", large)
        params = parameters()
        train(MEMBERS[name](params, weight_decay=0.01), params, range(3))
        pair.append([bits(p) for p in params])
    assert same(*pair)


@pytest.mark.usefixtures("flags")
def test_a_loaded_state_of_16_bits_continues_bit_for_bit(name):
    through, copied = parameters(torch.float16), parameters(torch.float16)
    whole, half = MEMBERS[name](through, weight_decay=0.01), MEMBERS[name](copied, weight_decay=0.01)
    train(whole, through, range(5), 0.0)
    train(half, copied, range(3), 0.0)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = MEMBERS[name](copied)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved)
    kept = copy.deepcopy(saved)
    train(resumed, copied, range(3, 5), 0.0)
    assert_same(saved, kept)
    assert same(snapshot(whole, through), snapshot(resumed, copied))
    assert resumed.state_dict()["global_step"] == 5


@pytest.mark.parametrize("kept", [1, 3])
def test_the_state_of_another_number_of_parameters_is_refused_in_our_words(name, kept):
    saved = MEMBERS[name](parameters()[:kept]).state_dict()
    with pytest.raises(ValueError, match=f"needs 2 entries, got {kept}"):
        MEMBERS[name](parameters()[:2]).load_state_dict(saved)


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
    params, calls = parameters(), []
    optimizer = MEMBERS[name](params)

    def closure() -> Tensor:
        calls.append(loss := sum((p**2).sum() for p in params))
        loss.backward()
        return loss

    assert [optimizer.step(closure)] == calls
    assert optimizer._step_supports_amp_scaling  # again: only while a plain closure runs nothing will be unscaled
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
    with without_a_wait():
        b.step()
    assert same(snapshot(b, there), before)
    for p, q in zip(here, there):
        torch.testing.assert_close(p, q.cpu(), rtol=2e-5, atol=2e-6)


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


def one_weight(dtype=torch.float32, value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


def moved(optimizer, p, gradient, found=None):
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
    assert moved(optimizer, p, 1.0, found) == -0.125
    for write in (
        lambda: p.data.copy_(torch.tensor([5.0])),  # .data: the version counter does not see it
        lambda: p.data.fill_(5.0),
        lambda: setattr(p, "data", torch.full((1,), 5.0, dtype=dtype)),
    ):
        write()
        assert moved(optimizer, p, 0.0, found) == 5.0
        assert moved(optimizer, p, 8.0, found) == 4.0


def test_a_network_cast_after_its_optimizer_was_used_trains_on():
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(1.0)
    optimizer = opt.Momentum(net.parameters(), 0.5, 0.0)
    moved(optimizer, net.weight, 1.0)
    net.half()
    assert moved(optimizer, net.weight, 1.0) == 0.0
    assert optimizer.state[net.weight]["master"].dtype == torch.float32
    net.float()
    assert moved(optimizer, net.weight, 1.0) == -0.5
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


@pytest.mark.usefixtures("flags")
def test_a_schedule_on_the_device_gives_float64_weights_all_their_digits():
    p = one_weight(torch.float64)
    optimizer = opt.SGD([p], CosineDecayLR(0.0, 0.1, 10))
    assert moved(optimizer, p, 1.0, 0.0) == -0.1
    assert moved(optimizer, p, 1.0, 0.0) == pytest.approx(-0.1 - 0.05 * (1 + math.cos(math.pi / 10)), rel=1e-15)


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
