"""Replay: the simulation is the rule step by step, ceilings are those of native casts; so are flushed shares, says the
contract."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from recorded import trace_of

from mpkit.data import data_dir
from mpkit.formats import E5M2
from mpkit.policies import FRAMEWORKS, ScalePolicy, preset, run, stack
from mpkit.record import Trace
from mpkit.replay import CAVEAT, ceilings, flushed, flushed_by_current_scale, replay, simulate, sweep, swept
from mpkit.replay.percent import percent

GIVEN = {
    "jmp": {"loss_scale": 2.0**16, "period": 20},
    "paddle_static": {"incr_every_n_steps": 20},
    "mindspore_scaler": {"scale_value": 2.0**16, "scale_factor": 2, "scale_window": 20},
    "mindspore_cell": {"loss_scale_value": 2.0**16, "scale_factor": 3, "scale_window": 20},
}
POLICIES = {
    **{name: [preset(name, **GIVEN.get(name, {}))] for name in FRAMEWORKS if name != "fairscale_layerwise"},
    "swept": [swept(2.0**12, f, w) for f in (1.5, 2, 3) for w in (1, 7, 40)],
    "in double, slowly": [ScalePolicy(init_scale=3.0, growth_factor=1 + 2.0**-20, growth_interval=1, scale_bits=64)],
    "no float32": [preset("torch", growth_factor=f, backoff_factor=0.7, growth_interval=2) for f in (1.1, 1 + 2**-24)],
    "patience": [ScalePolicy(init_scale=2.0**16, growth_interval=2, hysteresis=h, max_consecutive=5) for h in (1, 2)],
    "one after another": [ScalePolicy(init_scale=2.0**40, max_consecutive=n) for n in (2, 3)],
    "tolerance": [preset("fairseq", scale_window=3, tolerance=t) for t in (0.0, 0.5)],
    "bounded": [preset("mpkit", growth_interval=2, init_scale=s) for s in (2.0**-13, 2.0**23)],
    "long": [ScalePolicy(growth_interval=2**33), ScalePolicy(growth_interval=3, init_count=2**31)],
    "stops": [ScalePolicy(init_scale=2.0**18, stop_at=2.0**k) for k in (14, 10)],
    "no number": [ScalePolicy(init_scale=math.inf, backoff_factor=0.0)],
}


def wandering(steps: int = 300) -> np.ndarray:
    """More than one block of steps; some between two float32 numbers, some at a scale, some at nothing or anything."""
    generator = np.random.default_rng(3)
    tops = np.exp2(14 + np.cumsum(generator.normal(0, 0.3, steps)) + generator.normal(0, 1, steps))
    tops[::3] = np.exp2(np.round(np.log2(tops[::3])))
    tops[generator.random(steps) < 0.02] = -1.0
    tops[generator.random(steps) < 0.02] = np.inf
    tops[:2] = 2.0**16 * (1 - 2.0**-30), 2.0**16
    return tops


@pytest.mark.filterwarnings("ignore:invalid value")  # of inf * 0
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_a_simulation_is_the_rule_on_numbers_for_one_policy_and_for_many(name: str, own: bool) -> None:
    tops = wandering()
    many = stack(POLICIES[name] * 20)
    columns = np.stack([tops, tops[::-1]] * many.shape[0], axis=1)[:, : many.shape[0]] if own else tops
    together = simulate(columns, many)
    for lane, policy in enumerate(POLICIES[name]):  # as numbers: the rule in a loop, says the contract
        alone = vars(simulate(columns[:, lane] if own else tops, policy))
        for key, values in alone.items():
            np.testing.assert_array_equal(getattr(together, key)[..., lane], values[..., 0], err_msg=key)


def test_sampled_steps_are_those_of_a_whole_run_and_none_is_an_empty_table() -> None:
    tops, many, sample = wandering(), stack(POLICIES["swept"] * 3), [0, 5, 255, 256, 299]
    whole, some = simulate(tops, many), simulate(tops, many, sample=sample)
    np.testing.assert_array_equal(some.sampled, whole.sampled[sample])
    np.testing.assert_array_equal(some.skipped, whole.skipped)
    assert simulate(tops, many, sample=[]).sampled.shape == (0, 27)
    assert simulate([], many).first_good.tolist() == [0] * 27


@pytest.mark.parametrize("largest", [3.0, 70000.0, 2.0**40, 3e38, 2.0**-20 * 1.7])
def test_the_ceiling_of_a_gradient_is_the_last_scale_that_the_native_cast_takes(largest: float) -> None:
    g = float(torch.tensor(largest))
    (top,) = ceilings(trace_of([torch.tensor([largest, 0.0])], form="fp32"), "fp16")
    above = Fraction(math.nextafter(top, math.inf)) * (1 + Fraction(2.0**-52))  # 65520 / g was rounded, too
    assert Fraction(g) * Fraction(float(top)) < 65520 <= Fraction(g) * above


INF = torch.tensor([np.inf])


@pytest.mark.parametrize(
    ("value", "scale", "columns", "want"),
    [
        (1.0, [2.0**10] * 3, {}, 2.0**9),  # known: below 2**10; its neighbours, at 65520, say nothing
        (1.0, [2.0**10] * 3, {"loss": np.array([1, np.nan, 1])}, -1.0),  # no scale repairs a forward overflow
        (100.0, [2.0**9, 2.0**15, 2.0**9], {}, 655.2),  # the neighbours' ceiling explains the overflow
        (65520 / 2.0**10, [2.0**10] * 3, {}, 2.0**9),  # theirs is at the scale that overflowed
    ],
)
def test_the_ceiling_of_a_step_that_overflowed_is_an_estimate_below_its_scale(value, scale, columns, want) -> None:
    g = torch.tensor([value])
    trace = trace_of([g, INF, g], scale=np.array(scale), **columns)
    tops = ceilings(trace)
    assert tops[1] == pytest.approx(want)
    assert (tops[[0, 2]] >= trace.scale[[0, 2]]).all()  # and a step that was fine has its scale at least


def test_measured_ceilings_come_before_all_estimates() -> None:
    trace = dataclasses.replace(trace_of([torch.ones(2)] * 2), measured={"fp16": np.array([3.0, -1.0])})
    assert ceilings(trace).tolist() == [3.0, -1.0]
    assert ceilings(trace, "e5m2").tolist() == pytest.approx([61440] * 2, rel=1e-12)  # max 57344 + half of 8192


@pytest.mark.parametrize(("scale", "share"), [(2.0**6, 0.0), (2.0**5, 0.0), (2.0**3, 1.0), (np.nan, np.nan)])
def test_a_single_value_is_lost_or_not(scale: float, share: float) -> None:
    """2^-29 times 2^5 is float16's smallest number; a quarter of that is lost."""
    got = flushed(trace_of([torch.tensor([2.0**-29, 0.0])]), np.array([[scale]]))
    np.testing.assert_array_equal(got, [[share]])


