"""Conversations with environments: requests for the model's messages, and the samples that training gets."""

import hashlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile
from queue import SimpleQueue
from typing import Any

import numpy as np

from rocm_ext.base.errors import one_line
from rocm_ext.base.types import Json, Message, Row
from rocm_ext.data.messages import Turn, to_tools, to_turns
from rocm_ext.data.render import marked_text, render_history, render_reply
from rocm_ext.data.tokenizer import defused
from rocm_ext.environments import Ask, Environments, calls_in
from rocm_ext.rl.records import Given, PhaseRecords, Sample, packed_routes, to_sample
from rocm_ext.runs.records import SampleKey
from rocm_ext.sampling import Completion, Request, RequestQueue, Sampling, sample_seed
from rocm_ext.verifiers import Result
from rocm_ext.verifiers.base import error

_AHEAD = 64  # conversations that begin before there is room for them


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation after its prompt."""

    turns: int  # messages of the model
    added: int  # tokens of the environment


@dataclass
class _Talk:
    """A conversation and the context of the model's next message.

    Attributes:
        request: request for the model's first message.
        turns: turns of the prompt, or of the environment's last request, with all that follow.
        shown: all turns after the prompt, for the record.
        tools: JSON schemas of the functions that the model may call.
        offered: these of all its messages, for the record.
        asked: the environment's request for the model's next message; None: it has given messages.
        context: ids before the model's next message.
        tokens, logprobs, routes: outputs of the model's messages, in order.
        given: see :class:`rocm_ext.rl.records.Sample`.
        answers: number of the model's messages.
        calls: number of tool calls in them.
        refused: number of the environment's requests that could not be rendered.
        stopped: whether the model ended its last message.
        last: the model's last message, as the environment gets it.
        text: text of this message without special tokens.
        sampled: text of this message with special tokens.
        cut: the limit that ended the conversation; empty: none did.
    """

    request: Request
    turns: list[Turn]
    context: list[int]
    tools: list[Json] | None
    shown: list[Turn] = field(default_factory=list)
    offered: list[Json] = field(default_factory=list)
    asked: Ask | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    answers: int = 0
    calls: int = 0
    refused: int = 0
    stopped: bool = False
    last: Message = field(default_factory=dict)
    text: str = ""
    sampled: str = ""
    cut: str = ""


class ConversationQueue(RequestQueue):
    """Requests of conversations; open conversations come before new ones.

    One thread takes requests, and another one may hand over the answers.

    Args:
        queue: the requests that begin conversations.
        sampling: settings; ``max_new_tokens`` limits all of the model's messages in a conversation together.
        environments: the other side.
        stopped: returns whether to stop; open conversations stay as they are.
        rows: rows of the prompts, by prompt id.
        turns: records of the model's messages. The environment gets recorded messages of an earlier process. If it
            replies as before, the conversation continues where it was.
    """

    def __init__(
        self,
        queue: RequestQueue,
        sampling: Sampling,
        environments: Environments,
        tokenizer: Any,
        limits: Limits,
        stopped: Callable[[], bool],
        rows: Mapping[str, Row],
        turns: PhaseRecords,
    ) -> None:
        self._queue, self._sampling, self._environments = queue, sampling, environments
        self._tokenizer, self._rows, self._limits = tokenizer, rows, limits
        self._turns, self._recorded = turns, dict(turns.records)
        self.requests, self.share, self.added = queue.requests, queue.share, limits.added
        self._defused = defused(tokenizer)
        self._open: dict[SampleKey, _Talk] = {}
        self._beginning: Counter[str] = Counter()  # conversations that the environment has not begun, by prompt
        self._begun: dict[str, list[Request]] = defaultdict(list)  # first requests of prompts with such conversations
        self._first: deque[list[Request]] = deque()
        self._next: deque[Request] = deque()
        self._replies: SimpleQueue[tuple[_Talk, Future]] = SimpleQueue()
        self._ended: deque[tuple[Sample, Result]] = deque()
        self._lock, self._stopped = threading.Lock(), stopped

    def prompts(self) -> Iterator[list[Request]]:
        """Take the next requests of one prompt; an empty list means: wait, a later one may come."""
        coming: Iterator[list[Request]] | None = self._queue.prompts()
        same: list[Request] = []
        while not self._stopped():
            self._hear()
            most = min(self._environments.at_once, self.share)  # the rest is for other ranks
            while coming and len(self._open) < most and self._beginning.total() + sum(map(len, self._first)) < _AHEAD:
                if same := same or next(coming, []):
                    room = self._environments.at_once - len(self._open)
                    self._begin(same[:room])
                    same = same[room:]
                else:
                    coming = None
            if self._next:
                yield [self._next.popleft()]
            elif self._first:
                yield self._first.popleft()
            elif self._open:
                yield []
            else:
                return

    def continues(self, key: SampleKey) -> bool:
        """Whether the conversation is open."""
        return key in self._open

    def add(self, completion: Completion) -> None:
        """Record a message of the model, and give it to the environment."""
        self._turns.append(Sample.of(completion).record() | {"behind": self._behind(completion.request)})
        self._say(completion)

    def _say(self, completion: Completion) -> None:
        talk = self._open[completion.request.key]
        talk.answers += 1
        talk.offered += [tool for tool in talk.tools or () if tool not in talk.offered]
        talk.tokens += completion.tokens
        talk.logprobs += completion.logprobs
        talk.routes += [] if completion.routes is None else [completion.routes.reshape(len(completion.tokens), -1)]
        talk.context += completion.tokens
        talk.text, talk.sampled = completion.text, marked_text(self._tokenizer, completion.tokens)
        talk.stopped = completion.finish_reason == "stop"
        talk.last = self._message(talk, completion)
        calls = {key: talk.last[key] for key in ("tool_calls",) if key in talk.last}
        answer = Turn("assistant", talk.last["content"], True, calls)
        talk.turns.append(answer)
        talk.shown.append(answer)
        if talk.stopped or (talk.asked and len(talk.tokens) < self._sampling.max_new_tokens):  # the request's limit
            self._wait_for(talk, self._environments.say(talk.request.key, talk.last))
        else:
            self._cut(talk, "max_new_tokens")

    def ended(self) -> Iterator[tuple[Sample, Result]]:
        """Take the conversations that have ended since the last call."""
        self._hear()
        while self._ended:
            yield self._ended.popleft()

    # ---- the environment's replies

    def _begin(self, same: list[Request]) -> None:
        prompt = same[0].prompt_id
        self._beginning[prompt] += len(same)
        for request in same:
            turns, tools = to_turns(request.messages), [dict(tool) for tool in request.tools] or None
            talk = self._open[request.key] = _Talk(request, turns, list(request.tokens), tools)
            self._wait_for(talk, self._environments.begin(request.key, self._rows[prompt]))

    def _wait_for(self, talk: _Talk, future: Future) -> None:
        future.add_done_callback(lambda done: self._replies.put((talk, done)))

    def _hear(self) -> None:
        """Take the environment's replies."""
        with self._lock:
            while not self._replies.empty():
                talk, done = self._replies.get()
                self._take(talk, done.result())

    def _take(self, talk: _Talk, reply: Any) -> None:
        """Continue or end a conversation with the environment's reply."""
        request, prompt = talk.request, talk.request.prompt_id
        following = None
        if not isinstance(reply, Result):
            try:
                following = self._following(talk, reply)
            except Exception as problem:  # a program's messages and tools may be anything
                why = f"the environment's messages cannot be rendered: {one_line(problem)}"
                talk.refused += 1
                if talk.asked and talk.refused <= self._limits.turns:
                    self._wait_for(talk, self._environments.refuse(request.key, why))
                    return
                reply = error(why)
        if isinstance(reply, Result):
            self._end(talk, reply)
        begins = not talk.answers
        if following and self._recorded and (record := self._recorded.get(self._behind(following))):
            message = to_sample(record)
            routes = message.chosen_experts() if message.routes else None
            self._say(
                Completion(following, message.tokens, message.logprobs, message.text, message.finish_reason, routes)
            )
        elif following:
            (self._begun[prompt] if begins else self._next).append(following)
        if begins:
            self._beginning[prompt] -= 1
            if not self._beginning[prompt]:
                del self._beginning[prompt]
                by_tokens: dict[tuple[int, ...], list[Request]] = defaultdict(list)
                for request in self._begun.pop(prompt, ()):
                    by_tokens[request.tokens].append(request)
                self._first += by_tokens.values()

    def _following(self, talk: _Talk, reply: Ask | list[Message]) -> Request | None:
        """Return the request for the model's next message; None if a limit ends the conversation."""
        request, talk.asked = talk.request, reply if isinstance(reply, Ask) else None
        if talk.asked:
            turns = to_turns(talk.asked.messages, blank=True)
            tools = self._defused(to_tools(talk.asked.tools))
        elif not (talk.answers or reply):
            return request
        else:
            turns, tools = [*talk.turns, *to_turns(reply)], talk.tools
        held = self._shared(talk.turns, turns)
        goes_on = talk.stopped and held == len(talk.turns) and tools == talk.tools
        turns = [*talk.turns[:held], *self._defused(turns[held:])]
        if talk.answers == self._limits.turns:
            self._cut(talk, "max_turns")
            return None
        if goes_on:
            answered = talk.turns[:-1], talk.turns[-1]
            ids, fresh = render_reply(self._tokenizer, *answered, talk.sampled, turns[held:], tools)
        else:
            ids, fresh = render_history(self._tokenizer, turns, tools), True
        context = ids if fresh else talk.context + ids
        left = self._sampling.max_new_tokens - len(talk.tokens)
        if left < 1:
            self._cut(talk, "max_new_tokens")
            return None
        if len(context) + left > len(request.tokens) + self._sampling.max_new_tokens + self._limits.added:
            added = len(context) - len(request.tokens) - len(talk.tokens)
            self._cut(talk, "max_environment_tokens", f": {added} are needed and {self._limits.added} allowed")
            return None
        talk.given.append((len(talk.tokens), ids, fresh))
        talk.context, talk.turns, talk.tools = list(context), turns, tools
        talk.shown += turns[held:]
        seed = sample_seed(request.seed, f"turn {talk.answers}", request.prompt_id, request.sample)
        return replace(
            request,
            seed=seed,
            tokens=tuple(context),
            messages=tuple(turn.message() for turn in turns),
            tools=tuple(tools or ()),
            most=min(left, talk.asked.most or left) if talk.asked else left,
        )

    def _shared(self, held: list[Turn], turns: list[Turn]) -> int:
        """Return the number of equal turns at the beginning of both."""
        pairs = zip(held, turns, strict=False)
        same = (a is b or _said(a) in (_said(b), _said(self._defused(b))) for a, b in pairs)
        return sum(takewhile(bool, same))

    def _behind(self, request: Request) -> str:
        """Hash what determines the model's message: settings, seed and the ids before it."""
        text = repr((request.limited(self._sampling), request.seed, request.tokens))
        return hashlib.sha256(text.encode()).hexdigest()

    def _cut(self, talk: _Talk, limit: str, numbers: str = "") -> None:
        """Let the environment judge a conversation that a limit ends; an ERROR's detail has the ``numbers``."""
        if talk.cut or not talk.answers:
            self._end(talk, error(f"{limit} leaves no room for a message of the model's{numbers}"))
            return
        talk.cut = limit
        self._wait_for(talk, self._environments.cut(talk.request.key, talk.last))

    def _end(self, talk: _Talk, result: Result) -> None:
        request = talk.request
        self._environments.end(request.key)
        if talk.cut and result.reward is not None:
            result = replace(result, detail=f"cut at {talk.cut}: {result.detail}")
        sample = Sample(
            request.prompt_id,
            request.sample,
            request.seed,
            "length" if talk.cut else "stop",
            talk.text,
            talk.tokens,
            [round(value, 6) for value in talk.logprobs],
            packed_routes(np.concatenate(talk.routes)) if talk.routes else None,
            talk.given,
            [turn.message() for turn in talk.shown],
            talk.offered or None,
        )
        del self._open[request.key]
        self._ended.append((sample, result))

    def _message(self, talk: _Talk, completion: Completion) -> Message:
        """Return a message of the model with its tool calls, in OpenAI's form."""
        message: Message = {"role": "assistant", "content": completion.text}
        if talk.asked:
            sizes = {"prompt_tokens": len(completion.request.tokens), "completion_tokens": len(completion.tokens)}
            message |= {"usage": sizes, "finish_reason": completion.finish_reason}
        if (tools := completion.request.tools) and talk.stopped:
            content, calls = calls_in(talk.sampled, tools)
            if talk.asked and any(call.problem for call in calls):  # as servers do
                return message
            if calls:
                first, talk.calls = talk.calls, talk.calls + len(calls)
                listed = [{**call.message(first + i), "problem": call.problem} for i, call in enumerate(calls)]
                return message | {"content": content, "tool_calls": listed}
        return message


def _said(turn: Turn) -> tuple[Any, ...]:
    """Return a turn's content for comparisons; a program's history has other ids and keys in calls."""
    functions = [call.get("function", call) for call in turn.more.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return turn.role, turn.content, calls
