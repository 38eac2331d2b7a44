"""Lesson 06: walks through networks at every level; what the lesson's prose claims."""

import math

import pytest
import torch
from torch import nn

from mpkit.casting import LEVELS, auto_mixed_precision, get_black_list, ledger
from mpkit.lessons.casting import LOGITS, NETWORKS, levels, relative_error, walk
from mpkit.view.words import words


@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if "softmax" not in kind])
def test_o0_is_float32_and_low_levels_cost_accuracy(kind):
    wide, low = walk(kind, "O0", "fp16"), walk(kind, "O2", "fp16")
    assert {s.compute for s in wide.steps} == {"float32"}
    assert wide.errors[-1] < 1e-5 < low.errors[-1] < 0.1
    assert any(s.compute == "fp16" for s in low.steps)


def test_what_the_lesson_says_of_its_block():
    seen = {level: walk("residual block", level, "fp16") for level in LEVELS}
    assert {(s.compute, s.output) for s in seen["O3"].steps} == {("fp16", ("fp16",))}
    assert (seen["O2"].steps[1].compute, seen["O2"].steps[1].output) == ("float32", ("fp16",))
    assert seen["O3"].kept_bytes == seen["O2"].kept_bytes < 0.6 * seen["O0"].kept_bytes
    assert seen["O0"].kept_bytes < seen["auto"].kept_bytes
    assert all(1e-4 < seen[level].errors[-1] < 1e-3 for level in LEVELS[1:])


def test_values_that_are_lost_are_counted():
    high = walk("MLP", "O3", "fp16", 0, 18)
    assert sum(s.overflowed for s in high.steps) > 0
    assert not sum(s.overflowed for s in walk("MLP", "O3", "bf16", 0, 18).steps)
    assert sum(s.flushed for s in walk("MLP", "O3", "fp16", 0, -24).steps) > 0


def test_a_kept_layer_is_float32_and_one_too_many_is_refused():
    kept, whole = walk("LeNet5", "O2", "e4m3fn", 5), walk("LeNet5", "O2", "e4m3fn")
    assert kept.errors[-1] / whole.errors[-1] < 0.67
    assert levels(network="LeNet5", fmt="e4m3fn", kept=5).numbers["walk"] == kept
    with pytest.raises(ValueError, match="layers"):
        walk("MLP", "O2", "fp16", 6)


def test_errors_are_relative_and_inf_where_a_value_is_not_finite():
    one = torch.ones(4)
    assert relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert relative_error(torch.tensor([math.inf]), torch.ones(1)) == math.inf


def test_log_of_softmax_is_lost_where_nothing_protects_it():
    seen = {level: levels(network="softmax, then log", level=level).numbers["walk"] for level in LEVELS}
    lost = {level: walk.steps[0].flushed for level, walk in seen.items()}
    assert {level for level, n in lost.items() if n} == {"O2", "O3"}
    assert {level for level, walk in seen.items() if walk.errors[-1] == math.inf} == {"O2", "O3"}
    probability = torch.softmax(LOGITS.double(), 0)
    assert lost["O2"] == lost["O3"] == (probability.half() == 0).sum().item() == 16
    assert levels(network="log_softmax", level="O2").numbers["walk"].errors[-1] < 1e-3


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in words("casting")["question"].items()}
    assert asked["product"] == 32  # no product of elements is on the white list
    probability = torch.softmax(-2.0 * torch.arange(17, dtype=torch.float64), 0)
    assert asked["lost"] == (probability <= 2.0**-25).sum().item()
    kinds = {nn.BatchNorm1d, nn.GroupNorm, nn.InstanceNorm1d, nn.LayerNorm, nn.RMSNorm, nn.Softmax}
    assert set(asked["black"]) == {kind.__name__ for kind in kinds & set(get_black_list())}
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4)), "auto", torch.float16)
    with ledger(network) as book:
        network(torch.ones(1, 4))
    assert asked["bias"] == book.rows[-1].output[0]


@pytest.mark.parametrize(("arguments", "width"), words("casting")["task"]["cases"])
def test_cases_of_the_task_are_what_the_ledger_says(arguments, width):
    kind, level = arguments
    layers = {"linear": nn.Linear(4, 4), "relu": nn.ReLU(), "batch_norm": nn.BatchNorm1d(4), "softmax": nn.Softmax(-1)}
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), layers[kind]), level, torch.float16)
    with ledger(network) as book:
        network(torch.randn(3, 4))
    computes = next(row.compute for row in reversed(book.rows) if kind in row.operation)
    assert width == int(computes.removeprefix("float"))


def test_what_a_layer_in_float32_takes_stands_under_it():
    view = levels(network="LeNet5", kept=4)  # it and the next one take another precision
    assert {s.module: s.casts for s in view.numbers["walk"].steps if s.module in ("fc2", "fc3")} == {"fc2": 1, "fc3": 3}
    assert "of these 2 at the network's input and output" in view.sentence
