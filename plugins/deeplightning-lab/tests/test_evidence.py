"""Intervals, effect sizes and tests of `compare` agree with published values and with other ways to compute them."""

import math
from itertools import product

import numpy as np
import pytest
from deeplightning_lab import evidence
from scipy import stats

FIVE = [0.91, 0.93, 0.92, 0.95, 0.90]


def test_the_interval_of_a_mean_is_that_of_student():
    """`mean_interval` is Student's t interval; for one run its bounds are NaN."""
    found = evidence.mean_interval(FIVE)
    assert found == pytest.approx((0.922, *stats.ttest_1samp(FIVE, 0).confidence_interval(0.95)))
    assert evidence.mean_interval([0.9]) == pytest.approx((0.9, math.nan, math.nan), nan_ok=True)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_a_paired_interval_has_the_width_of_student_s_for_normal_values(n):
    """The bootstrap is corrected for small samples: uncorrected, it is half as wide for three pairs."""
    values = stats.norm.ppf((np.arange(n) + 0.5) / n) + 0.3
    found, student = evidence.paired_interval(values), evidence.mean_interval(values)
    assert found.center == pytest.approx(0.3)
    assert found.high - found.low == pytest.approx(student.high - student.low, rel=0.1)


def test_a_paired_interval_follows_from_all_resamples():
    """For five values the interval has the quantiles of all 3125 resamples, scaled by t."""
    values = np.array([0.01, 0.03, -0.02, 0.05, 0.02])
    means = np.array([np.mean(drawn) for drawn in product(values - values.mean(), repeat=5)])
    scale = math.sqrt(5 / 4) * stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975)
    expected = values.mean() + np.quantile(means, [0.025, 0.975]) * scale
    assert evidence.paired_interval(values)[1:] == pytest.approx(expected, abs=0.003)
    assert evidence.paired_interval(values) == evidence.paired_interval(values)  # deterministic


def test_two_pairs_have_the_interval_of_student():
    """Two pairs have Student's interval, because three resamples are too few for a bootstrap."""
    assert evidence.paired_interval([0.1, 0.3]) == evidence.mean_interval([0.1, 0.3])


def test_an_unpaired_interval_has_the_degrees_of_freedom_of_welch():
    """The width is close to Welch's for unequal spreads and sizes, and equal to it if a side has two values."""
    one, two = stats.norm.ppf((np.arange(5) + 0.5) / 5), 3 * stats.norm.ppf((np.arange(10) + 0.5) / 10) + 1
    welch = stats.ttest_ind(two, one, equal_var=False).confidence_interval(0.95)
    found = evidence.unpaired_interval(one, two)
    assert found.center == pytest.approx(1)
    assert found.high - found.low == pytest.approx(welch.high - welch.low, rel=0.1)
    few = evidence.unpaired_interval(one[:2], two)
    assert few[1:] == pytest.approx(tuple(stats.ttest_ind(two, one[:2], equal_var=False).confidence_interval(0.95)))


def test_each_way_to_resample_gives_the_width_of_theory():
    """Answers (multinomial distribution), scores (bootstrap) and large sets (normal distribution) are covered."""
    rng = np.random.default_rng(0)
    right = rng.choice([-1.0, 0.0, 1.0], 500, p=[0.03, 0.9, 0.07])
    for values in (right, rng.normal(0.02, 1, 200), rng.normal(0.02, 1, evidence.MAX_RESAMPLED + 1)):
        found = evidence.sample_interval(values)
        width = 2 * 1.96 * values.std() / math.sqrt(len(values))
        assert found.center == pytest.approx(values.mean())
        assert found.high - found.low == pytest.approx(width, rel=0.06)


def test_hedges_g_is_the_corrected_difference_in_standard_deviations():
    """Without a spread, the effect size is None."""
    one, two = [1.0, 2.0, 3.0], [3.0, 4.0, 5.0]
    assert evidence.hedges_g(one, two) == pytest.approx(2 * (1 - 3 / 15))
    assert evidence.hedges_g(two, one) == pytest.approx(-1.6)
    assert evidence.hedges_g([1.0, 1.0], [2.0, 2.0]) is None
    assert evidence.paired_effect([1.0, 1.0]) is None
    assert evidence.paired_effect([0.0, 1.0, 2.0]) == pytest.approx(1 - 3 / 7)


@pytest.mark.parametrize(("effect", "paired", "unpaired"), [(0.2, 199, 394), (0.5, 34, 64), (0.8, 15, 26)])
def test_the_number_of_runs_is_that_of_the_published_tables(effect, paired, unpaired):
    """Cohen: Statistical Power Analysis for the Behavioral Sciences, 1988, for a power of 0.8 at the 5 % level."""
    assert evidence.runs_needed(effect, is_paired=True) == paired
    assert evidence.runs_needed(-effect, is_paired=False) == unpaired


def test_some_differences_take_two_runs_and_some_too_many():
    """No effect, and one that takes more than ten thousand runs, give None."""
    assert evidence.runs_needed(100, is_paired=True) == 2
    assert evidence.runs_needed(0, is_paired=True) is None
    assert evidence.runs_needed(0.001, is_paired=False) is None
    assert evidence.power(0.5, 34, is_paired=True) == pytest.approx(0.808, abs=0.001)


def test_mcnemar_counts_the_samples_that_one_alone_answers_correctly():
    """The p value is exact; without such a sample it is 1."""
    one, two = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 1], bool), np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1], bool)
    found = evidence.mcnemar(one, two)
    assert (found.only_a, found.only_b) == (1, 6)
    assert found.p == pytest.approx(2 * (1 + 7) / 2**7)
    assert evidence.mcnemar(one, one) == (0, 0, 1.0)
