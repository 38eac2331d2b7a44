"""The models and views of the loss-scaling lessons, without a browser."""

from __future__ import annotations

import json
import math
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import look

from mpkit.check import verdict
from mpkit.explorers import scaling
from mpkit.explorers.scaling import (
    RUNS,
    SHOWN,
    DynamicsExplorer,
    LiveExplorer,
    SteeredScaler,
    SweepExplorer,
    exponent,
    recorded,
)
from mpkit.explorers.zoo import SITUATIONS, ZOO, NaiveExplorer, ZooExplorer, zoo_policy
from mpkit.plots.scaling import dynamics_scene, zoo_scene
from mpkit.policies import ScalePolicy, preset
from mpkit.replay import flushed
from mpkit.scalers import DynamicLossScaler
from mpkit.widgets.scaling import dynamics_view, live_view, naive_view, sweep_view, zoo_view

GOLDEN = Path(__file__).parent / "golden"  # real trainings by data/traces/make_traces.py
VIEWS = {"dynamics": dynamics_view, "sweep": sweep_view, "zoo": zoo_view, "naive": naive_view, "live": live_view}


@pytest.mark.parametrize("run", RUNS)
def test_the_policy_on_a_recorded_run_equals_the_scaler_class(run):
    model = DynamicsExplorer(run=run, init_exponent=24, scale_factor=3.0, scale_window=7, floor_exponent=0)
    scaler, seen, finite = DynamicLossScaler(2.0**24, 3, 7), [], []
    for top in model.ceiling:
        seen.append(float(scaler.scale_value))
        finite.append(seen[-1] <= top)
        scaler.adjust(torch.tensor(finite[-1]))
    assert model.scale.tolist() == seen
    assert model.finite.tolist() == finite
    assert model.skipped.tolist() == [i for i, ok in enumerate(finite) if not ok]


WHAT_IF = [
    (file.stem, i)
    for file in sorted((GOLDEN / "what_if").glob("*.json"))
    for i in range(len(json.loads(file.read_text())["runs"]))
]


@pytest.mark.parametrize(("name", "number"), WHAT_IF, ids=lambda value: str(value))
def test_a_what_if_agrees_with_a_real_training_under_that_policy(name, number):
    """Five policies were really trained in float16 on each run of the lesson; a replay never trained.

    Until a skipped step has made the weights of the two runs differ, the scales are equal. Afterwards the ceilings
    part by fractions of a bit, so that a probe succeeds in one run and fails in the other: bounds on totals and means.
    """
    real = json.loads((GOLDEN / "what_if" / f"{name}.json").read_text())["runs"][number]
    policy = real["policy"]
    model = DynamicsExplorer(
        run=name,
        init_exponent=policy["init"],
        scale_factor=policy["factor"],
        scale_window=policy["window"],
        floor_exponent=policy["floor"],
    )
    apart = np.abs(np.log2(model.scale) - real["exponent"][:SHOWN])
    alive = model.ceiling > 0
    ours, theirs = set(model.skipped[alive[model.skipped]]), {i for i in real["skipped"] if i < SHOWN and alive[i]}
    if (apart > 0).any():
        assert (apart > 0).argmax() > min(ours | theirs)
    assert abs(len(ours) - len(theirs)) <= 0.02 * SHOWN
    assert apart[alive].mean() <= 1 + 0.25 * math.log2(policy["factor"])
    both = alive.copy()
    both[list(ours | theirs)] = False
    zeros = np.array(real["zeros"][:SHOWN])
    assert np.abs(model.zeros - zeros)[both].mean() < 0.03
    assert abs(model.zeros[both][-20:].mean() - zeros[both][-20:].mean()) < 0.06


def test_there_is_a_real_training_for_every_run_that_is_shown():
    assert {name for name, _ in WHAT_IF} == set(RUNS)
    assert len(WHAT_IF) == 5 * len(RUNS)


def test_a_short_window_keeps_the_values_that_a_long_one_loses():
    """The claim of the lesson that was false once: zeros follow the scale, not the recording."""
    runs = {
        window: DynamicsExplorer(run="rare_outliers", init_exponent=16, scale_window=window, floor_exponent=-24)
        for window in (10, 400)
    }
    late = {window: np.nanmedian(model.zeros[-20:]) for window, model in runs.items()}
    assert late[400] > 0.9
    assert late[10] < 0.3
    assert runs[10].scale[-20:].min() >= 2.0**14 > 2.0**0 > runs[400].scale[-1]


