"""Right and wrong answers for training on preferences, from the records of a run that sampled and verified answers."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rocm_ext.base.errors import UserError
from rocm_ext.base.registry import SAMPLED
from rocm_ext.runs.folder import RunFolder


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
        last: number of last cycles or steps to read. None reads all.

    Returns:
        The answers, without repeated texts of a prompt, and the number of omitted ones: ``ERROR`` by their verdict,
        ``conversation`` because they answer more than the prompt, and ``truncated`` because ``max_new_tokens`` cut
        them, so that they have no end to learn.

    Raises:
        UserError: the run samples no answers.
    """
    if run.family not in SAMPLED:
        recipes = ", ".join(SAMPLED)
        raise UserError(
            f"{run.path} is a run of {run.recipe}, which samples no answers; pairs needs one of {recipes}"
        )
    answers: dict[tuple[str, str], Answer] = {}
    left_out: Counter[str] = Counter()
    verdicts = run.answers.verdicts
    steps, _ = verdicts.counts()
    if last:
        steps = steps[-last:]
    for step in steps.tolist():
        names = {}
        for row in verdicts.rows(step):
            names[verdicts.key(row)] = verdicts.name(row)
        for key, _, record in run.answers.answers(step):
            verdict = names.pop(key, None)
            tokens = record.get("tokens")
            text = record.get("text")
            if verdict is None or not isinstance(tokens, list):
                continue
            if not isinstance(text, str) or not text.strip():
                continue
            if verdict == "ERROR":  # it says nothing about the answer
                left_out["ERROR"] += 1
            elif "messages" in record:  # an answer to more than the prompt
                left_out["conversation"] += 1
            elif record.get("finish_reason") == "length":
                left_out["truncated"] += 1
            else:
                prompt, _ = key
                answer = Answer(prompt, text, len(tokens), verdict == "CORRECT")
                answers.setdefault((prompt, text), answer)
    return list(answers.values()), left_out


def choose_pairs(
    answers: Sequence[Answer], *, per_prompt: int, limit: int | None = None, seed: int = 0
) -> list[tuple[Answer, Answer]]:
    """Pair right with wrong answers to the same prompt, closest lengths first.

    An answer is in at most one pair. Close lengths keep the training from learning length instead of rightness.

    Args:
        answers: answers without repeated texts of a prompt.
        per_prompt: maximum number of pairs of a prompt.
        limit: maximum number of all pairs, which are then drawn at random. None sets no limit.
        seed: seed of random choices, also between equally close pairs.

    Returns:
        Pairs of a right and a wrong answer, in the order of the prompts' first answers.
    """
    by_prompt: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_prompt[answer.prompt_id].append(answer)

    def closeness(pair: tuple[Answer, Answer]) -> tuple[int, bytes]:
        right, wrong = pair
        return abs(right.tokens - wrong.tokens), _drawn(seed, *pair)

    pairs: list[tuple[Answer, Answer]] = []
    for group in by_prompt.values():
        right = [answer for answer in group if answer.right]
        wrong = [answer for answer in group if not answer.right]
        paired: set[Answer] = set()
        for pair in sorted(product(right, wrong), key=closeness):
            if len(paired) < 2 * per_prompt and paired.isdisjoint(pair):
                pairs.append(pair)
                paired.update(pair)
    if limit is not None and len(pairs) > limit:
        by_chance = sorted(pairs, key=lambda pair: _drawn(seed, *pair))
        kept = set(by_chance[:limit])
        pairs = [pair for pair in pairs if pair in kept]
    return pairs


def choose_single(
    answers: Sequence[Answer], *, per_prompt: int, limit: int | None = None, seed: int = 0
) -> list[Answer]:
    """Draw right and wrong answers at random, also of prompts with only one kind.

    Args:
        answers: answers without repeated texts of a prompt.
        per_prompt: maximum number of right answers to a prompt, and of wrong ones.
        limit: maximum number of all answers. None sets no limit.
        seed: seed of the draw.

    Returns:
        The drawn answers, in the order of ``answers``.
    """
    drawn: list[Answer] = []
    counts: Counter[tuple[str, bool]] = Counter()
    for answer in sorted(answers, key=lambda answer: _drawn(seed, answer)):
        kind = (answer.prompt_id, answer.right)
        counts[kind] += 1
        if counts[kind] <= per_prompt:
            drawn.append(answer)
    kept = set(drawn[:limit])
    return [answer for answer in answers if answer in kept]


def _drawn(seed: int, *answers: Answer) -> bytes:
    """Return the key by which answers to one prompt are drawn: the least keys win."""
    texts = [answer.text for answer in answers]
    key = "\0".join([str(seed), answers[0].prompt_id, *texts])
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
