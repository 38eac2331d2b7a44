"""`Model`: what it trains, prints, evaluates and saves, and how it stops."""

from __future__ import annotations

import copy
import pickle
import signal
import warnings

import numpy as np
import pytest
import torch
from support import assert_same
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

from mpkit import optimizers
from mpkit.model import METRICS, Callback, Checkpoint, LossMonitor, Metric, Model, ProgressBar
from mpkit.policies import ScalePolicy, preset
from mpkit.scalers import DynamicLossScaleManager, FixedLossScaleManager, PolicyLossScaler
from mpkit.step import Hook, TrainOneStepWithLossScaleCell, WithLossCell


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def data(count=6, size=8, bad=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * size, 5, generator=generator)
    y = torch.randint(3, (count * size,), generator=generator)
    for batch in bad:
        x[batch * size, 0] = torch.inf
    return TensorDataset(x, y)


def loader(count=6, bad=(), seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data(count, bad=bad), batch_size=8, shuffle=seed is not None, generator=generator)


def model(manager="dynamic", optimizer="sgd", seed=0, **kwargs):
    net = network(seed)
    made = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
    if optimizer == "adam":
        made = optimizers.Adam(net.parameters(), 0.01)
    if manager == "dynamic":
        kwargs["loss_scale_manager"] = DynamicLossScaleManager(1024, 2, 4)
    return Model(net, nn.CrossEntropyLoss(), made, **({"metrics": {"accuracy", "loss"}} | kwargs))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.network.parameters()])


def everything(model):
    """Weights, optimizer, scale and every counter, of the step and of the manager."""
    return [model.train_network.state_dict(), model.manager.state_dict()]


def when(phase, does):
    """A callback that does this with the run whenever it is told of this phase."""
    made = Callback()
    setattr(made, f"on_{phase}", does)
    return made


def stops_after(steps):
    return when("train_step_end", lambda run: run.cur_step_num == steps and run.request_stop())


PHASES = ("train_begin", "train_epoch_begin", "train_step_end", "train_epoch_end", "eval_end", "train_end")


def test_callbacks_are_told_in_order_with_counters_from_1():
    told = []

    def notes(phase):
        counters = "cur_epoch_num", "cur_step_in_epoch", "cur_step_num"
        return when(phase, lambda run: told.append((phase, *(getattr(run, name) for name in counters))))

    model().fit(2, loader(2), loader(1), callbacks=[notes(phase) for phase in PHASES])
    steps = [("train_step_end", 1, 1, 1), ("train_step_end", 1, 2, 2)]
    assert told[:4] == [("train_begin", 0, 0, 0), ("train_epoch_begin", 1, 0, 0), *steps]
    assert told[4:6] == [("train_epoch_end", 1, 2, 2), ("eval_end", 1, 2, 2)]
    assert told[-1] == ("train_end", 2, 0, 4)
    assert [line[0] for line in told].count("train_step_end") == 4


