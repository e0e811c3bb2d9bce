"""Compute statistics of small samples: intervals, effect size, McNemar's test and the number of runs that a test needs.

The functions take arrays and return plain numbers. They need numpy and SciPy only. All intervals are 95 % intervals.

Few seeds are the usual case. A bootstrap percentile interval from five values covers the truth 84 times in 100: it
estimates the spread from the sample, too small by √((n-1)/n), and ignores the t distribution. Both factors are known,
and the quantiles are scaled by them. For normal values the width equals that of the t interval; the skewness that the
bootstrap finds is kept (Hesterberg: What Teachers Should Know About the Bootstrap. The American Statistician 69, 2015,
section 4, widens the quantiles for the same reason). `benchmarks/luck.py` simulates the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
Values = Sequence[float] | np.ndarray
POWER = 0.8
RESAMPLES = 9_999
MAX_RUNS = 10_000
"""Maximum number of runs per side that `runs_needed` considers."""
MAX_RESAMPLED = 100_000
"""Maximum number of samples that are resampled one by one; the mean of more is practically normal."""


class Interval(NamedTuple):
    """A mean or a difference of means, and its 95 % confidence interval; the ends are NaN if it is unknown."""

    center: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def mean_interval(values: Values) -> Interval:
    """Return the mean over runs with its t interval.

    Args:
        values: (n,), one per seed; the interval of a single value is unknown.
    """
    found = np.asarray(values, float)
    center = float(found.mean())
    if len(found) < 2:
        return Interval(center, math.nan, math.nan)
    half = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(center, center - half, center + half)


def t_quantile(freedom: float) -> float:
    """Return the quantile of Student's t distribution that bounds a two-sided interval."""
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def paired_interval(differences: Values, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the bootstrap interval of the mean difference of pairs; the t interval for two pairs, which have only
    three resamples.

    Args:
        differences: (n,), n ≥ 2, one per pair.
    """
    found = np.asarray(differences, float)
    if len(found) == 2:
        return mean_interval(found)
    center = float(found.mean())
    drawn = _resampled([_residuals(found)], resamples, seed)
    return _scaled(center, drawn, t_quantile(len(found) - 1))


def unpaired_interval(first: Values, second: Values, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the bootstrap interval of the mean of `second` minus that of `first`, with the degrees of freedom of
    Welch's test.

    Args:
        first: (n,), n ≥ 2.
        second: (m,), m ≥ 2.
    """
    one, two = np.asarray(first, float), np.asarray(second, float)
    center = float(two.mean() - one.mean())
    parts = [float(side.var(ddof=1)) / len(side) for side in (one, two)]
    squares = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (one, two), strict=True))
    freedom = sum(parts) ** 2 / squares if squares else len(one) + len(two) - 2
    if min(len(one), len(two)) == 2:
        half = t_quantile(freedom) * math.sqrt(sum(parts))
        return Interval(center, center - half, center + half)
    return _scaled(center, _resampled([_residuals(one), _residuals(two)], resamples, seed), t_quantile(freedom))


