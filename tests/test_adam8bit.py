"""Adam with 8-bit moments: torchao's states bit for bit, recorded and live; resuming, skipping, 16-bit weights."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from support import archives, floats
from test_golden_recipes import cases, same
from torch import nn

from mpkit.optimizers import Adam, Adam8bit, AdamW8bit, BFloat16Weights, adam8bit, base
from mpkit.optimizers.adam8bit import decode_moment, dynamic_map, encode_moment

STATE = ("codes1", "scales1", "codes2", "scales2")
KINDS = {"Adam8bit": Adam8bit, "AdamW8bit": AdamW8bit}
RUNS = cases(*KINDS, keys=("map_signed", "cases"))


@pytest.fixture
def recorded_maps(monkeypatch):
    """The maps as the recording's processor made them."""
    (_, z), *_ = archives("map_signed")
    maps = {True: floats(z["map_signed"]), False: floats(z["map_unsigned"])}
    for signed, recorded in maps.items():
        apart = (dynamic_map(signed).view(torch.int32) - recorded.view(torch.int32)).abs()
        assert apart.max() <= 4  # ulps: two roundings here, two there
    monkeypatch.setattr(adam8bit, "dynamic_map", maps.__getitem__)
    monkeypatch.setattr(adam8bit, "_MAPS", {})


@pytest.mark.parametrize("name", RUNS)
def test_states_are_the_recorded_ones_of_torchao_bit_for_bit(name, recorded_maps):
    case, z = RUNS[name]
    arrays = {key: z[f"{case['id']}.{key}"] for key in ("start", "end", "grad", *STATE)}
    w = nn.Parameter(floats(arrays["start"]))
    betas = dict(zip(("beta1", "beta2"), case["betas"]))
    optimizer = KINDS[case["kind"]]([w], case["lr"], **betas, eps=case["eps"], weight_decay=case["weight_decay"])
    for step, grad in enumerate(arrays["grad"]):
        w.grad = floats(grad)
        optimizer.step()
        for key in STATE:
            same(optimizer.state[w][key], arrays[key][step])
    # per step: 8 roundings of an update of at most 4 lr, 3 of the weight
    bound = len(arrays["grad"]) * (2.0**-21 * 4 * case["lr"] + 3 * 2.0**-24 * w.detach().abs().max())
    assert (w.detach() - floats(arrays["end"])).abs().max() <= bound


@pytest.mark.parametrize(("kind", "shape", "decay"), [("Adam8bit", (4096,), 0.0), ("AdamW8bit", (40, 256), 0.1)])
def test_states_are_those_of_the_installed_torchao_bit_for_bit(kind, shape, decay):
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed: pip install 'mpkit[recipes]'")
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.randn(shape)) for _ in range(2))
    theirs.data.copy_(mine.data)
    lr, steps = 1e-2, 6
    ours, peer = KINDS[kind]([mine], lr, weight_decay=decay), getattr(torchao, kind)([theirs], lr, weight_decay=decay)
    for step in range(steps):
        mine.grad = torch.randn(shape) * 10.0**-step
        theirs.grad = mine.grad.clone()
        ours.step()
        with torch.compiler.set_stance("force_eager"):
            peer.step()
        state = peer.state[theirs]
        assert torch.equal(ours.state[mine]["codes1"], state["exp_avg"].codes)
        assert torch.equal(ours.state[mine]["scales1"], state["exp_avg"].scale)
        assert torch.equal(ours.state[mine]["codes2"], state["exp_avg_sq"].codes)
        assert torch.equal(ours.state[mine]["scales2"], state["exp_avg_sq"].scale)
    # torchao's 1 - 0.999 is off by 2^-25, so its root by 1.5e-5 of itself (and 3 times that, if pow errs by an ulp)
    assert (mine - theirs).abs().max() <= steps * (5e-5 * 4 * lr + 3 * 2.0**-24 * mine.abs().max())


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_gets_the_nearest_code_and_a_tie_the_upper_one(signed):
    table = dynamic_map(signed)
    assert len(set(table.tolist())) == 256
    exact = table.double()
    ties = ((exact[1:] + exact[:-1]) / 2).float()  # differences of float32 numbers are exact in float64
    for x in (table, ties, *(torch.nextafter(ties, torch.full_like(ties, side)) for side in (-2.0, 2.0))):
        for part in x.split(255):
            block = torch.ones(256)  # a one in each block keeps the scale at 1
            block[1 : 1 + len(part)] = part
            codes = encode_moment(block, signed)[0][1 : 1 + len(part)].long()
            distance = (part.double()[:, None] - exact).abs()
            nearest = 255 - distance.flip(1).argmin(1)  # of equals the upper one
            excess = distance.gather(1, codes[:, None]).squeeze(1) - distance.amin(1)
            # value - lower and half the gap are rounded to float32: beside a tie the other neighbour is allowed
            assert ((codes == nearest) | (excess <= 2.0**-23 * exact[codes].abs())).all()


