"""Whether to take a faster setting: a safe run A against a faster run B.

The answer shows equivalence instead of assuming it: "no significant difference" would accept any setting that was
tried for too short. Losses count as the same only if the 95 % interval of their difference lies within a
tolerance (two one-sided tests, Schuirmann 1987). They count as different only if the interval excludes zero and the
difference exceeds the tolerance. In all other cases the answer is how many more steps it takes, roughly.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.hub import hub_name
from rocm_ext.base.registry import BY_STEP, DPO, SAMPLED
from rocm_ext.runs.folder import RunFolder, held_out, running_time
from rocm_ext.runs.intervals import (
    BATCHES,
    Interval,
    gained_and_lost,
    mcnemar,
    paired_gain,
    ratio_of_medians,
    relative_difference,
)
from rocm_ext.runs.records import Columns, first_and_last, of_sets

Pair = tuple[float, float]  # A's value, B's
_Columns = tuple[np.ndarray, np.ndarray]  # A's values, B's
_Losses = tuple[str, float, float]  # name of a loss, A's value, B's
Settings = Mapping[str, tuple[object, object]]  # settings that differ, with A's value and B's

_UNKNOWN = Interval(math.nan)
_WARM_UP = 10  # steps at a run's beginning that do not show its speed: compilation, caches, clocks
_TEMPLATE = ("chat_template", "chat_template_args", "chat_template_date")
_ROWS = ("dataset", "dataset_val", "validation_fraction", "data_seed", "shuffle", "too_long")
_DATA = (*_ROWS, "bad_rows", "tokenizer", *_TEMPLATE)
_CROSS_ENTROPIES = {  # components of one function
    "rocm_ext.losses.CrossEntropy",
    "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "torch.nn.CrossEntropyLoss",
}
# They decide memory and speed, not the loss
_CHUNKS = ("loss.chunk_tokens", "loss.num_output_chunks")
# What decides the meaning of a held-out score, and what an answer may be
_JUDGED_BY = ("verifier", "environment", "eval_prompts")
_LIMITS = ("max_new_tokens", "stop_strings", "max_turns", "max_environment_tokens")
_ANSWERED_WITH = (*_LIMITS, *_TEMPLATE)
_ROWS_OF_STEP = ("sequences_per_step", "gradient_accumulation_steps", "batch_size")
_STEP_SIZE = (*_ROWS_OF_STEP, "max_steps_per_epoch")
_ROLLOUT_SIZE = ("prompts_per_step", "samples_per_prompt", "refill")
_PATHS = ("source", "data_files", "path", "_path", "_file", "_dir")  # settings that are paths
_NOTICED = 0.1  # relative difference of speeds; runs with equal settings differ by as much
_SLOW = 0.85  # share of A's speed; chance does not explain less
_PATIENCE = 100  # times the present steps; advice to run more would help nobody
_SAVED = 0.95  # share of A's memory; a user may accept less speed for less memory


@dataclass
class Comparison:
    """The answer of :func:`compare`, and its reasons.

    Attributes:
        a, b: folders of the runs.
        settings: differing settings by name: A's value, B's.
        speed: B's speed over A's: ratio of median tokens/s after warm-up; for RAFT and GRPO, sampled tokens per second
            of sampling and training, since fewer answers are less work.
        measured: values of A and B by name.
        difference: of SFT and DPO runs, B's loss less A's, relative to A's, over the last half of the common steps: in
            the first half, runs may not have diverged yet. Of RAFT and GRPO runs, the share of held-out prompts that B
            got right less A's share.
        p: p-value that both are right equally often (exact McNemar test); NaN for losses.
        notes: messages for the reader.
        answer: ``take``, ``reject`` or ``unknown``; until the speed is considered, whether B trains as well as A.
        text: the reason, in one line; until then, it follows "B is 2.00x as fast, ".
    """

    a: Path
    b: Path
    settings: Settings
    speed: Interval
    measured: dict[str, Pair]
    difference: Interval = _UNKNOWN
    p: float = math.nan
    notes: list[str] = field(default_factory=list)
    answer: str = "unknown"
    text: str = ""


class _Common:
    """Columns of two runs at their common steps or validations."""

    def __init__(self, a: Columns, b: Columns) -> None:
        self._runs = a, b
        steps, *self._rows = np.intersect1d(a["step"], b["step"], return_indices=True)
        self.steps: list[int] = steps.astype(int).tolist()

    def __getitem__(self, key: str) -> _Columns:
        a, b = self._runs
        rows_a, rows_b = self._rows
        return a[key][rows_a], b[key][rows_b]


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
    speed, measured = _speed(a, b)
    lost_a, lost_b = _lost_losses(a), _lost_losses(b)
    measured |= {
        "peak memory, MiB": (a.peak_memory / 2**20, b.peak_memory / 2**20),
        "losses not finite": (lost_a, lost_b),
        "times resumed": (_pauses(a), _pauses(b)),
    }
    compared = Comparison(a.path, b.path, a.differing_settings(b), speed, measured)
    if a.family not in SAMPLED:
        _by_losses(compared, a, b, tolerance)
    undecided = compared.answer == "unknown" and a.evaluations and b.evaluations
    if a.family in SAMPLED or undecided:
        compared.difference = _UNKNOWN
        compared = _by_scores(compared, a, b, score_tolerance)
    if lost_b > lost_a:
        compared.answer = "reject"
        compared.text = f"{lost_b} losses of B are not finite"
    saved = b.peak_memory / a.peak_memory if a.peak_memory > 0 else math.nan
    _consider_speed(compared, saved)
    compared.notes += _notes(a, b)
    return compared


def _mismatches(a: RunFolder, b: RunFolder) -> Iterator[str]:
    """Why two runs cannot be compared: they are the same folder, or of two recipes or models."""
    if a.path.resolve() == b.path.resolve():
        yield f"{a.path} and {b.path} are the same folder; name two runs"
    if a.family != b.family and not (a.is_evaluation and b.is_evaluation):
        yield f"{a.path} is a run of {a.recipe}, {b.path} of {b.recipe}; compare two runs of one recipe"
    if _models_differ(a, b):
        folder_a, folder_b = _model_folder(a), _model_folder(b)
        models = (
            f"{a.path} is a run of the model in {folder_a}, {b.path} of another one, in {folder_b}"
        )
        yield f"{models}; compare two runs of one model"


def _models_differ(a: RunFolder, b: RunFolder) -> bool:
    """Whether two runs began with different base models.

    A run's summary has a hash of its base model, as its builder reads it. Before the run's end, and for two builders,
    the names of the models' folders decide.
    """
    hashes = [run.summary.get("base_model") for run in (a, b)]
    if None not in hashes and a.setting("model._component_") == b.setting("model._component_"):
        return bool(hashes[0] != hashes[1])
    name_a, name_b = _model_name(a), _model_name(b)
    return bool(name_a and name_b) and name_a != name_b


def _model_folder(run: RunFolder) -> str:
    return str(run.setting("checkpointer.checkpoint_dir") or "")


def _model_name(run: RunFolder) -> str:
    folder = _model_folder(run)
    name = hub_name(Path(folder)) or PurePath(folder).name
    return name.lower()


def _notes(a: RunFolder, b: RunFolder) -> list[str]:
    notes = []
    for name, run in (("A", a), ("B", b)):
        if not run.finished:
            notes.append(f"{name} has not finished: its later steps are unknown")
        for problem in run.problems:
            notes.append(f"{name}: {problem}")
    machines = [run.summary.get("machine") for run in (a, b)]
    if None not in machines and machines[0] != machines[1]:
        notes.append(f"different machines: A on {machines[0]}, B on {machines[1]}")
    return notes


def _consider_speed(compared: Comparison, saved: float) -> None:
    """Put speed and memory into the answer; ``saved``: B's peak of memory over A's, NaN if unknown."""
    speed, trains = compared.speed, compared.answer
    fast = _speed_in_words(speed)
    slower = speed.value <= _SLOW and speed.high < 1
    answer, text = "take", f"{fast}, {compared.text}: take it"
    if trains == "reject":
        answer, text = "reject", f"{fast}, but {compared.text}: do not take it"
    elif slower and not saved < _SAVED:
        answer, text = "reject", f"{fast} and saves no memory: do not take it"
    elif trains == "unknown":
        answer, text = "unknown", f"{fast}, but {compared.text}"
    elif math.isnan(speed.value):
        answer, text = "unknown", f"{fast}; {compared.text}"
    elif slower:
        unless = f"unless for its {saved:.2f}x of A's memory"
        answer, text = "reject", f"{fast}, {compared.text}: do not take it, {unless}"
    elif speed.value < 1 - _NOTICED:
        why = "a difference that one pair of runs does not prove: repeat the runs"
        answer, text = "unknown", f"{fast}, {why}"
    compared.answer = answer
    compared.text = text


def _speed_in_words(speed: Interval) -> str:
    if math.isnan(speed.value):
        return "the speed of B is unknown"
    if math.isinf(speed.high - speed.low):
        return f"B is {speed.value:.2f}x as fast (too few steps or cycles for an interval)"
    interval = f"({speed.low:.2f}-{speed.high:.2f})"
    if abs(speed.value - 1) > _NOTICED:
        return f"B is {speed.value:.2f}x as fast {interval}"
    if speed.low > 1 - _NOTICED and speed.high < 1 + _NOTICED:
        return f"B is as fast as A {interval}"
    return f"B is about as fast as A {interval}"


# ---- speed and memory


def _finite(reduce: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """``reduce`` the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if len(finite) else math.nan


