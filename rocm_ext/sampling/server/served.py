"""What a server answers: the token ids of prompts, and log-probs of given tokens with its adapter on and off."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocm_ext.base import openai_http as http
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import Progress
from rocm_ext.base.types import Json
from rocm_ext.data.template import Tools, Turns
from rocm_ext.sampling.server.scorer import Scorer, insist
from rocm_ext.sampling.server.wire import dicts, sent

_CERTAIN = 1e6  # added to a logit, so that its token is sampled
Ids = Sequence[Sequence[int]]  # by text


def chat(turns: Turns, tools: Tools) -> Json:
    """Return the keys of a chat request that decide its prompt."""
    messages = [sent(turn.message()) for turn in turns]
    return {"messages": messages, "tools": list(tools)} if tools else {"messages": messages}


@dataclass
class OpenAI:
    """A server with vLLM's protocol; in requests to the adapter's base model, the adapter is off.

    Args:
        url: its address.
        key: name of the environment variable with the API key, or None.
        name: the adapter or merged model; None: the only adapter, else the only model.
        cards: its list of models.

    Attributes:
        has_off: whether it also answers without the adapter.
    """

    url: str
    key: str | None
    name: str | None
    cards: Iterable[Json]

    def __post_init__(self) -> None:
        parents = {card["id"]: card.get("parent") for card in self.cards}
        adapters = [model for model, parent in parents.items() if parent]
        self._model = self._only(adapters or list(parents), parents)
        self._base = parents[self._model]
        self.has_off = bool(self._base)

    def prompts(self, bodies: Sequence[Json]) -> list[list[int]]:
        """Return the token ids that the server makes of prompts: bodies of :func:`chat`, or ``{"prompt": text}``."""
        return self._tokenised([{"model": self._model, **body} for body in bodies])

    def logprobs(self, texts: Ids, targets: Ids, adapted: bool = True) -> np.ndarray:
        """Return log-probs at temperature 1.

        Args:
            texts: token ids.
            targets: positions in each text of the tokens whose log-probs to return.
            adapted: whether the adapter is on.

        Returns:
            [n], of all targets in order; NaN for a token that the server does not tell.

        Raises:
            UserError: the server returns no such log-probs.
        """
        model = self._model if adapted else self._base
        by_text = Scorer(self.url, model, self.key).logprobs(texts)
        told = []
        for values, positions in zip(by_text, targets, strict=True):
            told.append(values[np.array(positions) - 1])  # it leaves out the first token
        return np.concatenate(told)

    def _only(self, usual: Sequence[str], known: Collection[str]) -> str:
        """Return the name if it is known, without one the only ``usual`` one."""
        chosen = list(usual) if self.name is None else [self.name]
        if len(chosen) != 1 or chosen[0] not in known:
            names = ", ".join(known) or "no adapter"
            raise UserError(f"{self.url} serves {names}; name one: --served")
        return chosen[0]

    def _tokenised(self, bodies: Sequence[Json]) -> list[list[int]]:
        tokens = []
        for answer in self._ask("/tokenize", bodies):
            if not isinstance(answer.get("tokens"), list):
                start = http.start_of(str(answer))
                raise UserError(f"{self.url} returns no tokens of a prompt: {start}")
            tokens.append(answer["tokens"])
        return tokens

    def _ask(self, path: str, bodies: Sequence[Json]) -> list[Json]:
        """Post one body after the other, and return the answers."""
        headers = http.authorization(self.key)

        async def all_of_them() -> list[Json]:
            answers = []
            progress = Progress(len(bodies), 0, True, "request", brief=True)
            async with http.new_client(headers) as client:
                for body in bodies:
                    answers.append(await insist(client, self.url + path, body))
                    progress.update("")
            progress.close()
            return answers

        return asyncio.run(all_of_them())


class LlamaCpp(OpenAI):
    """llama.cpp's server; in requests that set all adapters' scales to 0, they are off.

    ``name`` is an adapter's id; None: the adapters and scales that the server was started with.
    """

    def __post_init__(self) -> None:
        adapters = _get(self.url, "/lora-adapters", self.key, list)
        scales = {str(adapter["id"]): adapter.get("scale") for adapter in adapters}
        self.has_off = bool(scales)
        self._off = [{"id": int(number), "scale": 0.0} for number in scales]
        self._on: list[Json] = []
        if self.name is not None:
            chosen = self._only([], scales)
            # clients set the scale where the server was started with 0
            scale = scales[chosen] or 1.0
            self._on = [{"id": int(chosen), "scale": scale}]

    def prompts(self, bodies: Sequence[Json]) -> list[list[int]]:
        """Render and tokenise as its endpoints do: with the model's BOS, and special tokens in the text."""
        chats = [body for body in bodies if "messages" in body]
        rendered = self._ask("/apply-template", chats) if chats else bodies
        flags = {"add_special": True, "parse_special": True}
        return self._tokenised([{"content": body["prompt"], **flags} for body in rendered])

    def logprobs(self, texts: Ids, targets: Ids, adapted: bool = True) -> np.ndarray:
        """Sample a token behind each beginning of a text, forced by a bias, and read its log-prob before the bias.

        The server does not tell tokens that end within a character.
        """
        adapters = self._on if adapted else self._off
        bodies = []
        for text, positions in zip(texts, targets, strict=True):
            bodies += [_forced(text, at, adapters) for at in positions]
        answers = self._ask("/completion", bodies)
        told = np.array(list(map(_told, bodies, answers)))
        if np.isnan(told).all():
            raise UserError(
                f"{self.url} returns no log-probs of given tokens (n_probs and logit_bias in /completion)"
            )
        return told


