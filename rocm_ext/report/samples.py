"""Some answers of a run with their prompts and verdicts: samples of a RAFT run, groups of a GRPO run."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.report.rollouts import VERDICTS
from rocm_ext.runs.answers import Verdicts
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import Judged, SampleKey

_PER_VERDICT, _PER_GROUP = 2, 8  # most answers that are shown
_PROMPTS = "rocm_ext.data.prompt_dataset"


@dataclass(frozen=True)
class Answer:
    """An answer as the page shows it; ``cut``: ``max_new_tokens`` cut it off."""

    text: str
    tokens: int
    cut: bool
    judged: Judged

    @classmethod
    def of(cls, record: Mapping[str, Any], judged: Judged) -> "Answer":
        """An answer from its line of ``samples.jsonl``."""
        tokens = record.get("tokens")
        length = len(tokens) if isinstance(tokens, list) else 0
        return cls(str(record.get("text", "")), length, record.get("finish_reason") == "length", judged)


@dataclass(frozen=True)
class Group:
    """A prompt with answers.

    Attributes:
        kind: step and kind of a group of GRPO; empty for a sample of RAFT, which is one answer.
        prompt_id: id of the prompt.
        answers: by index; of large groups, those with the highest and the lowest rewards.
        total: how many answers the group has.
        prompt: its text; None if it was not found.
    """

    kind: str
    prompt_id: str
    answers: list[Answer]
    total: int = 1
    prompt: str | None = None


def choose(run: RunFolder) -> tuple[str, list[Group]]:
    """What a page shows of a run's answers: a description of the choice and the groups; both empty without answers."""
    held_out, of, shown = _samples(run) if run.cycles else (False, *_groups(run))
    prompts = prompt_texts(run, {group.prompt_id for group in shown}, held_out) if shown else {}
    return of, [replace(group, prompt=prompts.get(group.prompt_id)) for group in shown]


# ---- samples of RAFT


def _samples(run: RunFolder) -> tuple[bool, str, list[Group]]:
    """Answers of the newest cycle that has some, of each verdict, chosen by a hash."""
    for cycle in reversed(run.cycles):
        for held_out in (False, True):
            rows = run.answers.verdicts.rows(cycle.number, held_out)
            if shown := _of_cycle(run, cycle.number, rows, held_out):
                of = f"{len(rows):,} {'held-out ' if held_out else ''}answers of cycle {cycle.number}"
                return held_out, f"{len(shown)} of {of}, some of each verdict, chosen by a hash.", shown
    return False, "", []


def _of_cycle(run: RunFolder, cycle: int, rows: np.ndarray, held_out: bool) -> list[Group]:
    verdicts, by_verdict = run.answers.verdicts, dict[str, list[int]]()
    for row in sorted(rows, key=lambda row: _hash(verdicts.key(row))):
        by_verdict.setdefault(verdicts.name(row), []).append(row)
    order = [*VERDICTS, *sorted(by_verdict.keys() - VERDICTS.keys())]
    chosen = {verdicts.key(row): row for verdict in order for row in by_verdict.get(verdict, ())[:_PER_VERDICT]}
    texts = {key: line for key, _, line in run.answers.answers(cycle, held_out) if key in chosen} if chosen else {}
    judged = run.answers.judged(list(chosen.values()))
    return [Group("", key[0], [Answer.of(texts[key], judged[row])]) for key, row in chosen.items() if key in texts]


def _hash(key: SampleKey) -> str:
    """A text that orders answers by chance, but equally in every report."""
    return hashlib.sha256(f"{key[0]}\0{key[1]}".encode(errors="backslashreplace")).hexdigest()


# ---- groups of GRPO


def _groups(run: RunFolder) -> tuple[str, list[Group]]:
    """A group of each kind from the first and from the last step whose answers are kept."""
    last = max(run.steps["step"], default=0)
    kept = run.answers.steps
    done = [step for step in kept if step <= last] or kept
    steps = list(dict.fromkeys(done[:1] + done[-1:]))
    shown = [group for step in steps for group in _of_step(run, step)]
    named = f"step {steps[0]}" if len(steps) == 1 else f"steps {' and '.join(map(str, steps))}"
    of = f"{len(shown)} groups of {named}, one of each kind: all answers that a step sampled to a prompt."
    return (of, shown) if shown else ("", [])


