"""Whole lives of training steps, drawn at random, beside a model in fractions.

The network's gradient is its input and every number a small multiple of a power of two, so float32 rounds nothing and
the model has to be met exactly, whatever happens between two steps: a copy, a pickle, a file, an error in a pass.
"""

from __future__ import annotations

import copy
import math
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import AGAIN, again, tries
from torch import nn

from mpkit import optimizers
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    GradientAccumulation,
    GroupLossScaleManager,
    ParameterProcess,
)
from mpkit.boost.adasum import adasum, adasum_enabled
from mpkit.model import Callback, Checkpoint, Model
from mpkit.record import Recorder
from mpkit.scalers import DynamicLossScaleManager, DynamicLossScaler, DynamicLossScaleUpdateCell
from mpkit.step import ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell

RATE, KEPT = Fraction(1, 8), Fraction(1, 2)
LAYERS = 3


class BoomError(Exception):
    """What a pass raises in the middle of a life."""


class Line(nn.Module):
    """A linear layer of one output, by products and a sum: exact on any machine, which no matrix product promises."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 2), weight))

    def forward(self, x):
        return (x * self.weight).sum(1)


class Lines(nn.Module):
    """Three layers that add up what they see: the gradient of each weight is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Line(float(i)) for i in range(LAYERS))

    def forward(self, x, fails=""):
        if fails == "forward":
            raise BoomError
        loss = sum(layer(x) for layer in self.layers).sum()
        if fails == "backward":
            loss.register_hook(boom)
        return loss


def boom(_):
    raise BoomError


OPTIMIZERS = {
    "torch": lambda p: torch.optim.SGD(p, float(RATE), momentum=float(KEPT)),
    "torch fused": lambda p: torch.optim.SGD(p, float(RATE), momentum=float(KEPT), fused=True),
    "Momentum": lambda p: optimizers.Momentum(p, float(RATE), float(KEPT)),
    "SGD": lambda p: optimizers.SGD(p, float(RATE), float(KEPT)),
}
SENSES = {
    "tensor": lambda: torch.tensor(1024.0),
    "scaler": lambda: DynamicLossScaler(1024, 2, 3),
    "cell": lambda: DynamicLossScaleUpdateCell(1024, 2, 3),
}


class Exact:
    """What a train cell of `Lines` must do, in fractions: momentum, accumulation, a dynamic scale, frozen layers."""

    def __init__(self, moves: bool, parts: int = 1, strategy: list[int] | None = None) -> None:
        self.weights = [[Fraction(i)] * 2 for i in range(LAYERS)]
        self.velocity = [[Fraction(0)] * 2 for _ in range(LAYERS)]
        self.scale, self.good, self.moves, self.parts = 1024.0, 0, moves, parts
        self.rows: list[tuple[float, float]] = []
        self.strategy, self.place = strategy or [0], 0

    def step(self, row) -> bool:
        """One micro-batch; whether it ended in an overflow."""
        self.rows.append(row)
        if len(self.rows) < self.parts:
            return False
        bad = not all(math.isfinite(v) for r in self.rows for v in r)
        if not bad:
            self.update()
        self.rows = []
        self.place = (self.place + 1) % len(self.strategy)
        self.adjust(bad)
        return bad

    def update(self) -> None:
        mean = [sum(map(Fraction, column)) / self.parts for column in zip(*self.rows)]
        for i in range(self.strategy[self.place], LAYERS):
            self.velocity[i] = [KEPT * v + g for v, g in zip(self.velocity[i], mean)]
            self.weights[i] = [w - RATE * v for w, v in zip(self.weights[i], self.velocity[i])]

    def adjust(self, bad: bool) -> None:
        self.good = 0 if bad else self.good + 1
        if bad and self.moves:
            self.scale = max(1.0, self.scale / 2)
        elif self.good == 3:
            self.scale, self.good = self.scale * (2 if self.moves else 1), 0

    def met_by(self, network: nn.Module) -> bool:
        return [[Fraction(v) for v in layer.weight[0].tolist()] for layer in network.layers] == self.weights


ROWS = st.tuples(*[st.sampled_from([-3.0, 0.0, 1.0, 2.0, 7.0])] * 2)
OVERFLOWS = st.sampled_from([(math.inf, 1.0), (0.0, -math.inf), (math.nan, math.nan)])
LIVES = st.lists(ROWS | OVERFLOWS | st.sampled_from([*AGAIN, "forward", "backward"]), max_size=14)


