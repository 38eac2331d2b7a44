"""Training goes on rightly after what people do to it: weights changed from outside, errors, copies, other dtypes."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from support import assert_same
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mpkit import optimizers as opt
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GradientFreeze,
    LessBN,
)
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.casting import auto_mixed_precision, ledger, to_float
from mpkit.model import Callback, Checkpoint, Model
from mpkit.networks import resnet18
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    PolicyLossScaler,
    check_and_unscale_,
)
from mpkit.schedules import CosineDecayLR, ListedLR
from mpkit.step import ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell, build_train_network

HALVES = (torch.float16, torch.bfloat16)


def one_weight(dtype=torch.float32, value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=dtype))


def stepped(optimizer, p, gradient, found=None):
    p.grad = torch.full_like(p, gradient)
    optimizer.found_inf = None if found is None else torch.full((), found, dtype=torch.float32)
    optimizer.step()
    return p.item()


# --- weights changed from outside


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("found", [None, 0.0])
@pytest.mark.parametrize("make", [lambda p: opt.Momentum(p, 0.125, 0.0), lambda p: opt.SGD(p, 0.125)])
def test_a_sixteen_bit_weight_written_from_outside_is_where_training_goes_on(make, found, dtype):
    p = one_weight(dtype)
    optimizer = make([p])
    assert stepped(optimizer, p, 1.0, found) == -0.125
    for write in (
        lambda: p.data.copy_(torch.tensor([5.0])),  # .data: the version counter does not see it
        lambda: p.data.fill_(5.0),
        lambda: setattr(p, "data", torch.full((1,), 5.0, dtype=dtype)),
    ):
        write()
        assert stepped(optimizer, p, 0.0, found) == 5.0
        assert stepped(optimizer, p, 8.0, found) == 4.0


def test_what_the_master_holds_beyond_sixteen_bits_survives_steps_without_a_write():
    p = one_weight(torch.float16, 1.0)
    optimizer = opt.SGD([p], 2.0**-14)  # an eighth of the ulp below 1
    assert [stepped(optimizer, p, 1.0) for _ in range(5)] == [1.0, 1.0, 1.0, 1.0, 1.0 - 2**-11]
    assert stepped(optimizer, p, math.inf, found=1.0) == 1.0 - 2**-11
    assert optimizer.state[p]["master"].item() == 1 - 5 * 2**-14


def test_masters_are_followed_tensor_by_tensor_and_flat_alike():
    masters = [torch.randn(5), torch.randn(2, 3)]
    params = [m.half() for m in masters]
    params[1][0, 0] = 7.0
    want = [m.clone() for m in masters]
    want[1][0, 0] = 7.0
    flat = opt.base._followed(*map(torch._utils._flatten_dense_tensors, (masters, params)))
    assert torch.equal(flat, torch.cat([w.view(-1) for w in want]))
    opt.base.follow_(masters, params)
    assert all(map(torch.equal, masters, want))


def test_a_network_cast_after_its_optimizer_was_used_trains_on():
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(1.0)
    optimizer = opt.Momentum(net.parameters(), 0.5, 0.0)
    stepped(optimizer, net.weight, 1.0)
    net.half()
    assert stepped(optimizer, net.weight, 1.0) == 0.0
    assert optimizer.state[net.weight]["master"].dtype == torch.float32
    net.float()
    assert stepped(optimizer, net.weight, 1.0) == -0.5
    assert "master" not in optimizer.state[net.weight]


# --- torch.compile

writes_optimizers = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="the compiler of torch 2.11 cannot write an attribute of an optimizer"
)


def freezing(trained, kept):
    return FreezeOpt(
        opt.SGD([*trained, kept], [1.0, 0.1, 0.01, 0.001, 0.5]), [[*trained, kept], [kept]], [0, 1, 0, 0, 1]
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: opt.SGD(p, [1.0, 0.1, 0.01, 0.001, 0.5]),
        lambda p: opt.Momentum(p, 0.1, 0.9, weight_decay=lambda step: 0.1 * (step + 1)),
        lambda p: opt.Adam(p, CosineDecayLR(0.0, 0.1, 4)),
        lambda p: opt.AdaFactor(p),
        pytest.param(
            lambda p: freezing(p, one_weight()),
            marks=writes_optimizers,
        ),
    ],
)
def test_a_compiled_step_follows_schedules_decay_functions_and_the_strategy(make):
    torch.compiler.reset()
    a, b = one_weight(value=2.0), one_weight(value=2.0)
    compiled, eager = make([a]), make([b])
    step = torch.compile(compiled.step, backend="eager")
    for _ in range(5):
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        step()
        eager.step()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert compiled.global_step == eager.global_step
    if isinstance(eager, FreezeOpt):
        assert (compiled.step_index, compiled.steps) == (eager.step_index, eager.steps) == (0, 5)
    torch.compiler.reset()


@writes_optimizers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "most"),
    [([0, 1, 2, 1] * 6, 4), ([0, 2, 1], 4), (None, 4)],  # three, and one where a number becomes a variable
    ids=["long", "short", "round robin"],
)
def test_a_compiled_freezeopt_makes_graphs_for_its_groups_and_not_for_its_steps(strategy, most):
    torch.compiler.reset()
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    def made():
        params = [one_weight(value=2.0) for _ in range(3)]
        return params, FreezeOpt(opt.SGD(params, [0.1] * 30), [params[i:] for i in range(3)], strategy)

    (params, compiled), (twins, eager) = made(), made()
    step = torch.compile(compiled.step, backend=backend, fullgraph=len(strategy or ()) < 8)
    for _ in range(26):
        for p in [*params, *twins]:
            p.grad = torch.ones(1)
        step()
        eager.step()
        torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-7)
    assert (compiled.step_index, compiled.steps) == (eager.step_index, eager.steps)
    assert 3 <= len(graphs) <= most
    torch.compiler.reset()


@writes_optimizers
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_cell_follows_the_schedule_and_skips():
    torch.compiler.reset()

    def made():
        net = nn.Linear(2, 1)
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        optimizer = opt.SGD(net.parameters(), [0.1, 0.01, 0.001, 0.0001])
        network = WithLossCell(net, nn.MSELoss())
        return net, TrainOneStepWithLossScaleCell(network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2))

    (a, compiled), (b, eager) = made(), made()
    run = torch.compile(compiled, backend="eager")
    for step in range(4):
        x = torch.full((2, 2), math.inf if step == 2 else 1.0)
        for cell in (run, eager):
            cell(x, torch.zeros(2, 1))
    assert compiled.optimizer.global_step == eager.optimizer.global_step == 3
    assert compiled.scale_sense == eager.scale_sense
    torch.testing.assert_close(a.weight, b.weight)
    torch.compiler.reset()


def accumulating() -> AutoBoost:
    flags = {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True}
    return AutoBoost("O1", {"boost": flags, "grad_accumulation": {"grad_accumulation_step": 2}})


@writes_optimizers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", [lambda p: opt.Momentum(p, 0.1, 0.9), lambda p: torch.optim.AdamW(p, 0.01)])
@pytest.mark.parametrize(
    "cell",
    [
        TrainOneStepCell,
        lambda network, optimizer: TrainOneStepWithLossScaleCell(
            network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2), accumulation_steps=2, clip_norm=1.0
        ),
        lambda network, optimizer: BoostTrainOneStepWithLossScaleCell(
            network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2), boost=accumulating()
        ),
    ],
    ids=["plain", "accumulated", "boost's accumulation"],
)
def test_a_compiled_cell_makes_no_graph_for_its_later_steps(cell, optimizer):
    torch.compiler.reset()
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    def made():
        torch.manual_seed(0)
        net = nn.Linear(2, 3)
        return cell(WithLossCell(net, nn.CrossEntropyLoss()), optimizer(net.parameters()))

    compiled, eager = made(), made()
    run, counts = torch.compile(compiled, backend=backend), []
    for step in range(16):  # the compiler gives up after eight of one function
        x = torch.full((2, 2), math.inf if step == 5 and cell is not TrainOneStepCell else 1.0 / (step + 1))
        for one in (run, eager):
            one(x, torch.tensor([0, 2]))
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[3] == counts[-1]  # all kinds of call have been made once: with an update and without
    assert compiled.index == eager.index == 16
    torch.testing.assert_close(list(compiled.network.parameters()), list(eager.network.parameters()))
    torch.compiler.reset()


# --- accumulation


def test_boosts_accumulation_clips_the_mean_and_not_its_parts():
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.zero_()
    boost = AutoBoost(
        "O1",
        {
            "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True},
            "grad_accumulation": {"grad_accumulation_step": 2},
        },
    )
    cell = BoostTrainOneStepCell(
        WithLossCell(net, Output()), torch.optim.SGD(net.parameters(), 1.0), boost=boost, clip_norm=2.0
    )
    for x in (8.0, -6.0):  # the gradients; their mean is 1, their parts clipped to 2 have the mean 0
        cell(torch.tensor([[x]]), None)
    assert net.weight.item() == -1.0


class Output(nn.Module):
    def forward(self, output, _label):
        return output.sum()


class Fails(torch.autograd.Function):
    """Passes x on; the backward pass raises when told to."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            Fails.now = False
            raise RuntimeError("out of memory")
        return grad