def _of_step(run: RunFolder, step: int) -> list[Group]:
    verdicts = run.answers.verdicts
    about = {key: (position, record.get("finish_reason")) for key, position, record in run.answers.answers(step)}
    cut = {prompt for (prompt, _), (_, reason) in about.items() if reason == "length"}
    rows = {verdicts.prompts[int(verdicts.prompt[group[0]])]: group for group in verdicts.groups(step)}
    free = sorted(rows.keys() & {prompt for prompt, _ in about}, key=lambda prompt: _hash((prompt, step)))
    shown = []
    for kind, fit in _kinds(verdicts, rows, cut).items():
        fits = {prompt: value for prompt in free if (value := fit(prompt)) > 0}
        if fits:
            prompt = max(fits, key=lambda each: fits[each])  # the first of equals
            free.remove(prompt)
            positions = {sample: position for (of, sample), (position, _) in about.items() if of == prompt}
            answers = _answers(run, rows[prompt], positions)
            shown.append(Group(f"Step {step}: {kind}", prompt, answers, len(rows[prompt])))
    return shown


def _kinds(verdicts: Verdicts, rows: Mapping[str, np.ndarray], cut: set[str]) -> dict[str, Callable[[str], float]]:
    """Kinds of groups, each with a function that tells how well a prompt's group shows it; 0: not at all."""

    def spread(prompt: str) -> float:
        rewards = verdicts.reward[rows[prompt]]
        finite = rewards[np.isfinite(rewards)]
        return float(np.std(finite)) if len(finite) > 1 else 0.0

    def named(prompt: str) -> set[str]:
        return {verdicts.name(row) for row in rows[prompt]}

    return {
        "unequal rewards": spread,
        "all wrong": lambda prompt: not {"CORRECT", "ERROR"} & named(prompt),
        "all right": lambda prompt: named(prompt) == {"CORRECT"},
        "with an ERROR": lambda prompt: "ERROR" in named(prompt),
        "cut off": lambda prompt: prompt in cut,
    }


def _answers(run: RunFolder, rows: np.ndarray, positions: Mapping[int, int]) -> list[Answer]:
    """The answers of a group whose texts are kept, by index; of many, those with the highest and the lowest rewards."""
    verdicts = run.answers.verdicts
    samples = {int(row): int(verdicts.sample[row]) for row in rows if int(verdicts.sample[row]) in positions}
    order = sorted(samples, key=lambda row: (-np.nan_to_num(verdicts.reward[row]), samples[row]))
    if len(order) > _PER_GROUP:
        order = order[: _PER_GROUP // 2] + order[-(_PER_GROUP // 2) :]
    order.sort(key=lambda row: samples[row])
    judged = run.answers.judged(order)
    records = {key[1]: record for key, record in run.answers.records(positions[samples[row]] for row in order).items()}
    known = [row for row in order if samples[row] in records]
    return [Answer.of(records[samples[row]], judged[row]) for row in known]


# ---- prompts


def prompt_texts(run: RunFolder, ids: Collection[str], held_out: bool = False) -> dict[str, str]:
    """The last turn of prompts by id, from the run's own data if that is a file that still exists.

    A report downloads nothing and runs no component of the user's.
    """
    setting: Any = run.setting("eval_prompts" if held_out else "prompts")
    if not isinstance(setting, dict) or setting.get("_component_") != _PROMPTS:
        return {}
    source = setting.get("source")
    if not isinstance(source, str) or not Path(source).is_file():
        return {}
    known = _last_turns(json.dumps(setting, sort_keys=True, default=str), Path(source).stat().st_mtime_ns)
    return {prompt: known[prompt] for prompt in ids if prompt in known}


@lru_cache(maxsize=4)  # a live page asks again and again
def _last_turns(setting: str, written: int) -> dict[str, str]:
    """The last turns of all prompts, by id.

    Args:
        setting: the setting as JSON.
        written: when its file was.
    """
    from rocm_ext.data.prompts import prompt_dataset  # here: `datasets` takes a second to import

    settings = {key: value for key, value in json.loads(setting).items() if key != "_component_"}
    try:
        return {prompt.id: prompt.messages[-1]["content"] for prompt in prompt_dataset(**settings)}
    except Exception:  # the file may have changed since; the report is useful without prompts
        return {}
