"""*Your own experiment*: runs, the verdicts of the recorded ones by Student's t, the answers a second way."""

import math
import statistics
from functools import partial

import numpy as np
import pytest

from mpkit.experiment.statistics import more_seeds, paired
from mpkit.lessons import experiments
from mpkit.lessons.experiments import CELLS, NETWORKS, own_experiment, recorded
from mpkit.view.sheet import Sheet
from mpkit.view.words import words

WORDS = words("experiments")


def fake(seed, level, dtype, scaler, boost):
    """A run in no time: the accuracy falls with the level."""
    return {"accuracy": 90.0 - 3 * (level == "O2") + seed}


def without(*names):
    return [i for i, name in enumerate(CELLS) if name not in names]


TWO = without("float32", "fp16 O2")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Every network is trained in no time, in a folder of the test's own."""
    for name in NETWORKS:
        monkeypatch.setitem(NETWORKS, name, fake)
    monkeypatch.setattr(experiments, "own_folder", lambda: tmp_path)


def ran(view):
    view.press("Run")
    view.wait(600)
    assert not view.message
    return view


@pytest.mark.parametrize("count", [1, 3, 10])
def test_means_and_verdicts_of_the_recorded_runs(count):
    view, table = own_experiment(recorded_seeds=count), recorded().first(count).summary("accuracy")
    for name in CELLS:
        mean = np.mean([recorded().values(name, "accuracy")[seed] for seed in range(count)])
        assert f"{name} {mean:.1f}, {table['verdict'][name]}" in view.sentence


@pytest.mark.usefixtures("quick")
def test_runs_are_made_once_and_what_is_missing_is_told(tmp_path):
    view = own_experiment(left_out=TWO, seeds=2)
    assert view.numbers["left"] == 4
    ran(view)
    assert (view.numbers["left"], "Run" in view.sheet.buttons) == (0, False)  # nothing is offered that is made already
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npz")}
    view.set(seeds=3)
    assert view.numbers["left"] == 2
    ran(view)
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npz")}
    assert (len(after), before.items() <= after.items()) == (6, True)
    assert "fp16 O2 88.0, worse" in view.sentence  # 87, 88, 89
    view.set(seeds=2)
    assert "fp16 O2 87.5" in view.sentence  # the first two
    view.set(network="LeNet-5", seeds=3)  # it has runs of its own
    assert view.numbers["left"] == 6
    assert "your runs: LeNet-5" in ran(view).sentence
    view.press("Show recorded runs")
    assert "recorded: perceptron" in view.sentence
    for again in (view, own_experiment(network="LeNet-5", left_out=TWO, seeds=3)):  # the cell run again
        assert (again.numbers["left"], [*again.sheet.buttons]) == (0, ["Show your runs"])
        again.press("Show your runs")
        again.wait(600)
        assert "your runs: LeNet-5" in again.sentence
        assert [*again.sheet.buttons] == ["Show recorded runs"]
    view.set(left_out=[], seeds=1)
    assert view.numbers["left"] == len(CELLS) - 2
    assert len({*tmp_path.rglob("*.npz")}) == 12


@pytest.mark.usefixtures("quick")
def test_a_stopped_experiment_keeps_what_is_made_and_goes_on():
    view = own_experiment(left_out=TWO, seeds=3)
    view.listeners.append(partial(view.press, "Stop"))  # at once: the run that goes on is finished all the same
    for left in (5, 4):
        ran(view)
        assert view.numbers["left"] == left


def test_a_press_on_a_row_chooses_its_cell_and_two_cells_are_needed():
    view = own_experiment()
    rows = next(m for p in view.sheet.panels for m in p.marks if m.get("sets"))
    view.set(**rows["sets"][3])
    assert [row["setting"] for row in view.table()] == [name for name in CELLS if name != "bf16 O2"]
    for wrong in ([0], without("float32")):
        with pytest.raises(ValueError, match="choose float32"):
            view.set(left_out=wrong)
    rows = next(m for p in view.sheet.panels for m in p.marks if m.get("sets"))
    view.set(**rows["sets"][3])
    assert view.params["left_out"] == []


def test_while_runs_are_made_nobody_is_asked_to_press_run():
    see = Sheet(busy=True)
    own_experiment.draw(see, results=recorded(), made="perceptron")
    assert "Press Run" not in see.sentence(0)
    assert [*see.buttons] == ["Run"]  # nothing that the next run would undo


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains_a_cell(name):
    result = NETWORKS[name].func(*NETWORKS[name].args, **{**NETWORKS[name].keywords, "epochs": 1})
    assert result["seconds_per_step"] > 0


def test_what_the_lesson_says_of_the_recorded_runs():
    table = recorded().summary("accuracy")
    assert [cell for cell in table.index if table["verdict"][cell] in ("better", "worse")] == ["e5m1 O2, scaled"]
    assert WORDS["predict"]["differs"]["right"] == "b"
    own, base = (recorded().values(cell, "accuracy") for cell in ("bf16 O2", "float32"))
    assert min(own[s] - base[s] for s in own) < -1
    assert max(own[s] - base[s] for s in own) > 1
    curves = [recorded().series(c, "accuracy_curve", s) for c in CELLS for s in recorded().seeds]
    assert paired([float(curve.max() - curve[-1]) for curve in curves]).low > 0


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    verdicts = recorded().summary("final_loss")["verdict"]
    assert asked["better"] == [cell for cell in verdicts.index if verdicts[cell] == "better"]
    wrong = WORDS["question"]["better"]["hints"][0][0]
    assert wrong == [cell for cell in verdicts.index if verdicts[cell] == "worse"]
    assert asked["half"] == round((more_seeds(0.1, 1.0, 2) + 2) / (more_seeds(0.2, 1.0, 2) + 2))
    assert (asked["chance"], asked["interval"]) == (pytest.approx(1 - 0.95**20), "not distinguishable")
    for (base, other), ends in WORDS["task"]["cases"]:
        gaps = [b - a for a, b in zip(base, other)]
        half = 2.7764 * statistics.stdev(gaps) / math.sqrt(5)
        assert ends == pytest.approx([statistics.mean(gaps) - half, statistics.mean(gaps) + half], rel=1e-3)
