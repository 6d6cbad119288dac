"""How much of a difference between two runs is chance.

Plain numpy, since ``rocm-ext compare`` must start quickly.
"""

import math
from dataclasses import dataclass

import numpy as np

from rocm_ext.runs.scores import Z95, wilson

BATCHES = 8
_T95 = 2.365  # two-sided 95 % quantile of Student's t with BATCHES - 1 degrees of freedom
_SPIKE = 6.0  # robust standard deviations


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, whose ends are infinite if it is unknown."""

    value: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies between ``-margin`` and ``margin``."""
        return -margin < self.low and self.high < margin

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside of the interval."""
        return self.low > value or self.high < value


def relative_difference(a: np.ndarray, b: np.ndarray) -> Interval:
    """The mean of ``b - a``, relative to the mean of ``a``, with an interval that accounts for autocorrelation.

    The losses of two runs at one step are of the same rows, so most of their noise is common and cancels in the
    difference. The rest is autocorrelated: weights that differ at one step differ at the next. This would make the
    plain standard error of a mean too small. So the differences are cut into 8 consecutive batches, whose means are
    almost independent if a batch is longer than the correlation time, and Student's t with 7 degrees of freedom gives
    the interval (batch means, Conway 1963; so few batches lose little, Schmeiser 1982). If the batches are too short
    for that, their means have a positive lag-1 correlation r, and the variance is multiplied by (1 + r) / (1 - r),
    with r corrected for its bias of -1/8.

    In simulation (AR(1) noise, 3,000 draws) the interval covers the truth in 96, 94 and 82 % of cases for
    correlations of 0, 0.5 and 0.9 from step to step and 50 steps, in 96, 96 and 96 % for 500 steps. Measured pairs of
    runs that differ in rounding alone have about 0.1.

    The interval is for these two runs. Another pair of runs would differ from them by as much as a change of seed
    makes, which one pair cannot show; the tolerance of the comparison covers that.

    Args:
        a, b: [n] finite values at the same steps.
    """
    difference, base = b - a, float(np.mean(a)) if len(a) else math.nan
    size = len(difference) // BATCHES
    if not base > 0:
        return Interval(math.nan, -math.inf, math.inf)
    value = float(np.mean(difference)) / base
    if not size:
        return Interval(value, -math.inf, math.inf)
    means = difference[len(difference) - size * BATCHES :].reshape(BATCHES, size).mean(axis=1)
    deviation = means - means.mean()
    squares = float(deviation @ deviation)
    r = float(deviation[1:] @ deviation[:-1]) / squares + 1 / BATCHES if squares else 0.0
    r = min(max(r, 0.0), 0.9)
    variance = squares / (BATCHES - 1) / BATCHES * (1 + r) / (1 - r)
    half = _T95 * math.sqrt(variance) / base
    return Interval(value, value - half, value + half)


def more_steps(found: Interval, steps: int, tolerance: float) -> int:
    """About how many more steps decide; an interval narrows with the square root of their number.

    Args:
        found: a relative difference whose interval does not show whether it is within ``tolerance``.
        steps: how many it was measured over.
        tolerance: the limit.
    """
    half, off = (found.high - found.low) / 2, abs(found.value)
    if not math.isfinite(half):
        return max(1, 2 * BATCHES - steps)
    # a difference under the tolerance must be shown to stay there, one above it to exclude zero
    goal = tolerance - off if off < tolerance else off
    return max(1, math.ceil(steps * ((half / max(goal, 1e-9)) ** 2 - 1)))


def ratio_of_medians(a: np.ndarray, b: np.ndarray) -> Interval:
    """The median of ``b`` over that of ``a``, with an interval from 8 consecutive stretches.

    It uses medians, since a step that waited for another program says nothing about a setting. Speeds drift as clocks
    follow temperature, so the stretches are as long as possible; Student's t on the logarithms of their ratios gives
    the interval. It covers these two runs, not what else the machines did: runs with equal settings were measured to
    differ by 10 %.

    Args:
        a, b: [n] finite values.
    """
    if not len(a) or not len(b) or not np.median(a) > 0:
        return Interval(math.nan, -math.inf, math.inf)
    value = float(np.median(b) / np.median(a))
    if len(a) < BATCHES or not (a > 0).all() or not (b > 0).all():
        return Interval(value, -math.inf, math.inf)
    cuts = zip(np.array_split(a, BATCHES), np.array_split(b, BATCHES), strict=True)
    logs = np.log([np.median(y) / np.median(x) for x, y in cuts])
    spread = float(np.exp(_T95 * logs.std(ddof=1) / math.sqrt(BATCHES)))  # no error where damaged files overflow
    return Interval(value, value / spread, value * spread)


def finite_median(values: np.ndarray) -> float:
    """The median of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def spikes(values: np.ndarray, least: float) -> np.ndarray:
    """Which values stand out above their neighbours.

    A spike is at least ``least`` times the running median of 31 values, and the logarithm of that ratio is above 6
    robust standard deviations (1.4826 x the median absolute deviation). Values that are not finite are spikes.

    Args:
        values: [n], of a loss or a gradient norm.
        least: ratio to the running median.

    Returns:
        [n] bool.
    """
    infinite = ~np.isfinite(values)
    good = ~infinite & (values > 0)
    found = infinite.copy()
    if good.sum() >= BATCHES:
        level = np.log(values[good])
        padded = np.pad(level, 15, mode="edge")
        above = level - np.median(np.lib.stride_tricks.sliding_window_view(padded, 31), axis=1)
        spread = 1.4826 * float(np.median(np.abs(above)))
        found[good] = above > max(math.log(least), _SPIKE * spread)
    return found


