"""The parts of a replay by themselves, where their answers turn."""

from __future__ import annotations

import dataclasses
import importlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_replay import trace_of

from mpkit.policies import ScalePolicy, preset, run, stack, tensor_scale_preset
from mpkit.replay import can_compile, ceilings, flushed, replay, replay_tensor_scales, simulate, sweep
from mpkit.replay.percent import percent, percents
from mpkit.replay.tensor_scales import _finite_max, _unused

simulation = importlib.import_module("mpkit.replay.simulate")  # the package has a function of that name


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([0.5, 0.25], 0.5),
        ([math.nan, 0.5], 0.5),
        ([math.nan, 0.0], 0.0),
        ([math.nan, math.inf], math.inf),
        ([2.0], 2.0),
    ],
)
def test_the_largest_of_a_run_leaves_out_what_is_no_number(values: list[float], largest: float) -> None:
    assert _finite_max(np.array(values, dtype=np.float32)) == largest


@pytest.mark.parametrize(
    ("values", "plain", "bits"),
    [
        ([256.0, 256.0], True, 0.0),
        ([1.0, 4.0], True, 7.0),  # 448 lies in [2^8, 2^9): 8 and 6 powers of two below
        ([1.0, 4.0, 0.0, 900.0], False, 7.0),  # what was zero or clipped does not count
        ([0.0, 900.0], False, 0.0),
    ],
)
def test_what_a_scale_leaves_unused_is_a_mean_of_powers_of_two(values: list[float], plain: bool, bits: float) -> None:
    product = np.array(values, dtype=np.float32)
    assert _unused(product, plain, product > 448, 448.0) == bits


@pytest.mark.parametrize("factor", [2.0, 1.1, 1 + 2.0**-23, 1 + 2.0**-24])
def test_a_vector_of_policies_rounds_its_scale_as_each_of_them_alone(factor: float) -> None:
    """A factor that float32 does not hold multiplies in double precision; the scale is rounded after that."""
    policies = [preset("torch", init_scale=3.0, growth_factor=f, growth_interval=1) for f in (factor, 1.3 * factor)]
    tops = np.full(40, math.inf)
    together = simulate(tops, stack(policies * 30), compiled=False).sampled
    for i, policy in enumerate(policies):
        np.testing.assert_array_equal(together[1:, i], run(policy, [True] * len(tops)).scale[:-1])  # used, and after


@pytest.mark.parametrize(("steps", "told"), [(10, True), (11, False), (20, False)])
def test_the_last_tenth_of_ten_steps_is_the_last_one(steps: int, told: bool) -> None:
    gradients = [torch.ones(4)] * (steps - 1) + [torch.full((4,), 1e9)]  # more than float16 holds
    if steps == 11:
        gradients[-2] = gradients[-1]
        gradients[-1] = torch.ones(4)
    frame = replay(trace_of(gradients, form="fp32"), preset("torch", init_scale=1.0), fmt="fp16")
    assert (frame.why[0] == "every step of the last tenth of the run was skipped") is told


def test_a_scale_in_double_precision_stays_so_beside_others() -> None:
    narrow = preset("torch", init_scale=3.0, growth_factor=1 + 2.0**-20, growth_interval=1)
    policies = [narrow, dataclasses.replace(narrow, scale_bits=64)]
    tops = np.full(40, math.inf)
    together = simulate(tops, stack(policies * 30), compiled=False).sampled
    for i, policy in enumerate(policies):
        np.testing.assert_array_equal(together[1:, i], run(policy, [True] * len(tops)).scale[:-1])
    assert together[-1, 0] != together[-1, 1]


@pytest.mark.parametrize("works", [True, False])
def test_whether_a_compiler_is_there_is_found_by_trying(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: object) -> object:
        if not works:
            raise RuntimeError("no compiler")
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    can_compile.cache_clear()
    assert can_compile() is works
    can_compile.cache_clear()  # not what this machine can


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [
        (0.0, 1, "0 %"),
        (1.0, 1, "100 %"),
        (0.01, 0, "1 %"),
        (0.001, 1, "0.1 %"),
        (math.nextafter(0.01, 0), 0, "less than 1 %"),
        (0.99, 0, "99 %"),
        (math.nextafter(0.99, 1), 0, "more than 99 %"),
        (1 - 2.0**-53, 2, "more than 99.99 %"),
        (1 + 2.0**-52, 0, "100 %"),  # what a mean of ones may come to
        (0.5, 2, "50.00 %"),
    ],
)
def test_a_share_next_to_none_or_all_is_told_as_such(share: float, digits: int, words: str) -> None:
    assert percent(share, digits) == words


