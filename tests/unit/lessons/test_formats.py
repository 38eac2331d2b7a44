"""Lesson 01: bits, ranges and gaps against torch's own formats; answers a second way."""

import math

import numpy as np
import pytest
import torch

from mpkit.formats import FP16, get_format
from mpkit.lessons.formats import GAPS, NAMES, POWERS, beside, bits, bits_kept, everywhere, format_rows, ranges
from mpkit.view.words import words

WORDS = words("formats")


@pytest.mark.parametrize("number", ["0.1", "-3", "65504", "6e-8", "1/3", "2^-14", "−2⁻²⁴"])
def test_a_number_is_stored_as_torch_stores_it(number):
    seen = bits(number=number).numbers
    exact = {"1/3": 1 / 3, "2^-14": 2.0**-14, "−2⁻²⁴": -(2.0**-24)}.get(number) or float(number)
    half = torch.tensor(exact, dtype=torch.float64).half()
    assert (seen["value"], seen["pattern"]) == (half.item(), half.view(torch.int16).item() % 2**16)
    assert seen["below"] < seen["value"] < seen["above"] or seen["value"] == 65504


def test_every_bit_that_is_pressed_is_flipped():
    view = bits(number="0.1")
    row = next(m for p in view.sheet.panels for m in p.marks if m.get("name") == "bits")
    for place, sets in enumerate(row["sets"]):
        view.press("Reset")
        before = view.numbers["pattern"]
        view.set(**sets)
        assert view.numbers["pattern"] == before ^ 1 << 15 - place


def test_what_is_too_large_keeps_its_picture():
    view = bits(number="70000")
    assert view.numbers["value"] == math.inf
    handles = {m["name"] for p in view.sheet.panels for m in p.marks if m["type"] == "handle"}
    assert handles == {"number", "power"}


def test_formats_without_nan_refuse_it_and_payloads_stay():
    with pytest.raises(ValueError, match="NaN"):
        bits(fmt="e3m2", number="nan")
    assert bits(number="nan(0x7e01)").numbers["pattern"] == 0x7E01
    for wrong in ("many", "1e-400", "2^-1200"):
        with pytest.raises(ValueError, match="number"):
            bits(number=wrong)
    assert bits(number="0e5").numbers["value"] == 0


def test_neighbours_are_the_values_in_their_order():
    for name in ("e4m3fn", "e3m2", "e2m1"):
        fmt = get_format(name)
        values = fmt.values().tolist()
        found = beside(int(fmt.encode(values[5])), fmt, range(-8, len(values)))
        assert np.array_equal(found, [*[math.nan] * 3, *values, *[math.nan] * 5], equal_nan=True)


def test_bits_kept_are_those_of_numbers_stored():
    kept = ranges(exponent=-20).numbers["kept"]
    assert kept == {name: bits_kept(get_format(name), -20) for name in NAMES}
    assert (kept["fp16"], kept["bf16"]) == (5, 8)  # as the lesson says
    assert ranges(exponent=-25).numbers["kept"]["fp16"] == 0
    after = ranges(exponent=16).numbers["kept"]
    assert (after["fp16"], after["bf16"]) == (-1, 8)


def test_the_gaps_are_those_of_torch():
    one = torch.exp2(torch.from_numpy(POWERS).double()).half()
    above = (one.view(torch.int16) + 1).view(torch.float16)
    np.testing.assert_array_equal(GAPS, np.log2((above.double() - one.double()).numpy()))


def test_tables_and_stills():
    rows = {row["format"]: row for row in format_rows()}
    assert (rows["fp16"]["largest"], rows["bf16"]["gap at 1"]) == ("65504", "2^-7")
    errors = {row["format"]: row["relative error"] for row in everywhere(0.1)}
    assert float(errors["fp32"]) < float(errors["fp16"]) < float(errors["bf16"]) < float(errors["e5m2"])


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked["smallest"] == 2.0 ** (1 - 7) / 2**7
    assert asked["pattern"] == torch.tensor(-2.0).half().view(torch.int16).item() % 2**16
    assert asked == asked | {"bf16": 8 - (130 - 126), "beyond": 28.0, "range": 127 + 126 + 1}
    assert (WORDS["predict"]["tenth"]["right"], WORDS["predict"]["last_bit"]["right"]) == ("b", "c")
    for (sign, exponent, fraction), value in WORDS["task"]["cases"]:
        pattern = torch.tensor(sign << 15 | exponent << 10 | fraction, dtype=torch.int32).to(torch.int16)
        assert pattern.view(torch.float16).item() == value
    assert FP16.max == 65504
