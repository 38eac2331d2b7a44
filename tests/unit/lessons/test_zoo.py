"""*Scaler zoo*: every framework on one sequence by its own rule, the naive rule by hand, the answers a second way."""

import math

import numpy as np
import pytest

from mpkit.lessons.zoo import SITUATIONS, STEPS, ZOO, naive, zoo, zoo_policy
from mpkit.policies import naive_loss_ratio, preset, run
from mpkit.view.words import words

WORDS = words("zoo")


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("together", "start"), [(True, 16), (True, 24), (False, 16)])
def test_no_rule_is_cut_off_and_the_table_counts_skips(situation, together, start):
    view = zoo(situation=situation, together=together, start=start)
    seen = view.numbers
    assert [row["skipped"] for row in view.table()] == seen["skipped"].tolist()
    assert f"skipped {' to '.join(map(str, sorted({min(seen['skipped']), max(seen['skipped'])})))} s" in view.sentence
    used = seen["scales"][np.isfinite(seen["scales"]) & (seen["scales"] > 0)]
    ends = view.sheet.panels[0].given["y"]
    assert ends["lo"] < np.log2(used).min() <= np.log2(used).max() < ends["hi"]


def test_the_sentence_walks_with_the_steps():
    view = zoo()
    view.go(0)
    assert "Up to step 0 the rules have skipped 0 steps." in view.sentence


def test_what_the_lesson_says_of_the_rules():
    drop = zoo(situation="drop").numbers
    skips = dict(zip(ZOO, drop["skipped"].tolist()))
    assert max(skips, key=skips.get) == "paddle_static"
    others = [count for name, count in skips.items() if name != "paddle_static"]
    assert max(others) - min(others) <= 3
    assert (skips["paddle_static"], skips["megatron"], skips["deepspeed"]) == (60, 20, 18)
    assert drop["lowest"][ZOO.index("mxnet")] < drop["lowest"][ZOO.index("torch")]
    fixed = zoo(situation="fixed").numbers
    assert fixed["skipped"][ZOO.index("deepspeed")] == 20
    broken = {row["framework"]: row["ends at"] for row in zoo(situation="model").table()}
    assert {name for name, end in broken.items() if end.startswith("stops")} == {"deepspeed", "fairseq", "mpkit"}
    assert (broken["deepspeed"], broken["torch"]) == ("stops at step 79", "2^-121")
    own = zoo(situation="free", together=False).numbers["scales"][0]
    assert (own[ZOO.index("megatron")], own[ZOO.index("torch")]) == (2.0**32, 2.0**16)
    endless = [run(zoo_policy(name, 1, 2.0**16), [True] * 1500).scale[-1] for name in ZOO]
    assert (endless.count(2.0**127), endless.count(math.inf)) == (6, 8)


def test_what_the_lesson_says_of_endings():
    down, up = [False] * 1200, [True] * 200
    assert int((run(preset("torch"), down).scale == 0).argmax()) + 1 == 166
    assert np.isinf(run(preset("keras3", dynamic_growth_steps=1), up + down[:100]).scale[-1])


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"start": 16}, 15),  # from 2^16 over 2^18, a tenth a step
        ({"start": 0}, None),
        ({"start": 2}, None),
        ({"start": 2, "loss": 3.0, "decay": 0.005, "ceiling": 17}, 191),
        ({"start": -10, "decay": 0.005}, None),
    ],
)
def test_the_naive_rule_by_hand(given, first):
    view = naive(**given)
    scale, loss, seen = 2.0 ** given["start"], given.get("loss", 2.3), []
    for step in range(400):
        now = loss * (1 - given.get("decay", 0)) ** step
        seen.append(scale)
        scale *= 1.1 if scale > 2 * now else 0.9 if scale < now else 1.0
    np.testing.assert_allclose(view.numbers["scale"], seen, rtol=1e-6)
    assert ("inf goes" in view.sentence) == (f"From step {first} on inf" in view.sentence) == (first is not None)
    assert view.numbers["torch"].max() <= 2 * 2.0 ** max(given.get("ceiling", 18), given["start"])


def test_start_and_ceiling_of_the_naive_rule_are_apart():
    marks = {m["name"]: m for m in naive(start=16).sheet.panels[0].marks if m["type"] == "handle"}
    assert abs(marks["start"]["cross"] - marks["ceiling"]["cross"]) > 100


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert (asked["deepspeed"], asked["zero"], asked["back"]) == (51, 10 + 149 + 1, 0)
    ends = zoo(situation="free", interval=10).numbers["final"]
    assert sorted(asked["below"]) == sorted(name for name, end in zip(ZOO, ends) if end < 2.0**36)
    assert asked["naive"] == math.ceil(math.log(2.0**-20) / math.log(0.9))
    assert WORDS["predict"]["drop"]["right"] == "b"
    scale = 1.0
    for _ in range(158):
        scale = naive_loss_ratio(scale, 2.3)
    assert scale < 2.0**-24
    assert WORDS["predict"]["naive"]["right"] == "c"


def test_cases_of_the_task_are_megatrons_patience():
    cases = WORDS["task"]["cases"]
    policy = preset("megatron", initial_scale=1024.0, min_scale=1.0, growth_interval=10**6, hysteresis=2)
    scales = run(policy, [not overflow for (_, _, overflow), _ in cases]).scale
    assert [after for _, (after, _) in cases] == scales.tolist()
    for (_, credit, overflow), (_, left) in cases:
        assert left == (max(credit - 1, 0) if overflow else credit)


def test_every_step_is_played():
    assert zoo().sheet.step["count"] == STEPS