def test_a_picture_rounds_shares_to_a_tenth_and_neither_end_is_reached_by_rounding() -> None:
    shares = [0.0, 0.12345, 0.0004, 0.00051, 0.9994, 0.99951, 1.0, 0.5]
    assert percents(shares).tolist() == pytest.approx([0.0, 12.3, 0.04, 0.1, 99.9, 99.9, 100.0, 50.0], rel=1e-12)


POLICIES = {
    "plain": [ScalePolicy(init_scale=2.0**k, growth_interval=3) for k in (10, 12, 16, 17)],
    "double": [preset("deepspeed", scale_window=3), preset("apex", scale_window=2)],
    "in double, slowly": [ScalePolicy(init_scale=3.0, growth_factor=1 + 2.0**-20, growth_interval=1, scale_bits=64)]
    * 2,
    "no float32": [preset("torch", growth_factor=f, backoff_factor=0.7, growth_interval=2) for f in (1.1, 1.3)],
    "patience": [ScalePolicy(init_scale=2.0**16, growth_interval=2, hysteresis=h, max_consecutive=5) for h in (1, 2)],
    "one after another": [ScalePolicy(init_scale=2.0**40, max_consecutive=n) for n in (2, 3)],
    "all alike": [ScalePolicy(init_scale=2.0**40, max_consecutive=3)] * 2,
    "tolerance": [preset("fairseq", scale_window=3, tolerance=t) for t in (0.0, 0.5)],
    "bounded": [preset("mpkit", growth_interval=2, init_scale=s) for s in (2.0**-13, 2.0**23)],
    "long": [ScalePolicy(growth_interval=2**33), ScalePolicy(growth_interval=3, init_count=2**31)],
    "stops": [ScalePolicy(init_scale=2.0**18, stop_at=2.0**14), ScalePolicy(init_scale=2.0**18, stop_at=2.0**10)],
}