class TwoLayers(nn.Module):
    """The second layer has its gradient before the first one's fails. One number each: exact on any machine."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(1, 1)) for _ in range(2))

    def forward(self, x):
        return (self.last * Fails.apply(self.first * x.view(1, 1))).sum()


def test_an_error_in_the_middle_of_an_accumulation_counts_nothing_twice():
    net = TwoLayers()
    cell = TrainOneStepCell(net, torch.optim.SGD(net.parameters(), 1.0), accumulation_steps=2)
    cell(torch.ones(1, 1))
    Fails.now = True
    with pytest.raises(RuntimeError, match="out of memory"):
        cell(torch.ones(1, 1))
    assert cell.pending == 0
    for _ in range(2):
        cell(torch.ones(1, 1))
    assert net.last.item() == net.first.item() == 0.0


def test_an_error_in_the_forward_pass_leaves_the_accumulation_as_it_is():
    net = TwoLayers()
    cell = TrainOneStepCell(net, torch.optim.SGD(net.parameters(), 1.0), accumulation_steps=2)
    cell(torch.full((1, 1), 2.0))
    with pytest.raises(RuntimeError):
        cell(torch.ones(1, 3))
    cell(torch.full((1, 1), 4.0))
    assert net.last.item() == 1.0 - 3.0


# --- a step by hand


class Breaks(torch.optim.SGD):
    broken = True

    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("no disk")
        return super().step(closure)


def two_optimizers():
    a, b = one_weight(value=1.0), one_weight(value=1.0)
    return a, b, ScaledStep([torch.optim.SGD([a], 0.5), Breaks([b], 0.5)], torch.tensor(4.0))


def test_a_step_by_hand_goes_on_where_an_optimizer_failed():
    a, b, step = two_optimizers()
    step.backward((a + b).sum())
    with pytest.raises(RuntimeError, match="no disk"):
        step.update()
    assert (a.item(), b.item()) == (0.5, 1.0)
    step.optimizers[1].broken = False
    step.update()
    assert (a.item(), b.item()) == (0.5, 0.5)
    step.backward((a + b).sum())  # and the next step is a whole one
    step.update()
    assert (a.item(), b.item()) == (0.0, 0.0)


def test_a_failed_step_by_hand_can_be_given_up():
    a, b, step = two_optimizers()
    step.backward((a + b).sum())
    with pytest.raises(RuntimeError, match="no disk"):
        step.update()
    with pytest.raises(RuntimeError, match="drop"):
        step.backward((a + b).sum())
    step.drop()
    step.optimizers[1].broken = False
    step.backward((a + b).sum())
    step.update()
    assert (a.item(), b.item()) == (0.0, 0.5)


def test_an_error_in_a_backward_pass_by_hand_gives_the_step_up():
    net = TwoLayers()
    step = ScaledStep(torch.optim.SGD(net.parameters(), 1.0), torch.tensor(4.0))
    Fails.now = True
    with pytest.raises(RuntimeError, match="out of memory"):
        step.backward(net(torch.ones(1, 1)))
    step.backward(net(torch.ones(1, 1)))
    step.update()
    assert net.last.item() == 0.0


def test_a_refused_state_changes_nothing_of_a_step_by_hand():
    def made():
        a, b = one_weight(), one_weight()
        optimizers = [opt.Momentum([a], 0.1, 0.9), opt.Adam([b], 0.1)]
        return a, b, ScaledStep(optimizers, DynamicLossScaler(8.0, 2, 2))

    a, b, step = made()
    step.backward((a + b).sum())
    step.update()
    other = made()[2]
    before = copy.deepcopy(other.state_dict())
    for change in (
        lambda state: state["optimizers"][1].update(param_groups=[]),
        lambda state: state["optimizers"].reverse(),
        lambda state: state["rule"].pop("counter"),
        lambda state: state.update(scale=torch.ones(3)),
    ):
        saved = copy.deepcopy(step.state_dict())
        change(saved)
        with pytest.raises((ValueError, RuntimeError)):
            other.load_state_dict(saved)
        assert_same(other.state_dict(), before)
    other.load_state_dict(step.state_dict())
    assert_same(other.state_dict(), step.state_dict())


# --- any loader


class Draws(Dataset):
    """A data set that draws from generators of its own."""

    def __init__(self):
        self.torch = torch.Generator().manual_seed(5)
        self.transform = Noise()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.randn(2, generator=self.torch) + self.transform.numpy.normal() + self.transform.old.normal()
        return x + index, torch.zeros(1)


class Noise:
    def __init__(self):
        self.numpy, self.old = np.random.default_rng(3), np.random.RandomState(4)


def seeded():
    return torch.Generator().manual_seed(7)


def points():
    return TensorDataset(torch.arange(24.0).view(12, 2), torch.zeros(12, 1))


class DrawsBy(Draws):
    """A data set that draws through a function."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return torch.full((2,), index + float(self.draw())), torch.zeros(1)


