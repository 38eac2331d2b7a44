"""The models and views of the lessons on loss scaling and the training step, without a browser."""

from __future__ import annotations

import inspect
import re
import threading

import numpy as np
import pytest
import torch
from scenes import look

from mpkit.check import verdict
from mpkit.explorers.start import train_step
from mpkit.explorers.training import (
    EXPONENTS,
    FORMATS,
    KINDS,
    MOMENTS,
    ORDERS,
    OrderExplorer,
    StepExplorer,
    UnderflowExplorer,
    gradients_of_digits,
    handed_over,
    limits_of,
    micro_gradients,
    one_step,
    recommended_exponent,
    shares_at,
)
from mpkit.formats import get_format
from mpkit.plots.scene import unpack
from mpkit.plots.static import figure
from mpkit.plots.training import underflow_scene
from mpkit.rounding import round_to
from mpkit.widgets.training import order_view, step_view, underflow_view


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_bar_is_cut_off_and_rings_stand_above_all_bars(moment, kind):
    """A bar of 25 % ended at the top of an axis of 24 %, and the ring stood in it."""
    for panel in underflow_scene(UnderflowExplorer(moment=moment, kind=kind)).panels[:2]:
        top = panel.given["y"]["hi"]
        bars = max(np.max(unpack(m["values"], {})) for m in panel.marks if m["type"] == "bars" and m.get("quiet"))
        (ring,) = (mark["cross"] for mark in panel.marks if mark["type"] == "handle")
        assert bars < ring < top


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-8, 0, 13, 30])
def test_shares_are_those_of_rounding_every_value(name, exponent):
    fmt = get_format(name)
    values = gradients_of_digits()[720, "activations"]
    rounded = round_to(torch.from_numpy(values) * 2.0**exponent, fmt)
    expected = [
        (rounded == 0).double().mean().item(),
        ((rounded != 0) & (rounded < fmt.min_normal)).double().mean().item(),
        (rounded.isfinite() & (rounded >= fmt.min_normal)).double().mean().item(),
        (~rounded.isfinite()).double().mean().item(),
    ]
    assert list(vars(shares_at(values, 2.0**exponent, fmt)).values()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_tight_on_both_sides(name):
    fmt, limits = get_format(name), limits_of(get_format(name))

    def rounded(value, toward=None):
        number = np.float32(value) if toward is None else np.nextafter(np.float32(value), np.float32(toward))
        return round_to(torch.tensor(number), fmt).item()

    assert rounded(limits.lost) == 0.0 < rounded(limits.lost, np.inf)
    assert rounded(limits.normal) == fmt.min_normal > rounded(limits.normal, 0)
    if name != "bf16":  # beside bf16's limit there is no float32 left
        assert not np.isfinite(rounded(limits.overflow))
    assert rounded(limits.overflow, 0) == fmt.max


def test_the_recommended_scale_leaves_one_power_of_two():
    fmt = get_format("fp16")
    for (moment, kind), values in gradients_of_digits().items():
        best = recommended_exponent(values, fmt)
        assert shares_at(values, 2.0 ** (best + 1), fmt).overflow == 0, (moment, kind)
        assert shares_at(values, 2.0 ** (best + 2), fmt).overflow > 0, (moment, kind)
    assert recommended_exponent(values, get_format("bf16")) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_the_threshold_is_what_becomes_zero_at_this_scale(name):
    model, fmt = UnderflowExplorer(format=name, exponent=7), get_format(name)
    lost = torch.tensor(2.0**model.threshold)
    assert round_to(lost * 2.0**7, fmt) == 0.0 < round_to(2 * lost * 2.0**7, fmt)
    assert f"up to the threshold 2^{model.threshold} become zero." in model.summary()


def test_gradients_shrink_while_the_network_learns():
    medians = [np.median(gradients_of_digits()[moment, "activations"]) for moment in MOMENTS]
    assert medians[-1] < medians[0] / 50
    assert all((values[1:] >= values[:-1]).all() for values in gradients_of_digits().values())


def test_one_step_updates_or_skips():
    phases, skipped, change = one_step(16, False)
    assert not skipped
    assert change > 0
    assert "float16" in phases[1].seen
    assert "float32" in phases[2].seen
    phases, skipped, change = one_step(16, True)
    assert skipped
    assert change == 0.0
    assert phases[-1].seen == "next scale 32768"
    assert one_step(30, False)[1]  # 2^30 is too much for float16 gradients


def test_an_inf_travels_and_dies_at_the_gate_unless_the_check_comes_late():
    phases, skipped, _ = one_step(16, True)
    assert skipped
    assert [phase.bad for phase in phases[:2]] == [0, 32]  # one pixel, 32 units that multiply it
    assert phases[2].bad == 1
    assert phases[6].bad == 0  # the weights
    late, skipped, _ = one_step(16, True, late=True)
    assert not skipped
    assert late[6].bad == late[5].bad > 1000  # each weight whose gradient is not finite
    assert late[7].seen == phases[7].seen == "next scale 32768"
    assert one_step(16, False, late=True)[0][6].bad == 0


def test_the_picture_of_the_step_shows_where_the_inf_is():
    def words(view, phase):
        fig = figure(view.spec | {"kept": view.kept}, phase - 1)
        return " | ".join(text.get_text() for axes in fig.axes for text in axes.texts)

    good, bad, late = step_view(), step_view(bad=True), step_view(bad=True, late=True)
    assert "shut" not in words(bad, 6)
    assert "shut: the weights stay as they were" in words(bad, 7)
    assert f"too late: {late.explorer.lost} of 2410 weights are not finite" in words(late, 7)
    assert "open: the weights move" in words(good, 7)
    assert "32 of 2048\nnot finite" in words(bad, 2)
    assert "the check comes too late" in late.summary()
    assert late.explorer.stored().endswith("applied, and weights are lost: the check came too late.")


def test_only_the_right_order_is_independent_of_the_scale():
    micro = micro_gradients(4)
    right = [handed_over(micro, 2.0**e, 0.25, ORDERS[0]) for e in (0, 10, 20)]
    for other in right[1:]:
        torch.testing.assert_close(other, right[0], rtol=0, atol=1e-7)
    early = handed_over(micro, 1024.0, 0.25, ORDERS[1])
    assert early.norm().item() == pytest.approx(0.25 / 1024, rel=1e-4)
    each = handed_over(micro, 1024.0, 100.0, ORDERS[2])
    torch.testing.assert_close(each, micro[-1] / 4, rtol=0.01, atol=1e-3)  # only the last micro-batch counts
    single = micro_gradients(1)
    torch.testing.assert_close(handed_over(single, 64.0, 0.25, ORDERS[2]), handed_over(single, 64.0, 0.25, ORDERS[0]))


VIEWS = {
    underflow_view: {
        "moment": MOMENTS,
        "kind": KINDS,
        "format": FORMATS,
        "exponent": (EXPONENTS[0], EXPONENTS[-1], 0),
    },
    step_view: {"phase": (1, 8, 4), "exponent": (0, 30, 16), "late": (True, False), "bad": (True, False)},
    order_view: {"exponent": (0, 20, 10), "max_norm": (2.0**-6, 4.0, 0.25), "parts": (1, 8, 4)},
}
WRONG = {
    underflow_view: {"moment": 5, "kind": "losses", "format": "fp12", "exponent": 31},
    step_view: {"phase": 9, "exponent": -1, "bad": "yes"},
    order_view: {"exponent": 21, "max_norm": 0.0, "parts": 0},
}


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_every_control_over_its_range(make):
    view = make()
    first, start = look(view), view.explorer.state()
    pictures = {}
    for name, values in VIEWS[make].items():
        for value in values:
            view.explorer.set(**{name: value})
            assert getattr(view.explorer, name) == value
            assert view.explorer.message == ""
            assert view.sentence == [view.summary(), ""]
            state = tuple(view.explorer.state().items())
            assert pictures.setdefault(state, look(view)) == look(view)
            assert view.data()
    assert len(set(pictures.values())) > len(VIEWS[make])
    view.press("Reset")
    assert view.explorer.state() == start
    assert look(view) == first


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_wrong_settings_are_refused_and_change_nothing(make):
    view = make()
    before, state = look(view), view.explorer.state()
    for name, value in WRONG[make].items():
        with pytest.raises(ValueError, match=name):
            view.explorer.set(**{name: value})
        assert view.explorer.state() == state
        assert look(view) == before


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_two_threads_leave_a_picture_of_the_last_settings(make):
    view = make()
    name, values = next((n, v) for n, v in VIEWS[make].items() if isinstance(v[0], int))

    def drag():
        for value in values * 2:
            view.explorer.set(**{name: value})

    threads = [threading.Thread(target=drag) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = make(**view.explorer.state())
    assert look(view) == look(fresh)
    assert view.summary() == fresh.summary()


def test_buttons_step_play_and_take():
    view = step_view()
    view.index = 1
    assert view.explorer.phase == 2
    view.index = 0
    assert view.explorer.phase == 1
    view = underflow_view()
    view.press("Recommended")
    assert view.explorer.exponent == view.explorer.best
    assert view.explorer.shares == view.explorer.best_shares


@pytest.mark.parametrize(
    ("explorer", "words"),
    [(UnderflowExplorer, "flushed to zero"), (StepExplorer, "Phase 1 of 8"), (OrderExplorer, "the right order")],
)
def test_summaries_hold_the_numbers(explorer, words):
    assert words in explorer().summary()


RIGHT = {
    "04": {"edge": -17, "shift": 15, "recommended": 19, "forward": False},
    "06": {"scale": 2048, "weights": 96, "clip": 0.25 / 4096, "divisions": 8},
}


@pytest.mark.parametrize(("lesson", "name"), [(lesson, name) for lesson, names in RIGHT.items() for name in names])
def test_questions_know_right_from_wrong(lesson, name):
    assert verdict(lesson, name, RIGHT[lesson][name])[0] is True
    wrong = True if isinstance(RIGHT[lesson][name], bool) else 12345
    assert verdict(lesson, name, wrong)[0] is False
    assert verdict(lesson, name)[0] is None


def test_the_function_of_the_lesson_counts_the_phases_of_the_picture():
    counted = re.findall(r"# (\d) (.*)", inspect.getsource(train_step))
    assert counted == [(str(i), phase.name) for i, phase in enumerate(StepExplorer().phases, 1)]
