"""As `test_sentences`, for recorded runs, recipes, experiments and trainings."""

import io
import json
import math
import re
import zipfile
from functools import cache

import numpy as np
import pytest
import torch
from sentences import PERCENT, power, read, ridden, swept, tells, zeroed

from mpkit.data import data_dir, digits
from mpkit.explorers.evidence import DetectiveExplorer, GridExplorer, NaiveRuleExplorer, RunExplorer, WhatIfExplorer
from mpkit.explorers.own_experiment import OwnExperimentExplorer


@cache
def raw(run):
    """The arrays of a recorded run as they lie in its file."""
    with np.load(data_dir() / "traces" / f"{run}.npz") as file:
        return {name: file[name] for name in file.files}


@cache
def ceiling(run):
    """The largest scale of each step, from the largest gradient and from what really happened."""
    z = raw(run)
    clean = z["gradients_nonfinite"].sum(1) == 0
    largest = np.where(np.isfinite(z["gradients_largest"]), z["gradients_largest"], 0).max(1).astype(float)
    clean &= largest > 0
    bits = np.log2(65520.0) - np.log2(largest[clean])
    top = np.exp2(np.interp(z["step"], z["gradients_step"][clean], bits))
    top[np.searchsorted(z["step"], z["gradients_step"][clean])] = np.nextafter(65520.0 / largest[clean], 0)
    top = np.where(z["overflow"], top, np.maximum(top, z["scale"]))
    top = np.where(z["overflow"] & (top >= z["scale"]), z["scale"] / 2, top)
    return np.where(np.isfinite(z["loss"]), top, -1.0)


def test_recorded_runs():
    for run in RunExplorer.run.values:
        z = raw(run)
        single = z["gradients_step"][z["gradients_nonfinite"].sum(1) == 1][:1].tolist()  # "1 value is", once
        for m in swept(RunExplorer(run=run), run=(), step=[*range(0, 500, 61), *single]):
            at = min(m.step, len(z["step"]) - 1)
            row = np.searchsorted(z["gradients_step"], at, "right") - 1
            head, loss, scale = read(r"step (\d+ of \d+): \w+, loss (not finite|\S+), scale (\S+)\. Of", m)
            told = re.search(r"values of step (\d+), the last with recorded gradients, ", m.summary())
            assert (int(told[1]) if told else at) == z["gradients_step"][row]
            assert head == f"{at} of {len(z['step'])}"
            assert ("skipped, loss" in m.summary()) == z["overflow"][at]
            assert (loss == "not finite") == (not np.isfinite(z["loss"][at]))
            assert loss == "not finite" or float(loss) == pytest.approx(z["loss"][at], rel=1e-3)
            assert power(scale) == pytest.approx(z["scale"][at], rel=4e-3)
            many = r"(\d+) (?:values are|(?<=\b1 )value is)"
            told = read(rf"Of (\d+) gradient values\b.*? {PERCENT} are zero, and {many} .* far: (\d+)\.", m)
            size = z["gradients_size"].sum()
            assert tells(told.pop(1), z["gradients_zeros"][row].sum() / size, 1), m.summary()
            want = [size, z["gradients_nonfinite"][row].sum(), z["overflow"][: at + 1].sum()]
            assert [int(v) for v in told] == want


