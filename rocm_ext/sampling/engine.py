"""The interface of engines: requests, sampling settings, completions, sessions."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rocm_ext.base.kinds import NULL, POSITIVE, SHARE, Kind, check, integer, number
from rocm_ext.base.types import Json, Message
from rocm_ext.distributed.ranks import Ranks

_KINDS = {
    "max_new_tokens": integer(1),
    "temperature": number(lambda x: x >= 0, "a number of at least 0 (0: greedy)"),
    "top_k": integer(1, 2**31 - 1) | NULL,
    "top_p": SHARE | NULL,
    "min_p": SHARE | NULL,
    "stop_strings": Kind(
        lambda value: all(isinstance(text, str) and text for text in value), ("non-empty texts",)
    ),
    "logprobs_temperature": POSITIVE,
    "stop_tokens": Kind(
        lambda value: value is None or all(type(token) is int and token >= 0 for token in value),
        ("ids of tokens", "None"),
    ),
}


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens.

    Attributes:
        max_new_tokens: tokens of one answer at most, including its stop token.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k most probable tokens, or from all if None; so for the next two.
        top_p: draw from the smallest set of most probable tokens that holds this probability.
        min_p: draw from tokens at least this probable, relative to the most probable one.
        stop_strings: an answer ends where its text contains one of them.
        logprobs_temperature: temperature of the distribution of log-probs, which is not truncated.
        stop_tokens: ids that end an answer; None for the tokenizer's, which servers always use.

    Raises:
        UserError: a value is out of range; the message names it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_strings: tuple[str, ...] = ()
    logprobs_temperature: float = 1.0
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check(vars(self) | {"stop_strings": list(self.stop_strings)}, _KINDS)

    def until_stop(self, text: str) -> tuple[str, bool]:
        """Return ``text`` up to the first stop string, and whether it has one."""
        ends = [text.index(stop) for stop in self.stop_strings if stop in text]
        return text[: min(ends, default=len(text))], bool(ends)


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    Attributes:
        prompt_id: names the prompt; requests for the same prompt have the same tokens.
        sample: index of the answer among the prompt's, from 0.
        seed: 0 … 2**63 - 1; it determines everything random about the answer.
        tokens: ids of the rendered prompt, which ends with the assistant's header.
        messages: the conversation behind ``tokens``: ``{role, content}``.
        tools: JSON schemas of the functions that the assistant may call.
        adapter: ``adapter`` of another open session of the engine, to sample with instead of this session's.
        most: most tokens of the answer, if fewer than the settings' ``max_new_tokens``.
    """

    prompt_id: str
    sample: int
    seed: int
    tokens: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[Json, ...] = ()
    adapter: Any = None
    most: int | None = None

    def limited(self, sampling: Sampling) -> Sampling:
        """Return the settings with this request's limit."""
        return sampling if self.most is None else replace(sampling, max_new_tokens=self.most)

    @property
    def key(self) -> tuple[str, int]:
        """The prompt's id and the index of the answer."""
        return self.prompt_id, self.sample