class Draw:
    __slots__ = ("generator",)

    def __init__(self):
        self.generator = seeded()

    def __call__(self):
        return torch.rand((), generator=self.generator)


class DrawModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = seeded()

    def forward(self):
        return torch.rand((), generator=self.generator)


class OfTheClass(Draws):
    shared = np.random.default_rng(3)

    def __init__(self):
        type(self).shared = np.random.default_rng(3)

    def __getitem__(self, index):
        return torch.full((2,), index + self.shared.normal()), torch.zeros(1)


def draw_from(generator):
    return torch.rand((), generator=generator)


def draw_by_name():
    """From a generator of the module, as a cell of a notebook does."""
    return draw_from(by_name)


def anew():
    global by_name
    by_name = seeded()
    return draw_by_name


def noisy(generator, rows):
    return torch.stack([x for x, _ in rows]) + torch.rand((), generator=generator), torch.zeros(len(rows), 1)


class OneForEach(Draws):
    def __init__(self):
        self.generators = [torch.Generator().manual_seed(i) for i in range(100)]

    def __getitem__(self, index):
        return torch.rand(2, generator=self.generators[index + 80]), torch.zeros(1)


def deep(dataset):
    for _ in range(10):
        dataset = torch.utils.data.ConcatDataset([dataset])
    return dataset


