"""Amaxes in the ordinary recorder, on networks that are copied, compiled and recomputed; which recipe they allow."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from recorded import trace_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpkit.casting import cast_like
from mpkit.diagnose import recommend_recipe, stale_scales
from mpkit.diagnose.words import said
from mpkit.formats import E4M3FN
from mpkit.record import AmaxRecorder, AmaxTrace, Recorder
from mpkit.replay import flushed_by_current_scale
from mpkit.rounding import round_to


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4) * (step + 1)


def run(net: nn.Module, recorder: Recorder, steps: range) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in steps:
        optimizer.zero_grad()
        for part in (batch(step), batch(step) / 2):  # two micro-batches are one step
            loss = net(part).square().mean()
            loss.backward()
        recorder.record(loss)
        optimizer.step()


def test_the_recorder_keeps_the_amaxes_of_every_step():
    net = network()
    recorder = Recorder(net, every=3, amaxes=True)
    run(net, recorder, range(4))
    trace = recorder.amax_trace()
    assert len(trace) == 4
    assert trace.series()["0.input"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (trace.amax > 0).all()
    assert len(recorder.trace().gradients.step) == 2  # histograms keep their own pace
    recorder.close()
    run(net, recorder, range(4, 5))
    assert not recorder.amax_trace().amax[4].any()


def test_a_resumed_recording_goes_on_at_its_step():
    net = network()
    recorder = Recorder(net, amaxes=True)
    run(net, recorder, range(2))
    saved, state = recorder.state_dict(), copy.deepcopy(net.state_dict())
    assert 0 <= saved["seconds"] < 600
    run(net, recorder, range(2, 4))
    whole = recorder.amax_trace()

    other = network()
    other.load_state_dict(state)
    resumed = Recorder(other, amaxes=True)
    resumed.load_state_dict(saved)
    run(other, resumed, range(2, 4))
    assert np.array_equal(resumed.amax_trace().amax, whole.amax[2:])
    resumed.load_state_dict({**saved, "index": 3})  # back by one step: it will be trained again
    assert np.array_equal(resumed.amax_trace().amax, whole.amax[2:3])
    recorder.load_state_dict(saved)
    assert np.array_equal(recorder.amax_trace().amax, whole.amax[:2])


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of itself
def test_recomputed_compiled_and_copied_networks_are_recorded_once():
    net = network()
    recorder = AmaxRecorder(net)
    ways = [
        net,
        lambda x: checkpoint(net, x, use_reentrant=False),
        lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=True),
        torch.compile(net, backend="eager"),
    ]
    for way in ways:
        way(batch(0)).sum().backward()
        recorder.end_step()
    amax = recorder.trace().amax
    assert (amax == amax[0]).all()
    net(batch(0)).sum().backward()
    copy.deepcopy(net)(batch(0) * 100).sum().backward()
    recorder.end_step()
    assert np.array_equal(recorder.trace().amax[-1], amax[0])  # a copy is another network


@pytest.mark.parametrize("make", [lambda net: Recorder(net, amaxes=True, activations=True), AmaxRecorder])
def test_a_watched_network_is_pickled_without_its_recorder(make):
    net = cast_like(nn.Sequential(nn.Linear(4, 2)), "te_hybrid_delayed")
    recorder = make(net)
    other = pickle.loads(pickle.dumps(net))
    assert torch.equal(other(torch.ones(1, 4)), net(torch.ones(1, 4)))
    assert len(pickle.dumps(net)) < 20_000  # not what was recorded
    assert len(copy.deepcopy(net)[0]._forward_hooks) == len(net[0]._forward_hooks)
    recorder.close()
    assert not net[0]._forward_hooks


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_tensor_is_no_stale_scale(bad):
    amax = np.ones((5, 2), dtype=np.float32)
    amax[3, 1] = bad
    trace = AmaxTrace(("0.input", "0.grad"), amax)
    for ask in (stale_scales, recommend_recipe):
        with pytest.raises(ValueError, match=rf"amax of 0.grad is {bad} in step 3: .*trace.amax\[:3\]"):
            ask(trace)
    assert stale_scales(AmaxTrace(trace.tensors, trace.amax[:3])) == []


def test_what_one_scale_flushes_is_counted_as_rounding_has_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.Identity(), nn.Linear(512, 1))
    with torch.no_grad():
        net[0].weight.mul_(torch.linspace(0, -24, 512).exp2()[:, None])  # outputs of many magnitudes
        net[0].bias.zero_()
    recorder = Recorder(net, activations=True, amaxes=True)
    x = torch.randn(32, 64)
    loss = net(x).mean()
    loss.backward()
    recorder.record(loss)
    trace = recorder.trace()
    share = flushed_by_current_scale(trace.activations, E4M3FN)[0, trace.activations.names.index("0")]
    y = net[0](x).detach()
    zero = round_to(y * (448 / y.abs().max()), E4M3FN, overflow="saturate") == 0
    assert share > 0.1
    assert share == pytest.approx(zero.float().mean().item(), abs=0.02)  # within a power of two it is interpolated
    name, reasons = recommend_recipe(recorder.amax_trace(), trace)
    assert name == "mxfp8"
    assert reasons[0].startswith("one scale for ")
    assert recommend_recipe(recorder.amax_trace())[0] == "te_hybrid_delayed"


@pytest.mark.parametrize("shares", [{"w": 4, "a": 6}, {"w": 7, "a": 30, "b": 20, "c": 50}])
def test_the_three_activations_that_lose_most_are_named(shares):
    """Of more than 5 %, the worst first; a tensor of zeros loses nothing."""
    outputs = [torch.cat([torch.ones(100 - n), torch.full((n,), 2.0**-45)]) for n in shares.values()]
    seen = trace_of([torch.ones(1)], activations=trace_of([[*outputs, torch.zeros(100)]]).gradients)
    worst = sorted((-n, name) for name, n in shares.items() if n > 5)[:3]
    reasons = recommend_recipe(AmaxTrace(("a.input",), np.ones((3, 1))), seen)[1]
    assert reasons[:-1] == tuple(said("stale", "flushed", name=name, share=f"{-n:.1f} %") for n, name in worst)


def test_bad_input_is_refused():
    recorder = Recorder(network())
    run(recorder.network, recorder, range(1))
    with pytest.raises(ValueError, match="linear"):
        Recorder(nn.Sequential(nn.Conv2d(1, 1, 1)), amaxes=True)
    with pytest.raises(ValueError, match="activations=True"):
        recommend_recipe(AmaxTrace(("a.input",), np.ones((3, 1), np.float32)), recorder.trace())


def test_of_an_attention_the_gradient_of_its_result_is_recorded():
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.MultiheadAttention(4, 1, batch_first=True)})
    recorder, x = AmaxRecorder(net), torch.randn(2, 3, 4)
    result, _ = net["a"](x, 2 * x, 3 * x)
    (5 * result).sum().backward()
    recorder.end_step()
    seen = recorder.trace().series()
    assert (seen["a.input"][0], seen["a.grad"][0]) == (float(x.abs().max()), 5.0)


def test_an_input_that_is_given_by_its_name_is_recorded():
    net = nn.ModuleDict({"layer": nn.Linear(2, 2), "attention": nn.MultiheadAttention(4, 2, kdim=3, vdim=3)})
    recorder = AmaxRecorder(net)
    keys = torch.full((2, 1, 3), 7.0)
    net["attention"](key=keys, value=keys, query=torch.full((2, 1, 4), 5.0))[0].sum().backward()
    net["layer"](input=torch.full((1, 2), 3.0)).sum().backward()
    recorder.end_step()
    found = recorder.trace().series()
    assert [found[f"{name}.input"].item() for name in net] == [3.0, 5.0]
    assert found["attention.weight"].item() == net["attention"].q_proj_weight.abs().max().item()
