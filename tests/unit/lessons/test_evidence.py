"""Lesson 08, *What if*: the four trainings, what replays of recorded runs say, answers a second way."""

import numpy as np
import pytest
import torch.nn.functional as F

from mpkit.data import data_dir
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
BORN = {  # training -> verdict, and where the first inf or NaN is met on the way, forward or back
    ("A", "float16", 12): ("healthy", ""), ("A", "float16", 20): ("healthy", ""),
    # at 2^21 it is the gradient of a bias, which has no place on the way
    ("A", "float16", 21): ("scale_too_high", ""), ("A", "float16", 24): ("scale_too_high", "gradient of out"),
    ("A", "bfloat16", 30): ("healthy", ""), ("B", "float16", -8): ("forward_overflow", "square"),
    ("B", "float16", 30): ("forward_overflow", "square"), ("B", "bfloat16", 30): ("healthy", ""),
    ("C", "float16", 12): ("bad_data", "batch"), ("C", "bfloat16", 12): ("bad_data", "batch"),
    ("D", "float16", -8): ("model_non_finite", "entropy"), ("D", "bfloat16", 24): ("model_non_finite", "entropy"),
}  # fmt: skip


@pytest.mark.parametrize("given", BORN)
def test_the_verdict_and_the_place_of_birth(given):
    training, dtype, power = given
    seen = detective(training=training, dtype=dtype, scale=power).numbers
    born = seen["stops"][seen["born"]] if seen["born"] is not None else None
    place = "" if born is None else "gradient of " * born.backward + born.name
    assert (seen["report"].verdict, place) == BORN[given]
    assert not any(stop.bad for stop in seen["stops"][: seen["born"]])
    largest = 2.0**20 if (training, dtype) == ("A", "float16") else 2.0**127
    works = BORN[given][0] in ("healthy", "scale_too_high")
    assert seen["report"].max_scale == (largest if works else None)


def test_the_way_shows_what_was_reached_and_nothing_else():
    spec = detective(training="B", scale=12).sheet.spec

    def told(step):
        return [text.get_text() for text in figure(spec, step - 1).axes[0].texts]

    assert ["born here" in told(step) for step in (4, 5)] == [False, True]
    assert sum("inf or NaN" in text for text in told(5)) == 1
    assert sum("inf or NaN" in text for text in told(15)) > 3
    walked = detective(training="B", scale=12, step=5)
    assert walked.sentence.startswith("Step 5, output of square: 4 of 1024 inf or NaN.")
    walked.go(0)
    assert walked.sentence.startswith("Step 1, output of batch: float32, up to 1.")


def test_what_lesson_08_says():
    assert [case(name).scale for name in "ABCD"] == [2**24, 2**12, 2**12, 2**24]
    verdicts = {n: detective(training=n, scale=p).numbers["report"].verdict for n, p in zip("ABCD", (24, 12, 12, 24))}
    assert verdicts == dict(zip("ABCD", ["scale_too_high", "forward_overflow", "bad_data", "model_non_finite"]))
    assert (WORDS["predict"]["scale"]["right"], WORDS["predict"]["format"]["right"]) == ("a", "b")
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
def ridden(tops, start, factor, window, floor=0.0):
    scale, good, used = start, 0, []
    for top in tops:
        used.append(scale)
        good = good + 1 if scale <= top else 0
        if scale > top:
            scale = max(floor, scale / factor)
        elif good == window:
            scale, good = scale * factor, 0
    return np.array(used)


def outliers():
    return Trace.load(data_dir() / "traces" / "rare_outliers_float32.npz")


def test_what_the_lesson_what_if_says():
    skips = [int((~dynamics(run="mlp_digits", start=16, window=w).numbers["finite"]).sum()) for w in (1, 10, 50, 400)]
    assert skips == sorted(skips, reverse=True)
    assert skips[0] > 150 > skips[-1] == 0
    assert (WORDS["predict"]["window"]["right"], WORDS["predict"]["start"]["right"]) == ("c", "b")
    trace = load_run("mlp_digits")
    assert replay(trace, swept(2.0**16, 2, 2000)).iloc[0]["skipped"] < 3
    assert 10 <= replay(trace, preset("megatron")).iloc[0]["first_good"] <= 14
    rare = outliers()
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
    late = replay(load_run("mlp_digits"), preset("megatron", initial_scale=2.0**24)).iloc[0]["skipped"]
    assert asked["megatron"] == late
    tops = [2.0**60 if i % 25 else 0.0 for i in range(1, 200)]
    grew = [(np.diff(ridden(tops, 2.0**30, 2, window)) > 0).any() for window in (24, asked["window"])]
    assert grew == [True, False]
    assert asked["collapse"] == replay(outliers(), swept(2.0**16, 1.25, 20), fmt="fp16")["collapsed"][0]


def test_cases_of_the_tasks():
    for (heard,), name in WORDS["tasks"]["first"]["cases"]:
        assert name == next((n for n, values in heard if not np.isfinite(values).all()), "")
    for (tops, start, window), skipped in WORDS["tasks"]["replay"]["cases"]:
        used = ridden(tops, start, 2, window, floor=1.0)
        assert (used > tops).sum() == skipped
