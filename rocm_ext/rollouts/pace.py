"""How long the rest of a phase takes."""

from collections.abc import Iterable


class Pace:
    """Estimates the rest of a phase from tokens.

    Short answers finish first, and the first ones finish late: many begin at the same time. So both the finished
    answers per second and their mean length are too low at first. The mean length is therefore estimated as all sampled
    tokens, those of unfinished answers too, per finished answer: the maximum-likelihood mean of geometric lengths of
    which some are still unknown (censored).

    Args:
        answers: answers to sample.
        recorded: lengths of answers of the same phase that earlier processes sampled, in tokens.
        longest: the most tokens that an answer can have.
    """

    def __init__(self, answers: int, recorded: Iterable[int], longest: int) -> None:
        self._left, self._longest = answers, longest
        lengths = list(recorded)
        self._earlier, self._finished, self._answers = sum(lengths), 0, len(lengths)

    def finish(self, tokens: int) -> None:
        """Count a finished answer of this many tokens."""
        self._left -= 1
        self._answers += 1
        self._finished += tokens

    def seconds_left(self, sampled: int, seconds: float) -> float | None:
        """Estimate the seconds that the unfinished answers take.

        Args:
            sampled: tokens that this process has sampled, those of unfinished answers too.
            seconds: how long it took.

        Returns:
            The estimate; None while more than half of the known tokens belong to unfinished answers.
        """
        open_ = max(0, sampled - self._finished)
        known = self._earlier + self._finished
        if not sampled or not self._answers or open_ > known:
            return None
        mean = min((known + open_) / self._answers, self._longest)
        return max(0.0, self._left * mean - open_) * seconds / sampled
