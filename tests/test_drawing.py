"""Predictions that are drawn: by hand, typed, judged once, and never told before."""

import re

import numpy as np
import pytest
from scenes import look

from mpkit.explorers.dim_reduce import DimReduceExplorer
from mpkit.explorers.drawing import SHOWN, STEPS, DrawExplorer, GapExplorer, StuckExplorer, TotalExplorer
from mpkit.explorers.scaling import recorded
from mpkit.widgets.drawing import draw_view, gap_view, stuck_view, total_view


def by_hand():
    """The scale of every step, by the rule of the lesson's table."""
    scale, good, seen = 16, 0, []
    for ceiling in np.log2(recorded("gpt_sums")[1][:STEPS]):
        seen.append(scale)
        good = good + 1 if scale <= ceiling else 0
        if scale > ceiling:
            scale -= 1
        elif good == 20:
            scale, good = scale + 1, 0
    return seen


def drawn(heights):
    model = DrawExplorer()
    model.draw({SHOWN + i: height for i, height in enumerate(heights)})
    model.reveal()
    return model


def test_what_happened_is_the_rule_of_the_lesson():
    assert DrawExplorer().truth.tolist() == by_hand()
    model = drawn(by_hand()[SHOWN:])
    assert model.close == STEPS - SHOWN
    assert "At 60 of 60 points" in model.summary()
    assert "right picture" in model.summary()
    assert "doubled at the steps 40, 73 and 93 and halved at the steps 52, 53 and 99" in model.summary()


TOP = DrawExplorer().top[SHOWN:]


@pytest.mark.parametrize(
    ("heights", "word"),
    [
        ([17] * 60, "cannot rest"),
        (np.minimum(TOP - 0.1, 22), "followed the ceiling"),
        (17 + np.sin(np.arange(60) / 9) / 2, "changes 59 times. It doubles, halves, or rests, and it changes only 5 t"),
        ([16, 17] * 30, "changes 59 times"),
        ([18] * 20 + [21] * 40, "above the ceiling in"),
        ([16] * 30 + [17] * 30, "Look where the lines part"),
    ],
)
def test_the_usual_wrong_pictures_are_named(heights, word):
    assert word in drawn(heights).word()


def test_nothing_is_told_before_and_nothing_changes_after():
    view = draw_view()
    model, first = view.explorer, look(view)
    scale = next(m for m in view.scene(model).panels[0].marks if m.get("label") == "loss scale")
    assert len(scale["y"]["f4"]) == 4 * SHOWN
    assert "73" not in model.summary()
    assert all("scale" not in row for row in model.table())
    model.set(typed="17, 18 18;17 16 17")
    assert [float(v) for v in model.guess[::10]] == [17, 18, 18, 17, 16, 17]
    model.draw({"10": 20, "45": 19.5, "46": 99})
    assert [float(v) for v in model.guess[4:8]] == [17, 19.5, 22, 17]
    before = look(view)
    view.press("Show what happened")
    assert look(view) != before
    guess = model.guess.copy()
    model.act("draw", {"50": 15})
    assert "Reset" in model.message
    with pytest.raises(ValueError, match="your prediction was made"):
        model.set(typed="16 16 16 16 16 16")
    assert (model.guess == guess).all()
    model.reset()
    assert look(view) == first


@pytest.mark.parametrize("typed", ["", "17 18", "17 18 18 17 16 x", "17 18 18 17 16 -3"])
def test_six_exponents_are_asked_for(typed):
    model = DrawExplorer()
    with pytest.raises(ValueError, match="type six exponents"):
        model.set(typed=typed)
    assert model.guess.tolist() == [17.0] * 60


def revealed(model, values):
    """The model after all hidden points were drawn at these values."""
    model.draw({model.first + i: float(v) for i, v in enumerate(np.broadcast_to(values, len(model.guess)))})
    model.reveal()
    return model


def test_the_truth_of_the_gaps_is_that_of_native_float16():
    gaps = np.log2(np.spacing(np.exp2(np.arange(-24.0, 16)).astype(np.float16)).astype(float))
    assert GapExplorer().truth.tolist() == gaps.tolist()
    assert "from 2^-24 to 2^-14 the gap stays 2^-24" in revealed(GapExplorer(), gaps).summary()


def test_the_truth_of_the_sum_is_that_of_native_float16():
    total, seen = np.float16(0), [0.0]
    for _ in range(4000):
        total = total + np.float16(1)
        seen.append(float(total))
    assert TotalExplorer().truth.tolist() == seen[::100]
    assert "exact up to 2048 and stays there" in revealed(TotalExplorer(), seen[600::100]).summary()


