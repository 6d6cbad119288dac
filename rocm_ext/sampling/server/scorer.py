"""Log-probs of given tokens from a server: vLLM and SGLang return them for a prompt."""

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from rocm_ext.base import openai_http as http
from rocm_ext.base.errors import UserError
from rocm_ext.base.heartbeat import RETRY, beat
from rocm_ext.base.types import Json
from rocm_ext.sampling.server.wire import base_models, dicts

_AT_ONCE = 16  # requests; a server computes all tokens of a prompt at once
_SECONDS = 600.0  # limit of a request
_TRIES = 8  # the pauses between them add up to a minute


class Scorer:
    """Asks a server for the log-probs of a text's tokens, at temperature 1.

    A request has the text's token ids as the prompt; ``echo`` and ``logprobs`` return the prompt's log-probs.

    Args:
        url: the server's address, ``http://host:8000`` or ``http://host:8000/v1``.
        model: the server's name of the model, unless it lists only one.
        api_key_env: name of the environment variable with the API key, if the server needs one.

    Raises:
        UserError: an argument is invalid, the server cannot be reached, or it does not serve the model.
    """

    def __init__(self, url: str, model: str | None = None, api_key_env: str | None = None) -> None:
        (self.url,) = http.checked_urls([url])
        self._headers = http.authorization(api_key_env)
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        async def ask() -> Any:
            async with http.new_client(self._headers) as client:
                return await http.exchange(
                    client, "GET", f"{self.url}/v1/models", http.CHECK_TIMEOUT
                )

        try:
            names = base_models(http.json_object(self.url, asyncio.run(ask())))
        except (http.RequestError, http.Transient) as error:
            raise UserError(
                f"{self.url} cannot be reached: {http.in_words(error)}; is it running?", RETRY
            ) from error
        if len(names) != 1:
            raise UserError(
                f"{self.url} serves {', '.join(names) or 'no model'}; set teacher_model to one"
            )
        return names[0]

    def logprobs(self, texts: Iterable[Iterable[int]]) -> list[np.ndarray]:
        """Return the log-probs of every text's tokens but the first, [s - 1] fp32.

        Raises:
            UserError: the server refuses a request, fails for longer than a minute, or returns no such log-probs.
        """

        async def all_of_them() -> list[np.ndarray]:
            room = asyncio.Semaphore(_AT_ONCE)
            async with http.new_client(self._headers) as client:
                return await asyncio.gather(*(self._ask(client, room, text) for text in texts))

        return asyncio.run(all_of_them())

    async def _ask(self, client, room: asyncio.Semaphore, text: Iterable[int]) -> np.ndarray:
        prompt = [int(token) for token in text]
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0,
                "echo": True, "logprobs": 1}  # fmt: skip
        async with room:
            answer = await insist(client, f"{self.url}/v1/completions", body)
        return self._read(answer, len(prompt))

    def _read(self, answer: Json, tokens: int) -> np.ndarray:
        values = None
        for choice in dicts(answer.get("choices"))[:1]:
            logprobs = choice.get("logprobs") or {}
            values = logprobs.get("token_logprobs")
        values = values[1:tokens] if isinstance(values, list) else []
        numbers = [
            value for value in values if isinstance(value, int | float) and math.isfinite(value)
        ]
        if len(numbers) < tokens - 1:
            raise UserError(
                f"{self.url} does not return the log-probs of a prompt of {tokens} tokens (echo and logprobs in "
                "/v1/completions); vLLM and SGLang do"
            )
        return np.array(numbers, dtype=np.float32)


async def insist(client: Any, url: str, body: Json) -> Json:
    """Post ``body`` and return the answer's JSON object; repeat it while the server is busy or restarts.

    Raises:
        UserError: the server refuses the request, or fails for longer than a minute.
    """
    failures = 0
    while True:
        try:
            answer = await http.exchange(client, "POST", url, _SECONDS, body)
            beat()
            return http.json_object(url, answer)
        except (http.RequestError, http.Transient) as error:
            failures += 1
            if failures == _TRIES:
                message = f"{url}: {http.in_words(error)}, {_TRIES} times"
                raise UserError(message, RETRY) from error
            await asyncio.sleep(http.pause_after(error, failures - 1))
