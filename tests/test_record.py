"""The recorder and its trace: exact counts, true scales, round trips, refusals."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpkit import optimizers
from mpkit.boost import FreezeOpt
from mpkit.casting import auto_mixed_precision
from mpkit.policies import preset
from mpkit.record import AmaxTrace, Ranges, Recorder, Trace, exponent_counts
from mpkit.record.counts import host_counts, total_norm
from mpkit.record.rows import Rows, _host, noted
from mpkit.record.scale import scale_of
from mpkit.record.trace import join
from mpkit.scalers import DynamicLossScaler, DynamicLossScaleUpdateCell, PolicyLossScaler
from mpkit.schedules import CosineDecayLR
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell


def small_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def slow_counts(values: np.ndarray) -> dict[int, int]:
    """Exponent -> count by math.frexp, an independent implementation."""
    found: dict[int, int] = {}
    for v in values.astype(np.float64).tolist():
        if math.isfinite(v) and abs(v) >= 2.0**-126:
            e = math.frexp(v)[1] - 1
            found[e] = found.get(e, 0) + 1
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 16383, 16385, 262_145])
def test_counts_equal_a_count_by_frexp(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-120, 120, (size,), generator=generator))
    x[::3] = 0
    kept = x.clone()
    counts, zeros, largest = exponent_counts(x)
    want = slow_counts(x.numpy())
    assert {e - 127: n for e, n in enumerate(counts.tolist()) if n} == want
    assert int(zeros) == size - sum(want.values())
    assert float(largest) == float(x.abs().max())
    assert torch.equal(x, kept)  # counting must not write into the gradient


def test_edges_of_the_counts():
    smallest, max32 = 2.0**-126, torch.finfo(torch.float32).max
    x = torch.tensor([0.0, -0.0, smallest, smallest / 2, max32, -1.0, math.inf, -math.inf, math.nan])
    counts, zeros, largest = exponent_counts(x)
    assert (counts[1], counts[254], counts[127], counts[255], zeros) == (1, 1, 1, 3, 3)
    assert counts.sum() + zeros == 9
    assert math.isnan(largest)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert exponent_counts(torch.tensor([1.5, 0.0], dtype=dtype))[0][127] == 1
    assert exponent_counts(torch.empty(0))[0].sum() == 0


@pytest.mark.parametrize("highest", [-1, 20])  # below and above 2, where the counting differs
@pytest.mark.parametrize("factor", [2.0**-10, 2.0**-120, 0.3, 2.0**30, math.inf])
def test_counts_and_norm_of_a_multiple(highest, factor):
    generator = torch.Generator().manual_seed(highest)
    x = torch.randn(20_003, generator=generator) * torch.exp2(
        torch.randint(-60, highest, (20_003,), generator=generator)
    )
    x[::3] = 0
    counts, zeros, largest, norm = host_counts(x, factor)
    multiple = (x * factor).numpy()
    want = slow_counts(multiple)
    assert {e - 127: n for e, n in enumerate(counts[:255].tolist()) if n} == want
    assert counts[255] == (~np.isfinite(multiple)).sum()
    assert counts.sum() + zeros == len(x)
    np.testing.assert_equal(largest, np.abs(multiple).max())
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-5)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e25, 3e38])
def test_the_norm_neither_overflows_nor_vanishes_before_a_value_does(size):
    x = [torch.full((3,), size), torch.zeros(2), torch.full((1,), -size)]
    assert total_norm(x) == pytest.approx(2 * float(np.float32(size)), rel=1e-6)
    assert host_counts(x[0])[3] == pytest.approx(3**0.5 * float(np.float32(size)), rel=1e-6)
    for bad in (math.inf, math.nan):
        assert not math.isfinite(total_norm([*x, torch.tensor([bad])]))


@pytest.mark.gpu
def test_counts_on_a_gpu_equal_those_on_the_cpu_without_a_host_read():
    x = torch.randn(100_003) * torch.exp2(torch.randint(-90, 90, (100_003,)))
    on_gpu = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = exponent_counts(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(got, exponent_counts(x)):
        assert torch.equal(a.cpu(), b)


def plain_loop(steps: int = 12, unscale: bool = False, every: int = 1, scale: float = 2.0**15, **options):
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


@pytest.mark.parametrize("unscale", [False, True])
def test_a_plain_loop_with_a_grad_scaler_is_recorded_as_it_was(unscale):
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


def test_overflow_and_scale_follow_the_grad_scaler():
    trace, _ = plain_loop(steps=20, scale=2.0**24)
    assert trace.overflow[0]
    assert not trace.overflow[-1]
    halved = trace.scale[1:] < trace.scale[:-1]
    assert (halved == trace.overflow[:-1]).all()  # the next scale is half exactly where this step overflowed
    assert (trace.gradients.nonfinite.sum(1) > 0).tolist() == trace.overflow.tolist()


def test_every_thins_the_histograms_but_not_the_outcomes():
    whole, _ = plain_loop(steps=11, scale=2.0**24)
    thin, _ = plain_loop(steps=11, scale=2.0**24, every=4)
    assert thin.gradients.step.tolist() == [0, 4, 8]
    for key in ("loss", "scale", "overflow", "lr"):
        assert (getattr(thin, key) == getattr(whole, key)).all()
    rows = np.isin(whole.gradients.step, thin.gradients.step)
    for key in ("zeros", "nonfinite", "largest"):
        np.testing.assert_array_equal(getattr(thin.gradients, key), getattr(whole.gradients, key)[rows])
    assert np.isnan(thin.grad_norm[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stepped", ["scaler", "by hand", "scaler at first"])
def test_the_outcome_is_that_of_the_grad_scaler_or_of_the_gradients(stepped, fused):
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


def test_by_module_adds_up_the_parameters():
    single, _ = plain_loop(steps=3)
    joint, _ = plain_loop(steps=3, by="module")
    assert joint.gradients.names == ("0", "2")
    np.testing.assert_array_equal(joint.gradients.total(), single.gradients.total())
    np.testing.assert_array_equal(joint.gradients.largest[:, 0], single.gradients.largest[:, :2].max(1))


def test_activations_are_the_outputs_of_the_leaves_and_hooks_go_away():
    network = small_network()
    recorder = Recorder(network, activations=True, format="fp32")
    x, y = batch()
    loss = F.cross_entropy(network(x), y)
    loss.backward()
    recorder.record(loss)
    with torch.no_grad():
        network(x)  # evaluation is not training
        out = network(x).abs().max()
    trace = recorder.trace()
    assert trace.activations.names == ("0", "1", "2")
    assert trace.activations.size.tolist() == [40, 40, 24]
    assert trace.activations.largest[0, 2] == float(out)
    recorder.close()
    assert not any(m._forward_hooks for m in network.modules())


def test_as_a_hook_it_sees_the_scale_used_and_the_steps_outcome():
    network = auto_mixed_precision(small_network(), "O2")
    scaler = PolicyLossScaler(preset("torch", init_scale=2.0**24, growth_interval=3))
    recorder = Recorder(network, scaler=scaler)
    step = TrainOneStepWithLossScaleCell(
        WithLossCell(network, nn.CrossEntropyLoss()),
        torch.optim.SGD(network.parameters(), 0.1),
        scaler,
        hooks=[recorder],
    )
    outcomes = [step(*batch(i)) for i in range(15)]
    trace = recorder.trace()
    assert trace.overflow.tolist() == [bool(o.overflow) for o in outcomes]
    assert trace.scale.tolist() == [2.0**24] + [float(o.scale) for o in outcomes[:-1]]
    np.testing.assert_allclose(trace.loss, [float(o.loss) for o in outcomes])
    assert trace.meta["policy"]["growth_interval"] == 3


def test_as_a_hook_of_a_step_without_scaling_gradients_are_divided_by_sens():
    network = small_network()
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    traces = []
    for sens in (1.0, 64.0):
        recorder = Recorder(network, format="fp32")
        TrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer, sens, hooks=[recorder])(*batch())
        traces.append(recorder.trace())
    np.testing.assert_allclose(traces[0].gradients.largest, traces[1].gradients.largest)
    assert traces[1].scale.tolist() == [64.0]


def test_sparse_gradients_count_missing_rows_as_zeros():
    network = nn.Embedding(10, 4, sparse=True)
    recorder = Recorder(network)
    loss = network(torch.tensor([1, 1, 3])).sum()
    loss.backward()
    recorder.record(loss)
    trace = recorder.trace()
    assert trace.gradients.zeros[0, 0] == 32
    assert trace.gradients.largest[0, 0] == 2


@pytest.mark.parametrize(
    ("scaler", "name"),
    [
        (DynamicLossScaler(2.0**10, 2, 50), "mindspore_scaler"),
        (DynamicLossScaleUpdateCell(2.0**12, 2, 100), "mindspore_cell"),
        (PolicyLossScaler(preset("megatron")), "megatron"),
        (torch.amp.GradScaler("cpu"), "torch"),
    ],
)
def test_the_policy_in_use_is_kept(scaler, name):
    assert Recorder(small_network(), scaler=scaler).trace().meta["policy"]["name"] == name


def test_save_and_load_give_the_same_trace(tmp_path):
    trace, _ = plain_loop(steps=5, activations=True, meta={"note": "a test", "numbers": [1, 2]})
    trace.save(tmp_path / "t.npz")
    back = Trace.load(tmp_path / "t.npz")
    assert back.meta == dict(trace.meta) | {"policy": trace.meta["policy"] | {"layers": []}}
    assert back.format == trace.format
    for key in ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds"):
        np.testing.assert_array_equal(getattr(back, key), getattr(trace, key))
    for part in ("gradients", "activations"):
        a, b = getattr(back, part), getattr(trace, part)
        assert (a.names, a.lowest) == (b.names, b.lowest)
        for key in ("size", "step", "counts", "zeros", "nonfinite", "largest"):
            np.testing.assert_array_equal(getattr(a, key), getattr(b, key))


def test_a_trace_that_cannot_be_saved_leaves_the_file_alone(tmp_path):
    trace, _ = plain_loop(steps=3)
    trace.save(tmp_path / "t.npz")
    with pytest.raises(TypeError, match="JSON"):
        dataclasses.replace(trace, meta={"what": object()}).save(tmp_path / "t.npz")
    assert len(Trace.load(tmp_path / "t.npz")) == 3


HEADS = {
    "head: format": ("format", "fp99"),
    "head: meta": ("meta", [1]),
    "head: names": ("names", [1, 2, 3, 4]),
    "head: schema": ("schema", "other/1"),
}


def damage(path, how):
    raw = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    if how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "flipped":
        middle = len(raw) // 2
        path.write_bytes(raw[:middle] + bytes(b ^ 255 for b in raw[middle : middle + 64]) + raw[middle + 64 :])
    elif how == "text":
        path.write_text("step,loss\n0,1\n")
    elif how == "empty":
        path.write_bytes(b"")
    else:
        if how == "missing":
            del arrays["scale"]
        elif how == "foreign":
            arrays = {"x": np.zeros(3)}
        elif how == "dtype":
            arrays["loss"] = arrays["loss"].astype(np.float32)
        elif how == "shape":
            arrays["loss"] = arrays["loss"][:-1]
        elif how == "counts":
            arrays["gradients_counts"] = arrays["gradients_counts"] + 1
        elif how == "order":
            arrays["step"] = arrays["step"][::-1].copy()
        elif how == "scale":
            arrays["scale"] = -arrays["scale"]
        elif how == "largest":
            arrays["gradients_largest"] = -arrays["gradients_largest"]
        elif how in HEADS:
            key, value = HEADS[how]
            head = json.loads(str(arrays["head"]))
            (head["gradients"] if key == "names" else head)[key] = value
            arrays["head"] = np.array(json.dumps(head))
        elif how == "pickle":
            arrays["loss"] = np.array([{}], dtype=object)
        np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "damaged"),
        ("flipped", "damaged"),
        ("text", "damaged"),
        ("empty", "damaged"),
        ("pickle", "damaged"),
        ("missing", "'scale' is missing"),
        ("foreign", "'head' is missing"),
        ("dtype", "loss must be float64"),
        ("shape", "loss must have shape"),
        ("counts", "counts more values"),
        ("order", "ascend"),
        ("scale", "a loss scale is negative"),
        ("largest", "largest magnitude is negative"),
        ("head: format", "no format is called 'fp99'"),
        ("head: meta", "meta must be a mapping"),
        ("head: names", "must be a list of strings"),
        ("head: schema", "is not 'mpkit.trace/1'"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_value_error_that_says_what(tmp_path, how, says):
    trace, _ = plain_loop(steps=3)
    path = tmp_path / "t.npz"
    trace.save(path)
    damage(path, how)
    with pytest.raises(ValueError, match=says):
        Trace.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.npz"):
        Trace.load(tmp_path / "no.npz")


def test_a_resumed_run_joins_to_the_uninterrupted_one():
    whole, _ = plain_loop(steps=10)
    first, later = whole.before(7), whole._where(whole.step >= 4)
    both = first + later  # steps 4 to 6 were trained twice
    np.testing.assert_array_equal(both.step, whole.step)
    np.testing.assert_array_equal(both.gradients.total(), whole.gradients.total())
    np.testing.assert_array_equal(join([whole.before(3), whole._where(whole.step >= 3)]).loss, whole.loss)


@pytest.mark.parametrize(
    ("first", "later", "joined"),
    [
        ([1.0, 2.0, 4.0], [1.5, 2.0], [1.0, 2.0, 4.0, 5.5, 6.0]),  # a new recorder begins at zero
        ([1.0, 2.0, 4.0], [4.0, 7.0], [1.0, 2.0, 4.0, 8.0, 11.0]),  # so does one that began as late as the other ended
        ([1.0, 2.0, 4.0], [4.5, 5.0], [1.0, 2.0, 4.0, 4.5, 5.0]),  # a resumed one goes on with its clock
        ([1.0, 2.0, 4.0], [3.0, 9.0], [1.0, 2.0, 4.0, 7.0, 13.0]),
        ([], [3.0, 9.0], [3.0, 9.0]),
    ],
)
def test_the_clock_of_joined_traces_goes_on(first, later, joined):
    steps = len(first) + len(later)
    whole = dataclasses.replace(plain_loop(steps=steps)[0], seconds=np.array(first + later))
    both = whole.before(len(first)) + whole._where(whole.step >= len(first))
    assert both.seconds.tolist() == joined


class Run:
    """A training with two micro-batches per step, its checkpoint and its resume."""

    def __init__(self, every: int = 3) -> None:
        self.network = auto_mixed_precision(small_network(), "O2")
        self.scaler = PolicyLossScaler(preset("torch", init_scale=2.0**24, growth_interval=4))
        optimizer = torch.optim.SGD(self.network.parameters(), 0.1)
        self.recorder = Recorder(self.network, scaler=self.scaler, every=every, activations=True)
        self.cell = TrainOneStepWithLossScaleCell(
            WithLossCell(self.network, nn.CrossEntropyLoss()),
            optimizer,
            self.scaler,
            hooks=[self.recorder],
            accumulation_steps=2,
        )

    def calls(self, first: int, last: int) -> Trace:
        for i in range(first, last):
            self.cell(*batch(i))
        return self.recorder.trace()


def same_but_time(a: Trace, b: Trace) -> None:
    for key in ("step", "loss", "scale", "overflow", "lr", "grad_norm"):
        np.testing.assert_array_equal(getattr(a, key), getattr(b, key))
    for part in ("gradients", "activations"):
        one, two = getattr(a, part), getattr(b, part)
        for key in ("size", "step", "zeros", "nonfinite", "largest"):
            np.testing.assert_array_equal(getattr(one, key), getattr(two, key))
        np.testing.assert_array_equal(one.total().sum(), two.total().sum())
        np.testing.assert_array_equal(one._padded(-126, 254), two._padded(-126, 254))


@pytest.mark.parametrize("calls", [10, 13, 14])  # 13: between the two micro-batches of a recorded step
def test_a_resumed_recording_equals_the_uninterrupted_one(tmp_path, calls):
    whole = Run().calls(0, 30)
    before = Run()
    first = before.calls(0, calls)
    torch.save(before.cell.state_dict(), tmp_path / "checkpoint.pt")
    after = Run()
    after.cell.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    later = after.calls(calls, 30)
    same_but_time(first + later, whole)
    assert (np.diff((first + later).seconds) > 0).all()
    assert later.seconds[0] > first.seconds[-1]


@pytest.mark.parametrize("every", [1, 3])
def test_copying_to_the_host_now_and_then_changes_nothing(monkeypatch, every):
    whole = plain_loop(steps=17, scale=2.0**24, every=every, activations=True)[0]
    run = Run(every)
    run.calls(0, 30)
    monkeypatch.setattr("mpkit.record.rows.FLUSH", 4)
    same_but_time(plain_loop(steps=17, scale=2.0**24, every=every, activations=True)[0], whole)
    other = Run(every)
    other.calls(0, 20)
    state = copy.deepcopy(other.cell.state_dict())
    other.calls(20, 26)
    other.cell.load_state_dict(state)
    same_but_time(other.calls(20, 30), run.recorder.trace())


def test_going_back_to_a_checkpoint_forgets_the_steps_that_come_again():
    run, whole = Run(), Run().calls(0, 30)
    run.calls(0, 14)
    state = copy.deepcopy(run.cell.state_dict())
    run.calls(14, 23)
    run.cell.load_state_dict(state)
    same_but_time(run.calls(14, 30), whole)


def test_a_state_that_no_recorder_made_is_refused():
    for state in ({}, {"index": -1}, {"index": "3"}, None):
        with pytest.raises(ValueError, match="index >= 0"):
            Recorder(small_network()).load_state_dict(state)


class Outputs(nn.Module):
    """Gives what it is told: a leaf with any kind of output."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