def live(cell, exact: Exact, events, fresh, check) -> None:
    """Lead a cell and its model through the same events."""
    for event in events:
        if isinstance(event, tuple):
            outcome = cell(torch.tensor([event]))
            assert bool(outcome.overflow) == exact.step(event)
            assert float(outcome.scale) == exact.scale
        elif event in AGAIN:
            weights = copy.deepcopy(cell.state_dict()) if event == "file" else None
            cell = again(cell, event, fresh)
            exact.rows = []  # what a begun accumulation has summed is in no copy and in no file
            assert weights is None or cell.state_dict().keys() == weights.keys()
        else:
            with pytest.raises(BoomError):
                cell(torch.ones(1, 2), event)
            if event == "backward":
                exact.rows = []  # a part of that micro-batch may be in the sums
        check(cell)


@given(st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(SENSES)), st.sampled_from([1, 2, 4]), LIVES)
@tries(0.6)
def test_a_scaled_cell_lives_as_fractions(optimizer, sense, parts, events):
    def fresh():
        net = Lines()
        made = OPTIMIZERS[optimizer](net.parameters())
        return TrainOneStepWithLossScaleCell(net, made, SENSES[sense](), accumulation_steps=parts)

    def check(cell):
        assert exact.met_by(cell.network)
        assert cell.pending == len(exact.rows)

    exact = Exact(sense != "tensor", parts)
    live(fresh(), exact, events, fresh, check)


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1.0, 0.5, 1024.0]),
    st.lists(ROWS | st.sampled_from([*AGAIN, "forward", "backward"]), max_size=12),
)
@tries(0.4)
def test_a_plain_cell_leaves_the_gradients_multiplied(optimizer, parts, sens, events):
    """With `sens` the optimizer must divide; here it does not, so the model's rate is `sens` times as large."""
    fresh = lambda: TrainOneStepCell(  # noqa: E731
        net := Lines(), OPTIMIZERS[optimizer](net.parameters()), sens, accumulation_steps=parts
    )
    cell, exact, calls = fresh(), Exact(False, parts), 0
    for event in events:
        if isinstance(event, tuple):
            cell(torch.tensor([event]))
            exact.step(tuple(v * sens for v in event))
        elif event in AGAIN:
            cell = again(cell, event, fresh)
            exact.rows = []
        else:
            with pytest.raises(BoomError):
                cell(torch.ones(1, 2), event)
            exact.rows = [] if event == "backward" else exact.rows
        calls += event not in AGAIN
        assert exact.met_by(cell.network)
        assert cell.index == calls


@given(st.sampled_from(sorted(SENSES)), st.data())
@tries(0.6)
def test_a_step_by_hand_keeps_its_order_and_its_numbers(sense, data):
    """Any order of calls: those that fit move the model, the others raise RuntimeError and change nothing."""

    def fresh():
        net = Lines()
        step = ScaledStep(OPTIMIZERS["torch"](net.parameters()), SENSES[sense]())
        step.net = net
        return step

    step, exact, phase = fresh(), Exact(sense != "tensor"), "closed"
    calls = st.lists(ROWS | OVERFLOWS | st.sampled_from(["unscale", "clip", "update", "drop", "file", "backward"]))
    for event in data.draw(calls):
        if isinstance(event, tuple) and phase != "unscaled":
            step.backward(step.net(torch.tensor([event])))
            exact.rows = [*exact.rows, event] if phase == "begun" else [event]
            phase = "begun"
        elif event == "backward" and phase != "unscaled":
            with pytest.raises(BoomError):
                step.backward(step.net(torch.ones(1, 2), "backward"))
            phase = "closed"
        elif event == "unscale" and phase == "begun":
            assert bool(step.unscale_()) is not all(math.isfinite(v) for row in exact.rows for v in row)
            phase = "unscaled"
        elif event == "clip" and phase == "unscaled":
            step.clip_(1e30)  # so large that nothing is clipped
        elif event == "update" and phase != "closed":
            exact.parts = 1
            rows, exact.rows = exact.rows, []
            summed = tuple(sum(column) for column in zip(*rows))
            assert bool(step.update()) == exact.step(summed)
            phase = "closed"
        elif event == "drop":
            step.drop()
            phase = "closed"
        elif event == "file" and phase == "closed":
            before, other = step.net.state_dict(), fresh()
            other.net.load_state_dict(before)
            other.load_state_dict(copy.deepcopy(step.state_dict()))
            step = other
        else:
            call = {"unscale": step.unscale_, "update": step.update, "file": step.state_dict}.get(event)
            with pytest.raises(RuntimeError):
                step.clip_(1.0) if event == "clip" else call() if call else step.backward(step.net(torch.ones(1, 2)))
        assert exact.met_by(step.net)
        assert float(step.scale) == exact.scale


