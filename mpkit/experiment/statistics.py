"""Paired differences of a few seeds: an interval, a p-value, the seeds that it would take, and many comparisons."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

ENOUGH = 1000  # seeds beyond which the answer is "more than anybody will run"


def student_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with a whole number of degrees of freedom, by its finite series: exact but for rounding.

    Source:  Abramowitz and Stegun 1964, 26.7.3 (df odd) and 26.7.4 (df even).

    >>> student_cdf(1.0, 1)  # Cauchy: 1/2 + atan(1) / pi
    0.75
    """
    angle = math.atan2(t, math.sqrt(df))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    first = 1 if df % 2 == 0 else 2
    term = total = 1.0 if df % 2 == 0 else math.cos(angle)
    for k in range(first, df - 2, 2):  # the factors k / (k + 1), each with cos squared
        term *= k / (k + 1) * square
        total += term
    both = sine * total if df % 2 == 0 else 2 / math.pi * (angle + (sine * total if df > 1 else 0.0))
    return min(max(0.5 + both / 2, 0.0), 1.0)  # far out the last bits would lead below 0


@cache
def student_quantile(probability: float, df: int) -> float:
    """The t with P(T <= t) = probability, for a probability of 0.5 or more and below 1.

    >>> round(student_quantile(0.975, 4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while student_cdf(high, df) < probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < probability else (low, middle)
    return high


@dataclass(frozen=True)
class Paired:
    """The mean of `n` numbers, paired differences say, with its uncertainty.

    mean, spread:  of the numbers; spread is the standard deviation (n - 1). low, high: 95 % interval of the mean by
                   Student's t. p: two-sided p-value of the t test against a mean of 0. NaN where there are too few.
    """

    n: int
    mean: float
    spread: float
    low: float
    high: float
    p: float

    @property
    def more(self) -> int | None:
        """Further seeds until a true difference of this size would be found in 4 of 5 studies; 0 when this study has
        enough, None when it is over `ENOUGH` or cannot be known."""
        return more_seeds(self.mean, self.spread, self.n)


def paired(differences: Iterable[float]) -> Paired:
    """What the finite ones of the differences, one per seed, say about their mean.

    >>> paired([1.0, 2.0, 3.0]).low < 0 < paired([2.0, 2.1, 2.2]).low
    True
    """
    told, nan = [d for d in differences if math.isfinite(d)], math.nan
    n = len(told)
    if n < 2:
        return Paired(n, told[0] if n else nan, nan, nan, nan, nan)
    mean, spread = statistics.fmean(told), statistics.stdev(told)
    if spread <= 1e-12 * max(map(abs, told)):  # equal but for rounding, all zero included
        return Paired(n, mean, 0.0, mean, mean, 1.0 if mean == 0 else 0.0)
    error = spread / math.sqrt(n)
    half = student_quantile(0.975, n - 1) * error
    return Paired(n, mean, spread, mean - half, mean + half, 2 * student_cdf(-abs(mean) / error, n - 1))


def more_seeds(difference: float, spread: float, n: int) -> int | None:
    """Further seeds, beyond `n`, until a true `difference` is told from 0 (5 % two-sided) in 4 of 5 studies.

    Units:   `spread` is the standard deviation of a paired difference, in the unit of `difference`.
    Source:  the usual approximation (t_0.975 + t_0.8) * spread / sqrt(n) <= |difference|, both quantiles at n - 1.
    """

    def found(seeds: int) -> bool:
        both = student_quantile(0.975, seeds - 1) + student_quantile(0.8, seeds - 1)
        return both * spread / math.sqrt(seeds) <= abs(difference)

    seeds = range(max(n, 2), ENOUGH + 1)
    at = bisect_left(seeds, True, key=found)
    return seeds[at] - n if at < len(seeds) else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value corrected for there being several: the chance of even one false finding stays at the level.

    NaN (no test was possible) stays NaN and counts as no comparison.
    Source:  Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, floor = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tested):
        floor = max(floor, min(1.0, p * (len(tested) - rank)))
        corrected[i] = floor
    return corrected
