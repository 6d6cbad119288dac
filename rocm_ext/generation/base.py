"""What every engine is asked for and what it gives back."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rocm_ext.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: of one answer, its stop token included.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k most probable tokens only; None: all.
        top_p: draw from the smallest set of most probable tokens that holds this probability; None: all.
        min_p: draw from tokens at least this probable, relative to the most probable one; None: all.
        stop_strings: an answer ends where its text holds one of them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, count in (("max_new_tokens", self.max_new_tokens), ("top_k", self.top_k)):
            if not (type(count) is int and count >= 1) and not (count is None and name == "top_k"):
                raise UserError(f"{name} is {count!r}; expected a whole number of at least 1")
        if not (type(self.temperature) in (int, float) and 0 <= self.temperature < math.inf):
            raise UserError(f"temperature is {self.temperature!r}; expected a number of at least 0 (0: greedy)")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
                raise UserError(f"{name} is {share!r}; expected a number above 0 and up to 1, or null")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise UserError(f"stop_strings is {list(self.stop_strings)!r}; expected texts that are not empty")


@dataclass(frozen=True)
class Request:
    """One answer that is wanted.

    Attributes:
        prompt_id: of the prompt; requests for the same prompt have the same tokens.
        sample: which of the prompt's answers, from 0.
        seed: 0 … 2**63 - 1; everything random about the answer follows from it.
        tokens: ids of the rendered prompt, the assistant's header at its end.
        messages: the conversation those are rendered from, ``{role, content}`` each.
    """

    prompt_id: str
    sample: int
    seed: int
    tokens: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        request: what asked for it.
        tokens: ids as they were sampled, with the stop token if one ended it.
        logprobs: of each of ``tokens`` under the unmodified distribution (temperature 1, no truncation).
        text: of ``tokens``, without the stop token and from a stop string on.
        finish_reason: ``stop`` (stop token or stop string) or ``length``.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


class Engine(Protocol):
    """A source of completions.

    Attributes:
        exact_tokens: whether ids are those that were sampled, not made from the text afterwards.
        has_logprobs: whether they come with log-probs.
    """

    exact_tokens: bool
    has_logprobs: bool

    def check(self) -> None:
        """Fail early, before any time is spent.

        Raises:
            UserError: what is missing, in one line.
        """

    def session(self, adapter: Path | None) -> AbstractContextManager["Session"]:
        """Ready to sample from the model with ``adapter`` (a PEFT folder; None: the base model)."""


class Session(Protocol):
    """An engine with a model in it."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions of ``requests``, each as soon as it is finished, in any order."""

    def stats(self) -> dict[str, float]:
        """Since the session began: ``tokens`` and ``tokens_per_second``, and what else the engine knows."""


def sample_seed(seed: int, cycle: int | str, prompt_id: str, sample: int) -> int:
    """The seed of one sample: a hash of the run's seed, the cycle, the prompt and the sample's index."""
    text = f"{seed}\0{cycle}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
