"""Which setting is better: what an experiment concludes, beside Student's table, hand-worked numbers and many studies.

A run is a function of a seed that looks its number up, so all that is tested is what is made of the numbers; then a
training in its place, and an experiment that is killed.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from support import ROOT
from torch import nn

pytest.importorskip("joblib")
pytest.importorskip("pandas")

from mpkit.experiment import experiment, train

# Student's t, upper 2.5 % points: Fisher and Yates 1938, table III (as every textbook prints it)
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045}


def summary(values: dict[str, list[float]], **options):
    """What is said of these numbers: cell -> one number a seed, the first cell being the baseline."""
    cells, seeds = {name: {"name": name} for name in values}, len(next(iter(values.values())))

    def run(seed, name):
        return {"accuracy": values[name][seed]}

    return experiment(run, cells, seeds=seeds, progress=False, n_jobs=1).summary("accuracy", **options)


@pytest.mark.parametrize("df", TABLE)
def test_an_interval_is_students(df):
    draw = random.Random(df)
    differences = [draw.gauss(1.0, 2.0) for _ in range(df + 1)]
    row = summary({"base": [50.0] * (df + 1), "other": [50 + d for d in differences]}).loc["other"]
    mean, spread = np.mean(differences), np.std(differences, ddof=1)
    half = TABLE[df] * spread / math.sqrt(df + 1)
    assert (row["n"], row["difference"]) == (df + 1, pytest.approx(mean))
    assert [row["low"], row["high"]] == pytest.approx([mean - half, mean + half], abs=6e-4 * spread)


def test_a_paired_difference_by_hand():
    row = summary({"base": [0.0] * 5, "other": [1.0, 2.0, 3.0, 4.0, 5.0]}).loc["other"]
    # t = 3 / sqrt(1/2) = 4.2426 with 4 degrees: p = 1 - s(1 + c^2/2), s = t / sqrt(4 + t^2) = sqrt(18/22), c^2 = 4/22
    assert row["p"] == pytest.approx(1 - math.sqrt(18 / 22) * (1 + 2 / 22))
    assert row["spread"] == pytest.approx(math.sqrt(2.5))
    assert row["low"] == pytest.approx(3 - 2.7764451 * math.sqrt(0.5))


def test_several_comparisons_are_corrected_as_holm_does():
    draw = random.Random(0)
    values = {"base": [draw.gauss(0, 1) for _ in range(6)]}
    values |= {
        name: [v + draw.gauss(shift, 0.5) for v in values["base"]] for name, shift in zip("abcd", (0, 0.5, 1, 2))
    }
    table = summary(values).loc[list("abcd")]
    want, worst = {}, 0.0
    for rank, name in enumerate(table["p"].sort_values().index):
        worst = want[name] = max(worst, min(1.0, (4 - rank) * table["p"][name]))
    assert table["p_holm"].to_dict() == pytest.approx(want)


@pytest.mark.parametrize("baseline", [1, "base"])
def test_the_baseline_is_the_cell_that_is_named(baseline):
    def run(seed, shift):
        return {"accuracy": 50.0 + shift + seed}

    cells = {"other": {"shift": 2}, "base": {"shift": 0}, "third": {"shift": 5}}
    found = experiment(run, cells, seeds=2, baseline=baseline, progress=False, n_jobs=1).summary("accuracy")
    assert found["difference"].drop("base").to_dict() == {"other": 2.0, "third": 5.0}


VERDICTS = {
    "better": [92.0, 93.1, 93.9, 95.0],
    "worse": [88.0, 88.9, 90.1, 91.0],
    "noisy": [95.0, 87.0, 97.0, 90.0],
    "same": [90.0, 91.0, 92.0, 93.0],
    "lost": [90.5, math.nan, math.inf, 93.6],
    "gone": [math.nan] * 4,
}


def test_a_verdict_needs_evidence():
    table = summary({"base": [90.0, 91.0, 92.0, 93.0], **VERDICTS})
    unclear = dict.fromkeys(("noisy", "same", "lost"), "not distinguishable")
    said = {"base": "baseline", "better": "better", "worse": "worse", "gone": "no number", **unclear}
    assert table["verdict"].to_dict() == said
    assert table["n"].to_dict() == dict.fromkeys(said, 4) | {"lost": 2, "gone": 0}
    turned = summary({"base": [90.0, 91.0, 92.0, 93.0], **VERDICTS}, higher_is_better=False)["verdict"]
    assert (turned["better"], turned["worse"]) == ("worse", "better")


def test_two_equal_settings_are_told_apart_in_5_of_100_studies_at_most():
    draw, studies = random.Random(1), 60
    values = [{n: [draw.gauss(0, 1) for _ in range(4)] for n in ("base", "other")} for _ in range(studies)]
    held = sum(bool(r["low"] <= 0 <= r["high"]) for r in (summary(v).loc["other"] for v in values))
    assert held >= studies * 0.95 - 3 * math.sqrt(studies * 0.95 * 0.05)


# --- runs


def noted(seed, x, folder):
    with open(os.path.join(folder, f"{x}-{seed}-{time.time_ns()}"), "x"):
        return {"y": 10 * x + seed}


def test_what_is_finished_is_not_run_again(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for more in ([1, 2], [1, 2, 3]):
        grid = {"x": more, "folder": [str(notes)]}
        results = experiment(noted, grid, seeds=2, folder=tmp_path / "cells", n_jobs=1, progress=False)
        assert len(list(notes.iterdir())) == 2 * len(more)
    assert sorted(results.frame["y"]) == [10.0, 11.0, 20.0, 21.0, 30.0, 31.0]


KILLED = """
import sys, time
from pathlib import Path
from mpkit.experiment import experiment

def cell(seed, x, marks):
    (Path(marks) / f"{x}-{time.time_ns()}").touch()
    time.sleep(0.02)
    return {"y": 10 * x + seed}

folder, marks = sys.argv[1:]
found = experiment(cell, {"x": list(range(60)), "marks": [marks]}, seeds=1, folder=folder, n_jobs=1, progress=False)
assert sorted(found.frame["y"]) == [10.0 * x for x in range(60)]
"""


def test_a_killed_experiment_loses_one_cell_at_most(tmp_path):
    marks, kills = tmp_path / "marks", 2
    marks.mkdir()
    script = tmp_path / "study.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "cells"), str(marks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for kill in range(kills):
        process = subprocess.Popen(command, env=environment)
        end = time.monotonic() + 120
        while len(list(marks.iterdir())) < 15 * (kill + 1):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert 60 <= len(list(marks.iterdir())) <= 60 + kills


def test_a_training_is_the_same_for_the_same_seed_and_reports_what_it_reached():
    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = ((x, (x.sum(1) > 0).long()),) * 2
    runs = ((0, "O0"), (0, "O0"), (1, "O2"))
    found = [train(net, data, seed=seed, level=level, epochs=2) for seed, level in runs]
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert all(0 <= f["accuracy"] <= 100 for f in found)
    assert train(net, data, level="O2", dtype="bfloat16", epochs=2)["loss"] != found[0]["loss"], "a level casts"
    kept = train(net, data, epochs=2, keep=True)
    right = (kept["network"](x).argmax(1) == data[0][1]).double().mean()
    assert kept["accuracy"] == pytest.approx(100 * float(right)), "a percentage of right answers"
