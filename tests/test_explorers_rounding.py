"""The models and views of lesson 02, without a browser."""

import math
import threading

import numpy as np
import pytest
import torch
from scenes import look

from mpkit.check import lesson_02, verdict
from mpkit.explorers.rounding import (
    SCHEMES,
    ModesExplorer,
    StaircaseExplorer,
    UpdatesExplorer,
    grid_around,
    kahan_add,
    running_sum,
    updates,
)
from mpkit.formats import E2M1, FP16
from mpkit.plots.rounding import sums
from mpkit.plots.static import still
from mpkit.widgets.rounding import modes_view, staircase_view, updates_view


def test_a_tie_goes_to_the_even_neighbour():
    model = ModesExplorer(offset=0.5)
    assert model.results["nearest_even"] == 1.0
    assert model.results["nearest_away"] == 1 + 2**-10
    model.set(lower="1.0009765625")
    assert model.parity(model.near) == "odd"
    assert model.results["nearest_even"] == 1 + 2 * 2**-10


def test_a_negative_number_is_the_mirror_image():
    model = ModesExplorer(offset=0.25, negative=True)
    assert (model.left, model.right) == (-1 - 2**-10, -1.0)
    assert model.results["up"] == model.results["toward_zero"] == -1.0
    assert model.results["down"] == -1 - 2**-10
    assert model.share_right == 0.75


def test_beyond_the_largest_value():
    model = ModesExplorer(lower="65504", offset=0.5)
    assert model.parity(model.right) == "too large"
    assert model.results["nearest_even"] == math.inf
    assert model.results["toward_zero"] == 65504.0
    assert math.isnan(ModesExplorer(fmt="e4m3fn", lower="448", offset=1.0).results["nearest_even"])
    with pytest.raises(ValueError, match="at most 448 in e4m3fn, got 449"):
        ModesExplorer(fmt="e4m3fn", lower="449")


def test_the_halfway_button_and_the_table():
    view = modes_view()
    view.press("Halfway")
    assert view.explorer.offset == view.state["offset"] == 0.5
    assert [row["mode"] for row in view.data()][-1] == "stochastic"
    assert view.data()[1]["error, ulp"] == "+0.5"


@pytest.mark.parametrize("fmt", ["e2m1", "fp16"])
@pytest.mark.parametrize("mode", ["nearest_even", "up", "toward_zero"])
def test_the_staircase_has_a_step_for_every_value(fmt, mode):
    model = StaircaseExplorer(fmt=fmt, mode=mode, span=2)
    if fmt == "e2m1":
        assert set(np.unique(model.y)) == {v for v in E2M1.values().tolist() if abs(v) <= 4}
        assert set(model.ulps) == {0.5, 1.0}
    assert (np.diff(model.y) >= 0).all()
    if mode == "up":
        assert (model.y >= model.x).all()


def test_updates_below_half_an_ulp_are_lost_and_three_schemes_rescue_them():
    paths = updates("fp16", 1e-4)
    assert set(paths["nearest"]) == {1.0}
    assert paths["exact"][-1] == pytest.approx(1.2)
    for scheme in ("master", "kahan"):
        assert np.abs(paths[scheme] - paths["exact"]).max() <= 2**-10
    # a random walk of 2,000 independent roundings: each has a variance below ulp^2 / 4
    assert abs(paths["stochastic"][-1] - 1.2) <= 3 * 2**-10 * math.sqrt(2000) / 2
    assert all(len(paths[scheme]) == 2001 for scheme in SCHEMES)


def test_updates_above_half_an_ulp_are_not_lost_but_become_a_whole_ulp():
    assert updates("fp16", 6e-4, steps=10)["nearest"][-1] == 1 + 10 * 2**-10


def test_the_float16_paths_are_those_of_numpy_float16():
    small, total, values = np.float16(1e-3), np.float16(1), []
    for _ in range(50):
        total = np.float16(total + small)
        values.append(float(total))
    assert updates("fp16", 1e-3, steps=50)["nearest"][1:].tolist() == values


