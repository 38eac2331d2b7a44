"""Shares in percent, for sentences, tables and pictures: no share above 0 is told as 0, none below 1 as all."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def percent(share: float, digits: int = 0) -> str:
    """A share (0 to 1) in percent, rounded to so many digits.

    >>> percent(0.123), percent(0.0), percent(2e-5), percent(2e-5, 1), percent(0.99999), percent(1.0)
    ('12 %', '0 %', 'less than 1 %', 'less than 0.1 %', 'more than 99 %', '100 %')
    """
    step = 10.0**-digits
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if 0 < 100 * share < step:
        return f"less than {step:.{digits}f} %"
    if 100 - step < 100 * share < 100:
        return f"more than {100 - step:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def percents(shares: ArrayLike) -> np.ndarray:
    """Shares (*) in percent for a picture, to a tenth; those below it as they are, and 100 for all alone."""
    exact = 100 * np.asarray(shares, dtype=float)
    near = np.round(exact, 1)
    return np.where((near == 0) | ((near == 100) & (exact < 100)), np.minimum(exact, 99.9), near)