class Counts(Sampler):
    """Another order in each pass, by the number of the pass."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 12

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.passes)).tolist())


class Stream(IterableDataset):
    """Goes on where the last epoch ended."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        for _ in range(12):
            self.place += 1
            yield torch.full((2,), float(self.place % 7)), torch.zeros(1)


class ByEpoch(Draws):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.full((2,), index * (1.0 + self.epoch)), torch.zeros(1)


LOADERS = {
    "batch sampler": lambda: DataLoader(
        points(), batch_sampler=BatchSampler(RandomSampler(points(), generator=seeded()), 4, False)
    ),
    "weighted, in a batch sampler": lambda: DataLoader(
        points(),
        batch_sampler=BatchSampler(WeightedRandomSampler(torch.ones(12), 12, generator=seeded()), 4, False),
    ),
    "a data set that draws": lambda: DataLoader(Draws(), batch_size=4),
    "a data set inside a data set": lambda: DataLoader(torch.utils.data.Subset(Draws(), range(12)), batch_size=4),
    "a function with a generator": lambda: DataLoader(DrawsBy(partial(draw_from, seeded())), batch_size=4),
    "a closure": lambda: DataLoader(DrawsBy((lambda own: lambda: draw_from(own))(seeded())), batch_size=4),
    "a default": lambda: DataLoader(DrawsBy(lambda own=seeded(): draw_from(own)), batch_size=4),  # noqa: B008
    "a method": lambda: DataLoader(DrawsBy(Draw().__call__), batch_size=4),
    "a method of NumPy": lambda: DataLoader(DrawsBy(np.random.default_rng(3).normal), batch_size=4),
    "a method of Python": lambda: DataLoader(DrawsBy(random.Random(3).random), batch_size=4),
    "slots": lambda: DataLoader(DrawsBy(Draw()), batch_size=4),
    "a module": lambda: DataLoader(DrawsBy(DrawModule()), batch_size=4),
    "a class": lambda: DataLoader(OfTheClass(), batch_size=4),
    "a name": lambda: DataLoader(DrawsBy(anew()), batch_size=4),
    "the collation": lambda: DataLoader(points(), batch_size=4, collate_fn=partial(noisy, seeded())),
    "a generator for each sample": lambda: DataLoader(OneForEach(), batch_size=4),
    "ten data sets deep": lambda: DataLoader(deep(Draws()), batch_size=4),
    "a sampler that counts": lambda: DataLoader(points(), batch_size=4, sampler=Counts()),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a sampler that is told the epoch": lambda: DataLoader(
        points(), batch_size=4, sampler=DistributedSampler(points(), 1, 0)
    ),
    "a data set that is told the epoch": lambda: DataLoader(ByEpoch(), batch_size=4),
}


class TellsTheEpoch(Callback):
    """As loops by hand do for a `DistributedSampler`."""

    def __init__(self, loader):
        self.told = [x for x in (loader.sampler, loader.dataset) if hasattr(x, "set_epoch")]

    def on_train_epoch_begin(self, run):
        for told in self.told:
            told.set_epoch(run.cur_epoch_num)


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run):
        self.seen.append(run.model.network.last.clone())


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        self.last = x.detach()
        return self.linear(x)


def small_model():
    torch.manual_seed(0)
    net = Remembers()
    return Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 1e-4))


