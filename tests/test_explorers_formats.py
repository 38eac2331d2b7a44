"""The models and views of lesson 01, without a browser."""

import bisect
import math
import re
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from scenes import look

from mpkit.check import lesson_01, verdict
from mpkit.explorers.formats import (
    NAMES,
    BitsExplorer,
    GradientsExplorer,
    RangesExplorer,
    bits_kept,
    format_rows,
    neighbour,
    read_number,
    recorded,
    value_of,
)
from mpkit.formats import FP16, get_format
from mpkit.plots.formats import precision
from mpkit.plots.static import still
from mpkit.widgets.formats import bits_view, gradients_view, ranges_view


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1e-5", 1e-5),
        ("1/3", 1 / 3),
        ("2^-14", 2.0**-14),
        ("-2**10", -1024.0),
        ("-0", -0.0),
        ("inf", math.inf),
    ],
)
def test_numbers_are_read_as_readers_type_them(text, value):
    assert read_number(text) == value
    assert math.copysign(1, read_number(text)) == math.copysign(1, value)


@pytest.mark.parametrize("text", ["", "one", "1/0", "2^", "2^99999", "0x10", "1_0/3x"])
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="write a number such as"):
        read_number(text)


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_walk_through_all_values_in_order(name):
    fmt = get_format(name)
    if fmt.bits > 8:
        fmt = get_format("e3m2")
    pattern, seen = int(fmt.encode(-fmt.max)), []
    while pattern is not None:
        seen.append(value_of(pattern, fmt))
        pattern = neighbour(pattern, fmt, up=True)
    finite = [v for v in seen if math.isfinite(v)]
    assert finite == fmt.values().tolist()
    assert seen == finite + [math.inf] * fmt.has_inf
    assert neighbour(int(fmt.encode(fmt.max)), fmt, up=True) == (int(fmt.encode(math.inf)) if fmt.has_inf else None)


def test_the_bits_of_a_tenth():
    model = BitsExplorer()
    assert np.float16(0.1).view(np.uint16) == model.pattern == 0x2E66
    assert (model.below, model.above) == tuple(float(np.nextafter(np.float16(0.1), np.float16(s))) for s in (0, 1))
    assert model.gap == float(np.spacing(np.float16(0.1)))
    assert model.bit_string() == "0 01011 1001100110"
    assert model.formula() == "+ 2⁻⁴ × (1 + 614/1024), normal"
    assert "0.0999755859375 (off by -2.44e-05), a normal number" in model.summary()


def flip(view, index):
    view.ask({"toggle": index})


def bit_row(view):
    return next(m for m in view.spec["panels"][0]["marks"] if m.get("pick"))


@pytest.mark.parametrize("index", range(16))
def test_each_of_the_16_bits_toggles_back_and_forth(index):
    view = bits_view()
    first = look(view), view.explorer.pattern
    flip(view, index)
    assert view.explorer.pattern == first[1] ^ 1 << index
    assert bit_row(view)["text"][bit_row(view)["keys"].index(index)] == str(view.explorer.bit(index))
    assert look(view) != first[0]
    flip(view, index)
    assert view.explorer.pattern == first[1]
    assert view.summary().startswith("0.0999755859375 in fp16 is")


def test_any_pattern_can_be_reached_by_bits_and_keeps_its_kind():
    view = bits_view(number="0")
    for pattern in (0x7C00, 0x7C01, 0xFE00, 0x0001, 0x8000, 0x7BFF, 0x0400):
        for index in range(16):
            if (view.explorer.pattern ^ pattern) >> index & 1:
                flip(view, index)
        assert view.explorer.pattern == pattern
        assert view.explorer.fields == FP16.fields(pattern)
        assert int("".join(bit_row(view)["text"]), 2) == pattern


