"""A server of OpenEnv's own package with a guessing game: ``python -m tests.kit.openenv_server PORT SESSIONS``."""

import sys

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment):
    """Guess the seed: 0.25 for each hint that was asked for, at most two, and 0.5 for the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = self.turns = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.turns = seed or 0, 0
        return Hint(text="Guess a number.")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        if action.number == 13:
            raise RuntimeError("the game broke")
        if action.number == self.number:
            return Hint(text="Right.", reward=0.5, done=True)
        return Hint(
            text="higher" if action.number < self.number else "lower",
            reward=0.25 * (self.turns < 3),
        )

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    import uvicorn

    app = create_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
