"""The training step: what it computes, what it skips, what it never waits for, and what it says when it cannot."""

from __future__ import annotations

import pytest
import torch
from stepping import same
from support import assert_same, without_a_wait
from torch import nn

from mpkit import optimizers
from mpkit.bench import HostReads
from mpkit.policies import preset
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
)
from mpkit.step import Hook, ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell

OPTIMIZERS = {
    "torch SGD": lambda p: torch.optim.SGD(p, 0.05, fused=True),
    "torch SGD momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "torch Adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "torch AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "Momentum": lambda p: optimizers.Momentum(p, 0.05, 0.9),
    "SGD": lambda p: optimizers.SGD(p, 0.05),
    "Adam": lambda p: optimizers.Adam(p, 0.01),
}
ON_HOST = {
    "torch SGD, not fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "torch Adam, not fused": lambda p: torch.optim.Adam(p, 0.01),
    "torch SGD dampened": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, fused=True),
}
SENSES = {
    "tensor": lambda: torch.tensor(1024.0),
    "tensor (1,)": lambda: torch.tensor([1024.0]),
    "fixed cell": lambda: FixedLossScaleUpdateCell(1024.0),
    "dynamic cell": lambda: DynamicLossScaleUpdateCell(1024.0, 2, 3),
    "dynamic scaler": lambda: DynamicLossScaler(1024.0, 2, 3),
    "static scaler": lambda: StaticLossScaler(1024.0),
    "torch policy": lambda: PolicyLossScaler(preset("torch", init_scale=1024.0, growth_interval=3)),
    "deepspeed policy": lambda: PolicyLossScaler(preset("deepspeed", init_scale=1024.0, scale_window=3)),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(count, bad=()):
    generator = torch.Generator().manual_seed(7)
    made = [(torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]
    for index in bad:
        made[index][0][0, 0] = torch.inf
    return made


def cell_for(optimizer="torch SGD momentum", sense="dynamic cell", seed=0, **options):
    net = network(seed)
    make = (OPTIMIZERS | ON_HOST)[optimizer] if isinstance(optimizer, str) else optimizer
    loss = WithLossCell(net, nn.MSELoss())
    return TrainOneStepWithLossScaleCell(loss, make(net.parameters()), SENSES[sense](), **options)


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


# --- what a step computes


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *ON_HOST])
def test_steps_that_overflow_leave_nothing_behind_also_the_very_first(optimizer):
    """torch's fused SGD creates momentum buffers without initialising them when its first step is skipped."""
    skips, clean = cell_for(optimizer), cell_for(optimizer, sense="tensor")
    for index, (x, y) in enumerate(batches(6, bad=(0, 3, 4))):
        assert bool(skips(x, y).overflow) is (index in (0, 3, 4))
        if index not in (0, 3, 4):
            clean(x, y)
    assert same(weights(skips), weights(clean))
    assert_same(skips.optimizer.state_dict()["state"], clean.optimizer.state_dict()["state"])