def sample_interval(differences: Values, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the percentile bootstrap interval of the mean difference of test samples.

    Args:
        differences: (N,), N ≥ 2, the score of each sample in B minus that in A.
    """
    found = np.asarray(differences, float)
    values, counts = np.unique(found, return_counts=True)
    if len(values) <= 100:  # such as 0 and 1: the number of draws of each value follows a multinomial distribution
        drawn = np.random.default_rng(seed).multinomial(len(found), counts / len(found), resamples) @ values
        low, high = np.quantile(drawn / len(found), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    elif len(found) > MAX_RESAMPLED:
        low, high = stats.norm.interval(LEVEL, found.mean(), found.std(ddof=1) / math.sqrt(len(found)))
    else:
        rest = found - found.mean()
        drawn = _resampled([rest], resamples, seed)
        low, high = found.mean() + np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(found.mean()), float(low), float(high))


def hedges_g(first: Values, second: Values) -> float | None:
    """Return the difference of the means in pooled standard deviations, corrected for small samples; None if the spread
    is 0.

    Hedges: Distribution Theory for Glass's Estimator of Effect Size. Journal of Educational Statistics 6, 1981.

    Args:
        first: (n,), n ≥ 2.
        second: (m,), m ≥ 2.
    """
    one, two = np.asarray(first, float), np.asarray(second, float)
    freedom = len(one) + len(two) - 2
    pooled = math.sqrt(((len(one) - 1) * one.var(ddof=1) + (len(two) - 1) * two.var(ddof=1)) / freedom)
    if not pooled > 0:
        return None
    return _small_sample_factor(freedom) * float(two.mean() - one.mean()) / pooled


def runs_needed(effect: float, is_paired: bool) -> int | None:
    """Return the number of pairs, or of runs per side, that a t test at the 5 % level needs for a power of 0.8.

    None means more than `MAX_RUNS`.

    Args:
        effect: the difference in standard deviations: of the pairs' differences, else of the runs of a side.
    """
    size = abs(effect)
    if not size > 0 or power(size, MAX_RUNS, is_paired) < POWER:
        return None
    low, high = 1, MAX_RUNS  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(size, middle, is_paired) >= POWER else (middle, high)
    return high


def power(effect: float, runs: int, is_paired: bool) -> float:
    """Return the power of a two-sided t test at the 5 % level for an effect and a number of pairs, or runs per side."""
    freedom = runs - 1 if is_paired else 2 * runs - 2
    shift = abs(effect) * math.sqrt(runs if is_paired else runs / 2)
    if shift > 30:
        return 1.0
    # t² is F; SciPy's noncentral t is NaN in its far tail.
    return float(stats.ncf.sf(t_quantile(freedom) ** 2, 1, freedom, shift**2))


def paired_effect(differences: Values) -> float | None:
    """Return the mean difference of pairs in standard deviations, corrected for few values; None if the spread is 0."""
    found = np.asarray(differences, float)
    spread = float(found.std(ddof=1))
    return _small_sample_factor(len(found) - 1) * float(found.mean()) / spread if spread > 0 else None


class McNemar(NamedTuple):
    """Comparison of two classifiers: how many samples only A and only B answers correctly, and the exact p value."""

    only_a: int
    only_b: int
    p: float


def mcnemar(first: np.ndarray, second: np.ndarray) -> McNemar:
    """Compare two classifiers by McNemar's exact test.

    McNemar: Note on the sampling error of the difference between correlated proportions. Psychometrika 12, 1947.

    Args:
        first: (N,) bool, whether A answers each sample correctly.
        second: (N,) bool, whether B does.
    """
    only_a, only_b = int((first & ~second).sum()), int((second & ~first).sum())
    p = float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    return McNemar(only_a, only_b, p)


def _small_sample_factor(freedom: int) -> float:
    """Return Hedges' correction of a standardized difference, whose estimate from few values is too large.

    For one degree of freedom, where it is undefined, return 1.
    """
    return 1 - 3 / (4 * freedom - 1) if freedom > 1 else 1.0


def _residuals(values: np.ndarray) -> np.ndarray:
    """Return values minus their mean, scaled to the variance that the sample estimates for the population."""
    return (values - values.mean()) * math.sqrt(len(values) / (len(values) - 1))


def _resampled(sides: list[np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """Return bootstrap means of one side, or of the second minus the first, (resamples,)."""

    def statistic(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        means = [side.mean(axis=axis) for side in drawn]
        return means[-1] - means[0] if len(means) > 1 else means[0]

    batch = max(1, 10_000_000 // max(len(side) for side in sides))  # 80 MB at a time
    rng = np.random.default_rng(seed)
    found = stats.bootstrap(
        sides, statistic, n_resamples=resamples, batch=batch, vectorized=True, method="percentile", rng=rng
    )
    return np.asarray(found.bootstrap_distribution)


def _scaled(center: float, drawn: np.ndarray, t: float) -> Interval:
    """Return the interval from the bootstrap's quantiles, scaled for small samples."""
    normal = float(stats.norm.ppf((1 + LEVEL) / 2))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) * t / normal
    return Interval(center, center + float(low), center + float(high))