def _lost_losses(run: RunFolder) -> int:
    """The number of losses that are not finite."""
    lost = run.updates.has("loss") & ~np.isfinite(run.updates["loss"])
    return int(lost.sum())


def _pauses(run: RunFolder) -> int:
    _, pauses = running_time(run.hardware)
    return len(pauses)


def _speed(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, Pair]]:
    """The speed of B against A's, and the measurements behind it, by name."""
    steps_a, steps_b = _timed_steps(a), _timed_steps(b)
    common = _Common(steps_a, steps_b)
    first = min(_WARM_UP, len(common.steps) // 4)
    seconds_a, seconds_b = common["seconds"]
    if a.family in SAMPLED:
        kind = "sampled tokens/s"
        tokens_a, tokens_b = common["sampled_tokens"]
        fast_a, fast_b = tokens_a / seconds_a, tokens_b / seconds_b
    else:
        kind = "tokens/s"
        fast_a, fast_b = common["tokens_per_second"]
    # the first steps do not show the speed
    fast_a, fast_b = fast_a[first:], fast_b[first:]
    seconds_a, seconds_b = seconds_a[first:], seconds_b[first:]
    finite = np.isfinite(fast_a) & np.isfinite(fast_b)
    measured = {
        f"{a.unit}s": (float(len(steps_a)), float(len(steps_b))),
        f"{kind}, median": (_finite(np.median, fast_a), _finite(np.median, fast_b)),
        f"seconds per {a.unit}, median": (
            _finite(np.median, seconds_a),
            _finite(np.median, seconds_b),
        ),
    }
    return ratio_of_medians(fast_a[finite], fast_b[finite]), measured


def _timed_steps(run: RunFolder) -> Columns:
    """The steps of a run; of two evaluations, their lines, with the tokens that they sampled and their seconds."""
    if not run.is_evaluation:
        return run.steps
    steps = []
    for line in run.evaluated.lines:
        steps.append({**line, "step": 0, "sampled_tokens": line.get("tokens")})
    return Columns(steps)


# ---- SFT and DPO: losses


def _by_losses(compared: Comparison, a: RunFolder, b: RunFolder, tolerance: float) -> None:
    """Decide by the validation losses, and by the training losses if these can be compared."""
    settings = compared.settings
    steps = _Common(a.steps, b.steps)
    loss_a, loss_b = steps["loss"]
    finite = np.isfinite(loss_a) & np.isfinite(loss_b)
    loss_a, loss_b = loss_a[finite], loss_b[finite]
    if np.isnan(a.steps["loss"]).sum() > len(loss_a):
        raise UserError(
            f"{a.path}: most losses are not finite, so there is nothing to compare with"
        )
    functions = _functions_differ(a, settings)
    obstacle = functions or _rows_differ(steps, settings) or _rate_differs(steps)
    seeds_differ = "seed" in settings
    if seeds_differ:
        compared.notes.append(
            "the seeds differ, so part of any difference is chance: give both runs the same seed"
        )
    if obstacle:
        compared.notes.append(f"training losses cannot be compared: {obstacle}")
    else:
        half = len(loss_a) // 2
        name = f"loss, last {len(loss_a) - half:,} of {len(loss_a):,} common steps"
        last_a, last_b = loss_a[half:], loss_b[half:]
        compared.measured[name] = _finite(np.mean, last_a), _finite(np.mean, last_b)
        compared.difference = relative_difference(last_a, last_b)
    validations: list[_Losses] = []
    if not obstacle:
        validations = _last_validations(a, b)
    elif not functions:
        validations = _best_validations(a, b)
    for name, val_a, val_b in validations:
        compared.measured[name] = val_a, val_b
    for name, val_a, val_b in validations:
        higher = val_b / val_a - 1
        if higher > tolerance:
            compared.answer = "reject"
            compared.text = f"its {name} is {_percent(higher)} higher"
            if seeds_differ:
                compared.answer = "unknown"
                compared.text += ", which different seeds can cause"
            return
    if obstacle and validations:
        name, val_a, val_b = validations[0]
        lower = 1 - val_b / val_a
        compared.answer = "take"
        compared.text = f"{name} the same within {_percent(tolerance)}"
        if lower > tolerance:
            compared.text = f"{name} {_percent(lower)} lower"
        return
    if obstacle:
        compared.text = f"losses cannot be compared: {obstacle}"
    elif len(loss_a) < 2 * BATCHES:
        compared.text = f"{len(loss_a)} common steps are too few; it takes at least {2 * BATCHES}"
    else:
        validated = bool(validations)
        compared.answer, compared.text = _judge(
            compared.difference, len(loss_a), tolerance, seeds_differ, validated
        )


def _judge(
    difference: Interval, steps: int, tolerance: float, seeds: bool, validated: bool
) -> tuple[str, str]:
    """What the difference of training losses shows: answer and text of a comparison.

    Args:
        difference: over the last half of the steps.
        steps: number of common steps.
        tolerance: relative difference that does not matter.
        seeds: whether the seeds differ.
        validated: whether the validation loss is known to be no higher.
    """
    limit = _percent(tolerance)
    interval = f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f} %)"
    size = abs(difference.value)
    if difference.within(tolerance):
        if not difference.excludes(0):
            bound = max(abs(difference.low), abs(difference.high))
            return "take", f"loss the same within {_percent(bound)}"
        way = "higher" if difference.value > 0 else "lower"
        return "take", f"loss {_percent(size)} {way}, within the tolerance of {limit}"
    if not difference.excludes(0) or size <= tolerance:
        unclear = f"it is not clear yet whether its loss is the same within {limit} {interval}"
        return "unknown", f"{unclear}: {_advice(difference, steps, tolerance)}"
    if seeds:
        differs = f"its loss differs by {100 * difference.value:+.1f} %"
        return "unknown", f"{differs}, which different seeds can cause"
    if difference.value > 0:
        return "reject", f"its loss is {_percent(size)} higher {interval}"
    if validated:
        return "take", f"loss {_percent(size)} lower {interval}"
    # a mask that fails to hide labels, or rows that are cut off, look like this
    lower = f"training loss {_percent(size)} lower {interval}"
    return "unknown", f"{lower}, which a faster setting does not explain: set validation_fraction"


