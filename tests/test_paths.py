"""Whole paths through the views: whatever was done before, a view shows what a new one in the same settings shows."""

import math
import random

import pytest
from scenes import look

from mpkit.explorers.evidence import TRACES
from mpkit.widgets import adasum, dim_reduce, evidence, group_scale, recipes
from mpkit.widgets.boost import boost_view, centralize_view, freeze_view, less_bn_view
from mpkit.widgets.casting import log_softmax_view
from mpkit.widgets.drawing import draw_view, gap_view, total_view
from mpkit.widgets.formats import bits_view, gradients_view, ranges_view
from mpkit.widgets.optimizers import adam_state_view, decay_view, schedules_view
from mpkit.widgets.rounding import modes_view, staircase_view, updates_view
from mpkit.widgets.scaling import dynamics_view, live_view, naive_view, sweep_view, zoo_view
from mpkit.widgets.start import start_view
from mpkit.widgets.training import order_view, step_view, underflow_view

DRAWN = [draw_view, gap_view, total_view]
FORMATS = [bits_view, ranges_view, gradients_view, modes_view, staircase_view, updates_view, log_softmax_view]
SCALES = [underflow_view, dynamics_view, sweep_view, zoo_view, naive_view]
STEPS = [step_view, order_view, schedules_view, decay_view, adam_state_view]
BOOST = [boost_view, freeze_view, less_bn_view, centralize_view]
LATER = [
    make
    for module in (adasum, dim_reduce, evidence, group_scale, recipes)
    for name, make in vars(module).items()
    if name.endswith("_view") and make.__module__ == module.__name__
]
VIEWS = [*FORMATS, *SCALES, *STEPS, *BOOST, *DRAWN, *LATER]
TYPED = [
    "0.1",
    "-2",
    "65519.9",
    "2^-25",
    "-0",
    "0",
    "inf",
    "nan",
    "1e-400",
    "1/3",
    "abc",
    "",
    "448",
    "17 18 18 17 16 17",
]
TYPED += [*TRACES, "no run", "-20 -18 -15 -12 -9 -6 -3 0 3", "1000 1500 2000 2500 3000 3500 4000"]


def moved(rng, view):
    """Something that a reader may do: a control, its ends and beyond, a gesture, a button, the step."""
    explorer, kind = view.explorer, rng.random()
    if kind < 0.1:
        return {"reset": True}
    if kind < 0.2 and explorer.actions:
        return {rng.choice(list(explorer.actions.values())): True}
    if kind < 0.4 and explorer.gestures:
        first = rng.randrange(100)
        at = {
            "toggle": rng.randrange(33),
            "compare_with": rng.choice(["none", "less_bn", "freezing", "O1", "O1 tuned"]),
            "draw": {str(first + i): rng.uniform(-40, 50) for i in range(3)},
            "drag_b": [0, [rng.uniform(-2, 2), rng.uniform(-2, 2)]],
            "pair": rng.randrange(12),
            "cell": rng.randrange(40),
        }
        name = rng.choice(explorer.gestures)
        return {name: at.get(name, [view.index, rng.uniform(-160, 140)])}
    name = rng.choice(explorer.controls)
    trait = explorer.traits()[name]
    values = getattr(trait, "values", None) or (TYPED if isinstance(trait.default_value, str) else (True, False))
    if hasattr(trait, "min"):
        inside = type(trait.default_value)(rng.uniform(trait.min, trait.max))
        values = [trait.min, trait.max, trait.default_value, inside, inside, 10 * trait.max, trait.min - 5]
    return {name: rng.choice(list(values))}


def anew(make, view):
    """A new view in the settings of another one, with what was drawn there by hand."""
    other, explorer = make(), view.explorer
    if hasattr(explorer, "guess"):
        other.explorer.set(**explorer.state())
        other.explorer.guess, other.explorer.revealed = explorer.guess.copy(), explorer.revealed
    else:
        vars(other.explorer).update(_drawn_on=getattr(explorer, "run", ""))  # the ceiling belongs to this run
        other.explorer._change(explorer.state(), **{name: getattr(explorer, name) for name in explorer.fresh})
    other.index = view.index
    other._drawn = view._drawn = None  # where the step is a control, the page places its handle by itself
    other.redraw()
    view.redraw()
    return other


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_a_view_shows_what_a_new_one_in_its_settings_shows(make):
    rng, view, done = random.Random(0), make(), []
    if "index" in view.spec:
        view.index = 0  # where a page-only step once counted as none
    for _ in range(16):
        if "index" in view.spec and rng.random() < 0.15:
            view.index = rng.choice([0, rng.randrange(view.spec["index"]["count"])])
        before, step, revision = view.explorer.message, view.index, view.explorer.revision
        done.append(moved(rng, view))
        view.ask(done[-1])
        if "reset" not in done[-1] and view._step is None:
            assert view.index == step, done
        if view.explorer.revision > revision:
            assert view.explorer.message == "", (done, before)
        other = anew(make, view)
        assert look(view) == look(other), done
        assert (view.sentence[0], str(view.data())) == (other.sentence[0], str(other.data())), done
        assert {k: v for k, v in view.state.items() if k != "tokens"} == {
            k: v for k, v in other.state.items() if k != "tokens"
        }, done


@pytest.mark.parametrize("make", DRAWN, ids=lambda make: make.__name__)
def test_what_was_refused_is_forgotten_with_the_next_stroke(make):
    view = make()
    view.ask({"typed": "abc"})
    assert "got 'abc'" in view.sentence[1]
    view.ask({"draw": {"50": 17.0}})
    assert view.sentence[1] == ""
    view.ask({"typed": "abc"})
    view.press("Show what happened")
    assert view.sentence[1] == ""


@pytest.mark.parametrize("make", [start_view, live_view], ids=lambda make: make.__name__)
def test_a_refused_press_is_forgotten_when_the_training_has_ended(make):
    view = make()
    view.explorer.steps = 30
    view.press("Train")
    view.press("Train")
    assert "press Stop first" in view.explorer.message
    view.explorer.wait(60)
    assert view.sentence[1] == view.explorer.message == ""
    view.press("Train")
    view.press("Train")
    view.press("Stop")
    view.explorer.wait(60)
    assert view.sentence[1] == view.explorer.message == ""
    assert math.isfinite(view.explorer.run.losses[-1])
