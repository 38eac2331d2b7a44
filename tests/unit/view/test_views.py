"""Every view of every topic: each control over its values, each try and button; sentence and picture follow."""

import copy
import math
import re
import threading
from functools import reduce
from operator import getitem

import numpy as np
import pytest
from scenes import views
from support import openings

from mpkit.view.ahead import differences, moves, packed
from mpkit.view.controls import Choice, Flag, Range, Stroke
from mpkit.view.page import Page
from mpkit.view.still import figure
from mpkit.view.words import raised, topics, words

MAKERS, OPENINGS = dict(views()), dict(openings())
each_view = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def values_of(kind, default):
    """Least, most, and one in between."""
    if isinstance(kind, Range):
        grid = kind.grid(default)
        return [grid[0], grid[-1], grid[len(grid) // 2]]
    return list(kind.names) if isinstance(kind, Choice) else [True, False] if isinstance(kind, Flag) else []


def whole(view):
    """The sheet holds together: finite ends, a sentence that is filled, JSON without NaN, no empty table."""
    spec, data = view.sheet.spec, packed(view.sheet.spec)
    assert len(data) < 25_000, "more than a change may send"
    assert view.sentence.strip().endswith((".", "!", "?")), view.sentence
    assert "{" not in view.sentence, view.sentence
    assert not any(len(set(row)) != len(row) for row in view.table())
    for panel in spec["panels"]:
        assert all(math.isfinite(panel[axis][end]) for axis in "xy" for end in ("lo", "hi"))
    return view.sentence, data


@each_view
def test_every_control_over_its_values(maker):
    view = maker()
    opening = whole(view)
    for name, kind in maker.controls.items():
        for value in values_of(kind, maker.defaults[name]):
            try:
                view.set(**{name: value})
            except ValueError:
                assert view.message
                continue
            whole(view)
        if isinstance(kind, Range):
            for wrong in (kind.low - 1, kind.high + 1, math.nan, "many", True):
                with pytest.raises(ValueError, match=name):
                    view.set(**{name: wrong})
        if isinstance(kind, Stroke):
            view.set(**{name: {str(kind.steps // 2): kind.low}})
            whole(view)
        view.press("Reset")
    assert whole(view) == opening


@pytest.mark.parametrize("call", OPENINGS)
def test_every_try_changes_what_its_lesson_shows(call):
    """In six lessons a button set what the opening had already, and nothing moved."""
    view = OPENINGS[call]()
    opening = whole(view)
    for attempt in view.tries:
        view.press(attempt["say"])
        assert whole(view) != opening, attempt["say"]


def test_every_try_stands_in_a_lesson():
    offered = {attempt["say"] for make in OPENINGS.values() for attempt in make().tries}
    every = {one["say"] for topic in topics() for many in words(topic).get("tries", {}).values() for one in many}
    assert every - offered == set()


@each_view
def test_what_can_be_pressed_names_parameters_and_both_renderers_get_the_same_sheet(maker):
    view = maker()
    marks = [m for p in view.sheet.panels for m in p.marks]
    named = {m["name"] for m in marks if m["type"] in ("handle", "pen") and "sets" not in m}
    assert named.union(*(does for does in view.sheet.buttons.values() if isinstance(does, dict))) <= set(maker.controls)
    for sets in (sets for m in marks for sets in m.get("sets", ())):
        view.asked(sets, view.params)
    page = Page(view)
    page.ask({"table": True})
    shown = [{k: raised(v) if isinstance(v, str) else v for k, v in row.items()} for row in view.table()]
    assert (page.spec, page.rows) == (packed(view.sheet.spec), shown)
    assert len({tuple(row) for row in page.rows}) == 1, "a table, each row of which has all columns"
    assert len(figure(view.sheet.spec, view.index).axes) == len(view.sheet.panels)
    page.close()


def test_words_have_a_right_answer_and_a_hint_for_each_question():
    for topic in topics():
        found = words(topic)
        assert not re.search(r"\*\w[\w ]*\*", str(found)), "what is printed is no Markdown"
        for prediction in found.get("predict", {}).values():
            assert prediction["right"] in "abcdefgh"[: len(prediction["choices"])]
        for question in found.get("question", {}).values():
            assert {"ask", "truth", "right", "hint"} <= question.keys()
        for name in found.get("tries", {}):
            assert f"{topic}.{name}" in MAKERS, f"{topic}.toml names a view that there is not: {name}"


def test_two_threads_leave_a_whole_picture():
    maker = MAKERS["dynamic_scale.dynamics"]
    view = maker()
    threads = [threading.Thread(target=lambda n=n: [view.set(window=n + k) for k in range(8)]) for n in (1, 20)]
    for does in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            does(thread)
    alone = maker(window=view.params["window"])
    np.testing.assert_array_equal(view.numbers["scale"], alone.numbers["scale"])


def test_pictures_sent_ahead_are_those_that_a_question_would_bring():
    view = MAKERS["dynamic_scale.dynamics"]()
    page = Page(view)
    page.wish = {"name": "window", "have": [], "n": "1"}
    assert page.ahead["values"][0] == view.params["window"], "the nearest first"
    assert len(page.ahead["data"]) < 25_000
    view.set(start=20)
    assert {n for n, v in page.state["params"].items() if page.ahead["params"][n] != v} == {"start"}
    assert page.ahead["moves"] == ["window"]
    page.close()
    tree, other = copy.deepcopy(view.sheet.spec), view.maker(start=20, window=7).sheet.spec
    for path, (value,) in differences([tree, other]):  # as the page puts them into the scene that it has
        *way, last = path
        reduce(getitem, way, tree)[last] = value
    assert packed(tree) == packed(other)


@pytest.mark.parametrize(("name", "control"), [("dynamic_scale.dynamics", "window"), ("schedules.schedules", "span")])
def test_in_parts_all_pictures_of_a_control_travel_ahead(name, control):
    view = MAKERS[name]()
    page, have = Page(view), []
    while len(have) < len(moves(view, control)):
        page.wish = {"name": control, "have": [*have], "n": str(len(have))}
        assert len(page.ahead["data"]) <= 25_000
        assert not {*have} & {*page.ahead["values"]}, "a part that was not seen before"
        have += page.ahead["values"]
    page.close()


@pytest.mark.parametrize(
    ("view", "name", "place", "sets"),
    [
        ("dynamic_scale.dynamics", "factor", 2.0, {"factor": 4.0}),
        ("dynamic_scale.dynamics", "puts", 13, {"puts": {399: 13}}),
        ("formats.bits", "bits", 0, {"number": "-0.0999755859375"}),
        ("rounding.updates", "update", None, None),
        ("adasum.pair", "b", 2, None),
    ],
)
def test_what_a_handle_a_hand_or_a_box_can_do(view, name, place, sets):
    assert moves(MAKERS[view](), name).get(place) == sets


def test_a_question_of_the_page_is_answered_whatever_comes_of_it():
    view = MAKERS["dynamic_scale.dynamics"]()
    page, sent = Page(view), []
    page.send = sent.append
    page._heard(None, {"ask": {"set": {"factor": 1000}}, "n": 1, "index": 7}, None)
    assert sent == [{"done": 1}]
    assert "factor" in page.message
    assert view.params["step"] == 7
    page._heard(None, {"ask": {"press": "Reset"}, "n": 2}, None)
    assert page.message == ""
    assert view.params["step"] == 399
    page.close()
