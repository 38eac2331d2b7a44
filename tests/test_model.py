"""`Model`: what it trains, prints, evaluates and saves, and how it stops."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from support import ROOT, assert_same
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mpkit import optimizers
from mpkit.bench.step import HostReads
from mpkit.model import Callback, Checkpoint, LossMonitor, Metric, Model, ProgressBar
from mpkit.model.checkpoint import save_whole
from mpkit.model.interrupt import InterruptBetweenSteps
from mpkit.model.loop import TrainingLoop
from mpkit.model.metrics import METRICS
from mpkit.model.model import _three_indexes
from mpkit.model.randomness import generators, random_state, ready_workers
from mpkit.policies import preset
from mpkit.scalers import DynamicLossScaleManager, FixedLossScaleManager, PolicyLossScaler
from mpkit.step import Hook, TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell


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
    return [model.train_network.state_dict(), model._manager.state_dict()]


class Log(Callback):
    """Writes down what it is told."""

    def __init__(self):
        self.lines = []
        for phase in ("train_begin", "train_epoch_begin", "train_step_end", "train_epoch_end", "eval_end", "train_end"):
            setattr(self, f"on_{phase}", lambda run, phase=phase: self._note(phase, run))

    def _note(self, phase, run):
        self.lines.append((phase, run.cur_epoch_num, run.cur_step_in_epoch, run.cur_step_num))


class At(Callback):
    """Does something at one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_step_end(self, run):
        if run.cur_step_num == self.step:
            self.act(run)


