"""*Freeze and centralize*: savings by hand, rows of whole blocks, means that go; its answers a second way."""

import numpy as np
import pytest
import torch

from mpkit.boost import GradientFreeze, LessBN
from mpkit.boost.grad_freeze import expected_saving
from mpkit.lessons.freezing import (
    LAYERS,
    NETWORKS,
    block_of,
    blocks_reached,
    centralize,
    costs,
    layers,
    less_bn,
    timeline,
)
from mpkit.networks import resnet18
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
    assert seen["saved"] == pytest.approx(want)
    assert seen["mean"] == pytest.approx(np.mean(want))
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
    assert reached[2] < reached[1] < reached[0]
    assert reached[2] == {"layer4.1"}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_block_has_a_row(network):
    rows = less_bn(network=network).sheet.panels[0].given["y"]["names"]
    assert rows == [*dict.fromkeys(map(block_of, layers(network)[0]))]
    assert len(rows) == len(set(rows)) < 30


def test_which_batch_norms_go():
    seen = less_bn(fn_flag=True).numbers
    assert (seen["removed"], seen["norms"]) == (11, 20)
    kinds = dict(seen["layers"])
    report = LessBN(resnet18(width=4)).report
    assert {name for name, kind in kinds.items() if kind == "kept"} == set(report.kept)
    assert kinds["bn1"] == "kept"
    assert [kinds[f"layer2.0.{name}"] for name in ("bn1", "bn2")] == ["removed", "kept"]
    assert WORDS["predict"]["rule"]["right"] == "b"
    assert kinds["fc"] == "normalised"
    assert less_bn(network="3 convolutions").numbers["removed"] == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_centralization_takes_the_mean_of_each_output_and_keeps_the_rest(layer):
    seen = centralize(layer=layer).numbers
    grad, used = seen["gradient"].double(), seen["used"].double()
    torch.testing.assert_close(used, grad - grad.mean(1, keepdim=True), rtol=0, atol=1e-7)
    assert seen["kept"] == pytest.approx(float(used.norm() / grad.norm()), rel=1e-5)
    assert (0.45 < seen["kept"] < 0.55) == (layer == "conv1.weight")


def test_an_output_that_a_layer_has_not_is_refused():
    with pytest.raises(ValueError, match="6 outputs: choose output 0 to 5"):
        centralize(output=6)
    means = centralize().numbers["gradient"].mean(1)
    assert means[2] * means[3] < 0  # as the lesson says


def test_answers_a_second_way():
    truth = {name: q["truth"] for name, q in WORDS["question"].items()}
    given = 10, 1, 0.6, 500
    assert truth["share"] == sum(v > 0 for v in GradientFreeze(*given).generate_freeze_index_sequence(*given))
    assert truth["stages"] == 3 * (21 // 10)
    assert truth["saving"] == pytest.approx(0.3 * (10 + 1) / (3 * 10))
    assert truth["saving"] == pytest.approx(expected_saving([1.0] * 10, 10, 1, 0.7))
    assert truth["entry"] == 8 - (2 + 2 + 8) / 3


def test_cases_of_the_task():
    for (gradient,), expected in WORDS["task"]["cases"]:
        assert centralized(torch.tensor(gradient, dtype=torch.float64), 1).tolist() == expected
