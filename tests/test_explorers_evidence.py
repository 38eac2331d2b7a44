"""Models and views of the lessons on evidence, without a browser."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from scenes import look
from traitlets import Enum, Float, Int

from mpkit import check
from mpkit.explorers.evidence import (
    CASES,
    TRACES,
    DetectiveExplorer,
    GridExplorer,
    NaiveRuleExplorer,
    RunExplorer,
    WhatIfExplorer,
    case,
    load_run,
    swept_grid,
)
from mpkit.plots.static import figure
from mpkit.widgets.evidence import detective_view, grid_view, naive_rule_view, run_view, what_if_view
from mpkit.widgets.scene import View

VIEWS: list[Callable[[], View]] = [detective_view, run_view, what_if_view, grid_view, naive_rule_view]


def extremes(trait: Any) -> list[Any]:
    if isinstance(trait, Enum):
        return list(trait.values)
    if isinstance(trait, Int | Float):
        return [trait.min, trait.max]
    return ["rare_outliers", "resnet_digits"]


@pytest.mark.parametrize("make", VIEWS)
def test_every_control_over_its_range_draws_and_tells_something_and_reset_restores(make: Callable[[], View]) -> None:
    view = make()
    first, sentence = look(view), view.summary()
    for name in view.explorer.controls:
        seen = {look(view)}
        for value in extremes(view.explorer.traits()[name]):
            view.explorer.set(**{name: value})
            assert any(c.isdigit() for c in view.summary())
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
        with pytest.raises(ValueError, match=r"must be|no file"):
            view.explorer.set(**{name: bad})
    assert (look(view), view.explorer.state()) == before


@pytest.mark.parametrize("make", VIEWS)
def test_two_threads_end_in_the_picture_of_the_last_settings(make: Callable[[], View]) -> None:
    view = make()
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


@pytest.mark.parametrize("lesson", ["14", "15", "16"])
def test_questions_accept_the_truth_and_give_a_hint_otherwise(lesson: str) -> None:
    for name, question in import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS.items():
        truth = question.truth()
        assert check.verdict(lesson, name, truth)[0] is True
        assert check.verdict(lesson, name, "no such answer")[0] is False
        for wrong, sentence in question.hints:
            if not callable(wrong):
                assert check.verdict(lesson, name, wrong) == (False, "Not yet. " + sentence)


def test_the_four_cases_have_four_verdicts() -> None:
    want = {"A": "scale_too_high", "B": "forward_overflow", "C": "bad_data", "D": "model_non_finite"}
    assert {name: DetectiveExplorer(name=name).report.verdict for name in CASES} == want


def test_the_detective_changes_its_mind_with_scale_and_format() -> None:
    model = DetectiveExplorer(name="A")
    model.exponent = 12
    assert model.report.verdict == "healthy"
    model.set(name="B", dtype="bfloat16")
    assert model.report.verdict == "healthy"
    assert all(row["fits"] for row in model.table())


@pytest.mark.parametrize(
    ("name", "exponent", "born"),
    [
        ("A", 24, ("out", True)),
        ("A", 12, None),
        ("B", 12, ("square", False)),
        ("C", 12, ("batch", False)),
        ("D", 12, ("entropy", False)),
    ],
)
def test_the_overflow_is_found_step_by_step(name: str, exponent: int, born: Any) -> None:
    model = DetectiveExplorer(name=name, exponent=exponent)
    first = None if model.born is None else model.stops[model.born]
    assert (first and (first.name, first.backward)) == born
    order = [part for part, _ in case(name).network.named_children() if part != "flat"]
    assert [stop.name for stop in model.stops] == ["batch", *order, "loss", "loss", *order[::-1]]
    assert not any(stop.bad for stop in model.stops[: model.born])
    if born and not born[1] and model.report.operation:
        assert first.name == model.report.module
    square = {stop.name: stop for stop in model.stops if not stop.backward}
    if name == "B":
        assert square["gain"].largest ** 2 > 65504


def test_the_way_shows_what_was_reached_and_nothing_else() -> None:
    view = detective_view(name="B", exponent=12)

    def words(step: int) -> list[str]:
        axes = figure(view.spec | {"kept": view.kept}, step - 1).axes[0]
        return [text.get_text() for text in axes.texts]

    assert "born here" not in words(4)
    assert "born here" in words(5)
    assert sum("inf or NaN" in text for text in words(5)) == 1
    assert sum("inf or NaN" in text for text in words(15)) > 3
    assert "Step 5 of 15, square, is the first" in view.summary()


@pytest.mark.parametrize("run", TRACES)
def test_a_recorded_run_is_shown_at_its_own_scale(run: str) -> None:
    model = RunExplorer(run=run, step=17)
    trace = load_run(run)
    assert model.scale == trace.scale[17]
    assert model.counts.sum() + model.zeros + model.nonfinite == model.values
    finite = trace.gradients.step[model.row] <= 17
    assert finite


@pytest.mark.parametrize("run", TRACES)
def test_bars_zeros_and_what_is_not_finite_are_all_values_of_a_step(run: str) -> None:
    view = run_view(run=run)
    for step in (0, 130, 199):
        words = " ".join(text.get_text() for text in figure(view.spec | {"kept": view.kept}, step).axes[1].texts)
        told = sum(float(share) for share in re.findall(r"(\S+) % (?:zero|inf or NaN)", words))
        model = RunExplorer(run=run, step=step)
        assert 100 * model.counts.sum() / model.values + told == pytest.approx(100, abs=0.02)


def test_the_recorded_policy_gives_the_recorded_scale() -> None:
    model = WhatIfExplorer(run="mlp_digits", init=16, factor=2.0, window=50)
    np.testing.assert_array_equal(model.scale, model.trace.scale)
    np.testing.assert_array_equal(model.skipped, np.flatnonzero(model.trace.overflow))


def test_one_step_is_told_as_one() -> None:
    grid = GridExplorer(run="gpt_sums", init=16, factor=1.25, window=5)
    for number, told in ((0, " 0 steps are skipped"), (1, " 1 step is skipped"), (21, " 21 steps are skipped")):
        grid.chosen.row["skipped"] = number
        assert told in grid.summary()
    model = WhatIfExplorer()
    model.draw({"100": 10.0})
    assert " 1 step of the ceiling is drawn" in model.summary()


def test_a_ceiling_drawn_by_hand_is_ridden_by_every_policy_and_can_be_undone() -> None:
    view = what_if_view()
    model, first = view.explorer, look(view)
    assert isinstance(model, WhatIfExplorer)
    view.ask({"draw": {str(i): 10.0 for i in range(100, 300)}})
    assert (model.tops[100:300] == 2.0**10).all()
    assert set(model.skipped) >= {100, 101}
    assert (model.scale[150:300] <= 2.0**11).all()
    assert "200 steps of the ceiling are drawn" in view.summary()
    best = model.row["lost"]
    model.set(factor=model.rides[0], window=model.rides[1])
    assert model.row["lost"] <= best
    untouched = model.scale[:100].copy()
    view.press("Undo drawing")
    np.testing.assert_array_equal(model.scale[:100], untouched)
    view.press("Reset")
    assert look(view) == first


def test_every_pair_is_tried_under_the_ceiling_and_can_be_taken() -> None:
    view = what_if_view(init=24, run="gpt_sums")
    model = view.explorer
    assert isinstance(model, WhatIfExplorer)
    np.testing.assert_allclose(model.grid, swept_grid("gpt_sums", 24), rtol=1e-6)  # as `sweep` has it
    view.ask({"draw": {str(i): 12.0 + (i % 40 > 20) for i in range(400)}})
    assert model.grid.min() == model.grid[model.factors.index(model.rides[0]), model.windows.index(model.rides[1])]
    view.press("Take the best pair")
    assert (model.factor, model.window) == model.rides
    np.testing.assert_array_equal(model.scale, model.best_scale)
    assert model.row["lost"] == pytest.approx(model.grid.min())
    view.ask({"pair": 3})
    assert (model.factor, model.window) == (1.25, 50)
    assert model.row["lost"] == pytest.approx(model.grid[0, 3])


@pytest.mark.parametrize("run", TRACES)
def test_the_drawn_figures_are_those_of_the_replay_where_nothing_differs(run: str) -> None:
    """Also where only every second step has a histogram, and where zeros are exactly none of the values."""
    model = WhatIfExplorer(run=run)
    step = int(np.flatnonzero(model.tops > 0)[3])
    for init, factor, window in ((16, 2.0, 50), (24, 2.0, 200), (0, 8.0, 1024)):
        model.undraw()
        model.set(init=init, factor=factor, window=window)
        wanted = model.row
        model.draw({str(step): math.log2(model.tops[step])})
        assert model.row["skipped"] == wanted["skipped"]
        assert (model.row["flushed"] == 0) == (wanted["flushed"] == 0)
        for name in ("headroom", "flushed", "lost"):
            assert model.row[name] == pytest.approx(wanted[name], rel=1e-6)


def test_what_no_applied_step_can_tell_is_not_told(tmp_path) -> None:
    model = WhatIfExplorer(run="growing_activations", init=32, factor=1.1, window=1024)
    model.draw({str(i): -40.0 for i in range(400)})
    assert "400 of 400 steps are skipped (recorded: 268). No step is applied. The policy collapses:" in model.summary()
    lost = load_run("growing_activations")
    replace(lost, loss=np.full_like(lost.loss, np.nan)).save(tmp_path / "lost.npz")
    model = WhatIfExplorer(run=str(tmp_path / "lost.npz"), factor=8.0)
    model.draw({"399": 30.0})
    assert "399 of 400 steps are skipped" in model.summary()
    assert "The scale is 0 in every applied step, and 0 % of" in model.summary()
    model = WhatIfExplorer(run="mnist_lenet", init=32, factor=1.1, window=1024)
    model.draw({str(i): -40.0 for i in range(400)})
    model.draw({"101": 33.0})  # this run holds the gradients of every second step
    assert "399 of 400 steps are skipped" in model.summary()
    assert "The gradients of the applied steps are not recorded." in model.summary()
    model.undraw()
    model.set(init=16, factor=2.5, window=976)
    assert "1 of 400 steps is skipped" in model.summary()


def test_a_scale_of_zero_under_a_drawn_ceiling_leaves_a_finite_room() -> None:
    for init in (8, 24, 32):
        model = WhatIfExplorer(run="growing_activations", init=init, factor=8.0, window=1)
        model.draw({"365": 0.0})
        assert not re.search(r"\b(inf|nan) bits|-0\.", model.summary())


def test_a_trace_of_ones_own_is_loaded_by_path(tmp_path) -> None:
    load_run("mlp_digits").before(50).save(tmp_path / "mine.npz")
    model = WhatIfExplorer(run=str(tmp_path / "mine.npz"))
    assert len(model.scale) == 50
    (tmp_path / "broken.npz").write_bytes(b"no trace")
    with pytest.raises(ValueError, match="damaged"):
        model.set(run=str(tmp_path / "broken.npz"))
    assert len(model.scale) == 50


def test_a_click_on_a_cell_shows_its_run_and_the_grid_follows() -> None:
    view = grid_view()
    model = view.explorer
    assert isinstance(model, GridExplorer)
    before = look(view)
    view.ask({"cell": 4 * 7})
    assert (model.factor, model.window) == (8.0, 5)
    assert look(view) != before
    alone = WhatIfExplorer(run=model.run, init=model.init, factor=8.0, window=5)
    assert model.lost(8.0, 5) == pytest.approx(alone.row["lost"])
    assert model.lost(*model.best()) == model.grid.min()


def test_the_loss_rule_runs_away_as_computed() -> None:
    model = NaiveRuleExplorer(exponent=0, loss=10.0, decay=0.0)
    assert model.end_of_learning() == (
        "it falls below 2^-24, the smallest float16",
        158,
    )  # 0.9**158 < 2**-24 <= 0.9**157
    model.set(exponent=16, loss=1.0)
    assert "overflow" in model.end_of_learning()[0]
    assert model.dynamic[-1] <= model.ceiling