def open_served(url: str, name: str | None = None, api_key_env: str | None = None) -> OpenAI:
    """Find out what a server serves.

    Args:
        url: the server's address, with or without ``/v1``.
        name: vLLM's name of the adapter or model, or llama.cpp's id of the adapter.
        api_key_env: name of the environment variable with the API key, if the server needs one.

    Raises:
        UserError: the server cannot be reached, refuses the key, or serves nothing of this name.
    """
    (address,) = http.checked_urls([url])
    answer = _get(address, "/v1/models", api_key_env, dict)
    cards = dicts(answer.get("data"))
    is_llama_cpp = any(card.get("owned_by") == "llamacpp" for card in cards)
    kind = LlamaCpp if is_llama_cpp else OpenAI
    return kind(address, api_key_env, name, cards)


def _get(url: str, path: str, key: str | None, kind: type) -> Any:
    """Return the JSON at a path of a server, a ``kind`` of value."""
    headers = http.authorization(key)

    async def answer() -> Any:
        async with http.new_client(headers) as client:
            return await http.exchange(client, "GET", url + path, http.CHECK_TIMEOUT)

    try:
        return http.json_content(url, asyncio.run(answer()), kind)
    except (http.RequestError, http.Transient) as error:
        message = f"{url} cannot be reached: {http.in_words(error)}; is it running?"
        raise UserError(message) from error


def _forced(text: Sequence[int], at: int, adapters: Sequence[Json]) -> Json:
    """Return llama.cpp's request for a token behind ``text[:at]``, which will be ``text[at]``."""
    return {
        "prompt": list(text[:at]),
        "n_predict": 1,
        "n_probs": 1,
        "temperature": 0,
        "logit_bias": [[text[at], _CERTAIN]],
        "cache_prompt": True,
        "lora": adapters,
    }


def _told(body: Json, answer: Json) -> float:
    """Return the log-prob of the token that the request has forced; NaN if the answer has none."""
    ((wanted, _),) = body["logit_bias"]
    for entry in dicts(answer.get("completion_probabilities")):
        if entry.get("id") == wanted:
            return entry["logprob"]
    return np.nan