def _advice(difference: Interval, steps: int, tolerance: float) -> str:
    """How many more steps it takes, roughly.

    The interval narrows with the square root of the steps' number. A difference under the tolerance must be shown to
    stay there, one above it to exclude zero.
    """
    size = abs(difference.value)
    half = (difference.high - difference.low) / 2
    needed = tolerance - size if size < tolerance else size
    growth = (half / max(needed, 1e-9)) ** 2
    missing = math.ceil(min(1e12, steps * (growth - 1)))
    if missing > _PATIENCE * steps:
        return "more steps alone will not decide"
    return f"run about {max(missing, 1):,} more steps"


def _functions_differ(run: RunFolder, settings: Settings) -> str:
    """Why the losses of the two runs are different functions. Empty if they are the same."""
    same = set(_CHUNKS)
    if _CROSS_ENTROPIES.issuperset(settings.get("loss._component_", ())):
        same.add("loss._component_")
    differing = [key for key in _named(settings, ("loss",)) if key not in same]
    start = "checkpointer.adapter_checkpoint"
    # DPO's losses measure against the model that the run began with
    if run.family == DPO and start in settings:
        differing.append(start)
    if not differing:
        return ""
    return f"the runs have different losses ({', '.join(differing)})"


def _rows_differ(steps: _Common, settings: Settings) -> str:
    """Why the steps of the two runs saw different rows. Empty if they saw the same.

    Steps with different numbers of tokens saw different rows. If the numbers vary from step to step and are always
    equal, the rows are the same, even if the data set has moved. The settings decide if the numbers do not vary, and
    always about which tokens are labels.
    """
    tokens_a, tokens_b = steps["tokens"]
    known = np.isfinite(tokens_a) & np.isfinite(tokens_b)
    other = np.flatnonzero(known & (tokens_a != tokens_b))
    if len(other):
        why = _named(settings, _DATA + _STEP_SIZE)
        because = f" (different {', '.join(why)})" if why else ""
        return f"from step {steps.steps[other[0]]} on the runs see different rows{because}"
    proven = known.all() and len(set(tokens_a)) > 1
    differing = []
    for key in _named(settings, _DATA):
        about_labels = key.startswith(("dataset.", *_TEMPLATE))
        if not key.endswith(_PATHS) and (about_labels or not proven):
            differing.append(key)
    if not differing:
        return ""
    return f"the runs see different rows (different {', '.join(differing)})"


