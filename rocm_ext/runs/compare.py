"""Whether to take a faster setting: a safe run A against a faster run B.

The answer shows equivalence instead of assuming it: "no significant difference" would accept any setting that was
tried for too short. Losses count as the same only if the 95 % interval of their difference lies within a
tolerance (two one-sided tests, Schuirmann 1987). They count as different only if the interval excludes zero and the
difference exceeds the tolerance. In all other cases the answer is how many more steps it takes, roughly.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.hub import hub_name
from rocm_ext.base.registry import BY_STEP, DPO, SAMPLED
from rocm_ext.runs.folder import RunFolder, held_out, running_time
from rocm_ext.runs.intervals import BATCHES, Interval, mcnemar, paired_gain, ratio_of_medians, relative_difference
from rocm_ext.runs.records import Columns, number

Pair = tuple[float, float]  # A's value, B's
Settings = Mapping[str, tuple[object, object]]  # settings that differ, with A's value and B's
_UNKNOWN = Interval(math.nan)

_WARM_UP = 10  # steps at a run's beginning that do not show its speed: compilation, caches, clocks
_TEMPLATE = ("chat_template", "chat_template_args", "chat_template_date")
_DATA = (
    *("dataset", "dataset_val", "validation_fraction", "tokenizer", "data_seed", "shuffle", "too_long", "bad_rows"),
    *_TEMPLATE,
)
_CROSS_ENTROPIES = {  # components of one function
    "rocm_ext.losses.CrossEntropy",
    "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "torch.nn.CrossEntropyLoss",
}
_CHUNKS = ("loss.chunk_tokens", "loss.num_output_chunks")  # they decide memory and speed, not the loss
# What decides the meaning of a held-out score, and what an answer may be
_JUDGED_BY = ("verifier", "environment", "eval_prompts")
_ANSWERED_WITH = ("max_new_tokens", "stop_strings", "max_turns", "max_environment_tokens", *_TEMPLATE)
_STEP_SIZE = ("sequences_per_step", "gradient_accumulation_steps", "batch_size", "max_steps_per_epoch")
_ROLLOUT_SIZE = ("prompts_per_step", "samples_per_prompt", "refill")
_PATHS = ("source", "data_files", "path", "_path", "_file", "_dir")  # settings that are paths
_NOTICED = 0.1  # relative difference of speeds; runs with equal settings differ by as much
_SLOW = 0.85  # share of A's speed; chance does not explain less
_SAVED = 0.95  # share of A's memory; a user may accept less speed for less memory
_PATIENCE = 100  # times the present steps; advice to run more would help nobody


@dataclass
class _Quality:
    """Whether B trains as well as A.

    Attributes:
        state: ``same``, ``worse`` or ``unknown``.
        text: the reason; it follows "B is 2.00x as fast, ".
        difference, p, measured, notes: as in :class:`Comparison`.
    """

    state: str = "unknown"
    text: str = ""
    difference: Interval = _UNKNOWN
    p: float = math.nan
    measured: dict[str, Pair] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The answer of :func:`compare`, and its reasons.

    Attributes:
        a, b: folders of the runs.
        settings: differing settings by name: A's value, B's.
        speed: B's speed over A's: ratio of median tokens/s after warm-up; for RAFT and GRPO, sampled tokens per second
            of sampling and training, since fewer answers are less work.
        difference: of SFT and DPO runs, B's loss less A's, relative to A's, over the last half of the common steps: in
            the first half, runs may not have diverged yet. Of RAFT and GRPO runs, the share of held-out prompts that B
            got right less A's share.
        p: p-value that both are right equally often (exact McNemar test); NaN for losses.
        measured: values of A and B by name.
        notes: messages for the reader.
        answer: ``take``, ``reject`` or ``unknown``.
        text: the reason, in one line.
    """

    a: Path
    b: Path
    settings: dict[str, tuple[object, object]]
    speed: Interval
    difference: Interval
    p: float
    measured: dict[str, Pair]
    notes: list[str]
    answer: str
    text: str