class RequestQueue:
    """A queue of requests for all ranks. A rank with room takes the next prompt with all its requests.

    So no rank waits long for another whose answers are longer. Iterating takes requests. All ranks make the queue
    together, from the same requests.

    Args:
        requests: the requests; a prompt's requests are adjacent.
        ranks: the ranks; without them this process takes all.
        owners: prompts that only one rank may take: rank by the prompt's id.

    Attributes:
        requests: the requests of all ranks.
        share: requests per rank if all take equally many; a rank runs at most so many at once.
        added: most tokens that later requests add to a prompt as they continue its conversation.
    """

    added = 0

    def __init__(
        self,
        requests: Iterable[Request],
        ranks: Ranks | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.requests = tuple(requests)
        rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
        self._own: list[list[Request]] = []
        self._common: list[list[Request]] = []
        shares = [0] * world
        by_prompt = itertools.groupby(self.requests, key=lambda request: request.prompt_id)
        for place, (prompt_id, same) in enumerate(by_prompt):
            prompt = list(same)
            shares[place % world] += len(prompt)
            if not owners or prompt_id not in owners:
                self._common.append(prompt)
            elif owners[prompt_id] == rank:
                self._own.append(prompt)
        self.share = max(shares)
        self._taken = ranks.counter() if ranks else itertools.count(1).__next__

    def prompts(self) -> Iterator[list[Request]]:
        """Take requests, one prompt at a time; an empty list says that a later one may come."""
        yield from self._own
        while True:
            number = self._taken()
            if number > len(self._common):
                return
            yield self._common[number - 1]

    def continues(self, key: tuple[str, int]) -> bool:
        """Whether a later request with this key may continue a conversation."""
        return False

    def __iter__(self) -> Iterator[Request | None]:
        """Take requests one at a time; None says that a later one may come."""
        for same in self.prompts():
            yield from same or (None,)

    def __length_hint__(self) -> int:
        return self.share


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        request: the request it answers.
        tokens: ids as sampled, including the stop token if one ended the answer.
        logprobs: log-probs of ``tokens`` in the distribution that :class:`Sampling` defines.
        text: the decoded ``tokens`` without the stop token, cut before the first stop string.
        finish_reason: ``stop`` (stop token or stop string) or ``length``.
        routes: [n, layers, chosen] int16, the layers' chosen experts for the n tokens before ``tokens``: the prompt's
            last token, and all of the answer's but the last; None if they are not kept.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    routes: np.ndarray | None = None


class Engine(Protocol):
    """A source of completions.

    An engine that loads adapters from their folders, as :class:`rocm_ext.sampling.OpenAIEngine` does, has two more
    methods: ``check_adapter(adapter)``, which raises UserError if it cannot, and its sessions' ``ask_each``. With
    ``max_staleness`` several sessions are open at once, and one of them answers all requests: it takes an iterator,
    uses the requests' ``adapter``, and waits where the iterator gives None. A new ``generate`` follows if the session
    has ``given_up`` a server, or if the newest session has other ``servers``.

    An engine whose log-probs may have another temperature than :class:`Sampling` asks for has a method
    ``check_logprobs(sampling)``, which then raises UserError.

    An engine that samples from the model under training may set ``refreshes`` to True. Its sessions may then stay open
    during training, and have two more methods: ``refresh()`` copies the adapter's values and restarts the counts of
    ``stats``; ``release()`` frees memory that the session does not need until the next ``generate``. The engine's
    ``layout_bytes()`` returns the bytes that a session still holds, and a session's attribute ``reserve`` returns the
    bytes that training will allocate.

    Attributes:
        exact_tokens: whether completions hold the sampled ids, rather than ids re-encoded from the text.
        has_logprobs: whether completions have log-probabilities.
    """

    exact_tokens: bool
    has_logprobs: bool

    def check(self) -> None:
        """Check that the engine can sample, before a run spends time; a UserError names what is missing."""

    def session(self, adapter: Path | None) -> AbstractContextManager["Session"]:
        """Open a session that samples from the model with ``adapter``, a PEFT folder, or from the base model."""


class Session(Protocol):
    """An engine with a loaded model."""

    def generate(
        self, requests: Iterable[Request | None], sampling: Sampling
    ) -> Iterator[Completion]:
        """Take requests when there is room for them, and yield completions as they finish.

        None among the requests says that a later one may come.
        """

    def stats(self) -> dict[str, float]:
        """Return counts since the session began: ``tokens``, ``tokens_per_second`` and further ones."""


def sample_seed(seed: int, cycle: int | str, prompt_id: str, sample: int) -> int:
    """Hash the run's seed, the cycle, the prompt and the sample's index into the sample's seed."""
    text = f"{seed}\0{cycle}\0{prompt_id}\0{sample}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
