"""Environments answer the model's messages and end conversations with a result."""

import asyncio
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json, Message, Row
from rocm_ext.environments.calls import Call
from rocm_ext.environments.tools import Tools
from rocm_ext.verifiers.base import Result, Verdict, Verifier, checked, field, name_of


@dataclass(frozen=True)
class Ask:
    """A request for the model's next message, by an environment that keeps the conversation.

    If ``messages`` begin with the conversation so far, sampling goes on from its ids; otherwise they are rendered anew.

    Attributes:
        messages: the conversation before the next message, in OpenAI's form.
        tools: JSON schemas of the functions that the message may call.
        most: the most tokens of the message, or None if only the run's limits hold.
    """

    messages: list[Message]
    tools: list[Json]
    most: int | None = None


Reply = list[Message] | Ask | Result


class Environment:
    """One conversation: it answers the model's messages until it gives a result.

    By default it runs the tools that a message calls, and judges the first message that calls none. Your class
    overrides what differs. All methods but ``judge_by``, ``run`` and the checks may be asynchronous. An object serves
    one conversation, in a separate process, so it may keep state and start processes; an exception is the
    conversation's ERROR.

    Args:
        row: the columns of the prompt's row.

    Attributes:
        tools: functions that the model may call: names of methods, or functions. See :class:`Tools`.
        needs: names of the columns that a row must have.
        at_once: the most simultaneous conversations of a rank; one takes a process and a descriptor, of which 1024 are
            usual.
    """

    tools: Sequence[Any] = ()
    needs: tuple[str, ...] = ()
    at_once: int = 512
    _judged_by: Verifier | None = None

    def __init__(self, row: Row) -> None:
        self.row = row

    def judge_by(self, verifier: Verifier) -> None:
        """Let a verifier judge the answer and check the rows; its ``needs`` replace the environment's.

        Raises:
            UserError: it compares the answers of a group.
        """
        if verifier.groups:
            raise UserError(
                f"{name_of(verifier)} compares answers of a group; a conversation is judged by itself"
            )
        self._judged_by = verifier
        self.needs = tuple(verifier.needs)

    def check(self) -> None:
        """Raise UserError if this machine cannot run the environment or the verifier."""
        if self._judged_by is not None:
            self._judged_by.check()

    def check_row(self, row: Row) -> None:
        """Raise UserError or ValueError, naming the field, if a row allows no conversation."""
        if self._judged_by is not None:
            self._judged_by.check_row(row)
            return
        for name in self.needs:
            field(row, name)

    def begin(self) -> Any:
        """Return messages that follow the prompt's, such as the first state of a game, or a :class:`Ask`."""
        return ()

    def reply(self, message: Message) -> Any:
        """Answer the model's message.

        Args:
            message: ``role``, ``content``, and in OpenAI's form ``tool_calls``, if it calls tools.

        Returns:
            The messages that follow it, a :class:`Ask`, or the conversation's result, as :meth:`judge` returns it.
        """
        replies = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            name = function["name"]
            result = self.run(Call(name, function["arguments"], call.get("problem", "")))
            replies.append(
                {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            )
        return replies or self.judge(message["content"])

    def cut(self, message: Message) -> Any:
        """Judge a conversation that ends at a limit of tokens or turns; by default as :meth:`judge` does.

        Args:
            message: the model's last message, as in :meth:`reply`; it may lack its end.
        """
        return self.judge(message["content"])

    def refused(self, why: str) -> Any:
        """Hear that the messages of an :class:`Ask` cannot be rendered, and reply; by default it is an ERROR."""
        raise ValueError(why)

    def judge(self, answer: str) -> Any:
        """Judge the last message: a :class:`~rocm_ext.verifiers.Result`, or a reward from 0 to 1, CORRECT if 1.

        By default the verifier of :meth:`judge_by` judges it.
        """
        if self._judged_by is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither judge nor reply")
        return checked(self._judged_by, self._judged_by(answer, self.row))

    def run(self, call: Call) -> str:
        """Return the result of a tool call, as text."""
        return tools_of(self)(call)


def tools_of(environment: Environment) -> Tools:
    """Return an environment's tools; raises UserError as :class:`Tools`."""
    functions = []
    for tool in environment.tools:
        functions.append(getattr(environment, tool) if isinstance(tool, str) else tool)
    return Tools(functions)


def now(value: Any) -> Any:
    """Return ``value``, or its result if it is awaitable."""
    return _loop().run_until_complete(value) if inspect.isawaitable(value) else value


# one for the process, so that connections outlive an await
_loop = functools.cache(asyncio.new_event_loop)


def checked_reply(environment: Environment, value: Any) -> Reply:
    """Return an environment's reply as messages, an Ask or a Result; raises ValueError for anything else."""
    name = type(environment).__name__
    if isinstance(value, (Ask, Result)):
        return value
    if isinstance(value, (bool, int, float)):
        return Result(Verdict.CORRECT if value == 1 else Verdict.WRONG, float(value))
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(message, Mapping) for message in value
    ):
        expected = "messages, a text, a Result or a reward"
        raise ValueError(f"{name} returned {type(value).__name__}; expected {expected}")
    roles = {message.get("role") for message in value}
    wrong_roles = roles - {"user", "tool", "system"}
    have_texts = all(isinstance(message.get("content"), str) for message in value)
    if wrong_roles or not have_texts:
        fault = wrong_roles or "no text"
        raise ValueError(
            f"{name} returned a message of {fault}; expected role user or tool, and content"
        )
    return [dict(message) for message in value]