@pytest.mark.parametrize(
    ("epochs", "every", "printed"),
    [
        (4, 2, ["epoch: 2 step: 1", "Eval 2", "epoch: 3 step: 2", "Eval 4"]),
        (3, [0, 1, 3], ["Eval 1", "epoch: 2 step: 1", "epoch: 3 step: 2", "Eval 3"]),
    ],
)
def test_fit_evaluates_after_some_epochs_and_the_monitor_says_so(epochs, every, printed, capsys):
    """First the example of the reference: 4 epochs of 2 batches, every 2nd epoch, LossMonitor(3)."""
    model().fit(epochs, loader(2), loader(1), valid_frequency=every, callbacks=[LossMonitor(3)])
    lines = [line.replace("result: epoch ", "").split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == printed


@pytest.mark.parametrize("wrong", [{"valid_dataset": 5}, {"valid_frequency": ["a"]}, {"callbacks": 5}], ids=str)
def test_a_wrong_argument_is_named_before_anything_is_trained(wrong):
    made = model()
    before = weights(made)
    with pytest.raises(TypeError, match=f"{min(wrong)} must be"):
        made.fit(1, loader(1), **{"valid_dataset": loader(1), **wrong})
    assert torch.equal(weights(made), before)
    with pytest.raises(TypeError, match="metrics must be"):
        model(metrics=5)
    with pytest.raises(ValueError, match="nothing is left"):
        made.fit(1, loader(1), initial_epoch=1)
    for how in ({"amp_level": "O2"}, {"boost_level": "O1"}, {"keep_batchnorm_fp32": True}):
        with pytest.raises(ValueError, match="needs an optimizer"):
            Model(network(), **how)


def test_a_checkpoint_is_written_every_so_many_steps(tmp_path):
    path, there = tmp_path / "run.pt", []
    looks = when("train_step_end", lambda run: there.append(path.exists()))
    model().train(1, loader(3), callbacks=[Checkpoint(path, every=2), looks])
    assert there == [False, False, True]  # after all others have heard of the step


@pytest.mark.parametrize("given", [{"amp_level": "O2"}, {"boost_level": "O1"}, {"keep_batchnorm_fp32": True}], ids=str)
def test_a_level_needs_an_optimizer(given):
    with pytest.raises(ValueError, match="optimizer"):
        Model(nn.Linear(2, 2), **given)


def test_a_nan_loss_stops_a_run_without_scaling_and_is_skipped_with_it():
    plain = model(manager=None)
    with pytest.raises(ValueError, match="epoch: 1 step: 4: the loss is nan"):
        plain.train(1, loader(bad=(2,)), callbacks=[LossMonitor()])
    scaled = model()
    scaled.train(1, loader(bad=(2,)), callbacks=[LossMonitor()])
    assert weights(scaled).isfinite().all()


def test_metrics_count_samples_and_evaluation_changes_nothing():
    ours = model(metrics={"accuracy", "loss"})
    before = weights(ours)
    got = ours.eval(loader(3))
    x, y = data(3).tensors
    ours.network.eval()
    out = ours.network(x)
    assert got["accuracy"] == pytest.approx((out.argmax(1) == y).double().mean().item())
    assert got["loss"] == pytest.approx(nn.functional.cross_entropy(out, y).item(), rel=1e-5)
    assert torch.equal(before, weights(ours))


def test_predict_gives_the_levels_dtype_and_an_evaluation_widens_it():
    net = network()
    ours = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1), {"accuracy"}, amp_level="O2")
    assert ours.predict(data().tensors[0]).dtype == torch.float16
    assert not net.training
    assert 0 <= ours.eval(loader())["accuracy"] <= 1
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert ours.train_network.scale_sense.item() == 2.0**24


class Evaluated(nn.Module):
    def __init__(self, net, places):
        super().__init__()
        self.net, self.places = net, places

    def forward(self, x, y):
        out = self.net(x)
        parts = dict(zip(self.places, (nn.functional.cross_entropy(out, y), out, y)))
        return parts[0], parts[1], parts[2]


@pytest.mark.parametrize("places", [[1, 2, 0], None])
def test_an_evaluation_network_of_ones_own(places):
    net, asked, loss_fn = network(), {"accuracy", "loss"}, nn.CrossEntropyLoss()
    evaluated = Evaluated(net, places or [0, 1, 2])
    own = Model(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1), asked, evaluated, places)
    assert own.eval(loader()) == Model(net, loss_fn, metrics=asked).eval(loader())


@pytest.mark.parametrize(
    ("scaled_by", "said"),
    [
        (DynamicLossScaleManager(2**10, 2, 4), "1001 overflows in a row"),
        (preset("deepspeed", init_scale=4.0, raise_error_at_min_scale=True, delayed_shift=1), "deepspeed stops here"),
    ],
    ids=["a manager", "a policy"],
)
def test_endless_overflow_ends_with_the_error_of_a_manager_or_a_policy(scaled_by, said):
    net = nn.Linear(1, 1)
    parts = net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1, fused=True)
    if isinstance(scaled_by, DynamicLossScaleManager):
        ours = Model(*parts, loss_scale_manager=scaled_by)
    else:
        ours = Model(TrainOneStepWithLossScaleCell(WithLossCell(*parts[:2]), parts[2], PolicyLossScaler(scaled_by)))
    with pytest.raises(RuntimeError, match=said):
        ours.train(1, [(torch.full((1, 1), torch.inf), torch.zeros(1, 1))] * 1200)
    assert ours.train_network.scale_sense.item() == 1.0


