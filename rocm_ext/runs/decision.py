"""Whether to take the faster setting, decided from a comparison of two runs.

The decision shows equivalence instead of assuming it: "no significant difference" would accept any setting that was
tried for too short. Losses count as the same only if the whole 95 % interval of their difference lies within a
tolerance (two one-sided tests, Schuirmann 1987). They count as different only if the interval excludes zero and the
difference exceeds the tolerance. In all other cases the answer is how many more steps it takes, roughly.
"""

import math
from dataclasses import dataclass

from rocm_ext.base.registry import RAFT
from rocm_ext.runs.comparison import Comparison, Losses, Scores
from rocm_ext.runs.intervals import BATCHES, Interval, more_steps

TOLERANCE = 0.01  # relative, of losses
SCORE_TOLERANCE = 0.05  # of held-out scores, a share of the prompts
_NOTICED = 0.1  # relative difference of speeds; runs with equal settings differ by as much
_SLOW = 0.85  # of A's speed; chance does not explain less
_PATIENCE = 100  # times the present steps; advice to run more would help nobody
_SAVED = 0.95  # of A's memory; a user may accept less speed for less memory than this
_EXIT_CODES = {"take": 0, "reject": 1, "unknown": 3}


@dataclass(frozen=True)
class Decision:
    """The answer to whether to take B.

    Attributes:
        answer: ``take``, ``reject`` or ``unknown``.
        text: the reason, in one line.
    """

    answer: str
    text: str

    @property
    def exit_code(self) -> int:
        """Of ``rocm-ext compare``."""
        return _EXIT_CODES[self.answer]


@dataclass(frozen=True)
class _Quality:
    """Whether B trains as well as A: ``same``, ``worse`` or ``unknown``; the text continues "B is 2x as fast, "."""

    state: str
    text: str


def decide(found: Comparison, tolerance: float = TOLERANCE, score_tolerance: float = SCORE_TOLERANCE) -> Decision:
    """Decide whether to take B.

    Args:
        found: the comparison.
        tolerance: relative difference of losses that does not matter.
        score_tolerance: difference of held-out scores that does not matter, as a share of prompts.
    """
    speed, slower = _speed(found.speed), found.speed.value <= _SLOW and found.speed.high < 1
    saved = found.memory[1] / found.memory[0] if found.memory[0] > 0 else math.nan
    if found.losses is not None and found.stability.not_finite[0] > found.losses.steps:
        return Decision("unknown", "A's losses are not finite, so there is nothing to compare with")
    if problem := found.stability.problem:
        return Decision("reject", f"{speed}, but {problem}: do not take it")
    if found.losses is not None:
        quality = _losses(found.losses, tolerance)
    else:
        unit = "cycle" if found.a.family == found.b.family == RAFT else "step"
        quality = _scores(found.scores, score_tolerance, found.a.is_evaluation and found.b.is_evaluation, unit)
    if quality.state == "worse":
        return Decision("reject", f"{speed}, but {quality.text}: do not take it")
    if slower and not saved < _SAVED:
        return Decision("reject", f"{speed} and saves no memory: do not take it")
    if quality.state == "unknown":
        return Decision("unknown", f"{speed}, but {quality.text}")
    if math.isnan(found.speed.value):
        return Decision("unknown", f"{speed}; {quality.text}")
    if slower:
        return Decision("reject", f"{speed}, {quality.text}: do not take it, unless for its {saved:.2f}x of A's memory")
    if found.speed.value < 1 - _NOTICED:
        return Decision("unknown", f"{speed}, a difference that one pair of runs does not prove: repeat the runs")
    return Decision("take", f"{speed}, {quality.text}: take it")


def _speed(speed: Interval) -> str:
    if math.isnan(speed.value):
        return "the speed of B is unknown"
    if not (math.isfinite(speed.low) and math.isfinite(speed.high)):
        return f"B is {speed.value:.2f}x as fast (too few steps or cycles for an interval)"
    around = f"({speed.low:.2f}-{speed.high:.2f})"
    if abs(speed.value - 1) > _NOTICED:
        return f"B is {speed.value:.2f}x as fast {around}"
    if speed.low > 1 - _NOTICED and speed.high < 1 + _NOTICED:
        return f"B is as fast as A {around}"
    return f"B is about as fast as A {around}"


