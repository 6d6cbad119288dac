"""Whether to take the faster setting, decided from a comparison of two runs.

The decision shows equivalence instead of assuming it: "no significant difference" would accept any setting that was
tried for too short. Losses count as the same only if the whole 95 % interval of their difference lies within a
tolerance (two one-sided tests, Schuirmann 1987). They count as different only if the interval excludes zero and the
difference exceeds the tolerance. In all other cases the answer is how many more steps it takes, roughly.
"""

import math
from dataclasses import dataclass

from rocm_ext.base.registry import RAFT
from rocm_ext.runs.compare import Comparison, Losses
from rocm_ext.runs.intervals import BATCHES, Interval, more_steps

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


def decide(found: Comparison, tolerance: float, score_tolerance: float) -> Decision:
    """Decide whether to take B.

    Args:
        found: the comparison.
        tolerance: relative difference of losses that does not matter.
        score_tolerance: difference of held-out scores that does not matter, as a share of prompts.
    """
    speed, slower = _speed(found.speed), found.speed.value <= _SLOW and found.speed.high < 1
    saved = found.memory[1] / found.memory[0] if found.memory[0] > 0 else math.nan
    if found.losses is not None and found.stability["losses not finite"][0] > found.losses.steps:
        return Decision("unknown", "A's losses are not finite, so there is nothing to compare with")
    if problem := found.mishap:
        return Decision("reject", f"{speed}, but {problem}: do not take it")
    if found.losses is not None:
        quality = _losses(found.losses, tolerance)
    else:
        quality = _scores(found, score_tolerance)
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
    near = "about " if speed.low <= 1 - _NOTICED or speed.high >= 1 + _NOTICED else ""
    times = f"{near}as fast as A" if abs(speed.value - 1) <= _NOTICED else f"{speed.value:.2f}x as fast"
    return f"B is {times} ({speed.low:.2f}-{speed.high:.2f})"


def _losses(losses: Losses, tolerance: float) -> _Quality:
    if losses.not_comparable:
        if losses.best_validation is None:
            return _Quality("unknown", f"losses cannot be compared: {losses.not_comparable}")
        return _validation(losses, *losses.best_validation, "best validation loss", tolerance)
    if losses.steps < 2 * BATCHES:
        return _Quality("unknown", f"{losses.steps} common steps are too few; it takes at least {2 * BATCHES}")
    if losses.validation is not None:
        step, a, b = losses.validation
        quality = _validation(losses, a, b, f"validation loss at step {step}", tolerance)
        if quality.state != "same":
            return quality
    return _training(losses, tolerance)


def _training(losses: Losses, tolerance: float) -> _Quality:
    found = losses.last_half
    around = f"({100 * found.low:+.1f} to {100 * found.high:+.1f} %)"
    if found.within(tolerance):
        if not found.excludes(0):
            return _Quality("same", f"loss the same within {_percent(max(abs(found.low), abs(found.high)))}")
        way = "higher" if found.value > 0 else "lower"
        return _Quality(
            "same", f"loss {_percent(abs(found.value))} {way}, within the tolerance of {_percent(tolerance)}"
        )
    if not (found.excludes(0) and abs(found.value) > tolerance):
        steps = 2 * more_steps(found, losses.steps - losses.steps // 2, tolerance)  # the last half of them counts
        open_ = f"it is not clear yet whether its loss is the same within {_percent(tolerance)} {around}"
        hopeless = steps > _PATIENCE * losses.steps
        advice = "more steps alone will not decide" if hopeless else f"run about {steps:,} more steps"
        return _Quality("unknown", f"{open_}: {advice}")
    if not losses.attributable:
        return _Quality("unknown", f"its loss differs by {100 * found.value:+.1f} %, which different seeds can cause")
    if found.value > 0:
        return _Quality("worse", f"its loss is {_percent(found.value)} higher {around}")
    lower = f"loss {_percent(-found.value)} lower {around}"
    if losses.validation is not None:
        return _Quality("same", lower)
    # a mask that fails to hide labels, or rows that are cut off, look like this
    return _Quality("unknown", f"training {lower}, which a faster setting does not explain: set validation_fraction")


def _validation(losses: Losses, a: float, b: float, what: str, tolerance: float) -> _Quality:
    difference = b / a - 1
    if difference < -tolerance:
        return _Quality("same", f"{what} {_percent(-difference)} lower")
    if difference <= tolerance:
        return _Quality("same", f"{what} the same within {_percent(tolerance)}")
    if not losses.attributable:
        return _Quality("unknown", f"its {what} is {_percent(difference)} higher, which different seeds can cause")
    return _Quality("worse", f"its {what} is {_percent(difference)} higher")


def _scores(found: Comparison, tolerance: float) -> _Quality:
    """Judge the last evaluation that both runs have, or two evaluations by ``rocm-ext eval``.

    B is not worse if the whole interval of the gain lies above ``-tolerance``; it is worse if that is not so and chance
    does not explain the difference.
    """
    evaluations = found.a.is_evaluation and found.b.is_evaluation
    if not found.scores or not (found.scores[-1].trained or evaluations):
        unit = "cycle" if found.a.family == found.b.family == RAFT else "step"
        return _Quality("unknown", f"no trained {unit} of both runs has held-out scores yet")
    last = found.scores[-1]
    if last.not_comparable:
        return _Quality("unknown", f"held-out scores cannot be compared: {last.not_comparable}")
    gain = last.gain
    points = f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    after = " and ".join(dict.fromkeys(last.after))
    name = "held-out pass@1" if evaluations else f"held-out pass@1 after {after}"
    if gain.low > -tolerance:
        return _Quality("same", f"{name} {points}")
    if gain.high < 0 or (last.p is not None and last.p < 0.05 and gain.value < 0):
        return _Quality("worse", f"its {name} is worse, {points}")
    half, room = (gain.high - gain.low) / 2, tolerance + gain.value
    needed = f": about {math.ceil(last.a[1] * (half / room) ** 2):,} prompts are needed" if room > 0.001 else ""
    return _Quality(
        "unknown", f"{name} {points} does not show whether it is worse by {100 * tolerance:g} points{needed}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"
