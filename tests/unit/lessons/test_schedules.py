"""*Schedules and groups*: five formulas by hand, whom decay reaches by name and group, the answers a second way."""

import itertools
import math

import pytest
import torch

from mpkit.lessons.schedules import NAMES, PLACES, decay, decay_curves, schedules
from mpkit.optimizers import SGD
from mpkit.schedules import piecewise_constant_lr
from mpkit.view.words import words

WORDS = words("schedules")


@pytest.mark.parametrize("stair", [False, True])
@pytest.mark.parametrize(("rate", "factor", "span", "power", "warmup"), [(0.1, 0.5, 60, 0.5, 0), (0.4, 1.5, 20, 2, 40)])
def test_five_schedules_by_the_formulas_of_the_lesson(rate, factor, span, power, stair, warmup):
    view = schedules(rate=rate, factor=factor, span=span, power=power, stair=stair, warmup=warmup, step=warmup + 10)
    for step in (0, warmup, warmup + 10, warmup + span, 199):
        if step < warmup:
            want = dict.fromkeys(view.numbers["curves"], rate * step / warmup)
        else:
            k = step - warmup
            part = k // span if stair else k / span
            gone = 1 - min(k, span) / span
            want = {
                "exponential": rate * factor**part,
                "natural exp": rate * math.exp(-factor * (part * span if stair else k)),
                "inverse": rate / (1 + factor * part),
                "cosine": rate * (1 + math.cos(math.pi * (1 - gone))) / 2,
                "polynomial": rate * gone**power,
            }
        for name, value in want.items():
            assert view.numbers["curves"][name][step] == pytest.approx(value, rel=2e-5, abs=1e-8), (name, step)
    assert f"step {warmup + 10}," in view.sentence
    assert view.sheet.panels[0].given["y"]["hi"] <= 4.3 * rate


def test_which_weights_decay_reaches():
    """Moved by nothing, by no decay, or by a decay that is another group's: the sentence says which."""
    for name, place, rate, amount in itertools.product(NAMES, PLACES, (0.0, 0.01), (0.0, 0.1)):
        view = decay(parameter=name, place=place, rate=rate, amount=amount, size=1e-4)
        by_name = "beta" not in name and "gamma" not in name
        reached = {PLACES[0]: by_name, PLACES[1]: True}.get(place, False)
        assert view.numbers["reached"] == reached
        moved = view.numbers["curves"]["SGD"][-1] < 0.99
        assert moved == (reached and rate > 0 and amount > 0)
        assert ("it is not trained" in view.sentence) == (place == PLACES[3])
        assert ("decay reaches it" in view.sentence) == moved
        assert ("would reach" in view.sentence) == (reached and not moved)


def test_what_the_lesson_says_of_three_kinds_of_decay():
    ends = {size: {k: seen[-1] for k, seen in decay_curves(size).items()} for size in (1.0, 0.1, 0.001)}
    for kind in ("SGD", "AdamWeightDecay"):
        assert max(e[kind] for e in ends.values()) - min(e[kind] for e in ends.values()) < 0.015
    assert ends[0.001]["Adam"] < 0.1 < 0.8 < ends[1.0]["Adam"]
    assert decay_curves(0.1, amount=0.2)["SGD"][-1] == pytest.approx((1 - 0.001 * 2) ** 200, abs=0.01)
    assert decay_curves(10.0)["SGD"][-1] == pytest.approx(0.81, abs=0.01)
    none = decay_curves(0.1, amount=0.0)
    assert none["Adam"][-1] == pytest.approx(1.02, abs=0.01)
    assert none["AdamWeightDecay"][-1] == pytest.approx(1.08, abs=0.01)


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked["warmup"] == pytest.approx(0.4 * (1 - 2 / 8))
    named = [(n, torch.nn.Parameter(torch.ones(1))) for n in ("bn.weight", "fc.bias", "bn.beta", "gamma_net.weight")]
    optimizer = SGD(named, 0.1, weight_decay=0.5)
    for _, p in named:
        p.grad = torch.zeros(1)
    optimizer.step()
    assert asked["decayed"] == [name for name, p in named if p < 1]
    assert asked["listed"] == piecewise_constant_lr([3, 6, 8], [0.1, 0.05, 0.01])[6]
    assert WORDS["predict"]["decay"]["right"] == "b"
    for (step, peak, warmup, total), rate in WORDS["task"]["cases"]:
        assert rate == pytest.approx(peak * max(0.0, min(step / warmup, (total - step) / (total - warmup))))