@pytest.mark.parametrize("run", ["mlp_digits", "gpt_sums", "rare_outliers"])
def test_what_if_and_its_grid(run):
    tops, z = ceiling(run), raw(run)
    rows = np.searchsorted(z["step"], z["gradients_step"])  # the steps with a histogram
    for m in swept(WhatIfExplorer(run=run), samples=5, run=()):
        scale = ridden(tops, 2.0**m.init, m.factor, m.window)
        good = scale <= tops
        figures = (
            r": (\d+) of (\d+) steps (?:are|(?<=: 1 of 400 steps )is) skipped \(recorded: (\d+)\)\. \D+ (\S+) bits "
        )
        told = read(rf"{figures}\D+ on average, and {PERCENT} of the", m)
        lost = zeroed(m.trace.gradients, scale[rows])[good[rows]].mean()
        want = [(~good).sum(), len(tops), z["overflow"].sum(), np.log2(tops / scale)[rows][good[rows]].mean()]
        assert [float(v) for v in told[:4]] == pytest.approx(want, abs=0.051), m.state()
        assert tells(told[4], lost, 2), m.summary()
        left = np.where(z["overflow"], scale < z["scale"], scale > z["scale"])  # not what the recorded scale settles
        sized = set(z["gradients_step"][z["gradients_nonfinite"].sum(1) == 0].tolist())
        unknown = sum(bool(open_) and step not in sized for step, open_ in zip(z["step"].tolist(), left))
        assert (f"an estimate in {unknown} of the steps" in m.summary()) == (unknown > 0), m.state()
    unseen = np.isfinite(z["loss"])
    unseen[rows[z["gradients_nonfinite"].sum(1) == 0]] = False
    for m in swept(GridExplorer(run=run), samples=3, run=(), window=(5, 500)):
        lost, guessed = {}, {}
        for factor in m.factors:
            for window in m.windows:
                scale = ridden(tops, 2.0**m.init, factor, window)
                good = scale <= tops
                flat = zeroed(m.chosen.trace.gradients, scale[rows])[good[rows]]
                lost[factor, window] = 1 - good.mean() * (1 - flat.mean()), (~good).sum()
                other = np.where(z["overflow"], scale < z["scale"], scale > z["scale"])  # no help
                guessed[factor, window] = (other & unseen).any()
        own, skipped, factor, window, best = read(
            rf": {PERCENT} of the .* (\d+) (?:steps are|(?<=\b1 )step is) skipped\. .* factor (\S+), window (\d+), "
            rf"with {PERCENT}",
            m,
        )
        assert tells(own, lost[m.factor, m.window][0], 2), m.summary()
        assert int(skipped) == lost[m.factor, m.window][1]
        least = min(share for share, _ in lost.values())
        assert tells(best, least, 2), m.summary()
        assert lost[float(factor), int(window)][0] == pytest.approx(least, abs=1e-8)
        ties = sum(share < least + 1e-9 for share, _ in lost.values())
        said = "The best of 35 pairs is factor" if ties == 1 else f"{ties} of 35 pairs are the best, one of them factor"
        assert said in m.summary(), (ties, m.summary())
        told = re.search(r"In (\d+) of 35 pairs(, this one among them,)? some skips are estimates", m.summary())
        assert (int(told[1]) if told else 0) == sum(guessed.values())
        assert bool(told and told[2]) == guessed[m.factor, m.window] == ("is an estimate in" in m.chosen.summary())


def detective(case, cast, scale):
    """Name -> values of all that a training of lesson 14 computes at O2, each rounded to 16 bits; weights come last."""
    x, labels = (t[:32] for t in digits("train"))
    x = x.flatten(1).clone()
    if case == "C":
        x[7, 14 * 28 + 14] = math.nan
    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, 32), torch.nn.Linear(32, 10)]
    (w1, b1), (w2, b2) = ((cast(p.weight.detach()), cast(p.bias.detach())) for p in layers)
    steps = {"relu": (torch.relu, lambda x: (x > 0).float())}  # function and slope
    if case == "B":
        steps["gain"] = lambda x: x * 400, lambda x: torch.full_like(x, 400)
        steps["square"] = lambda x: x * x, lambda x: 2 * x
        steps["shrink"] = lambda x: x * 1e-5, lambda x: torch.full_like(x, 1e-5)
    if case == "D":
        steps["entropy"] = torch.log, lambda x: 1 / x
    met, into = {"batch": x, "hidden": cast(cast(x) @ w1.T + b1)}, []
    for name, (function, _) in steps.items():
        into.append([*met.values()][-1])
        met[name] = cast(function(into[-1]))
    last = met[name]
    met["out"] = cast(last @ w2.T + b2)
    met["loss"] = torch.nn.functional.cross_entropy(met["out"], labels)
    chance = met["out"].softmax(1) - torch.nn.functional.one_hot(labels, 10)
    met["gradient of loss"] = torch.tensor(scale)
    back = met["gradient of out"] = cast(chance / 32 * scale)
    flow = cast(back @ w2)
    for name in reversed(steps):
        met[f"gradient of {name}"] = flow
        flow = cast(flow * cast(steps[name][1](into.pop())))
    met["gradient of hidden"] = flow
    tops = {"out.weight": back.T @ last, "out.bias": back.sum(0), "hidden.weight": flow.T @ cast(x)}
    return met | {name: cast(values) for name, values in {**tops, "hidden.bias": flow.sum(0)}.items()}


