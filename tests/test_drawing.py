"""The prediction that is drawn in lesson 05: by hand, typed, judged once, and never told before."""

import numpy as np
import pytest
from scenes import look

from mpkit.explorers.drawing import SHOWN, STEPS, DrawExplorer
from mpkit.explorers.scaling import recorded
from mpkit.widgets.scaling import draw_view


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
    assert "In 60 of 60 steps" in model.summary()
    assert "right picture" in model.summary()
    assert "doubled at the steps 40, 73 and 93 and halved at the steps 52, 53 and 99" in model.summary()


TOP = DrawExplorer().top[SHOWN:]


@pytest.mark.parametrize(
    ("heights", "word"),
    [
        ([17] * 60, "cannot rest"),
        (np.minimum(TOP - 0.1, 22), "followed the ceiling"),
        (17 + np.sin(np.arange(60) / 9) / 2, "smooth curve"),
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
