"""Compute the mean of a metric over runs with its 95 % confidence interval; format numbers with meaningful decimals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95

Values = Sequence[float] | np.ndarray


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
        values: (n,), one of each seed; the interval of a single value is unknown.
    """
    found = np.asarray(values, float)
    center = float(found.mean())
    if len(found) < 2:
        return Interval(center, math.nan, math.nan)
    half = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(center, center - half, center + half)


def t_quantile(freedom: float) -> float:
    """Return the quantile of Student's t distribution that bounds a two-sided interval."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def number(value: float, like: float | None = None) -> str:
    """Format a number with as many decimals as three significant digits of `like` have (default: of itself)."""
    size = abs(value if like is None else like)
    if not math.isfinite(value):
        return "-"
    if not size or not math.isfinite(size):
        return f"{value:.4g}"
    decimals = 2 - math.floor(math.log10(size))
    return f"{value:.{max(0, decimals)}f}" if decimals <= 8 else f"{value:.3g}"