def _named(settings: Settings, names: Collection[str]) -> list[str]:
    """The settings with one of these names, or in a section with such a name."""
    return [key for key in settings if key.split(".")[0] in names]


def _rate_differs(steps: _Common) -> str:
    a, b = steps["lr"]
    larger = np.maximum(np.abs(a), np.abs(b))
    other = np.flatnonzero(np.abs(a - b) > 1e-6 * larger)
    if not len(other):
        return ""
    i = other[0]
    return f"from step {steps.steps[i]} on the learning rates differ ({a[i]:.3g} and {b[i]:.3g})"


def _last_validations(a: RunFolder, b: RunFolder) -> list[_Losses]:
    """Name, A's and B's loss of the last validation at the same step with equally many labels, by data set."""
    common = _Common(a.validations, b.validations)
    losses = []
    for column, title in of_sets(a.validations.lines).items():
        labels_a, labels_b = common[column.replace("loss", "tokens", 1)]
        loss_a, loss_b = common[column]
        known = np.isfinite(loss_a) & np.isfinite(loss_b)
        comparable = np.flatnonzero(known & (loss_a > 0) & (labels_a == labels_b))
        if len(comparable):
            i = comparable[-1]
            name = f"{title} at step {common.steps[i]:,}"
            losses.append((name, float(loss_a[i]), float(loss_b[i])))
    return losses


