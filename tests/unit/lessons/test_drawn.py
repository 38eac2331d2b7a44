"""Predictions that are drawn: shown only after one was made, right or told by the wrong line that is nearest."""

import re

import numpy as np
import pytest

from mpkit.lessons.dynamic_scale import draw, recorded
from mpkit.lessons.formats import gaps
from mpkit.lessons.rounding import totals
from mpkit.view.words import words

VIEWS = {"dynamic_scale.draw": draw, "formats.gaps": gaps, "rounding.totals": totals}
TYPED = {  # the best that can be typed
    "dynamic_scale.draw": "18 16 16 17 17 18",
    "formats.gaps": "-24 -24 -24 -19 -14 -9 -4 1 5",
    "rounding.totals": "500 1000 1500 2000 2048 2048 2048 2048",
}


def shown(view):
    view.press("Show what happened")
    assert "typed" in view.sheet.idle
    return view.sentence.partition(" What happened: ")[0]


@pytest.mark.parametrize("name", VIEWS)
def test_a_line_is_judged_after_it_was_drawn(name):
    maker, said = VIEWS[name], words(name.partition(".")[0])["draw"][name.partition(".")[2]]
    view = maker()
    with pytest.raises(ValueError, match="first"):
        view.press("Show what happened")
    assert "What happened:" not in view.sentence
    truth = view.numbers["truth"]
    steps = maker.controls["drawn"].steps
    if steps > len(truth):
        view.set(drawn={0: maker.controls["drawn"].low})  # in what is known: no prediction
        with pytest.raises(ValueError, match="first"):
            view.press("Show what happened")
    view.set(drawn=dict(enumerate(truth.tolist(), steps - len(truth))))
    assert shown(view).endswith(said["right"])
    assert view.numbers["near"] == len(truth)
    assert shown(maker(typed=TYPED[name])).endswith(said["right"])
    for line, told in said["wrong"]:
        assert shown(maker(typed=" ".join(map(str, line)))).endswith(told)
    ends = maker.controls["drawn"].low, maker.controls["drawn"].high
    wild = np.resize(ends, len(said["wrong"][0][0]))
    assert shown(maker(typed=" ".join(map(str, wild)))).endswith(said["other"])
    for wrong in ("1 2", f"{ends[1] + 1} " * len(wild), "nine " * len(wild)):
        with pytest.raises(ValueError, match=re.escape(said["typed"])):
            maker(typed=wrong)


def test_who_draws_the_ceiling_is_told_so():
    ceiling = np.log2(recorded("gpt_sums")[1][40:100]).tolist()
    assert "followed the ceiling" in shown(draw(drawn=dict(enumerate(ceiling, 40))))
