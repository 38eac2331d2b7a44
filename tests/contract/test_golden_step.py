"""The train cells, build_train_network and LossMonitor against what MindSpore computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import array, golden_data
from torch import nn

from mpkit.casting import to_float
from mpkit.model import LossMonitor, Model
from mpkit.optimizers import SGD, Adam, Momentum
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
)
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell, build_train_network

ATOL = 3e-6  # what the golden data promise for optimizers
HALF = 2.0**-10  # one ulp of a float16 loss, for the sum that rounds to the neighbour; nearly always it is 1e-7
CAST = 3e-4  # as much of an activation or gradient, after the learning rate


CELLS = [(data, case) for data in golden_data("mindspore-amp", "x_overflow", "cases") for case in data["cases"]]
BUILT = golden_data("mindspore-amp", "loss_monitor", "params", "cases")
BUILDS = [(data, case) for data in BUILT for case in data["cases"]]
MONITORS = [(data, case) for data in BUILT for case in data["loss_monitor"]]


def tensor(obj):
    return torch.from_numpy(array(obj))


class SquaredError(nn.Module):
    """The mean squared error rounded where MindSpore rounds it: torch's own kernel multiplies in another order."""

    def forward(self, output, label):
        return (output - label).square().mean()


def cell_id(pair):
    file, case = pair
    what = case.get("scale_sense", case.get("sens"))
    half = "-half" if case.get("half_network") else ""
    name = f"{file['file']}-{case['cell']}-{case['optimizer']}-{what}-{case.get('optimizer_loss_scale', '')}{half}"
    return name.replace(" ", "")


def optimizer_for(name, parameters, loss_scale=1.0):
    if name == "Momentum":
        return Momentum(parameters, 0.05, 0.9, weight_decay=0.01, loss_scale=loss_scale)
    if name == "SGD":
        return SGD(parameters, 0.05, loss_scale=loss_scale)
    return Adam(parameters, 0.01, loss_scale=loss_scale)


def sense_of(given):
    if "dynamic" in given:
        return DynamicLossScaleUpdateCell(*given["dynamic"])
    if "fixed" in given:
        return FixedLossScaleUpdateCell(given["fixed"])
    return torch.tensor(given["tensor"])


def finite_max(values):
    """The largest finite magnitude, 0.0 if there is none."""
    magnitudes = np.abs([float(v) for v in values])
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def rounding(steps, *, batch, sizes):
    """How far float32 results of two machines may lie apart after some steps, as a share of the largest value so far.

    A step of a linear layer under squared error is linear in the parameters. Where the division is missing (sens 1024,
    optimizer 1) it multiplies them, to 1e15 in the end, and what was rounded earlier by the same factor: errors stay
    a share of the largest value, and one more is added by each step. That is eps times the number of its roundings: a
    sum over the inputs and one over the batch and the outputs, each in any order, and ten of loss, mean and update.
    The loss is the square of such values, so twice this share of it.
    """
    outputs, inputs = sizes
    return steps * (inputs + batch * outputs + 10) * 2.0**-24


@pytest.mark.parametrize("pair", CELLS, ids=cell_id)
def test_train_cells_give_the_golden_losses_scales_and_weights(pair):
    data, case = pair
    net = nn.Linear(data["weight"]["shape"][1], data["weight"]["shape"][0])
    net.load_state_dict({"weight": tensor(data["weight"]), "bias": tensor(data["bias"])})
    half = case.get("half_network", False)
    if half:
        to_float(net, torch.float16)
    optimizer = optimizer_for(case["optimizer"], net.parameters(), case.get("optimizer_loss_scale", 1.0))
    network = WithLossCell(net, SquaredError())
    scaled = case["cell"] == "TrainOneStepWithLossScaleCell"
    if scaled:
        cell = TrainOneStepWithLossScaleCell(network, optimizer, sense_of(case["scale_sense"]))
    else:
        cell = TrainOneStepCell(network, optimizer, case["sens"])
    replaced = case.get("scale_sense", {}).get("set_sense_scale", {})
    largest = 1.0  # of the parameters so far
    for index, (x, y, step) in enumerate(zip(data[case["inputs"]], data["y"], case["steps"], strict=True)):
        if str(index) in replaced:
            cell.set_sense_scale(torch.tensor(replaced[str(index)]))
        label = tensor(y).half() if half else tensor(y)
        out = cell(tensor(x), label)
        loss = out.loss if scaled else out
        if scaled:
            assert str(loss.dtype) == f"torch.{step['loss_dtype']}".lower()
            assert bool(out.overflow) is step["overflow"]
            assert out.scale.item() == np.float32(step["scale_returned"])
        share = HALF if half else max(ATOL, rounding(index + 1, batch=len(tensor(y)), sizes=net.weight.shape))
        largest = max(largest, finite_max(step["weight"]), finite_max(step["bias"]))
        bounds = {"loss": 2 * share * max(1.0, finite_max([step["loss"]])), "weight": share * largest}
        for name, got in (("loss", loss), ("weight", net.weight), ("bias", net.bias)):
            want = np.array([float(v) for v in (step[name] if name != "loss" else [step[name]])])
            atol = bounds.get(name, share * largest)
            np.testing.assert_allclose(got.detach().double().numpy().ravel(), want, rtol=0, atol=atol, err_msg=name)