def _best_validations(a: RunFolder, b: RunFolder) -> list[_Losses]:
    """The best losses by data set, if both runs are finished and all their validations have equally many labels."""
    losses = []
    for column, title in of_sets(a.validations.lines).items():
        tokens = column.replace("loss", "tokens", 1)
        labels = {*a.validations[tokens], *b.validations[tokens]}
        best_a = _finite(np.min, a.validations[column])
        best_b = _finite(np.min, b.validations[column])
        known = best_a > 0 and not math.isnan(best_b)
        if a.finished and b.finished and len(labels) == 1 and known:
            losses.append((f"best {title}", best_a, best_b))
    return losses


def _percent(share: float) -> str:
    if share < 0.995:
        return f"{100 * share:.2g} %"
    return f"{100 * share:,.0f} %"


# ---- RAFT and GRPO: held-out scores


def _by_scores(compared: Comparison, a: RunFolder, b: RunFolder, tolerance: float) -> Comparison:
    """Decide by the held-out scores; of the sets of prompts in both runs, by the one that speaks most against B."""
    of_a, of_b = held_out(a), held_out(b)
    both = [of_set for of_set in of_a if of_set in of_b]
    for run, sets, others in (("A", of_a, of_b), ("B", of_b, of_a)):
        names = [of_set or " of a set without a name" for of_set in sets if of_set not in others]
        if names and others:
            compared.notes.append(f"only {run} has held-out scores{','.join(names)}")
    if of_a and of_b and not both:
        compared.text = "held-out scores cannot be compared: the sets of prompts have other names"
        return compared
    by_set = []
    for of_set in both or [""]:
        of_one = replace(compared)
        _by_score(of_one, of_set, a, b, tolerance)
        by_set.append(of_one)

    def for_b(of_one: Comparison) -> tuple[int, float]:
        answer = ["reject", "unknown", "take"].index(of_one.answer)
        return answer, float(np.nan_to_num(of_one.difference.value, nan=math.inf))

    return min(by_set, key=for_b)


