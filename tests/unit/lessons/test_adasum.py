"""*AdaSum*: AdaSum by its formula in NumPy, what the lesson says of a training, the answers a second way."""

import math

import numpy as np
import pytest

from mpkit.lessons.adasum import RULES, pair, trained_with
from mpkit.view.words import words

WORDS = words("adasum")


def added(a, b):
    """AdaSum of two, from the lesson's formula; a zero vector changes nothing."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    d, aa, bb = a @ b, a @ a, b @ b
    return (1 - d / (2 * aa) if aa else 1) * a + (1 - d / (2 * bb) if bb else 1) * b


def tree(updates):
    while len(updates) > 1:
        updates = [added(a, b) for a, b in zip(updates[::2], updates[1::2])]
    return updates[0]


@pytest.mark.parametrize("a", [0.0, 1.0, 2.4, 3.0])
@pytest.mark.parametrize("b", [0.0, 1.5, 2.1])
@pytest.mark.parametrize("angle", [0, 1, 17, 60, 90, 150, 179, 180])
def test_two_vectors_by_the_formula(a, b, angle):
    view = pair(a=a, b=b, angle=angle)
    turn = math.radians(angle)
    first, second = np.array([a, 0.0]), b * np.array([math.cos(turn), math.sin(turn)])
    want = {"sum": first + second, "mean": (first + second) / 2, "AdaSum": added(first, second)}
    for rule in RULES:
        np.testing.assert_allclose(view.numbers["results"][rule].numpy(), want[rule], atol=1e-9)
        assert f"{rule} {np.linalg.norm(want[rule]):.2f}" in view.sentence
    assert "-0.00" not in view.sentence + str(view.table())
    assert "- 0.00" not in view.sentence


def test_what_the_lesson_says_of_two():
    def length(rule, **given):
        return float(pair(**given).numbers["results"][rule].norm())

    wide = {"a": 2.0, "b": 2.0, "angle": 150}
    assert length("AdaSum", **wide) > length("sum", **wide)
    assert (length("AdaSum", a=2.0, b=0.0), length("mean", a=2.0, b=0.0)) == (2, 1)
    view = pair(a=2.0, b=2.0)
    seen = []
    for angle in (0, 30, 60, 90):
        view.set(angle=angle)
        seen.append(float(view.numbers["results"]["AdaSum"].norm()))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == pytest.approx((2, math.sqrt(8)))


def test_what_the_lesson_says_of_a_training():
    ends = {rule: trained_with(rule, 8) for rule in RULES}
    alone = [trained_with("mean", 1, rate) for rate in (0.1, 0.5, 1.0)]
    assert min(alone) == alone[1] == pytest.approx(0.60, abs=0.005)
    assert [ends["AdaSum"], ends["mean"]] == pytest.approx([0.31, 0.51], abs=0.005)
    assert ends["sum"] > 10
    tuned = trained_with("mean", 8, 1.0), trained_with("sum", 8, 0.1)
    assert tuned == pytest.approx((0.31, 0.32), abs=0.005)
    assert trained_with("mean", 1) == trained_with("AdaSum", 1)


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked["against"] == added([1, 0], [-3, 0])[0] == -1
    assert asked["sixteen"] == pytest.approx(np.linalg.norm(tree(list(3 * np.eye(16)))))
    assert asked["sizes"] == [n for n in (24, 32, 40, 48, 64) if n & (n - 1) == 0]
    assert WORDS["predict"]["rule"]["right"] == "b"
    for (updates,), merged in WORDS["task"]["cases"]:
        assert merged == pytest.approx(tree(updates).tolist())
