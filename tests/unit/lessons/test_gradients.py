"""Lesson 03: what becomes of gradients at a scale, counted between the ends of the ranges; answers a second way."""

import math

import numpy as np
import pytest
import torch

from mpkit.formats import FP16, get_format
from mpkit.lessons.gradients import FORMATS, KINDS, MOMENTS, SCALES, gradients_of_digits, shares, underflow
from mpkit.view.words import words


def counted(values, exponent, fmt):
    """(lost, subnormal, overflow) from the ends of the ranges: ties go to 0, the normal number, overflow."""
    form, values = get_format(fmt), np.ldexp(values, exponent)
    over = values >= form.overflow_edge if form.edge_overflows else values > form.overflow_edge
    small = values < form.min_normal - form.zero_up_to
    return (values <= form.zero_up_to).mean(), (small & (values > form.zero_up_to)).mean(), over.mean()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("exponent", [0, 12, 30])
def test_shares_are_counted_between_the_ends_of_the_ranges(fmt, exponent):
    form = get_format(fmt)
    ends = np.array([form.zero_up_to, form.min_normal - form.zero_up_to, form.overflow_edge]) / 2.0**exponent  # ties
    beside = (ends, np.nextafter(ends, 0), np.nextafter(ends, 1e39))
    values = np.concatenate([gradients_of_digits()[720, "activations"], *beside])
    seen = [share[exponent == SCALES] for share in shares(values, form).values()]
    np.testing.assert_allclose(np.ravel(seen), counted(values, exponent, fmt), atol=1e-12)


def test_what_the_lesson_says_of_its_gradients():
    before, after = (gradients_of_digits()[moment, "activations"] for moment in (0, 720))
    assert counted(before, 0, "fp16")[0] < 0.001 < 0.05 < counted(after, 0, "fp16")[0]
    assert math.log2(np.median(before) / np.median(after)) > 7
    assert FP16.max_exponent - math.floor(math.log2(after.max())) > 20
    course = underflow().numbers["course"]
    assert (np.diff(course["lost"]) <= 0).all()
    assert (np.diff(course["overflow"]) >= 0).all()
    assert ((course["lost"] < 0.01) & (course["overflow"] == 0)).sum() >= 6
    course = {fmt: underflow(fmt=fmt).numbers["course"] for fmt in FORMATS}
    assert (course["e4m3fn"]["lost"] + course["e4m3fn"]["overflow"]).min() > 0.05
    assert underflow(fmt="bf16").numbers["best"] > 100  # it needs none
    lost = {fmt: float(course[fmt]["lost"][SCALES == 0][0]) for fmt in FORMATS}
    assert lost["bf16"] == 0 < lost["fp16"] < lost["e5m2"] < lost["e4m3fn"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_recommended_scale_leaves_one_power_of_room(kind, moment):
    values, view = gradients_of_digits()[moment, kind], underflow(moment=moment, kind=kind)
    best = view.numbers["best"]
    assert counted(values, best + 1, "fp16")[2] == 0 < counted(values, best + 2, "fp16")[2]
    view.press("Highest safe scale")
    assert view.params["exponent"] == min(best, SCALES[-1])


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in words("gradients")["question"].items()}
    assert set(asked) == {"edge", "shift", "recommended", "forward"}
    halves = torch.tensor([2.0**n for n in range(-20, -10)]).to(torch.float8_e5m2).float()
    assert asked["edge"] == [n for n, half in zip(range(-20, -10), halves) if half == 0][-1]
    assert 2 ** asked["shift"] == 32768
    largest = gradients_of_digits()[0, "weights"].max()
    assert 57344 / 4 < largest * 2.0 ** asked["recommended"] <= 57344
    assert asked["forward"] is False
    for (largest,), expected in words("gradients")["task"]["cases"]:
        fits = [e for e in range(-40, 60) if largest * 2.0**e <= FP16.max]
        assert max(fits) - expected in (0, 1)
