"""Shares of right answers, with confidence intervals; without numpy, which commands would wait for."""

import math
from dataclasses import dataclass

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Score:
    """How many of ``total`` answers are correct."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """The share of correct answers."""
        return self.correct / self.total

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.total)
        share = f"{100 * self.accuracy:.1f} % ({self.correct}/{self.total})"
        return f"{share}, 95 % interval {100 * low:.1f}–{100 * high:.1f}"


def wilson(k: float, n: int) -> tuple[float, float]:
    """The 95 % score interval of the proportion ``k / n`` (Wilson 1927), as fractions.

    Unlike the normal approximation, it stays within 0 and 1, and its width is positive at ``k = 0`` and ``k = n``.
    """
    p = k / n
    z2 = Z95**2
    scale = 1 + z2 / n
    center = (p + z2 / (2 * n)) / scale
    variance = p * (1 - p) / n + z2 / (4 * n * n)
    half = Z95 * math.sqrt(variance) / scale
    return max(0.0, center - half), min(1.0, center + half)