def test_the_step_only_moves_along_the_trajectory():
    model = DynamicsExplorer()
    scale = model.scale
    model.step = 6
    assert model.scale is scale
    assert len(model.skipped) == 5  # from 2^24 down to the ceiling of about 2^19
    assert "Step 6" in model.summary()
    assert [row["step"] for row in model.table()] == [0, 1, 2, 3, 4]
    model.step = 0
    assert len(model.table()) == 1


def test_a_broken_model_keeps_the_scale_at_its_floor():
    model = DynamicsExplorer(run="growing_activations", floor_exponent=4)
    assert model.scale[-1] == 2.0**4
    assert not (model.ceiling[:129] < 0).any()
    assert (model.ceiling[129:] < 0).all()
    assert not model.finite[129:].any()
    assert "from step 129 on" in RUNS["growing_activations"]
    assert "no scale helps" in model.summary()
    assert np.isnan(model.zeros[129:]).all()
    assert "nan" not in model.summary()


def test_sweep_agrees_with_one_policy_at_a_time():
    sweep = SweepExplorer(run="mlp_digits", init_exponent=20)
    for row, column in ((0, 0), (2, 4), (6, 6)):
        one = DynamicsExplorer(
            run="mlp_digits",
            init_exponent=20,
            scale_factor=sweep.FACTORS[row],
            scale_window=sweep.WINDOWS[column],
        )
        assert sweep.grids["skipped"][row, column] == (~one.finite).sum()
        assert sweep.grids["headroom"][row, column] == pytest.approx(one.headroom[one.finite].mean())
        assert sweep.grids["zeros"][row, column] == pytest.approx(100 * one.zeros.mean(), abs=1e-6)
        kept = 1 - flushed(recorded("mlp_digits")[0], one.scale[:, None], "fp16")[one.finite, 0]
        assert sweep.grids["lost"][row, column] == pytest.approx(100 - 100 * one.finite.mean() * kept.mean(), abs=1e-6)
    for figure in sweep.FIGURES:
        sweep.figure = figure
        assert sweep.grids["lost"][sweep.best] == sweep.grids["lost"].min()
    assert f"{sweep.grids['skipped'][sweep.best]:.0f} of 400" in sweep.summary()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_zoo_draws_a_ceiling_only_where_there_is_one(situation):
    model = ZooExplorer(situation=situation)
    spec = zoo_scene(model).spec()
    named = {entry["label"] for entry in spec["legend"]}
    lines = [m for p in spec["panels"][1:] for m in p["marks"] if m["type"] == "line" and m["color"] == "overflow"]
    there = bool(np.isfinite(model.ceiling).any())
    assert there is (situation != "free")
    assert ("here it would overflow" in named) is there
    assert len(lines) == (len(ZOO) if there else 0)


def test_zoo_uses_every_framework_and_its_own_defaults():
    model = ZooExplorer(same_start=False, situation="free")
    assert model.scales[0, ZOO.index("megatron")] == 2.0**32
    assert model.scales[0, ZOO.index("torch")] == 2.0**16
    assert set(model.done.skipped) == {0}
    broken = ZooExplorer(situation="model")
    raised = {ZOO[i] for i in np.flatnonzero(broken.done.raised_at >= 0)}
    assert raised == {"deepspeed", "fairseq", "mpkit"}
    assert broken.ending(ZOO.index("deepspeed")) == "stops at step 79"
    assert zoo_policy("deepspeed", 7) == preset("deepspeed", scale_window=7)


def test_naive_rule_overflows_from_above_and_sinks_from_below():
    up, down = NaiveExplorer(start_exponent=16), NaiveExplorer(start_exponent=0)
    assert up.poisoned[0] == math.ceil(math.log(4, 1.1))  # from 2^16 over 2^18, a tenth a step
    assert down.naive[-1] < 2.0**-24
    assert (up.torch <= 2 * up.ceiling).all()


def test_steered_scaler_obeys_the_policy_of_the_moment():
    policy = [ScalePolicy(init_scale=16.0, growth_interval=2)]
    scaler = SteeredScaler(lambda: policy[0])
    scaler.adjust(torch.tensor(True))
    assert scaler.scale_value == 16
    scaler.adjust(torch.tensor(True))
    assert scaler.scale_value == 32
    policy[0] = ScalePolicy(init_scale=16.0, growth_interval=1, growth_factor=4.0)
    scaler.adjust(torch.tensor(True))
    assert scaler.scale_value == 128
    scaler.put(2.0)
    scaler.adjust(torch.tensor(False))
    assert scaler.scale_value == 1


