"""Some groups of a GRPO run: a prompt with all its answers of one step, and their rewards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rocm_ext.report.samples import Shown, key_hash, prompt_texts
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.steps import Verdicts

_ANSWERS = 8  # most answers of a group that are shown


@dataclass(frozen=True)
class Group:
    """A prompt and its answers of a step.

    Attributes:
        step: step that asked it.
        kind: why the group was chosen.
        prompt_id: id of the prompt.
        prompt: its text; None if it was not found.
        answers: by index; of large groups, those with the highest and the lowest rewards.
        total: how many answers the group has.
    """

    step: int
    kind: str
    prompt_id: str
    prompt: str | None
    answers: list[Shown]
    total: int


def choose(run: RunFolder) -> tuple[str, list[Group]]:
    """A group of each kind from the first and from the last step whose answers are kept.

    Returns:
        a description of the choice, and the groups; both are empty if the run has none.
    """
    kept = run.answers.steps
    last = max(run.steps["step"], default=0)
    done = [step for step in kept if step <= last] or kept
    steps = list(dict.fromkeys(done[:1] + done[-1:]))
    found = [group for step in steps for group in _choose(run, step)]
    if not found:
        return "", []
    prompts = prompt_texts(run, {group.prompt_id for group in found})
    named = f"steps {steps[0]} and {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    groups = [Group(**{**vars(group), "prompt": prompts.get(group.prompt_id)}) for group in found]
    return f"{len(found)} groups of {named}", groups


def _choose(run: RunFolder, step: int) -> list[Group]:
    verdicts = run.answers.verdicts
    about = {key: (place, record.get("finish_reason")) for key, place, record in run.answers.answers(step)}
    cut = {prompt for (prompt, _), (_, reason) in about.items() if reason == "length"}
    groups = {verdicts.prompts[int(verdicts.prompt[rows[0]])]: rows for rows in verdicts.groups(step)}
    with_text = {prompt for prompt, _ in about}
    free = sorted(groups.keys() & with_text, key=lambda prompt: key_hash((prompt, step)))
    found = []
    for kind, fits in _kinds(verdicts, groups, cut).items():
        ranks = {prompt: rank for prompt in free if (rank := fits(prompt)) > 0}
        if ranks:
            prompt = max(ranks, key=lambda each: ranks[each])  # the first of equals
            free.remove(prompt)
            found.append(_group(run, step, kind, prompt, groups[prompt], {k: place for k, (place, _) in about.items()}))
    return found


def _kinds(verdicts: Verdicts, groups: Mapping[str, np.ndarray], cut: set[str]) -> dict[str, Callable[[str], float]]:
    """Kinds of groups, each with a function that tells how well a prompt's group shows it; 0: not at all."""

    def spread(prompt: str) -> float:
        rewards = verdicts.reward[groups[prompt]]
        finite = rewards[np.isfinite(rewards)]
        return float(np.std(finite)) if len(finite) > 1 else 0.0

    def named(prompt: str) -> set[str]:
        return {verdicts.name(row) for row in groups[prompt]}

    return {
        "unequal rewards": spread,
        "all wrong": lambda prompt: not {"CORRECT", "ERROR"} & named(prompt),
        "all right": lambda prompt: named(prompt) == {"CORRECT"},
        "with an ERROR": lambda prompt: "ERROR" in named(prompt),
        "cut off": lambda prompt: prompt in cut,
    }


def _group(
    run: RunFolder, step: int, kind: str, prompt: str, rows: np.ndarray, places: Mapping[tuple[str, int], int]
) -> Group:
    verdicts = run.answers.verdicts
    known = {int(row): place for row in rows if (place := places.get((prompt, int(verdicts.sample[row])))) is not None}
    chosen = _ends(verdicts, list(known))
    details = run.answers.details(step, chosen)
    records = run.answers.records(known[row] for row in chosen)
    answers = []
    for row in chosen:
        key = (prompt, int(verdicts.sample[row]))
        if (record := records.get(key)) is not None:
            answers.append(Shown.of(key, None, record, verdicts.judged(row, details[row])))
    return Group(step, kind, prompt, None, answers, len(rows))


def _ends(verdicts: Verdicts, rows: Sequence[int]) -> list[int]:
    """The rows of a group, or of a large one those with the highest and the lowest rewards, by index of the answer."""
    if len(rows) > _ANSWERS:
        order = sorted(rows, key=lambda row: (-np.nan_to_num(verdicts.reward[row]), verdicts.sample[row]))
        rows = order[: _ANSWERS // 2] + order[-(_ANSWERS // 2) :]
    return sorted(rows, key=lambda row: verdicts.sample[row])