# --- stopping


class Interrupting(Hook):
    """Presses Ctrl-C in the middle of a step."""

    def __init__(self, index, times=1):
        self.index, self.times = index, times

    def after_backward(self, ctx):
        if ctx.index == self.index:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_step_waits_until_weights_and_scale_belong_together(tmp_path):
    ours, whole = model(hooks=[Interrupting(3)]), model()
    path = tmp_path / "run.pt"
    before = signal.getsignal(signal.SIGINT)  # a test run in the background may have it ignored
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        ours.train(2, loader(), callbacks=Checkpoint(path, every=1000))
    torch.manual_seed(5)
    whole.train(2, loader(), callbacks=stops_after(4))
    assert torch.equal(weights(ours), weights(whole))
    assert ours.train_network.scale_sense.item() == whole.train_network.scale_sense.item() == 2048.0
    assert path.exists()  # a clean stop is saved
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    ours = model(hooks=[Interrupting(3, times=2)])
    with pytest.raises(KeyboardInterrupt):
        ours.train(2, loader())
    assert ours.train_network.index == 4
    signal.signal(signal.SIGINT, before)
    assert ours.train_network.scale_sense.item() == 1024.0  # neither updated nor adjusted


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_finished_run_has_nothing_left_and_a_longer_one_goes_on(tmp_path, epochs):
    whole, short, again = model(), model(), model(seed=4)
    for ours, until in ((whole, epochs), (short, 2)):
        torch.manual_seed(1)
        ours.train(until, loader(), callbacks=Checkpoint(tmp_path / "run.pt"))
    again.load(tmp_path / "run.pt")
    again.train(epochs, loader())
    assert torch.equal(weights(again), weights(whole))


def test_a_checkpoint_of_another_network_changes_nothing(tmp_path):
    path, ours, other = tmp_path / "run.pt", model(), model(seed=3)
    other.network[3] = nn.Linear(8, 4)
    other.save(path)
    before = copy.deepcopy(everything(ours))
    with pytest.raises(ValueError, match=r"'network.backbone.3.bias' is \(4,\) there and \(3,\) here"):
        ours.load(path)
    assert_same(before, everything(ours))
    torch.save(ours.network.state_dict(), path)
    with pytest.raises(ValueError, match=r"not written by Model.save; load weights alone with network.load_state_dict"):
        ours.load(path)
    bare, drops = model(manager=None), model(manager=None, loss_scale_manager=FixedLossScaleManager(8.0, True))
    for saves, loads in ((bare, drops), (drops, bare)):  # whose manager has no tensors: neither is refused
        saves.save(path)
        loads.load(path)


def test_a_checkpoint_is_written_every_so_many_steps_and_not_after_an_error(tmp_path):
    ours, steps, saved = model(), [], []
    ours.save = lambda path: saved.append(len(steps))
    fails = when("train_step_end", lambda run: steps.append(1 / (8 - run.cur_step_num)))
    with pytest.raises(ZeroDivisionError):
        ours.train(2, loader(), callbacks=[fails, Checkpoint(tmp_path / "run.pt", every=3)])
    assert saved == [3, 6]


def test_a_resumed_run_wants_its_callbacks_back(tmp_path):
    path, ours, whole = tmp_path / "run.pt", model(), model()
    torch.manual_seed(11)
    whole.train(2, loader(), callbacks=LossMonitor(0))
    torch.manual_seed(11)
    ours.train(1, loader(), callbacks=[Checkpoint(path), LossMonitor(0)])
    ours = model(seed=5)
    ours.load(path)
    with pytest.raises(ValueError, match=r"whose states are \['LossMonitor'\], here \[\]"):
        ours.train(2, loader(), callbacks=[Checkpoint(path)])
    ours.save(path)  # what was loaded and not gone on from is not lost
    again = model(seed=6)
    again.load(path)
    for resumed in (ours, again):  # callbacks without a state are free
        resumed.train(2, loader(), callbacks=[ProgressBar(disable=True), LossMonitor(0)])
        assert_same(everything(resumed), everything(whole))


