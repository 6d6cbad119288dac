"""Right and wrong answers for training on preferences, from the records of a run that sampled and verified answers."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rocm_ext.base.errors import UserError
from rocm_ext.base.registry import SAMPLED
from rocm_ext.runs.folder import RunFolder

_RIGHT, _WRONG = "CORRECT", ("WRONG", "UNPARSED", "TIMEOUT")  # an ERROR says nothing about the answer


@dataclass(frozen=True)
class Answer:
    """A verified answer.

    Attributes:
        prompt_id: id of its prompt.
        text: the answer.
        tokens: number of its tokens.
        right: whether its verdict is CORRECT.
    """

    prompt_id: str
    text: str
    tokens: int
    right: bool


def read_answers(run: RunFolder, last: int | None = None) -> tuple[list[Answer], Counter[str]]:
    """Read the answers to a run's training prompts.

    Args:
        run: run of RAFT or GRPO.
        last: number of last cycles or steps to read; None: all.

    Returns:
        The answers, without repeated texts of a prompt, and the number of omitted ones: ``ERROR`` by their verdict,
        ``conversation`` because they answer more than the prompt, and ``truncated`` because ``max_new_tokens`` cut
        them, so that they have no end to learn.

    Raises:
        UserError: the run samples no answers.
    """
    if run.family not in SAMPLED:
        recipes = ", ".join(SAMPLED)
        raise UserError(f"{run.path} is a run of {run.recipe}, which samples no answers; pairs needs one of {recipes}")
    answers: dict[tuple[str, str], Answer] = {}
    left_out: Counter[str] = Counter()
    verdicts = run.answers.verdicts
    steps = verdicts.counts()[0].tolist()
    for step in steps[-last:] if last else steps:
        names = {verdicts.key(row): verdicts.name(row) for row in verdicts.rows(step)}
        for key, _, line in run.answers.answers(step):
            verdict, tokens, text = names.pop(key, None), line.get("tokens"), line.get("text")
            if verdict is None or not isinstance(tokens, list) or not isinstance(text, str) or not text.strip():
                continue
            if verdict != _RIGHT and verdict not in _WRONG:
                left_out["ERROR"] += 1
            elif "messages" in line:  # an answer to more than the prompt
                left_out["conversation"] += 1
            elif line.get("finish_reason") == "length":
                left_out["truncated"] += 1
            else:
                answers.setdefault((key[0], text), Answer(key[0], text, len(tokens), verdict == _RIGHT))
    return list(answers.values()), left_out


def choose_pairs(
    answers: Sequence[Answer], *, per_prompt: int, limit: int | None = None, seed: int = 0
) -> list[tuple[Answer, Answer]]:
    """Pair right with wrong answers to the same prompt, closest lengths first.

    An answer is in at most one pair. Close lengths keep the training from learning length instead of rightness.

    Args:
        answers: answers without repeated texts of a prompt.
        per_prompt: maximum number of pairs of a prompt.
        limit: maximum number of all pairs, which are then drawn at random; None: no limit.
        seed: seed of random choices, also between equally close pairs.

    Returns:
        Pairs of a right and a wrong answer, in the order of the prompts' first answers.
    """
    by_prompt: dict[str, tuple[list[Answer], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer in answers:
        by_prompt[answer.prompt_id][not answer.right].append(answer)

    def drawn(pair: tuple[Answer, Answer]) -> bytes:
        return _drawn(seed, *pair)

    pairs: list[tuple[Answer, Answer]] = []
    for right, wrong in by_prompt.values():
        closest = sorted(product(right, wrong), key=lambda pair: (abs(pair[0].tokens - pair[1].tokens), drawn(pair)))
        used: set[str] = set()
        mine: list[tuple[Answer, Answer]] = []
        for pair in closest:
            texts = {answer.text for answer in pair}
            if len(mine) < per_prompt and not used & texts:
                mine.append(pair)
                used |= texts
        pairs += mine
    if limit is not None and len(pairs) > limit:
        kept = set(sorted(pairs, key=drawn)[:limit])
        pairs = [pair for pair in pairs if pair in kept]
    return pairs


def choose_single(
    answers: Sequence[Answer], *, per_prompt: int, limit: int | None = None, seed: int = 0
) -> list[Answer]:
    """Draw right and wrong answers at random, also of prompts with only one kind.

    Args:
        answers: answers without repeated texts of a prompt.
        per_prompt: maximum number of right answers to a prompt, and of wrong ones.
        limit: maximum number of all answers; None: no limit.
        seed: seed of the draw.

    Returns:
        The drawn answers, in the order of ``answers``.
    """
    of_prompt: dict[tuple[str, bool], list[Answer]] = defaultdict(list)
    for answer in sorted(answers, key=lambda answer: _drawn(seed, answer)):
        of_prompt[answer.prompt_id, answer.right].append(answer)
    some = [answer for part in of_prompt.values() for answer in part[:per_prompt]]
    kept = set(sorted(some, key=lambda answer: _drawn(seed, answer))[:limit])
    return [answer for answer in answers if answer in kept]


def _drawn(seed: int, *answers: Answer) -> bytes:
    """Return the key by which answers to one prompt are drawn: the least keys win."""
    key = "\0".join((str(seed), answers[0].prompt_id, *(answer.text for answer in answers)))
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
