"""`Model` after what people do to it: any data set, nested batches, interrupts, failed loads, labels of any shape."""

from __future__ import annotations

import signal
from collections import namedtuple

import pytest
import torch
from torch import nn

from mpkit.model import METRICS, Callback, Metric, Model, ProgressBar
from mpkit.model.interrupt import InterruptBetweenSteps
from mpkit.step import build_train_network

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
Pair = namedtuple("Pair", "first second")


def linear_model(**options):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    return Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1), **options)


# --- outputs and batches that are nests


class Nested(nn.Module):
    """A network that returns its output inside something."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(2, 1), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


class FirstLoss(nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.pick, self.seen = pick, None

    def forward(self, output, label):
        self.seen = self.pick(output).dtype
        return (self.pick(output) - label).square().mean()


@pytest.mark.parametrize(
    ("wrap", "pick"),
    [
        (lambda y: Pair(y, y), lambda out: out.second),
        (lambda y: {"logits": y}, lambda out: out["logits"]),
        (lambda y: [{"logits": (y,)}], lambda out: out[0]["logits"][0]),
    ],
    ids=["named tuple", "dict", "nest"],
)
def test_the_loss_of_o2_gets_float32_in_any_nest(wrap, pick):
    net, loss = Nested(wrap), FirstLoss(pick)
    cell = build_train_network(net, torch.optim.SGD(net.parameters(), 0.1), loss, "O2")
    assert cell(*BATCHES[0]).loss.dtype == loss.seen == torch.float32


def test_every_tensor_of_a_nested_batch_goes_to_the_network_s_device():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1, device="meta")

        def forward(self, batch):
            return self.linear(batch["x"][0]) + self.linear(batch["pair"].second)

    x = torch.ones(4, 2)
    assert Model(Sum()).predict({"x": [x], "pair": Pair(x, x)}).device.type == "meta"


class LengthUnknown:
    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        return iter(BATCHES)


def test_a_data_set_that_does_not_know_its_length_is_trained_on():
    lengths = []

    class Told(Callback):
        def on_train_begin(self, run):
            lengths.append(run.batch_num)

        def on_train_end(self, run):
            lengths.append(run.cur_step_num)

    linear_model().train(2, LengthUnknown(), Told())
    assert lengths == [None, 6]


# --- metrics


def measured(name, *batches):
    metric = Metric(METRICS[name])
    for output, label in batches:
        metric.update(output, label)
    return metric.eval()


def test_mse_and_mae_compare_each_output_with_its_own_label():
    column, row = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 2.0])
    assert measured("mse", (column, row)) == 4 / 3
    assert measured("mae", (column, row)) == 2 / 3
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


def test_a_metric_without_an_output_says_what_it_needs():
    net = OwnLoss()
    model = Model(net, None, torch.optim.SGD(net.parameters(), 0.1), metrics={"accuracy"})
    with pytest.raises(ValueError, match="accuracy need an output and a label"):
        model.eval([(*batch, torch.ones(4, 1)) for batch in BATCHES])


@pytest.mark.parametrize(("listed", "error"), [([1, "2"], TypeError), ([0], ValueError), ((1.5,), TypeError)])
def test_the_epochs_of_evaluations_are_whole_numbers(listed, error):
    with pytest.raises(error, match="each of valid_frequency"):
        linear_model(metrics={"mse"}).fit(2, BATCHES, BATCHES, valid_frequency=listed)


# --- interrupts, errors, and what a callback is told


class Pressed(nn.Module):
    """A network in whose forward pass Ctrl-C is pressed; then it goes on, or fails."""

    def __init__(self, presses, fails):
        super().__init__()
        self.linear, self.presses, self.fails = nn.Linear(2, 1), presses, fails

    def forward(self, x):
        for _ in range(self.presses):
            signal.raise_signal(signal.SIGINT)
        if self.fails:
            raise MemoryError
        return self.linear(x)


@pytest.mark.parametrize(
    ("presses", "fails", "error", "failed"),
    [(1, False, KeyboardInterrupt, False), (2, False, KeyboardInterrupt, True), (1, True, MemoryError, True)],
)
def test_only_a_whole_step_is_worth_saving_after_ctrl_c(presses, fails, error, failed):
    told = []

    class Told(Callback):
        def on_train_end(self, run):
            told.append(run.failed)

    net = Pressed(presses, fails)
    with pytest.raises(error):
        Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1)).train(1, BATCHES, Told())
    assert told == [failed]


def pressed_and_failed():
    signal.raise_signal(signal.SIGINT)
    raise OSError("disk")


def test_a_press_that_a_failed_step_kept_is_not_left_for_the_next_one():
    with InterruptBetweenSteps() as guard:
        with pytest.raises(OSError, match="disk"), guard.step():
            pressed_and_failed()
        with guard.step():
            pass
        assert not guard.between_steps


def test_the_error_of_a_callback_reaches_the_caller_past_a_progress_bar():
    class Bad(Callback):
        def on_train_begin(self, run):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        linear_model().train(1, BATCHES, [Bad(), ProgressBar()])
    with pytest.raises(ValueError, match="every must be at least 1"):
        ProgressBar(every=0)


# --- checkpoints


class StopAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_step_end(self, run):
        if run.cur_step_num == self.step:
            run.model.save(self.path)
            run.request_stop()


class Steps(Callback):
    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run):
        self.seen.append(run.cur_step_num)


def test_a_resume_that_was_refused_can_be_tried_again(tmp_path):
    path = tmp_path / "run.ckpt"
    linear_model().train(2, BATCHES, StopAt(2, path))
    model, steps = linear_model(), Steps()
    model.load(path)
    with pytest.raises(ValueError, match="resume with the data set"):
        model.train(2, BATCHES[:1], steps)
    model.train(2, BATCHES, steps)
    assert steps.seen == [3, 4, 5, 6]


def test_an_error_after_a_step_does_not_bring_the_checkpoint_back(tmp_path):
    path = tmp_path / "run.ckpt"
    linear_model().train(2, BATCHES, StopAt(2, path))
    model, steps = linear_model(), Steps()
    model.load(path)

    class Bad(Callback):
        def on_train_step_end(self, run):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        model.train(2, BATCHES, [steps, Bad()])
    model.train(1, BATCHES, steps)
    assert steps.seen == [3, 1, 2, 3]


def test_a_checkpoint_whose_last_part_is_refused_leaves_the_weights_alone(tmp_path):
    boost = {"boost": {"mode": "manual", "grad_accumulation": True}, "grad_accumulation": {"grad_accumulation_step": 3}}
    options = {"boost_config_dict": boost}
    path = tmp_path / "run.ckpt"
    model = linear_model(**options)
    model.train(1, BATCHES)
    model.save(path)
    saved = torch.load(path)
    saved["train_network"]["accumulation._extra_state"]["counter"] = -1
    torch.save(saved, path)
    fresh = linear_model(**options)
    before = fresh.network.weight.clone()
    assert not torch.equal(before, model.network.weight)
    with pytest.raises(ValueError, match="count of an accumulation must be at least 0"):
        fresh.load(path)
    assert torch.equal(fresh.network.weight, before)


@pytest.mark.parametrize("ask", [lambda model: model.eval(BATCHES), lambda model: model.predict(torch.ones(1, 2))])
@pytest.mark.parametrize("phase", ["on_train_step_end", "on_train_epoch_begin"])
def test_an_evaluation_in_the_middle_of_a_run_leaves_the_modes_as_they_were(ask, phase):
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Linear(2, 1))
    seen = []

    class Freezes(Callback):
        def on_train_epoch_begin(self, run):
            network[2].eval()  # its statistics are kept in this run

        def on_train_step_end(self, run):
            seen.append([part.training for part in network])

    class Asks(Callback):
        pass

    setattr(Asks, phase, lambda self, run: ask(run.model))
    model = Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1), metrics={"mse"})
    model.train(2, BATCHES, [Freezes(), Asks()])
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


@pytest.mark.parametrize("phase", ["on_train_epoch_end", "on_eval_end"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_run_that_was_saved_while_an_epoch_ended_goes_on_from_there(phase, place, tmp_path):
    """The best weights are saved when an evaluation has ended, say: nothing is evaluated or told twice."""
    rows = torch.utils.data.TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    loader = torch.utils.data.DataLoader(rows, 4, shuffle=True)  # the one of evaluation draws a number, too

    class Saves(Callback):
        pass

    def save(self, run):
        if run.cur_epoch_num == 2 and not (tmp_path / "c").exists():
            run.model.save(tmp_path / "c")

    setattr(Saves, phase, save)

    def trained(saved=None):
        made, kept = linear_model(metrics={"loss"}), [Keeps(), Keeps()]
        if saved is not None:
            made.load(saved)
        made.fit(4, loader, loader, callbacks=[*kept[:place], Saves(), *kept[place:]])
        return made.network.weight.tolist(), [k.told for k in kept]

    torch.manual_seed(3)
    whole = trained()
    torch.manual_seed(4)
    assert trained(tmp_path / "c") == whole
