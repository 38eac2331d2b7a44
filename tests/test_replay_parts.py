"""The parts of a replay by themselves, where their answers turn."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
