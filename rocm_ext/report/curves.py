"""Prepares numbers for charts: fewer points, smoother lines, ticks and their labels."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

POINTS = 1000  # most points of a curve; a chart has no more columns of pixels
_HUGE = 1e100  # an axis ends here, so that no arithmetic overflows
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def thin(y: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Indices of about ``most`` points: the lowest, the highest and the first NaN of every stretch.

    Args:
        y: [n] values.
        most: keep all points if there are no more than these.
    """
    if len(y) <= most:
        return np.arange(len(y))
    kept = {0, len(y) - 1}
    edges = np.linspace(0, len(y), most // 3 + 1).astype(int)
    for start, end in pairwise(edges):
        stretch = y[start:end]
        missing = np.isnan(stretch)
        if missing.any():
            kept.add(int(start + missing.argmax()))
        if not missing.all():
            kept |= {int(start + np.nanargmin(stretch)), int(start + np.nanargmax(stretch))}
    return np.array(sorted(kept))


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """The running mean of the finite values among ``width`` points; NaN if none is finite.

    Args:
        y: [n] values.
        width: odd number of points around each.
    """
    finite = np.isfinite(y)
    half = width // 2
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    points = count[high] - count[low]
    return np.where(points > 0, (total[high] - total[low]) / np.maximum(points, 1), np.nan)


def smoothing_width(points: int) -> int:
    """The width for :func:`smooth` for a curve of ``points`` points: a twenty-fifth of them, 1 for short curves."""
    return 2 * (points // 50) + 1


def value_range(curves: Sequence[np.ndarray], zero: bool) -> tuple[float, float]:
    """The range of an axis: all values, except spikes that would flatten everything else.

    Args:
        curves: may hold values that are not finite.
        zero: begin at 0 if no value is below. The axis does so anyway if the lowest value is near 0.
    """
    values = np.concatenate([c[np.isfinite(c)] for c in curves])
    if not len(values):
        return 0.0, 1.0
    values = values.clip(-_HUGE, _HUGE)
    low, high = float(values.min()), float(values.max())
    bottom, top = np.quantile(values, [0.05, 0.95])
    ceiling = float(top + 6 * (top - bottom))
    if len(values) >= 50 and high > ceiling > low:
        high = ceiling
    zero = (zero and low >= 0) or 0 <= low < 0.3 * high
    around = (high - low) * 0.04
    if around <= 1e-12 * max(abs(high), abs(low)):  # a constant
        around = abs(high) * 0.1 or 1.0
    return 0.0 if zero else low - around, high + around


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers between ``low`` and ``high``, whose distance is 1, 2 or 5 times a power of ten.

    Args:
        low, high: ends of the axis.
        most: the largest number of ticks.
        whole: whole numbers only.
    """
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-300) / most))
    while whole and step < 1:
        step *= 10
    factors = (1, 2, 5, 10, 20, 50, 100)
    for factor in factors:
        first, last = math.ceil(low / (step * factor) - 1e-9), math.floor(high / (step * factor) + 1e-9)
        if last - first < most:
            break
    return [i * step * factor for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The labels of ticks, all with the same prefix and enough digits to differ: 10.0k, 12.5k; 0.02; 2e-4."""
    top = max(map(abs, values), default=0.0)
    if not top:
        return ["0"] * len(values)
    step = min((b - a for a, b in pairwise(values)), default=top)
    if top < 0.01:
        digits = max(0, math.floor(math.log10(top) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        return [_exponent(value, digits) for value in values]
    size, prefix = next(((s, p) for s, p in _PREFIXES if top >= s and top >= 1e4), (1.0, ""))
    digits = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return [f"{value / size:.{digits}f}{prefix if value else ''}" for value in values]


def _exponent(value: float, digits: int) -> str:
    if not value:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def short_number(value: float) -> str:
    """``value`` with four digits and a prefix: 12.35k, 0.01234, 2e-05."""
    if not math.isfinite(value):
        return "not finite"
    size, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s and abs(value) >= 1e4), (1.0, ""))
    return f"{value / size:.4g}{prefix}"


def memory_unit(values: Sequence[np.ndarray]) -> tuple[float, str]:
    """The unit for sizes of memory: its bytes and its name.

    Args:
        values: bytes; may hold NaN.
    """
    top = max((float(np.nanmax(v)) for v in values if np.isfinite(v).any()), default=0.0)
    return (2.0**30, "GiB") if top >= 2**30 else (2.0**20, "MiB")


def time_unit(longest: float) -> tuple[float, str]:
    """The unit for times up to ``longest`` seconds: its seconds and its name."""
    return (3600.0, "hours") if longest > 7200 else (60.0, "minutes") if longest > 180 else (1.0, "seconds")