@pytest.mark.parametrize(
    ("give", "values"),
    [
        (lambda x: (x, 2 * x), 8),
        (lambda x: {"a": [x, 8 * x], "b": x > 0, "c": None}, 8),
        (lambda x: torch.return_types.max((8 * x, x.argmax(0))), 4),
        (lambda x: (8 * x).to_sparse(), 4),
        (lambda x: torch.nested.nested_tensor([x, 8 * x], layout=torch.jagged), 8),
    ],
    ids=["tuple", "dict", "named tuple", "sparse", "nested"],
)
def test_activations_are_all_float_tensors_of_an_output(give, values):
    network = nn.Sequential(nn.Linear(3, 4, bias=False), Outputs(give))
    recorder = Recorder(network, activations=True, format="fp32")
    network(torch.ones(3))
    network[0].weight.grad = torch.ones(4, 3)
    recorder.record(torch.ones(()))
    found = recorder.trace().activations
    assert found.size.tolist() == [4, values]
    assert found.largest[0, 1] > found.largest[0, 0]


def test_the_states_of_an_lstm_are_recorded_under_a_casting_level_too():
    network = auto_mixed_precision(nn.ModuleDict({"lstm": nn.LSTM(3, 5)}), "O1", torch.bfloat16)
    recorder = Recorder(network, activations=True, format="bf16")
    out, (h, c) = network["lstm"](torch.ones(2, 7, 3))
    out.sum().backward()
    recorder.record(torch.ones(()))
    found = recorder.trace().activations
    assert found.size.tolist() == [out.numel() + h.numel() + c.numel()]
    assert found.largest.item() == max(t.abs().max().item() for t in (out, h, c))