def test_return_grad_gives_the_scaled_gradients_by_name():
    net = network()
    cell = TrainOneStepCell(WithLossCell(net, nn.MSELoss()), torch.optim.SGD(net.parameters(), 0.0), 4.0, True)
    x, y = batches(1)[0]
    loss, grads = cell(x, y)
    reference = network()
    expected = nn.functional.mse_loss(reference(x), y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert set(grads) == {name for name, _ in reference.named_parameters()}
    for name, p in reference.named_parameters():
        assert torch.equal(grads[name], p.grad * 4)


def test_parameters_that_the_optimizer_leaves_out_do_not_sum_gradients():
    net = network()
    optimizer = torch.optim.SGD(net[2].parameters(), 0.0)
    cell = TrainOneStepWithLossScaleCell(WithLossCell(net, nn.MSELoss()), optimizer, torch.tensor(8.0))
    x, y = batches(1)[0]
    cell(x, y)
    before = net[0].weight.grad.clone()
    cell(x, y)
    assert torch.equal(net[0].weight.grad, before)


# --- what a step never waits for


def test_no_host_read_with_accumulation_and_with_several_optimizers():
    cell = cell_for(accumulation_steps=4)
    net = network()
    pair = [torch.optim.SGD(net[0].parameters(), 0.1, fused=True), optimizers.Adam(net[2].parameters(), 0.01)]
    step = ScaledStep(pair, DynamicLossScaleUpdateCell(1024.0, 2, 3))
    data = batches(10, bad=(3,))
    with HostReads() as reads:
        for index in range(100):
            x, y = data[index % 10]
            cell(x, y)
            step.backward(nn.functional.mse_loss(net(x), y))
            step.unscale_()
            step.clip_(1.0)
            step.update()
    assert reads.count == 0


# --- hooks


def test_hooks_see_in_each_phase_what_is_known_by_then():
    seen = {}

    def note(phase, ctx):
        grads = [p.grad.abs().max().item() for p in ctx.network.parameters() if p.grad is not None]
        seen[phase] = max(grads, default=None), ctx.loss is not None, ctx.overflow is not None, ctx.outcome

    phases = (
        *("before_forward", "before_backward", "after_backward"),
        *("after_unscale", "before_update", "after_update"),
    )
    notes = type("Notes", (Hook,), {phase: lambda self, ctx, phase=phase: note(phase, ctx) for phase in phases})
    out = cell_for(sense="tensor", hooks=[notes()])(*batches(1)[0])
    true = seen["after_unscale"][0]
    before, after = [(None, False, False, None), (None, True, False, None)], [(true, True, True, None)] * 2
    assert list(seen.values()) == [*before, (true * 1024, True, False, None), *after, (true, True, True, out)]


def test_an_error_in_the_optimizer_leaves_the_scale_as_it_was():
    cell = cell_for(sense="dynamic cell")
    data, broken = batches(3), Hook()
    cell(*data[0])
    cell(*data[1])  # the next step would grow the scale
    before = weights(cell)
    broken.before_update = lambda ctx: 1 / 0
    cell.hooks.append(broken)
    with pytest.raises(ZeroDivisionError):
        cell(*data[2])
    assert cell.scale_sense.item() == 1024.0
    assert same(before, weights(cell))
    cell.hooks.clear()
    assert cell(*data[2]).scale.item() == 2048.0


# --- clipping and accumulation


def test_the_scale_may_not_change_within_an_accumulation():
    cell = cell_for(sense="tensor", accumulation_steps=2)
    cell(*batches(1)[0])
    with pytest.raises(RuntimeError, match="1 of 2 micro-batches are summed at the old scale"):
        cell.set_sense_scale(torch.tensor(2.0))
    cell(*batches(1)[0])
    for wrong in (torch.ones(2), torch.tensor(2)):
        with pytest.raises(ValueError, match=r"floating tensor of shape \(\)"):
            cell.set_sense_scale(wrong)
    cell.set_sense_scale(torch.tensor(2.0))
    assert (cell.scale_sense.item(), cell.adjust) == (2.0, None)


# --- several losses and optimizers


def two_parts():
    torch.manual_seed(3)
    return nn.Linear(5, 3), nn.Linear(5, 3)


@pytest.mark.parametrize("fused", [True, False])
def test_two_optimizers_that_skip_each_for_itself_are_those_of_grad_scaler(fused):
    ours, theirs = two_parts(), two_parts()
    optimizers_ = [[torch.optim.SGD(m.parameters(), 0.1, fused=fused) for m in pair] for pair in (ours, theirs)]
    given = {"init_scale": 64.0, "growth_interval": 2}
    step = ScaledStep(optimizers_[0], PolicyLossScaler(preset("torch", **given)), skip="each")
    scaler = torch.amp.GradScaler("cpu", **given)
    for index, (x, y) in enumerate(batches(8)):
        inputs = [x.clone(), x.clone()]
        if index in (2, 5):
            inputs[index % 2][0, 0] = torch.inf  # first one part overflows, then the other
        for net, data in zip(ours, inputs):
            step.backward(nn.functional.mse_loss(net(data), y))
        step.unscale_()
        step.update()
        for net, data, optimizer in zip(theirs, inputs, optimizers_[1]):
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(net(data), y)).backward()
        for optimizer in optimizers_[1]:
            scaler.step(optimizer)
        scaler.update()
        assert step.scale.item() == scaler.get_scale()
        for a, b in zip(ours, theirs):
            assert same(weights(a), weights(b))