@given(st.lists(st.tuples(ROWS, st.integers(1, 3)), max_size=6), st.floats(0.25, 8))
@tries(0.3)
def test_clipping_is_that_of_the_true_gradients(steps, most):
    """Beside float64: the joint norm over all layers, whatever the scale and the number of micro-batches."""
    net, want = Lines(), np.array([[float(i)] * 2 for i in range(LAYERS)])
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    for row, parts in steps:
        cell = TrainOneStepWithLossScaleCell(
            net, optimizer, torch.tensor(2.0**12), clip_norm=most, accumulation_steps=parts
        )
        for _ in range(parts):
            cell(torch.tensor([row]))
        gradient = np.array([row] * LAYERS)
        want = want - gradient * min(1.0, most / (np.linalg.norm(gradient) + 1e-6))  # torch's guard against 0
        got = np.array([layer.weight[0].tolist() for layer in net.layers])
        np.testing.assert_allclose(got, want, rtol=0, atol=len(steps) * 2e-6)  # float32 of numbers below 32
    assert all(bool(p.grad is None) or p.grad.isfinite().all() for p in net.parameters())


# --- boost


def boosted(freeze: bool, parts: int) -> AutoBoost:
    flags = {"mode": "manual", "grad_freeze": freeze, "grad_accumulation": parts > 1}
    freezing = {"param_groups": 3, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 8}
    config = {"boost": flags}
    config |= {"grad_freeze": freezing} if freeze else {}
    return AutoBoost("O0", config | ({"grad_accumulation": {"grad_accumulation_step": parts}} if parts > 1 else {}))


@given(st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from(sorted(OPTIMIZERS)), LIVES)
@tries(0.5)
def test_a_boosted_cell_lives_as_fractions(freeze, parts, optimizer, events):
    """Frozen layers stand still, momentum too; with accumulation an overflow is neither added nor counted."""

    def fresh():
        boost = boosted(freeze, parts)
        net, opt = boost.network_auto_process_train(net := Lines(), OPTIMIZERS[optimizer](net.parameters()))
        return BoostTrainOneStepWithLossScaleCell(net, opt, DynamicLossScaler(1024, 2, 3), boost=boost)

    class Boosted(Exact):
        def step(self, row):
            bad = not all(map(math.isfinite, row))
            if not bad:
                self.rows.append(row)
            if len(self.rows) == self.parts:
                self.update()
                self.rows, self.place = [], (self.place + 1) % len(self.strategy)
            elif bad and self.parts == 1:
                self.place = (self.place + 1) % len(self.strategy)
            self.adjust(bad)
            return bad

    exact = Boosted(True, parts, [0, 0, 1, 2] if freeze else None)
    cell = fresh()  # an error in a pass takes nothing away here: whole micro-gradients are summed apart
    for event in events:
        if isinstance(event, tuple):
            outcome = cell(torch.tensor([event]))
            assert bool(outcome.overflow) == exact.step(event)
            assert float(outcome.scale) == exact.scale
        elif event in AGAIN:
            cell = again(cell, event, fresh)
            exact.rows = []
        else:
            with pytest.raises(BoomError):
                cell(torch.ones(1, 2), event)
        assert exact.met_by(cell.network)
        assert all(p.requires_grad for p in cell.network.parameters())


