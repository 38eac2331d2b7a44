"""*Group loss scale*: its scales by hand and by a real training, what survives in a step, the answers a second way."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from mpkit.lessons.group_scale import (
    FORMATS,
    STEPS,
    WAYS,
    batches,
    deep_sigmoid,
    gradient_trace,
    group_scale,
    replayed,
    surviving,
    train_step,
)
from mpkit.view.words import words

WORDS = words("group_scale")
KINDS = {"E5M2": ml_dtypes.float8_e5m2, "float16": np.float16}


@pytest.mark.parametrize(
    ("fmt", "depth", "start", "window"), [("E5M2", 3, 12, 4), ("float16", 1, 30, 50), ("E5M2", 5, 0, 1)]
)
def test_scales_by_the_rule_in_a_loop(fmt, depth, start, window):
    view, trace = group_scale(fmt=fmt, depth=depth, start=start, window=window), gradient_trace(depth)
    for way, groups in (("one", [[0, 1, 2, 3]]), ("own", [[0], [1], [2], [3]])):
        scales, skipped = [np.float32(2.0**start)] * len(groups), 0
        for step in range(STEPS):
            np.testing.assert_allclose(
                np.log2(view.numbers[f"scales_{way}"][step]), np.log2(scales * (4 // len(groups))), atol=1e-3
            )
            found = []
            for i, group in enumerate(groups):
                top = np.float32(trace.largest[step, group].max()) * scales[i]
                with np.errstate(over="ignore"):
                    found.append(not np.isfinite(top.astype(KINDS[fmt]).astype(np.float32)))
                scales[i] = min(
                    scales[i] * np.float32(0.5**0.5 if found[-1] else 2 ** (1 / window)), np.float32(2.0**100)
                )
            skipped += any(found)
            assert view.numbers[f"skipped_{way}"][step] == skipped
        last = trace.values[(STEPS - 1) % 23][0].numpy() * np.float32(view.numbers[f"scales_{way}"][-1, 0])
        with np.errstate(over="ignore"):
            kept = (last.astype(KINDS[fmt]).astype(np.float32) != 0).mean()
        assert view.numbers[f"survive_{way}"][-1, 0] == pytest.approx(kept, abs=1e-6)
    assert f"skipped: {view.numbers['skipped_one'][-1]} with one scale" in view.sentence


@pytest.mark.parametrize("way", WAYS)
def test_replayed_scales_are_those_of_a_real_training_in_float16(way):
    steps = 60
    net = deep_sigmoid(2, way, FORMATS["float16"], 2.0**10)
    net.manager.growth = 2**0.5
    run, apart = replayed(2, way, "float16", 10, 2), []
    for t, (images, labels) in enumerate(batches(steps)):
        scales = net.manager.scales.tolist()
        apart.append(max(abs(math.log2(a / b)) for a, b in zip(scales, run.scales[t])))
        train_step(net, images, labels)
    if way == "one scale":
        assert apart == pytest.approx([0.0] * steps, abs=1e-3)
    # an overflow that reaches earlier groups halts their growth for a step, which the replay does not know
    assert max(apart) < 1.6


def test_surviving_values_of_a_real_step_are_at_most_those_of_the_replay():
    seen = group_scale().numbers
    true, last = deep_sigmoid(3), batches(STEPS)[-1]
    train_step(true, *last)
    net = deep_sigmoid(3, "one scale", FORMATS["E5M2"], float(seen["scales_one"][-1, 0]))
    train_step(net, *last)
    real, told = surviving(net, true), seen["survive_one"][-1]
    assert real[0] <= told[0] < 0.5
    assert real[-1] == pytest.approx(told[-1], abs=0.01)
    assert surviving(true, true) == [1.0] * 4


def test_what_the_lesson_says():
    assert (gradient_trace(3).largest[:, 1:] > 16 * gradient_trace(3).largest[:, :-1]).all()
    three, shallow, deep = (group_scale(depth=depth).numbers for depth in (3, 1, 5))
    assert three["skipped_own"][-1] > three["skipped_one"][-1] > 0
    assert shallow["survive_one"][-1].min() > 0.99
    assert deep["survive_one"][-1, 0] == 0
    assert deep["survive_one"][-1, 1] < 0.1
    assert group_scale(fmt="float16", depth=5).numbers["survive_one"][-1, 0] == 0
    assert group_scale(fmt="float16").numbers["survive_one"][-1, 0] > 0.9
    assert three["survive_own"][-1, 0] > 0.9
    slow = group_scale(window=50).numbers
    assert slow["skipped_own"][-1] == 0
    four, data = deep_sigmoid(3, "scale per group", FORMATS["E5M2"], scale=2.0**18), batches(60)
    four.manager.growth = 2 ** (1 / 4)
    began = torch.stack([train_step(four, *batch) for batch in data])
    assert not began[:, :2].any()  # 60 steps double these scales 15 times, to 2^33
    assert four.manager.scales[0] > 2**12 * four.manager.scales[3]


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked == {"marker": 1024 / 16, "input": 16 / 1 * (1 / 1024), "two": 1024 / 2}
    assert WORDS["predict"]["fate"]["right"] == "b"
    one, true, data = deep_sigmoid(3, "one scale", FORMATS["E5M2"], scale=2.0**18), deep_sigmoid(3), batches(60)
    one.manager.growth = 2 ** (1 / 4)
    train_step(true, *data[-1])
    for batch in data:
        train_step(one, *batch)
    assert surviving(one, true)[0] < 0.5
    for (gradient, scales, i, j), handed in WORDS["task"]["cases"]:
        assert handed == gradient * scales[i] / scales[j]
