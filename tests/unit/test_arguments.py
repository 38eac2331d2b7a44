"""The vocabulary of checks: what each takes, and that a refusal begins with the name of the argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch import nn

from mpkit import optimizers as opt
from mpkit.arguments import check_choice, check_count, check_flags, check_float, check_kind, check_number
from mpkit.schedules import ExponentialDecayLR, ListedLR


def pair():
    return list(nn.Linear(2, 1).named_parameters())


def test_numpy_numbers_are_numbers():
    rate = np.float32(0.25)
    for given, want in ((rate, 0.25), (np.float64(0.25), 0.25), (np.int64(2), 2.0), (np.array(0.25), 0.25)):
        assert type(opt.SGD(pair(), given).param_groups[0]["lr"]) is float
        assert opt.SGD(pair(), given).param_groups[0]["lr"] == want
    listed = opt.SGD(pair(), np.array([0.5, 0.25], dtype=np.float32)).param_groups[0]["lr"]
    assert listed == ListedLR((0.5, 0.25))
    assert all(type(value) is float for value in listed.values)
    assert ExponentialDecayLR(rate, np.float32(0.5), 1)(1) == 0.125
    assert opt.Adam(pair(), 0.1, beta1=np.float32(0.5), weight_decay=rate).param_groups[0]["betas"][0] == 0.5


def test_the_checks_themselves():
    assert check_number("x", np.float32(0.5)) == 0.5
    assert check_float("x", 0.5) == 0.5
    assert check_count("x", np.int64(3)) == 3
    assert check_choice("x", "a", ("a", "b")) == "a"
    check_flags(x=True)
    check_kind("x", None, int, "an int", optional=True)
    for call, error in (
        (lambda: check_number("x", True), TypeError),
        (lambda: check_number("x", math.nan), ValueError),
        (lambda: check_number("x", math.inf), ValueError),
        (lambda: check_number("x", 0.0, open_low=True), ValueError),
        (lambda: check_float("x", 1), TypeError),
        (lambda: check_count("x", 1.0), TypeError),
        (lambda: check_count("x", True), TypeError),
        (lambda: check_choice("x", ["a"], ("a",)), TypeError),
        (lambda: check_choice("x", "b", ("a",)), ValueError),
        (lambda: check_flags(x=1), TypeError),
        (lambda: check_kind("x", None, int, "an int"), TypeError),
    ):
        with pytest.raises(error, match=r"^x must be"):
            call()
