"""Models and views of the lessons on DimReduce, AdaSum and group loss scales, without a browser."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from scenes import look
from traitlets import Enum, Float, Int

from mpkit import check
from mpkit.explorers.adasum import RULES, PairExplorer, WorkersExplorer, trained_with
from mpkit.explorers.dim_reduce import RHOS, DimReduceExplorer, earlier_path, on_plane, reduced_path
from mpkit.explorers.dim_reduce import STEPS as DESCENTS
from mpkit.explorers.dim_reduce import components as all_components
from mpkit.explorers.group_scale import (
    FORMATS,
    STEPS,
    WAYS,
    GroupScaleExplorer,
    batches,
    deep_sigmoid,
    gradient_trace,
    surviving,
    train_step,
)
from mpkit.plots.adasum import training_curves, workers_scene
from mpkit.plots.static import still
from mpkit.widgets.adasum import adasum_view, workers_view
from mpkit.widgets.dim_reduce import dim_reduce_view
from mpkit.widgets.group_scale import group_scale_view
from mpkit.widgets.scene import View

VIEWS: list[Callable[[], View]] = [adasum_view, workers_view, group_scale_view, dim_reduce_view]


def extremes(trait: Any) -> list[Any]:
    """Values at both ends, and between, of a control."""
    if isinstance(trait, Enum):
        return list(trait.values)
    if isinstance(trait, Int | Float):
        return [trait.min, trait.max]
    return [True, False]


@pytest.mark.parametrize("make", VIEWS)
def test_every_control_over_its_range_draws_and_tells_something_and_reset_restores(make: Callable[[], View]) -> None:
    view = make()
    first, sentence = look(view), view.summary()
    for name in view.explorer.controls:
        seen = {look(view)}
        for value in extremes(view.explorer.traits()[name]):
            view.explorer.set(**{name: value})
            assert any(c.isdigit() for c in view.summary())
            assert "nan" not in view.summary()
            assert view.data()
            seen.add(look(view))
        assert len(seen) > 1, f"{name} changes nothing on screen"
        view.press("Reset")
        assert look(view) == first, f"{name} does not come back"
        assert view.summary() == sentence


@pytest.mark.parametrize("make", VIEWS)
def test_refused_values_leave_everything_as_it_was(make: Callable[[], View]) -> None:
    view = make()
    before = look(view), view.explorer.state()
    for name in view.explorer.controls:
        trait = view.explorer.traits()[name]
        bad = trait.max + 1 if isinstance(trait, Int | Float) else "nonsense"
        with pytest.raises(ValueError, match="must be"):
            view.explorer.set(**{name: bad})
    assert (look(view), view.explorer.state()) == before


@pytest.mark.parametrize("make", VIEWS)
def test_two_threads_end_in_the_picture_of_the_last_settings(make: Callable[[], View]) -> None:
    view, name = make(), None
    name = next(n for n in view.explorer.controls if isinstance(view.explorer.traits()[n], Int))
    trait = view.explorer.traits()[name]

    def drag() -> None:
        for value in (trait.min, trait.max, (trait.min + trait.max) // 2):
            view.explorer.set(**{name: value})

    threads = [threading.Thread(target=drag) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = look(view)
    view.redraw()
    assert look(view) == left


@pytest.mark.parametrize("lesson", ["11", "12", "13"])
def test_questions_accept_the_truth_and_give_a_hint_otherwise(lesson: str) -> None:
    for name, question in import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS.items():
        assert check.verdict(lesson, name, question.truth())[0] is True
        assert check.verdict(lesson, name, "no such answer")[0] is False
        for wrong, sentence in question.hints:
            if not callable(wrong):
                assert check.verdict(lesson, name, wrong) == (False, "Not yet. " + sentence)


# AdaSum


def test_the_pair_goes_from_mean_to_sum_as_the_vectors_turn_apart() -> None:
    model = PairExplorer(length_a=2.0, length_b=2.0)
    model.angle = 0
    assert model.results["AdaSum"].tolist() == pytest.approx(model.results["mean"].tolist())
    model.angle = 90
    assert model.results["AdaSum"].tolist() == pytest.approx(model.results["sum"].tolist(), abs=1e-12)
    model.angle = 180
    assert float(model.results["AdaSum"].norm()) < 1e-12
    model.set(length_a=0.0)
    assert model.coefficients == [1.0, 1.0]


def test_workers_that_agree_average_and_others_add_up() -> None:
    model = WorkersExplorer(agreement=1.0, workers=16)
    assert model.lengths["AdaSum"] == pytest.approx([1.0] * 5)
    assert model.lengths["sum"] == pytest.approx([1, 2, 4, 8, 16])
    model.set(agreement=0.0, dimension=256)
    assert model.lengths["AdaSum"][-1] == pytest.approx(math.sqrt(16), rel=0.15)
    assert "16 workers" in model.summary()


def test_no_length_or_cosine_leaves_the_picture() -> None:
    for seed in (0, 18, 91):
        model = WorkersExplorer(agreement=0.0, dimension=2, seed=seed)
        for panel, shown in zip(workers_scene(model).panels, (model.lengths, model.cosines)):
            low, high = min(map(min, shown.values())), max(map(max, shown.values()))
            if shown is model.lengths:
                low, high = math.log2(low), math.log2(high)
            assert panel.given["y"]["lo"] <= low <= high <= panel.given["y"]["hi"], (seed, low, high)


def test_adasum_trains_faster_than_the_mean_at_the_rate_of_one_worker_and_the_sum_diverges() -> None:
    ends = {rule: trained_with(rule, 8)[-1] for rule in RULES}
    assert ends["AdaSum"] < ends["mean"] < 1 < ends["sum"]
    assert trained_with("mean", 1) == trained_with("AdaSum", 1)
    picture = still(training_curves({rule: trained_with(rule, 8) for rule in RULES}), "three rules")
    assert picture.png.startswith(b"\x89PNG")


# group loss scales


@pytest.mark.parametrize("way", WAYS)
def test_replayed_scales_are_those_of_a_real_training_in_float16(way: str) -> None:
    model, steps = GroupScaleExplorer(format="float16", depth=2, window=2, init_exponent=10), 60
    net = deep_sigmoid(2, way, FORMATS["float16"], 2.0**10)
    net.manager.growth = 2**0.5
    run, apart = model.runs[way], []
    for t, (images, labels) in enumerate(batches(steps)):
        scales = net.manager.scales.tolist()
        apart.append(max(abs(math.log2(a / b)) for a, b in zip(scales, run.scales[t])))
        train_step(net, images, labels)
    if way == "one scale":
        assert apart == pytest.approx([0.0] * steps, abs=1e-3)
    # An overflow that reaches earlier groups halts their growth for a step, which the replay does not know.
    assert max(apart) < 1.6


def test_four_scales_save_what_one_loses() -> None:
    model = GroupScaleExplorer(format="E5M2", depth=4)
    assert model.survive["one scale"][0] < 0.1
    assert model.survive["scale per group"][0] > 0.9
    assert model.skipped("scale per group") > model.skipped("one scale") > 0
    model.set(depth=1)
    assert min(model.survive["one scale"]) > 0.99


def test_surviving_values_of_a_real_step_are_at_most_those_of_the_replay() -> None:
    model = GroupScaleExplorer(format="E5M2", depth=3, step=STEPS - 1)
    true = deep_sigmoid(3)
    train_step(true, *batches(STEPS)[-1])
    net = deep_sigmoid(3, "one scale", FORMATS["E5M2"], float(model.runs["one scale"].scales[-1, 0]))
    train_step(net, *batches(STEPS)[-1])
    real, replayed = surviving(net, true), model.survive["one scale"]
    assert real[0] <= replayed[0] < 0.5
    assert real[-1] == pytest.approx(replayed[-1], abs=0.01)
    assert surviving(true, true) == [1.0] * 4


def test_small_numbers_have_no_minus_zero() -> None:
    """Coefficients, cosines and coordinates that round to 0, of either sign."""
    for angle in (0, 1, 17, 90, 158, 179, 180):
        for a, b in ((1.0, 2.1), (2.1, 1.0), (2.4, 0.0), (3.0, 3.0)):
            pair = PairExplorer(length_a=a, length_b=b, angle=angle)
            assert not re.search(r"-0\.0+\b|- 0\.00", f"{pair.summary()} {pair.table()}"), pair.summary()
            assert ("1 degree." in pair.summary()) == (angle == 1)
    assert "= 0.00 a + 0.77 b" in PairExplorer(length_a=1.0, length_b=2.1, angle=17).summary()
    for seed, dimension, workers in ((9, 26, 4), (99, 66, 16), (39, 37, 4)):
        many = WorkersExplorer(agreement=0.0, dimension=dimension, workers=workers, seed=seed)
        assert not re.search(r"-0\.0+\b", f"{many.summary()} {many.table()}"), many.summary()


def test_true_gradients_fall_from_group_to_group() -> None:
    largest = gradient_trace(3).largest
    assert (largest[:, 1:] > 16 * largest[:, :-1]).all()


# DimReduce


def test_the_plane_holds_most_of_the_path_and_starts_at_the_origin() -> None:
    path = earlier_path().weights
    steps = np.linalg.norm(path[1:] - path[0], axis=1)
    assert np.allclose(on_plane(path[0]), 0)
    assert (np.linalg.norm(on_plane(path[1:]), axis=1) > 0.75 * steps).all()
    assert np.allclose(all_components() @ all_components().T, np.eye(len(all_components())))


def test_eight_components_beat_the_path_they_came_from_and_two_get_stuck() -> None:
    assert reduced_path(8).losses[-1] < 0.2 * earlier_path().losses[-1]
    stuck = DimReduceExplorer(components=2, step=DESCENTS - 1)
    assert not stuck.path.searches[-1].accepted
    assert stuck.path.losses[-1] > earlier_path().losses[-1]
    assert "accepts neither step size" in stuck.summary()
    assert np.isfinite(stuck.refused[:, -1]).all()
    assert np.isnan(stuck.taken[-1]).all()


@pytest.mark.parametrize("components", [2, 5, 14])
def test_all_weights_and_trials_are_in_the_picture_or_told_to_lie_beyond_it(components: int) -> None:
    for rho, alpha in itertools.product(RHOS, (0.001, 0.2)):
        model = DimReduceExplorer(components=components, rho=rho, alpha=alpha)
        (left, right), (low, high) = model.picture
        weights = model.points["DimReduce"]
        for t, search in enumerate(model.path.searches):
            tried = [weights[t] + size * search.direction.numpy()[:2] for size in (1.0, rho)[: len(search.losses)]]
            beyond = [not (left <= x <= right and low <= y <= high) for x, y in tried]
            shown = [model.taken[t], *model.refused[:, t]]
            for x, y in (*weights, *(at for at in shown if np.isfinite(at).all())):
                assert left - 1e-9 <= x <= right + 1e-9
                assert low - 1e-9 <= y <= high + 1e-9
            assert not (search.accepted and beyond[-1]), "an accepted trial is where the path goes on"
            told = {0: "", 1: " (1 refused trial beyond the picture)", 2: " (2 refused trials beyond the picture)"}
            model.step = t
            assert told[sum(beyond)] + ". The loss" in model.summary()


def test_the_tip_of_b_is_dragged_to_a_length_and_an_angle() -> None:
    view = adasum_view()
    view.ask({"drag_b": [0, [0.0, 2.0]]})
    assert (view.explorer.length_b, view.explorer.angle) == (2.0, 90)
    view.ask({"drag_b": [0, [-3.0, -3.0]]})
    assert (view.explorer.length_b, view.explorer.angle) == (3.0, 135)
    view.ask({"drag_b": [0, [0.0, 0.0]]})
    assert (view.explorer.length_b, view.explorer.angle) == (0.0, 135)


def test_accepted_trials_are_where_the_path_goes_on() -> None:
    model = DimReduceExplorer(alpha=0.0)
    for step, search in enumerate(model.path.searches):
        landed = model.points["DimReduce"][step + 1]
        wanted = model.taken[step] if search.accepted else model.points["DimReduce"][step]
        assert landed == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("length", "told"), [(0.04, "0.04"), (0.26, "0.26"), (2.0, "2.0"), (0.0, "0.0")])
def test_a_length_that_is_typed_is_told_as_it_is(length: float, told: str) -> None:
    """0.04 was told as 0.0, beside a coefficient of b that it alone explains."""
    assert f"b of length {told} at" in PairExplorer(length_b=length).summary()
