"""`train`: every name reaches the thing it names, and what comes back is what a loop by hand gives."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mpkit import networks, optimizers
from mpkit.boost import AutoBoost
from mpkit.casting import LEVELS, PRESETS, RECIPES, cast_like
from mpkit.experiment import experiment, train
from mpkit.experiment.parts import boost_of, optimizer_of
from mpkit.formats import get_format
from mpkit.policies import ScalePolicy, preset
from mpkit.scalers import DynamicLossScaler


def rows(count=60, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


tiny = functools.partial(train, network=net, data=rows, epochs=1, batch=16)


def test_it_is_the_loop_by_hand():
    got = train(net, rows, optimizer="torch.SGD", lr=0.1, epochs=2, batch=16, seed=3)
    x, y = rows()
    torch.manual_seed(3)
    network = net()
    rule = torch.optim.SGD(network.parameters(), 0.1, momentum=0.0)
    order, losses, curve = torch.Generator().manual_seed(3), [], []
    for _ in range(2):
        for part in torch.randperm(48, generator=order).split(16):
            rule.zero_grad()
            loss = nn.functional.cross_entropy(network(x[:48][part]), y[:48][part])
            loss.backward()
            rule.step()
            losses.append(loss.item())
        with torch.no_grad():
            curve.append(100 * (network(x[48:]).argmax(1) == y[48:]).double().mean().item())
    assert got["loss"] == pytest.approx(losses, rel=1e-5)
    assert got["accuracy_curve"] == pytest.approx(curve)
    assert got["accuracy"] == got["accuracy_curve"][-1]
    assert got["final_loss"] == pytest.approx(sum(losses[3:]) / 3, rel=1e-5)
    assert (got["skipped"], got["last_scale"], set(got["scale"])) == (0, 1.0, {1.0})
    assert got["seconds_per_step"] > 0


BOOSTS = (
    *("O0", "O1", "O2", "tuned", "less_bn", "grad_freeze", "less_bn+grad_freeze", "grad_accumulation", "adasum"),
    *("grad_centralization", {"level": "O1", "less_bn": {"gc_flag": False}}),
)
NAMED = [*({"level": name, "dtype": "bfloat16"} for name in (*LEVELS, *PRESETS)), *({"boost": b} for b in BOOSTS)]


@pytest.mark.parametrize("options", NAMED, ids=str)
def test_every_level_preset_and_boost_trains_by_its_name(options):
    assert math.isfinite(tiny(**options)["final_loss"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp16", "e5m2", "e4m7", torch.bfloat16, get_format("e4m3fn")])
def test_every_kind_of_format_trains_and_differs_from_float32(dtype):
    assert tiny(level="O3", dtype=dtype)["loss"] != tiny()["loss"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_by_its_name_as_by_hand(recipe):
    by_hand = tiny(level=lambda network: cast_like(network, recipe))
    assert tiny(recipe=recipe)["loss"] == by_hand["loss"] != tiny()["loss"]


def test_recipes_are_cells_of_a_grid_by_name_and_as_objects():
    changed = replace(RECIPES["mxfp8"], wgrad_grad=None, wgrad_input=None)
    results = experiment(tiny, {"recipe": [None, "mxfp8", RECIPES["mxfp8"], changed]}, seeds=1, progress=False)
    assert not results.failures
    none, name, same, other = (results.values(cell, "final_loss")[0] for cell in range(4))
    assert name == same
    assert (len({none, name, other}), len(set(results.labels))) == (3, 4)


CELL = {"framework": "mindspore_cell", "loss_scale_value": 2.0**15, "scale_factor": 2, "scale_window": 50}


@pytest.mark.parametrize(
    ("scaler", "same"), [("dynamic", "mindspore_manager"), ("torch", "torch"), ("deepspeed", "deepspeed"), (CELL, CELL)]
)
def test_a_framework_scales_by_its_name(scaler, same):
    first = preset(**same) if isinstance(same, dict) else preset(same)
    got = tiny(scaler=scaler)
    assert got["scale"][0] in (float(first.init_scale), first.init_scale / 2)
    assert math.isfinite(got["final_loss"])


@pytest.mark.parametrize(
    "scaler",
    [
        *(8, 8.0, ScalePolicy(init_scale=8.0, growth_interval=0), DynamicLossScaler(8, 2, 100)),
        lambda network: DynamicLossScaler(8, 2, 100),
    ],
)
def test_every_kind_of_scaler_starts_at_its_scale_and_leaves_the_weights_alone(scaler):
    got = tiny(scaler=scaler)
    assert set(got["scale"]) == {8.0}
    assert got["loss"] == pytest.approx(tiny()["loss"], rel=1e-5)


def test_overflows_are_skipped_and_counted_and_a_scaler_that_is_given_stays_as_it_was():
    scaler = DynamicLossScaler(2.0**40, 2, 100)
    got = tiny(level="O3", dtype="fp16", scaler=scaler, epochs=4)
    assert (got["skipped"], got["last_scale"], float(scaler.scale_value)) == (12, 2.0**28, 2.0**40)


def test_names_of_boosts_switch_on_what_they_name():
    assert boost_of("less_bn+grad_freeze", 100).active == ("less_bn", "grad_freeze")
    assert boost_of("tuned", 100).mode == "tuned"
    assert boost_of("O1", 123).hyper["total_steps"] == 123
    assert boost_of({"boost": {"mode": "manual", "less_bn": False}}, 9).active == ("grad_freeze",)
    given = AutoBoost("O1")
    assert boost_of(given, 9).level == "O1"
    assert boost_of(given, 9) is not given


WRAPPERS = ("Optimizer", "Wrapper", "LARS", "BFloat16Weights")  # they take an optimizer, not parameters


@pytest.mark.parametrize("name", [n for n in optimizers.__all__ if n[0].isupper() and n not in WRAPPERS])
def test_every_optimizer_trains_by_its_name(name):
    assert isinstance(optimizer_of(name, net(), None if name == "AdaFactor" else 0.01), torch.optim.Optimizer)
    assert optimizer_of(lambda p: torch.optim.Adam(p, 0.5), net(), 0.01).param_groups[0]["lr"] == 0.5
    assert optimizer_of("torch.AdamW", net(), 0.01).param_groups[0]["lr"] == 0.01


def pairs():
    return TensorDataset(*rows())


class Stream(IterableDataset):
    """Rows that nobody has counted."""

    def __iter__(self):
        return zip(*rows())


KINDS = [
    rows(), (rows(48), rows(12, 1)), pairs(), {"train": pairs(), "test": rows(12, 1)}, {"train": rows()},
    {"train": [rows(16), rows(16, 1)], "test": [rows(8)]}, DataLoader(pairs(), 16), DataLoader(Stream(), 16),
    [rows(16), rows(16, 1)], lambda: DataLoader(pairs(), 16),
]  # fmt: skip


@pytest.mark.parametrize("data", KINDS)
def test_every_kind_of_data_trains(data):
    got = tiny(data=data)
    assert math.isfinite(got["final_loss"])
    untested = isinstance(data, DataLoader | list) or callable(data) or (isinstance(data, dict) and len(data) == 1)
    assert ("accuracy" in got) is not untested


def test_numbers_as_labels_are_fitted_and_tested_by_their_loss():
    got = tiny(data=lambda: (torch.ones(20, 4), torch.zeros(20, 3)), epochs=3)
    assert got["test_loss_curve"][-1] == got["test_loss"] < got["test_loss_curve"][0]
    assert "accuracy" not in got


def test_a_class_for_every_position_and_a_loss_of_ones_own():
    def tokens():
        x = torch.arange(64).reshape(8, 8) % 11
        return x, (x + 1) % 11

    got = train(lambda: networks.TinyGPT(11, 8, 16, 2, 1), tokens, optimizer="Adam", lr=0.01, epochs=8, batch=4)
    assert got["accuracy"] > 50
    assert tiny(loss=lambda out, label: out.square().mean())["loss"] != tiny()["loss"]


class Shaped(nn.Module):
    """Scores that are right everywhere, of whole numbers below `classes`, along an axis."""

    def __init__(self, classes, axis):
        super().__init__()
        self.scale, self.classes, self.axis = nn.Parameter(torch.ones(())), classes, axis

    def forward(self, x):
        return 9 * self.scale * F.one_hot(x, self.classes).float().movedim(-1, self.axis)


def still(network, data, **options):
    """A training that changes nothing."""
    return train(network, data, optimizer="torch.SGD", lr=0.0, epochs=1, batch=4, **options)


def test_the_accuracy_leaves_out_what_the_loss_leaves_out():
    x = torch.arange(60).reshape(10, 6) % 3
    y = x.clone()
    y[:, 3:] = -100
    assert still(lambda: Shaped(3, -1), (x, y))["accuracy"] == 100.0
    assert math.isnan(still(lambda: Shaped(3, -1), {"train": (x, y), "test": (x, y * 0 - 100)})["accuracy"])


def test_where_no_class_can_be_chosen_the_loss_is_what_is_tested():
    def sign(output, label):
        return F.binary_cross_entropy_with_logits(output.flatten(), label.float())

    x, y = torch.randn(20, 3), torch.arange(20) % 2
    got = still(lambda: nn.Linear(3, 1), (x, y), loss=sign)
    assert "accuracy" not in got
    assert got["test_loss"] > 0
    squares = torch.arange(80).reshape(5, 4, 4) % 4  # (rows, classes, 4, 4) or (rows, 4, 4, classes)?
    assert "accuracy" not in still(lambda: Shaped(4, 1), (squares, squares), loss=F.cross_entropy)
    assert still(lambda: Shaped(4, -1), (squares, squares))["accuracy"] == 100.0  # its own loss knows: the last axis
    strips = squares[:, :, :3]
    assert still(lambda: Shaped(4, 1), (strips, strips), loss=F.cross_entropy)["accuracy"] == 100.0


class Nested(nn.Linear):
    def forward(self, held):
        return super().forward(held["x"])


def test_samples_that_are_nests_are_trained_and_tested():
    samples = [({"x": a}, {"y": b}) for a, b in zip(*rows())]
    nested = {"train": DataLoader(samples, 16), "test": DataLoader(samples, 7)}
    flat = {"train": DataLoader(pairs(), 16), "test": rows()}
    loss = lambda output, label: F.cross_entropy(output, label["y"])  # noqa: E731
    got = train(lambda: Nested(4, 3), nested, loss=loss, epochs=1)
    plain = train(lambda: nn.Linear(4, 3), flat, epochs=1)
    assert got["loss"] == plain["loss"]
    assert got["test_loss"] > 0


def test_arrays_are_tensors_and_a_column_is_fitted_by_its_rows():
    x, y = rows()
    assert tiny(data=(x.numpy(), y.numpy()))["loss"] == tiny(data=(x, y))["loss"]
    flat = train(lambda: nn.Linear(4, 1), (x, x[:, 0]), epochs=1)["loss"]
    assert flat == train(lambda: nn.Linear(4, 1), (x, x[:, :1]), epochs=1)["loss"]


def test_the_trained_network_comes_back_when_asked():
    got = tiny(keep=True, epochs=30, scaler=8.0, level="O2", dtype="fp16")
    x, y = rows()
    right = (got["network"](x[48:]).argmax(1) == y[48:]).float().mean()
    assert got["accuracy"] == pytest.approx(100 * float(right))
    assert "network" not in tiny()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"network": nn.Linear(1, 1)}, TypeError, "what builds a network"),
        ({"network": "Nitwork"}, ValueError, "no 'Nitwork'"),
        ({"network": lambda: 3}, TypeError, "that makes an nn.Module"),
        ({"data": "digit"}, ValueError, "no data set is called 'digit'"),
        ({"data": 3}, TypeError, "data must be"),
        ({"data": {"test": rows()}}, ValueError, "'train' and perhaps 'test'"),
        ({"data": (torch.zeros(3, 4), torch.zeros(2))}, ValueError, "as many labels as rows"),
        ({"data": {"train": []}}, ValueError, "gave no batch"),
        ({"data": [{"x": 1, "y": 2}]}, ValueError, r"a batch must be \(x, y\).*got a dict"),
        ({"data": [(*rows(), 3)]}, ValueError, r"a batch must be \(x, y\).*got 3 parts"),
        ({"data": {"train": rows(), "test": (batch for batch in ())}}, ValueError, "test data gave no batch"),
        ({"data": (torch.zeros(1, 4), torch.zeros(1))}, ValueError, "got 0 rows"),
        ({"optimizer": "Adem"}, ValueError, "no optimizer is called 'Adem'"),
        ({"optimizer": lambda p: 3}, TypeError, "optimizer must be"),
        ({"level": "O4"}, ValueError, "O4"),
        ({"level": "O1", "recipe": "x"}, ValueError, "a recipe says itself what is cast"),
        ({"recipe": "mxfp9"}, ValueError, "preset must be .*mxfp9"),
        ({"dtype": "fp17", "level": "O2"}, ValueError, "fp17"),
        ({"scaler": "tork"}, ValueError, "'tork'"),
        ({"scaler": "mindspore_cell"}, TypeError, " needs "),  # it has no default for them
        ({"scaler": [1]}, TypeError, "scaler must be"),
        ({"boost": "o1"}, ValueError, "no boost is called 'o1'"),
        ({"boost": 1}, TypeError, "boost must be"),
        ({"epochs": 0}, ValueError, "at least 1"),
        ({"batch": 1.0}, TypeError, "must be an int"),
    ],
)
def test_wrong_arguments_are_told(options, error, sentence):
    with pytest.raises(error, match=sentence):
        tiny(**options)