def test_the_truth_of_two_directions_is_the_run_of_the_lesson():
    run = DimReduceExplorer(components=2)
    assert (StuckExplorer().truth == run.path.losses).all()
    assert "1.83 in 5 steps and is 1.82 after 40" in revealed(StuckExplorer(), run.path.losses[1:]).summary()
    # what its words say: a low loss lies in the plane, and both trials go far beyond it
    assert run.landscape[2].min() < 0.5
    assert all(min(s.losses) > 5 * run.path.losses[-1] for s in run.path.searches[5:])


E = np.arange(-24, 16)
ONES = 100.0 * np.arange(6, 41)
DESCENT, STUCK = StuckExplorer().descent[1:], StuckExplorer().truth[1:]


@pytest.mark.parametrize(
    ("make", "values", "word"),
    [
        (GapExplorer, np.maximum(E, -14) - 10, "right picture"),
        (GapExplorer, -10, "one gap for all"),
        (GapExplorer, -np.abs(E + 4.5) - 5, "Look where"),
        (GapExplorer, np.abs(E + 10) - 25, "Look where"),
        (GapExplorer, -E / 2 - 10, "larger gaps for smaller"),
        (GapExplorer, E - 10, "shrinks all the way down"),
        (GapExplorer, np.where(E < -14, -24, np.clip(E * 0.2, -20, 0)), "left part is right"),
        (GapExplorer, 2 * np.maximum(E, -14) / 3, "Look where"),
        (TotalExplorer, np.minimum(ONES, 2048), "right picture"),
        (TotalExplorer, ONES, "exact sum"),
        (TotalExplorer, np.where(ONES < 2048, ONES, 4096 - ONES), "cannot fall"),
        (TotalExplorer, np.minimum(ONES, 1024), "stops near 1024"),
        (TotalExplorer, np.where(ONES < 2000, ONES, 2000 + (ONES - 2000) / 3), "slows down"),
        (TotalExplorer, 500 + (ONES - 500) ** 2 / 4000, "Look where"),
        (TotalExplorer, 500 + (ONES - 500) / 2, "Look where"),
        (TotalExplorer, np.minimum(2 * ONES, 4200), "larger than the number of ones"),
        (TotalExplorer, 600 - 10 * np.arange(35), "cannot fall"),
        (StuckExplorer, STUCK, "right picture"),
        (StuckExplorer, DESCENT, "followed gradient descent"),
        (StuckExplorer, 2.3 * 0.8 ** np.arange(40), "training that succeeds"),
        (StuckExplorer, 2.3, "does not fall"),
        (StuckExplorer, 0.9, "Look where"),
        (StuckExplorer, np.linspace(2.3, 1.2, 40), "Look where"),
    ],
)
def test_the_usual_wrong_pictures_of_the_others_are_named(make, values, word):
    assert word in revealed(make(), values).word()


@pytest.mark.parametrize("make", [gap_view, total_view, stuck_view])
def test_the_others_tell_nothing_before_and_change_nothing_after(make):
    view = make()
    model, first = view.explorer, look(view)
    hidden, columns = model.happened(), len(model.table()[-1])
    assert hidden not in model.summary()
    drawn = [m for panel in view.scene(model).panels for m in panel.marks if m.get("color") == "reference"]
    sent = sum(len(m["y"]) if isinstance(m["y"], list) else len(m["y"]["f4"]) // 4 for m in drawn)
    assert sent <= max(model.first, 1)  # the truth is not in the page
    view.press("Show what happened")
    assert look(view) != first
    assert hidden in model.summary()
    assert len(model.table()[-1]) == columns + 1
    guess = model.guess.copy()
    model.act("draw", {"30": model.high})
    assert "Reset" in model.message
    assert (model.guess == guess).all()
    model.reset()
    assert look(view) == first
    with pytest.raises(ValueError, match=f"type {model.asked}"):
        model.set(typed="1 2")
    words = model.asked.split("such as ")[1]
    model.set(typed=words)
    assert [model.guess[0], model.guess[-1]] == [float(words.split()[0]), float(words.split()[-1])]
    with pytest.raises(ValueError, match="each from"):
        model.set(typed=" ".join(["9999"] * model.count))


@pytest.mark.parametrize("make", [DrawExplorer, GapExplorer, TotalExplorer, StuckExplorer])
def test_nobody_is_told_to_have_drawn_what_stood_there(make):
    model = make()
    model.reveal()
    assert "You drew" not in model.summary()
    assert re.search("The line that you left as it was shows (a|one) ", model.summary())
    model.reset()
    model.draw({len(model.truth) - 1: model.guess[-1] + 0.05})
    model.reveal()
    assert "You drew" in model.summary()