def test_a_trained_model_can_be_copied_and_pickled():
    ours = model()
    ours.train(1, loader(seed=3))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        state = torch.get_rng_state()
        twin.train(1, loader(seed=4))
        torch.set_rng_state(state)
        assert not torch.equal(weights(ours), weights(twin))
    ours.train(1, loader(seed=4))
    assert_same(everything(ours), everything(twin))


def test_a_progress_bar_counts_the_steps_and_shows_loss_and_scale(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook's widgets are missing
        model().train(2, loader(), callbacks=ProgressBar(every=1, ncols=100))
    last = capfd.readouterr().err.split("\r")[-1]
    assert "12/12" in last
    assert "scale=" in last
    assert 0 < float(last.split("loss=")[1].split(",")[0]) < 10


@pytest.mark.parametrize(
    ("good", "bad", "growth", "scale", "told"),  # with the growth of the last the scale is inf after two steps
    [(0, 20, 1, 1, 1), (0, 19, 1, 1, 0), (1, 19, 1, 1, 0), (0, 20, 1, 2, 0), (2, 20, 2.0**100, 1, 1)],
)
def test_from_twenty_skipped_steps_at_the_floor_or_inf_on_they_are_told(good, bad, growth, scale, told):
    net = nn.Linear(1, 1)
    sgd, moves = torch.optim.SGD(net.parameters(), 0.1, fused=True), {"growth_interval": 1, "hold_at_overflow": False}
    policy = ScalePolicy(init_scale=scale, growth_factor=growth, min_scale=scale, **moves)
    scaler = PolicyLossScaler(ScalePolicy.fixed(scale) if growth == 1 else policy)
    ours = Model(TrainOneStepWithLossScaleCell(WithLossCell(net, nn.MSELoss()), sgd, scaler))
    batches = [(torch.full((1, 1), value), torch.zeros(1, 1)) for value in [1.0] * good + [torch.inf] * bad]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours.train(1, batches)
    assert sum("steps were skipped" in str(w.message) for w in seen) == told


BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 3


def linear_model(rate=0.1, **options):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    return Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), rate), **options)


# --- metrics


def measured(name, *batches):
    metric = Metric(METRICS[name])
    for output, label in batches:
        metric.update(output, label)
    return metric.eval()


def test_mse_and_mae_compare_each_output_with_its_own_label():
    column, row = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 2.0])
    assert (measured("mse", (column, row)), measured("mae", (column, row))) == (4 / 3, 2 / 3)
    for name in ("mse", "mae"):
        with pytest.raises(ValueError, match="a label for each output"):
            measured(name, (torch.ones(3, 2), torch.ones(3)))


def test_accuracy_counts_places_and_refuses_labels_that_it_cannot_compare():
    scores = torch.eye(3)
    assert measured("accuracy", (scores, torch.tensor([0, 1, 1]))) == 2 / 3
    assert measured("accuracy", (scores, torch.eye(3)), (scores, scores.flip(0))) == 4 / 6  # one-hot
    tokens = scores.expand(2, 3, 3)  # two samples of three tokens
    assert measured("accuracy", (tokens, torch.tensor([[0, 1, 2], [0, 0, 0]]))) == 4 / 6
    for output, label in ((scores, torch.tensor([[0], [1], [2]])), (torch.ones(3), torch.ones(3))):
        with pytest.raises(ValueError, match="labels of shape"):
            measured("accuracy", (output, label))
    for label in (torch.tensor([0, 1, 1]), torch.tensor([[0], [1], [1]])):  # all would count as class 0, or as right
        with pytest.raises(ValueError, match="two classes or more, got one column"):
            measured("accuracy", (torch.ones(3, 1), label))


@pytest.mark.parametrize("metrics", [{"accuracy"}, {"mse"}, {"loss"}])
def test_an_evaluation_without_a_batch_is_a_value_error(metrics):
    with pytest.raises(ValueError, match="gave no batch"):
        linear_model(metrics=metrics).eval(iter(()))


