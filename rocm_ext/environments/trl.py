"""Environments of TRL's trainers: classes for ``GRPOTrainer(environment_factory=...)``."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import import_component
from rocm_ext.base.types import Message, Row
from rocm_ext.environments.base import Environment, now
from rocm_ext.verifiers.base import Result
from rocm_ext.verifiers.reward_function import RewardFunction

_OWN = ("reset", "get_reward")  # TRL calls these; all other public methods are tools


class Trl(Environment):
    """A conversation with an object that TRL's ``environment_factory`` makes, as in TRL 1.16.

    Its public methods are the model's tools, but for two: ``reset(**row)`` begins a conversation and may return a text
    that follows the prompt, and ``get_reward()`` rewards it. Without ``get_reward``, a reward function does; it gets
    ``environments``, and as ``completions`` all messages after the prompt. The first message without calls ends the
    conversation. Methods and functions may be asynchronous.

    Differences from TRL: ``reset``'s text is a separate user's message, while TRL appends it to the prompt's last
    message. A tool's result is JSON unless it is text. An object serves one conversation. One class serves all rows.

    Args:
        row: the prompt's row. ``reset`` and the reward function get ``prompt`` as messages.
        factory: a function that makes the object, such as the class ``my_module.MyEnvironment``.
        reward: a reward function in TRL's signature, for objects without ``get_reward``.
        threshold, scale: as for :class:`rocm_ext.verifiers.RewardFunction`.
    """

    def __init__(
        self,
        row: Row,
        factory: str,
        reward: str | None = None,
        threshold: float = 1.0,
        scale: Sequence[float] = (0.0, 1.0),
    ) -> None:
        super().__init__(row)
        self.environment = environment = import_component(factory)()
        kind = type(environment)
        methods = [
            name
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        ]
        if "reset" not in methods:
            raise UserError(
                f"environment: {factory} makes a {kind.__name__} without a method reset"
            )
        if ("get_reward" in methods) == (reward is not None):
            raise UserError(
                f"environment: {factory} needs either a method get_reward or the argument reward"
            )
        self.tools = [_at_once(getattr(environment, name)) for name in methods if name not in _OWN]
        if reward is None:
            function = lambda **_: [now(environment.get_reward())]  # noqa: E731
        else:
            function = functools.partial(import_component(reward), environments=[environment])
        self._reward = RewardFunction(function, threshold, scale, conversational=True)
        needs = [*self._reward.needs]
        for name, parameter in inspect.signature(environment.reset).parameters.items():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and name not in needs:
                needs.append(name)
        self.needs = tuple(needs)
        self._turns: list[Message] = []  # all messages after the prompt

    def begin(self) -> Any:
        prompt = [dict(message) for message in self._reward.prompt(self.row)]
        row = {**self.row, "prompt": prompt}
        text = now(self.environment.reset(**row))
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"reset returned {type(text).__name__}; expected a text or None")
        opening = [{"role": "user", "content": text}] if text else []
        self.row = {**self.row, "messages": prompt + opening}
        return opening

    def reply(self, message: Message) -> Any:
        self._turns.append(dict(message))
        if not message.get("tool_calls"):
            return self._judged()
        results = super().reply(message)
        self._turns += results
        return results

    def cut(self, message: Message) -> Result:
        answers = [turn for turn in self._turns if turn["role"] == "assistant"]
        # else the tools' results after it reached the limit
        if not answers or answers[-1] != message:
            self._turns.append(dict(message))
        return self._judged()

    def _judged(self) -> Result:
        return self._reward.judge_batch([self._turns], [self.row])[0]


def _at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits for an asynchronous one; a synchronous one unchanged."""
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        return now(function(*args, **kwargs))

    return at_once
