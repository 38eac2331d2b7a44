"""The parts of the policies where their answers turn: words for decisions, and presets of a tensor's scale."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mpkit.formats import E4M3FN
from mpkit.policies import ScalePolicy, preset, run
from mpkit.policies.history import explain, naive_loss_ratio
from mpkit.policies.rule import FLOAT32_MAX, NEVER, STOPS, Stop, stack
from mpkit.policies.tensor_scale import (
    TENSOR_SCALE_PRESETS,
    advance_tensor_scale,
    initial_tensor_scale,
    stack_tensor_scales,
    tensor_scale_preset,
)
from mpkit.replay import replay_tensor_scales

EXACT, POWER = np.float32(448) / np.float32(3), 2.0 ** math.floor(math.log2(448 / 3))
FLOORED = np.float32(448 / 1e-12)  # torchao divides by at least 1e-12
FIRST = {  # preset -> the scale of a first step whose amax is 3, and is 0
    "te_delayed": (1.0, 1.0),  # nothing has been seen yet
    "te_delayed_unfused": (1.0, 1.0),
    "te_current": (EXACT, 1.0),
    "torchao_tensorwise": (EXACT, FLOORED),
    "torchao_rowwise": (POWER, 2.0 ** math.floor(math.log2(448 / 1e-12))),
    "te_blockwise": (POWER, 1.0),
    "te_blockwise_fp32": (EXACT, 1.0),
    "torchao_blockwise": (EXACT, FLOORED),
}


@pytest.mark.parametrize("name", TENSOR_SCALE_PRESETS)
def test_a_current_scale_is_that_of_the_tensor_itself_and_a_delayed_one_of_those_before(name: str) -> None:
    """TransformerEngine keeps 1 for a tensor of zeros; power-of-two scales are rounded down, so that nothing clips."""
    policy = tensor_scale_preset(name, E4M3FN)
    for amax, scale in zip((3.0, 0.0), FIRST[name]):
        replayed = replay_tensor_scales(np.array([amax, amax, amax], dtype=np.float32), [policy], scales=True)
        assert replayed.scales is not None
        assert replayed.scales[0, 0] == np.float32(scale)
        later = EXACT if name.startswith("te_delayed") and amax else scale
        assert replayed.scales[0, 2] == pytest.approx(later, rel=2.0**-23)  # unfused the quotient is formed otherwise
    assert policy.unfused == name.endswith("unfused")
    assert policy.double == name.startswith("torchao")


BOUNDED = ScalePolicy(min_scale=2.0, max_scale=64.0)
FREE, NARROW = ScalePolicy(), ScalePolicy(scale_bits=16)


@pytest.mark.parametrize(
    ("policy", "before", "after", "finite", "word"),
    [
        (BOUNDED, 8.0, math.nan, False, "stopped"),
        (BOUNDED, 64.0, 64.0, True, "at cap"),
        (BOUNDED, 63.0, 63.0, True, "held"),
        (FREE, FLOAT32_MAX / 2, FLOAT32_MAX / 2, True, "held"),  # twice that is still a float32
        (FREE, 2.0**127, 2.0**127, True, "at cap"),
        (NARROW, 32752.0, 32752.0, True, "held"),
        (NARROW, 32768.0, 32768.0, True, "at cap"),
        (BOUNDED, 2.0, 2.0, False, "at floor"),
        (BOUNDED, 2.5, 2.5, False, "tolerated"),
        (BOUNDED, math.inf, math.inf, False, "at floor"),
        (BOUNDED, 8.0, 16.0, True, "grew"),
        (BOUNDED, 1.0, 2.0, True, "grew"),
        (BOUNDED, 4.0, 8.0, False, "grew"),  # decided a step before, as a delayed policy does
        (BOUNDED, 1.0, 2.0, False, "lifted"),
        (BOUNDED, 2.0, 3.0, False, "lifted"),
        (BOUNDED, 128.0, 64.0, True, "lowered"),
        (BOUNDED, 128.0, 32.0, True, "backed off"),
        (BOUNDED, 128.0, 64.0, False, "backed off"),
        (BOUNDED, 8.0, 4.0, False, "backed off"),
    ],
)
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
        ("refill_on_finite", {"init_scale": 8.0, "hysteresis": 2}, [False, True, False], [8, 8, 4.0], [8, 8, 8.0]),
        ("refill_on_backoff", {"init_scale": 8.0, "hysteresis": 2}, [False] * 3, [8, 4, 2.0], [8, 4, 4.0]),
        (
            "refill_on_growth",
            {"init_scale": 8.0, "hysteresis": 2, "growth_interval": 1},
            [False, True, False],
            [8, 16, 8.0],
            [8, 16, 16.0],
        ),
    ],
)
def test_every_switch_of_the_rule_turns_its_part_on(
    name: str, policy: dict[str, Any], flags: list[bool], without: list[float], with_it: list[float]
) -> None:
    """In a policy by itself, and in a vector where one has it and one has not."""
    off, on = (ScalePolicy(**policy, **{name: value}) for value in (False, True))
    assert run(off, flags).scale.tolist() == without
    assert run(on, flags).scale.tolist() == with_it
    assert run(stack([off, on]), flags).scale.T.tolist() == [without, with_it]


def test_decisions_on_tensors_with_a_graph_are_explained_too() -> None:
    before, after = torch.tensor([8.0, 8.0]), torch.tensor([16.0, 4.0], requires_grad=True)
    assert explain(ScalePolicy(), before, after, torch.tensor([True, False])).tolist() == ["grew", "backed off"]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("init_scale", 0.0),
        ("growth_factor", math.ulp(0.0)),
        ("backoff_factor", 0.0),
        ("backoff_divisor", math.ulp(0.0)),
        ("min_scale", 0.0),
        ("max_scale", 0.0),
        ("max_consecutive", 0),
    ],
)
def test_the_least_that_a_number_of_a_policy_may_be(name: str, least: float) -> None:
    assert getattr(ScalePolicy(**{name: least}), name) == least
    below = -1 if isinstance(least, int) else math.nextafter(least, -math.inf)
    with pytest.raises(ValueError, match=f"{name} must lie in"):
        ScalePolicy(**{name: below})


@pytest.mark.parametrize("floor", [0.0, 1e-12])
@pytest.mark.parametrize("name", [name for name, policy in TENSOR_SCALE_PRESETS.items() if not policy.delayed])
def test_a_current_scale_is_the_same_by_numbers_and_by_tensors(name: str, floor: float) -> None:
    """At the amaxes where a quotient overflows, vanishes, or is none."""
    policy = tensor_scale_preset(name, E4M3FN, amax_floor=floor)
    for amax in (0.0, 2.0**-149, 2.0**-126, 1e-12, 1.0, 3.0, 448.0, 2.0**127, FLOAT32_MAX, math.inf, math.nan):
        number = advance_tensor_scale(policy, initial_tensor_scale(policy), amax).scale
        tensor = advance_tensor_scale(policy, initial_tensor_scale(policy, "cpu"), torch.tensor(amax)).scale
        assert number == float(tensor) or (math.isnan(number) and bool(tensor.isnan())), amax


def test_mpkits_own_policy_doubles_and_halves() -> None:
    policy = preset("mpkit", growth_interval=2)
    assert run(policy, [True] * 4).scale.tolist() == [2.0**16, 2.0**17, 2.0**17, 2.0**18]
    assert run(policy, [False] * 2).scale.tolist() == [2.0**15, 2.0**14]


def test_the_code_of_every_error_is_as_published() -> None:
    """Codes are stored in arrays and files: 0 is none, and no two errors share one."""
    assert {stop.name: int(stop) for stop in Stop} == {
        "NONE": 0, "AT_FLOOR": 1, "SANK": 2, "ZERO": 3, "INFINITE": 4, "CONSECUTIVE": 5,
    }  # fmt: skip
    assert len({STOPS[stop] for stop in Stop}) == 6


BACK_AND_GROW = {"hold_at_overflow": False, "refill_on_growth": True, "hysteresis": 2, "growth_interval": 1000}
DIVIDES = {"backoff_factor": 1.0, "backoff_divisor": 2.0}
WRITTEN_DOWN: dict[str, dict[str, Any]] = {  # what differs from torch's rule, and what the preset is given
    "mpkit": {"min_scale": 2.0**-14, "max_scale": 2.0**24, "raise_at_min": True},
    "torch": {},
    "keras3": {"init_scale": 2.0**15, "hold_at_overflow": False, "flush_subnormal": True},
    "tf_keras": {"init_scale": 2.0**15, "min_scale": 1.0, "growth_ge": True},
    "tf_v1": {"init_scale": 2.0**15, "min_scale": 1.0, "growth_ge": True},
    "apex": {"max_scale": 2.0**24, "scale_bits": 64, "hold_at_overflow": False, "error_at_zero": True},
    "deepspeed": {
        **BACK_AND_GROW, **DIVIDES, "min_scale": 1.0, "scale_bits": 64, "first_growth_lag": 1, "raise_at_min": True,
        "error_at_inf": True,
    },
    "megatron": {**BACK_AND_GROW, "init_scale": 2.0**32, "min_scale": 1.0},
    "colossalai": BACK_AND_GROW,
    "fairseq": {
        **DIVIDES, "init_scale": 2.0**15, "scale_bits": 64, "hold_at_overflow": False, "tolerance": 0.0,
        "stop_at": 1e-4,
    },
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
    "mxnet": {"max_scale": 2.0**24, "scale_bits": 64, "hold_at_overflow": False, "delayed": True},
    "mindspore_scaler": {**DIVIDES, "init_scale": 8.0, "growth_interval": 3, "min_scale": 1.0, "flush_subnormal": True},
    "mindspore_cell": {
        "init_scale": 8.0, "growth_interval": 3, "min_scale": 1.0, "hold_at_overflow": False, "growth_ge": True,
    },
    "mindspore_manager": {
        "init_scale": 2.0**24, "min_scale": 1.0, "scale_bits": 64, "hold_at_overflow": False, "max_consecutive": 1000,
    },
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
    assert [float(x) for x in torch.as_tensor(policy.init_scale)] == [1024.0, 2.0**-100]
    assert replace(policy, init_scale=2.0**16) == ScalePolicy(
        growth_interval=10000,
        min_scale=2.0**-126,
        max_scale=FLOAT32_MAX,
        scale_bits=64,
        hold_at_overflow=False,
        clamp_both_ways=True,
        layers=("a", "b"),
        name="fairscale_layerwise",
    )


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
        (
            "jmp",
            {"jit": True, "min_loss_scale": 4.0},
            {"backoff_factor": 0.5, "backoff_divisor": 1.0, "min_scale": 1.0},
        ),
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


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("torch", {"growth_factor": 1.0}),
        ("torch", {"backoff_factor": 1.0}),
        ("mpkit", {"growth_factor": 1.0}),
        ("mpkit", {"backoff_factor": 1.0}),
        ("mpkit", {"backoff_factor": 0.0}),
        ("mpkit", {"min_scale": 0.0}),
        ("mpkit", {"max_scale": math.inf}),
        ("deepspeed", {"scale_window": 0}),
        ("megatron", {"min_scale": 0.0}),
        ("megatron", {"growth_factor": 1.0}),
        ("megatron", {"backoff_factor": 1.0}),
        ("megatron", {"backoff_factor": 0.0}),
        ("megatron", {"growth_interval": 0}),
        ("megatron", {"hysteresis": 0}),
        ("colossalai", {"hysteresis": -1}),
        ("fairseq", {"scale_window": 0}),
        ("tf_v1", {"multiplier": 0.0}),
        ("jmp", {"loss_scale": 8.0, "factor": 0.0}),
        ("paddle", {"incr_ratio": 1.0}),
        ("paddle", {"decr_ratio": 1.0}),
        ("paddle", {"decr_ratio": 0.0}),
        ("fairscale_layerwise", {"layer_scale_dict": {"a": 0.0}}),
        ("fairscale_layerwise", {"layer_scale_dict": {}}),
        ("fairscale_layerwise", {"layer_scale_dict": {"a": 1.0}, "growth_factor": 1.0}),
        ("fairscale_layerwise", {"layer_scale_dict": {"a": 1.0}, "backoff_factor": 1.0}),
        ("mindspore_cell", {"loss_scale_value": 8.0, "scale_window": 3, "scale_factor": 0.0}),
        ("mindspore_manager", {"scale_factor": 0}),
    ],
    ids=str,
)
def test_the_ends_of_a_range_that_a_framework_refuses(framework: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(given))):
        preset(framework, **given)


@pytest.mark.parametrize("given", [{}, {"init_scale": 2.0**-14}, {"init_scale": 2.0**24}], ids=str)
def test_mpkits_start_may_lie_at_its_floor_and_at_its_cap(given: dict[str, Any]) -> None:
    assert preset("mpkit", **given).init_scale == given.get("init_scale", 2.0**16)


@pytest.mark.parametrize(
    ("scale", "loss", "after"), [(2.0, 1.0, 2.0), (1.0, 1.0, 1.0), (2.0, 0.5, 2.2), (1.0, 2.0, 0.9)]
)
def test_the_naive_rule_rests_on_both_ends_of_its_band(scale: float, loss: float, after: float) -> None:
    assert naive_loss_ratio(scale, loss) == after


def test_policies_of_one_name_keep_it_when_they_are_stacked() -> None:
    policy = tensor_scale_preset("te_delayed")
    assert stack_tensor_scales([policy, replace(policy, margin=1)]).name == "te_delayed"
    assert stack_tensor_scales([policy, tensor_scale_preset("te_current")]).name == "stack"


def test_the_largest_float_is_a_scale_as_an_int_too() -> None:
    largest = sys.float_info.max
    assert ScalePolicy(init_scale=int(largest), scale_bits=64).init_scale == largest
    with pytest.raises(ValueError, match="init_scale must fit a float"):
        ScalePolicy(init_scale=int(largest) + 1, scale_bits=64)


def test_a_fixed_scale_of_zero_is_not_taken_for_none() -> None:
    assert preset("tf_keras", dynamic=False, initial_scale=0.0).init_scale == 0.0
    with pytest.raises(ValueError, match="initial_scale must be given"):
        preset("tf_keras", dynamic=False)


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
    "jmp": ({"loss_scale": 8.0}, [{"factor": 0}, {"dtype": "bfloat16"}], [{"factor": 1}]),
    "tf_v1": ({}, [{"multiplier": 0}], [{"multiplier": 1}]),
    "mindspore_cell": (
        {"loss_scale_value": 8.0, "scale_factor": 2, "scale_window": 3},
        [{"scale_factor": 0}],
        [{"scale_factor": 1}],
    ),
    "mindspore_manager": ({}, [{"scale_factor": 0}], [{"scale_factor": 1}]),
    "fairscale_layerwise": (
        {"layer_scale_dict": {"a": 1.0, "b": 2.0}},
        [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"layer_scale_dict": {}}, {"layer_scale_dict": {"a": 0.0}}],
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