@given(
    st.integers(1, 4), st.lists(ROWS | st.sampled_from([*AGAIN[2:], "flush", "overflow", "none", "wrong"]), max_size=15)
)
@tries(0.5)
def test_gradient_accumulation_lives_as_fractions(parts, events):
    def fresh():
        weight = nn.Parameter(torch.zeros(2))
        return GradientAccumulation(parts, torch.optim.SGD([weight], 1.0))

    gathered, weight, rows, loss = fresh(), [Fraction(0)] * 2, [], torch.tensor(0.0)
    rounds = parts == 3  # thirds are no float32 numbers
    for event in events:
        if isinstance(event, tuple):
            gathered(loss, [torch.tensor(event)])
            rows.append(event)
        elif event == "overflow":
            gathered(loss, [torch.full((2,), math.inf)], torch.tensor(True))
        elif event == "none":
            gathered(loss, [None])
            rows.append((0, 0))
        elif event == "wrong":
            with pytest.raises(ValueError, match="gradient"):
                gathered(loss, [torch.zeros(3)])
        elif event == "file":
            old, gathered = gathered, fresh()
            gathered.load_state_dict(copy.deepcopy(old.state_dict()))
            gathered.weights[0].data.copy_(old.weights[0])
            rows = []
        if len(rows) == parts or (event == "flush" and rows):
            rounds |= len(rows) == 3
            weight = [w - sum(map(Fraction, column)) / len(rows) for w, column in zip(weight, zip(*rows))]
            if event == "flush":
                assert gathered.flush()
            rows = []
        elif event == "flush":
            assert not gathered.flush()
        assert gathered.counter == len(rows)
        got = gathered.weights[0].tolist()
        assert got == pytest.approx([float(w) for w in weight], rel=0, abs=1e-4 if rounds else 0)


FLAGS, HYPER = [*AutoBoost("O0").flags], AutoBoost("O0").hyper
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "boost": st.fixed_dictionaries(
            {"mode": st.sampled_from(["auto", "manual", "enable_all", "disable_all"])},
            optional={flag: st.booleans() for flag in FLAGS},
        ),
        "grad_freeze": st.fixed_dictionaries(
            {}, optional={"param_groups": st.integers(1, 9), "freeze_p": st.floats(0, 1)}
        ),
        "grad_accumulation": st.fixed_dictionaries({}, optional={"grad_accumulation_step": st.integers(1, 4)}),
        "dim_reduce": st.fixed_dictionaries({}, optional={"n_components": st.integers(1, 9)}),
    },
)


@given(st.sampled_from(sorted(AutoBoost.levels)), CONFIGS)
@tries(1)
def test_a_configuration_switches_on_what_its_mode_says(level, config):
    rows = {"O0": set(), "O1": {"less_bn", "grad_freeze"}, "O2": {"less_bn", "grad_freeze", "adasum"}}
    section = config.get("boost", {})
    mode, on = section.get("mode", "auto"), set(rows[level])
    if mode == "manual":
        on = {flag for flag in FLAGS if section.get(flag, flag in on)}
    elif mode != "auto":
        on = set(FLAGS) if mode == "enable_all" else set()
    boost = AutoBoost(level, config)
    assert {flag for flag in FLAGS if boost.flags[flag]} == on
    for name, default in HYPER.items():
        said = [config[section][name] for section in {*on} & {*config} if name in config[section]]
        assert boost.hyper[name] == (said or [default])[0]
    stopped = {item.what for item in boost.inactive}
    if "dim_reduce" in on:
        assert not {"less_bn", "grad_freeze", "adasum"} & set(boost.active)
    assert set(boost.active) == on - stopped
    assert "adasum" not in boost.active  # one process
    assert ("grad_accumulation" in boost.active) == (
        "grad_accumulation" in on and boost.hyper["grad_accumulation_step"] > 1
    )


@given(CONFIGS, st.sampled_from(["", "boost", "grad_freeze", "nowhere"]), st.text(min_size=1, max_size=8))
@tries(0.5)
def test_a_name_that_no_configuration_has_is_refused(config, section, name):
    known = {*FLAGS, "mode", *HYPER, "common"}
    if name in known:
        return
    wrong = copy.deepcopy(config)
    if section == "":
        wrong[name] = {}
    else:
        wrong.setdefault(section, {})[name] = 1
    kept = copy.deepcopy(wrong)
    with pytest.raises(ValueError, match="has no"):
        AutoBoost("O2", wrong)
    assert wrong == kept