def test_kahan_summation_loses_nothing_that_fits_two_numbers():
    total, lost = torch.tensor([2048.0]).half(), torch.zeros(1).half()
    for _ in range(10):
        total, lost = kahan_add(total, lost, torch.ones(1).half())
    assert total.item() - lost.item() == 2058.0


def test_long_sums_stall_in_16_bits():
    ones = torch.ones(3000)
    assert running_sum(ones.half())[-1] == 2048.0
    assert running_sum(ones.bfloat16())[-1] == 256.0
    tenths = torch.full((300,), 0.1)
    assert running_sum(tenths)[-1].item() == float(np.cumsum(tenths.numpy(), dtype=np.float32)[-1])


def test_the_grid_around_a_number():
    grid = grid_around(1.0, FP16)
    assert grid == [1 - 2**-10, 1 - 2**-11, 1.0, 1 + 2**-10, 1 + 2 * 2**-10]
    assert grid_around(6.0, E2M1) == [3.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (
            modes_view,
            {"fmt": ["e2m1", "bf16"], "lower": ["0", "1/3", "6"], "offset": [0.0, 0.5, 1.0], "negative": [True, False]},
        ),
        (staircase_view, {"fmt": ["fp16", "e2m1"], "mode": ["down", "nearest_away"], "span": [-8, 6]}),
        (updates_view, {"fmt": ["bf16"], "update": [1e-6, 1e-2], "progress": [0, 50, 100]}),
    ],
    ids=["modes", "staircase", "updates"],
)
def test_same_settings_same_picture_other_settings_other_picture(factory, settings):
    view = factory()
    first, seen = look(view), {}
    for name, values in settings.items():
        for value in values:
            view.explorer.set(**{name: value})
            seen[tuple(view.explorer.state().items())] = look(view)
            assert view.sentence == [view.summary(), ""]
            assert view.data()
    assert len(set(seen.values())) >= len(seen) - 1
    for key, png in seen.items():
        assert look(factory(**dict(key))) == png
    view.press("Reset")
    assert look(view) == first


@pytest.mark.parametrize(
    ("model", "bad", "reason"),
    [
        (ModesExplorer, {"lower": "much"}, "write a number such as"),
        (ModesExplorer, {"lower": "inf"}, "at most 65504"),
        (ModesExplorer, {"lower": "nan"}, "at most 65504"),
        (ModesExplorer, {"offset": 1.5}, "between 0.0 and 1.0"),
        (StaircaseExplorer, {"mode": "stochastic"}, "one of nearest_even"),
        (UpdatesExplorer, {"update": 0.5}, "between 1e-06 and 0.01"),
        (UpdatesExplorer, {"progress": 101}, "between 0 and 100"),
    ],
)
def test_invalid_settings_are_refused(model, bad, reason):
    with pytest.raises(ValueError, match=reason):
        model(**bad)


def test_play_moves_through_the_precomputed_paths():
    view = updates_view(progress=0)
    assert view.explorer.shown == 0
    view.index = 1
    assert view.explorer.shown == 20
    assert "20 updates of 0.0001, below half an ulp of 1" in view.summary()


def test_two_threads_leave_a_view_whole():
    view = updates_view()
    alone = {progress: look(updates_view(progress=progress)) for progress in (25, 75)}
    errors = []

    def drive(progress):
        try:
            for _ in range(6):
                view.explorer.set(progress=progress)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(progress,)) for progress in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert look(view) == alone[view.explorer.progress]


def test_the_figure_of_sums():
    totals = {"fp16": running_sum(torch.ones(64).half()), "fp32": running_sum(torch.ones(64))}
    assert still(sums(totals, torch.arange(1, 65)), "64 terms").png[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", lesson_02.QUESTIONS)
def test_the_truth_is_right_and_each_typical_mistake_gets_its_own_hint(name):
    question = lesson_02.QUESTIONS[name]
    truth = question.truth()
    assert verdict("02", name, truth)[0] is True
    for wrong, hint in question.hints:
        assert verdict("02", name, wrong) == (False, f"Not yet. {hint}")
    assert verdict("02", name, 4321) == (False, f"Not yet. {question.hint}")
