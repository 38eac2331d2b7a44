"""*Freeze and centralize*: savings by hand, BatchNorms that go; its answers a second way."""

import numpy as np
import pytest
import torch

from mpkit.boost import GradientFreeze, LessBN
from mpkit.boost.grad_freeze import expected_saving
from mpkit.data import digits
from mpkit.lessons.freezing import KEPT, NETWORKS, REMOVED, blocks_reached, costs, less_bn, timeline
from mpkit.networks import LeNet5, resnet18
from mpkit.optimizers import centralized
from mpkit.view.words import words

WORDS = words("freezing")


@pytest.mark.parametrize(("groups", "kind", "full"), [(10, 1, 0.7), (10, 0, 0.5), (21, 1, 0.0), (1, 1, 0.7)])
def test_what_is_saved_follows_the_strategy(groups, kind, full):
    seen = timeline(groups=groups, kind=kind, full=full).numbers
    given = groups, kind, full, 120
    assert seen["index"].tolist() == GradientFreeze(*given).generate_freeze_index_sequence(*given)
    assert seen["frozen"].tolist() == [v * (21 // groups) for v in seen["index"]]
    total = sum(costs())
    want = [sum(costs()[:n]) / total for n in seen["frozen"]]
    assert [*seen["saved"], seen["mean"]] == pytest.approx([*want, np.mean(want)])
    assert abs(seen["mean"] - seen["formula"]) < 0.05


def test_what_the_lesson_says_of_freezing():
    every = GradientFreeze(10, 1, 0.7, 1000).generate_freeze_index_sequence(10, 1, 0.7, 1000)
    assert every.count(0) == 700
    assert WORDS["predict"]["share"]["right"] == "b"
    assert expected_saving(costs(), 10, 0, 0.7) > expected_saving(costs(), 10, 1, 0.7)
    assert timeline(full=0.0).numbers["frozen"].max() < 21  # fc is never frozen
    coarse, fine = (timeline(groups=groups).numbers["formula"] for groups in (10, 21))
    assert abs(coarse - fine) < 0.02


def test_a_frozen_prefix_hears_no_gradient():
    reached = [set(blocks_reached(index)) for index in (0, 3, 9)]
    assert len(reached[0]) == 8
    assert {"layer4.1"} == reached[2] < reached[1] < reached[0]


def test_which_batch_norms_go():
    seen = less_bn().numbers
    assert (seen["removed"], seen["kept"]) == (11, 9)
    report = LessBN(resnet18(width=4)).report
    assert {name for name, kind in seen["layers"].items() if kind == KEPT} == set(report.kept)
    assert [seen["layers"][name] for name in ("bn1", "layer2.0.bn1", "layer2.0.bn2")] == [KEPT, REMOVED, KEPT]
    assert WORDS["predict"]["rule"]["right"] == "b"
    plain = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    assert not LessBN(plain).report.removed  # without a shortcut all stay
    for network in NETWORKS:
        rows = less_bn(network=network).sheet.panels[0].given["y"]["names"]
        assert len(rows) == len(set(rows)) < 30


def test_what_the_lesson_says_of_centralized_gradients():
    torch.manual_seed(0)
    net = LeNet5()
    images, labels = digits("train")
    torch.nn.functional.cross_entropy(net(images[:64]), labels[:64]).backward()
    means = net.conv1.weight.grad.flatten(1).mean(1)
    assert means[2] * means[3] < 0


def test_answers_a_second_way():
    truth = {name: q["truth"] for name, q in WORDS["question"].items()}
    given = 10, 1, 0.6, 500
    assert truth["share"] == sum(v > 0 for v in GradientFreeze(*given).generate_freeze_index_sequence(*given))
    assert truth["stages"] == 3 * (21 // 10)
    assert [0.3 * (10 + 1) / (3 * 10), expected_saving([1.0] * 10, 10, 1, 0.7)] == pytest.approx([truth["saving"]] * 2)
    assert truth["entry"] == 8 - (2 + 2 + 8) / 3


def test_cases_of_the_task():
    for (gradient,), expected in WORDS["task"]["cases"]:
        assert centralized(torch.tensor(gradient, dtype=torch.float64), 1).tolist() == expected