class SmallNetwork(nn.Module):
    """fc1 -> bn -> ReLU -> fc2, with the sizes and values of a golden file."""

    def __init__(self, params):
        super().__init__()
        hidden, inputs = params["fc1.weight"]["shape"]
        self.fc1, self.bn = nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden)
        self.relu, self.fc2 = nn.ReLU(), nn.Linear(hidden, params["fc2.weight"]["shape"][0])
        names = {"bn.gamma": "bn.weight", "bn.beta": "bn.bias"}
        names |= {"bn.moving_mean": "bn.running_mean", "bn.moving_variance": "bn.running_var"}
        self.names = {theirs: names.get(theirs, theirs) for theirs in params}
        state = {self.names[theirs]: tensor(value) for theirs, value in params.items()}
        self.load_state_dict(state | {"bn.num_batches_tracked": torch.tensor(0)})

    def forward(self, x):
        return self.fc2(self.relu(self.bn(self.fc1(x))))


def manager_of(given):
    if given is None:
        return None
    kind, *numbers = given
    if kind == "dynamic":
        return DynamicLossScaleManager(*numbers)
    return FixedLossScaleManager(*numbers, drop_overflow_update=kind == "fixed-drop")


def built(data, case):
    net = SmallNetwork(data["params"])
    settings = data["optimizer"]
    kwargs = dict(case["kwargs"])
    if "cast_model_type" in kwargs:
        kwargs["cast_model_type"] = getattr(torch, kwargs["cast_model_type"])
    if "loss_scale_manager" in kwargs:
        kwargs["loss_scale_manager"] = manager_of(kwargs["loss_scale_manager"])
    scale = case.get("optimizer_loss_scale", 1.0)
    optimizer = Momentum(net.parameters(), settings["learning_rate"], settings["momentum"], loss_scale=scale)
    return net, build_train_network(net, optimizer, SquaredError(), case["level"], **kwargs)


def casts(level, cast_model_type=None, keep_batchnorm_fp32=None, **_others):
    """Whether anything runs in float16, by the reference's order of decisions."""
    half = level in ("O2", "O3") if cast_model_type is None else cast_model_type == "float16"
    keep = level == "O2" if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    return half or level in ("O1", "auto") or (level == "O2" and not keep)


def build_id(pair):
    file, case = pair
    return f"{file['file']}-{case['level']}-{case['kwargs']}".replace(" ", "")


@pytest.mark.parametrize("pair", BUILDS, ids=build_id)
def test_build_train_network_gives_the_golden_steps(pair):
    data, case = pair
    net, cell = built(data, case)
    if not case["runs"]:  # MindSpore has no overflow register on a CPU; mpkit trains there
        assert type(cell) is TrainOneStepWithLossScaleCell
        assert cell(tensor(data["x"][0]), tensor(data["y"][0])).loss.isfinite()
        return
    assert type(cell).__name__ == case["train_cell"]
    assert cell.training
    atol = CAST if casts(**{"level": case["level"], **case["kwargs"]}) else ATOL
    for x, y, step in zip(data["x"], data["y"], case["steps"]):
        loss = cell(tensor(x), tensor(y))
        assert str(loss.dtype) == f"torch.{step['loss_dtype']}".lower()
        assert abs(loss.item() - step["loss"]) <= atol
        for theirs, values in step["weights"].items():
            ours = net.state_dict()[net.names[theirs]].double().numpy().ravel()
            np.testing.assert_allclose(ours, values, rtol=0, atol=atol, err_msg=theirs)


def numbers_and_text(line):
    text, _, number = line.rpartition(" ")
    return text, float(number)


@pytest.mark.parametrize("pair", MONITORS, ids=lambda pair: f"{pair[0]['file']}-every-{pair[1]['per_print_times']}")
def test_loss_monitor_prints_the_golden_lines(pair, capsys):
    data, case = pair
    net = SmallNetwork(data["params"])
    optimizer = Momentum(net.parameters(), data["optimizer"]["learning_rate"], data["optimizer"]["momentum"])
    model = Model(net, SquaredError(), optimizer, metrics={"mse"})
    batches = [(tensor(x), tensor(y)) for x, y in zip(data["x"], data["y"])][: case["batches_per_epoch"]]
    model.train(case["epochs"], batches, callbacks=[LossMonitor(case["per_print_times"])])
    got, want = capsys.readouterr().out.splitlines(), case["printed"]
    assert [numbers_and_text(line)[0] for line in got] == [numbers_and_text(line)[0] for line in want]
    for ours, theirs in zip(got, want):
        assert numbers_and_text(ours)[1] == pytest.approx(numbers_and_text(theirs)[1], abs=2e-6)
    for name, value in model.eval(batches).items():
        assert value == pytest.approx(case["eval"][name], abs=1e-4)