BIRTHS = {
    "square": "square, forward pass, operation pow",
    "entropy": "entropy, forward pass, operation log",
    "gradient of out": "(network), backward pass, operation cast to float16",
    "out.bias": "out, backward pass, operation sum",
}


@pytest.mark.parametrize("name", "ABCD")
def test_the_detective(name):
    for kind in (torch.float16, torch.bfloat16):

        def low(x, kind=kind):
            return x.to(kind).float()

        def bad(cast, exponent):
            return [
                part for part, values in detective(name, cast, 2.0**exponent).items() if not values.isfinite().all()
            ]

        dtype = str(kind).removeprefix("torch.")
        every = [*range(-8, 18, 5), *range(18, 31)] if (name, dtype) == ("A", "float16") else range(-8, 31, 6)
        ill = bad(lambda x: x, 0)
        works = next((k for k in range(127, -41, -1) if not ill and not bad(low, k)), None)
        best = "No scale works" if works is None else f"The largest scale that works is 2^{works} = {2.0**works:.10g}"
        parts = [part for part in detective(name, low, 1.0) if "." not in part]
        for m in swept(DetectiveExplorer(name=name, dtype=dtype), name=(), dtype=(), exponent=every):
            gone = bad(low, m.exponent)
            first = gone[0] if gone else ""
            verdict, where = "healthy", f" The first inf or NaN was born in {BIRTHS.get(first)}."
            if first == "batch":
                verdict, where = "bad_data", " The inf or NaN sits in batch[0]."
            elif first:
                backward = "gradient" in first or "." in first
                verdict = "model_non_finite" if ill else "scale_too_high" if backward else "forward_overflow"
            part = f"; the gradient of {' and '.join(gone)} is not (no bar shows it)" * bool(first)
            walk = f"All {len(parts)} steps forward and back are finite{part}."
            if first in parts:
                at = f"Step {parts.index(first) + 1} of {len(parts)}, {first}"
                walk = f"{at}, is the first with a value that is not finite."
            said = f"{verdict}.{where * bool(first)} {best}. {walk}"
            assert m.summary() == f"Training {name} at scale 2^{m.exponent} in {dtype}: {said}"


def test_the_loss_rule():
    for m in swept(NaiveRuleExplorer(), samples=7):
        scale, seen = 2.0**m.exponent, []
        for step in range(1000):
            seen.append(scale)
            loss = m.loss * math.exp(-m.decay * step)
            scale *= 0.9 if loss > scale else 1.1 if loss < 0.5 * scale else 1.0
        told = read(r"is (\S+) at step 100 and (\S+) at step 999; .*, it ends at (\d+)\.$", m)
        seen = np.array(seen)
        assert [float(v) for v in told[:2]] == pytest.approx(seen[[100, 999]].tolist(), rel=6e-3)
        ends = np.flatnonzero((seen < 2.0**-24) | (seen > 2.0**17))
        assert (f"at step {ends[0]} " if len(ends) else "nothing has ended it") in m.summary()
        assert int(told[2]) == round(ridden([2.0**17] * 1000, 2.0**m.exponent, 2, 50)[-1])


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
