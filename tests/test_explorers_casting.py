"""The models and views of lesson 03, without a browser."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from scenes import look

from mpkit.casting import auto_mixed_precision, ledger
from mpkit.check import verdict
from mpkit.check.lesson_03 import QUESTIONS
from mpkit.explorers.casting import (
    LOGITS,
    NETWORKS,
    CastingExplorer,
    LogSoftmaxExplorer,
    _built,
    layers_of,
    relative_error,
    walk,
)
from mpkit.formats import FP16
from mpkit.widgets.casting import casting_view, log_softmax_view


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_walk_is_what_the_ledger_says(kind: str) -> None:
    network, x = _built(kind, 0)
    with ledger(auto_mixed_precision(network, "O2", FP16)) as book:
        network(x)
    got = walk(kind, "O2", "fp16")
    rows = {(row.module, row.operation): row.compute for row in book.rows}
    assert {(step.module, step.operation): step.compute for step in got.steps}.items() <= rows.items()
    assert got.kept_bytes == book.measured_bytes
    assert got.layers == layers_of(network)


def test_errors_grow_from_float32_over_float16_to_8_bits() -> None:
    errors = [walk("MLP", level, fmt).error for level, fmt in (("O0", "fp16"), ("O2", "fp16"), ("O2", "e4m3fn"))]
    assert errors[0] < 2**-20 < errors[1] < 2**-9 < errors[2] < 0.2


def test_one_layer_moved_to_float32_computes_there_and_only_there() -> None:
    model = CastingExplorer(network="LeNet5", level="O2", fmt="e4m3fn")
    before = [(s.operation, s.compute) for s in model.walk.steps]
    model.kept = 5
    after = [(s.operation, s.compute) for s in model.walk.steps]
    assert before[-1] == ("linear", "e4m3fn")
    assert after == [*before[:-1], ("linear", "float32")]
    assert "layer fc3 in float32" in model.summary()


def test_large_inputs_overflow_and_small_ones_flush() -> None:
    big = CastingExplorer(level="O3", fmt="fp16", exponent=18)
    assert sum(s.overflowed for s in big.walk.steps) > 0
    assert math.isinf(big.walk.error)
    assert "not finite" in big.summary()
    small = CastingExplorer(level="O3", fmt="fp16", exponent=-24)
    assert sum(s.flushed for s in small.walk.steps) > 0


def test_low_formats_keep_fewer_bytes() -> None:
    model = CastingExplorer(network="residual block", level="O3", fmt="e5m2")
    assert model.walk.kept_bytes < 0.3 * model.plain.kept_bytes


def test_log_of_softmax_loses_what_lies_below_half_the_smallest_float16() -> None:
    model = LogSoftmaxExplorer(level="O2", fmt="fp16")
    assert model.lost == int((torch.softmax(LOGITS.double(), 0) <= 2.0**-25).sum())
    assert LogSoftmaxExplorer(level="O1").lost == LogSoftmaxExplorer(level="auto").lost == 0
    assert LogSoftmaxExplorer(level="O3", fused=True).lost == 0
    narrow = LogSoftmaxExplorer(level="O2", fmt="e4m3fn")  # it has no infinity
    lost = int((torch.softmax(LOGITS.double(), 0) <= 2.0**-10).sum())
    assert f"{lost} of 33 log-probabilities became NaN" in narrow.summary()


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want * 1.5, want) == pytest.approx(0.5)
    assert relative_error(torch.tensor([torch.nan, 1.0]), want) == math.inf


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (
            casting_view,
            {
                "network": ["transformer block"],
                "level": ["O0", "torch_autocast"],
                "fmt": ["e4m7"],
                "kept": [6],
                "exponent": [18],
            },
        ),
        (log_softmax_view, {"fmt": ["bf16", "e5m2"], "level": ["O0"], "fused": [True]}),
    ],
    ids=["casting", "log softmax"],
)
def test_same_settings_same_picture_other_settings_other_picture(factory, settings) -> None:
    view = factory()
    first, seen = look(view), {}
    for name, values in settings.items():
        for value in values:
            view.explorer.set(**{name: value})
            seen[tuple(view.explorer.state().items())] = look(view)
            assert view.sentence == [view.summary(), ""]
            assert view.data()
    assert len(set(seen.values())) >= len(seen) - 2  # at O0 and auto the format changes little or nothing
    key, png = list(seen.items())[-1]
    assert look(factory(**dict(key))) == png
    view.press("Reset")
    assert look(view) == first


@pytest.mark.parametrize(
    ("model", "bad", "reason"),
    [
        (CastingExplorer, {"kept": 4}, "the MLP has 3 layers, got layer 4"),
        (CastingExplorer, {"kept": 7}, "between 0 and 6"),
        (CastingExplorer, {"exponent": 19}, "between -24 and 18"),
        (CastingExplorer, {"level": "O4"}, "one of O0"),
        (CastingExplorer, {"network": "ResNet"}, "one of MLP"),
        (LogSoftmaxExplorer, {"fmt": "fp8"}, "one of fp16"),
    ],
)
def test_bad_settings_are_refused_with_a_reason_and_change_nothing(model, bad, reason) -> None:
    explorer = model()
    state = explorer.state()
    with pytest.raises(ValueError, match=reason):
        explorer.set(**bad)
    assert explorer.state() == state
    assert reason in explorer.message


def test_two_threads_leave_the_last_picture_whole() -> None:
    view = casting_view()
    wanted = {level: look(casting_view(level=level)) for level in ("O1", "O3")}

    def drive(level: str) -> None:
        for _ in range(5):
            view.explorer.set(level=level)

    threads = [threading.Thread(target=drive, args=(level,)) for level in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(view) == wanted[view.explorer.level]


def test_the_questions_know_right_from_wrong() -> None:
    right = {
        "product": 32,
        "lost": 8,
        "bias": "float32",
        "black": ["BatchNorm1d", "LayerNorm"],
    }
    assert set(right) == set(QUESTIONS)
    for name, value in right.items():
        assert verdict("03", name, value)[0] is True
        assert verdict("03", name, 7)[0] is False
