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
from rocm_ext.runs.folder import RunFolder, held_out, running_time
from rocm_ext.runs.records import number


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """Names and values of the known facts."""
    special = {**dict.fromkeys(SAMPLED, _sampled), DPO: _dpo}.get(run.family, _sft)
    known = [*_setup(run), *_progress(run), *special(run)]
    path = run.path / "adapter"
    if path.exists():
        kind = run.summary.get("adapter_is")
        known.append(("Adapter", str(path) + (f" ({kind})" if isinstance(kind, str) else "")))
    return [(name, value) for name, value in known if value]


def _setup(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "Recipe", TITLES.get(run.recipe, run.recipe)
    folder, builder = run.setting("checkpointer.checkpoint_dir"), run.setting("model._component_")
    names = [hub_name(Path(str(folder))) or PurePath(str(folder)).name] if folder else []
    kind = str(builder or "").rpartition(".")[2]
    names += [kind] if kind not in ("", "from_checkpoint") else []  # the folder's name says it all
    yield "Model", " · ".join(names)
    gpus = f"{len(run.hardware.gpus)} GPUs" if run.hardware.gpus else ""
    profile = f"profile {run.setting('hardware')}" if run.config else ""
    yield "Machine", str(run.fact("machine") or gpus or profile)
    ranks = number(run.fact("ranks"))
    dtype = str(run.fact("dtype") or run.setting("dtype") or "")
    yield "Precision", dtype + (f", {ranks:.0f} ranks" if ranks > 1 else "")


def _progress(run: RunFolder) -> Iterator[tuple[str, str]]:
    yield "State", "finished" if run.finished else f"not finished{_last_sign(run)}"
    if run.family == RAFT:
        yield "Cycles", _steps(run, "cycles")
        yield "Steps", f"{len(run.updates):,}" if len(run.updates) else ""
    else:
        yield "Steps", _steps(run, "steps")
    tokens = float(np.nansum(run.updates["tokens"]))
    yield "Tokens trained", short_number(tokens) if tokens else ""
    speeds = run.updates["tokens_per_second"]
    if np.isfinite(speeds).any():
        yield "Training speed", f"{np.nanmedian(speeds):,.0f} tokens/s, median"
    if np.isfinite(padding := run.updates["padding"]).any():
        yield "Padding", f"{100 * np.nanmean(padding):.1f} % of computed tokens" if np.nanmax(padding) > 0 else "none"
    memory = np.array([*run.updates["peak_memory"], *run.steps["peak_memory"], number(run.summary.get("peak_memory"))])
    if np.isfinite(memory).any():
        size, unit = memory_unit([memory])
        yield "Peak memory", f"{np.nanmax(memory) / size:,.1f} {unit}"
    if len(run.hardware) > 1:
        clock, pauses = running_time(run.hardware)
        times = f", resumed {len(pauses)} time{'s' if len(pauses) > 1 else ''}" if len(pauses) else ""
        yield "Running time", _time(float(clock[-1])) + times
    elif len(run.steps):
        yield "Training time", _time(float(np.nansum(run.steps["seconds"])))


def _steps(run: RunFolder, planned: str) -> str:
    """How many steps are done, of how many, in which epoch; empty before the first."""
    done = len(run.steps)
    if not done:
        return ""
    planned_steps = number(run.setting(planned))
    words = f"{done:,}"
    if planned_steps != done and math.isfinite(planned_steps) and run.family in SAMPLED:
        words += f" of {planned_steps:,.0f}"
    epoch = run.steps["epoch"][-1]
    if run.family in (SFT, DPO) and math.isfinite(epoch):
        words += f", epoch {epoch:.0f}"
    if run.family == RAFT and (skipped := int(np.sum(run.steps["updates"] == 0))):
        words += f", {skipped} skipped"
    return words


def _time(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else ""


def _last_sign(run: RunFolder) -> str:
    """When an unfinished run last wrote a line."""
    files = [run.path / "metrics.jsonl", run.path / "samples.jsonl"]
    try:
        newest = max(path.stat().st_mtime for path in files if path.exists())
    except (OSError, ValueError):
        return ""
    return f", last line of {time.strftime('%Y-%m-%d %H:%M', time.localtime(newest))}"


def _sft(run: RunFolder) -> Iterator[tuple[str, str]]:
    sets = run.summary.get("data_sets")
    sets = [part for part in sets if isinstance(part, dict)] if isinstance(sets, list) else []
    given = (f"{part.get('name')}: {number(part.get('rows_given')):,.0f} rows" for part in sets)
    yield "Rows given by", " · ".join(given)
    yield "Loss", _ends(run.steps["loss"])
    yield "Held-out pass@1", _passes(run)
    validation = run.validations["val_loss"]
    if np.isfinite(validation).any():
        best = int(np.nanargmin(validation))
        last = "" if best == len(validation) - 1 else f", last {short_number(validation[-1])}"
        at = f"{short_number(validation[best])} at step {run.validations['step'][best]:,.0f}"
        yield "Best validation loss", at + last


def _dpo(run: RunFolder) -> Iterator[tuple[str, str]]:
    for what, lines, prefix in (("", run.steps, ""), ("Validation ", run.validations, "val_")):
        yield f"{what}margin".capitalize(), _ends(lines[f"{prefix}margin"])
        accuracy = _ends(100 * lines[f"{prefix}accuracy"])
        yield f"{what}accuracy".capitalize(), f"{accuracy} (%)" if accuracy else ""
    yield from _sft(run)


def _ends(values: np.ndarray) -> str:
    """The first and the last value, or the means of the first and the last tenth of many; empty without values."""
    if len(values) < 20:
        return " → ".join(dict.fromkeys(short_number(value) for value in values[[0, -1]])) if len(values) else ""
    n = len(values) // 10
    first, last = (short_number(float(np.mean(part))) for part in (values[:n], values[-n:]))
    return f"{first} → {last}, means of {n:,} steps"


def _sampled(run: RunFolder) -> Iterator[tuple[str, str]]:
    steps = run.steps
    yield "Reward", _ends(steps["reward"]) if np.isfinite(steps["reward"]).any() else ""
    yield "Held-out pass@1", _passes(run)
    shares = {step: scores.passed[0] for step, scores in run.evaluations.items() if step}
    best = max(shares, key=shares.__getitem__, default=None)  # the first of equals
    if best is not None and best != max(shares):
        yield "Best held-out pass@1", f"{100 * shares[best]:.1f} % after {run.unit} {best:,}"
    answers = float(np.nansum(steps["answers"]))
    yield "Answers sampled", short_number(answers) if answers else ""
    kinds = [name for name in ("flat", "all_right", "all_wrong") if np.isfinite(steps[name]).any()]
    yield "Groups", ", ".join(f"{100 * np.nanmean(steps[name]):.1f} % {name.replace('_', ' ')}" for name in kinds)
    stopped = run.summary.get("stopped")
    yield "Stopped early", stopped if isinstance(stopped, str) else ""


def _passes(run: RunFolder) -> str:
    """The first and the last held-out score with their intervals."""
    scores = [[100 * value for value in scored.scores.passed] for scored in held_out(run)]
    return " → ".join(f"{value:.1f} % ({low:.1f} – {high:.1f})" for value, low, high in scores[:1] + scores[1:][-1:])
