"""Rewards that judge nothing, for comparisons in which both sides have to train on every answer."""

import hashlib
from collections import Counter
from collections.abc import Sequence

_SEEN = Counter[tuple[str, str]]()


def drawn(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Draw a number in [0, 1) for each answer: the same in every process that judges the same answers.

    Equal answers to a prompt get different numbers, so no group has equal rewards.
    """
    rewards = []
    for pair in zip(prompts, completions, strict=True):
        drawn_from = repr((*pair, _SEEN[pair]))
        _SEEN[pair] += 1
        digest = hashlib.blake2b(drawn_from.encode(), digest_size=4).digest()
        rewards.append(int.from_bytes(digest, "big") / 2**32)
    return rewards