def trained(optimizer: torch.optim.Optimizer, w: nn.Parameter, steps: range) -> None:
    for step in steps:
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step)).to(w.dtype)
        optimizer.step()


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_resumed_run_goes_on_bit_for_bit(way):
    small, large = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(64, 64))
    optimizer = AdamW8bit([small, large], 0.01)
    for w in (small, large):
        trained(optimizer, w, range(3))
        w.grad = None
    if way == "state_dict":
        weights = [nn.Parameter(w.detach().clone()) for w in (small, large)]
        resumed = AdamW8bit(weights, 0.5, beta1=0.5)
        resumed.load_state_dict(torch.load(saved(optimizer.state_dict()), weights_only=True))
    else:
        resumed = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        weights = resumed.param_groups[0]["params"]
    assert resumed.state[weights[1]]["codes1"].dtype is torch.uint8
    assert resumed.state[weights[0]].keys() == {"moment1", "moment2"}
    for w, v in zip((small, large), weights):
        trained(optimizer, w, range(3, 6))
        w.grad = None
        trained(resumed, v, range(3, 6))
        v.grad = None
        assert torch.equal(w, v)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("at_hand", [True, False])
def test_an_overflow_changes_neither_weights_nor_codes_and_a_scaler_unscales(at_hand, monkeypatch):
    monkeypatch.setattr(base, "AT_HAND", frozenset({"cpu"} if at_hand else ()))
    torch.manual_seed(0)
    plain, scaled = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    want, optimizer = AdamW8bit([plain], 0.01), AdamW8bit([scaled], 0.01)
    for step, overflow in enumerate((False, True, False)):
        grad = torch.randn(64, 64)
        scaled.grad = grad * 1024
        if overflow:
            scaled.grad[3, 3] = torch.inf
        before = {key: value.clone() for key, value in optimizer.state[scaled].items()}, scaled.detach().clone()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(float(overflow))
        optimizer.step()
        if overflow:
            assert torch.equal(scaled, before[1])
            assert all(torch.equal(optimizer.state[scaled][key], value) for key, value in before[0].items())
            continue
        plain.grad = grad
        want.step()
        assert torch.equal(optimizer.state[scaled]["codes2"], want.state[plain]["codes2"])
        torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6 * (step + 1))  # rates are tensors or numbers
    assert int(optimizer.global_step) == 2


def test_a_static_loss_scale_is_divided_out():
    weights = [nn.Parameter(torch.ones(4096)) for _ in range(2)]
    trained(Adam8bit(weights[:1], 0.01), weights[0], range(2))
    other = Adam8bit(weights[1:], 0.01, loss_scale=256.0)
    for step in range(2):
        weights[1].grad = 256 * torch.randn(4096, generator=torch.Generator().manual_seed(step))
        other.step()
    assert torch.equal(*weights)


