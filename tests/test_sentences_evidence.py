"""As `test_sentences`, for an experiment."""

import io
import json
import math
import zipfile

import numpy as np
from sentences import swept

from mpkit.data import data_dir
from mpkit.explorers.own_experiment import OwnExperimentExplorer


def two_sided(t, freedom):
    """P(|T| > |t|) of Student's t, by Simpson's rule on its density."""
    x = np.linspace(0, abs(t), 20_001)
    front = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    y = front * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    inside = (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()) * (x[1] - x[0]) / 3
    return 1 - 2 * inside


def test_own_experiment():
    numbers, series = {}, {}
    with zipfile.ZipFile(data_dir() / "experiments" / "digits_levels.zip") as file:
        labels = {
            json.dumps(c["cell"], sort_keys=True): c["label"] for c in json.loads(file.read("experiment.json"))["cells"]
        }
        for name in file.namelist():
            if name.endswith(".npz"):
                held = np.load(io.BytesIO(file.read(name)))
                row = json.loads(str(held["head"]))
                key = labels[json.dumps(row["cell"], sort_keys=True)], row["seed"]
                numbers[key] = row["numbers"]["accuracy"]
                series[key] = held["series/loss"]
    others = [name for name in labels.values() if name != "float32"]
    for m in swept(OwnExperimentExplorer(), samples=4, cell_0=(), network=(), recorded_seeds=(1, 2, 3, 6, 10)):
        seeds, p = range(m.recorded_seeds), {}
        for name in others:
            gaps = np.array([numbers[name, s] - numbers["float32", s] for s in seeds])
            if len(gaps) > 1:
                p[name] = two_sided(gaps.mean() / (gaps.std(ddof=1) / math.sqrt(len(gaps))), len(gaps) - 1)
        order, floor, said = sorted(p, key=p.get), 0.0, {}
        for rank, name in enumerate(order):
            floor = max(floor, p[name] * (len(order) - rank))
            less = np.mean([numbers[name, s] - numbers["float32", s] for s in seeds]) < 0
            said[name] = ("worse" if less else "better") if floor < 0.05 else "not distinguishable"
        for name in m.chosen:
            mean = np.mean([numbers[name, s] for s in seeds])
            verdict = "baseline" if name == "float32" else said.get(name, "one seed")
            assert f"{name} {mean:.1f}, {verdict}" in m.summary(), m.state()
        if m.seed in seeds:
            losses = [series[name, m.seed][m.step - 1] for name in (m.one, m.other)]
            both = dict(zip((m.one, m.other), losses))
            assert f": {', '.join(f'{name} {loss:.3f}' for name, loss in both.items())}. Run" in m.summary()