class StopsAfter(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_step_end(self, run):
        if run.cur_step_num == self.steps:
            run.request_stop()


@pytest.mark.parametrize("steps", [2, 3, 5], ids=["first epoch", "its end", "second epoch"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_draws_the_same_batches(name, steps, tmp_path):
    whole, batches, loader = small_model(), Batches(), LOADERS[name]()
    whole.train(3, loader, [batches, TellsTheEpoch(loader)])
    first, loader = small_model(), LOADERS[name]()
    first.train(3, loader, [StopsAfter(steps), TellsTheEpoch(loader), Checkpoint(tmp_path / "c")])
    resumed, rest, loader = small_model(), Batches(), LOADERS[name]()
    resumed.load(tmp_path / "c")
    torch.manual_seed(99)
    resumed.train(3, loader, [rest, TellsTheEpoch(loader)])
    assert len(rest.seen) == 9 - steps
    assert_same(rest.seen, batches.seen[steps:])
    assert_same(resumed.network.state_dict(), whole.network.state_dict())


def test_a_data_set_with_another_setting_keeps_it_and_a_warning_says_so(tmp_path):
    def loader(rows):
        return DataLoader(points(), batch_sampler=BatchSampler(Counts(), rows, False))

    first, batches = small_model(), loader(4)
    first.train(3, batches, [StopsAfter(5), Checkpoint(tmp_path / "c")])
    first.load(tmp_path / "c")
    batches = loader(6)
    with pytest.warns(RuntimeWarning, match=r"BatchSampler.batch_size is 6 and was 4.*other batches"):
        first.train(3, batches)
    assert (batches.batch_sampler.batch_size, batches.batch_sampler.sampler.passes) == (6, 3)


@pytest.mark.parametrize("steps", [2, 5])
def test_kept_workers_give_the_same_order_and_a_warning(steps, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # s until a worker is ended

    def loader():
        return DataLoader(points(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(1)
    batches = Batches()
    small_model().train(3, loader(), batches)
    small_model().train(3, loader(), [StopsAfter(steps), Checkpoint(tmp_path / "c")])
    resumed, rest = small_model(), Batches()
    resumed.load(tmp_path / "c")
    if steps < 3:  # in the first epoch the workers are as new as they were
        resumed.train(3, loader(), rest)
    else:
        with pytest.warns(RuntimeWarning, match="persistent_workers=True"):
            resumed.train(3, loader(), rest)
    assert_same(rest.seen, batches.seen[steps:])
    gc.collect()  # kept workers end with their loader


def test_a_checkpoint_of_a_data_set_with_other_generators_is_refused(tmp_path):
    first = small_model()
    first.train(2, LOADERS["batch sampler"](), [StopsAfter(2), Checkpoint(tmp_path / "c")])
    resumed = small_model()
    resumed.load(tmp_path / "c")
    with pytest.raises(ValueError, match="held 1 random generators, this one holds 3"):
        resumed.train(2, LOADERS["a data set that draws"]())


# --- LessBN's last layer


def test_a_layer_that_a_transformer_reads_itself_is_not_normalised():
    net = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8, batch_first=True))
    report = LessBN(net, True, keep_bias=True).report
    assert report.normalized == ("0",)
    assert type(net[1].linear2) is nn.Linear
    net.eval()(torch.zeros(1, 2, 4))


def louder(linear):
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    return linear


def watched(linear):
    linear.register_full_backward_hook(lambda *_: None)
    return linear


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "to_float"])
def test_a_last_layer_that_was_cast_is_cast_as_before(level):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if level == "to_float":
        to_float(net[1], torch.float16)
    else:
        auto_mixed_precision(net, level)
    LessBN(net, True)
    assert type(net[1]) is NormalizedLinear
    with ledger(net) as made:
        net(torch.ones(1, 4))
    products = [row for row in made.rows if row.module == "1" and "linear" in row.operation]
    assert [row.compute for row in products] == ["float16"]


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), "weight_norm"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 2)), "weight_norm"),
        (lambda: nn.LazyLinear(2), "one batch"),
        (lambda: Louder(4, 2), "Louder"),
        (lambda: louder(nn.Linear(4, 2)), "a forward or hooks of its own"),
        (lambda: to_float(louder(nn.Linear(4, 2)), torch.float16), "a forward or hooks of its own"),
        (lambda: watched(nn.Linear(4, 2)), "a forward or hooks of its own"),
    ],
)
def test_a_last_layer_that_cannot_be_normalised_is_named(last, words):
    with pytest.raises(ValueError, match=rf"'1' .*{words}"):
        LessBN(nn.Sequential(nn.Linear(4, 4), last()), True)


# --- a failed set-up leaves no trace