def test_a_tensor_of_zeros_or_with_a_bad_value_has_no_scale_of_its_own() -> None:
    part = trace_of([torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1e-6]), torch.tensor([1.0, np.inf])]).gradients
    assert flushed_by_current_scale(part, E5M2)[:, 0].tolist() == pytest.approx([np.nan, 0.0, np.nan], nan_ok=True)


def test_replay_ranks_by_what_training_lost_and_says_what_it_cannot_know() -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(200, generator=generator) * 2.0**-14 for _ in range(60)]
    policies = {"good": swept(2.0**20, 2, 1000), "high": ScalePolicy.fixed(2.0**40), "low": ScalePolicy.fixed(2.0**-8)}
    frame = replay(trace_of(gradients), policies)
    told = frame[["policy", "skipped", "skipped_share", "collapsed"]].to_numpy().tolist()
    assert told == [["good", 0, 0.0, False], ["low", 0, 0.0, True], ["high", 60, 1.0, True]]
    assert (frame["scale"][0].shape, frame.attrs["caveat"]) == ((60,), CAVEAT)


def test_headroom_is_the_mean_distance_to_the_ceilings_that_there_are() -> None:
    frame = replay(trace_of([torch.tensor([v]) for v in (1.0, 0.0, 4.0)]), swept(2.0**4, 2, 1000))
    assert frame["headroom"][0] == pytest.approx((np.log2(65520 / 16) + np.log2(65520 / 4 / 16)) / 2)


def test_what_is_lost_is_what_is_left_of_applied_steps_and_of_their_values() -> None:
    """A share of the steps is skipped, and of the others a share of the values is 0: (1 - s)(1 - f) arrives."""
    rows = [torch.tensor([1.0, 2.0**-30, 2.0**-36])] * 10
    for step in (4, 7):
        rows[step] = torch.tensor([2.0**10, 1.0, 2.0**-36])
    row = replay(trace_of(rows), swept(2.0**10, 2, 1000), fmt="fp16").iloc[0]
    assert 0 < row["skipped_share"] < 1 > row["flushed"] > 0
    assert row["lost"] == pytest.approx(1 - (1 - row["skipped_share"]) * (1 - row["flushed"]), rel=1e-15)


