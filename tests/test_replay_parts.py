"""The parts of a replay by themselves, where their answers turn."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_replay import trace_of

from mpkit.policies import preset, run, stack
from mpkit.replay import can_compile, replay, simulate
from mpkit.replay.tensor_scales import _finite_max, _unused


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
    assert (frame.why[0] == "every step of the last tenth was skipped") is told


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