@pytest.mark.parametrize("form", ["one", "own"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_do_the_same_one_by_one_and_all_at_once(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numbers, as tensors in double, and in float32 where that is said to lose nothing."""
    generator = np.random.default_rng(3)
    tops = 2.0 ** generator.uniform(8, 20, 60)
    tops[20:26] = -1.0
    tops[0:3] = 2.0**16 * (1 - 2.0**-30), 2.0**16, math.inf  # the first is no float32, which would round it up
    if form == "own":
        tops = np.stack([tops, tops[::-1]], axis=1)
    policies = stack(POLICIES[name][:2])
    alone = simulate(tops, policies, compiled=False)
    monkeypatch.setattr(simulation, "_FEW", 0)
    together = simulate(tops, policies, compiled=False)
    monkeypatch.setattr(simulation, "_narrowed", lambda policy, state: (policy, state))
    wide = simulate(tops, policies, compiled=False)
    for key in ("sampled", "final", "lowest", "skipped", "first_good", "raised_at", "raised"):
        np.testing.assert_array_equal(getattr(together, key), getattr(alone, key), err_msg=key)
        np.testing.assert_array_equal(getattr(wide, key), getattr(alone, key), err_msg=key)
    assert together.raised_at.dtype == np.int64


def test_a_sweep_of_usual_policies_is_computed_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step, kinds = simulation._step, set()

    def watched(policy, state, *rest):
        kinds.update(value.dtype for value in state)
        return step(policy, state, *rest)

    monkeypatch.setattr(simulation, "_step", watched)
    simulate(np.full(3, 2.0**15), stack(POLICIES["plain"] * 30), compiled=False)
    assert kinds.isdisjoint({torch.float64, torch.int64})
    simulate(np.full(3, 2.0**15), stack(POLICIES["double"] * 30), compiled=False)
    assert kinds >= {torch.float64, torch.int64}


def test_a_scale_just_at_the_ceiling_is_applied_and_has_no_headroom() -> None:
    trace = trace_of([torch.ones(4)] * 3, form="fp32")
    top = float(ceilings(trace, "fp16")[0])
    frame = replay(trace, ScalePolicy.fixed(top, scale_bits=64), fmt="fp16")
    assert (frame.skipped[0], frame.headroom[0]) == (0, 0.0)
    above = replay(trace, ScalePolicy.fixed(math.nextafter(top, math.inf), scale_bits=64), fmt="fp16")
    assert above.skipped[0] == 3


@pytest.mark.parametrize(("last_bits", "clipped"), [(0, 0), (1, 0), (4, 0), (5, 1)])
def test_the_last_bits_of_a_product_are_no_clipping(last_bits: int, clipped: int) -> None:
    """A first step is cast with scale 1; 448 (1 + 2^-22), rounded to float32, is 448 and four of its last bits."""
    done = replay_tensor_scales([448 + last_bits * 2.0**-15], [tensor_scale_preset("te_delayed")])
    assert done.clipped.tolist() == [clipped]


def test_a_policy_that_stops_at_the_very_first_step_says_so() -> None:
    policy = preset("mpkit", init_scale=2.0**-14, min_scale=2.0**-14)
    row = replay(trace_of([torch.ones(2)] * 4), policy, tops=np.full(4, 2.0**-20)).iloc[0]
    assert row["why"].startswith("stopped at step 0: ")
    assert (row["skipped"], row["collapsed"]) == (1, True)


def test_a_scale_that_grew_beyond_all_numbers_is_told() -> None:
    grows = dataclasses.replace(preset("torch", init_scale=2.0**127, growth_interval=1), hold_at_overflow=False)
    row = replay(trace_of([torch.ones(2)] * 4), grows, tops=np.full(4, np.inf)).iloc[0]
    assert row["final_scale"] == math.inf
    assert row["why"] == "the scale ended at inf"


@pytest.mark.parametrize(
    ("gradient", "top", "why"),
    [
        ([1.0, 1.0], 2.0**24, ""),  # 24 bits below the ceiling is far, and no collapse yet
        ([1.0, 1.0], 2.0**24.5, "the scale ended 24 bits below the ceiling"),
        ([1.0, 1.0], 2.0**25, "the scale ended 25 bits below the ceiling"),
        ([1.0, 2.0**-30], 4.0, ""),  # half of the values are lost
        ([1.0, 2.0**-30, 2.0**-30], 4.0, "67 % of the non-zero gradients were lost in the last tenth of the run"),
        ([1.0], 0.5, "every step of the last tenth of the run was skipped"),
        ([1.0], 1.0, ""),
    ],
)
def test_a_collapse_begins_beyond_half_of_the_values_and_beyond_24_bits(
    gradient: list[float], top: float, why: str
) -> None:
    trace = trace_of([torch.tensor(gradient)] * 30, form="fp32")
    row = replay(trace, ScalePolicy.fixed(1.0), fmt="fp16", tops=np.full(30, top)).iloc[0]
    assert (row["why"], row["collapsed"]) == (why, bool(why))


@pytest.mark.parametrize(("scale", "share"), [(2.0**6, 0.0), (2.0**5, 0.0), (2.0**3, 1.0)])
def test_a_single_value_is_lost_or_not(scale: float, share: float) -> None:
    """2^-29 times 2^5 is float16's smallest number; a quarter of that is lost."""
    assert flushed(trace_of([torch.tensor([2.0**-29, 0.0])]), np.array([[scale]])).tolist() == [[share]]


@pytest.mark.parametrize("largest", [3.0, 70000.0, 2.0**40, 3e38])
def test_the_ceiling_of_a_gradient_is_the_last_scale_that_the_native_cast_takes(largest: float) -> None:
    """Above 1 and below: one float64 more, and the product rounds to infinity."""
    g = float(torch.tensor(largest))
    (top,) = ceilings(trace_of([torch.tensor([largest])], form="fp32"), "fp16")
    above = Fraction(math.nextafter(top, math.inf)) * (1 + Fraction(2.0**-52))  # 65520 / g was rounded, too
    assert Fraction(g) * Fraction(float(top)) < 65520 <= Fraction(g) * above


def test_a_sweep_starts_from_the_first_recorded_scale_and_needs_a_recorded_step() -> None:
    trace = trace_of([torch.ones(2)] * 3, scale=2.0**9)
    assert sweep(trace)["init"].tolist() == [2.0**9]
    with pytest.raises(ValueError, match="no steps to replay"):
        sweep(trace.before(0))
    with pytest.raises(TypeError, match="replay needs a Trace"):
        sweep("trace.npz")  # type: ignore[arg-type]


def test_a_policy_that_ends_with_its_first_step_has_lost_everything() -> None:
    """Though that step was not skipped, and lost none of its values: it had none."""
    zero = ScalePolicy(init_scale=0.0, error_at_zero=True)
    row = replay(trace_of([torch.zeros(2)] * 4), zero).iloc[0]
    assert (row["skipped"], row["lost"]) == (0, 1.0)


@pytest.mark.parametrize(("top", "why"), [(0.5, "every step of the last tenth of the run was skipped"), (1.0, "")])
def test_the_only_step_of_a_run_is_its_last_tenth(top: float, why: str) -> None:
    row = replay(trace_of([torch.ones(2)]), ScalePolicy.fixed(1.0), tops=np.array([top])).iloc[0]
    assert row["why"] == why