def test_activations_of_a_copied_network_are_not_those_of_the_run():
    network = small_network()
    recorder = Recorder(network, activations=True, format="fp32")
    x, y = batch()
    loss = F.cross_entropy(network(x), y)
    copy.deepcopy(network)(x * 1e6)
    loss.backward()
    recorder.record(loss)
    trace = recorder.trace()
    assert trace.activations.largest.max() < 100
    assert trace.activations.counts[0, 0].sum() == 40
    recorder.record(loss)  # a step in which no module ran: there is nothing to record of activations
    assert recorder.trace().activations.step.tolist() == [0]


def test_complex_gradients_are_counted_as_pairs_of_numbers():
    weight = nn.Parameter(torch.tensor([1 + 2j, 4j]))
    network = nn.ParameterList([weight])
    recorder = Recorder(network)
    loss = (weight * weight.conj()).real.sum()
    loss.backward()
    recorder.record(loss)
    part = recorder.trace().gradients
    assert (part.size.tolist(), part.zeros.tolist(), part.largest.tolist()) == ([4], [[1]], [[8.0]])


def test_frames_have_one_row_per_step_or_per_step_and_name():
    trace, _ = plain_loop(steps=6)
    assert trace.to_frame().shape == (6, 6)
    frame = trace.to_frame("gradients")
    assert len(frame) == 24
    assert frame.loc[(2, "0.weight"), "size"] == 30
    with pytest.raises(ValueError, match="activations=True"):
        trace.to_frame("activations")
    with pytest.raises(ValueError, match="part must be"):
        trace.to_frame("weights")