def test_replay_takes_a_policy_a_list_a_vector_or_a_mapping() -> None:
    trace, one, two = trace_of([torch.ones(3)] * 5), swept(8.0, 2, 3), swept(4.0, 2, 3)
    assert replay(trace, one)["policy"].tolist() == ["sweep"]
    assert len(replay(trace, [one, two])) == len(replay(trace, stack([one, two]))) == 2
    assert set(replay(trace, {"a": one, "b": two})["policy"]) == {"a", "b"}


def test_every_scale_is_told_where_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpkit.replay.table.KEPT", 10)
    kept = ["scale" in replay(trace_of([torch.ones(3)] * 5), [swept(8.0, 2, 3)] * count) for count in (1, 2, 3)]
    assert kept == [True, True, False]


def test_sweep_is_replay_of_every_combination() -> None:
    generator = torch.Generator().manual_seed(4)
    trace = trace_of([torch.randn(100, generator=generator) * 2.0**-5 for _ in range(80)])
    frame = sweep(trace, init=[2.0**8, 2.0**24], factor=[2, 4], window=[5, 50])
    assert (len(frame), "scale" in frame) == (8, False)
    assert (frame["lost"].diff().dropna() >= 0).all()
    for _, row in frame.iterrows():
        alone = replay(trace, swept(row["init"], row["factor"], row["window"])).iloc[0]
        for key in ("skipped", "first_good", "headroom", "flushed", "lost", "final_scale", "collapsed"):
            assert row[key] == pytest.approx(alone[key], rel=1e-12)
    changed = dataclasses.replace(trace, scale=np.linspace(8.0, 16.0, len(trace)))
    assert sweep(changed, factor=[2], window=[5])["init"].tolist() == [8.0]  # the scale that the trace began with
    assert sweep(changed, init=np.array(2.0))["init"].tolist() == [2.0]


def test_without_histograms_only_skipped_steps_are_lost() -> None:
    trace = trace_of([torch.ones(2), INF, torch.ones(2)]).thinned([])
    row = replay(trace, preset("torch")).iloc[0]
    assert (row["lost"], math.isnan(row["flushed"])) == (pytest.approx(1 / 3), True)


def test_a_long_trace_is_looked_at_from_its_first_to_its_last_step() -> None:
    """At 512 steps: those between them, in which everything would be lost, are not looked at."""
    rows = [torch.full((4,), 1.0 if k % 2 == 0 else 2.0**-40) for k in range(1023)]
    assert replay(trace_of(rows), ScalePolicy.fixed(1.0))["flushed"][0] == 0.0
    assert replay(trace_of(rows[:512]), ScalePolicy.fixed(1.0))["flushed"][0] == 0.5


RAISES = {
    "at once": (preset("mpkit", init_scale=1.0, min_scale=1.0), [INF] * 3, None, 1),
    "at the first step": (preset("mpkit", init_scale=2.0**-14), [torch.ones(2)] * 4, np.full(4, 2.0**-20), 1),
    "though nothing was skipped": (ScalePolicy(init_scale=0.0, error_at_zero=True), [torch.zeros(2)] * 4, None, 0),
    "later": (preset("deepspeed"), [INF] * 40, None, int(run(preset("deepspeed"), [False] * 40).raised_at) + 1),
}


@pytest.mark.parametrize("name", RAISES)
def test_a_policy_that_raises_has_lost_everything_and_says_when(name: str) -> None:
    policy, rows, tops, skipped = RAISES[name]
    row = replay(trace_of(rows, loss=np.full(len(rows), np.nan if rows[0] is INF else 1.0)), policy, tops=tops).iloc[0]
    assert (row["skipped"], row["lost"], row["collapsed"]) == (skipped, 1.0, True)
    assert row["why"].startswith(f"stopped at step {max(skipped - 1, 0)}: ")
    assert row["skipped_share"] == min(skipped, 1.0)  # of the steps until then


def test_a_scale_that_ends_at_0_is_told() -> None:
    row = replay(trace_of([torch.ones(4)] * 3), ScalePolicy(init_scale=0.0)).iloc[0]
    assert (row["why"], row["final_scale"], row["collapsed"]) == ("the scale ended at 0", 0.0, True)