def _by_score(
    compared: Comparison, of_set: str, a: RunFolder, b: RunFolder, tolerance: float
) -> None:
    """Decide by the last cycle or step that both runs evaluated, or by two evaluations of ``rocm-ext eval``.

    B is not worse if the interval of the gain lies above ``-tolerance``; it is worse if that is not so and chance
    does not explain the difference.
    """
    settings = compared.settings
    of_b = {evaluation.number: evaluation for evaluation in held_out(b).get(of_set, ())}
    of_a = held_out(a).get(of_set, ())
    both = [evaluation for evaluation in of_a if evaluation.number in of_b]
    for scored_a in first_and_last(both):
        scored_b = of_b[scored_a.number]
        share_a, *_ = scored_a.scores.passed
        share_b, *_ = scored_b.scores.passed
        compared.measured[f"held-out pass@1{of_set}, {scored_a.after}"] = share_a, share_b
    evaluations = a.is_evaluation and b.is_evaluation
    # before training, settings can affect sampling alone
    if not both or not (scored_a.number or evaluations):
        compared.text = f"no trained {a.unit} of both runs has held-out scores yet (eval_prompts)"
        return
    limits = _named(settings, _ANSWERED_WITH)
    note = f"the held-out answers were sampled with different {', '.join(limits)}"
    if limits and note not in compared.notes:
        compared.notes.append(note)
    right_a, right_b = scored_a.greedy(), scored_b.greedy()
    prompts = scored_a.scores.prompts, scored_b.scores.prompts
    judges = _judges(settings, a, scored_a.set)
    sizes = _named(settings, _ROLLOUT_SIZE) if a.family in BY_STEP else []
    obstacle = ""
    if judges:
        obstacle = f"they were asked or judged differently (different {', '.join(judges)})"
    elif sizes:
        obstacle = f"their steps have different numbers of answers (different {', '.join(sizes)})"
    elif (len(right_a), len(right_b)) != prompts:
        obstacle = "verdicts.jsonl lacks verdicts"
    elif right_a.keys() != right_b.keys():
        obstacle = "they are of different prompts"
    if obstacle:
        compared.text = f"held-out scores cannot be compared: {obstacle}"
        return
    b_only, a_only = gained_and_lost(right_a, right_b)
    gain = paired_gain(a_only, b_only, len(right_a))
    compared.difference = gain
    compared.p = mcnemar(a_only, b_only)
    points = f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f}; p = {compared.p:.2g})"
    name = f"held-out pass@1{of_set}"
    if not evaluations:
        name += f" after {scored_a.after}"
    if gain.low > -tolerance:
        compared.answer = "take"
        compared.text = f"{name} {points}"
    elif gain.high < 0 or (compared.p < 0.05 and gain.value < 0):
        compared.answer = "reject"
        compared.text = f"its {name} is worse, {points}"
    else:
        compared.text = (
            f"{name} {points} does not show whether it is worse by {100 * tolerance:g} points"
        )
        room = tolerance + gain.value
        if room > 0.001:
            half = (gain.high - gain.low) / 2
            needed = math.ceil(len(right_a) * (half / room) ** 2)
            compared.text += f": about {needed:,} prompts are needed"


def _judges(settings: Settings, run: RunFolder, name: str) -> list[str]:
    """The differing settings that decide the scores of the set of prompts ``name``, which may be empty."""
    own = f"eval_prompts.{name}."
    has_verifier = bool(name) and run.setting(f"{own}verifier") is not None
    judges = []
    for key in _named(settings, _JUDGED_BY):
        of_others = bool(name) and key.startswith("eval_prompts.") and not key.startswith(own)
        of_run = has_verifier and key.split(".")[0] == "verifier"
        if not (key.endswith(_PATHS) or of_others or of_run):
            judges.append(key)
    return judges
