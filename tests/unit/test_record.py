"""The recorder and its trace: exact counts, true scales, round trips, refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded import trace_of
from support import Op, Written, without_a_wait
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpkit import optimizers
from mpkit.boost import FreezeOpt
from mpkit.casting import auto_mixed_precision
from mpkit.policies import preset
from mpkit.record import AmaxTrace, Ranges, Recorder, Trace, exponent_counts
from mpkit.scalers import DynamicLossScaler, DynamicLossScaleUpdateCell, PolicyLossScaler
from mpkit.schedules import CosineDecayLR
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell

COLUMNS = ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds")


def small_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def plain_loop(
    steps: int = 12, unscale: bool = False, every: int = 1, scale: float = 2.0**15, **options: Any
) -> tuple[Trace, list[list[torch.Tensor]]]:
    """A loop that knows nothing of mpkit but the three lines; returns the trace and the true gradients per step."""
    network = auto_mixed_precision(small_network(), "O2")
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
    recorder = Recorder(network, optimizer, scaler, every=every, **options)
    gradients = []
    for i in range(steps):
        x, y = batch(i)
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        recorder.record(loss)
        factor = 1.0 if unscale else 1.0 / scaler.get_scale()
        gradients.append([(p.grad.double() * factor) for p in network.parameters()])
        scaler.step(optimizer)
        scaler.update()
    recorder.close()
    return recorder.trace(), gradients


def recorded(network: nn.Module, loss: torch.Tensor | None = None, **options: Any) -> Trace:
    """One step of a network whose gradients are there."""
    recorder = Recorder(network, **options)
    recorder.record(torch.ones(()) if loss is None else loss)
    return recorder.trace()


def same(a: Trace, b: Trace, *, clock: bool = False) -> None:
    for key in COLUMNS[: len(COLUMNS) - (not clock)]:
        np.testing.assert_array_equal(getattr(a, key), getattr(b, key), err_msg=key)
    for part in ("gradients", "activations"):
        one, two = getattr(a, part), getattr(b, part)
        assert (one is None) == (two is None)
        if one is not None:
            ends = [dataclasses.replace(Ranges.empty(one.names), lowest=lowest) for lowest in (-126, 127)]
            whole = [Ranges.chained([p, *ends]) for p in (one, two)]  # the same bins
            for key in ("names", "size", "step", "zeros", "nonfinite", "largest", "counts"):
                np.testing.assert_array_equal(*(getattr(p, key) for p in whole), err_msg=key)


# --- counting


def test_edges_of_the_counts() -> None:
    smallest, max32 = 2.0**-126, torch.finfo(torch.float32).max
    x = torch.tensor([0.0, -0.0, smallest, smallest / 2, max32, -1.0, math.inf, -math.inf, math.nan])
    counts, zeros, largest = exponent_counts(x)
    assert (counts[1], counts[254], counts[127], counts[255], zeros, counts.sum()) == (1, 1, 1, 3, 3, 6)
    assert math.isnan(largest)
    assert not math.copysign(1, exponent_counts(torch.tensor([-0.0]))[2]) < 0


@pytest.mark.gpu
def test_counts_on_a_gpu_equal_those_on_the_cpu_without_a_host_read() -> None:
    x = torch.randn(100_003) * torch.exp2(torch.randint(-90, 90, (100_003,)))
    on_gpu = x.cuda()
    with without_a_wait():
        got = exponent_counts(on_gpu)
    for a, b in zip(got, exponent_counts(x)):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e25, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_all_gradients_neither_overflows_nor_vanishes_before_a_value_does(size: float, dtype) -> None:
    network = nn.ParameterList([nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 2, 1)])
    for p, g in zip(network, (torch.full((3,), size), torch.zeros(2), torch.full((1,), -size))):
        p.grad = g.to(dtype)
    trace = recorded(network)
    assert trace.grad_norm[0] == pytest.approx(2 * size, rel=1e-6)
    assert not trace.overflow[0]
    for bad in (math.inf, math.nan):
        network[1].grad[0] = bad
        assert recorded(network).overflow[0]


@pytest.mark.parametrize("scale", [0.0, 2.0**-30, 2.0**10, 2.0**120, 3.0])
def test_what_is_counted_is_the_gradient_over_the_scale(scale: float) -> None:
    network = nn.Linear(1000, 1, bias=False)
    network.weight.grad = torch.randn(1, 1000) * torch.logspace(-20, 2, 1000)
    for given in (scale, torch.tensor(scale)):
        recorder = Recorder(network)
        recorder.record(torch.ones(()), scale=given)
        part = recorder.trace().gradients
        counts, zeros, largest = exponent_counts(network.weight.grad * (1 / scale if scale else math.inf))
        assert part.counts[0, 0].sum() == counts[:255].sum()
        assert (part.zeros[0, 0], part.nonfinite[0, 0]) == (zeros, counts[255])
        np.testing.assert_array_equal(part.largest[0, 0], largest)


# --- what is recorded


@pytest.mark.parametrize("unscale", [False, True])
def test_a_plain_loop_with_a_grad_scaler_is_recorded_as_it_was(unscale: bool) -> None:
    trace, gradients = plain_loop(unscale=unscale)
    assert len(trace) == 12
    assert trace.scale.max() > 2.0**15
    for row, true in enumerate(gradients):
        if trace.overflow[row]:
            continue
        for name, values in enumerate(true):
            np.testing.assert_allclose(trace.gradients.largest[row, name], values.abs().max().item(), rtol=1e-6)
        norm = math.sqrt(sum(float((g**2).sum()) for g in true))
        np.testing.assert_allclose(trace.grad_norm[row], norm, rtol=1e-5)
    assert trace.lr.tolist() == [0.1] * 12
    assert (np.diff(trace.seconds) > 0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stepped", ["scaler", "by hand", "scaler at first"])
def test_the_outcome_is_that_of_the_grad_scaler_or_of_the_gradients(stepped: str, fused: bool) -> None:
    """Without looking at the gradients in every step, and with `trace()` called before the step is taken."""
    network = auto_mixed_precision(small_network(), "O2")
    optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    recorder = Recorder(network, optimizer, scaler, every=5)
    want = []
    for i in range(16):
        x, y = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        scaler.scale(loss).backward()
        want.append(any(not p.grad.isfinite().all() for p in network.parameters()))
        recorder.record(loss)
        if i in (0, 1, 5, 6, 7):
            assert recorder.trace().overflow.tolist() == want
        if stepped == "scaler" or (stepped == "scaler at first" and i < 3):
            scaler.step(optimizer)
            scaler.update()
        elif stepped == "by hand" and not want[-1]:
            optimizer.step()
    assert any(want)
    assert stepped != "scaler" or not all(want)
    got = recorder.trace().overflow.tolist()
    unknown = 3 if stepped == "scaler at first" else None  # the one step that the scaler was expected to take
    assert [g for i, g in enumerate(got) if i != unknown] == [w for i, w in enumerate(want) if i != unknown]


def test_an_outcome_that_is_known_stays_when_the_gradients_are_gone() -> None:
    network = small_network()
    optimizer, scaler = torch.optim.SGD(network.parameters(), 0.1), torch.amp.GradScaler("cpu")
    recorder = Recorder(network, optimizer, scaler)
    x, y = batch()
    loss = F.cross_entropy(network(x), y)
    scaler.scale(loss * math.inf).backward()
    recorder.record(loss)
    optimizer.zero_grad()
    assert recorder.trace().overflow.tolist() == [True]


def test_as_a_hook_of_a_step_without_scaling_gradients_are_divided_by_sens() -> None:
    network, traces = small_network(), []
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    for sens in (1.0, 64.0):
        recorder = Recorder(network, format="fp32")
        TrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer, sens, hooks=[recorder])(*batch())
        traces.append(recorder.trace())
    recorder, whole = Recorder(network), WithLossCell(network, nn.CrossEntropyLoss())
    divides = TrainOneStepWithLossScaleCell(whole, optimizer, torch.tensor(64.0), hooks=[recorder])
    divides(*batch())
    for other in (traces[1], recorder.trace()):
        np.testing.assert_allclose(traces[0].gradients.largest, other.gradients.largest)
    assert traces[1].scale.tolist() == [64.0]


def test_sparse_gradients_count_missing_rows_as_zeros_and_complex_ones_are_pairs_of_numbers() -> None:
    network = nn.Embedding(10, 4, sparse=True)
    network(torch.tensor([1, 1, 3])).sum().backward()
    part = recorded(network).gradients
    assert (part.size.tolist(), part.zeros.tolist(), part.largest.tolist()) == ([40], [[32]], [[2.0]])
    weight = nn.Parameter(torch.tensor([1 + 2j, 4j]))
    (weight * weight.conj()).real.sum().backward()
    part = recorded(nn.ParameterList([weight])).gradients
    assert (part.size.tolist(), part.zeros.tolist(), part.largest.tolist()) == ([4], [[1]], [[8.0]])


@pytest.mark.parametrize(
    ("scaler", "name"),
    [
        (DynamicLossScaler(2.0**10, 2, 50), "mindspore_scaler"),
        (DynamicLossScaleUpdateCell(2.0**12, 2, 100), "mindspore_cell"),
        (PolicyLossScaler(preset("megatron")), "megatron"),
        (torch.amp.GradScaler("cpu"), "torch"),
        (torch.amp.GradScaler("cpu", enabled=False), None),
        (None, None),
    ],
)
def test_the_policy_in_use_is_kept(scaler: object, name: str | None) -> None:
    assert Recorder(small_network(), scaler=scaler).trace().meta.get("policy", {}).get("name") == name


SCHEDULE = CosineDecayLR(0.0, 0.5, 10)


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda p: FreezeOpt(optimizers.SGD(p, SCHEDULE)), [SCHEDULE(k) for k in (0, 1, 1, 2)]),
        (lambda p: optimizers.SGD(p, [0.1, 0.2, 0.3]), [0.1, 0.2, 0.2, 0.3]),
    ],
    ids=["FreezeOpt", "list"],
)
def test_the_rate_of_a_schedule_is_that_of_the_coming_step_which_a_skipped_one_does_not_use_up(make, rates) -> None:
    network = nn.Linear(3, 2)
    recorder = Recorder(network)
    scale = DynamicLossScaleUpdateCell(4.0, 2, 1000)
    whole = WithLossCell(network, nn.MSELoss())
    cell = TrainOneStepWithLossScaleCell(whole, make([*network.parameters()]), scale, hooks=[recorder])
    for size in (1.0, math.inf, 1.0, 1.0):  # the second step overflows
        cell(torch.full((1, 3), size), torch.zeros(1, 2))
    assert (recorder.trace().overflow.tolist(), recorder.trace().lr.tolist()) == ([False, True, False, False], rates)


def test_recording_reads_nothing_on_the_host() -> None:
    """On the meta device a read raises."""
    network = small_network().to("meta")
    recorder = Recorder(network, torch.optim.SGD(network.parameters(), torch.tensor(0.1)), activations=True)
    loss = network(batch()[0].to("meta")).sum()
    loss.backward()
    with torch.device("cpu"):  # a default device moves no scale
        for _ in range(2):
            recorder.record(loss, scale=torch.tensor(8.0, device="meta"))
    assert recorder.index == 2


def test_gradients_that_are_not_watched_are_told_of() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    recorder, all_of_it = Recorder(network), Recorder(network.requires_grad_(True))
    network(torch.ones(1, 2)).sum().backward()
    all_of_it.record(torch.ones(()))
    with pytest.warns(RuntimeWarning, match=r"2 parameters have gradients .* 0\.weight"):
        recorder.record(torch.ones(()))


# --- activations


def test_a_module_that_runs_twice_counts_both_times() -> None:
    network = Written(lambda m, x: m.relu(m.relu(m.layer(x)) - 1), layer=nn.Linear(2, 2), relu=nn.ReLU())
    recorder = Recorder(network, activations=True)
    loss = network(torch.randn(3, 2)).sum()
    loss.backward()
    recorder.record(loss)
    part = recorder.trace().activations
    assert (part.names, part.size.tolist()) == (("layer", "relu"), [6, 12])
    assert (part.zeros + part.counts.sum(2) == part.size).all()


def test_activations_are_the_outputs_of_the_leaves_in_recorded_training_steps() -> None:
    """And of no container, no evaluation, no step between two recorded ones, no copy of the network."""

    def run(disturbed: bool) -> Trace:
        network = nn.Sequential(small_network(), nn.Sequential(nn.Identity()))
        recorder = Recorder(network, activations=True, every=2, format="fp32")
        for step in range(4):
            x, y = batch(step)
            if disturbed and step % 2 == 0:
                with torch.no_grad():
                    network(100 * x)
                copy.deepcopy(network)(100 * x)
                copy.copy(network[1][0])(100 * x)
            network.zero_grad()
            loss = F.cross_entropy(network(x if step % 2 == 0 else 100 * x), y)
            loss.backward()
            recorder.record(loss)
        recorder.close()
        assert not any(m._forward_hooks for m in network.modules())
        return recorder.trace()

    quiet, busy = run(False), run(True)
    same(quiet, busy)
    found = quiet.activations
    assert (found.names, found.step.tolist()) == (("0.0", "0.1", "0.2", "1.0"), [0, 2])
    assert (found.largest[1] < 20 * found.largest[0]).all()
    assert found.size.tolist() == [40, 40, 24, 24]
    assert found.largest[0, 2] == small_network()(batch()[0]).abs().max().item()


@pytest.mark.parametrize(
    ("give", "values"),
    [
        (lambda x: (x, 2 * x), 8), (lambda x: {"a": [x, 8 * x], "b": x > 0, "c": None}, 8),
        (lambda x: torch.return_types.max((8 * x, x.argmax(0))), 4), (lambda x: (8 * x).to_sparse(), 4),
        (lambda x: torch.nested.nested_tensor([x, 8 * x], layout=torch.jagged), 8), (lambda x: "nothing", 0),
    ],
    ids=["tuple", "dict", "named tuple", "sparse", "nested", "none"],
)  # fmt: skip
def test_activations_are_all_float_tensors_of_an_output(give, values) -> None:
    network = nn.Sequential(nn.Linear(3, 4, bias=False), Op(give))
    recorder = Recorder(network, activations=True, format="fp32")
    network(torch.ones(3))
    network[0].weight.grad = torch.ones(4, 3)
    recorder.record(torch.ones(()))
    recorder.record(torch.ones(()))  # a step in which no module ran: there is nothing to record of activations
    found = recorder.trace().activations
    assert (found.step.tolist(), found.size.tolist()) == ([0], [4, values])
    assert (found.largest[0, 1] > found.largest[0, 0]) == bool(values)


def test_the_states_of_an_lstm_are_recorded_under_a_casting_level_too() -> None:
    network = auto_mixed_precision(nn.ModuleDict({"lstm": nn.LSTM(3, 5)}), "O1", torch.bfloat16)
    recorder = Recorder(network, activations=True, format="bf16")
    out, (h, c) = network["lstm"](torch.ones(2, 7, 3))
    out.sum().backward()
    recorder.record(torch.ones(()))
    found = recorder.trace().activations
    assert found.size.tolist() == [out.numel() + h.numel() + c.numel()]
    assert found.largest.item() == max(t.abs().max().item() for t in (out, h, c))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_counted_once(reentrant: bool) -> None:
    def run(forward):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        recorder = Recorder(network, activations=True)
        for _ in range(2):  # steps
            for _ in range(2):  # micro-batches
                loss = forward(network, torch.randn(3, 4).requires_grad_()).sum()
                loss.backward()
            recorder.record(loss)
        return recorder.trace()

    seen = run(lambda network, x: checkpoint(network, x, use_reentrant=reentrant))
    plain = run(lambda network, x: network(x))
    assert seen.activations.size.tolist() == [24, 24, 12]
    same(seen, plain)


# --- a resumed recording


@pytest.mark.parametrize("every", [1, 3])
def test_copying_to_the_host_now_and_then_changes_nothing(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    options = {"steps": 17, "scale": 2.0**24, "every": every, "activations": True}
    whole = plain_loop(**options)[0]
    monkeypatch.setattr("mpkit.record.columns.FLUSH", 4)
    same(plain_loop(**options)[0], whole)


@pytest.mark.parametrize(
    ("first", "later", "joined"),
    [
        ([1.0, 2.0, 4.0], [1.5, 2.0], [1.0, 2.0, 4.0, 5.5, 6.0]),  # a new recorder begins at zero
        ([1.0, 2.0, 4.0], [4.0, 7.0], [1.0, 2.0, 4.0, 8.0, 11.0]),  # so does one that began as late as the other ended
        ([1.0, 2.0, 4.0], [4.5, 5.0], [1.0, 2.0, 4.0, 4.5, 5.0]),  # a resumed one goes on with its clock
        ([], [3.0, 9.0], [3.0, 9.0]),
    ],
)
def test_the_clock_of_joined_traces_goes_on(first, later, joined) -> None:
    parts = []
    for seconds, start in ((first, 0), (later, len(first))):
        trace, step = trace_of([torch.ones(2)] * 3).before(len(seconds)), np.arange(start, start + len(seconds))
        moved = dataclasses.replace(trace.gradients, step=step)
        moved = {"gradients": moved, "measured": {"fp16": step + 0.5}}
        parts.append(dataclasses.replace(trace, step=step, seconds=np.array(seconds, float), **moved))
    both = parts[0] + parts[1]
    assert both.seconds.tolist() == joined
    assert both.gradients.step.tolist() == both.step.tolist() == list(range(len(joined)))
    assert (both.measured["fp16"] == both.step + 0.5).all()


def test_traces_of_other_networks_or_formats_are_not_joined() -> None:
    one = trace_of([torch.ones(2)])
    named = dataclasses.replace(one, gradients=dataclasses.replace(one.gradients, names=("other",)))
    for other in (named, dataclasses.replace(one, format="bf16"), dataclasses.replace(one, activations=one.gradients)):
        with pytest.raises(ValueError, match="joined"):
            one.before(0) + other


# --- traces and files


def test_a_trace_that_cannot_be_saved_leaves_the_file_alone(tmp_path: Path) -> None:
    trace, _ = plain_loop(steps=3)
    trace.save(tmp_path / "t.npz")
    with pytest.raises(TypeError, match="JSON"):
        dataclasses.replace(trace, meta={"what": object()}).save(tmp_path / "t.npz")
    assert len(Trace.load(tmp_path / "t.npz")) == 3


def test_save_and_load_give_the_same_trace(tmp_path: Path) -> None:
    """What computed in float32 or int32 too."""
    trace, _ = plain_loop(steps=5, activations=True, meta={"note": "a test", "numbers": [1, 2]})
    narrow = {"step": np.int32, "loss": np.float32, "scale": np.int64, "seconds": np.float16}
    columns = {key: getattr(trace, key).astype(dtype) for key, dtype in narrow.items()}
    ranges = dataclasses.replace(trace.gradients, zeros=trace.gradients.zeros.astype(np.int32))
    other = dataclasses.replace(trace, **columns, gradients=ranges, measured={"fp16": np.ones(5, np.float32)})
    for held in (trace, other):
        held.save(tmp_path / "t.npz")
        back = Trace.load(tmp_path / "t.npz")
        same(back, held, clock=True)
        assert back.format == trace.format
        assert back.meta == dict(trace.meta) | {"policy": trace.meta["policy"] | {"layers": []}}
        np.testing.assert_equal(dict(back.measured), dict(held.measured))
    amaxes = AmaxTrace(("a", "b"), np.ones((3, 2)))
    amaxes.save(tmp_path / "b.npz")
    np.testing.assert_array_equal(AmaxTrace.load(tmp_path / "b.npz").amax, amaxes.amax)


def changed_head(key: str, value: object):
    def change(arrays: dict[str, Any]) -> dict[str, Any]:
        head = json.loads(str(arrays["head"]))
        (head["gradients"] if key == "names" else head)[key] = value
        return arrays | {"head": np.array(json.dumps(head))}

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: {key: value for key, value in a.items() if key != "scale"}, "scale"),
        (lambda a: {"x": np.zeros(3)}, "head"),
        (lambda a: a | {"loss": a["loss"][:-1]}, "loss"),
        (lambda a: a | {"loss": np.array([{}], dtype=object)}, "damaged"),
        (lambda a: a | {"gradients_counts": a["gradients_counts"] + 1}, "more values"),
        (lambda a: a | {"gradients_nonfinite": a["gradients_nonfinite"] + 1}, "more values"),
        (lambda a: a | {"step": a["step"][::-1].copy()}, "ascend"),
        (lambda a: a | {"step": a["step"].clip(1)}, "ascend"),  # the first two are alike
        (lambda a: a | {"scale": -a["scale"]}, "loss scale"),
        (lambda a: a | {"gradients_largest": -a["gradients_largest"]}, "largest"),
        (changed_head("format", "fp99"), "fp99"),
        (changed_head("meta", [1]), "meta"),
        (changed_head("names", [1, 2, 3, 4]), "names"),
        (changed_head("schema", "other/1"), "schema"),
    ],
)
def test_a_foreign_file_is_a_value_error_that_says_what(tmp_path: Path, change, says: str) -> None:
    path = tmp_path / "t.npz"
    plain_loop(steps=3)[0].save(path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **change(arrays))
    with pytest.raises(ValueError, match=says):
        Trace.load(path)
    with pytest.raises(ValueError, match="AmaxTrace" if says != "damaged" else says):
        AmaxTrace.load(path)


@pytest.mark.parametrize(
    ("values", "lowest", "counts"),
    [
        ([0.0, 0.0], 0, [0]),  # nothing to count: one empty bin, that of 1
        ([2.0**-126], -126, [1]),
        ([2.0**127], 127, [1]),
        ([0.25, 3.0, 1.5, 0.0], -2, [1, 0, 1, 1]),
        ([math.inf, 1.0], 0, [1]),  # no bin for what is not finite
    ],
    ids=str,
)
def test_a_recorded_histogram_spans_the_exponents_that_occur(values, lowest, counts) -> None:
    network = nn.Linear(len(values), 1, bias=False)
    network.weight.grad = torch.tensor([values])
    part = recorded(network).gradients
    assert (part.lowest, part.counts[0, 0].tolist()) == (lowest, counts)
    assert (part.zeros[0, 0], part.nonfinite[0, 0]) == (values.count(0.0), values.count(math.inf))


def test_the_largest_finite_magnitude_of_a_row() -> None:
    """Exact where all is finite; else the upper edge of the highest bin, whose powers of two are all that is known."""
    rows = ([3.0, 0.0], [math.inf, 2.5], [0.0, 0.0], [math.nan, 0.5], [math.inf, math.inf])
    found = trace_of([torch.tensor(row) for row in rows]).gradients
    assert found.finite_largest().tolist() == [3.0, 4.0, 0.0, 1.0, 0.0]


def test_a_parameter_without_a_gradient_in_a_step_counts_nothing() -> None:
    network = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(3)])
    recorder = Recorder(network)
    for i in (0, 1):
        network[i].grad, network[1 - i].grad = torch.tensor([1.0, 3.0, 0.0]), None
        recorder.record(torch.ones(()))
    found = recorder.trace().gradients
    assert (found.counts.sum(2).tolist(), found.zeros.tolist()) == ([[2, 0, 0], [0, 2, 0]], [[1, 0, 0], [0, 1, 0]])
    assert (found.largest.tolist(), found.size.tolist()) == ([[3, 0, 0], [0, 3, 0]], [3, 3, 0])


def test_frames_have_one_row_per_step_or_per_step_and_name() -> None:
    trace, _ = plain_loop(steps=6)
    assert trace.to_frame().shape == (6, 6)
    frame = trace.to_frame("gradients")
    assert (len(frame), frame.loc[(2, "0.weight"), "size"]) == (24, 30)
    for part in ("activations", "weights"):
        with pytest.raises(ValueError, match=r"part must|activations"):
            trace.to_frame(part)
    for values, smallest in (([0.0, 0.0], 0), ([4.0, 1.0, 0.25], -2), ([math.nan], 0)):
        found = trace_of([torch.tensor(values)], form="fp32").to_frame("gradients")
        assert found.smallest_exponent.tolist() == [smallest]


# --- refusals

NETWORK = small_network()
READY = small_network()
READY(batch()[0]).sum().backward()
CELL = DynamicLossScaleUpdateCell(2.0**12, 2, 100)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Recorder(NETWORK, meta={"network": NETWORK}), TypeError, "JSON"),
        (lambda: Recorder(nn.ReLU()), ValueError, "requires_grad"),
        (lambda: Recorder(NETWORK).amax_trace(), ValueError, "amaxes=True"),
        (lambda: Recorder(NETWORK).record(torch.tensor(1.0)), RuntimeError, "gradient"),
        (lambda: Recorder(READY).record(1.0), TypeError, "loss"),
        (lambda: Recorder(READY).record(torch.ones(2)), ValueError, "loss"),
        (lambda: Recorder(READY).record(torch.tensor(1 + 1j)), ValueError, "loss"),
        (lambda: Recorder(READY).record(torch.ones(()), scale=-1.0), ValueError, "scale"),
        (lambda: Recorder(READY).record(torch.ones(()), scale="x"), TypeError, "scale"),
        (lambda: Recorder(READY).record(torch.ones(()), scale=torch.tensor(math.nan)), ValueError, "scale"),
        (lambda: Recorder(READY).record(torch.ones(()), scale=torch.ones(2)), ValueError, "scale"),
        (lambda: Recorder(READY).record(torch.ones(()), unscaled=1), TypeError, "unscaled"),
        (lambda: Recorder(READY, scaler=CELL).record(torch.ones(())), TypeError, "scale"),
    ],
)
def test_wrong_arguments_are_refused_at_once(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_scale_of_one_element_is_a_scale_whatever_its_shape() -> None:
    recorder = Recorder(READY)
    for scale in (torch.tensor([2.0]), torch.tensor(2.0, dtype=torch.bfloat16), 2, math.inf):
        recorder.record(torch.ones((1, 1)), scale=scale)
    assert recorder.trace().scale.tolist() == [2.0, 2.0, 2.0, math.inf]
