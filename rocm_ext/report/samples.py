"""Some answers of a run: prompts with all answers that a step sampled; for SFT and DPO, an evaluation.

A step of RAFT is a cycle.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.registry import SAMPLED
from rocm_ext.report.conversations import Function, Turn, tools_of, turns_of
from rocm_ext.runs.answers import Verdicts
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import Judged, SampleKey, first_and_last
from rocm_ext.runs.tails import Record

_KINDS = ("unequal rewards", "all wrong", "all right", "with an ERROR", "cut off")
_PER_GROUP = 8  # most answers that are shown
_PROMPTS = "rocm_ext.data.prompt_dataset"
_Verified = tuple[Record, Judged]  # an answer's record and its verdict
# the messages of a prompt, and the tools of its row
_Asked = tuple[Sequence[Record], Sequence[Record]]


@dataclass(frozen=True)
class Answer:
    """An answer as the page shows it.

    Attributes:
        text: the answer; of a conversation, the model's last message.
        turns: the turns of a conversation that are not in the group's prompt. None if it is no conversation.
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
        prompt: turns that all answers follow. Empty if the run's data no longer has them.
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
    held_out = run.family not in SAMPLED
    recorded = run.answers.steps(held_out)
    last = max(run.steps["step"], default=0)
    steps = first_and_last([step for step in recorded if step <= last] or recorded)
    groups = []
    for step in steps:
        groups += _of_step(run, step)
    if not groups:
        return "", []
    numbers = " and ".join(map(str, steps))
    plural = "s" if len(steps) > 1 else ""
    scope = f"{run.unit}{plural} {numbers}"
    about = f"{len(groups)} groups of {scope}, one of each kind: all answers that a {run.unit} sampled to a prompt."
    if held_out:
        about = f"{len(groups)} answers of the evaluations after {scope}, one of each kind."
    return about, groups


def _of_step(run: RunFolder, step: int) -> list[Group]:
    """A group of every kind that a step, or the evaluation after it, has."""
    held_out = run.family not in SAMPLED
    verdicts = run.answers.verdicts
    rows = {}
    for group in verdicts.groups(step, held_out):
        prompt, _ = verdicts.key(group[0])
        rows[prompt] = group
    positions = {}
    cut: dict[str, bool] = {}  # whether an answer to the prompt was cut off
    for key, position, record in run.answers.answers(step, held_out):
        prompt, _ = key
        positions[key] = position
        cut[prompt] = cut.get(prompt, False) or record.get("finish_reason") == "length"
    free = [prompt for prompt in rows if prompt in cut]
    # an order by chance, but equal in every report
    free.sort(key=lambda prompt: _hash(prompt, step))
    groups = []
    for kind in _KINDS:
        fits = [_fit(kind, verdicts, rows[prompt], cut[prompt]) for prompt in free]
        best = max(fits, default=0.0)
        if best > 0:
            prompt = free.pop(fits.index(best))
            name = f"{run.unit.capitalize()} {step}: {kind}"
            group = rows[prompt]
            answers = _answers(run, group, positions)
            groups.append(_group(run, name, prompt, answers, len(group)))
    return groups


def _hash(prompt: str, step: int) -> str:
    return hashlib.sha256(f"{prompt}\0{step}".encode(errors="backslashreplace")).hexdigest()


def _fit(kind: str, verdicts: Verdicts, rows: np.ndarray, cut: bool) -> float:
    """How well a group shows a kind; 0 means not at all.

    Args:
        kind: one of :data:`_KINDS`.
        verdicts: the run's verdicts.
        rows: rows of the group in them.
        cut: whether a limit cut off one of its answers.
    """
    if kind == "unequal rewards":
        rewards = verdicts.reward[rows]
        finite = rewards[np.isfinite(rewards)]
        return float(np.std(finite)) if len(finite) > 1 else 0.0
    names = {verdicts.name(row) for row in rows}
    if kind == "all wrong":
        return names.isdisjoint({"CORRECT", "ERROR"})
    if kind == "all right":
        return names == {"CORRECT"}
    if kind == "with an ERROR":
        return "ERROR" in names
    return cut


