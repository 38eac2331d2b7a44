"""Shares in percent, for sentences: no share above 0 is told as 0, none below 1 as all."""

from __future__ import annotations


def percent(share: float, digits: int = 0) -> str:
    """A share (0 to 1) in percent, rounded to so many digits.

    >>> percent(0.123), percent(0.0), percent(2e-5), percent(2e-5, 1), percent(0.99999), percent(1.0)
    ('12 %', '0 %', 'less than 1 %', 'less than 0.1 %', 'more than 99 %', '100 %')
    """
    step = 10.0**-digits
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if 100 * share < step:
        return f"less than {step:.{digits}f} %"
    if 100 - step < 100 * share < 100:
        return f"more than {100 - step:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"
