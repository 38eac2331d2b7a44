"""*Group loss scale*: its scales by hand and by a real training, what survives in a step, the answers a second way."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from mpkit.boost import GroupLossScaleManager
from mpkit.data import digits
from mpkit.formats import E5M2, FP32
from mpkit.lessons.failure import sigmoids
from mpkit.lessons.group_scale import FORMATS, WAYS, gradient_trace, group_scale, replayed
from mpkit.rounding import quantize, round_to
from mpkit.view.words import words

WORDS = words("group_scale")


def trained(depth, way, fmt, start, window, steps):
    """Scales and overflows of each step of a training at the first weights, every gradient rounded where it is made,
    and the share of the values of each group's gradients that are not zero in the last step."""
    torch.manual_seed(0)
    layers = [m for m in sigmoids(4 * depth, 24) if isinstance(m, nn.Linear)]
    groups = [layers[i * depth : (i + 1) * depth + (i == 3)] for i in range(4)]
    owned = [[p for layer in group for p in layer.parameters()] for group in groups]
    owned = owned if way == WAYS[1] else [[*chain(*owned)]]
    manager = GroupLossScaleManager(2.0**start, owned, growth=2 ** (1 / window), max_scale=2.0**100)

    def low(x):
        return quantize(x, FP32, FORMATS[fmt])

    scales, overflows = [], []
    for step in range(steps):
        images, labels = (t.split(64)[step % 23] for t in digits("train", size=8))
        x = images.flatten(1).clone().requires_grad_()
        for i, group in enumerate(groups):
            x = manager(x, i, i + 1) if i < len(owned) else x
            for layer in group:
                x = low(nn.functional.linear(low(x), low(layer.weight), low(layer.bias)))
                x = low(torch.sigmoid(x) if layer is not layers[-1] else x)
        nn.functional.cross_entropy(manager(x, len(owned), len(owned) + 1), labels).backward()
        scales.append(manager.scales.tolist())
        overflows.append(manager.unscale_and_update_().tolist())
        kept = [torch.cat([p.grad.flatten() for layer in group for p in layer.parameters()]) != 0 for group in groups]
        for p in chain(*owned):
            p.grad = None
    whole = [len(values) for values in gradient_trace(depth).values[(steps - 1) % 23]]
    return np.array(scales), np.array(overflows), [int(k.sum()) / n for k, n in zip(kept, whole)]


@pytest.mark.parametrize("way", WAYS)
def test_replayed_scales_are_those_of_a_real_training(way):
    run, (scales, *_) = replayed(2, way, "float16", 10, 2), trained(2, way, "float16", 10, 2, 60)
    apart = np.abs(np.log2(scales / run.scales[:60, : scales.shape[1]]))
    # an overflow that reaches earlier groups halts their growth for a step, which the replay does not know
    assert apart.max() < (1e-3 if way == "one scale" else 1.6)


def test_what_survives_and_grows_in_a_real_training():
    _, _, kept = trained(3, "one scale", "E5M2", 18, 4, 60)
    assert kept[0] < 0.5 < 0.95 < kept[-1]
    scales, began, _ = trained(3, "scale per group", "E5M2", 18, 4, 60)
    assert not began[:, :2].any()  # 60 steps double these scales 15 times, to 2^33
    assert scales[-1, 0] > 2**12 * scales[-1, 3]


def test_what_the_lesson_says():
    assert (gradient_trace(3).largest[:, 1:] > 16 * gradient_trace(3).largest[:, :-1]).all()
    three, shallow, deep = (group_scale(depth=depth).numbers for depth in (3, 1, 5))
    assert three["skipped_own"][-1] > three["skipped_one"][-1] > 0
    assert shallow["survive_one"][-1].min() > 0.99
    assert deep["survive_one"][-1, 0] == 0 <= deep["survive_one"][-1, 1] < 0.1
    assert group_scale(fmt="float16", depth=5).numbers["survive_one"][-1, 0] == 0
    assert group_scale(fmt="float16").numbers["survive_one"][-1, 0] > 0.9
    assert three["survive_own"][-1, 0] > 0.9
    assert group_scale(window=50).numbers["skipped_own"][-1] == 0


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    left = {depth: group_scale(fmt="float16", depth=depth).numbers["survive_one"][-1, 0] for depth in range(1, 6)}
    half = min(depth for depth, share in left.items() if share < 0.5)
    assert asked == {"half": half, "marker": 1024 / 16, "input": 16 / 1 * (1 / 1024), "two": 1024 / 2}
    assert left[3] > 0.8
    assert left[4] == pytest.approx(1 / 8, abs=0.02)
    assert left[5] == 0
    assert WORDS["predict"]["fate"]["right"] == "b"
    for (largest, smallest), fits in WORDS["task"]["cases"]:
        both = [torch.tensor([largest, smallest]).double() * 2.0**k for k in range(-40, 100)]
        assert fits == any(float(pair[0]) <= E5M2.max and float(round_to(pair, E5M2)[1]) != 0 for pair in both)