@given(st.integers(1, 12), st.none() | st.integers(0, 12) | st.lists(st.integers(0, 12), max_size=4))
@tries(0.4)
def test_fusion_ids_count_the_splits_before(count, splits):
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
    ParameterProcess().assign_parameter_group(parameters, splits)
    points = {splits} if isinstance(splits, int) else set(splits or [count // 2])
    assert [p.comm_fusion for p in parameters] == [1 + sum(s <= i for s in points) for i in range(count)]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=5, unique=True), min_size=1, max_size=3), st.sets(st.integers(0, 9))
)
@tries(0.4)
def test_regrouped_parameters_stand_once_with_their_options(groups, wanted):
    taken, mine = set(), []
    for group in groups:
        mine.append([i for i in group if i not in taken])
        taken |= set(group)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(10)]
    number = {id(p): i for i, p in enumerate(parameters)}
    origin = [{"params": [parameters[i] for i in group], "lr": k} for k, group in enumerate(mine)]
    result = ParameterProcess.generate_group_params([parameters[i] for i in sorted(wanted)], origin)
    placed = {number[id(p)]: group["lr"] for group in result for p in group["params"]}
    assert sorted(number[id(p)] for group in result for p in group["params"]) == sorted(wanted)
    for i, rate in placed.items():
        owners = [k for k, group in enumerate(mine) if i in group]
        assert rate == owners[0] if owners else rate == 0  # all groups have as many options, so the first counts


@given(st.integers(0, 64), st.integers(1, 8))
@tries(0.4)
def test_adasum_runs_on_a_power_of_two_of_nodes(world, devices):
    assert adasum_enabled(world, devices) is (world // devices in (2, 4, 8, 16, 32, 64))


@given(st.sampled_from([1, 2, 4]), st.lists(st.integers(-9, 9), min_size=2, max_size=5), st.integers(1, 4))
@tries(0.4)
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(ranks, numbers, factor):
    row = torch.tensor([float(n) for n in numbers])
    size = len(row)
    apart = [torch.zeros(ranks * size) for _ in range(ranks)]
    for rank, delta in enumerate(apart):
        delta[rank * size : (rank + 1) * size] = row * factor**rank
    together = torch.stack(apart).sum(0)
    torch.testing.assert_close(adasum([[d] for d in apart])[0], together, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(adasum([[row]] * ranks)[0], row, rtol=1e-5, atol=1e-6)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=12), st.floats(0.1, 0.9), st.floats(1, 1.5))
@tries(0.4)
def test_scales_of_groups_shrink_apart_and_stay_in_their_bounds(steps, shrink, growth):
    """Gradients are given by hand, so no marker saw an overflow come: every group that has one is to blame."""
    groups = [[nn.Parameter(torch.zeros(2))] for _ in range(3)]
    manager = GroupLossScaleManager(8.0, groups, shrink=shrink, growth=growth, min_scale=2.0, max_scale=64.0)
    want = np.full(3, 8, np.float32)
    for flags in steps:
        for (p,), bad in zip(groups, flags):
            p.grad = torch.tensor([1.0, math.inf if bad else 3.0])
        used = want.copy()
        assert manager.unscale_and_update_().tolist() == flags
        want = (want * np.where(flags, np.float32(shrink), np.float32(growth))).clip(2, 64).astype(np.float32)
        assert manager.scales.tolist() == want.tolist()
        for (p,), scale in zip(groups, used):
            assert p.grad[0].item() == np.float32(1) * (np.float32(1) / scale)


# --- Model and recorder


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, run):
        if run.cur_step_num == self.step:
            run.request_stop()


@given(
    st.lists(ROWS | OVERFLOWS, min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(1, 12), max_size=3),
    st.sampled_from([1, 2]),
)
@tries(0.25)
def test_a_model_stopped_saved_and_loaded_anywhere_ends_as_fractions(rows, epochs, stops, parts):
    def fresh():
        net = Lines()
        manager = DynamicLossScaleManager(1024, 2, 3)
        made = Model(
            net, None, OPTIMIZERS["torch"](net.parameters()), loss_scale_manager=manager, accumulation_steps=parts
        )
        return made, manager

    batches, exact, flags = [(torch.tensor([row]),) for row in rows], Exact(True, parts), []
    for row in rows * epochs:
        ends = len(exact.rows) + 1 == parts
        flags.append(exact.step(row))
        flags = flags if ends else [*flags[:-1], False]
    model, manager = fresh()
    if not all(math.isfinite(v) for row in rows for v in row) and parts == 1 and exact.scale <= 1:
        return  # a warning that every step is skipped: test_model has it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        for stop in sorted(set(stops)):
            if stop < len(rows) * epochs:
                model.train(epochs, batches, StopAt(stop))
                model.save(path)
                model, manager = fresh()
                model.load(path)
        model.train(epochs, batches)
    assert exact.met_by(model.network)
    assert float(model.train_network.scale_sense) == exact.scale
    oracle = DynamicLossScaleManager(1024, 2, 3)
    for bad in flags:
        oracle.update_loss_scale(bad)
    assert manager.state_dict() == oracle.state_dict()


