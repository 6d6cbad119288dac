"""A run's main facts."""

import math
import time
from collections.abc import Iterator
from pathlib import Path, PurePath

import numpy as np

from rocm_ext.base.hub import hub_name
from rocm_ext.base.log import duration
from rocm_ext.base.registry import DPO, RAFT, SAMPLED, SFT, TITLES
from rocm_ext.report.charts import memory_unit, short_number
from rocm_ext.runs.folder import RunFolder, held_out, planned_steps, running_time
from rocm_ext.runs.progress import written_and_size
from rocm_ext.runs.records import first_and_last, is_rows, number, of_sets


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """Names and values of the known facts."""
    known = [*_setup(run), *_progress(run)]
    if run.family in SAMPLED:
        known += _sampled(run)
    else:
        if run.family == DPO:
            known += _preferences(run)
        known += _losses(run)
    known += _warnings(run)
    adapter = run.path / "adapter"
    if adapter.exists():
        words = str(adapter)
        kind = run.summary.get("adapter_is")
        if isinstance(kind, str):
            words += f" ({kind})"
        known.append(("Adapter", words))
    return [(name, value) for name, value in known if value]


def _setup(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "Recipe", TITLES.get(run.recipe, run.recipe)
    names = []
    folder = run.setting("checkpointer.checkpoint_dir")
    if folder:
        name = str(folder)
        names.append(hub_name(Path(name)) or PurePath(name).name)
    builder = str(run.setting("model._component_") or "").rpartition(".")[2]
    if builder not in ("", "from_checkpoint"):  # the folder's name says it all
        names.append(builder)
    yield "Model", " · ".join(names)
    machine = run.summary.get("machine")
    if not machine and run.hardware.gpus:
        machine = f"{len(run.hardware.gpus)} GPUs"
    elif not machine and run.config:
        machine = f"profile {run.setting('hardware')}"
    yield "Machine", str(machine or "")
    precision = str(run.summary.get("dtype") or run.setting("dtype") or "")
    ranks = number(run.summary.get("ranks"))
    if ranks > 1:
        precision += f", {ranks:.0f} ranks"
    yield "Precision", precision


def _progress(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "State", "finished" if run.finished else f"not finished{_last_sign(run)}"
    if run.family == RAFT:
        yield "Cycles", _steps(run)
        yield "Steps", f"{len(run.updates):,}" if len(run.updates) else ""
    else:
        yield "Steps", _steps(run)
    tokens = float(np.nansum(run.updates["tokens"]))
    if tokens:
        yield "Tokens trained", short_number(tokens)
    speeds = run.updates["tokens_per_second"]
    if np.isfinite(speeds).any():
        yield "Training speed", f"{np.nanmedian(speeds):,.0f} tokens/s, median"
    padding = run.updates["padding"]
    if np.isfinite(padding).any():
        padded = np.nanmax(padding) > 0
        yield (
            "Padding",
            f"{100 * np.nanmean(padding):.1f} % of computed tokens" if padded else "none",
        )
    if math.isfinite(run.peak_memory):
        size, unit = memory_unit(run.peak_memory)
        yield "Peak memory", f"{run.peak_memory / size:,.1f} {unit}"
    yield "Pauses for heat", duration(run.paused) if run.paused else ""
    if len(run.hardware) > 1:
        seconds, pauses = running_time(run.hardware)
        time_text = _time(seconds[-1])
        if len(pauses):
            time_text += f", resumed {len(pauses)} time{'s' if len(pauses) > 1 else ''}"
        yield "Running time", time_text
    elif len(run.steps):
        yield "Training time", _time(np.nansum(run.steps["seconds"]))


def _steps(run: RunFolder) -> str:
    """How many steps are done, of how many, in which epoch. Empty before the first."""
    done = len(run.steps)
    if not done:
        return ""
    words = f"{done:,}"
    planned = planned_steps(run.config)
    if run.family in SAMPLED and math.isfinite(planned) and planned != done:
        words += f" of {planned:,.0f}"
    epoch = run.steps["epoch"][-1]
    if run.family in (SFT, DPO) and math.isfinite(epoch):
        words += f", epoch {epoch:.0f}"
    skipped = np.sum(run.steps["updates"] == 0)
    if run.family == RAFT and skipped:
        words += f", {skipped} skipped"
    return words


def _time(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else ""


def _last_sign(run: RunFolder) -> str:
    """When an unfinished run last wrote a line."""
    metrics, _ = written_and_size(run.path / "metrics.jsonl")
    samples, _ = written_and_size(run.path / "samples.jsonl")
    newest = max(metrics, samples)
    if not newest:
        return ""
    return f", last line of {time.strftime('%Y-%m-%d %H:%M', time.localtime(newest))}"


def _losses(run: RunFolder) -> Iterator[tuple[str, str]]:
    data_sets = run.summary.get("data_sets")
    if is_rows(data_sets):
        given = [
            f"{part.get('name')}: {number(part.get('rows_given')):,.0f} rows" for part in data_sets
        ]
        yield "Rows given by", " · ".join(given)
    yield "Loss", _trend(run.steps["loss"])
    yield from _passes(run)
    for column, title in of_sets(run.validations.lines).items():
        losses = run.validations[column]
        if np.isfinite(losses).any():
            best = np.nanargmin(losses)
            words = f"{short_number(losses[best])} at step {run.validations['step'][best]:,.0f}"
            if best < len(losses) - 1:
                words += f", last {short_number(losses[-1])}"
            yield f"Best {title}", words


def _preferences(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "Margin", _trend(run.steps["margin"])
    yield "Accuracy", _percent(run.steps["accuracy"])
    lines = run.validations.lines
    for measured, words in (("margin", _trend), ("accuracy", _percent)):
        titles = of_sets(lines, f"val_{measured}", f"Validation {measured}")
        for column, title in titles.items():
            yield title, words(run.validations[column])


def _percent(shares: np.ndarray) -> str:
    words = _trend(100 * shares)
    return f"{words} (%)" if words else ""


def _trend(values: np.ndarray) -> str:
    """The first and the last value, or the means of the first and the last tenth of many. Empty without values."""
    if not len(values):
        return ""
    tenth = len(values) // 10
    if tenth < 2:
        ends = [short_number(values[0]), short_number(values[-1])]
        return " → ".join(dict.fromkeys(ends))
    first = short_number(values[:tenth].mean())
    last = short_number(values[-tenth:].mean())
    return f"{first} → {last}, means of {tenth:,} steps"


def _sampled(run: RunFolder) -> Iterator[tuple[str, str]]:
    steps = run.steps
    if np.isfinite(steps["reward"]).any():
        yield "Reward", _trend(steps["reward"])
    yield from _passes(run)
    for of_set, evaluations in held_out(run).items():
        trained = {
            scored.number: scored.scores.passed[0] for scored in evaluations if scored.number
        }
        if not trained:
            continue
        best = max(trained, key=trained.__getitem__)  # the first of equals
        if best != max(trained):
            words = f"{100 * trained[best]:.1f} % after {run.unit} {best:,}"
            yield f"Best held-out pass@1{of_set}", words
    answers = float(np.nansum(steps["answers"]))
    if answers:
        yield "Answers sampled", short_number(answers)
    groups = []
    for kind in ("flat", "all_right", "all_wrong"):
        if np.isfinite(steps[kind]).any():
            groups.append(f"{100 * np.nanmean(steps[kind]):.1f} % {kind.replace('_', ' ')}")
    yield "Groups", ", ".join(groups)
    stopped = run.summary.get("stopped")
    if isinstance(stopped, str):
        yield "Stopped early", stopped


def _passes(run: RunFolder) -> Iterator[tuple[str, str]]:
    """The first and the last held-out score with their intervals, by set of prompts."""
    for of_set, evaluations in held_out(run).items():
        scores = []
        for evaluation in first_and_last(evaluations):
            share, low, high = (100 * value for value in evaluation.scores.passed)
            scores.append(f"{share:.1f} % ({low:.1f} – {high:.1f})")
        yield f"Held-out pass@1{of_set}", " → ".join(scores)


def _warnings(run: RunFolder) -> Iterator[tuple[str, str]]:
    """The warnings of validations and evaluations."""
    for line in (*run.validations.lines, *run.evaluated.lines):
        warnings = line.get("warnings")
        if isinstance(warnings, list):
            yield from (("Warning", str(text)) for text in warnings)
