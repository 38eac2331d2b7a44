"""Lesson 03: what becomes of gradients at a scale, against torch's own rounding; answers a second way."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from mpkit.formats import FP16, get_format
from mpkit.lessons.gradients import (
    FORMATS,
    KINDS,
    MOMENTS,
    SCALES,
    gradients_of_digits,
    recommended_exponent,
    shares_at,
    underflow,
)
from mpkit.rounding import round_to
from mpkit.view.words import words


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("exponent", [0, 12, 30])
def test_shares_are_those_of_the_values_rounded(fmt, exponent):
    form = get_format(fmt)
    ends = np.array([form.zero_up_to, form.min_normal - form.zero_up_to, form.overflow_edge]) / 2.0**exponent  # ties
    values = np.sort(
        [*gradients_of_digits()[720, "activations"], *ends, *np.nextafter(ends, 0), *np.nextafter(ends, 1e39)]
    )
    rounded = round_to(torch.from_numpy(values).double() * 2.0**exponent, form, overflow="inf").abs()
    seen = shares_at(values, 2.0**exponent, form)
    assert seen.lost == (rounded == 0).double().mean().item()
    assert seen.overflow == pytest.approx(rounded.isinf().double().mean().item(), abs=1e-12)
    assert seen.subnormal == ((rounded > 0) & (rounded < form.min_normal)).double().mean().item()
    assert sum(seen) == pytest.approx(1)


def test_what_the_lesson_says_of_its_gradients():
    before, after = (gradients_of_digits()[moment, "activations"] for moment in (0, 720))
    assert shares_at(before, 1.0, FP16).lost < 0.001 < 0.05 < shares_at(after, 1.0, FP16).lost
    assert math.log2(before[len(before) // 2] / after[len(after) // 2]) > 7
    assert FP16.max_exponent - math.floor(math.log2(after[-1])) > 20
    course = underflow().numbers["course"]
    assert all(a.lost >= b.lost and a.overflow <= b.overflow for a, b in pairwise(course))
    assert sum(s.lost < 0.01 and s.overflow == 0 for s in course) >= 6
    assert min(s.lost + s.overflow for s in underflow(fmt="e4m3fn").numbers["course"]) > 0.05
    assert underflow(fmt="bf16").numbers["best"] == 0
    lost = {name: underflow(fmt=name).numbers["shares"].lost for name in ("fp16", "bf16", "e5m2", "e4m3fn")}
    assert lost["bf16"] == 0 < lost["fp16"] < lost["e5m2"] < lost["e4m3fn"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_recommended_scale_leaves_one_power_of_room(kind, moment):
    values = gradients_of_digits()[moment, kind]
    best = recommended_exponent(values, FP16)
    assert shares_at(values, 2.0 ** (best + 1), FP16).overflow == 0
    assert shares_at(values, 2.0 ** (best + 2), FP16).overflow > 0
    view = underflow(moment=moment, kind=kind)
    view.press("Highest safe scale")
    assert view.params["exponent"] == min(best, SCALES[-1])


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in words("gradients")["question"].items()}
    assert set(asked) == {"edge", "shift", "recommended", "forward"}
    halves = torch.tensor([2.0**n for n in range(-20, -10)]).to(torch.float8_e5m2).float()
    assert asked["edge"] == [n for n, half in zip(range(-20, -10), halves) if half == 0][-1]
    assert 2 ** asked["shift"] == 32768
    largest = gradients_of_digits()[0, "weights"][-1]
    assert 57344 / 4 < largest * 2.0 ** asked["recommended"] <= 57344
    assert asked["forward"] is False
    for (largest,), expected in words("gradients")["task"]["cases"]:
        fits = [e for e in range(-40, 60) if largest * 2.0**e <= FP16.max]
        assert max(fits) - expected in (0, 1)