def test_train_is_the_loop_written_out():
    ours = model()
    net = network()
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.CrossEntropyLoss()),
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True),
        DynamicLossScaleManager(1024, 2, 4).get_update_cell(),
    )
    torch.manual_seed(5)
    ours.train(2, loader(bad=(2,)))
    torch.manual_seed(5)
    cell.train()
    for _ in range(2):
        for x, y in loader(bad=(2,)):
            cell(x, y)
    assert torch.equal(weights(ours), torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert ours.train_network.scale_sense.item() == cell.scale_sense.item()


def test_callbacks_are_told_in_order_with_counters_from_1():
    log = Log()
    model().fit(2, loader(2), loader(1), callbacks=log)
    steps = [("train_step_end", 1, 1, 1), ("train_step_end", 1, 2, 2)]
    assert log.lines[:4] == [("train_begin", 0, 0, 0), ("train_epoch_begin", 1, 0, 0), *steps]
    assert log.lines[4:6] == [("train_epoch_end", 1, 2, 2), ("eval_end", 1, 2, 2)]
    assert log.lines[-1][0] == "train_end"
    assert [line[0] for line in log.lines].count("train_step_end") == 4


def test_the_monitors_phase_carries_over_epochs_as_in_the_tutorial(capsys):
    """938 batches and a line every 100: epoch 1 steps 100..900, epoch 2 steps 62, 162, ..., epoch 3 24, ..."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.740437))

        def forward(self, x):
            return self.weight * x

    net = Constant()
    cell = TrainOneStepWithLossScaleCell(net, torch.optim.SGD(net.parameters(), 0.0), torch.tensor(1.0))
    Model(cell).train(3, [torch.tensor(1.0)] * 938, callbacks=[LossMonitor(100)])
    lines = capsys.readouterr().out.splitlines()
    steps = [(1, s) for s in range(100, 901, 100)]
    steps += [(2, s) for s in range(62, 938, 100)] + [(3, s) for s in range(24, 938, 100)]
    assert lines == [f"epoch: {epoch} step: {step}, loss is 1.740437" for epoch, step in steps]


def test_fit_evaluates_every_second_epoch_and_the_monitor_says_so(capsys):
    """The example of the reference: 4 epochs of 2 batches, every 2nd epoch, LossMonitor(3)."""
    model().fit(4, loader(2), loader(1), valid_frequency=2, callbacks=[LossMonitor(3)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "epoch: 2 step: 1",
        "Eval result: epoch 2",
        "epoch: 3 step: 2",
        "Eval result: epoch 4",
    ]
    assert "metrics: {'accuracy': " in lines[1]
    assert "'loss': " in lines[1]
    model().fit(3, loader(2), loader(1), valid_frequency=[1, 3], callbacks=[LossMonitor(0)])
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Eval result: epoch 1",
        "Eval result: epoch 3",
    ]


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
    named = model(metrics={"worst": Metric(lambda output, label: (output.argmin(1) == label).sum())})
    assert 0 <= named.eval(loader(3))["worst"] <= 1


def test_predict_gives_the_levels_dtype_and_an_evaluation_widens_it():
    net = network()
    ours = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1), {"accuracy"}, amp_level="O2")
    assert ours.predict(data().tensors[0]).dtype == torch.float16
    assert not net.training
    assert 0 <= ours.eval(loader())["accuracy"] <= 1
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert ours.train_network.scale_sense.item() == 2.0**24


def test_an_evaluation_network_of_ones_own():
    class Evaluated(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            out = self.net(x)
            return y, nn.functional.cross_entropy(out, y), out

    net = network()
    settings = {"metrics": {"accuracy", "loss"}, "eval_network": Evaluated(net), "eval_indexes": [1, 2, 0]}
    other = Model(net, nn.CrossEntropyLoss(), metrics={"accuracy", "loss"})
    assert Model(net, **settings).eval(loader()) == other.eval(loader())


def test_hooks_clipping_and_accumulation_reach_the_step():
    class Count(Hook):
        updates = 0

        def after_update(self, ctx):
            self.updates += 1

    hook = Count()
    model(hooks=[hook], clip_norm=1.0, accumulation_steps=3).train(1, loader(6))
    assert hook.updates == 2


def test_the_users_manager_hears_of_every_overflow():
    manager = DynamicLossScaleManager(2**20, 2, 4)
    ours = model(manager=None, loss_scale_manager=manager)
    ours.train(2, loader(6, bad=(1, 4)))
    assert manager.get_loss_scale() == ours.train_network.scale_sense.item() == 2.0**16
    assert manager.cur_iter == 13


def test_endless_overflow_ends_with_the_managers_error():
    manager = DynamicLossScaleManager(2**10, 2, 4)
    net = nn.Linear(1, 1)
    ours = Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1, fused=True), loss_scale_manager=manager)
    bad = [(torch.full((1, 1), torch.inf), torch.zeros(1, 1))] * 1200
    with pytest.raises(RuntimeError, match="1001 overflows in a row"):
        ours.train(1, bad)
    assert ours.train_network.scale_sense.item() == 1.0


def test_a_policy_that_stops_is_heard():
    net = nn.Linear(1, 1)
    scaler = PolicyLossScaler(preset("deepspeed", init_scale=4.0, raise_error_at_min_scale=True, delayed_shift=1))
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.MSELoss()), torch.optim.SGD(net.parameters(), 0.1, fused=True), scaler
    )
    with pytest.raises(RuntimeError, match="deepspeed stops here"):
        Model(cell).train(1, [(torch.full((1, 1), torch.inf), torch.zeros(1, 1))] * 10)


def test_a_scale_at_its_floor_and_weights_with_nan_get_a_sentence():
    net = nn.Linear(1, 1)
    made = {"loss_fn": nn.MSELoss(), "loss_scale_manager": FixedLossScaleManager(1.0)}
    ours = Model(net, optimizer=torch.optim.SGD(net.parameters(), 0.1, fused=True), **made)
    bad = [(torch.full((1, 1), torch.inf), torch.zeros(1, 1))] * 25
    with pytest.warns(RuntimeWarning, match="last 25 steps were skipped: gradients overflow although the"):
        ours.train(1, bad)
    with torch.no_grad():
        net.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="no loss scale can repair weights"):
        ours.train(1, [(torch.ones(1, 1), torch.zeros(1, 1))])


def test_a_run_reads_the_host_once_in_100_steps(monkeypatch):
    ours, read = model(), []
    inner = TrainingLoop._read_flags
    monkeypatch.setattr(TrainingLoop, "_read_flags", lambda loop: (read.append(len(loop._flags)), inner(loop)))
    batches = [tuple(batch) for batch in loader(10)] * 25  # the DataLoader itself reads its seed
    with HostReads() as reads:
        ours.train(1, batches)
    assert reads.count == 0  # no single value; the flags come as one list
    assert read == [100, 100, 50]


# --- stopping


def test_a_callback_or_another_thread_can_stop_the_run():
    ours, log = model(), Log()
    ours.train(5, loader(), callbacks=[At(8, lambda run: run.request_stop()), log])
    assert log.lines[-1] == ("train_end", 2, 2, 8)
    ours, log = model(), Log()

    def from_elsewhere(run):
        thread = threading.Thread(target=ours.request_stop)
        thread.start()
        thread.join()

    ours.train(5, loader(), callbacks=[At(3, from_elsewhere), log])
    assert log.lines[-1] == ("train_end", 1, 3, 3)


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
    whole.train(2, loader(), callbacks=At(4, lambda run: run.request_stop()))
    assert torch.equal(weights(ours), weights(whole))
    assert ours.train_network.scale_sense.item() == whole.train_network.scale_sense.item() == 2048.0
    assert path.exists()  # a clean stop is saved
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait():
    ours = model(hooks=[Interrupting(3, times=2)])
    with pytest.raises(KeyboardInterrupt):
        ours.train(2, loader())
    assert ours.train_network.index == 4
    assert ours.train_network.scale_sense.item() == 1024.0  # neither updated nor adjusted


def test_an_error_leaves_the_last_step_whole_and_the_last_checkpoint_in_place(tmp_path):
    path = tmp_path / "run.pt"

    class Failing(Hook):
        def before_update(self, ctx):
            if ctx.index == 3:
                raise OSError("cable pulled")

    ours, whole = model(hooks=[Failing()]), model()
    torch.manual_seed(5)
    with pytest.raises(OSError, match="cable pulled"):
        ours.train(2, loader(), callbacks=[Checkpoint(path, every=2)])
    torch.manual_seed(5)
    whole.train(2, loader(), callbacks=At(3, lambda run: run.request_stop()))
    assert torch.equal(weights(ours), weights(whole))
    saved = torch.load(path, weights_only=True)
    assert saved["progress"]["step"] == 2


# --- checkpoints


class Noisy(Dataset):
    """A data set that draws random numbers itself."""

    def __init__(self):
        self.inner = data()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(5), y


SETS = {
    "list": lambda: [tuple(batch) for batch in loader()],
    "shuffled": lambda: DataLoader(data(), batch_size=8, shuffle=True),
    "own generator": lambda: loader(seed=3),
    "noisy": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
}


RESUMED = [
    *((kind, stop, "sgd") for kind in SETS for stop in (1, 6, 7, 15)),
    ("noisy", 7, "adam"),
    ("list", 12, "adam"),
]


@pytest.mark.parametrize(("kind", "stop", "optimizer"), RESUMED)
def test_a_resumed_run_is_the_run_without_interruption(kind, stop, optimizer, tmp_path, capsys):
    path = tmp_path / "run.pt"
    whole, first, second = (model(optimizer=optimizer, seed=seed) for seed in (0, 0, 9))
    torch.manual_seed(11)
    whole.train(3, SETS[kind](), callbacks=LossMonitor(4))
    lines = capsys.readouterr().out
    torch.manual_seed(11)
    halt = At(stop, lambda run: run.request_stop())
    first.train(3, SETS[kind](), callbacks=[Checkpoint(path, every=100), LossMonitor(4), halt])
    torch.manual_seed(77)  # a new process starts from elsewhere
    second.load(path)
    second.train(3, SETS[kind](), callbacks=[Checkpoint(path, every=100), LossMonitor(4), At(0, None)])
    assert_same(everything(second), everything(whole))
    assert capsys.readouterr().out == lines
    assert second.train_network.index == 18


def test_a_finished_run_has_nothing_left_and_a_longer_one_goes_on(tmp_path):
    path = tmp_path / "run.pt"
    whole, short = model(), model()
    torch.manual_seed(1)
    whole.train(3, loader())
    torch.manual_seed(1)
    short.train(2, loader(), callbacks=Checkpoint(path))
    again = model(seed=4)
    again.load(path)
    again.train(2, loader())
    assert torch.equal(weights(again), weights(short))
    longer = model(seed=4)
    longer.load(path)
    longer.train(3, loader())
    assert torch.equal(weights(longer), weights(whole))


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "run.pt"
    ours = model()
    ours.train(1, loader(), callbacks=Checkpoint(path))
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        ours.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


def test_what_a_killed_process_left_half_written_is_removed_after_an_hour(tmp_path):
    old, new, other = (tmp_path / name for name in (".run.pt.17.part", ".run.pt.18.part", ".other.pt.17.part"))
    for file, age in ((old, 4000), (new, 10), (other, 4000)):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)
    model().save(tmp_path / "run.pt")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


KILLED = """
import os, signal, sys, time, torch
sys.path.insert(0, "tests")
import test_model as t
from pathlib import Path
from mpkit.model import Checkpoint

torch.set_num_threads(1)
path = Path(sys.argv[1])

def train():
    ours = t.model()
    torch.manual_seed(os.getpid() if path.exists() else 11)
    if path.exists():
        ours.load(path)
    ours.train(40, t.loader(seed=3, bad=(2,)), callbacks=[Checkpoint(path, every=3)])
    return ours

draw = torch.Generator().manual_seed(int(sys.argv[3]))
reached = []
for _ in range(6):
    child = os.fork()
    if not child:
        train()
        os._exit(0)
    before = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == before:  # it has saved something of its own
        time.sleep(0.002)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
    time.sleep(0.03 * torch.rand((), generator=draw).item())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reached.append(torch.load(path)["progress"]["step"])
ours = train()
torch.save([reached, t.everything(ours)], sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments_resumes_to_the_same_weights(tmp_path):
    """SIGKILL six times at random moments, in a step or while a checkpoint is written, then once to the end."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run.pt"), str(tmp_path / "result.pt"), "0"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    reached, got = torch.load(tmp_path / "result.pt", weights_only=True)
    assert reached == sorted(set(reached))
    assert 0 < reached[0] < reached[-1] < 240
    whole = model()
    torch.manual_seed(11)
    whole.train(40, loader(seed=3, bad=(2,)))
    assert_same(got, everything(whole))
    assert whole._manager.cur_iter == 241


# --- what it says when it cannot


def bare(**kwargs):
    net = network()
    given = {"network": net, "loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(net.parameters(), 0.1)}
    return Model(**(given | kwargs))


WRONG = [
    (lambda: bare(network=len), TypeError, "network must be an nn.Module"),
    (lambda: bare(loss_scale=128), ValueError, "unknown keyword 'loss_scale'"),
    (lambda: bare(optimizer=None, amp_level="O2"), ValueError, "needs an optimizer"),
    (lambda: bare(optimizer=None, boost_level="O1"), ValueError, "needs an optimizer"),
    (lambda: bare(optimizer=None, loss_scale_manager=FixedLossScaleManager()), ValueError, "needs an optimizer"),
    (lambda: bare(amp_level="O5"), ValueError, "level is one of"),
    (lambda: bare(metrics={"f2"}), ValueError, "unknown metrics"),
    (lambda: bare(metrics="accuracy"), TypeError, "got the string 'accuracy'"),
    (lambda: bare(metrics={"mine": len}), TypeError, "metric 'mine' needs"),
    (lambda: bare(eval_indexes=[0, 1]), ValueError, "three ints"),
    (lambda: bare().train(0, loader()), ValueError, "epoch must be at least 1"),
    (lambda: bare().train(1.0, loader()), TypeError, "epoch must be an int"),
    (lambda: bare().train(2, loader(), initial_epoch=2), ValueError, "need initial_epoch < epoch"),
    (lambda: bare().train(2, loader(), initial_epoch=-1), ValueError, "initial_epoch must be at least 0"),
    (lambda: bare(optimizer=None).train(1, loader()), ValueError, "training needs an optimizer"),
    (lambda: bare().train(1, [(torch.ones(2, 5),)]), ValueError, "exactly two elements, data and label, got 1"),
    (lambda: bare().train(1, []), ValueError, "gave no batch in epoch 1"),
    (lambda: bare().train(2, iter(loader())), ValueError, "gave no batch in epoch 2.*not a generator"),
    (lambda: bare().eval(loader()), ValueError, "metrics={'accuracy'}"),
    (lambda: bare(metrics={"accuracy"}).eval([]), ValueError, "gave no batch"),
    (lambda: bare(metrics={"loss"}).eval([]), ValueError, "gave no batch"),
    (lambda: bare().fit(1, loader(), loader()), ValueError, "something to measure"),
    (lambda: bare().fit(1, loader(), valid_frequency=0), ValueError, "valid_frequency must be at least 1"),
    (lambda: bare().fit(1, loader(), valid_frequency="2"), TypeError, "valid_frequency must be"),
    (lambda: LossMonitor(-1), ValueError, "at least 0"),
    (lambda: LossMonitor(2.0), TypeError, "must be an int"),
    (lambda: Checkpoint("x", 0), ValueError, "every must be at least 1"),
    (lambda: Checkpoint("x", 1.5), TypeError, "must be an int"),
    (lambda: bare().train(1, None), TypeError, "a list or a DataLoader, got NoneType"),
    (lambda: bare().train(1, loader(), callbacks=[print]), TypeError, "callbacks must be Callback objects"),
    (lambda: bare().load("nowhere.pt"), FileNotFoundError, "nowhere.pt"),
    (lambda: bare().load(__file__), ValueError, "no checkpoint that can be read"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_checkpoint_of_another_network_changes_nothing(tmp_path):
    path, ours, other = tmp_path / "run.pt", model(), model(seed=3)
    other.network[3] = nn.Linear(8, 4)
    other.save(path)
    before = copy.deepcopy(everything(ours))
    with pytest.raises(ValueError, match=r"'network.backbone.3.bias' is \(4,\) there and \(3,\) here \(2 entries"):
        ours.load(path)
    assert_same(before, everything(ours))
    torch.save(ours.network.state_dict(), path)
    with pytest.raises(ValueError, match=r"not written by Model.save; load weights alone with network.load_state_dict"):
        ours.load(path)


def test_a_checkpoint_of_a_longer_data_set_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    ours = model()
    ours.train(1, loader(6), callbacks=[Checkpoint(path), At(5, lambda run: run.request_stop())])
    ours.load(path)
    with pytest.raises(ValueError, match="ended after 2 batches, and the checkpoint was saved after 5"):
        ours.train(1, loader(2))


def test_a_resumed_run_wants_its_callbacks_back(tmp_path):
    path, ours, whole = tmp_path / "run.pt", model(), model()
    torch.manual_seed(11)
    whole.train(2, loader(), callbacks=LossMonitor(0))
    torch.manual_seed(11)
    ours.train(1, loader(), callbacks=[Checkpoint(path), LossMonitor(0)])
    ours = model(seed=5)
    ours.load(path)
    with pytest.raises(ValueError, match=r"states of the callbacks \['LossMonitor'\], this run has \[\]"):
        ours.train(2, loader(), callbacks=[Checkpoint(path)])
    ours.save(path)  # what was loaded and not gone on from is not lost
    again = model(seed=6)
    again.load(path)
    for resumed in (ours, again):  # callbacks without a state are free
        resumed.train(2, loader(), callbacks=[ProgressBar(disable=True), LossMonitor(0)])
        assert_same(everything(resumed), everything(whole))


def test_a_resumed_run_remembers_how_many_steps_were_skipped(tmp_path):
    def stuck():
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
        return Model(net, nn.MSELoss(), optimizer, loss_scale_manager=FixedLossScaleManager(1.0))

    path, first, second = tmp_path / "run.pt", stuck(), stuck()
    bad = [(torch.full((1, 1), torch.inf), torch.zeros(1, 1))] * 30
    first.train(1, bad, callbacks=[Checkpoint(path), At(15, lambda run: run.request_stop())])
    second.load(path)
    with pytest.warns(RuntimeWarning, match="last 30 steps were skipped"):
        second.train(1, bad)
    third = stuck()
    first.train(1, bad, callbacks=[Checkpoint(path), At(30, lambda run: run.request_stop())])  # all steps, no epoch end
    third.load(path)
    with pytest.warns(RuntimeWarning, match="last 30 steps were skipped"):
        third.train(1, bad)


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


def test_a_train_cell_alone_is_a_model():
    net = network()
    cell = TrainOneStepCell(WithLossCell(net, nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), 0.1))
    before = net[0].weight.detach().clone()
    Model(cell).train(1, loader())
    assert not torch.equal(before, net[0].weight)


def test_a_progress_bar_counts_the_steps_and_shows_loss_and_scale(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook's widgets are missing
        model().train(2, loader(), callbacks=ProgressBar(every=1, ncols=100))
    last = capfd.readouterr().err.split("\r")[-1]
    assert "12/12" in last
    assert "scale=" in last
    assert 0 < float(last.split("loss=")[1].split(",")[0]) < 10


def test_a_boost_level_reaches_the_boost_cells():
    boost = pytest.importorskip("mpkit.boost")
    if not hasattr(boost, "BoostTrainOneStepCell"):
        pytest.skip("the boost cells are not there yet")
    ours = model(manager=None, boost_level="O1", boost_config_dict={"boost": {"mode": "disable_all"}})
    assert isinstance(ours.train_network, boost.BoostTrainOneStepCell)
    ours.train(1, loader())


def test_paths_may_be_strings(tmp_path):
    ours = model()
    ours.save(str(tmp_path / "a.pt"))
    assert Path(tmp_path / "a.pt").exists()
    ours.load(str(tmp_path / "a.pt"))
    ours.train(1, loader())


def test_an_evaluation_network_is_asked_by_the_places_of_loss_output_and_label():
    assert _three_indexes(None) == (0, 1, 2)
    assert _three_indexes([2, 0, 1]) == (2, 0, 1)


def test_a_fit_without_an_evaluation_needs_no_metrics():
    ours = model(metrics=None)
    ours.fit(1, loader(2))
    with pytest.raises(ValueError, match="needs something to measure"):
        ours.fit(2, loader(2), loader(2), initial_epoch=1)


def test_a_half_written_file_is_left_for_an_hour(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr("mpkit.model.checkpoint.time.time", lambda: now)
    for age in (3599, 3600, 3601):
        part = tmp_path / f".run.pt.{age}.part"
        part.touch()
        os.utime(part, (now - age, now - age))
    save_whole({}, tmp_path / "run.pt")
    assert sorted(p.name for p in tmp_path.glob(".run*")) == [".run.pt.3599.part", ".run.pt.3600.part"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_checkpoint_with_and_without_a_manager(saved, tmp_path):
    """The same train cell, in a model whose manager hears of overflows and in one of the cell alone."""
    with_manager = model(seed=0)
    alone = Model(model(seed=1).train_network)
    first, second = (with_manager, alone) if saved else (alone, with_manager)
    first.save(tmp_path / "c")
    second.load(tmp_path / "c")
    assert_same(second.train_network.state_dict(), first.train_network.state_dict())


class Holds:
    def __init__(self, inner):
        self.inner = inner


def test_generators_are_found_at_any_depth_and_in_long_lists_that_begin_with_one(monkeypatch):
    own, other = torch.Generator(), torch.Generator()
    held = own
    for _ in range(100):
        held = Holds(held)
    assert generators(held) == [own]
    samples = [0] * 100
    assert generators([*samples[:63], own]) == generators([samples[:62], {1: own}]) == [own]
    assert generators([*samples[:64], own]) == []  # the beginning of a list of samples says that it is one
    assert generators([own, *samples, other]) == [own, other]
    assert generators([[Holds(own), *samples, other], *samples, Holds(other)]) == [own, other]
    endless = [own, *samples]
    endless[1:1] = [endless]
    assert generators(endless) == [own]
    monkeypatch.setattr("mpkit.model.holdings.LOOKED_AT", 100)
    assert generators([[[]] * 40, [[] for _ in range(60)], Holds(own)]) == [own]
    assert generators([[Holds([]) for _ in range(60)], [[] for _ in range(60)], Holds(Holds(own))]) == []


def test_workers_that_a_loader_keeps_stand_as_they_did():
    kept = DataLoader(data(), num_workers=1, persistent_workers=True)
    assert random_state(kept)["workers"] is False
    kept._iterator = workers = object()
    assert random_state(kept)["workers"] is True
    with pytest.warns(RuntimeWarning, match="live through all epochs"):
        ready_workers(kept, {"workers": True})
    assert kept._iterator is workers
    ready_workers(kept, {"workers": False})
    assert kept._iterator is None
    assert random_state(loader())["workers"] is False


def test_an_interrupt_that_was_kept_is_told_once():
    guard = InterruptBetweenSteps()
    with pytest.raises(KeyboardInterrupt):
        guard._receive(2, None)  # outside of a step: not kept
    assert not guard.between_steps
    with pytest.raises(KeyboardInterrupt), guard.step():
        guard._receive(2, None)  # in the step: kept until its end
    with guard.step():
        pass  # and not again
    assert guard.between_steps


@pytest.mark.parametrize(
    ("good", "bad", "scale", "told"), [(0, 20, 1.0, 1), (0, 19, 1.0, 0), (1, 19, 1.0, 0), (0, 20, 2.0, 0)]
)
def test_from_twenty_skipped_steps_at_the_floor_on_they_are_told(good, bad, scale, told):
    net = nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    ours = Model(net, nn.MSELoss(), sgd, loss_scale_manager=FixedLossScaleManager(scale))
    batches = [(torch.full((1, 1), value), torch.zeros(1, 1)) for value in [1.0] * good + [torch.inf] * bad]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours.train(1, batches)
    assert sum("steps were skipped" in str(w.message) for w in seen) == told


def test_labels_may_be_one_hot():
    output, labels = torch.eye(3)[[0, 1, 2, 2]], torch.tensor([0, 1, 1, 2])
    for given in (labels, torch.eye(3)[labels]):
        metric = Metric(METRICS["accuracy"])
        metric.update(output, given)
        assert metric.eval() == 0.75


def test_a_checkpoint_makes_its_folder(tmp_path):
    ours = model()
    ours.save(tmp_path / "new" / "folder" / "run.pt")
    ours.load(tmp_path / "new" / "folder" / "run.pt")
