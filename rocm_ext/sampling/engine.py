"""The interface of engines: requests, sampling settings, completions, sessions."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.distributed.ranks import Ranks


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens.

    Attributes:
        max_new_tokens: tokens of one answer at most, including its stop token.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k most probable tokens; None: from all.
        top_p: draw from the smallest set of most probable tokens that holds this probability; None: from all.
        min_p: draw from tokens at least this probable, relative to the most probable one; None: from all.
        stop_strings: an answer ends where its text contains one of them.
        logprobs_temperature: log-probs are those of the distribution at this temperature, without truncation.

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

    def __post_init__(self) -> None:
        for name, count in (("max_new_tokens", self.max_new_tokens), ("top_k", self.top_k)):
            if not (type(count) is int and count >= 1) and not (count is None and name == "top_k"):
                raise UserError(f"{name} is {count!r}; expected a whole number of at least 1")
        if not (type(self.temperature) in (int, float) and 0 <= self.temperature < math.inf):
            raise UserError(f"temperature is {self.temperature!r}; expected a number of at least 0 (0: greedy)")
        if not (type(self.logprobs_temperature) in (int, float) and 0 < self.logprobs_temperature < math.inf):
            raise UserError(f"logprobs_temperature is {self.logprobs_temperature!r}; expected a number above 0")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
                raise UserError(f"{name} is {share!r}; expected a number above 0 and up to 1, or null")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise UserError(f"stop_strings is {list(self.stop_strings)!r}; expected non-empty strings")


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    Attributes:
        prompt_id: names the prompt; requests for the same prompt have the same tokens.
        sample: index of the answer among the prompt's, from 0.
        seed: 0 … 2**63 - 1; it determines everything random about the answer.
        tokens: ids of the rendered prompt, which ends with the assistant's header.
        messages: the conversation behind ``tokens``, ``{role, content}`` each.
        tools: JSON schemas of the functions that the assistant may call.
        adapter: ``adapter`` of another open session of the engine, with which to sample; None: the session's own.
        most: tokens of the answer at most, if these are fewer than the settings' ``max_new_tokens``.
    """

    prompt_id: str
    sample: int
    seed: int
    tokens: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
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
    """Requests that all ranks take from, each the next prompt with all its requests as soon as it has room for one.

    So no rank waits long for another whose answers are longer. Iterating takes requests. All ranks make a queue
    together, of the same requests.

    Args:
        requests: those of a prompt follow each other.
        ranks: the ranks; None: this process takes all.
        owners: ranks of those prompts, by their ids, that only one rank may take.

    Attributes:
        requests: the requests of all ranks.
        share: requests of a rank if all take equally many; one that had room for more would leave none to others.
        added: tokens that may come to a prompt in later requests, which continue a conversation.
    """

    added = 0

    def __init__(
        self, requests: Iterable[Request], ranks: Ranks | None = None, owners: Mapping[str, int] | None = None
    ) -> None:
        self.requests, owners = tuple(requests), owners or {}
        prompts = [list(same) for _, same in itertools.groupby(self.requests, key=lambda request: request.prompt_id)]
        rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
        self._own = [prompt for prompt in prompts if owners.get(prompt[0].prompt_id) == rank]
        self._common = [prompt for prompt in prompts if prompt[0].prompt_id not in owners]
        self._taken = ranks.counter() if ranks else itertools.count(1).__next__
        self.share = max((sum(map(len, prompts[first::world])) for first in range(world)), default=0)

    def prompts(self) -> Iterator[list[Request]]:
        """Take the next prompt's requests, one prompt at a time; an empty list says that there are none yet."""
        yield from self._own
        while (number := self._taken()) <= len(self._common):
            yield self._common[number - 1]

    def continues(self, key: tuple[str, int]) -> bool:
        """Whether a request with this key may come that continues an earlier one's conversation."""
        return False

    def __iter__(self) -> Iterator[Request | None]:
        """Take requests one at a time; None says that there is none yet."""
        for same in self.prompts():
            if same:
                yield from same
            else:
                yield None

    def __length_hint__(self) -> int:
        return self.share


def as_queue(requests: Iterable[Request | None]) -> RequestQueue:
    """Return a queue that this process takes all of, where ``requests`` are none yet."""
    return requests if isinstance(requests, RequestQueue) else RequestQueue(filter(None, requests))


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        request: the request it answers.
        tokens: ids as sampled, including the stop token if one ended the answer.
        logprobs: log-probability of each of ``tokens``; of which distribution, :class:`Sampling` says.
        text: the decoded ``tokens`` without the stop token, cut before the first stop string.
        finish_reason: ``stop`` (stop token or stop string) or ``length``.
        routes: [n, layers, chosen] int16, the experts that each layer chose for the n tokens that gave ``tokens``: the
            prompt's last one, and the answer's but for its last. None: they are not kept.
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
    ``max_staleness`` several of its sessions are open at once, and one of them answers all requests: it takes an
    iterator, uses each request's ``adapter``, and waits where the iterator gives None. A new ``generate`` follows where
    it has ``given_up`` a server, or where the newest session has other ``servers``.

    An engine whose log-probs may be of another temperature than :class:`Sampling` says has a method
    ``check_logprobs(sampling)``, which raises UserError then.

    An engine that samples from the model under training may set ``refreshes`` to True. Its sessions then may stay open
    while the model is trained, and have two more methods: ``refresh()`` takes the adapter's present values and restarts
    the counts of ``stats``, and ``release()`` frees the memory that the session can do without until the next
    ``generate``. Its method ``layout_bytes()`` returns the bytes that a session holds nonetheless, and the attribute
    ``reserve`` of a session returns the bytes that training will allocate beside it.

    Attributes:
        exact_tokens: whether completions hold the sampled ids; False: ids re-encoded from the text.
        has_logprobs: whether completions have log-probabilities.
    """

    exact_tokens: bool
    has_logprobs: bool

    def check(self) -> None:
        """Check that the engine can sample, before a run spends time.

        Raises:
            UserError: something is missing; the message says what, in one line.
        """

    def session(self, adapter: Path | None) -> AbstractContextManager["Session"]:
        """Open a session that samples from the model with ``adapter`` (a PEFT folder; None: the base model)."""


class Session(Protocol):
    """An engine with a loaded model."""

    def generate(self, requests: Iterable[Request | None], sampling: Sampling) -> Iterator[Completion]:
        """Take requests as there is room for them, and yield a completion of each as soon as it is finished.

        None among the requests says that there is none yet.
        """

    def stats(self) -> dict[str, float]:
        """Return counts since the session began: ``tokens``, ``tokens_per_second`` and the engine's own."""


def sample_seed(seed: int, cycle: int | str, prompt_id: str, sample: int) -> int:
    """Hash the run's seed, the cycle, the prompt and the sample's index into the sample's seed."""
    text = f"{seed}\0{cycle}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
