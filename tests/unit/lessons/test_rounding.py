"""Lesson 02: modes, tiny updates and long sums against torch and by hand; answers a second way."""

import numpy as np
import pytest
import torch

from mpkit.formats import FP16
from mpkit.lessons.rounding import NARROW, added, kahan_add, modes, totals, updates
from mpkit.rounding import round_to
from mpkit.view.words import words


@pytest.mark.parametrize("fmt", NARROW)
@pytest.mark.parametrize("negative", [False, True])
def test_each_mode_goes_where_its_name_says(fmt, negative):
    for offset in (0.25, 0.5, 0.75):
        seen = modes(fmt=fmt, lower="1", offset=offset, negative=negative).numbers
        x, left, right, found = seen["x"], seen["left"], seen["right"], seen["results"]
        assert left < x < right
        assert (found["down"], found["up"]) == (left, right)
        assert found["toward_zero"] == (right if negative else left)
        assert abs(found["nearest_even"] - x) == min(x - left, right - x)
        assert seen["chance"] == (x - left) / (right - left)


def test_ties_and_the_end_of_the_format():
    view = modes()
    view.set(offset=0.5)
    assert view.numbers["results"]["nearest_even"] == 1.0 != view.numbers["results"]["nearest_away"]
    top = modes(lower="65504", offset=0.5).numbers["results"]
    assert (top["nearest_even"], top["down"], top["toward_zero"]) == (np.inf, 65504, 65504)
    with pytest.raises(ValueError, match="65504"):
        modes(lower="65505")
    ties = torch.tensor([2049.0, 2051.0, 2053.0, 2055.0])
    assert round_to(ties, FP16).tolist() == ties.half().tolist() == [2048, 2052, 2052, 2056]


def test_tiny_updates_are_lost_and_three_remedies_keep_them():
    paths = added("fp16", 1e-4)
    assert (paths["nearest"] == 1).all()
    assert all(abs(paths[s][-1] - 1.2) < 0.001 for s in ("master", "kahan"))
    assert abs(paths["stochastic"][-1] - 1.2) < 0.07
    for above in (6e-4, 2**-11 + 1e-8):  # a tie in float32 is none
        assert added("fp16", above, steps=200)["nearest"][-1] == 1 + 200 * 2**-10
    seen = updates().numbers
    assert seen["half"] == 2**-11
    np.testing.assert_array_equal(seen["kahan"], paths["kahan"][::20])


def test_kahan_carries_what_a_sum_loses():
    one, lost, small = torch.tensor(1.0).half(), torch.tensor(0.0).half(), torch.tensor(2.0**-12).half()
    for _ in range(4):
        one, lost = kahan_add(one, lost, small)
    assert one.item() - lost.item() == 1 + 2.0**-10


def test_a_sum_stalls_where_the_gap_is_two():
    assert totals().numbers["truth"].tolist() == [min(100 * i, 2048) for i in range(5, 41)]


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in words("rounding")["question"].items()}
    assert asked["tie"] == torch.tensor(8204.0).half().item()
    assert asked["ulp"] == np.spacing(np.float16(1000))
    total_of_ones = torch.tensor(0.0)
    for _ in range(40):
        total_of_ones = (total_of_ones + 1).to(torch.float8_e5m2).float()
    assert (asked["stall"], asked["lost"], asked["mean"]) == (total_of_ones, 4 * 2.0**-7 / 2, 2.0**-12 / 2.0**-10)
    for (x,), expected in words("rounding")["task"]["cases"]:
        assert torch.tensor(float(x)).half().item() == expected