class OwnLoss(nn.Module):
    """A network that returns its loss, from a batch of two or three."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, y, weight=1.0):
        return ((self.linear(x) - y) * weight).square().mean()


@pytest.mark.parametrize("batches", [BATCHES, [(*batch, torch.ones(4, 1)) for batch in BATCHES]], ids=["two", "three"])
def test_a_network_that_returns_its_loss_is_evaluated_by_it(batches):
    net = OwnLoss()
    model = Model(net, None, torch.optim.SGD(net.parameters(), 0.1), metrics={"loss"})
    model.train(1, batches)
    assert model.eval(batches)["loss"] == pytest.approx(net(*batches[0]).item())


# --- checkpoints


def test_a_resume_that_was_refused_can_be_tried_again(tmp_path):
    path = tmp_path / "run.ckpt"
    linear_model().train(2, BATCHES, [stops_after(2), Checkpoint(path)])
    model, seen = linear_model(), []
    steps = when("train_step_end", lambda run: seen.append(run.cur_step_num))
    model.load(path)
    with pytest.raises(ValueError, match="resume with the data set"):
        model.train(2, BATCHES[:1], steps)
    model.train(2, BATCHES, steps)
    assert seen == [3, 4, 5, 6]


@pytest.mark.parametrize("ask", [lambda model: model.eval(BATCHES), lambda model: model.predict(torch.ones(1, 2))])
@pytest.mark.parametrize("phase", ["train_step_end", "train_epoch_begin"])
def test_an_evaluation_in_the_middle_of_a_run_leaves_the_modes_as_they_were(ask, phase):
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Linear(2, 1))
    seen = []
    freezes = when("train_epoch_begin", lambda run: network[2].eval())  # its statistics are kept in this run
    notes = when("train_step_end", lambda run: seen.append([part.training for part in network]))
    model = Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1), metrics={"mse"})
    model.train(2, BATCHES, [freezes, notes, when(phase, lambda run: ask(run.model))])
    assert seen == [[True, True, False, True]] * (2 * len(BATCHES))
    ask(model)
    assert not any(part.training for part in network)  # between two runs it stays in evaluation mode


class Keeps(Callback):
    """Counts what it is told, and draws a number; its state goes into checkpoints."""

    def __init__(self):
        self.told = []

    def on_train_epoch_end(self, run):
        self.told.append(f"epoch {run.cur_epoch_num}")

    def on_eval_end(self, run):
        self.told.append(f"loss {run.metrics['loss']:.9f} {torch.rand(()):.9f}")

    def state_dict(self):
        return {"told": self.told}

    def load_state_dict(self, state):
        self.told = list(state["told"])


def test_weights_that_are_saved_after_an_evaluation_go_on_with_the_next_epoch(tmp_path):
    """The best ones, say: nothing is evaluated or told twice."""
    rows = TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    loader = DataLoader(rows, 4, shuffle=True)  # the one of evaluation draws a number, too

    def saves(run):
        if run.cur_epoch_num == 2 and not (tmp_path / "c").exists():
            run.model.save(tmp_path / "c")

    def trained(saved=None):
        made, kept = linear_model(metrics={"loss"}), Keeps()
        if saved is not None:
            made.load(saved)
        made.fit(4, loader, loader, callbacks=[kept, when("eval_end", saves)])
        return made.network.weight.tolist(), kept.told

    torch.manual_seed(3)
    whole = trained()
    torch.manual_seed(4)
    assert trained(tmp_path / "c") == whole


# --- any loader


class Draws(Dataset):
    """A data set that draws from a generator of its own."""

    def __init__(self):
        self.own = torch.Generator().manual_seed(5)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randn(2, generator=self.own) + index, torch.zeros(1)


class ByEpoch(Draws):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.full((2,), index * (1.0 + self.epoch)), torch.zeros(1)


class Stateful:
    """A loader of torchdata's kind: it knows where it stands, and what its data set draws from."""

    def __init__(self):
        self.data, self.place = Draws(), 0

    def __iter__(self):
        for _ in range(self.place, 3):
            batch = [self.data[0] for _ in range(4)]
            self.place = self.place + 1
            yield tuple(map(torch.stack, zip(*batch)))
        self.place = 0

    def __len__(self):
        return 3

    def state_dict(self):
        return {"place": self.place, "own": self.data.own.get_state()}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.data.own.set_state(state["own"])