@given(st.lists(ROWS, min_size=2, max_size=5), st.integers(1, 9), st.integers(1, 3))
@tries(0.2)
def test_a_training_that_fails_goes_on_from_its_last_checkpoint(rows, fails, every):
    """An error in any step; the file of the last full interval and the rest of the data give the whole run."""

    def fresh():
        return Model(net := Lines(), None, OPTIMIZERS["Momentum"](net.parameters()))

    batches, exact = [(torch.tensor([row]),) for row in rows], Exact(False)
    for row in rows * 2:
        exact.step(row)

    class Fail(Callback):
        def on_train_step_end(self, run):
            if run.cur_step_num == fails:
                raise BoomError

    with tempfile.TemporaryDirectory() as folder:
        saving, model = Checkpoint(Path(folder) / "model.ckpt", every), fresh()
        if fails <= 2 * len(rows):
            with pytest.raises(BoomError):
                model.train(2, batches, [Fail(), saving])
            model = fresh()
            if saving.path.exists():
                model.load(saving.path)
        model.train(2, batches, saving)
    assert exact.met_by(model.network)


@given(st.lists(ROWS | OVERFLOWS | st.sampled_from(["file", "back"]), max_size=12), st.integers(1, 3), st.booleans())
@tries(0.4)
def test_a_recorder_writes_down_what_happened(events, every, by_module):
    """Resumed and set back at random: what is trained again replaces what was written, as lists would have it."""

    def fresh():
        net = Lines()
        seen = Recorder(net, every=every, by="module" if by_module else "parameter")
        made = OPTIMIZERS["torch"](net.parameters())
        return TrainOneStepWithLossScaleCell(net, made, DynamicLossScaler(1024, 2, 3), hooks=[seen]), seen

    (cell, recorder), kept, saved = fresh(), [], None
    for event in events:
        if isinstance(event, tuple):
            scale = float(cell.scale_sense)
            cell(torch.tensor([event]))
            kept.append((event, scale))
        elif event == "file":
            saved, length = copy.deepcopy(cell.state_dict()), len(kept)
        elif saved is not None:
            cell.load_state_dict(copy.deepcopy(saved))
            del kept[length:]
    trace = recorder.trace()
    assert trace.step.tolist() == list(range(len(kept)))
    assert trace.scale.tolist() == [scale for _, scale in kept]
    bad = [not all(map(math.isfinite, row)) for row, _ in kept]
    assert trace.overflow.tolist() == bad
    assert trace.gradients.step.tolist() == list(range(0, len(kept), every))
    for place, step in enumerate(range(0, len(kept), every)):
        row = kept[step][0]
        finite = [abs(v) for v in row if math.isfinite(v)]
        zeros, wrong = finite.count(0.0), len(row) - len(finite)
        assert trace.gradients.zeros[place].tolist() == [zeros] * LAYERS
        assert trace.gradients.nonfinite[place].tolist() == [wrong] * LAYERS
        found = {e: int(n) for e, n in zip(trace.gradients.exponents, trace.gradients.counts[place, 0]) if n}
        assert found == {
            e: sum(math.frexp(v)[1] - 1 == e for v in finite if v) for e in {math.frexp(v)[1] - 1 for v in finite if v}
        }
        if not wrong:
            assert trace.gradients.largest[place].tolist() == [max(finite)] * LAYERS
            assert trace.grad_norm[step] == pytest.approx(math.sqrt(LAYERS * sum(v * v for v in row)), rel=1e-6)


@given(LIVES)
@tries(0.2)
def test_a_boosted_cell_without_a_scale_checks_nothing(events):
    """No event may be skipped: what is not finite goes into the weights, as the framework has it."""
    net = Lines()
    cell = BoostTrainOneStepCell(net, OPTIMIZERS["torch"](net.parameters()))
    exact, clean = Exact(False), True
    for event in events:
        if isinstance(event, tuple):
            assert not bool(cell(torch.tensor([event])).overflow)
            clean &= all(map(math.isfinite, event))
            if clean:
                exact.step(event)
    if clean:
        assert exact.met_by(net)
    else:
        assert not all(p.isfinite().all() for p in net.parameters())