def test_the_last_exponent_bit_doubles_the_gaps_in_the_same_window():
    even, odd = BitsExplorer(number="0.15"), BitsExplorer(number="0.3")
    assert (even.fields.exponent % 2, odd.fields.exponent) == (0, even.fields.exponent + 1)
    widths = [model.window[1] - model.window[0] for model in (even, odd)]
    assert widths[0] == widths[1] == 40 * even.gap == 20 * odd.gap
    for model in (even, odd):
        values, stored = model.near
        assert stored == model.value
        assert set(np.diff(values)) == {model.gap}
        assert sum(v < model.value for v in values) >= 8 <= sum(v > model.value for v in values)


def test_the_number_line_ends_where_the_format_does_and_holds_a_second_format():
    top = BitsExplorer(number="65504", pinned="e5m2")
    assert top.near[0][-1] == 65504.0
    assert set(top.pinned_near[0]) <= set(get_format("e5m2").values().tolist())
    least = BitsExplorer(number="2^-24")
    assert np.allclose(np.diff(least.near[0]), 2.0**-24, rtol=0, atol=0)
    assert np.isnan(BitsExplorer(pinned="none").pinned_near[1])
    assert least.binades[0] == -24


def test_a_handle_moves_the_number_by_ulps_and_by_powers_of_two():
    view = bits_view()
    view.ask({"number": 0.1002})
    assert (view.explorer.number, view.explorer.value) == ("0.1002", float(np.float16(0.1002)))
    view.ask({"shift_to": [0, 3]})
    assert view.explorer.value == 2.0**7 * float(np.float16(0.1002))
    view.explorer.set(number="0")
    view.ask({"shift_to": [0, 3]})
    assert "has no power of two" in view.sentence[1]


def test_the_same_number_in_every_format():
    model = BitsExplorer(number="0.3")
    errors = {}
    for name in NAMES:
        model.fmt = name
        fmt = get_format(name)
        assert model.format is fmt
        assert Fraction(model.value) == fmt.fields(model.pattern).value
        errors[name] = abs(model.value - 0.3)
        assert errors[name] <= model.gap / 2
    assert errors["fp32"] < errors["tf32"] <= errors["fp16"] < errors["bf16"]
    rows = {row["format"]: row for row in model.table()}
    assert rows["bf16"]["pattern, hex"] == "3e9a"
    assert rows["e4m3fn"]["value"] == "0.3125"


HALF = sorted({*FP16.values().tolist()})


def nearest_of_half(exact):
    """The value of float16 that is nearest to a fraction, ties to the even pattern, by distances alone."""
    at = bisect.bisect_left(HALF, exact)
    return min(HALF[at - 1 : at + 1], key=lambda v: (abs(Fraction(v) - exact), int(FP16.encode(abs(v))) & 1))


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("1e-400", Fraction(1, 10**400)),
        ("-1e-400", -Fraction(1, 10**400)),
        ("2^-1080", Fraction(1, 2**1080)),
        ("1.00000000000000001", 1 + Fraction(1, 10**17)),
        ("2049.0000000000000001", 2049 + Fraction(1, 10**16)),  # float64 makes the tie 2049 of it, which goes down
        ("2050.9999999999999999", 2051 - Fraction(1, 10**16)),
        ("1/3", Fraction(1, 3)),
        ("2048", Fraction(2048)),
        ("0e-999999999", Fraction(0)),
    ],
)
def test_a_number_is_rounded_once_and_called_exact_where_it_is(text, exact):
    model = BitsExplorer(number=text)
    assert model.value == nearest_of_half(exact)
    assert ("(exactly)" in model.summary()) == (Fraction(model.value) == exact)
    error = {row["format"]: row["relative error"] for row in model.table()}["fp16"]
    assert (float(error) == 0) == (Fraction(model.value) == exact)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_bits_print_is_exactly_their_value(name):
    fmt = get_format(name)
    for pattern in (1, 2, 3, 2 ** (fmt.bits - 1) - 3, int(FP16.encode(1.0)) + 1 if name == "fp16" else 4):
        model = BitsExplorer(fmt=name, number=repr(value_of(pattern, fmt)))
        if model.fields.value is not None:
            assert "(exactly)" in model.summary()


