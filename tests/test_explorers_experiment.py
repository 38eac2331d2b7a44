"""The model and view of an experiment of one's own, without a browser."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scenes import look

from mpkit.explorers.own_experiment import CELLS, NETWORKS, OwnExperimentExplorer, recorded
from mpkit.plots.experiment import own_experiment_scene
from mpkit.widgets.experiment import own_experiment_view


def fake(seed, level, dtype, scaler, boost):
    """A run in no time: the accuracy falls with the level."""
    return {"accuracy": 90.0 - 3 * (level == "O2") + seed, "loss": [2.0, 1.0 + seed + (level == "O2"), 0.5]}


def only(*names, **params):
    """Parameters that tick these cells alone."""
    return {f"cell_{i}": name in names for i, name in enumerate(CELLS)} | params


def test_it_opens_with_the_recorded_runs_and_their_verdicts():
    model = OwnExperimentExplorer()
    assert "recorded: perceptron, 10 seeds" in model.summary()
    assert [row.name for row in model.rows] == list(CELLS) == recorded().labels
    assert all(len(row.values) == 10 for row in model.rows)
    verdicts = recorded().summary("accuracy")["verdict"]
    assert f"{model.rows[5].interval[1]:.1f}, {verdicts['e5m1 O2, scaled']}" in model.summary()
    assert [len(run) for run in model.losses] == [144, 144]
    assert model.table()[0]["runs"] == 10


def test_runs_arrive_stop_and_go_on():
    model = OwnExperimentExplorer(run=fake, **only("float32", "fp16 O2", other="fp16 O2", seeds=3))
    seen = []

    def watch(_):
        if model.results is not None:
            seen.append(len(model.results))
            if len(model.results) == 2:
                model.stop()

    model.observe(watch, "revision")
    model.run()
    model.wait(60)
    assert model.results.stopped
    assert len(model.results) == 2
    model.unobserve_all("revision")
    model.run()
    model.wait(60)
    assert len(model.results) == 6
    assert not model.results.stopped
    assert "fp16 O2 88.0, worse" in model.summary()  # 87, 88, 89
    model.set(seed=2, step=2)
    assert "Loss at step 2 from seed 2: float32 3.000, fp16 O2 4.000." in model.summary()
    model.step = 100  # as the longer recorded runs allow
    assert f"Loss at step {len(model.losses[0])} from seed 2: " in model.summary()
    model.show_recorded()
    assert "recorded" in model.summary()


def test_more_seeds_run_only_what_is_missing():
    model = OwnExperimentExplorer(run=fake, **only("float32", "fp16 O2", seeds=2))
    for seeds, expected in ((2, 4), (3, 6)):
        model.set(seeds=seeds)
        before = {p.name: p.stat().st_mtime_ns for p in Path(model._folder).glob("*/*.npz")}
        model.run()
        model.wait(60)
        after = {p.name: p.stat().st_mtime_ns for p in Path(model._folder).glob("*/*.npz")}
        assert len(after) == expected
        assert before.items() <= after.items()


def test_runs_are_told_under_the_network_that_made_them(monkeypatch):
    """Also after another network is chosen; each has runs of its own, which are made once."""
    for name in ("perceptron", "LeNet-5"):
        monkeypatch.setitem(NETWORKS, name, fake)
    model = OwnExperimentExplorer(**only("float32", "fp16 O2", other="fp16 O2", seeds=1))
    assert model.summary().endswith("Run would now make the missing runs of perceptron from 1 seed.")
    for name in ("perceptron", "LeNet-5", "perceptron"):
        before = model.title
        model.network = name
        assert model.title == before
        model.run()
        model.wait(60)
        assert model.title == f"your runs: {name}"
        assert len(model.results) == 2
    own = OwnExperimentExplorer(run=fake, **only("float32", "fp16 O2", seeds=2))
    assert own.summary().endswith("the missing runs of your network from 2 seeds.")
    assert "network" in own.idle()
    own.run()
    own.wait(60)
    assert own.title == "your runs: your network"


def test_the_title_counts_the_runs_that_are_compared():
    model = OwnExperimentExplorer(one="float32", other="bf16 O2", recorded_seeds=2)
    for settings, title, told in (
        ({}, "two runs from seed 0", r"Loss at step 1 from seed 0: float32 \S+, bf16 O2 \S+\. Run"),
        ({"other": "float32"}, "one run from seed 0", r"Loss at step 1 from seed 0: float32 [\d.]+\. Run"),
        ({"seed": 5}, "no run from seed 5", r"From seed 5 there is no run of float32\. Run"),
        ({"other": "bf16 O2"}, "no run from seed 5", r"From seed 5 there is no run of float32 or bf16 O2\. Run"),
    ):
        model.set(**settings)
        assert own_experiment_scene(model).panels[1].given["title"] == title
        assert re.search(told, model.summary())
        assert "  " not in model.summary()


def test_a_click_on_a_row_chooses_its_cell_or_leaves_it_out():
    view = own_experiment_view()
    first = look(view)
    view.ask({"choose": 3})
    assert [row.name for row in view.explorer.rows] == [name for name in CELLS if name != "bf16 O2"]
    assert look(view) != first
    view.ask({"choose": 0})
    assert "choose float32" in view.sentence[1]
    view.ask({"choose": 3})
    assert look(view) == first
    assert [c["name"] for c in view.controls if c["name"].startswith("cell")] == []


def test_float32_and_one_other_cell_are_needed():
    model = OwnExperimentExplorer()
    with pytest.raises(ValueError, match="choose float32"):
        model.cell_0 = False
    assert model.cell_0
    with pytest.raises(ValueError, match="at least one other cell"):
        model.set(**only("float32"))


def test_a_run_that_fails_is_told():
    model = OwnExperimentExplorer(run=lambda seed, **cell: 1 / 0, **only("float32", "fp16 O2", seeds=1))
    model.run()
    model.wait(60)
    assert "ZeroDivisionError" in model.summary()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains_a_cell(name):
    result = NETWORKS[name].func(*NETWORKS[name].args, **{**NETWORKS[name].keywords, "epochs": 1})
    assert result["seconds_per_step"] > 0


def test_the_view_draws_every_state():
    view = own_experiment_view(run=fake, **only("float32", "fp16 O2", other="fp16 O2", seeds=2))
    first = look(view)
    view.explorer.set(step=9)
    assert view.summary() != repr(own_experiment_view())
    view.explorer.run()
    view.explorer.wait(60)
    assert look(view) != first
    assert view.data()[1]["accuracy, %"] == 87.5
    view.explorer.set(other="freezing")  # not among the cells that ran
    assert len(view.explorer.losses[1]) == 0
    assert np.isfinite(view.explorer.rows[0].interval[1])
    assert look(view)


def test_a_view_answers_while_neither_of_the_two_runs_is_there():
    """The first run that arrives may be of a third cell: then there is no step to show."""
    view = own_experiment_view(run=fake, **only("float32", "fp16 O2", seeds=1))
    view.ask({"one": "freezing"})
    view.ask({"other": "centralized"})
    view.explorer.run()
    view.explorer.wait(60)
    assert "index" not in view.spec
    assert not view.state["busy"]
    view.ask({"table": True})
    assert [row["runs"] for row in view.rows] == [1, 1]
    view.ask({"reset": True})
    assert view.spec["index"]["count"] == 3


def strange(seed, level, dtype, scaler, boost):
    """Runs that end in every way: a number, no number, an error in one seed or in all; losses that are no numbers."""
    if boost == "grad_freeze" or (dtype == "e5m2" and seed == 1):
        raise RuntimeError("no layer\nto freeze")
    if dtype == "e5m1":
        return {"accuracy": math.nan, "loss": [2.0, math.inf, math.nan]}
    if boost == "grad_centralization":
        return {"accuracy": 50.0, "loss": [math.nan] * 3}
    return {"accuracy": 80.0 + seed + (level == "O2"), "loss": [0.0] * 3 if dtype == "bf16" else [2.0, -1.0, -3.0]}


def test_each_cell_is_told_with_what_became_of_its_runs():
    view = own_experiment_view(run=strange, seeds=3)
    view.ask({"choose": 7})
    view.explorer.run()
    view.explorer.wait(60)
    view.ask({"choose": 7})
    for told in (
        "float32 81.0, baseline; fp16 O2 82.0, better;",
        "e5m2 O2, scaled 82.0, better (1 of 3 runs failed);",
        "e5m1 O2, scaled 3 of 3 runs gave no finite number; freezing 3 of 3 runs failed;",
        "centralized not among these runs.",
    ):
        assert told in view.summary(), view.summary()
    view.explorer.run()
    view.explorer.wait(60)
    assert "centralized 50.0, worse." in view.summary()
    named = OwnExperimentExplorer(run=lambda seed, **cell: {"score": 1.0}, **only("float32", "fp16 O2", seeds=1))
    named.run()
    named.wait(60)
    assert named.stored() == "your runs: your network: no run has returned an accuracy."


def test_losses_that_are_no_numbers_are_drawn_and_told():
    view = own_experiment_view(run=strange, seeds=1)
    view.explorer.run()
    view.explorer.wait(60)
    for one, other in itertools.product(CELLS, CELLS):
        view.explorer.set(one=one, other=other)
        view.explorer.step = 2
        assert one != other or view.png()
        assert "nan" not in view.summary()
        assert "inf" not in view.summary().replace("finite", "")
        axis = view.spec["panels"][1]["y"]
        for run in view.explorer.losses:
            assert all(axis["lo"] <= loss <= axis["hi"] for loss in run if math.isfinite(loss))
    view.explorer.set(one="e5m1 O2, scaled", other="float32")
    assert ": e5m1 O2, scaled not finite, float32 -1.000." in view.summary()
