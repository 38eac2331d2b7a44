"""The machine of the views in tables: what readers may write, what is judged, how numbers travel, what is drawn."""

import math

import numpy as np
import pytest
import torch

from mpkit.view import Sheet, quiz
from mpkit.view.answers import aside, number, precision, read, same
from mpkit.view.sheet import exponents, filled, fitted, linear, log2, names
from mpkit.view.still import Still, figure
from mpkit.view.words import raised

NUMBERS = {
    "65,504": 65504.0, "0xc000": 49152.0, "2^-14": 2.0**-14, "2⁻²⁴": 2.0**-24, "1/4": 0.25, "25 %": 0.25, "−3": -3.0,
    "3 x 10^-8": 3e-8, "2**16": 65536.0, " 1e-5. ": 1e-5, "inf": math.inf, "sixteen": None, "1/0": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_as_readers_write_it(text):
    assert number(text) == NUMBERS[text]


ANSWERS = [  # given, truth, is it right
    (torch.tensor(0.1), 0.1, True), ("0.1", 0.1, True), ([[4]], 4, True), (10.0, 0.1, False),
    ("torch.float16", "float16", True), (torch.float16, "float16", True), ("a and b", ["a", "b"], True),
    ({"a": True, "b": False}, ["a"], True), ({2, 1}, [1, 2], True), ([1.0, 2.0], [2.0, 1.0], False),
    ("yes", True, True), ("no", True, False), ("no", False, True), (math.nan, math.nan, True), (None, 1.0, False),
]  # fmt: skip


@pytest.mark.parametrize(("given", "truth", "right"), ANSWERS)
def test_what_an_answer_means(given, truth, right):
    assert same(read(given, truth), truth, precision(given, 1e-9)) is right


ASIDES = [  # given, truth, a word on answers of another kind
    (25, 0.25, "percent"),
    ("many", 3.0, "number"),
    (2 ^ 10, 1024, ""),  # such a number may be plainly wrong, and a word on powers would betray the answer
    (3, [1, 2], "list"),
    (1, True, "True"),
]


@pytest.mark.parametrize(("given", "truth", "word"), ASIDES)
def test_a_word_on_answers_of_another_kind(given, truth, word):
    told = aside(given, truth, 1e-9)
    assert word in told if word else not told


TASK = {"ask": "double it", "right": "Yes.", "hint": "Add it to itself.", "cases": [[[2.0], 4.0], [[-1.5], -3.0]]}


def nothing(x): ...


@pytest.mark.parametrize(
    ("function", "right", "said"),
    [
        (lambda x: 2 * x, True, "2 cases"),
        (lambda x: torch.tensor(2 * x), True, "Yes."),
        (lambda x: x * x, False, "must give -3, and gave 2.25"),
        (lambda x: str(2 * x), False, "gave '4.0'"),
        (lambda x: 1 / 0, False, "ZeroDivisionError"),
        (nothing, None, "double it"),
    ],
)
def test_a_function_of_the_reader_is_judged_on_all_cases(function, right, said):
    assert quiz.judged(TASK, function)[0] is right
    assert said in quiz.judged(TASK, function)[1]


def test_a_hint_stands_for_wrong_values_and_ranges():
    for value, word in ((512, "Right."), (1024, "counted the finite steps"), (3, "step by step"), (None, "Question:")):
        assert word in quiz.verdict("dynamic_scale", "sequence", value)[1]
    with pytest.raises(ValueError, match="sequence"):
        quiz.verdict("dynamic_scale", "none", 1)


def test_a_sentence_is_filled_as_the_page_fills_it():
    given = [(0.12345, ""), (16.0, "2^"), (math.inf, "2^"), (2.25, ".1f"), ("no", ""), ([1, 2], ""), (-1e-9, "")]
    assert [filled(*one, 1) for one in given] == ["0.1235", "2^16", "inf", "2.3", "no", "2", "-1e-9"]


def test_axes_hold_what_is_drawn():
    assert exponents([0.0, 8.0, math.inf, -1.0], -4, 10).tolist() == [-4, 3, 10, -4]
    assert fitted([3.0], [math.inf], room=0) == (1, 2)
    assert [text for _, text in log2("x", -2, 2)["ticks"]] == ["2⁻²", "2⁻¹", "2⁰", "2¹", "2²"]
    assert names(["a", "b"], down=True)["lo"] == 1.5
    assert raised("2^-14 and 2^(n)") == "2⁻¹⁴ and 2^(n)"
    with pytest.raises(ValueError, match="two ends"):
        linear("x", 1.0, 1.0)


def test_every_mark_is_drawn_named_and_told():
    see = Sheet()
    p = see.panel(title="all", x=linear("x", 0, 4), y=linear("y", 0, 4))
    p.line([1, 2, 3], label="a line", glyph="s")
    p.points([1, 2, 3], ring=np.array([0.0, 0.5, 1.0]), show="at")
    p.band([1, 1], [2, 2], label="a band")
    p.boxes([0], [0], [1], [1], fill="own", hatch=True, text=["box"])
    p.bars([1.0, 0.0], width=1, label="bars")
    p.rule("x", "index", label="now")
    p.text("3 of 3", 1, 1)
    p.arrow((0, 0), (1, 1))
    p.handle("y", "k", 2, 0, 4, "a handle", note="grip")
    p.span("y", 3, 4, "overflow/0.1", "region")
    see.play("k", "step", 3)
    see.say("Step {at}.", at=np.arange(3))
    drawn = figure(see.spec, 2)
    assert {text.get_text() for text in drawn.axes[0].texts} >= {"box", "3 of 3", "grip", "region"}
    assert {text.get_text() for text in drawn.legends[0].texts} == {"a line", "a band", "bars", "now"}
    assert (see.sentence(1), Still(see).sentence) == ("Step 1.", "Step 0.")
    assert see.table()[1]["a line"] == "2"