def shape_of(net, optimizer):
    groups = [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
    return [(name, id(m), sorted(vars(m))) for name, m in net.named_modules()], groups, len(vars(optimizer))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metrics": {"accurcy"}}, ValueError),
        ({"metrics": 5}, TypeError),
        ({"clip_norm": -1.0}, ValueError),
        ({"clip_norm": "x"}, TypeError),
        ({"clip_norm": 1.0, "loss_scale_manager": FixedLossScaleManager(8.0, False)}, ValueError),
        ({"accumulation_steps": 0}, ValueError),
        ({"hooks": None}, TypeError),
        ({"eval_indexes": [1]}, ValueError),
        ({"eval_network": 5}, TypeError),
        ({"boost_config_dict": {"grad_freeze": {"param_groups": 0}}}, ValueError),
        ({"boost_config_dict": {"boost": {"mode": "manual", "dim_reduce": True}}}, ValueError),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_that_cannot_be_made_changes_nothing(level, options, error):
    torch.manual_seed(0)
    net = resnet18(width=2)
    optimizer = opt.Momentum(net.parameters(), 0.1, 0.9)
    before = shape_of(net, optimizer)
    with pytest.raises(error):
        Model(net, nn.CrossEntropyLoss(), optimizer, **{"amp_level": level, "boost_level": "O1", **options})
    assert shape_of(net, optimizer) == before
    x = torch.zeros(2, 3, 8, 8)
    assert net(x).dtype == torch.float32


def test_an_optimizer_that_cannot_step_is_refused_before_the_network_is_touched():
    net = resnet18(width=2)
    optimizer = torch.optim.LBFGS(net.parameters())
    before = shape_of(net, optimizer)
    with pytest.raises(TypeError, match="closure"):
        build_train_network(net, optimizer, nn.CrossEntropyLoss(), "O2", "O1")
    assert shape_of(net, optimizer) == before


# --- copies, sparse gradients, precision


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("faithful", [False, True])
def test_a_copy_of_a_scheduled_freezeopt_trains_the_copy(copier, faithful):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    _, optimizer = GradientFreeze(2, 0, 0.5, 4, faithful=faithful).freeze_generate(
        net, torch.optim.SGD(net.parameters(), 0.5)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    theirs, other = copier((net, optimizer))
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        other.zero_grad()
        theirs(torch.ones(1, 2)).sum().backward()
        other.step()
    assert_same(net.state_dict(), before)
    assert not torch.equal(theirs[1].weight, net[1].weight)
    assert (optimizer.steps, other.steps) == (0, 2)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()


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


TWINS = {
    "Rprop": (lambda p: opt.Rprop(p, 0.01), lambda p: torch.optim.Rprop(p, 0.01)),
    "Momentum": (lambda p: opt.Momentum(p, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "Adadelta": (lambda p: opt.Adadelta(p, 1.0), lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-6)),
}


@pytest.fixture(params=["on a device", "at hand"])
def flags(request, monkeypatch):
    """Where `found_inf` is read, and where neutral coefficients take the decision; see tests/test_optimizers.py."""
    if request.param == "on a device":
        monkeypatch.setattr(opt.base, "AT_HAND", frozenset())


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("found", [None, 0.0])
@pytest.mark.parametrize("name", TWINS)
def test_float64_weights_are_trained_in_float64(name, found):
    a, b = (nn.Parameter(torch.linspace(-3, 3, 7, dtype=torch.float64)) for _ in range(2))
    ours, theirs = (make([p]) for make, p in zip(TWINS[name], (a, b)))
    for step in range(6):
        for p in (a, b):
            p.grad = torch.sin(p.detach() * (step + 1))
        ours.found_inf = None if found is None else torch.zeros(())
        ours.step()
        theirs.step()
    torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("flags")
def test_a_schedule_on_the_device_gives_float64_weights_all_their_digits():
    p = one_weight(torch.float64)
    optimizer = opt.SGD([p], CosineDecayLR(0.0, 0.1, 10))
    assert stepped(optimizer, p, 1.0, 0.0) == -0.1
    expected = -0.1 - 0.05 * (1 + math.cos(math.pi / 10))
    assert stepped(optimizer, p, 1.0, 0.0) == pytest.approx(expected, rel=1e-15)


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def trained_under(name):
    """Weights after steps with a skip among them; everything is made inside, with an explicit dtype."""
    from test_optimizers import FIXED_RATE, MEMBERS

    p = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float32).view(3, 4))
    options = {} if name in FIXED_RATE else {"lr": CosineDecayLR(0.0, 0.1, 10)}
    optimizer = MEMBERS[name]([p], **options)
    for step, found in enumerate((0.0, 1.0, 0.0, 0.0)):
        p.grad = torch.full_like(p, 0.3) * (step + 1)
        optimizer.found_inf = torch.full((), found, dtype=torch.float32)
        optimizer.step()
    return p.detach(), dict(optimizer.state[p])


def pytest_generate_tests(metafunc):
    if "member" in metafunc.fixturenames:
        from test_optimizers import MEMBERS

        metafunc.parametrize("member", MEMBERS)


@pytest.mark.usefixtures("flags")
def test_optimizers_do_not_look_at_the_default_dtype(member, default_dtype):
    under = trained_under(member)
    torch.set_default_dtype(torch.float32)
    assert_same(under, trained_under(member))


def scaled_run():
    from mpkit.boost import GroupLossScaleManager
    from mpkit.policies import preset
    from mpkit.scalers import DynamicLossScaleManager

    found = []
    for scaler in (
        PolicyLossScaler(preset("torch")),
        PolicyLossScaler(preset("megatron")),
        DynamicLossScaler(8.0, 2, 2),
    ):
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
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        groups.unscale_and_update_()
        found.append(groups.scales.clone())
    net = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    nn.init.ones_(net.weight)
    train = TrainOneStepWithLossScaleCell(WithLossCell(net, Output()), opt.Adam(net.parameters(), 0.1), scaler)
    found += [*train(torch.ones(1, 1, dtype=torch.float32), None), net.weight.detach().clone()]
    return found


def test_scales_do_not_look_at_the_default_dtype(default_dtype):
    under = scaled_run()
    torch.set_default_dtype(torch.float32)
    want = scaled_run()
    assert_same(under, want)
    assert [x.dtype for x in under] == [x.dtype for x in want]


def test_the_default_dtype_at_the_time_of_the_import_does_not_matter():
    import subprocess
    import sys

    from support import ROOT

    code = (
        "import torch; torch.set_default_dtype(torch.float16)\n"
        "from mpkit.scalers import DynamicLossScaleUpdateCell\n"
        "scale = torch.tensor(1024.0, dtype=torch.float32)\n"
        "DynamicLossScaleUpdateCell(1024.0, 2, 1)(scale, torch.tensor(False)); print(scale.item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "2048.0"


# --- checkpoints of others

KINDS = {
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: opt.Adam(p, 0.1),
    "AdamWeightDecay": lambda p: opt.AdamWeightDecay(p, 0.1),
    "torch SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, 0.1),
    "LARS": lambda p: opt.LARS(opt.SGD(p, 0.1)),
    "FreezeOpt": lambda p: FreezeOpt(opt.RMSProp(p, 0.1)),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_checkpoint_of_another_optimizer_is_a_value_error_and_changes_nothing(saved, here, tmp_path):
    def made(kind, seed):
        torch.manual_seed(seed)
        net = nn.Linear(2, 1)
        return Model(net, nn.MSELoss(), KINDS[kind](net.parameters()))

    batches = [(torch.ones(4, 2), torch.zeros(4, 1))]
    first = made(saved, 0)
    first.train(1, batches)
    first.save(tmp_path / "c")
    second = made(here, 1)
    if here == saved:
        second.load(tmp_path / "c")
        assert_same(second.train_network.state_dict(), first.train_network.state_dict())
        return
    before = copy.deepcopy(second.train_network.state_dict())
    with pytest.raises(ValueError, match="optimizer"):
        second.load(tmp_path / "c")
    assert_same(second.train_network.state_dict(), before)
    second.train(1, batches)


# --- costs that grow with the length of a list


def test_a_list_of_rates_is_brought_to_the_device_once(monkeypatch):
    rates = ListedLR((0.1, 0.2, 0.3))
    first = rates(torch.tensor(1))
    made = []
    monkeypatch.setattr(torch, "tensor", lambda *args, **kw: made.append(args))
    assert rates(torch.ones((), dtype=torch.int64)) == first
    assert made == []
    assert copy.deepcopy(rates) == rates == ListedLR((0.1, 0.2, 0.3))


def test_a_fit_of_very_many_epochs_starts_at_once():
    class Stops(Callback):
        def on_train_step_end(self, run):
            run.request_stop()

    model = small_model()
    model._metrics = {"loss": None}
    begin = time.process_time()
    model.fit(
        10**9, [(torch.ones(1, 2), torch.zeros(1, 1))], [(torch.ones(1, 2), torch.zeros(1, 1))], callbacks=Stops()
    )
    assert time.process_time() - begin < 60  # a dict of all epochs would need memory for 10**9 entries first


def test_the_listed_epochs_are_the_ones_evaluated():
    class Evaluated(Callback):
        def __init__(self):
            self.epochs = []

        def on_eval_end(self, run):
            self.epochs.append(run.cur_epoch_num)

    batches = [(torch.ones(1, 2), torch.zeros(1, 1))]
    for due, want in ((2, [2, 4]), ([1, 4], [1, 4]), (range(3, 5), [3, 4]), ({2}, [2])):
        told, model = Evaluated(), small_model()
        model._metrics = {"loss": None}
        model.fit(4, batches, batches, due, callbacks=told)
        assert told.epochs == want


def test_casting_survives_a_failed_build():
    net = auto_mixed_precision(nn.Linear(2, 1), "O2")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.tensor([[1.0, 1.0 / 3]])
    before = net(x)
    assert not torch.equal(before, nn.Linear.forward(net, x))
    with pytest.raises(ValueError, match="clip_norm"):
        build_train_network(
            net, optimizer, nn.MSELoss(), "O3", clip_norm=1.0, loss_scale_manager=FixedLossScaleManager(8.0, False)
        )
    assert torch.equal(net(x), before)


# --- gradients that an optimizer does not take


@pytest.mark.parametrize("size", [2, 2**17], ids=["small", "in lots of its own"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["Momentum", "Adam", "Lamb", "LARS", "AdaFactor"])
def test_a_sparse_gradient_is_refused_before_anything_moves(kind, grouped, size):
    a, b = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(3, 2))
    groups = [{"params": [a]}, {"params": [b]}] if grouped else [a, b]
    makers = {
        "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
        "Lamb": lambda p: opt.Lamb(p, 0.1),
        "LARS": lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
    }
    optimizer = makers.get(kind, getattr(opt, kind))(groups)
    before = copy.deepcopy(optimizer.state_dict())
    a.grad, b.grad = torch.ones_like(a), torch.ones(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        optimizer.step()
    assert (a == 1).all()
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("optimizers", [5, None, [], "x", lambda p: torch.optim.LBFGS(p)])
def test_a_step_by_hand_is_made_of_optimizers_that_step_by_themselves(optimizers):
    given = optimizers([one_weight()]) if callable(optimizers) else optimizers
    with pytest.raises(TypeError, match=r"^optimizers must be|closure"):
        ScaledStep(given, torch.tensor(1.0))


# --- checkpoints


ALIKE = {  # of two rules the groups and the tensors are the same
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "LARS": lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
    "AdamWeightDecay": lambda p: opt.AdamWeightDecay(p, 0.1),
    "Lamb": lambda p: opt.Lamb(p, 0.1),
    "FreezeOpt": lambda p: FreezeOpt(opt.AdamWeightDecay(p, 0.1)),
    "FreezeOpt of Lamb": lambda p: FreezeOpt(opt.Lamb(p, 0.1)),
}


@pytest.mark.parametrize(("one", "other"), [*zip([*ALIKE][::2], [*ALIKE][1::2]), *zip([*ALIKE][1::2], [*ALIKE][::2])])
def test_the_state_of_another_rule_with_the_same_tensors_is_refused(one, other, tmp_path):
    saving, loading = ([one_weight(value=1.0)] for _ in range(2))
    first, second = ALIKE[one](saving), ALIKE[other](loading)
    step, refuses = (ScaledStep(optimizer, torch.tensor(2.0)) for optimizer in (first, second))
    with pytest.raises(ValueError, match=r"^the saved optimizer is a \w+"):
        refuses.load_state_dict(step.state_dict())
    nets = [nn.Linear(1, 1) for _ in range(2)]
    models = [Model(net, nn.MSELoss(), ALIKE[name](list(net.parameters()))) for net, name in zip(nets, (one, other))]
    models[0].train(1, [(torch.ones(1, 1), torch.ones(1, 1))])
    models[0].save(tmp_path / "c")
    before = copy.deepcopy(models[1].train_network.state_dict())
    with pytest.raises(ValueError, match=r"^the saved optimizer is a \w+"):
        models[1].load(tmp_path / "c")
    assert_same(models[1].train_network.state_dict(), before)


def test_the_state_of_a_subclass_is_one_of_its_kind():
    class Mine(opt.Momentum):
        """With a method of the user's."""

    steps = [ScaledStep(kind([one_weight()], 0.1, 0.9), torch.tensor(2.0)) for kind in (Mine, opt.Momentum)]
    steps[0].load_state_dict(steps[1].state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    state = steps[1].state_dict()
    del state["kinds"]  # as older versions saved it
    steps[1].load_state_dict(state)
    for wrong, error in ((5, TypeError), ([5], TypeError), ([[5]], TypeError), ([[[]]], ValueError), ([], ValueError)):
        with pytest.raises(error, match="kinds"):
            steps[1].load_state_dict({**state, "kinds": wrong})


class Best(Callback):
    def __init__(self, best):
        self.best = best

    def state_dict(self):
        return {"best": {"of all": [self.best]}}

    def load_state_dict(self, state):
        (self.best,) = state["best"]["of all"]


def trained(callback, path):
    net = nn.Linear(1, 1)
    model = Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
    model.train(1, [(torch.ones(1, 1), torch.ones(1, 1))], [callback, Checkpoint(path)])
    return model


@pytest.mark.parametrize("best", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a"), {1, 2}])
def test_a_numpy_number_in_the_state_of_a_callback_comes_back_from_a_checkpoint(best, tmp_path):
    model = trained(Best(best), tmp_path / "c")
    model.load(tmp_path / "c")
    again = Best(None)
    model.train(2, [(torch.ones(1, 1), torch.ones(1, 1))], again)
    assert again.best == best


@pytest.mark.parametrize("best", [np.ones(2), nn.Linear, nn.Linear(1, 1), range(3)], ids=lambda x: type(x).__name__)
def test_a_state_that_could_not_be_read_again_is_not_written(best, tmp_path):
    with pytest.raises(TypeError, match=r"\['best'\]\['of all'\]\[0\] is a .* in no checkpoint"):
        trained(Best(best), tmp_path / "c")
    assert not (tmp_path / "c").exists()