def test_live_training_reacts_to_a_kick_and_to_stop():
    view = live_view()
    model = view.explorer
    model.steps = 30
    view.press("Train")
    model.wait(60)
    assert len(model.run.losses) == 30
    first = look(view)
    view.press("Scale x 2^10")
    assert "press Train first" in model.message
    view.press("Scale / 2^10")
    model.set(floor_exponent=8)
    assert look(view) != first
    assert "after 30 steps" in view.summary()
    view.press("Train")
    view.press("Stop")
    model.wait(60)
    assert not model.busy


def test_a_kick_is_answered_by_backing_off():
    model = LiveExplorer(scale_window=240)
    model.steps = 12
    model._scaler.put(2.0**16)
    work = model._training()
    next(work)
    model.busy = True
    model.kick_up()
    for _ in work:
        pass
    assert model.run.scales[:3] == [2.0**16, 2.0**16, 2.0**26]  # at the end of the step that was under way
    assert model.run.skipped[:3] == [2, 3, 4]


@pytest.mark.parametrize("name", VIEWS)
def test_every_control_at_its_ends_and_back(name):
    view = VIEWS[name]()
    model, first = view.explorer, look(view)
    pictures = {first}
    for control in model.controls:
        trait = model.traits()[control]
        values = getattr(trait, "values", None) or (
            [True, False] if not hasattr(trait, "min") else [trait.min, trait.max]
        )
        for value in values:
            with suppress(ValueError):  # a floor above the start is refused, and changes nothing
                model.set(**{control: value})
            assert view.summary() == model.summary()
            assert isinstance(view.data(), list)
            pictures.add(look(view))
        before = model.state()
        with pytest.raises(ValueError, match=control):
            model.set(**{control: "no such value"})
        assert model.state() == before
        model.reset()
        assert look(view) == first
    assert len(pictures) >= 3
    assert isinstance(view.data(), list)


def test_two_threads_leave_a_picture_of_the_last_settings():
    view = dynamics_view()

    def drag(values: range) -> None:
        for value in values:
            view.explorer.set(scale_window=value)

    threads = [threading.Thread(target=drag, args=(r,)) for r in (range(20, 60, 4), range(100, 140, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(view) == look(dynamics_view(**view.explorer.state()))


def test_exponents_in_words():
    assert [exponent(v) for v in (1024.0, 1000.0, 0.0, math.inf, 2.0**-14)] == ["2^10", "2^9.966", "0", "inf", "2^-14"]
    assert set(SITUATIONS) == {"drop", "outliers", "fixed", "model", "free"}


@pytest.mark.parametrize("lesson", ["05", "08"])
def test_questions_know_their_answers(lesson):
    from importlib import import_module

    questions = import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS
    assert len(questions) >= 3
    for name, question in questions.items():
        truth = question.truth()
        assert verdict(lesson, name, truth)[0] is True
        assert "{" not in verdict(lesson, name, truth)[1]
        assert verdict(lesson, name, "nothing of the kind")[0] is False
        for wrong, _ in question.hints:
            if not callable(wrong):
                assert verdict(lesson, name, wrong)[0] is False
        assert verdict(lesson, name)[1].startswith("Question: ")


def test_the_title_of_a_held_scale_says_so():
    assert ["the scale is held" in look(dynamics_view(hold=hold)) for hold in (False, True)] == [False, True]


def test_an_interrupt_between_two_results_leaves_those_of_one_setting(monkeypatch):
    """What was computed for a setting is not taken for a whole one when the one before comes back."""
    explorer, calm = DynamicsExplorer(), DynamicsExplorer()
    whole = scaling.zero_share

    def interrupted(*given):
        monkeypatch.setattr(scaling, "zero_share", whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "zero_share", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explorer.set(scale_window=7)
    assert explorer.state() == calm.state()
    assert explorer.scale.tolist() == calm.scale.tolist()


@pytest.mark.parametrize("run", ["mlp_digits", "gpt_sums"])
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_gradients_that_the_format_holds_are_in_the_picture_at_every_scale(run, fmt):
    """In bfloat16 a scale that grows fast reached 2^124, and the histogram was empty: its axis ended at 2^40."""
    model = DynamicsExplorer(run=run, fmt=fmt, scale_factor=16.0, scale_window=2)
    part = model.trace.gradients
    rows = np.searchsorted(model.trace.rows, np.arange(len(model.scale)), "right") - 1
    last = np.array([np.flatnonzero(counts)[-1] for counts in part.total()])[rows] + part.lowest
    end = dynamics_scene(model).spec()["panels"][1]["y"]["hi"]
    assert ((last + np.log2(model.scale))[model.finite] < end).all()