def test_sixteen_bit_weights_have_a_master_or_are_rounded_without_one():
    start = torch.linspace(1, 2, 4096)
    exact, low, bare = (nn.Parameter(start.to(d)) for d in (torch.float32, torch.bfloat16, torch.bfloat16))
    exact.data = low.detach().float()
    plain, mastered = AdamW8bit([exact], 1e-4), AdamW8bit([low], 1e-4)
    wrapped = BFloat16Weights(AdamW8bit([bare], 1e-4), "kahan")
    for step in range(20):
        grad = torch.randn(4096, generator=torch.Generator().manual_seed(step)).bfloat16()
        for w, optimizer in ((exact, plain), (low, mastered), (bare, wrapped)):
            w.grad = grad.to(w.dtype)
            optimizer.step()
    assert torch.equal(mastered.state[low]["master"], exact)
    assert torch.equal(low, exact.bfloat16())
    assert (bare.float() - exact).abs().max() <= 2.0**-7  # a gap of bfloat16 there
    inner = next(iter(wrapped.inner.state.values()))
    assert set(inner) == set(STATE)  # no master copy


def test_the_state_takes_a_quarter_of_adam_s_and_a_run_ends_near_it():
    torch.manual_seed(0)
    data, target = torch.randn(128, 64), torch.randn(128, 64)
    losses = {}
    for kind in (Adam, Adam8bit):
        torch.manual_seed(1)
        net = nn.Linear(64, 64)
        optimizer = kind(net.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = (net(data) - target).square().mean()
            loss.backward()
            optimizer.step()
        size = sum(t.nbytes for t in optimizer.state[net.weight].values()) / net.weight.numel()
        losses[kind] = loss.item()
        assert size == 8 if kind is Adam else size == 2 + 8 / 256
    assert losses[Adam8bit] < losses[Adam] * 1.1


def test_a_compiled_step_is_the_eager_one():
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    eager, other = (AdamW8bit([w], 0.01) for w in weights)
    compiled = torch.compile(other.step, backend="eager")
    for step in range(3):
        for w in weights:
            w.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        eager.step()
        compiled()
        assert torch.equal(eager.state[weights[0]]["codes2"], other.state[weights[1]]["codes2"])
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)  # rates are tensors or numbers
    assert int(other.global_step) == 3


def test_only_large_tensors_of_whole_blocks_are_coded():
    weights = [nn.Parameter(torch.ones(n)) for n in (4095, 4096, 4097, 4352)]
    optimizer = Adam8bit(weights)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert ["codes1" in optimizer.state[w] for w in weights] == [False, True, False, True]
    channels_last = nn.Parameter(torch.randn(16, 16, 4, 4).to(memory_format=torch.channels_last))
    straight = nn.Parameter(channels_last.detach().contiguous())
    both = Adam8bit([channels_last, straight])
    for w in (channels_last, straight):
        w.grad = torch.linspace(-1, 1, 4096).view(16, 16, 4, 4).sin()
    both.step()
    assert torch.equal(channels_last, straight)
    assert torch.equal(both.state[channels_last]["codes1"], both.state[straight]["codes1"])


def test_a_zero_block_decodes_to_zero_and_a_nan_shows():
    codes, scale = encode_moment(torch.zeros(512), True)
    assert not decode_moment(codes, scale, True).any()
    bad = torch.ones(512)
    bad[5] = torch.nan
    got = decode_moment(*encode_moment(bad, False), False)
    assert got[:256].isnan().all()
    assert torch.equal(got[256:], torch.ones(256))


def test_bad_input_is_refused_with_the_way_out():
    w = nn.Parameter(torch.ones(4096))
    for wrong, error in (
        (lambda: Adam8bit([w], beta1=1.0), ValueError),
        (lambda: AdamW8bit([w], eps=0.0), ValueError),
        (lambda: AdamW8bit([w], -1.0), ValueError),
        (lambda: AdamW8bit([w], weight_decay="much"), TypeError),
        (lambda: Adam8bit([w], block_size=64), TypeError),
    ):
        with pytest.raises(error):
            wrong()
    optimizer, other = Adam8bit([w]), Adam([w])
    trained(optimizer, w, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="another one"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="another one"):
        other.load_state_dict(before)
    assert torch.equal(optimizer.state[w]["codes1"], before["state"][0]["codes1"])
    w.grad = torch.ones(4096).to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()
    assert np.isclose(optimizer.state_dict()["param_groups"][0]["lr"], 1e-3)
