"""Some answers of a run: prompts with all answers that a step sampled; for SFT and DPO, an evaluation.

A step of RAFT is a cycle.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.registry import SAMPLED
from rocm_ext.report.conversations import Function, Turn, tools_of, turns_of
from rocm_ext.runs.answers import Verdicts
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import Judged
from rocm_ext.runs.tails import Record

_PER_GROUP = 8  # most answers that are shown
_PROMPTS = "rocm_ext.data.prompt_dataset"
_Verified = tuple[Record, Judged]  # an answer's record and its verdict
_Asked = tuple[Sequence[Record], Sequence[Record]]  # the messages of a prompt, and the tools of its row


@dataclass(frozen=True)
class Answer:
    """An answer as the page shows it.

    Attributes:
        text: the answer; of a conversation, the model's last message.
        turns: the turns of a conversation that are not in the group's prompt; None: it is no conversation.
        tokens: number of sampled tokens.
        cut: whether a limit of the run cut it off.
        judged: its verdict.
    """

    text: str
    turns: list[Turn] | None
    tokens: int
    cut: bool
    judged: Judged


@dataclass(frozen=True)
class Group:
    """A prompt with answers.

    Attributes:
        kind: step and kind of the group.
        prompt_id: id of the prompt.
        prompt: turns that all answers follow; empty if the run's data no longer has them.
        tools: functions that the model may call.
        answers: answers by index; of large groups, the answers with the highest and lowest rewards.
        total: number of answers in the group.
    """

    kind: str
    prompt_id: str
    prompt: list[Turn]
    tools: list[Function]
    answers: list[Answer]
    total: int


def groups(run: RunFolder) -> tuple[str, list[Group]]:
    """A line about the groups, and a group of every kind from the first and the last step whose answers are kept.

    Both are empty without answers.
    """
    last = max(run.steps["step"], default=0)
    unit, held_out = run.unit, run.family not in SAMPLED
    kept = run.answers.steps(held_out)
    done = [step for step in kept if step <= last] or kept
    steps = list(dict.fromkeys(done[:1] + done[-1:]))
    shown = [group for step in steps for group in _of_step(run, step, f"{unit.capitalize()} {step}")]
    which = f"{unit} {steps[0]}" if len(steps) == 1 else f"{unit}s {' and '.join(map(str, steps))}"
    about = f"{len(shown)} groups of {which}, one of each kind: all answers that a {unit} sampled to a prompt."
    if held_out:
        about = f"{len(shown)} answers of the evaluations after {which}, one of each kind."
    return (about, shown) if shown else ("", [])


def _of_step(run: RunFolder, step: int, name: str) -> list[Group]:
    verdicts, held_out = run.answers.verdicts, run.family not in SAMPLED
    answers = run.answers.answers(step, held_out)
    read = {key: (position, record.get("finish_reason")) for key, position, record in answers}
    cut = {prompt for (prompt, _), (_, reason) in read.items() if reason == "length"}
    rows = {verdicts.prompts[int(verdicts.prompt[group[0]])]: group for group in verdicts.groups(step, held_out)}
    # by a hash: an order by chance, but equal in every report
    free = sorted(rows.keys() & {prompt for prompt, _ in read}, key=lambda prompt: _hash(prompt, step))
    chosen = {}
    for kind, fit in _kinds(verdicts, rows, cut).items():
        fits = {prompt: value for prompt in free if (value := fit(prompt)) > 0}
        if fits:
            chosen[kind] = max(fits, key=lambda prompt: fits[prompt])  # the first of equals
            free.remove(chosen[kind])
    prompts = prompts_of(run) if chosen else {}
    shown = []
    for kind, prompt in chosen.items():
        positions = {sample: position for (of, sample), (position, _) in read.items() if of == prompt}
        records = _records(run, rows[prompt], positions)
        shown.append(_group(f"{name}: {kind}", prompt, prompts.get(prompt, ((), ())), records, len(rows[prompt])))
    return shown


def _hash(prompt: str, step: int) -> str:
    return hashlib.sha256(f"{prompt}\0{step}".encode(errors="backslashreplace")).hexdigest()


def _kinds(verdicts: Verdicts, rows: Mapping[str, np.ndarray], cut: set[str]) -> dict[str, Callable[[str], float]]:
    """Kinds of groups, with functions that rate how well a prompt's group shows the kind; 0: not at all."""

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