class _Common:
    """Columns of two runs at their common steps or validations."""

    def __init__(self, a: Columns, b: Columns) -> None:
        self._runs = a, b
        steps, *self._rows = np.intersect1d(a["step"], b["step"], return_indices=True)
        self.steps: list[int] = steps.astype(int).tolist()

    def __getitem__(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        a, b = (run[key][rows] for run, rows in zip(self._runs, self._rows, strict=True))
        return a, b


@np.errstate(all="ignore")  # damaged files may hold 1e308
def compare(a: RunFolder, b: RunFolder, tolerance: float, score_tolerance: float) -> Comparison:
    """Compare two runs, and decide whether to take B.

    Args:
        a, b: the runs, finished or not.
        tolerance: relative difference of losses that does not matter.
        score_tolerance: difference of held-out scores that does not matter, as a share of prompts.

    Raises:
        UserError: the runs are the same folder, of different models, or of different recipes.
    """
    refuse(_mismatches(a, b))
    settings = a.differing_settings(b)
    speed, measured = _speed(a, b)
    memory = _peak_memory(a), _peak_memory(b)
    lost = [int((~np.isfinite(run.updates["loss"]) & run.updates.has("loss")).sum()) for run in (a, b)]
    measured |= {
        "peak memory, MiB": (memory[0] / 2**20, memory[1] / 2**20),
        "losses not finite": (lost[0], lost[1]),
        "times resumed": (len(running_time(a.hardware)[1]), len(running_time(b.hardware)[1])),
    }
    if a.family in SAMPLED:
        quality = _by_scores(a, b, settings, score_tolerance)
    else:
        quality = _by_losses(a, b, settings, tolerance)
        if quality.state == "unknown" and a.evaluations and b.evaluations:  # the losses decide nothing
            scored = _by_scores(a, b, settings, score_tolerance)
            quality = replace(scored, measured=quality.measured | scored.measured, notes=quality.notes)
    if lost[1] > lost[0]:
        quality.state, quality.text = "worse", f"{lost[1]} losses of B are not finite"
    saved = memory[1] / memory[0] if memory[0] > 0 else math.nan
    return Comparison(
        *(a.path, b.path, settings, speed, quality.difference, quality.p),
        measured | quality.measured,
        quality.notes + _notes(a, b),
        *_answer(speed, saved, quality),
    )


def _mismatches(a: RunFolder, b: RunFolder) -> Iterator[str]:
    """Why two runs cannot be compared: they are the same folder, or of two recipes or models.

    A run's summary has a hash of its base model, as its builder reads it. Before the run's end, and for two builders,
    the names of the models' folders decide.
    """
    if a.path.resolve() == b.path.resolve():
        yield f"{a.path} and {b.path} are the same folder; name two runs"
    if a.family != b.family and not (a.is_evaluation and b.is_evaluation):
        yield f"{a.path} is a run of {a.recipe}, {b.path} of {b.recipe}; compare two runs of one recipe"
    folders = [str(run.setting("checkpointer.checkpoint_dir") or "") for run in (a, b)]
    weights = [run.fact("base_model") for run in (a, b)]
    if None not in weights and a.setting("model._component_") == b.setting("model._component_"):
        other = weights[0] != weights[1]
    else:
        names = [(hub_name(Path(folder)) or PurePath(folder).name).lower() for folder in folders]
        other = all(names) and names[0] != names[1]
    if other:
        models = f"{a.path} is a run of the model in {folders[0]}, {b.path} of another one, in {folders[1]}"
        yield f"{models}; compare two runs of one model"


def _notes(a: RunFolder, b: RunFolder) -> list[str]:
    notes = []
    for name, run in (("A", a), ("B", b)):
        if not run.finished:
            notes.append(f"{name} has not finished: its later steps are unknown")
        notes += [f"{name}: {problem}" for problem in run.problems]
    machines = a.fact("machine"), b.fact("machine")
    if None not in machines and machines[0] != machines[1]:
        notes.append(f"different machines: A on {machines[0]}, B on {machines[1]}")
    return notes


def _answer(speed: Interval, saved: float, quality: _Quality) -> tuple[str, str]:
    """The answer and its reason; ``saved``: B's peak of memory over A's, NaN if unknown."""
    if math.isnan(speed.value):
        fast = "the speed of B is unknown"
    elif not (math.isfinite(speed.low) and math.isfinite(speed.high)):
        fast = f"B is {speed.value:.2f}x as fast (too few steps or cycles for an interval)"
    else:
        near = "about " if speed.low <= 1 - _NOTICED or speed.high >= 1 + _NOTICED else ""
        times = f"{near}as fast as A" if abs(speed.value - 1) <= _NOTICED else f"{speed.value:.2f}x as fast"
        fast = f"B is {times} ({speed.low:.2f}-{speed.high:.2f})"
    slower = speed.value <= _SLOW and speed.high < 1
    if quality.state == "worse":
        return "reject", f"{fast}, but {quality.text}: do not take it"
    if slower and not saved < _SAVED:
        return "reject", f"{fast} and saves no memory: do not take it"
    if quality.state == "unknown":
        return "unknown", f"{fast}, but {quality.text}"
    if math.isnan(speed.value):
        return "unknown", f"{fast}; {quality.text}"
    if slower:
        return "reject", f"{fast}, {quality.text}: do not take it, unless for its {saved:.2f}x of A's memory"
    if speed.value < 1 - _NOTICED:
        return "unknown", f"{fast}, a difference that one pair of runs does not prove: repeat the runs"
    return "take", f"{fast}, {quality.text}: take it"


# ---- speed and memory


def _of_finite(of: Callable[[np.ndarray], Any], pair: Sequence[np.ndarray]) -> Pair:
    """``of`` the finite values of A and of B; NaN without any."""
    a, b = (float(of(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan for values in pair)
    return a, b


def _peak_memory(run: RunFolder) -> float:
    peaks = [*run.updates["peak_memory"], *run.steps["peak_memory"], number(run.summary.get("peak_memory"))]
    return max(filter(math.isfinite, peaks), default=math.nan)


def _speed(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, Pair]]:
    """The speed of B against A's, and the measurements behind it, by name."""
    rounds = [_rounds(run) for run in (a, b)]
    common = _Common(*rounds)
    first = min(_WARM_UP, len(common.steps) // 4)
    seconds, name = [values[first:] for values in common["seconds"]], "tokens/s"
    fast = [values[first:] for values in common["tokens_per_second"]]
    if a.family in SAMPLED:
        sampled, name = [values[first:] for values in common["sampled_tokens"]], "sampled tokens/s"
        fast = [sampled[0] / seconds[0], sampled[1] / seconds[1]]
    finite = np.isfinite(fast).all(axis=0)
    return ratio_of_medians(fast[0][finite], fast[1][finite]), {
        f"{a.unit}s": (float(len(rounds[0])), float(len(rounds[1]))),
        f"{name}, median": _of_finite(np.median, fast),
        f"seconds per {a.unit}, median": _of_finite(np.median, seconds),
    }


def _rounds(run: RunFolder) -> Columns:
    """The steps of a run; of two evaluations, their lines, with the tokens that they sampled and their seconds."""
    if not run.is_evaluation:
        return run.steps
    return Columns([{**line, "step": 0, "sampled_tokens": line.get("tokens")} for line in run.evaluated.lines])


# ---- SFT and DPO: losses


def _by_losses(a: RunFolder, b: RunFolder, settings: Settings, tolerance: float) -> _Quality:
    steps, quality, seeds = _Common(a.steps, b.steps), _Quality(), "seed" in settings
    finite = np.isfinite(steps["loss"]).all(axis=0)
    x, y = (values[finite] for values in steps["loss"])
    half = len(x) // 2
    functions = _functions_differ(a, settings)
    if np.isnan(a.steps["loss"]).sum() > len(x):
        raise UserError(f"{a.path}: most losses are not finite, so there is nothing to compare with")
    why = functions or _rows_differ(steps, settings) or _rate_differs(steps)
    validation = None if functions else _best_validations(a, b) if why else _last_validation(a, b)
    if seeds:
        quality.notes.append("the seeds differ, so part of any difference is chance: give both runs the same seed")
    if why:
        quality.notes.append(f"training losses cannot be compared: {why}")
    else:
        last = f"loss, last {len(x) - half:,} of {len(x):,} common steps"
        quality.measured[last] = _of_finite(np.mean, (x[half:], y[half:]))
        quality.difference = relative_difference(x[half:], y[half:])
    if validation is not None:
        name, *losses = validation
        quality.measured[name] = losses[0], losses[1]
        higher = losses[1] / losses[0] - 1
        if higher > tolerance:
            quality.text = f"its {name} is {_percent(higher)} higher"
            quality.text += ", which different seeds can cause" if seeds else ""
            quality.state = "unknown" if seeds else "worse"
            return quality
        if why:
            lower = f"{name} {_percent(-higher)} lower"
            quality.state = "same"
            quality.text = lower if higher < -tolerance else f"{name} the same within {_percent(tolerance)}"
            return quality
    if why:
        quality.text = f"losses cannot be compared: {why}"
    elif len(x) < 2 * BATCHES:
        quality.text = f"{len(x)} common steps are too few; it takes at least {2 * BATCHES}"
    else:
        quality.state, quality.text = _judge(quality.difference, len(x), tolerance, seeds, validation is not None)
    return quality


def _judge(difference: Interval, steps: int, tolerance: float, seeds: bool, validated: bool) -> tuple[str, str]:
    """What the difference of training losses shows: state and text of a quality.

    Args:
        difference: over the last half of the steps.
        steps: number of common steps.
        tolerance: relative difference that does not matter.
        seeds: whether the seeds differ.
        validated: whether the validation loss is known to be no higher.
    """
    around, limit = f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f} %)", _percent(tolerance)
    if difference.within(tolerance):
        if not difference.excludes(0):
            return "same", f"loss the same within {_percent(max(abs(difference.low), abs(difference.high)))}"
        way = "higher" if difference.value > 0 else "lower"
        return "same", f"loss {_percent(abs(difference.value))} {way}, within the tolerance of {limit}"
    if not (difference.excludes(0) and abs(difference.value) > tolerance):
        # the interval narrows with the square root of the steps' number; a difference under the tolerance must be shown
        # to stay there, one above it to exclude zero
        half, off = (difference.high - difference.low) / 2, abs(difference.value)
        goal = max(tolerance - off if off < tolerance else off, 1e-9)
        more = math.ceil(min(1e12, steps * ((half / goal) ** 2 - 1)))
        advice = f"run about {max(more, 1):,} more steps"
        advice = advice if more <= _PATIENCE * steps else "more steps alone will not decide"
        return "unknown", f"it is not clear yet whether its loss is the same within {limit} {around}: {advice}"
    if seeds:
        return "unknown", f"its loss differs by {100 * difference.value:+.1f} %, which different seeds can cause"
    if difference.value > 0:
        return "worse", f"its loss is {_percent(difference.value)} higher {around}"
    lower = f"loss {_percent(-difference.value)} lower {around}"
    if validated:
        return "same", lower
    # a mask that fails to hide labels, or rows that are cut off, look like this
    return "unknown", f"training {lower}, which a faster setting does not explain: set validation_fraction"


def _functions_differ(run: RunFolder, settings: Settings) -> str:
    """Why the losses of the two runs are different functions; empty if they are the same."""
    named = [key for key in settings if key.split(".")[0] == "loss" and key not in _CHUNKS]
    if _CROSS_ENTROPIES.issuperset(settings.get("loss._component_", ())):
        named = [key for key in named if key != "loss._component_"]
    if run.family == DPO:  # whose losses measure against the model that the run began with
        named += [key for key in settings if key == "checkpointer.adapter_checkpoint"]
    return f"the runs have different losses ({', '.join(named)})" if named else ""


def _rows_differ(steps: _Common, settings: Collection[str]) -> str:
    """Why the steps of the two runs saw different rows; empty if they saw the same.

    Steps with different numbers of tokens saw different rows. If the numbers vary from step to step and are always
    equal, the rows are the same, even if the data set has moved. The settings decide if the numbers do not vary, and
    always about which tokens are labels.
    """
    tokens_a, tokens_b = steps["tokens"]
    known = np.isfinite(tokens_a) & np.isfinite(tokens_b)
    other = np.flatnonzero(known & (tokens_a != tokens_b))
    named = [key for key in settings if key.split(".")[0] in _DATA + _STEP_SIZE]
    if len(other):
        because = f" (different {', '.join(named)})" if named else ""
        return f"from step {steps.steps[other[0]]} on the runs see different rows{because}"
    proven = known.all() and len(set(tokens_a)) > 1
    of_data = [key for key in named if key.split(".")[0] in _DATA and not key.endswith(_PATHS)]
    decisive = [key for key in of_data if key.startswith(("dataset.", *_TEMPLATE)) or not proven]
    return f"the runs see different rows (different {', '.join(decisive)})" if decisive else ""


def _rate_differs(steps: _Common) -> str:
    a, b = steps["lr"]
    other = np.flatnonzero(np.abs(a - b) > 1e-6 * np.maximum(np.abs(a), np.abs(b)))
    if not len(other):
        return ""
    at = other[0]
    return f"from step {steps.steps[at]} on the learning rates differ ({a[at]:.3g} and {b[at]:.3g})"


def _last_validation(a: RunFolder, b: RunFolder) -> tuple[str, float, float] | None:
    """Name, A's and B's loss of the last validation at the same step with equally many labels."""
    common = _Common(a.validations, b.validations)
    (labels_a, labels_b), (x, y) = common["val_tokens"], common["val_loss"]
    rows = np.flatnonzero((labels_a == labels_b) & np.isfinite(x) & np.isfinite(y) & (x > 0))
    if not len(rows):
        return None
    return f"validation loss at step {common.steps[rows[-1]]:,}", float(x[rows[-1]]), float(y[rows[-1]])


def _best_validations(a: RunFolder, b: RunFolder) -> tuple[str, float, float] | None:
    """The best losses, if both runs are finished and all their validations have equally many labels."""
    labels = {*a.validations["val_tokens"], *b.validations["val_tokens"]}
    best = _of_finite(np.min, [run.validations["val_loss"] for run in (a, b)])
    if a.finished and b.finished and len(labels) == 1 and best[0] > 0 and math.isfinite(best[1]):
        return "best validation loss", *best
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


# ---- RAFT and GRPO: held-out scores


def _by_scores(a: RunFolder, b: RunFolder, settings: Settings, tolerance: float) -> _Quality:
    """By the last cycle or step that both runs evaluated, or by two evaluations of ``rocm-ext eval``.

    B is not worse if the interval of the gain lies above ``-tolerance``; it is worse if that is not so and chance
    does not explain the difference.
    """
    quality, evaluations = _Quality(), a.is_evaluation and b.is_evaluation
    of_b = {scored.number: scored for scored in held_out(b)}
    both = [(scored, of_b[scored.number]) for scored in held_out(a) if scored.number in of_b]
    for scores in both[:1] + both[1:][-1:]:
        shares = [scored.scores.passed[0] for scored in scores]
        quality.measured[f"held-out pass@1, {scores[0].after}"] = shares[0], shares[1]
    if not both or not (both[-1][0].number or evaluations):  # before training, settings can affect sampling alone
        quality.text = f"no trained {a.unit} of both runs has held-out scores yet (eval_prompts)"
        return quality
    last = both[-1]
    right_a, right_b = (scored.greedy() for scored in last)
    judges = [key for key in settings if key.split(".")[0] in _JUDGED_BY and not key.endswith(_PATHS)]
    limits = [key for key in settings if key.split(".")[0] in _ANSWERED_WITH]
    if limits:
        quality.notes.append(f"the held-out answers were sampled with different {', '.join(limits)}")
    sizes = [key for key in settings if a.family in BY_STEP and key in _ROLLOUT_SIZE]
    why = f"they were asked or judged differently (different {', '.join(judges)})" if judges else ""
    if sizes:
        why = why or f"their steps have different numbers of answers (different {', '.join(sizes)})"
    if any(len(right) != scored.scores.prompts for right, scored in zip((right_a, right_b), last, strict=True)):
        why = why or "verdicts.jsonl lacks verdicts"
    elif right_a.keys() != right_b.keys():
        why = why or "they are of different prompts"
    if why:
        quality.text = f"held-out scores cannot be compared: {why}"
        return quality
    a_only = sum(right and not right_b[prompt] for prompt, right in right_a.items())
    b_only = sum(right and not right_a[prompt] for prompt, right in right_b.items())
    gain = quality.difference = paired_gain(a_only, b_only, len(right_a))
    quality.p = mcnemar(a_only, b_only)
    points = f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f}; p = {quality.p:.2g})"
    name = "held-out pass@1" + ("" if evaluations else f" after {last[0].after}")
    if gain.low > -tolerance:
        quality.state, quality.text = "same", f"{name} {points}"
    elif gain.high < 0 or (quality.p < 0.05 and gain.value < 0):
        quality.state, quality.text = "worse", f"its {name} is worse, {points}"
    else:
        quality.text = f"{name} {points} does not show whether it is worse by {100 * tolerance:g} points"
        half, room = (gain.high - gain.low) / 2, tolerance + gain.value
        if room > 0.001:
            quality.text += f": about {math.ceil(len(right_a) * (half / room) ** 2):,} prompts are needed"
    return quality
