"""Environments answer the model's messages and end each conversation with a result."""

import asyncio
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.environments.calls import Call
from rocm_ext.environments.tools import Tools
from rocm_ext.verifiers.base import Result, Verdict, field

Message = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request for the model's next message, by an environment that keeps the conversation itself.

    If ``messages`` begin with the conversation so far, sampling goes on from its ids; otherwise they are rendered anew.

    Attributes:
        messages: all that the next message follows, in OpenAI's form.
        tools: JSON schemas of the functions that it may call.
        most: tokens of the message; None: only the run's limits hold.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    most: int | None = None


Reply = list[Message] | Ask | Result


class Environment:
    """One conversation: it answers each message of the model's, until it gives a result instead.

    As it is, it runs the tools that a message calls, and has the first message that calls none judged. A class of your
    own overrides what differs. All methods but ``run`` and the checks may be asynchronous. One object serves one
    conversation, in a process of its own, so it may keep state and start processes; what it raises is the
    conversation's ERROR.

    Args:
        row: the columns of the prompt's row.

    Attributes:
        tools: functions that the model may call: names of methods, or functions. See :class:`Tools`.
        needs: columns that a row must have.
        at_once: conversations of a rank at the same time, each with a process and a descriptor, of which 1024 are
            usual.
    """

    tools: Sequence[Any] = ()
    needs: tuple[str, ...] = ()
    at_once: int = 512

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row

    def check(self) -> None:
        """Raise UserError if this machine cannot run the environment."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise UserError or ValueError, naming the field, if there can be no conversation about a row."""
        for name in self.needs:
            field(row, name)

    def begin(self) -> Any:
        """Return messages that follow the prompt's, such as the first state of a game, or a :class:`Ask`."""
        return ()

    def reply(self, message: Mapping[str, Any]) -> Any:
        """Answer a message of the model's.

        Args:
            message: ``role``, ``content``, and ``tool_calls`` in OpenAI's form where it calls tools.

        Returns:
            The messages that follow it, a :class:`Ask`, or the conversation's result, as :meth:`judge` returns it.
        """
        if calls := message.get("tool_calls"):
            return [self._called(call["id"], call["function"], call.get("problem", "")) for call in calls]
        return self.judge(message["content"])

    def _called(self, number: str, function: Mapping[str, Any], problem: str) -> Message:
        text = self.run(Call(function["name"], function["arguments"], problem))
        return {"role": "tool", "name": function["name"], "tool_call_id": number, "content": text}

    def cut(self, message: Mapping[str, Any]) -> Any:
        """Judge a conversation that ends at a limit of tokens or turns.

        Args:
            message: the model's last one, as in :meth:`reply`; it may lack its end.

        Returns:
            As :meth:`judge`, which gets the message's text unless a subclass overrides this.
        """
        return self.judge(message["content"])

    def judge(self, answer: str) -> Any:
        """Judge the message that ends the conversation.

        Returns:
            A :class:`~rocm_ext.verifiers.Result`; or a reward from 0 to 1, which is CORRECT if it is 1.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither judge nor reply")

    def run(self, call: Call) -> str:
        """Return what a call of a tool gives, as text."""
        return tools_of(self)(call)


def tools_of(environment: Environment) -> Tools:
    """Return an environment's tools.

    Raises:
        UserError: the model could not read one; see :class:`Tools`.
    """
    return Tools([getattr(environment, tool) if isinstance(tool, str) else tool for tool in environment.tools])


def now(value: Any) -> Any:
    """Return ``value``, or what it becomes if it can be awaited."""

    async def awaited() -> Any:
        return await value

    return _loop().run_until_complete(awaited()) if inspect.isawaitable(value) else value


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the process's one event loop, on which connections live from one await to the next."""
    return asyncio.new_event_loop()


def checked_reply(environment: Environment, value: Any) -> Reply:
    """Return what a method of an environment returned, checked.

    Raises:
        ValueError: it is neither messages nor a result.
    """
    name = type(environment).__name__
    if isinstance(value, (Ask, Result)):
        return value
    if isinstance(value, (bool, int, float)):
        return Result(Verdict.CORRECT if value == 1 else Verdict.WRONG, float(value))
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"{name} returned {type(value).__name__}; expected messages, a text, a Result or a reward")
    roles = {message.get("role") for message in value} - {"user", "tool", "system"}
    if roles or not all(isinstance(message.get("content"), str) for message in value):
        raise ValueError(f"{name} returned a message of {roles or 'no text'}; expected role user or tool, and content")
    return [dict(message) for message in value]


def check_class(component: Any) -> None:
    """Check that a component is an environment.

    Raises:
        UserError: it is not.
    """
    if not (inspect.isclass(component) and issubclass(component, Environment)):
        name = getattr(component, "__name__", component)
        raise UserError(f"environment {name} is not derived from rocm_ext.environments.Environment")