def _group(
    run: RunFolder, name: str, prompt: str, records: Sequence[_Verified], total: int
) -> Group:
    """Return a prompt's group from the records of its answers.

    The turns with which all conversations begin are shown once, behind the prompt, unless a program sent the prompt.
    """
    conversations = [turns_of(record.get("messages")) for record, _ in records]
    common: list[Turn] = []
    for turns in zip(*filter(None, conversations), strict=False):
        if turns[0].role == "assistant" or len(set(turns)) > 1:
            break
        common.append(turns[0])
    messages, schemas = prompts_of(run).get(prompt, ((), ()))
    tools = tools_of(schemas)
    answers = []
    for (record, judged), conversation in zip(records, conversations, strict=True):
        tools += tools_of(record.get("tools"))
        rest = conversation[len(common) :] if "messages" in record else None
        tokens = record.get("tokens")
        answer = Answer(
            text=str(record.get("text", "")),
            turns=rest,
            tokens=len(tokens) if isinstance(tokens, list) else 0,
            cut=record.get("finish_reason") == "length",
            judged=judged,
        )
        answers.append(answer)
    opening = turns_of(messages)
    if opening and opening[-1] in common:
        opening = []  # the conversations begin with it
    return Group(
        kind=name,
        prompt_id=prompt,
        prompt=opening + common,
        tools=list(dict.fromkeys(tools)),
        answers=answers,
        total=total,
    )


def _answers(
    run: RunFolder, rows: np.ndarray, positions: Mapping[SampleKey, int]
) -> list[_Verified]:
    """A group's kept answers with verdicts, by index; of many, the ones with the highest and lowest rewards."""
    verdicts = run.answers.verdicts
    keys = {row: verdicts.key(row) for row in rows.tolist()}
    kept = [row for row, key in keys.items() if key in positions]
    if len(kept) > _PER_GROUP:
        half = _PER_GROUP // 2
        kept.sort(key=lambda row: -np.nan_to_num(verdicts.reward[row]))
        kept = sorted(kept[:half] + kept[-half:])
    records = run.answers.records(positions[keys[row]] for row in kept)
    answers = []
    for row, judged in run.answers.judged(kept).items():
        if keys[row] in records:
            answers.append((records[keys[row]], judged))
    return answers


def prompts_of(run: RunFolder) -> dict[str, _Asked]:
    """The messages and tools of all prompts by id, from the run's data if that is an existing file.

    A report downloads nothing and runs no component of a user.
    """
    setting: Any = run.setting("prompts" if run.family in SAMPLED else "eval_prompts")
    if not isinstance(setting, dict) or "_component_" in setting:
        return _read(setting)
    prompts = {}
    for name, part in setting.items():  # named sets
        for prompt, asked in _read(part).items():
            prompts[f"{name}/{prompt}"] = asked
    return prompts


def _read(setting: Any) -> dict[str, _Asked]:
    """The messages and tools of a component's prompts by id."""
    if not isinstance(setting, dict) or setting.get("_component_") != _PROMPTS:
        return {}
    source = setting.get("source")
    if not isinstance(source, str) or not Path(source).is_file():
        return {}
    arguments = {
        key: value for key, value in setting.items() if key not in ("_component_", "verifier")
    }
    written = Path(source).stat().st_mtime_ns
    return _asked(json.dumps(arguments, sort_keys=True, default=str), written)


@lru_cache(maxsize=64)  # sets of prompts; a live page asks again and again
def _asked(arguments: str, written: int) -> dict[str, _Asked]:
    """Prompts by id. ``arguments`` is JSON; the time when its file was ``written`` is for the cache."""
    from rocm_ext.data.prompts import prompt_dataset  # here: `datasets` takes a second to import

    try:
        prompts = prompt_dataset(**json.loads(arguments))
        return {prompt.id: (prompt.messages, prompt.tools) for prompt in prompts}
    except Exception:  # the file may have changed since; the report is useful without prompts
        return {}
