"""The statistics of an experiment beside printed tables, hand-worked numbers and every sign of an exact test.

That intervals are Student's and corrections Holm's, the contract shows.
"""

import itertools
import math
import random
import statistics

import pytest

from mpkit.experiment.statistics import ENOUGH, more_seeds, paired, student_cdf, student_quantile
from mpkit.experiment.verdict import direction

# Student's t, upper 2.5 % and 20 % points: Fisher and Yates 1938, table III (as every textbook prints it)
TABLE = {0.975: {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}}
TABLE |= {0.8: {1: 1.376, 2: 1.061, 4: 0.941, 9: 0.883, 30: 0.854}}


def test_quantiles_are_those_of_the_printed_table_and_in_the_end_of_the_normal_distribution():
    for p, table in TABLE.items():
        assert [student_quantile(p, df) for df in table] == pytest.approx([*table.values()], abs=6e-4)
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
    studies = [paired([draw.gauss(0.5, 1.0) for _ in range(5 + more)]) for _ in range(2000)]
    assert abs(sum(s.p < 0.05 for s in studies) / 2000 - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 2000) + 0.01
    assert (more_seeds(1e-9, 1.0, 5), more_seeds(100.0, 1.0, 5)) == (None, 0)
    assert more_seeds(0.12, 1.0, 5) <= ENOUGH


def test_edges_no_seed_one_seed_and_equal_runs():
    empty, one, none, same = paired([]), paired([2.0]), paired([0.0] * 3), paired([0.1] * 3)
    assert (empty.n, one.n, one.mean, one.more, none.p, same.p, same.low) == (0, 1, 2.0, None, 1, 0, pytest.approx(0.1))
    assert math.isnan(empty.mean + one.low)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 20, 101])
def test_the_distribution_is_the_integral_of_its_density(df):
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    n, end = 4000, 1.7
    heights = [constant * (1 + (end * k / n) ** 2 / df) ** (-(df + 1) / 2) for k in range(n + 1)]
    simpson = sum(h * (1 if k in (0, n) else 4 if k % 2 else 2) for k, h in enumerate(heights)) * end / n / 3
    found = [student_cdf(t, df) for t in (-end, 0.0, end)]
    assert found == pytest.approx([0.5 - simpson, 0.5, 0.5 + simpson], abs=1e-12)


@pytest.mark.parametrize("df", [1, 4, 101])
def test_a_probability_is_one_however_far_out(df):
    for far in (10.397984184814922, 17.957144943716408, 275.8531617629187, 12638.482029342971):
        assert 0 <= student_cdf(-far, df) <= 1 - student_cdf(far, df) + 1e-15 <= 0.1


def test_names_that_tell_which_way_is_better():
    ways = {"accuracy": True, "test_loss": False, "seconds_per_step": False, "loss_scale": None}
    assert {name: direction(name) for name in ways} == ways