@pytest.mark.parametrize("number", ["9007199254740993", "16777217"])
def test_a_whole_number_that_float32_does_not_hold_is_off(number):
    model = BitsExplorer(fmt="fp32", number=number)
    assert "(off by -1)" in model.summary()


def test_float32_tells_its_neighbours_apart_and_the_ring_keeps_an_exponent():
    model = BitsExplorer(fmt="fp32", number="0.1")
    below, above = re.search(r"neighbours (\S+) and (\S+),", model.summary()).groups()
    assert np.float32(below) == np.nextafter(np.float32(0.1), np.float32(0))
    assert np.float32(above) == np.nextafter(np.float32(0.1), np.float32(1))
    model.set(number="3.66e-5")
    model.toggle(0)  # 3.659999492811039e-05: cut off, this would read as 3.66
    assert float(model.asked().removeprefix("about ")) == pytest.approx(model.value, rel=1e-8)
    assert model.asked() in str(bits_view(fmt="fp32", number=model.number).spec)


def test_a_share_of_gradients_above_0_is_not_told_as_0():
    model = GradientsExplorer(scale_exponent=20, step=0)
    assert 0 < model.over < 0.0005
    assert "less than 0.1 % overflow" in model.summary()
    assert "0.00" not in str(model.table())


def test_up_down_and_sign_buttons_and_what_they_say_at_the_ends():
    view = bits_view(number="65504")
    view.press("Next value up")
    assert view.explorer.fields.kind == "inf"
    view.press("Next value up")
    assert "there is no larger value in fp16" in view.sentence[1]
    view.press("Next value down")
    view.press("Change sign")
    assert view.explorer.value == -65504.0
    view.explorer.set(number="nan")
    view.press("Next value up")
    assert "there is no larger value" in view.explorer.message


def test_nan_keeps_its_payload_and_is_refused_where_there_is_none():
    model = BitsExplorer(number="nan(0x7c01)")
    assert model.pattern == 0x7C01
    model.fmt = "e4m3fn"  # has one NaN per sign
    assert model.pattern == 0x7F
    with pytest.raises(ValueError, match="e2m1 has no NaN"):
        model.fmt = "e2m1"
    assert model.fmt == "e4m3fn"
    assert {row["value"] for row in model.table() if row["format"] in ("e3m2", "e2m1")} == {"no NaN"}
    with pytest.raises(ValueError, match="bits 0 to 7, got 8"):
        model.toggle(8)


def test_typing_nonsense_leaves_the_number_and_says_why():
    view = bits_view()
    before = look(view)
    view.ask({"number": "a lot"})
    assert look(view) == before
    assert view.state["number"] == "0.1"
    assert "write a number such as" in view.sentence[1]


def test_the_bit_row_follows_the_format():
    view = bits_view()
    for name, bits in (("fp32", 32), ("e2m1", 4), ("bf16", 16)):
        view.ask({"fmt": name})
        assert bit_row(view)["names"][0] == f"bit {bits - 1}, sign"
        assert len(bit_row(view)["text"]) == bits
    assert [name.split(", ")[1] for name in bit_row(view)["names"]] == ["sign"] + ["exponent"] * 8 + ["fraction"] * 7


def test_bits_kept_count_the_values_in_each_binade():
    for name in ("fp16", "e5m2", "e4m3fn", "e2m3"):
        fmt = get_format(name)
        grid = fmt.values().double()
        for exponent in range(fmt.min_exponent - fmt.fraction_bits - 2, fmt.max_exponent + 2):
            inside = int(((grid >= 2.0**exponent) & (grid < 2.0 ** (exponent + 1))).sum())
            kept = bits_kept(fmt, exponent)
            if exponent < fmt.max_exponent:
                assert inside == (2 ** (kept - 1) if kept else 0)
            assert (kept == -1) == (exponent > fmt.max_exponent)


