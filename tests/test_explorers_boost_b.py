"""Models and views of the lessons on DimReduce, AdaSum and group loss scales, without a browser."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from scenes import look
from traitlets import Enum, Float, Int

from mpkit import check
from mpkit.explorers.dim_reduce import RHOS, DimReduceExplorer, earlier_path, on_plane, reduced_path
from mpkit.explorers.dim_reduce import STEPS as DESCENTS
from mpkit.explorers.dim_reduce import components as all_components
from mpkit.widgets.dim_reduce import dim_reduce_view
from mpkit.widgets.scene import View

VIEWS: list[Callable[[], View]] = [dim_reduce_view]


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


@pytest.mark.parametrize("lesson", ["11"])
def test_questions_accept_the_truth_and_give_a_hint_otherwise(lesson: str) -> None:
    for name, question in import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS.items():
        assert check.verdict(lesson, name, question.truth())[0] is True
        assert check.verdict(lesson, name, "no such answer")[0] is False
        for wrong, sentence in question.hints:
            if not callable(wrong):
                assert check.verdict(lesson, name, wrong) == (False, "Not yet. " + sentence)


# AdaSum


# group loss scales


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


def test_accepted_trials_are_where_the_path_goes_on() -> None:
    model = DimReduceExplorer(alpha=0.0)
    for step, search in enumerate(model.path.searches):
        landed = model.points["DimReduce"][step + 1]
        wanted = model.taken[step] if search.accepted else model.points["DimReduce"][step]
        assert landed == pytest.approx(wanted, abs=1e-9)
