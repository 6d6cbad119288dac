"""Conversations with environments: requests for the model's messages, and the samples that training gets."""

import hashlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
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
        asked: the environment's request for the model's next message. None if it has given messages.
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
        cut: the limit that ended the conversation. Empty if none did.
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
        self.requests = queue.requests
        self.share = queue.share
        self.added = limits.added
        self._queue = queue
        self._sampling = sampling
        self._environments = environments
        self._tokenizer = tokenizer
        self._defused = defused(tokenizer)
        self._rows = rows
        self._limits = limits
        self._turns = turns
        self._recorded = dict(turns.records)
        self._stopped = stopped
        self._open: dict[SampleKey, _Talk] = {}
        # conversations that the environment has not begun, by prompt
        self._beginning: Counter[str] = Counter()
        # first requests of prompts with such conversations
        self._begun: dict[str, list[Request]] = defaultdict(list)
        self._first: deque[list[Request]] = deque()
        self._next: deque[Request] = deque()
        self._replies: SimpleQueue[tuple[_Talk, Future]] = SimpleQueue()
        self._ended: deque[tuple[Sample, Result]] = deque()
        self._lock = threading.Lock()

    def prompts(self) -> Iterator[list[Request]]:
        """Take the next requests of one prompt; an empty list means: wait, a later one may come."""
        prompts = self._queue.prompts()
        of_prompt: list[Request] = []  # requests of a prompt that wait for room
        prompts_end = False
        while not self._stopped():
            self._hear()
            while not prompts_end and self._may_begin():
                of_prompt = of_prompt or next(prompts, [])
                prompts_end = not of_prompt
                if of_prompt:
                    room = self._environments.at_once - len(self._open)
                    self._begin(of_prompt[:room])
                    of_prompt = of_prompt[room:]
            if self._next:
                yield [self._next.popleft()]
            elif self._first:
                yield self._first.popleft()
            elif self._open:
                yield []
            else:
                return

    def _may_begin(self) -> bool:
        """Whether there is room for another conversation, and few enough wait for their first message."""
        most = min(self._environments.at_once, self.share)  # the rest is for other ranks
        waiting = self._beginning.total() + sum(map(len, self._first))
        return len(self._open) < most and waiting < _AHEAD

    def continues(self, key: SampleKey) -> bool:
        """Whether the conversation is open."""
        return key in self._open

    def add(self, completion: Completion) -> None:
        """Record a message of the model, and give it to the environment."""
        record = Sample.of(completion).record()
        record["behind"] = self._behind(completion.request)
        self._turns.append(record)
        self._say(completion)

    def _say(self, completion: Completion) -> None:
        talk = self._open[completion.request.key]
        tokens = completion.tokens
        talk.answers += 1
        talk.offered += [tool for tool in talk.tools or () if tool not in talk.offered]
        talk.tokens += tokens
        talk.logprobs += completion.logprobs
        if completion.routes is not None:
            # [tokens, layers * chosen]
            talk.routes.append(completion.routes.reshape(len(tokens), -1))
        talk.context += tokens
        talk.text = completion.text
        talk.sampled = marked_text(self._tokenizer, tokens)
        talk.stopped = completion.finish_reason == "stop"
        talk.last = self._message(talk, completion)
        more = {}
        if "tool_calls" in talk.last:
            more["tool_calls"] = talk.last["tool_calls"]
        answer = Turn("assistant", talk.last["content"], True, more)
        talk.turns.append(answer)
        talk.shown.append(answer)
        ended_by_request = talk.asked and len(talk.tokens) < self._sampling.max_new_tokens
        if talk.stopped or ended_by_request:
            self._wait_for(talk, self._environments.say(talk.request.key, talk.last))
        else:
            self._cut(talk, "max_new_tokens")

    def ended(self) -> Iterator[tuple[Sample, Result]]:
        """Take the conversations that have ended since the last call."""
        self._hear()
        while self._ended:
            yield self._ended.popleft()

    # ---- the environment's replies

    def _begin(self, of_prompt: list[Request]) -> None:
        prompt = of_prompt[0].prompt_id
        self._beginning[prompt] += len(of_prompt)
        for request in of_prompt:
            turns = to_turns(request.messages)
            tools = [dict(tool) for tool in request.tools] or None
            talk = _Talk(request, turns, list(request.tokens), tools)
            self._open[request.key] = talk
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
        request = talk.request
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
        record = None
        if following and self._recorded:
            record = self._recorded.get(self._behind(following))
        if following and record:
            message = to_sample(record)
            routes = message.chosen_experts() if message.routes else None
            self._say(
                Completion(
                    following,
                    message.tokens,
                    message.logprobs,
                    message.text,
                    message.finish_reason,
                    routes,
                )
            )
        elif following and begins:
            self._begun[request.prompt_id].append(following)
        elif following:
            self._next.append(following)
        if begins:
            self._count_begun(request.prompt_id)

    def _count_begun(self, prompt: str) -> None:
        """Count a begun conversation of a prompt; after the last, the first requests with equal tokens go together."""
        self._beginning[prompt] -= 1
        if self._beginning[prompt]:
            return
        del self._beginning[prompt]
        by_tokens: dict[tuple[int, ...], list[Request]] = defaultdict(list)
        for request in self._begun.pop(prompt, ()):
            by_tokens[request.tokens].append(request)
        self._first += by_tokens.values()

    def _following(self, talk: _Talk, reply: Ask | list[Message]) -> Request | None:
        """Return the request for the model's next message; None if a limit ends the conversation."""
        request = talk.request
        talk.asked = reply if isinstance(reply, Ask) else None
        if isinstance(reply, Ask):
            turns = to_turns(reply.messages, blank=True)
            tools = self._defused(to_tools(reply.tools))
        elif reply or talk.answers:
            turns = [*talk.turns, *to_turns(reply)]
            tools = talk.tools
        else:
            return request  # the environment has no message before the model's first
        known = self._count_known(talk.turns, turns)
        new_turns = self._defused(turns[known:])
        if talk.answers == self._limits.turns:
            self._cut(talk, "max_turns")
            return None
        answer_is_last = talk.stopped and known == len(talk.turns)
        turns = [*talk.turns[:known], *new_turns]
        if answer_is_last and tools == talk.tools:
            *history, answer = talk.turns
            ids, fresh = render_reply(
                self._tokenizer, history, answer, talk.sampled, new_turns, tools
            )
        else:
            ids = render_history(self._tokenizer, turns, tools)
            fresh = True
        context = list(ids) if fresh else talk.context + ids
        left = self._sampling.max_new_tokens - len(talk.tokens)
        if left < 1:
            self._cut(talk, "max_new_tokens")
            return None
        # tokens of the environment
        added = len(context) - len(request.tokens) - len(talk.tokens)
        if added > self._limits.added:
            numbers = f": {added} are needed and {self._limits.added} allowed"
            self._cut(talk, "max_environment_tokens", numbers)
            return None
        talk.given.append((len(talk.tokens), ids, fresh))
        talk.context = context
        talk.turns = turns
        talk.tools = tools
        talk.shown += new_turns
        most = left
        if isinstance(reply, Ask) and reply.most:
            most = min(left, reply.most)
        turn = f"turn {talk.answers}"
        return replace(
            request,
            # the first seed is of the prompt, whatever the name of its set
            seed=sample_seed(request.seed, turn, "", request.sample),
            tokens=tuple(context),
            messages=tuple(turn.message() for turn in turns),
            tools=tuple(tools or ()),
            most=most,
        )

    def _count_known(self, history: list[Turn], turns: list[Turn]) -> int:
        """Return how many of the first ``turns`` are those of the conversation so far."""
        known = 0
        for before, turn in zip(history, turns, strict=False):
            if before is not turn:
                content = _content(before)
                if content not in (_content(turn), _content(self._defused(turn))):
                    break
            known += 1
        return known

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
            sizes = {
                "prompt_tokens": len(completion.request.tokens),
                "completion_tokens": len(completion.tokens),
            }
            message |= {"usage": sizes, "finish_reason": completion.finish_reason}
        tools = completion.request.tools
        if not (tools and talk.stopped):
            return message
        content, calls = calls_in(talk.sampled, tools)
        malformed = any(call.problem for call in calls)
        if not calls or (talk.asked and malformed):  # servers give a malformed call as text, too
            return message
        listed = []
        for number, call in enumerate(calls, start=talk.calls):
            listed.append({**call.message(number), "problem": call.problem})
        talk.calls += len(calls)
        return message | {"content": content, "tool_calls": listed}


def _content(turn: Turn) -> tuple[Any, ...]:
    """Return a turn's content for comparisons; a program's history has other ids and keys in calls."""
    functions = [call.get("function", call) for call in turn.more.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return turn.role, turn.content, calls
