"""What a user of the game in openenv_server writes: a client of its own, and functions from and to text."""

import re
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult


class GameClient(EnvClient):
    """Takes numbers as actions, and gives texts as observations."""

    def _step_payload(self, action: int) -> dict[str, Any]:
        return {"number": action}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult:
        text = payload["observation"]["text"]
        return StepResult(text, payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


def last_number(text: str) -> int:
    """Find the guess in a message."""
    if not (found := re.findall(r"\d+", text)):
        raise ValueError("there is no number in it")
    return int(found[-1])


def shout(observation: str) -> str:
    """Write an observation in capitals."""
    return observation.upper()
