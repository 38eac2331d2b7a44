"""Lesson 08, *What if*: the four trainings by a computation of our own, what replays of recorded runs say."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpkit.data import data_dir, digits
from mpkit.diagnose import diagnose, recommend
from mpkit.lessons.dynamic_scale import dynamics, load_run
from mpkit.lessons.evidence import case, detective
from mpkit.policies import preset
from mpkit.record import Trace
from mpkit.replay import replay, swept
from mpkit.view.still import figure
from mpkit.view.words import words

WORDS = words("evidence")


# ---- the four trainings
def computed(name, cast, scale):
    """Name -> values of all that a training computes at O2, each rounded to 16 bits; gradients of weights come last."""
    x, labels = (t[:32] for t in digits("train"))
    x = x.flatten(1).clone()
    if name == "C":
        x[7, 14 * 28 + 14] = math.nan
    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, 32), torch.nn.Linear(32, 10)]
    (w1, b1), (w2, b2) = ((cast(p.weight.detach()), cast(p.bias.detach())) for p in layers)
    steps = {"relu": (torch.relu, lambda x: (x > 0).float())}  # function and slope
    if name == "B":
        steps["gain"] = lambda x: x * 400, lambda x: torch.full_like(x, 400)
        steps["square"] = lambda x: x * x, lambda x: 2 * x
        steps["shrink"] = lambda x: x * 1e-5, lambda x: torch.full_like(x, 1e-5)
    if name == "D":
        steps["entropy"] = torch.log, lambda x: 1 / x
    met, into = {"batch": x, "hidden": cast(cast(x) @ w1.T + b1)}, []
    for step, (function, _) in steps.items():
        into.append([*met.values()][-1])
        met[step] = cast(function(into[-1]))
    last = met[step]
    met["out"] = cast(last @ w2.T + b2)
    met["loss"] = F.cross_entropy(met["out"], labels)
    met["gradient of loss"] = torch.tensor(scale)
    back = met["gradient of out"] = cast((met["out"].softmax(1) - F.one_hot(labels, 10)) / 32 * scale)
    flow = cast(back @ w2)
    for step in reversed(steps):
        met[f"gradient of {step}"] = flow
        flow = cast(flow * cast(steps[step][1](into.pop())))
    met["gradient of hidden"] = flow
    tops = {"out.weight": back.T @ last, "out.bias": back.sum(0), "hidden.weight": flow.T @ cast(x)}
    return met | {part: cast(values) for part, values in {**tops, "hidden.bias": flow.sum(0)}.items()}


@pytest.mark.parametrize("name", "ABCD")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_verdict_and_the_place_of_birth_by_a_computation_of_our_own(name, dtype):
    def low(x):
        return x.to(getattr(torch, dtype)).float()

    def bad(cast, power):
        return [part for part, values in computed(name, cast, 2.0**power).items() if not values.isfinite().all()]

    ill = bad(lambda x: x, 0)
    works = next((k for k in range(127, -41, -1) if not ill and not bad(low, k)), None)
    for power in (-8, 12, 20, 21, 24, 30):
        seen, gone = detective(training=name, dtype=dtype, scale=power).numbers, bad(low, power)
        first, wanted = gone[0] if gone else "", "healthy"
        if first == "batch":
            wanted = "bad_data"
        elif first:
            late = "gradient" in first or "." in first
            wanted = "model_non_finite" if ill else "scale_too_high" if late else "forward_overflow"
        assert seen["report"].verdict == wanted
        assert seen["report"].max_scale == (None if works is None else 2.0**works)
        born = seen["born"]
        if born is None:
            assert not first or "." in first  # a gradient of a weight has no place on the way
        else:
            at = seen["stops"][born]
            assert "gradient of " * at.backward + at.name == first
        assert not any(stop.bad for stop in seen["stops"][:born])


def test_the_way_shows_what_was_reached_and_nothing_else():
    spec = detective(training="B", scale=12).sheet.spec()

    def told(step):
        return [text.get_text() for text in figure(spec, step - 1).axes[0].texts]

    assert "born here" not in told(4)
    assert "born here" in told(5)
    assert sum("inf or NaN" in text for text in told(5)) == 1
    assert sum("inf or NaN" in text for text in told(15)) > 3


def test_what_lesson_08_says():
    assert [case(name).scale for name in "ABCD"] == [2**24, 2**12, 2**12, 2**24]
    verdicts = {n: detective(training=n, scale=p).numbers["report"].verdict for n, p in zip("ABCD", (24, 12, 12, 24))}
    assert verdicts == dict(zip("ABCD", ["scale_too_high", "forward_overflow", "bad_data", "model_non_finite"]))
    assert WORDS["predict"]["scale"]["right"] == "a"
    assert WORDS["predict"]["format"]["right"] == "b"
    cured = detective(training="B", scale=12, dtype="bfloat16")
    assert cured.numbers["report"].verdict == "healthy"
    assert all(row["fits"] for row in cured.table())
    trace = load_run("growing_activations")
    lost = int((~np.isfinite(trace.loss)).argmax())
    assert trace.overflow.argmax() < lost
    assert trace.overflow[lost:].all()
    assert trace.overflow[trace.scale < 1].all()
    assert trace.scale[-1] == 0


# ---- what another policy would have done
def ridden(tops, start, factor, window):
    scale, good, used = start, 0, []
    for top in tops:
        used.append(scale)
        good = good + 1 if scale <= top else 0
        if scale > top:
            scale /= factor
        elif good == window:
            scale, good = scale * factor, 0
    return np.array(used)


def test_what_the_lesson_what_if_says():
    skips = [int((~dynamics(run="mlp_digits", start=16, window=w).numbers["finite"]).sum()) for w in (1, 10, 50, 400)]
    assert skips == sorted(skips, reverse=True)
    assert skips[0] > 150
    assert skips[-1] == 0
    assert (WORDS["predict"]["window"]["right"], WORDS["predict"]["start"]["right"]) == ("c", "b")
    trace = load_run("mlp_digits")
    assert replay(trace, swept(2.0**16, 2, 2000)).iloc[0]["skipped"] < 3
    assert 10 <= replay(trace, preset("megatron")).iloc[0]["first_good"] <= 14
    rare = Trace.load(data_dir() / "traces" / "rare_outliers_float32.npz")
    collapsed = {w: replay(rare, swept(2.0**16, 2, w), fmt="fp16")["collapsed"][0] for w in (2000, 50, 16, 15, 10)}
    assert [w for w, fell in collapsed.items() if fell] == [2000, 50, 16]
    assert not replay(rare, recommend(rare).policy, fmt="fp16")["collapsed"][0]


# ---- answers
def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    found = case("A")
    fifth = diagnose(found.network, found.batch, lambda y, t: F.cross_entropy(y, t) / 32, level="O2", scale=2.0**24)
    assert asked["largest"] == fifth.max_scale == 32 * 2.0**20
    assert asked["wider"] == detective(dtype="bfloat16").numbers["report"].verdict
    trace = load_run("growing_activations")
    assert asked["finite"] == int((trace.overflow & np.isfinite(trace.loss)).sum())
    assert asked["cure"] == recommend(load_run("resnet_digits")).dtype
    assert (
        asked["megatron"]
        == replay(load_run("mlp_digits"), preset("megatron", initial_scale=2.0**24)).iloc[0]["skipped"]
    )
    every = ridden([2.0**60 if i % 25 else 0.0 for i in range(1, 200)], 2.0**30, 2, asked["window"])
    assert (np.diff(every) <= 0).all()
    assert (np.diff(ridden([2.0**60 if i % 25 else 0.0 for i in range(1, 200)], 2.0**30, 2, 24)) > 0).any()
    rare = Trace.load(data_dir() / "traces" / "rare_outliers_float32.npz")
    assert asked["collapse"] == replay(rare, swept(2.0**16, 1.25, 20), fmt="fp16")["collapsed"][0]


def test_cases_of_the_tasks():
    for (heard,), name in WORDS["tasks"]["first"]["cases"]:
        assert name == next((n for n, values in heard if not np.isfinite(values).all()), "")
    for (tops, start, window), skipped in WORDS["tasks"]["replay"]["cases"]:
        scale, good, count = start, 0, 0
        for top in tops:
            count, good = count + (scale > top), 0 if scale > top else good + 1
            if scale > top:
                scale = max(1.0, scale / 2)
            elif good == window:
                scale, good = scale * 2, 0
        assert count == skipped