def more_often(a_only: int, b_only: int) -> float:
    """The probability of ``b_only`` or more of all cases if both sides are equally likely (one-sided sign test)."""
    total = a_only + b_only
    return sum(math.comb(total, k) for k in range(b_only, total + 1)) / 2**total


def mcnemar(a_only: int, b_only: int) -> float:
    """The exact two-sided p-value of McNemar's test that two runs are right equally often.

    Args:
        a_only, b_only: prompts that only one of them got right.
    """
    return min(1.0, 2 * more_often(min(a_only, b_only), max(a_only, b_only)))


def paired_gain(a_only: int, b_only: int, total: int) -> Interval:
    """The share of prompts that B got right minus A's, over the same prompts.

    Agresti and Min's (2005) interval, which adds half a prompt to each cell and so holds for few prompts, too.

    Args:
        a_only, b_only: prompts that only one of them got right.
        total: all prompts.
    """
    value = (b_only - a_only) / total
    center, n = (b_only - a_only) / (total + 2), total + 2
    half = Z95 * math.sqrt(max(0.0, (a_only + b_only + 1) / n - center**2) / n)
    return Interval(value, center - half, center + half)


def paired_ratio(differences: np.ndarray, sizes: np.ndarray) -> Interval:
    """The sum of ``differences`` over that of ``sizes``, with an interval over independent rows.

    The ratio estimator's linearised variance (Cochran 1977, section 6.4) and the normal quantile.

    Args:
        differences: [n], of each row.
        sizes: [n], above 0.
    """
    value, n = float(differences.sum() / sizes.sum()), len(sizes)
    if n < 2:
        return Interval(value, -math.inf, math.inf)
    residuals = differences - value * sizes
    half = Z95 * math.sqrt(float(residuals @ residuals) * n / (n - 1)) / float(sizes.sum())
    return Interval(value, value - half, value + half)


def unpaired_gain(a: tuple[int, int], b: tuple[int, int]) -> Interval:
    """The share of prompts that B got right minus A's, over different prompts; Newcombe's (1998) method 10.

    Args:
        a, b: (correct, total).
    """
    (low_a, high_a), (low_b, high_b) = wilson(*a), wilson(*b)
    p, q = a[0] / a[1], b[0] / b[1]
    value = q - p
    return Interval(value, value - math.hypot(q - low_b, high_a - p), value + math.hypot(high_b - q, p - low_a))