SKIPPED = "every step of the last tenth of the run was skipped"
GONE = "67 % of the non-zero gradients were lost in the last tenth of the run"
GROWS = dataclasses.replace(preset("torch", init_scale=2.0**127, growth_interval=1), hold_at_overflow=False)


@pytest.mark.parametrize(
    ("policy", "gradient", "tops", "why"),
    [
        (None, [1.0, 1.0], [2.0**24] * 30, ""),  # 24 bits below the ceiling is far, and no collapse yet
        (None, [1.0, 1.0], [2.0**24.5] * 30, "the scale ended 24 bits below the ceiling"),
        (None, [1.0, 2.0**-30], [4.0] * 30, ""),  # half of the values are lost
        (None, [1.0, 2.0**-30, 2.0**-30], [4.0] * 30, GONE),
        (None, [1.0], [0.5] * 30, SKIPPED),
        (None, [1.0], [1.0] * 9 + [0.5], SKIPPED),  # the last tenth of ten steps is the last one
        (None, [1.0], [1.0] * 10 + [0.5], SKIPPED),
        (None, [1.0], [1.0] * 9 + [0.5, 1.0], ""),
        (None, [1.0], [0.5], SKIPPED),  # and that of a single step is it
        (GROWS, [1.0], [np.inf] * 4, "the scale ended at inf"),
    ],
)
def test_a_collapse_begins_beyond_half_of_the_values_and_beyond_24_bits(policy, gradient, tops, why) -> None:
    trace = trace_of([torch.tensor(gradient)] * len(tops), form="fp32")
    row = replay(trace, policy or ScalePolicy.fixed(1.0), fmt="fp16", tops=np.array(tops)).iloc[0]
    assert (row["why"], row["collapsed"]) == (why, bool(why))


def test_a_scale_just_at_the_ceiling_is_applied_and_has_no_headroom() -> None:
    trace = trace_of([torch.ones(4)] * 3, form="fp32")
    top = float(ceilings(trace, "fp16")[0])
    frame = replay(trace, ScalePolicy.fixed(top, scale_bits=64), fmt="fp16")
    assert (frame.skipped[0], frame.headroom[0]) == (0, 0.0)
    above = replay(trace, ScalePolicy.fixed(math.nextafter(top, math.inf), scale_bits=64), fmt="fp16")
    assert above.skipped[0] == 3


def test_own_ceilings_take_the_place_of_the_recorded_ones() -> None:
    trace, policy = Trace.load(data_dir() / "traces" / "mlp_digits.npz"), swept(2.0**16, 2, 50)
    as_recorded = replay(trace, policy)
    pd.testing.assert_frame_equal(replay(trace, policy, tops=ceilings(trace)), as_recorded)
    low = replay(trace, policy, tops=np.full(len(trace), 2.0**10))
    assert low["first_good"][0] == 6
    assert low["headroom"][0] < as_recorded["headroom"][0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: replay(t.before(0), preset("torch")), ValueError, "no steps"),
        (lambda t: replay(t, preset("torch"), tops=np.ones(3)), ValueError, "tops"),
        (lambda t: simulate([1.0, np.nan], preset("torch")), ValueError, "ceilings must"),
        (lambda t: simulate(np.ones((4, 3)), preset("torch")), ValueError, "ceilings must"),
        (lambda t: flushed(t, np.ones((2, 1))), ValueError, "scales"),
        (lambda t: sweep(t.before(0)), ValueError, "no steps"),
        (lambda t: sweep(t, window=2.5), TypeError, "window"),
        (lambda t: sweep(t, factor=1.0), ValueError, "factor"),
    ],
)
def test_what_cannot_be_replayed_is_refused(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call(trace_of([torch.ones(3)] * 4))


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [
        (0.0, 1, "0 %"), (1.0, 1, "100 %"), (0.01, 0, "1 %"), (math.nextafter(0.01, 0), 0, "less than 1 %"),
        (0.99, 0, "99 %"), (math.nextafter(0.99, 1), 0, "more than 99 %"), (1 - 2.0**-53, 2, "more than 99.99 %"),
        (1 + 2.0**-52, 0, "100 %"),  # what a mean of ones may come to
    ],
)  # fmt: skip
def test_a_share_next_to_none_or_all_is_told_as_such(share: float, digits: int, words: str) -> None:
    assert percent(share, digits) == words