def _group(kind: str, prompt: str, asked: _Asked, records: Sequence[_Verified], total: int) -> Group:
    """Return a prompt's group from the messages and tools of its row and the records of its answers.

    The turns with which all conversations begin are shown once, behind the prompt, unless a program sent the prompt.
    """
    talks = [turns_of(record["messages"]) if "messages" in record else None for record, _ in records]
    begun: list[Turn] = []
    for same in zip(*filter(None, talks), strict=False):
        if same[0].role == "assistant" or len({*same}) > 1:
            break
        begun.append(same[0])
    tools = dict.fromkeys(tools_of(asked[1]))
    answers = []
    for (record, judged), talk in zip(records, talks, strict=True):
        tools |= dict.fromkeys(tools_of(record.get("tools")))
        rest = talk and talk[len(begun) :]
        tokens = record.get("tokens")
        length = len(tokens) if isinstance(tokens, list) else 0
        cut = record.get("finish_reason") == "length"
        answers.append(Answer(str(record.get("text", "")), rest, length, cut, judged))
    turns = turns_of(asked[0])
    sent = turns and turns[-1] in begun
    shown = begun if sent else [*turns, *begun]
    return Group(kind, prompt, shown, [*tools], answers, total)


def _records(run: RunFolder, rows: np.ndarray, positions: Mapping[int, int]) -> list[_Verified]:
    """A group's kept answers with verdicts, by index; of many, the ones with the highest and lowest rewards."""
    verdicts = run.answers.verdicts
    numbers = dict(zip(rows.tolist(), verdicts.sample[rows].tolist(), strict=True))
    samples = {row: sample for row, sample in numbers.items() if sample in positions}
    order = sorted(samples, key=lambda row: (-np.nan_to_num(verdicts.reward[row]), samples[row]))
    if len(order) > _PER_GROUP:
        order = order[: _PER_GROUP // 2] + order[-(_PER_GROUP // 2) :]
    order.sort(key=lambda row: samples[row])
    judged = run.answers.judged(order)
    found = run.answers.records(positions[samples[row]] for row in order)
    records = {sample: record for (_, sample), record in found.items()}
    return [(records[samples[row]], judged[row]) for row in order if samples[row] in records]


def prompts_of(run: RunFolder) -> dict[str, _Asked]:
    """The messages and tools of all prompts by id, from the run's data if that is an existing file.

    A report downloads nothing and runs no component of a user.
    """
    setting: Any = run.setting("prompts" if run.family in SAMPLED else "eval_prompts")
    if not isinstance(setting, dict) or setting.get("_component_") != _PROMPTS:
        return {}
    source = setting.get("source")
    if not isinstance(source, str) or not Path(source).is_file():
        return {}
    return _asked(json.dumps(setting, sort_keys=True, default=str), Path(source).stat().st_mtime_ns)


@lru_cache(maxsize=4)  # a live page asks again and again
def _asked(setting: str, written: int) -> dict[str, _Asked]:
    """Prompts by id. ``setting`` is JSON; the time when its file was ``written`` is for the cache."""
    from rocm_ext.data.prompts import prompt_dataset  # here: `datasets` takes a second to import

    settings = {key: value for key, value in json.loads(setting).items() if key != "_component_"}
    try:
        prompts = prompt_dataset(**settings)
        return {prompt.id: (prompt.messages, prompt.tools) for prompt in prompts}
    except Exception:  # the file may have changed since; the report is useful without prompts
        return {}
