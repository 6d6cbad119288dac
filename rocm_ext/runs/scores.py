"""Shares of right answers, with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
        return (
            f"{100 * self.accuracy:.1f} % ({self.correct}/{self.total}), 95 % interval {100 * low:.1f}–{100 * high:.1f}"
        )


def wilson(k: float, n: int) -> tuple[float, float]:
    """The 95 % score interval of the proportion ``k / n`` (Wilson 1927), as fractions.

    Unlike the normal approximation, it stays within 0 and 1, and its width is positive at ``k = 0`` and ``k = n``.
    """
    p, z2 = k / n, Z95**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of the probability that one of ``k`` answers is right (Chen et al. 2021, arXiv:2107.03374).

    Args:
        n: answers drawn.
        correct: how many of them are right.
        k: at most ``n``.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def passes(groups: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The mean of :func:`pass_at_k` over prompts, for k = 1, 2, 4 … up to the most answers that a prompt has.

    Args:
        groups: number of answers and of right ones, by prompt. A prompt with fewer than k answers is left out.
    """
    most = max((n for n, _ in groups), default=0)
    ks = [2**i for i in range(most.bit_length())]
    return {k: fmean(pass_at_k(n, correct, k) for n, correct in groups if n >= k) for k in ks}