def test_wrong_arguments_say_what_is_needed():
    network = small_network()
    with pytest.raises(TypeError, match=r"nn\.Module"):
        Recorder([1])
    with pytest.raises(ValueError, match="every"):
        Recorder(network, every=0)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer or None, got str"):
        Recorder(network, "sgd")
    with pytest.raises(ValueError, match="no format is called"):
        Recorder(network, format="fp99")
    with pytest.raises(TypeError, match="JSON"):
        Recorder(network, meta={"network": network})
    with pytest.raises(ValueError, match="by must be"):
        Recorder(network, by="layer")
    with pytest.raises(ValueError, match="requires_grad"):
        Recorder(nn.ReLU())
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        Recorder(network).record(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"before \.item\(\); got float"):
        Recorder(network).record(1.0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        Recorder(network).record(torch.ones(2))
    cell = DynamicLossScaleUpdateCell(2.0**12, 2, 100)
    with pytest.raises(TypeError, match="record\\(loss, scale="):
        Recorder(network, scaler=cell).record(torch.tensor(1.0))
    with pytest.raises(ValueError, match="more values"):
        Ranges(
            ("a",), np.array([1]), np.array([0]), 0, np.array([[[2]]], dtype=np.uint32), *[np.zeros((1, 1), int)] * 3
        )


def test_recording_reads_nothing_on_the_host():
    from torch.utils._python_dispatch import TorchDispatchMode

    reads = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(func):
                reads.append(func)
            return func(*args, **(kwargs or {}))

    network = small_network()
    optimizer = torch.optim.SGD(network.parameters(), torch.tensor(0.1))
    recorder = Recorder(network, optimizer)
    x, y = batch()
    loss = F.cross_entropy(network(x), y)
    (loss * 8).backward()
    with Count():
        recorder.record(loss, scale=torch.tensor(8.0))
    assert not reads
    assert recorder.trace().lr[0] == pytest.approx(0.1)


def test_the_smallest_normal_number_is_no_zero():
    counts, zeros, _, _ = host_counts(torch.full((3,), 2.0**-126))
    assert (int(counts[1]), int(zeros)) == (3, 0)
    counts, zeros, _, _ = host_counts(torch.full((3,), 2.0**-127))
    assert (int(counts.sum()), int(zeros)) == (0, 3)


# --- parts by themselves


def histogram(**changes) -> Ranges:
    """Two tensors of 4 values in 5 steps; bins from 2**-1 to 2**1."""
    counts = np.zeros((5, 2, 3), dtype=np.uint32)
    counts[0, 0, 2] = counts[1, 0, 2] = counts[1, 1, 0] = counts[3, 1, 0] = 1
    nonfinite = np.array([[0, 0], [1, 0], [0, 0], [1, 0], [4, 4]])
    given = {
        "names": ("a", "b"),
        "size": np.array([4, 4]),
        "step": np.arange(5),
        "lowest": -1,
        "counts": counts,
        "zeros": 4 - counts.sum(2, dtype=np.int64) - nonfinite,
        "nonfinite": nonfinite,
        "largest": np.array([[3.0, 0], [np.inf, 0.75], [0, 0], [np.nan, 0.5], [np.inf, np.inf]], dtype=np.float32),
    }
    return Ranges(**(given | changes))


def test_the_largest_finite_magnitude_of_a_row():
    """Exact where all is finite; else the upper edge of the highest bin of what is not, and what is exact beside it."""
    assert histogram().finite_largest().tolist() == [3.0, 4.0, 0.0, 0.5, 0.0]


def test_bins_may_begin_and_end_where_float32_does():
    for lowest in (-126, 125):
        assert histogram(lowest=lowest).exponents.tolist() == list(range(lowest, lowest + 3))
    for lowest in (-127, 126):
        with pytest.raises(ValueError, match=r"bins must lie in|at least -126"):
            histogram(lowest=lowest)
    with pytest.raises(ValueError, match="more values than its tensor has"):
        histogram(size=np.array([4, 3]))


@pytest.mark.parametrize("top", [1.9, 2.0, 2.9, 3.9, 4.0])
@pytest.mark.parametrize("size", [2**14 - 1, 2**14, 2**14 + 3])
def test_counts_where_the_way_of_counting_changes(top, size):
    """Below 2 the eighth bit of an exponent is free; few values are counted one by one."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).clamp(-top, top)
    x[-1] = -top
    counts, zeros, largest, norm = host_counts(x)
    assert {e - 127: n for e, n in enumerate(counts.tolist()) if n} == slow_counts(x.numpy())
    assert (zeros, largest) == (0, np.float32(top))
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-6)


def test_a_norm_is_that_of_all_tensors_together():
    parts = [torch.full((3,), 2.0), torch.tensor([6.0]), torch.full((2, 2), 4.0)]
    assert total_norm(parts[:2]) == pytest.approx(math.sqrt(12 + 36))
    assert total_norm(parts) == pytest.approx(math.sqrt(12 + 36 + 64))
    assert total_norm([p.half() for p in parts]) == pytest.approx(math.sqrt(12 + 36 + 64))
    assert total_norm([torch.full((4,), 1e-30), torch.zeros(1)]) == pytest.approx(2e-30)


def test_a_scale_that_is_a_tensor_divides_what_is_counted():
    recorder = Recorder(small_network())
    counts, zeros, largest, norm = recorder._counts(torch.tensor([4.0, 0.0]), torch.tensor(0.25))
    assert (counts[127], int(zeros), float(largest), norm) == (1, 1, 1.0, 4.0)


def test_activations_are_those_of_recorded_training_steps_alone():
    def recorded(disturbed: bool) -> Trace:
        net = small_network()
        recorder = Recorder(net, activations=True, every=2)
        for step in range(4):
            x, y = batch(step)
            if disturbed and step % 2 == 0:
                with torch.no_grad():
                    net(100 * x)  # an evaluation in the middle
            loss = F.cross_entropy(net(x if step % 2 == 0 else 100 * x), y)
            net.zero_grad()
            loss.backward()
            recorder.record(loss)
        return recorder.trace()

    quiet, busy = recorded(False), recorded(True)
    assert quiet.activations.step.tolist() == [0, 2]
    assert (quiet.activations.counts == busy.activations.counts).all()
    assert quiet.activations.largest.max() < 50  # no step that is not recorded, none of an evaluation


def test_a_tensor_without_values_in_a_step_counts_nothing():
    rows = Rows(("a", "b"))
    part = host_counts(torch.tensor([1.0, 3.0, 0.0]))[:3]
    rows.append(0, [(*part, 3), None])
    rows.append(1, [None, (*part, 3)])
    rows.append(2, [None, None])  # nothing to write down
    found = rows.ranges()
    assert found.step.tolist() == [0, 1]
    assert found.counts.sum(2).tolist() == [[2, 0], [0, 2]]
    assert found.zeros.tolist() == [[1, 0], [0, 1]]
    assert found.largest.tolist() == [[3, 0], [0, 3]]
    assert found.size.tolist() == [3, 3]
    rows = Rows(("a", "never"))
    rows.append(0, [(*host_counts(torch.tensor([math.inf, 0.0, 2.0**-130]))[:3], 3), None])
    found = rows.ranges()
    assert (found.size.tolist(), found.zeros.tolist(), found.largest.tolist()) == ([3, 0], [[2, 0]], [[math.inf, 0]])


def test_an_outcome_that_is_known_stays_when_the_gradients_are_gone():
    network = small_network()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    recorder = Recorder(network, optimizer, scaler)
    x, y = batch()
    loss = F.cross_entropy(network(x), y)
    scaler.scale(loss * math.inf).backward()
    recorder.record(loss)
    optimizer.zero_grad()
    assert recorder.trace().overflow.tolist() == [True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_counted_once(reentrant):
    def recorded(forward):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        recorder = Recorder(network, activations=True)
        for _ in range(2):  # steps
            for _ in range(2):  # micro-batches
                loss = forward(network, torch.randn(3, 4).requires_grad_()).sum()
                loss.backward()
            recorder.record(loss)
        return recorder.trace().activations

    seen = recorded(lambda network, x: checkpoint(network, x, use_reentrant=reentrant))
    plain = recorded(lambda network, x: network(x))
    assert seen.size.tolist() == plain.size.tolist() == [24, 24, 12]
    assert (seen.counts == plain.counts).all()
    assert (seen.zeros == plain.zeros).all()


def test_gradients_that_are_not_watched_are_told_of():
    def step(change, frozen=True):
        network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        network[0].requires_grad_(not frozen)
        recorder = Recorder(network)
        change(network)
        for _ in range(3):
            network(torch.ones(1, 2)).sum().backward()
            recorder.record(torch.ones(()))
        return recorder.trace()

    with pytest.warns(
        RuntimeWarning, match=r"2 parameters have gradients that this Recorder does not watch, as 0\.weight"
    ):
        step(lambda network: network[0].requires_grad_(True))
    with pytest.warns(RuntimeWarning, match=r"1 parameters have .* as 1\.bias: they came or became"):
        step(lambda network: setattr(network[1], "bias", nn.Parameter(torch.ones(2))))
    step(lambda network: None)  # still frozen
    step(lambda network: network[0].requires_grad_(False), frozen=False)  # the way out


def test_containers_are_not_watched():
    recorder = Recorder(nn.Sequential(nn.Sequential(nn.Linear(6, 3)), nn.ReLU()), activations=True)
    assert recorder._activations.names == ("0.0", "1")
    recorder.close()


def test_what_a_scaler_says_of_scale_and_overflow():
    assert scale_of(None) == scale_of(torch.amp.GradScaler("cpu", enabled=False)) == 1.0
    assert scale_of(torch.amp.GradScaler("cpu", init_scale=8.0)) == 8.0
    flags = [torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0)]
    for some, want in (
        ([], 0.0),
        (flags[:1], 0.0),
        (flags[2:], 1.0),
        (flags[:2], 0.0),
        (flags, 1.0),
        (flags[::-1], 1.0),
        (flags[1:], 1.0),
        ([flags[0], flags[2], flags[0]], 1.0),
    ):
        assert noted({"found_inf_per_device": dict(enumerate(some))}) == want
    assert noted(0.5) == 0.5
    assert _host([1.0, torch.tensor([2.0], requires_grad=True)]).tolist() == [1.0, 2.0]


SCHEDULE = CosineDecayLR(0.0, 0.5, 10)


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda p: optimizers.Momentum(p, SCHEDULE, 0.9), [SCHEDULE(k) for k in (0, 1, 1, 2)]),
        (lambda p: optimizers.LARS(optimizers.Momentum(p, SCHEDULE, 0.9)), [SCHEDULE(k) for k in (0, 1, 1, 2)]),
        (lambda p: FreezeOpt(optimizers.SGD(p, SCHEDULE)), [SCHEDULE(k) for k in (0, 1, 1, 2)]),
        (lambda p: optimizers.SGD(p, [0.1, 0.2, 0.3]), [0.1, 0.2, 0.2, 0.3]),
    ],
    ids=["Momentum", "LARS", "FreezeOpt", "list"],
)
def test_the_rate_of_a_schedule_is_that_of_the_coming_step_which_a_skipped_one_does_not_use_up(make, rates):
    network = nn.Linear(3, 2)
    recorder = Recorder(network)
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(network, nn.MSELoss()),
        make([*network.parameters()]),
        DynamicLossScaleUpdateCell(4.0, 2, 1000),
        hooks=[recorder],
    )
    for size in (1.0, math.inf, 1.0, 1.0):  # the second step overflows
        cell(torch.full((1, 3), size), torch.zeros(1, 2))
    trace = recorder.trace()
    assert trace.overflow.tolist() == [False, True, False, False]
    assert trace.lr.tolist() == rates


def test_what_stands_for_a_rate_and_is_none_is_recorded_as_nan():
    """A trace that cannot be made loses the whole run."""
    network = nn.Linear(3, 2)
    for rate in ([0.1], "x", None, torch.ones(2), object()):
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = rate
        recorder = Recorder(network, optimizer)
        network(torch.ones(1, 3)).sum().backward()
        recorder.record(torch.ones(()))
        optimizer.param_groups.clear()
        recorder.record(torch.ones(()))
        assert np.isnan(recorder.trace().lr).tolist() == [True, True]


def test_a_scale_that_is_none_is_refused_at_once_as_a_tensor_too():
    recorder = Recorder(network := nn.Linear(3, 2))
    network(torch.ones(1, 3)).sum().backward()
    for scale in (-1.0, math.nan):
        with pytest.raises(ValueError, match="scale must be in"):
            recorder.record(torch.ones(()), scale=torch.tensor(scale))
    recorder.record(torch.ones(()), scale=torch.tensor([2.0]))
    assert recorder.trace().scale.tolist() == [2.0]


def test_every_trace_that_can_be_made_can_be_saved_and_read_again(tmp_path):
    """What computed in float32 or int32 was saved, and then refused as damaged."""
    trace, _ = plain_loop(steps=3, activations=True)
    narrow = {"step": np.int32, "loss": np.float32, "scale": np.int64, "seconds": np.float16}
    columns = {key: getattr(trace, key).astype(dtype) for key, dtype in narrow.items()}
    ranges = dataclasses.replace(trace.gradients, zeros=trace.gradients.zeros.astype(np.int32))
    measured = {"fp16": np.ones(3, np.float32)}
    again = dataclasses.replace(trace, **columns, gradients=ranges, measured=measured)
    again.save(tmp_path / "a.npz")
    loaded = Trace.load(tmp_path / "a.npz")
    assert loaded.step.dtype == loaded.gradients.zeros.dtype == np.int64
    np.testing.assert_array_equal(loaded.loss, trace.loss.astype(np.float32))
    amaxes = AmaxTrace(("a", "b"), np.ones((3, 2)))
    amaxes.save(tmp_path / "b.npz")
    np.testing.assert_array_equal(AmaxTrace.load(tmp_path / "b.npz").amax, amaxes.amax)


def test_a_trace_that_could_not_be_read_again_cannot_be_made():
    trace, _ = plain_loop(steps=3)
    for key, value in (
        ("overflow", trace.scale),
        ("step", trace.step * 1.0),
        ("measured", {"fp16": np.array(["x"] * 3)}),
    ):
        with pytest.raises(TypeError, match=rf"{key}.* must be"):
            dataclasses.replace(trace, **{key: value})
    with pytest.raises(TypeError, match="counts must be uint32, got float64; write counts"):
        dataclasses.replace(trace.gradients, counts=trace.gradients.counts * 1.0)
    for names, amax, error in (
        (("a",), np.ones((3, 2), np.float32), ValueError),
        (("a",), np.ones(1, np.float32), ValueError),
        ((1,), np.ones((3, 1), np.float32), TypeError),
        (("a",), np.array([["x"]]), TypeError),
        ("a", np.ones((3, 1), np.float32), TypeError),
    ):
        with pytest.raises(error):
            AmaxTrace(names, amax)