@pytest.mark.parametrize(
    ("optimizers", "skip", "error", "words"),
    [
        (2, "all", ValueError, "share a parameter"), (1, "some", ValueError, "skip must be"),
        (0, "all", TypeError, "non-empty"),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_step_together_are_refused(optimizers, skip, error, words):
    net = network()
    with pytest.raises(error, match=words):
        ScaledStep([torch.optim.SGD(net.parameters(), 0.1) for _ in range(optimizers)], torch.tensor(1.0), skip=skip)


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_the_scale_stays_float32_when_the_cell_changes_its_dtype(change):
    cell = cell_for()
    scale = cell.scale_sense.clone()
    getattr(cell, change)()
    assert cell.scale_sense.dtype == torch.float32
    assert torch.equal(cell.scale_sense, scale)
    assert next(cell.network.parameters()).dtype != torch.float32


def test_an_optimizer_that_needs_a_closure_is_refused():
    net = network()
    with pytest.raises(TypeError, match="LBFGS calls the loss several times"):
        TrainOneStepCell(net, torch.optim.LBFGS(net.parameters()))


# --- what a step says when it cannot


class Loss(nn.Module):
    """Returns whatever `make` makes of the network's output."""

    def __init__(self, net, make):
        super().__init__()
        self.net, self.make = net, make

    def forward(self, x, y):
        return self.make(self.net(x))


BAD_LOSSES = [
    (lambda out: out.sum(1), ValueError, r"scalar loss, got shape \(8,\)"),
    (lambda out: out.detach().sum(), ValueError, "the loss has no gradient"),
    (lambda out: (out.sum(), out), TypeError, "the loss as one real tensor, got tuple"),
    (lambda out: out.sum() * 1j, TypeError, "one real tensor, got torch.complex64"),
    (lambda out: 1.5, TypeError, "the loss as one real tensor, got float"),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD_LOSSES)
def test_a_loss_that_cannot_be_differentiated_says_so(make, error, words):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for cell in (
        TrainOneStepCell(Loss(net, make), optimizer),
        TrainOneStepWithLossScaleCell(Loss(net, make), optimizer, torch.tensor(8.0)),
    ):
        with pytest.raises(error, match=words):
            cell(*batches(1)[0])


# --- on a GPU


@pytest.fixture
def on_gpu():
    def made(optimizer, sense="dynamic cell", **options):
        cell = cell_for(optimizer, sense, **options)
        net = cell.network.cuda()
        make = optimizer if callable(optimizer) else OPTIMIZERS[optimizer]
        return TrainOneStepWithLossScaleCell(net, make(net.parameters()), SENSES[sense](), **options)

    return made


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "sense"), [*((o, "dynamic cell") for o in OPTIMIZERS), *(("torch SGD", s) for s in SENSES)]
)
def test_no_step_synchronises_on_a_gpu(on_gpu, optimizer, sense):
    cell = on_gpu(optimizer, sense, clip_norm=1.0)
    data = [(x.cuda(), y.cuda()) for x, y in batches(6, bad=(0, 3))]
    cell(*data[1])  # the first call may synchronise: libraries start, states are made
    torch.cuda.synchronize()
    with without_a_wait():
        for x, y in data:
            cell(x, y)
    assert all(w.isfinite().all() for w in weights(cell))


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one_bit_for_bit(on_gpu):
    from mpkit.casting import auto_mixed_precision

    def made():
        cell = on_gpu(lambda p: torch.optim.Adam(p, 0.01, fused=True, capturable=True))
        auto_mixed_precision(cell.network.backbone, "O2")
        return cell

    eager, captured = made(), made()
    data = [(x.cuda(), y.cuda()) for x, y in batches(20, bad=(8, 9, 15))]
    static = [t.clone() for t in data[0]]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x, y in data[:5]:  # warm-up, which trains too
            for hold, new in zip(static, (x, y)):
                hold.copy_(new)
            captured(*static)
            eager(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = captured(*static)
    for x, y in data[5:]:
        for hold, new in zip(static, (x, y)):
            hold.copy_(new)
        graph.replay()
        expected = eager(x, y)
        assert torch.equal(outcome.scale, expected.scale)
        assert torch.equal(outcome.overflow, expected.overflow)
    assert same(weights(eager), weights(captured))
    assert eager.scale_sense.item() == captured.scale_sense.item()


def test_a_hook_and_an_earlier_outcome_keep_the_scale_that_a_step_used():
    used = Hook()
    used.after_update = lambda ctx: setattr(used, "scale", ctx.scale)
    cell = cell_for(hooks=[used])
    before = cell.scale_sense.clone()
    assert cell(*batches(1, bad=(0,))[0]).scale < before  # an overflow moves the live scale
    assert torch.equal(used.scale, before)
    cell = cell_for(accumulation_steps=2)
    first, second = (cell(*batch) for batch in batches(2, bad=(1,)))
    assert torch.equal(first.scale, before)
    assert second.scale < before
