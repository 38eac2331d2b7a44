"""The rule of dynamic loss scaling: what each framework's defaults do, numbers and tensors alike, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import SINGLE, of

from mpkit.formats import FP32, FloatFormat
from mpkit.policies import (
    STOPS,
    ScalePolicy,
    Stop,
    TensorScalePolicy,
    advance,
    explain,
    initial,
    initial_tensor_scale,
    naive_loss_ratio,
    own_names,
    preset,
    run,
    stack,
    tensor_scale_preset,
)
from mpkit.policies.rule import FLOAT32_MAX, NEVER
from mpkit.replay import replay_tensor_scales, simulate
from mpkit.scalers import DynamicLossScaler, DynamicLossScaleUpdateCell, PolicyLossScaler


def test_vectors_are_equal_by_what_they_hold():
    several = [stack([preset("torch", growth_interval=n) for n in ns]) for ns in ((10, 20), (10, 20), (10, 30))]
    assert several[0] == several[1] != several[2] != preset("torch") != "torch"
    assert len({*several[:2]}) == 1
    same = stack([preset("torch")] * 3)
    assert (same.shape, same[2]) == ((3,), preset("torch"))


def test_deepspeed_dies_at_infinity_even_when_hysteresis_would_let_the_overflow_pass():
    history = run(preset("deepspeed", scale_window=1, delayed_shift=4), [True] * 1200 + [False])
    assert (history.scale[-1], history.raised_at) == (math.inf, 1200)
    assert run(preset("deepspeed", scale_window=1, dtype=torch.bfloat16), [True] * 1200 + [False]).raised_at is None


@pytest.mark.parametrize("vector", [False, True])
def test_a_tolerance_is_a_share_of_the_steps_since_the_last_change(vector):
    policy, steps = ScalePolicy(init_scale=64.0, growth_interval=9, tolerance=0.5), [True] * 2 + [False] * 4 + [True]
    found = run(stack([policy, preset("torch")]) if vector else policy, steps).scale
    # 1 of 3, then 2 of 4 bad steps; counted anew after it backs off: 1 of 1, and again
    assert (found[:, 0] if vector else found).tolist() == [64, 64, 64, 32, 16, 8, 8]
    assert run(ScalePolicy(init_scale=64.0, hysteresis=3, tolerance=0.0), [False] * 2).scale.tolist() == [32, 16]


def test_what_all_policies_of_a_vector_agree_on_stays_a_number_but_for_where_they_start():
    pair = stack([preset("torch")] * 2)
    assert (pair.init_scale.tolist(), pair.growth_factor) == ([2.0**16] * 2, 2.0)
    assert ScalePolicy(growth_factor=math.inf).growth_factor == math.inf


def test_a_vector_tells_an_error_of_the_first_step():
    policy = preset("deepspeed", init_scale=1.0, raise_error_at_min_scale=True, delayed_shift=1)
    both = run(stack([policy, preset("torch")]), [False])
    assert (both.raised_at.tolist(), both.raised[1]) == ([0, -1], "")
    assert both.raised[0] == run(policy, [False]).raised != ""


def test_an_empty_run_is_a_run():
    history = run(preset("torch"), [])
    assert (history.scale.shape, history.raised_at, history.reasons.tolist()) == ((0,), None, [])
    for steps in ([], [True]):
        both = run(stack([preset("torch"), preset("apex")]), steps)
        assert both.scale.shape == both.reasons.shape == (len(steps), 2)
        assert (both.raised_at.tolist(), both.raised) == ([-1, -1], ("", ""))
    with pytest.raises(ValueError, match="must have shape"):
        run(stack([preset("torch"), preset("apex")]), [[True] * 3])


def test_fixed_scales_of_the_frameworks():
    for policy, scale in [
        (preset("torch", enabled=False), 1.0),
        (preset("apex", loss_scale=128.0), 128.0),
        (preset("tf_keras", dynamic=False, initial_scale=64.0), 64.0),
        (preset("paddle", use_dynamic_loss_scaling=False, init_loss_scaling=32.0), 32.0),
        (preset("paddle", enable=False), 1.0),
    ]:
        assert set(run(policy, [True, False] * 20).scale) == {scale}


@pytest.mark.gpu
def test_vector_on_the_gpu_equals_the_numbers():
    policies = [of(name) for name in SINGLE]
    finite = (np.arange(3000)[:, None] % np.arange(7, 7 + len(policies))) != 0
    vector = run(stack(policies, device="cuda"), finite)
    for i, policy in enumerate(policies):
        alone = run(policy, finite[:, i])
        np.testing.assert_array_equal(vector.scale[: len(alone.scale), i], alone.scale)


# --- factors that float32 cannot hold ---------------------------------------------------------------------------------

F32, F64 = np.float32, np.float64
TWO = ("growth_factor", "backoff_factor")


once = lambda scale, factor: F32(F64(scale) * factor)  # noqa: E731
single = lambda scale, factor: F32(scale) * F32(factor)  # noqa: E731
single_over = lambda scale, factor: F32(scale) / F32(factor)  # noqa: E731
single_inverse = lambda scale, factor: F32(scale) * (F32(1) / F32(factor))  # noqa: E731
double = lambda scale, factor: F64(scale) * factor  # noqa: E731
double_over = lambda scale, factor: F64(scale) / factor  # noqa: E731
double_inverse = lambda scale, factor: F64(scale) * (1 / factor)  # noqa: E731


ARITHMETIC = {  # what its factors are called (one for both ways, or up and down), more of it, growth, backoff
    "mpkit": (TWO, {}, once, once),
    "torch": (TWO, {}, once, once),
    "tf_v1": (("multiplier",), {}, single, single_inverse),
    "deepspeed": (("scale_factor",), {"delayed_shift": 1}, double, double_over),
    "megatron": (TWO, {"hysteresis": 1}, single, single),
    "colossalai": (TWO, {"hysteresis": 1}, single, single),
    "fairseq": (("scale_factor",), {}, double, double_over),
    "jmp": (("factor",), {}, single, single_over),
    "flax": (TWO, {}, single, single),
    "paddle": (("incr_ratio", "decr_ratio"), {}, single, single),
    "paddle_static": (("incr_ratio", "decr_ratio"), {"decr_every_n_nan_or_inf": 1}, single, single),
    "fairscale_layerwise": (TWO, {}, double, double),
    "mindspore_scaler": (("scale_factor",), {}, single, single_over),
    "mindspore_cell": (("scale_factor",), {}, single, single_inverse),
    "mindspore_manager": (("scale_factor",), {}, double, double_inverse),
}


@pytest.mark.parametrize("framework", ARITHMETIC)
def test_a_factor_that_float32_cannot_hold_is_taken_as_the_framework_takes_it(framework):
    names, more, grow, shrink = ARITHMETIC[framework]
    first, window = own_names(framework)
    factors = dict(zip(names, (1.7, 0.6)))
    up, down = next(iter(factors.values())), [*factors.values()][-1]
    for start in (32768.0, 1000.0, 12345.678, 7.25):
        begins = {first: start} if first else {"layer_scale_dict": {"all": start}}
        policy = preset(framework, **factors, **more, **begins, **{window: 1000})
        policy = policy[0] if framework == "fairscale_layerwise" else policy
        begin = initial(policy)
        # a growth is made due, an overflow needs nothing
        grown, _ = advance(policy, begin._replace(good=policy.growth_interval - 1), True)
        shrunk, _ = advance(policy, begin, False)
        assert (grown.scale, shrunk.scale) == (float(grow(begin.scale, up)), float(shrink(begin.scale, down))), start


# --- each switch of the rule, each preset and each of its options by itself ---

BOUNDED = ScalePolicy(min_scale=2.0, max_scale=64.0)


FREE, NARROW = ScalePolicy(), ScalePolicy(scale_bits=16)


DECISIONS = [
    (BOUNDED, 8.0, math.nan, False, "stopped"), (BOUNDED, 64.0, 64.0, True, "at cap"),
    # twice FLOAT32_MAX / 2 is still a float32
    (BOUNDED, 63.0, 63.0, True, "held"), (FREE, FLOAT32_MAX / 2, FLOAT32_MAX / 2, True, "held"),
    (FREE, 2.0**127, 2.0**127, True, "at cap"), (NARROW, 32752.0, 32752.0, True, "held"),
    (NARROW, 32768.0, 32768.0, True, "at cap"), (BOUNDED, 2.0, 2.0, False, "at floor"),
    (BOUNDED, 2.5, 2.5, False, "tolerated"), (BOUNDED, math.inf, math.inf, False, "at floor"),
    # growth at an overflow was decided a step before, as a delayed policy does
    (BOUNDED, 8.0, 16.0, True, "grew"), (BOUNDED, 1.0, 2.0, True, "grew"), (BOUNDED, 4.0, 8.0, False, "grew"),
    (BOUNDED, 1.0, 2.0, False, "lifted"), (BOUNDED, 2.0, 3.0, False, "lifted"),
    (BOUNDED, 128.0, 64.0, True, "lowered"), (BOUNDED, 128.0, 32.0, True, "backed off"),
    (BOUNDED, 128.0, 64.0, False, "backed off"), (BOUNDED, 8.0, 4.0, False, "backed off"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "before", "after", "finite", "word"), DECISIONS)
def test_every_decision_has_its_word(policy: ScalePolicy, before: float, after: float, finite: bool, word: str) -> None:
    assert explain(policy, [before], [after], [finite]).tolist() == [word]


@pytest.mark.parametrize(
    ("policy", "flags", "stop", "at"),
    [
        ({"raise_at_min": True, "min_scale": 1.0, "init_scale": 1.0}, [True, False], Stop.AT_FLOOR, 1),
        ({"raise_at_min": True, "min_scale": 1.0, "init_scale": 2.0}, [False], Stop.NONE, -1),
        ({"raise_at_min": True, "min_scale": 1.0, "init_scale": 1.0}, [True], Stop.NONE, -1),
        ({"stop_at": 4.0, "init_scale": 16.0}, [False, False], Stop.SANK, 1),
        ({"stop_at": 4.0, "init_scale": 16.0}, [False], Stop.NONE, -1),
        ({"error_at_zero": True, "init_scale": 0.0}, [True], Stop.ZERO, 0),
        ({"error_at_zero": False, "init_scale": 0.0}, [True], Stop.NONE, -1),
        ({"error_at_inf": True, "init_scale": math.inf}, [True, False], Stop.INFINITE, 1),
        ({"error_at_inf": False, "init_scale": math.inf}, [False], Stop.NONE, -1),
        ({"max_consecutive": 2}, [False, False, True, False, False, False], Stop.CONSECUTIVE, 5),
        ({"max_consecutive": 2}, [False, False, True, False, False], Stop.NONE, -1),
    ],
    ids=str,
)
def test_every_error_of_a_framework_comes_in_its_step(policy: Any, flags: list[bool], stop: Stop, at: int) -> None:
    """By itself, and beside a policy that raises none."""
    one = run(ScalePolicy(**policy), flags)
    assert (one.raised_at, one.raised) == ((at if at >= 0 else None), STOPS[stop])
    if stop is Stop.SANK:
        assert one.final.scale == 8.0  # the decision that stops the run is not carried out
    both = run(stack([ScalePolicy(**policy), ScalePolicy(init_scale=8.0)]), flags)
    assert both.raised_at.tolist() == [at, -1]


PATIENT = {"init_scale": 8.0, "hysteresis": 2}


@pytest.mark.parametrize(
    ("name", "policy", "flags", "without", "with_it"),
    [
        ("clamp_both_ways", {"init_scale": 0.25, "min_scale": 2.0, "growth_interval": 1}, [True], [0.5], [2.0]),
        ("clamp_both_ways", {"init_scale": 128.0, "max_scale": 60.0}, [False], [64.0], [60.0]),
        ("hold_at_overflow", {"init_scale": 2.0**127, "growth_interval": 1}, [True], [math.inf], [2.0**127]),
        ("delayed", {"init_scale": 8.0}, [False, True], [4.0, 4.0], [8.0, 4.0]),
        ("flush_subnormal", {"init_scale": 2.0**-126}, [False], [2.0**-127], [0.0]),
        ("flush_subnormal", {"init_scale": 2.0**-125}, [False], [2.0**-126], [2.0**-126]),
        ("growth_ge", {"init_scale": 8.0, "init_count": 5, "growth_interval": 3}, [True], [8.0], [16.0]),
        ("refill_on_finite", PATIENT, [False, True, False], [8, 8, 4.0], [8, 8, 8.0]),
        ("refill_on_backoff", PATIENT, [False] * 3, [8, 4, 2.0], [8, 4, 4.0]),
        ("refill_on_growth", {**PATIENT, "growth_interval": 1}, [False, True, False], [8, 16, 8.0], [8, 16, 16.0]),
    ],
)
def test_every_switch_of_the_rule_turns_its_part_on(
    name: str, policy: dict[str, Any], flags: list[bool], without: list[float], with_it: list[float]
) -> None:
    """In a policy by itself, and in a vector where one has it and one has not."""
    pair = [ScalePolicy(**policy, **{name: value}) for value in (False, True)]
    assert [run(one, flags).scale.tolist() for one in pair] == [without, with_it]
    assert run(stack(pair), flags).scale.T.tolist() == [without, with_it]


BACK_AND_GROW = {"hold_at_overflow": False, "refill_on_growth": True, "hysteresis": 2, "growth_interval": 1000}


DIVIDES = {"backoff_factor": 1.0, "backoff_divisor": 2.0}
DOUBLE = {"scale_bits": 64, "hold_at_overflow": False}
MULTIPLIES = {"backoff_factor": 0.5, "backoff_divisor": 1.0}


WRITTEN_DOWN: dict[str, dict[str, Any]] = {  # what differs from torch's rule, and what the preset is given
    "mpkit": {"min_scale": 2.0**-14, "max_scale": 2.0**24, "raise_at_min": True},
    "torch": {},
    "keras3": {"init_scale": 2.0**15, "hold_at_overflow": False, "flush_subnormal": True},
    "tf_keras": {"init_scale": 2.0**15, "min_scale": 1.0, "growth_ge": True},
    "tf_v1": {"init_scale": 2.0**15, "min_scale": 1.0, "growth_ge": True},
    "apex": {**DOUBLE, "max_scale": 2.0**24, "error_at_zero": True},
    "deepspeed": {
        **BACK_AND_GROW, **DIVIDES, "min_scale": 1.0, "scale_bits": 64, "first_growth_lag": 1, "raise_at_min": True,
        "error_at_inf": True,
    },
    "megatron": {**BACK_AND_GROW, "init_scale": 2.0**32, "min_scale": 1.0},
    "colossalai": BACK_AND_GROW,
    "fairseq": {**DIVIDES, **DOUBLE, "init_scale": 2.0**15, "tolerance": 0.0, "stop_at": 1e-4},
    "jmp": {**DIVIDES, "init_scale": 8.0, "min_scale": 1.0, "flush_subnormal": True},
    "flax": {
        "min_scale": 2.0**-126, "max_scale": FLOAT32_MAX, "first_growth_lag": 1, "next_growth_lag": 1,
        "flush_subnormal": True,
    },
    "paddle": {"hold_at_overflow": False, "refill_on_finite": True, "refill_on_backoff": True},
    "paddle_static": {
        "init_scale": 2.0**15, "backoff_factor": float(np.float32(0.8)), "growth_interval": 1000, "min_scale": 1.0,
        "hysteresis": 2, "refill_on_finite": True, "refill_on_backoff": True,
    },
    "mxnet": {**DOUBLE, "max_scale": 2.0**24, "delayed": True},
    "mindspore_scaler": {**DIVIDES, "init_scale": 8.0, "growth_interval": 3, "min_scale": 1.0, "flush_subnormal": True},
    "mindspore_cell": {
        "init_scale": 8.0, "growth_interval": 3, "min_scale": 1.0, "hold_at_overflow": False, "growth_ge": True,
    },
    "mindspore_manager": {**DOUBLE, "init_scale": 2.0**24, "min_scale": 1.0, "max_consecutive": 1000},
}  # fmt: skip


NEEDED: dict[str, dict[str, Any]] = {
    "jmp": {"loss_scale": 8.0},
    "mindspore_scaler": {"scale_value": 8.0, "scale_factor": 2, "scale_window": 3},
    "mindspore_cell": {"loss_scale_value": 8.0, "scale_factor": 2, "scale_window": 3},
}


@pytest.mark.parametrize("framework", WRITTEN_DOWN)
def test_a_preset_is_the_policy_that_the_reference_writes_down(framework: str) -> None:
    assert preset(framework, **NEEDED.get(framework, {})) == ScalePolicy(name=framework, **WRITTEN_DOWN[framework])


def test_the_layers_of_fairscale_have_one_policy_with_a_start_each() -> None:
    policy = preset("fairscale_layerwise", layer_scale_dict={"a": 1024.0, "b": 2.0**-100})
    assert torch.as_tensor(policy.init_scale).tolist() == [1024.0, 2.0**-100]
    given = DOUBLE | {"growth_interval": 10000, "min_scale": 2.0**-126, "max_scale": FLOAT32_MAX}
    given |= {"clamp_both_ways": True, "layers": ("a", "b"), "name": "fairscale_layerwise"}
    assert replace(policy, init_scale=2.0**16) == ScalePolicy(**given)


@pytest.mark.parametrize(
    ("framework", "given", "expected"),
    [
        ("mpkit", {"hysteresis": 1}, {}),
        ("mpkit", {"hysteresis": 2}, {"hysteresis": 2, "refill_on_growth": True, "refill_on_finite": True}),
        ("deepspeed", {"delayed_shift": 1}, {"hysteresis": 1}),
        ("deepspeed", {"delayed_shift": 0}, {"hysteresis": NEVER}),
        ("deepspeed", {"dtype": torch.bfloat16}, {"error_at_inf": False}),
        ("deepspeed", {"consecutive_hysteresis": True}, {"refill_on_finite": True}),
        ("deepspeed", {"scale_window": 1}, {"growth_interval": 1}),
        ("megatron", {"growth_interval": 1, "hysteresis": 1}, {"growth_interval": 1, "hysteresis": 1}),
        ("megatron", {"initial_scale": 2.0, "min_scale": 2.0}, {"init_scale": 2.0, "min_scale": 2.0}),
        ("colossalai", {"hysteresis": 0}, {"hysteresis": 0}),
        ("colossalai", {"min_scale": 4.0, "max_scale": 8.0}, {"min_scale": 4.0, "max_scale": 8.0}),
        ("fairseq", {"scale_window": 1, "tolerance": -1.0}, {"growth_interval": 1, "tolerance": 0.0}),
        ("fairseq", {"threshold": 0.5}, {"min_scale": 0.5}),
        ("jmp", {"dtype": "float16"}, {"scale_bits": 16, "flush_subnormal": False}),
        ("jmp", {"dtype": "float64"}, {"scale_bits": 64, "flush_subnormal": False}),
        ("jmp", {"jit": True, "min_loss_scale": 4.0}, {**MULTIPLIES, "min_scale": 1.0}),
        ("flax", {"minimum_scale": None, "fin_steps": 7}, {"min_scale": 0.0, "init_count": 7}),
        ("paddle", {"decr_every_n_nan_or_inf": 1}, {"hysteresis": 1}),
        ("paddle", {"decr_every_n_nan_or_inf": 0}, {"hysteresis": NEVER}),
        ("apex", {"init_scale": 2.0**25, "min_loss_scale": 2.0}, {"init_scale": 2.0**24, "min_scale": 2.0}),
        ("mindspore_cell", {"scale_window": 2.5}, {"growth_interval": 3}),
        ("tf_keras", {"initial_scale": 4.0, "dynamic_growth_steps": 5}, {"init_scale": 4.0, "growth_interval": 5}),
    ],
    ids=str,
)
def test_an_option_of_a_framework_changes_what_its_class_changes(
    framework: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """And nothing else; the ends of a range belong to it where the class says so."""
    needed = NEEDED.get(framework, {})
    assert preset(framework, **{**needed, **given}) == replace(preset(framework, **needed), **expected)


ENDS = {  # preset -> (what it is made with, what its framework refuses beside that, and just takes)
    "mpkit": (
        {"init_scale": 8.0},
        [
            *({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"min_scale": 0.0}),
            *({"min_scale": 9.0}, {"max_scale": 7.0}, {"max_scale": math.inf}),
        ],
        [{"min_scale": 8.0, "max_scale": 8.0}],
    ),
    "torch": ({}, [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], [{"backoff_factor": 0.0}]),
    "deepspeed": ({}, [{"scale_window": 0}], [{"scale_window": 1}]),
    "fairseq": ({}, [{"scale_window": 0}], [{"scale_window": 1}]),
    "megatron": (
        {"initial_scale": 8.0},
        [
            *({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"min_scale": 0.0}),
            *({"min_scale": 9.0}, {"growth_interval": 0}, {"hysteresis": 0}),
        ],
        [{"min_scale": 8.0}, {"growth_interval": 1}, {"hysteresis": 1}],
    ),
    "colossalai": ({}, [{"hysteresis": -1}, {"min_scale": 2.0**17}], [{"hysteresis": 0}, {"min_scale": 2.0**16}]),
    "paddle": ({}, [{"incr_ratio": 1.0}, {"decr_ratio": 0.0}, {"decr_ratio": 1.0}], []),
    "jmp": (NEEDED["jmp"], [{"factor": 0}, {"dtype": "bfloat16"}], [{"factor": 1}]),
    "tf_v1": ({}, [{"multiplier": 0}], [{"multiplier": 1}]),
    "mindspore_cell": (NEEDED["mindspore_cell"], [{"scale_factor": 0}], [{"scale_factor": 1}]),
    "mindspore_manager": ({}, [{"scale_factor": 0}], [{"scale_factor": 1}]),
    "fairscale_layerwise": (
        {"layer_scale_dict": {"a": 1.0, "b": 2.0}},
        [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"layer_scale_dict": {"a": 0.0}}],
        [{"layer_scale_dict": {"a": 1.0}}, {"backoff_factor": 0.0}],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_preset_refuses_what_its_framework_refuses_and_takes_the_last_number_before(name: str) -> None:
    given, refused, taken = ENDS[name]
    for more in refused:
        with pytest.raises(ValueError, match=r"must|need|dtype is"):
            preset(name, **{**given, **more})
    for more in ({}, *taken):
        assert preset(name, **{**given, **more}).name == name


# --- far numbers


def test_a_count_that_is_never_reached_is_one_everywhere():
    for huge in (math.inf, 10**30, 2**62):
        policy = ScalePolicy(growth_interval=huge, hysteresis=huge, max_consecutive=huge)
        flags = [True, False, True]
        assert run(policy, flags).scale.tolist() == [65536.0] * 3
        assert run(stack([policy, ScalePolicy()]), flags).scale[:, 0].tolist() == [65536.0] * 3
        assert run(stack([policy]), flags).scale[:, 0].tolist() == [65536.0] * 3
        scaler = PolicyLossScaler(policy)
        for flag in flags:
            scaler.adjust(torch.tensor(flag))
        assert scaler.scale_value == 65536.0


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_scale_that_is_no_number_is_counted_alike():
    """inf * 0: the steps after it are skipped ones, and not steps that did not happen."""
    policy = ScalePolicy(init_scale=math.inf, backoff_factor=0.0)
    one, many = simulate(np.full(5, 10.0), policy), simulate(np.full(5, 10.0), stack([policy] * 20))
    assert one.skipped[0] == many.skipped[0] == 5
    assert one.first_good[0] == many.first_good[0] == 5
    assert np.isnan([one.lowest[0], many.lowest[0]]).all()


def test_a_window_beyond_32_bits_is_long_and_a_factor_beyond_floats_is_refused():
    scaler, scale = DynamicLossScaler(1024, 2, 2**32 + 5), torch.ones(())
    cell = DynamicLossScaleUpdateCell(8.0, 2, 2**40)
    for _ in range(7):
        scaler.adjust(torch.tensor(True))
        cell(scale, torch.tensor(False))
    assert (scaler.scale_value, scale) == (1024, 1)
    with pytest.raises(ValueError, match="scale_factor must fit a float"):
        DynamicLossScaler(1024, 10**400, 1)


TINY = {
    "margin": tensor_scale_preset("te_delayed", margin=126, power_of_two=True),
    "unfused": tensor_scale_preset("te_delayed_unfused", margin=126, power_of_two=True),
    "far apart": tensor_scale_preset("te_current", FloatFormat("e2m1i", 2, 1), power_of_two=True),
    "no float32": TensorScalePolicy(element_max=1.9, unfused=True),
    "beyond": TensorScalePolicy(element_max=3e38, margin=-126),
    "widest": tensor_scale_preset("te_current", FP32),
}


@pytest.mark.parametrize("name", TINY)
def test_numbers_tensors_and_replays_have_one_tensor_scale(name: str):
    policy = TINY[name]
    amaxes = [3e38, 1.0, 448.0, 3e38, 1e-30, 1534539969274362.0, 3e38, 2.0]
    number, tensor, want = initial_tensor_scale(policy), initial_tensor_scale(policy, "cpu"), []
    for amax in amaxes:
        before = number.scale
        number, tensor = advance(policy, number, amax), advance(policy, tensor, amax)
        assert number.scale == tensor.scale.item(), amax
        want.append(before if policy.delayed else number.scale)
    assert replay_tensor_scales(amaxes, [policy], scales=True).scales.tolist() == [want]
    if name == "far apart":  # 3 over the largest float32 lies between 2**-127 and 2**-126
        assert advance(policy, initial_tensor_scale(policy), torch.finfo(torch.float32).max).scale == 2.0**-127


def test_the_naive_rule_runs_away_as_its_docstring_says():
    assert [naive_loss_ratio(scale, 2.0) for scale in (1.0, 2.0, 4.0, 5.0)] == [0.9, 2.0, 4.0, 5.5]
    for scale, steps, beyond in ((1.0, 158, lambda s: s < 2.0**-24), (65536.0, 815, lambda s: s > FLOAT32_MAX)):
        scales = [scale := naive_loss_ratio(scale, 2.0) for _ in range(steps)]
        assert [beyond(s) for s in scales[-2:]] == [False, True]