POINTS = TensorDataset(torch.arange(24.0).view(12, 2), torch.zeros(12, 1))


def sampled():
    sampler = RandomSampler(POINTS, generator=torch.Generator().manual_seed(7))
    return DataLoader(POINTS, batch_sampler=BatchSampler(sampler, 4, False))


LOADERS = {
    "a list": lambda: [tuple(batch) for batch in DataLoader(POINTS, batch_size=4)],
    "shuffled": lambda: DataLoader(POINTS, batch_size=4, shuffle=True),
    "batch sampler": sampled,
    "a sampler that is told the epoch": lambda: DataLoader(POINTS, 4, sampler=DistributedSampler(POINTS, 1, 0)),
    "a data set that is told the epoch": lambda: DataLoader(ByEpoch(), batch_size=4),
    "a loader with a state": Stateful,
}


def tells_the_epoch(loader):
    """As loops by hand do for a `DistributedSampler`."""
    parts = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    told = [x for x in parts if hasattr(x, "set_epoch")]
    return when("train_epoch_begin", lambda run: [x.set_epoch(run.cur_epoch_num) for x in told])


@pytest.mark.parametrize("steps", [2, 3, 5], ids=["first epoch", "its end", "second epoch"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_draws_the_same_batches(name, steps, tmp_path):
    def trained(*callbacks, load=False):
        """The model and the batches that it saw."""
        ours, loader, seen = linear_model(rate=1e-4), LOADERS[name](), []
        ours.network.register_forward_pre_hook(lambda network, args: seen.append(args[0].clone()))
        if load:
            ours.load(tmp_path / "c")
            torch.manual_seed(99)
        ours.train(3, loader, [*callbacks, tells_the_epoch(loader)])
        return ours, seen

    whole, batches = trained()
    trained(stops_after(steps), Checkpoint(tmp_path / "c"))
    resumed, rest = trained(load=True)
    assert len(rest) == 9 - steps
    assert_same(rest, batches[steps:])
    assert_same(resumed.network.state_dict(), whole.network.state_dict())


def test_a_checkpoint_of_a_data_set_with_other_generators_is_refused(tmp_path):
    first = linear_model()
    first.train(2, LOADERS["batch sampler"](), [stops_after(2), Checkpoint(tmp_path / "c")])
    resumed = linear_model()
    resumed.load(tmp_path / "c")
    with pytest.raises(ValueError, match="held 1 random generators, this one holds 0"):
        resumed.train(2, LOADERS["shuffled"]())


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (lambda: DataLoader(Draws(), batch_size=4), r"Draws\.own"),
        (lambda: DataLoader(POINTS, batch_size=4, num_workers=1, persistent_workers=True), "persistent_workers"),
    ],
)
def test_a_load_says_what_it_cannot_restore(loader, named, tmp_path):
    model, loader = linear_model(), loader()
    model.train(1, loader, [stops_after(2), Checkpoint(tmp_path / "c")])
    del loader
    before = copy.deepcopy(model.network.state_dict())
    with pytest.warns(RuntimeWarning, match=f"random state of .*{named}"):
        model.load(tmp_path / "c")
    assert_same(model.network.state_dict(), before)


@pytest.mark.parametrize("best", [np.float64(1), nn.Linear, nn.Linear(1, 1), range(3)], ids=lambda x: type(x).__name__)
def test_a_state_that_could_not_be_read_again_is_not_written(best, tmp_path):
    held = Callback()
    held.state_dict = lambda: {"best": {"of all": [best]}}
    with pytest.raises(TypeError, match=r"^a .* in no checkpoint"):
        linear_model().train(1, BATCHES, [held, Checkpoint(tmp_path / "c")])
    assert not (tmp_path / "c").exists()
