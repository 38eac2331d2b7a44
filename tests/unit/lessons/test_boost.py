"""Lesson 07: what levels switch on and cost, from the stored benchmark and by hand; its answers a second way."""

import json
from statistics import median

import numpy as np
import pytest

from mpkit.boost import AutoBoost, GradientFreeze, LessBN
from mpkit.data import data_dir
from mpkit.lessons.boost import COMPARED, PARTS, first_steps, full_share, levels, measured, preset
from mpkit.networks import resnet34
from mpkit.view.words import words

WORDS = words("boost")
ROWS = json.loads((data_dir() / "benchmarks" / "boost.json").read_text())
RATIO = {row["contender"]: row["ratio"] for row in ROWS["speed"]}


@pytest.mark.parametrize(("full", "kind"), [(0.0, 0), (0.05, 0), (0.15, 0), (0.7, 0), (0.0, 1), (0.7, 1)])
def test_full_steps_are_those_of_the_strategy(full, kind):
    boost = AutoBoost("O1", {"grad_freeze": {"freeze_p": full, "freeze_type": kind}})
    steps = GradientFreeze(10, kind, full, 4000).generate_freeze_index_sequence(10, kind, full, 4000)
    steps = steps[: steps.index(9) + 1] if kind == 0 else steps  # a cycle
    assert full_share(boost) == pytest.approx(steps.count(0) / len(steps), abs=0.02 if kind else 1e-12)


@pytest.mark.parametrize(
    ("less_bn", "freeze", "name"),
    [(False, False, "none"), (True, False, "less_bn"), (False, True, "freezing"), (True, True, "O1")],
)
def test_a_speed_is_the_measured_one(less_bn, freeze, name):
    seen = levels(mode="manual", less_bn=less_bn, grad_freeze=freeze).numbers
    assert (seen["trained"], seen["removed"], seen["frozen"] > 0) == (name, 11 * less_bn, freeze)
    assert seen["speedup"] == pytest.approx((RATIO | {"none": 1.0})[name])


def test_what_the_lesson_says_of_levels():
    o1, o2 = levels(level="O1").numbers, levels(level="O2").numbers
    assert o2["active"] == o1["active"] == ("less_bn", "grad_freeze")
    assert [what for what, _ in o2["inactive"]] == ["adasum"]
    assert WORDS["predict"]["alone"]["right"] == "b"
    assert o2["speedup"] == RATIO["O2"]
    assert levels(level="O0").numbers["active"] == levels(mode="disable_all").numbers["active"] == ()
    assert RATIO["O1 tuned"] > RATIO["O1"] > 1
    flags = {level: sum(AutoBoost(level).flags.values()) for level in ("O0", "O1", "O2")}
    assert flags == {"O0": 0, "O1": 2, "O2": 3}
    everything = AutoBoost("O0", {"boost": {"mode": "enable_all"}}).active
    assert {"dim_reduce", "less_bn"} & {*everything} == {"dim_reduce"}


def test_speed_and_accuracy_are_only_stated_where_they_were_measured():
    unknown = levels(mode="enable_all")  # runs dim_reduce
    assert unknown.sentence.count("was not measured") == 2
    assert np.isnan(unknown.numbers["speedup"])
    assert "this: " not in json.dumps(unknown.sheet.panels[0].marks, default=str)
    seeds = {r["configuration"]: r["accuracy_percent"] for r in reversed(ROWS["accuracy"]) if "digits" in r["data"]}
    for name, settings in (("O1", {}), ("O1 tuned", {"mode": "tuned"})):
        mean, spread = np.mean(seeds[name]), np.std(seeds[name], ddof=1)
        difference = mean - np.mean(seeds["none"])
        told = f"{mean:.1f} ± {spread:.1f} %, {difference:+.1f} points against no boost (mean ± one standard deviation"
        assert told in levels(**settings).sentence


def test_a_pressed_square_is_compared_step_by_step():
    view = levels()
    squares = next(m for m in view.sheet.panels[0].marks if m.get("sets"))
    assert [s["compare"] for s in squares["sets"]] == sorted(COMPARED, key=lambda n: RATIO[n])
    for name, rows in (("O1 tuned", ("none", "O1 tuned")), ("none", ("none", "O1"))):
        view.set(**next(s for s in squares["sets"] if s["compare"] == name))
        np.testing.assert_array_equal(view.numbers["steps"], [first_steps(row) for row in rows])


def test_steps_are_taken_apart():
    none, o1, tuned = map(first_steps, ("none", "O1", "O1 tuned"))
    indices = [0] * 9 + list(range(1, 10))
    np.testing.assert_allclose(tuned.sum(1), [1 / RATIO[f"O1 index {v}"] for v in indices])
    part = list(PARTS).index
    assert o1[0, part("batch_norm")] < 0.8 * none[0, part("batch_norm")]  # 11 of 20 BatchNorms are gone
    assert tuned[17, part("backward")] < 0.2 * tuned[0, part("backward")]  # nine of ten groups stand still


def test_the_stored_benchmark_names_its_versions_and_has_enough_seeds():
    assert measured()["meta"]["made_by"].startswith("python -m mpkit.bench")
    assert any("torch" in key for key in measured()["meta"])
    assert all(len(row["accuracy_percent"]) >= 5 for row in ROWS["accuracy"])


def test_promises_against_the_noise_as_the_lesson_judges_them():
    quartiles = {row["contender"]: row["quartiles"] for row in ROWS["speed"]}
    assert quartiles["O1"][0] < 1.2 < quartiles["O1"][1]
    assert quartiles["O2"][1] < 1.3


def test_answers_a_second_way():
    truth = {name: q["truth"] for name, q in WORDS["question"].items()}
    switches = {"mode": "manual", "less_bn": True, "adasum": True, "grad_accumulation": True}
    config = {"boost": switches, "grad_accumulation": {"grad_accumulation_step": 4}}
    assert truth["active"] == sorted(AutoBoost("O0", config).active)
    assert truth["removed"] == len(LessBN(resnet34(width=4)).report.removed)
    off = AutoBoost("O1", {"boost": {"mode": "auto", "grad_freeze": False}})
    assert truth["mode"] is ("grad_freeze" in off.active)
    assert truth["saved"] == pytest.approx(1 - 1 / RATIO["O1 tuned"])
    assert preset("O1").active == off.active


def test_cases_of_the_task():
    for (without, boosted), expected in WORDS["task"]["cases"]:
        assert median(a / b for a, b in zip(without, boosted)) == expected
