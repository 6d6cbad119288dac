"""Environments on servers of OpenEnv."""

import json
import re
from collections.abc import Sequence
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.importing import import_component
from rocm_ext.base.types import Message, Row
from rocm_ext.environments.base import Environment
from rocm_ext.verifiers.base import Result
from rocm_ext.verifiers.reward_function import checked_scale, scaled

# the server's error for an unreadable action
_REFUSED = re.compile(r"\(code: (VALIDATION_ERROR|INVALID_JSON)\)")


class OpenEnv(Environment):
    """A conversation with an environment on an OpenEnv server, as of openenv 0.10.

    The model's messages are actions, and observations are the user's messages. The environment ends the conversation by
    ``done``; the return, the sum of its rewards, is the result. The model gets an error message for an action that the
    server cannot read. Any other fault of the server is an ERROR.

    The server must take as many sessions as there are conversations at a time: ``max_concurrent_envs`` of its
    ``create_app``.

    Args:
        row: the prompt's row.
        url: the server's address, such as ``http://localhost:8000``.
        action: the action's field that takes the message's text, such as ``message``; or, with a dot, your function
            from the text to an action. By default the text is the action as JSON.
        observation: the observation's field with its text; or, with a dot, your function from the observation to a
            text. By default it is shown as JSON.
        reset: columns of the row that the environment's ``reset`` gets, such as ``[seed]``.
        client: the environment's client class; it needs an ``action`` function. Default: openenv's generic one.
        total: ``sum`` of the rewards, or the ``last`` one.
        threshold, scale: as for :class:`rocm_ext.verifiers.RewardFunction`.
        timeout: seconds for one answer of the server.
    """

    def __init__(
        self,
        row: Row,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        reset: Sequence[str] = (),
        client: str | None = None,
        total: str = "sum",
        threshold: float = 1.0,
        scale: Sequence[float] = (0.0, 1.0),
        timeout: float = 60.0,
    ) -> None:
        super().__init__(row)
        try:
            from openenv.core import GenericEnvClient
        except ImportError as problem:
            raise UserError(
                f"environment: {one_line(problem)}; `pip install 'torchtune-rocm[openenv]'`"
            ) from problem
        if total not in ("sum", "last"):
            raise UserError(f"environment: total is {total!r}; expected sum or last")
        self.scale, self.threshold = checked_scale("OpenEnv", scale, threshold)
        self.total = total
        self.needs = tuple(reset)
        self._action = _reader(action)
        self._observation = _reader(observation)
        made = import_component(client) if client else GenericEnvClient
        self._client = made(base_url=url, message_timeout_s=timeout).sync()
        self._rewards: list[float] = []

    def begin(self) -> Any:
        self._client.connect()
        columns = {name: self.row[name] for name in self.needs}
        return self._seen(self._client.reset(**columns))

    def reply(self, message: Message) -> Any:
        text = message["content"]
        try:
            if self._action is None:
                action = json.loads(text)
            elif callable(self._action):
                action = self._action(text)
            else:
                action = {self._action: text}
        except ValueError as problem:  # pydantic's, too
            return f"error: the action cannot be read: {one_line(problem)}"
        if self._action is None and not isinstance(action, dict):
            return f"error: an action is a JSON object, found {type(action).__name__}"
        try:
            return self._seen(self._client.step(action))
        except RuntimeError as problem:
            if _REFUSED.search(str(problem)):
                return f"error: {one_line(problem)}"
            raise

    def cut(self, message: Message) -> Result:
        return self._result()

    def _seen(self, step: Any) -> Any:
        """Record a step's reward, and return its observation or the result."""
        if step.reward is not None:
            self._rewards.append(float(step.reward))
        if step.done:
            return self._result()
        observation = step.observation
        if callable(self._observation):
            return self._observation(observation)
        if not isinstance(observation, dict):
            observation = observation.model_dump()
        if self._observation is not None:
            observation = observation[self._observation]
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, ensure_ascii=False, default=str)

    def _result(self) -> Result:
        rewards = self._rewards or [0.0]
        value = sum(rewards) if self.total == "sum" else rewards[-1]
        return scaled(value, self.scale, self.threshold, "the environment")


def _reader(name: str | None) -> Any:
    """Return a function by its dotted name; a field's name, or None, as it is."""
    return import_component(name) if name and "." in name else name
