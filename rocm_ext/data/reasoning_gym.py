"""Prompts that the package reasoning-gym makes: over a hundred kinds of puzzles, without a download."""

from rocm_ext.base.kinds import check, integer
from rocm_ext.base.types import Json
from rocm_ext.data.prompts import Prompt
from rocm_ext.verifiers.reasoning_gym import COLUMN, entries

SYSTEM_PROMPT = "Write your final answer, and nothing else, between <answer> and </answer>."
_KINDS = {"size": integer(1), "skip": integer(0), "seed": integer(0, 2**63)}


def reasoning_gym_prompts(
    *,
    task: str,
    size: int,
    seed: int = 0,
    skip: int = 0,
    options: Json | None = None,
    system_prompt: str = SYSTEM_PROMPT,
) -> list[Prompt]:
    """Make prompts of one task; a component for YAML, for :class:`rocm_ext.verifiers.ReasoningGym`.

    Equal arguments make equal prompts, with the same version of the package. Of repeated questions, which small tasks
    make, one stays. For held-out prompts of the same task, take its first entries, and skip them for training:
    ``eval_prompts: {size: 100}`` and ``prompts: {size: 1000, skip: 100}``, with one seed.

    Args:
        task: name of the task in the package, such as ``countdown`` or ``chain_sum``.
        size: number of entries to make after the skipped ones.
        seed: seed of the entries.
        skip: number of first entries to leave out, together with later entries that repeat them.
        options: settings of the task, such as ``{min_terms: 2, max_terms: 4}``.
        system_prompt: system message, which asks for the tags that the verifier reads. An empty text adds no message.

    Raises:
        UserError: the package is not installed, the task or an option is unknown, or a number is out of range.
    """
    check({"size": size, "skip": skip, "seed": seed}, _KINDS)
    options = dict(options or {})
    made = skip + size
    arguments = {"task": task, "options": options, "seed": seed, "size": made}
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompts = []
    asked: set[str] = set()
    for index, (question, answer) in enumerate(entries(task, options, seed, made)):
        repeated = question in asked
        asked.add(question)
        if repeated or index < skip:
            continue
        row = {"prompt": question, COLUMN: {**arguments, "index": index}}
        if isinstance(answer, str):
            row["answer"] = answer
        messages = (*system, {"role": "user", "content": question})
        prompts.append(Prompt(f"{task}-{seed}-{index}", messages, row, f"{task}:{index}"))
    return prompts
