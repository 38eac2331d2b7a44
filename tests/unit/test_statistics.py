"""The statistics of an experiment beside printed tables, hand-worked numbers and every sign of an exact test."""

import itertools
import math
import random
import statistics

import pytest

from mpkit.experiment.statistics import ENOUGH, more_seeds, paired, student_cdf, student_quantile
from mpkit.experiment.verdict import direction

# Student's t, upper 2.5 % and 20 % points: Fisher and Yates 1938, table III (as every textbook prints it)
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}
TABLE_80 = {1: 1.376, 2: 1.061, 4: 0.941, 9: 0.883, 30: 0.854}


@pytest.mark.parametrize("df", TABLE)
def test_quantiles_are_those_of_the_printed_table(df):
    assert student_quantile(0.975, df) == pytest.approx(TABLE[df], abs=6e-4)


@pytest.mark.parametrize("df", TABLE_80)
def test_other_quantiles_too(df):
    assert student_quantile(0.8, df) == pytest.approx(TABLE_80[df], abs=6e-4)


def test_the_distribution_has_its_closed_forms_for_few_degrees_of_freedom():
    for t in (-3.0, -0.5, 0.0, 1.0, 7.5):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-15)
        assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-15)
        by_hand = 0.5 + (math.atan(t / 3**0.5) + (t / 3**0.5) / (1 + t * t / 3)) / math.pi
        assert student_cdf(t, 3) == pytest.approx(by_hand, abs=1e-15)


@pytest.mark.parametrize("df", [3, 4, 7, 20, 101])
def test_the_distribution_is_the_integral_of_its_density(df):
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    n, end = 4000, 1.7
    heights = [constant * (1 + (end * k / n) ** 2 / df) ** (-(df + 1) / 2) for k in range(n + 1)]
    simpson = sum(h * (1 if k in (0, n) else 4 if k % 2 else 2) for k, h in enumerate(heights)) * end / n / 3
    assert student_cdf(end, df) == pytest.approx(0.5 + simpson, abs=1e-12)


def test_many_degrees_of_freedom_are_the_normal_distribution():
    assert student_quantile(0.975, 100_000) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-4)


def test_the_p_value_is_close_to_the_exact_one_over_all_signs():
    # under no difference every sign is equally likely (Fisher 1935, section 21): 2**12 sums, counted exactly
    draw = random.Random(3)
    differences = [draw.gauss(0.2, 1) for _ in range(12)]
    seen = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in itertools.product((1, -1), repeat=12)]
    exact = sum(total >= seen - 1e-12 for total in sums) / len(sums)
    assert 0.02 < exact < 0.98
    assert paired(differences).p == pytest.approx(exact, abs=0.02)


def test_the_seeds_that_it_would_take_find_the_difference_in_4_of_5_studies():
    more = more_seeds(0.5, 1.0, 5)
    assert 20 <= more <= 40
    draw = random.Random(1)
    seeds = 5 + more
    studies = [paired([draw.gauss(0.5, 1.0) for _ in range(seeds)]) for _ in range(2000)]
    assert abs(sum(s.p < 0.05 for s in studies) / 2000 - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 2000) + 0.01


def test_edges_one_seed_equal_runs_and_differences_too_small_for_any_study():
    assert math.isnan(paired([2.0]).low)
    assert paired([2.0]).more is None
    assert paired([0.0, 0.0, 0.0]).p == 1
    assert paired([0.1, 0.1, 0.1]).p == 0
    assert paired([0.1, 0.1, 0.1]).low == pytest.approx(0.1)
    assert more_seeds(1e-9, 1.0, 5) is None
    assert more_seeds(100.0, 1.0, 5) == 0
    assert more_seeds(0.12, 1.0, 5) <= ENOUGH
    with pytest.raises(ValueError, match="at least one seed"):
        paired([])
    with pytest.raises(ValueError, match="two seeds"):
        student_cdf(1.0, 0)
    with pytest.raises(ValueError, match="probability"):
        student_quantile(1.0, 3)


def test_names_that_tell_which_way_is_better():
    assert [direction(m) for m in ("accuracy", "test_loss", "seconds_per_step", "loss_scale")] == [
        True,
        False,
        False,
        None,
    ]


@pytest.mark.parametrize("df", [10, 30, 99, 500])
def test_a_probability_is_one_however_far_out(df):
    for t in (10.397984184814922, 17.957144943716408, 275.8531617629187, 12638.482029342971):
        assert 0 <= student_cdf(-t, df) < 1e-6
        assert 1 - 1e-6 < student_cdf(t, df) <= 1


def test_the_largest_numbers_have_a_mean():
    assert paired([1.5e308, 1.5e308]).mean == 1.5e308