@pytest.mark.parametrize("exponent", [-152, -25, -24, -14, 0, 15, 16, 127, 128, 130])
def test_ranges_tell_the_fate_of_a_magnitude(exponent):
    view = ranges_view(exponent=exponent)
    with np.errstate(over="ignore"):
        stored = float(np.float16(2.0**exponent))
    fate = view.explorer.fate("fp16")
    assert (fate == "becomes 0") == (stored == 0)
    assert (fate == "overflows to inf") == math.isinf(stored)
    assert f"fp16 {fate}" in view.summary()
    assert len(view.data()) == len(NAMES)


def test_the_recorded_gradients_are_real_and_add_up():
    trace, model = recorded(), GradientsExplorer()
    assert len(trace) == 400
    assert "784-512-512-10" in trace.meta["what"]
    assert model.share.sum() == pytest.approx(1)
    assert model.lost + model.subnormal + model.normal + model.over == pytest.approx(1)
    low = GradientsExplorer(scale_exponent=0).lost
    assert GradientsExplorer(scale_exponent=12).lost < low / 10
    assert GradientsExplorer(fmt="bf16").lost == 0
    assert GradientsExplorer(scale_exponent=30).over > 0.5


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (bits_view, {"fmt": ["fp32", "e2m1", "fp16"], "number": ["0", "-inf", "1e300", "2^-24", "nan(0x7e01)"]}),
        (ranges_view, {"exponent": [-152, 130, 0]}),
        (gradients_view, {"fmt": ["bf16", "e4m3fn"], "scale_exponent": [0, 30], "step": [0, 399]}),
    ],
    ids=["bits", "ranges", "gradients"],
)
def test_same_settings_same_picture_other_settings_other_picture(factory, settings):
    view = factory()
    first, seen = look(view), {}
    for name, values in settings.items():
        for value in values:
            view.explorer.set(**{name: value})
            key = tuple(view.explorer.state().items())
            assert look(view) == seen.setdefault(key, look(view))
            assert view.data()
    assert len(set(seen.values())) >= len(seen) - 1
    for key, png in seen.items():
        assert look(factory(**dict(key))) == png
    view.press("Reset")
    assert look(view) == first


@pytest.mark.parametrize(
    ("model", "bad", "reason"),
    [
        (RangesExplorer, {"exponent": -153}, "between -152 and 130"),
        (GradientsExplorer, {"fmt": "fp8"}, "one of fp16, bf16"),
        (GradientsExplorer, {"step": 400}, "between 0 and 399"),
        (BitsExplorer, {"fmt": "fp64"}, "one of fp32"),
    ],
)
def test_invalid_settings_are_refused(model, bad, reason):
    with pytest.raises(ValueError, match=reason):
        model(**bad)


def test_two_threads_leave_a_view_whole():
    view = bits_view()
    errors = []

    def drive(name):
        try:
            for _ in range(6):
                view.explorer.set(fmt=name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(name,)) for name in ("fp16", "bf16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert look(view) == look(bits_view(**view.explorer.state()))


def test_tables_and_still_figures():
    rows = {row["format"]: row for row in format_rows()}
    assert rows["fp16"]["largest"] == f"{torch.finfo(torch.float16).max:.6g}"
    assert rows["fp32"]["smallest subnormal"] == "1.401e-45"
    assert still(precision(), "5 formats").png == still(precision(), "5 formats").png


@pytest.mark.parametrize("name", lesson_01.QUESTIONS)
def test_the_truth_is_right_and_each_typical_mistake_gets_its_own_hint(name):
    question = lesson_01.QUESTIONS[name]
    truth = question.truth()
    assert verdict("01", name, truth)[0] is True
    for wrong, hint in question.hints:
        assert verdict("01", name, wrong) == (False, f"Not yet. {hint}")
    assert verdict("01", name, 4321) == (False, f"Not yet. {question.hint}")