def _losses(losses: Losses, tolerance: float) -> _Quality:
    sure = losses.attributable
    if losses.not_comparable:
        if losses.best_validation is None:
            return _Quality("unknown", f"losses cannot be compared: {losses.not_comparable}")
        return _validation(*losses.best_validation, "best validation loss", tolerance, sure)
    if losses.steps < 2 * BATCHES:
        return _Quality("unknown", f"{losses.steps} common steps are too few; it takes at least {2 * BATCHES}")
    if losses.validation is not None:
        step, a, b = losses.validation
        held_out = _validation(a, b, f"validation loss at step {step}", tolerance, sure)
        if held_out.state != "same":
            return held_out
    return _training(losses, tolerance)


def _training(losses: Losses, tolerance: float) -> _Quality:
    found = losses.last_half
    around = f"({100 * found.low:+.1f} to {100 * found.high:+.1f} %)"
    if found.within(tolerance) and found.excludes(0):
        way = "higher" if found.value > 0 else "lower"
        little = f"within the tolerance of {_percent(tolerance)}"
        return _Quality("same", f"loss {_percent(abs(found.value))} {way}, {little}")
    if found.within(tolerance):
        return _Quality("same", f"loss the same within {_percent(max(abs(found.low), abs(found.high)))}")
    if not (found.excludes(0) and abs(found.value) > tolerance):
        steps = 2 * more_steps(found, losses.steps - losses.steps // 2, tolerance)  # the last half of them counts
        told = f"it is not clear yet whether its loss is the same within {_percent(tolerance)} {around}"
        many = steps > _PATIENCE * losses.steps
        wanted = "more steps alone will not decide" if many else f"run about {steps:,} more steps"
        return _Quality("unknown", f"{told}: {wanted}")
    if not losses.attributable:
        return _Quality("unknown", f"its loss differs by {100 * found.value:+.1f} %, which different seeds can cause")
    if found.value > 0:
        return _Quality("worse", f"its loss is {_percent(found.value)} higher {around}")
    lower = f"loss {_percent(-found.value)} lower {around}"
    # a mask that fails to hide labels, or rows that are cut off, look like this
    if losses.validation is None:
        return _Quality(
            "unknown", f"training {lower}, which a faster setting does not explain: set validation_fraction"
        )
    return _Quality("same", lower)


def _validation(a: float, b: float, what: str, tolerance: float, attributable: bool) -> _Quality:
    difference = b / a - 1
    if difference < -tolerance:
        return _Quality("same", f"{what} {_percent(-difference)} lower")
    if difference <= tolerance:
        return _Quality("same", f"{what} the same within {_percent(tolerance)}")
    if not attributable:
        return _Quality("unknown", f"its {what} is {_percent(difference)} higher, which different seeds can cause")
    return _Quality("worse", f"its {what} is {_percent(difference)} higher")


def _scores(scores: list[Scores], tolerance: float, evaluations: bool, unit: str) -> _Quality:
    """Judge the last evaluation that both runs have, or two evaluations by ``rocm-ext eval``.

    B is not worse if the whole interval of the gain lies above ``-tolerance``; it is worse if that is not so and chance
    does not explain the difference.
    """
    if not scores or not (scores[-1].trained or evaluations):
        return _Quality("unknown", f"no trained {unit} of both runs has held-out scores yet")
    last = scores[-1]
    if last.not_comparable:
        return _Quality("unknown", f"held-out scores cannot be compared: {last.not_comparable}")
    gain, points = last.gain, 100 * tolerance
    told = f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    after = " and ".join(dict.fromkeys(last.after))
    name = "held-out pass@1" if evaluations else f"held-out pass@1 after {after}"
    if gain.low > -tolerance:
        return _Quality("same", f"{name} {told}")
    if gain.high < 0 or (last.p is not None and last.p < 0.05 and gain.value < 0):
        return _Quality("worse", f"its {name} is worse, {told}")
    half, room = (gain.high - gain.low) / 2, tolerance + gain.value
    needed = f": about {math.ceil(last.a[1] * (half / room) ** 2):,} prompts are needed" if room > 0.001 else ""
    return _Quality("unknown", f"{name} {told} does not show whether it is worse by {points:g} points{needed}")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"
