"""Write requests in OpenAI's protocol, and parse the answers.

vLLM, SGLang, llama.cpp and ``transformers serve`` extend the protocol differently and accept different parts of it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.base.openai_http import Transient, start_of
from rocm_ext.base.types import Json, Message
from rocm_ext.data.render import render_conversation
from rocm_ext.sampling.engine import Completion, Request, Sampling

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DIALECTS = ("extended", "transformers", "plain")  # see _sampling_fields
_LEAST = -9999.0  # a recorded log-prob; of probability 0, too
_HIGHEST = 0.1  # rounding may put a sure token's log-prob a little above 0
_LETTERS = 1000  # characters of a token, more than in any vocabulary
# ids per sampled id if the text is encoded again: bytes that are not text become several
_SPLIT = 4
PROBES = (Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_p=0.01))
_CLEAR = 0.1  # nats; bf16 and other batches change a log-prob by about 0.01
# llama.cpp's seeds have 32 bits, and 2**32 - 1 means a random seed; the others take 64 bits
SEED_BITS = 31


@dataclass
class Server:
    """A server, as :meth:`OpenAIEngine.check` knows it.

    Attributes:
        url: the address without ``/v1``.
        model: the server's name of the model.
        dialect: one of :data:`DIALECTS`; empty before the check.
    """

    url: str
    model: str = ""
    dialect: str = ""


class EndpointFormat:
    """Converts requests to an endpoint's JSON, and its answers to completions.

    Args:
        tokenizer: the run's torchtune model tokenizer.
        endpoint: ``completions`` or ``chat``.

    Attributes:
        vocabulary: number of the model's token ids, which a caller may know.
        path: the endpoint's path on a server.
        exact_tokens, has_logprobs: see :class:`rocm_ext.sampling.server.openai.OpenAIEngine`.
    """

    vocabulary = 2**31

    def __init__(self, tokenizer, endpoint: str) -> None:
        self.tokenizer = tokenizer
        self.endpoint = endpoint
        self.path = ENDPOINTS[endpoint]
        self.exact_tokens = self.has_logprobs = False
        self._end_of_turn = _end_of_turn(tokenizer)
        self._told: set[str] = set()

    def body(self, server: Server, model: str, request: Request, sampling: Sampling) -> Json:
        """Return the JSON that asks ``server`` for one answer; refuse missing messages and unsupported settings."""
        body = {"model": model, "seed": request.seed & (1 << SEED_BITS) - 1}
        if self.endpoint == "chat":
            if not request.messages:
                raise UserError(
                    f"prompt {request.prompt_id} has no messages; endpoint: chat needs them"
                )
            body["messages"] = [sent(message) for message in request.messages]
            body |= {"logprobs": True, "top_logprobs": 1}
            if request.tools:
                body["tools"] = [dict(tool) for tool in request.tools]
                body["tool_choice"] = "none"  # the answer is the model's text, with unparsed calls
            args = getattr(self.tokenizer, "template_args", {})
            if args and server.dialect == "extended":
                body["chat_template_kwargs"] = dict(args)
        else:
            body |= {"prompt": list(request.tokens), "logprobs": 1}
        stops = list(self.tokenizer.stop_tokens)
        return body | _sampling_fields(server, request.limited(sampling), stops)

    def completion(
        self, url: str, answer: Json, request: Request, sampling: Sampling
    ) -> Completion:
        """Parse ``answer`` into a :class:`Completion`.

        It refuses values that training cannot use, before they are recorded.

        Raises:
            UserError: ``answer`` is not a valid answer to the request.
            Transient: the server aborted the request.
        """

        def check(fits: bool, problem: str) -> None:
            if not fits:
                raise UserError(f"{url} answers with {problem}: {start_of(json.dumps(answer))}")

        choice, text, reason = _choice(url, answer, self.endpoint, check)
        sampling = request.limited(sampling)
        asked = f"to a request for {sampling.max_new_tokens}"
        most = sampling.max_new_tokens + 1  # some servers do not count the stop token
        check(len(text) <= _LETTERS * most, f"{len(text)} characters {asked} tokens")
        prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if isinstance(prompt, list) and prompt != list(request.tokens):
            self._tell_once(
                f"{url} renders prompts differently from the run: its chat template differs"
            )
        text, cut = sampling.until_stop(text)  # transformers keeps the stop string
        by_token = reason == "stop" and not cut and not isinstance(choice.get("stop_reason"), str)
        tokens = _token_ids(choice, answer.get("usage"))
        for token in tokens or ():
            is_id = type(token) is int and 0 <= token < self.vocabulary
            check(is_id, f"the token id {_start(token)}, not an id from 0 to {self.vocabulary - 1}")
        logprobs = []
        for value in _logprobs(choice):
            check(_is_logprob(value), f"the log-prob {_start(value)}, not a number up to 0")
            logprobs.append(float(max(value, _LEAST)))
        if tokens is None:
            self.exact_tokens = False
            self._tell_once(
                f"{url} sends no token ids; re-encoding the text, which may give other ids"
            )
            most = _SPLIT * most
            tokens = self.tokenizer.encode(text, add_bos=False, add_eos=False)
            if by_token:
                tokens.append(self._end_of_turn)
            logprobs = []
        check(len(tokens) <= most, f"{len(tokens)} tokens {asked}")
        if not logprobs or len(logprobs) != len(tokens):
            self.has_logprobs = False
            self._tell_once(f"{url} sends no log-probabilities of the sampled tokens")
            logprobs = []
        return Completion(request, list(tokens), logprobs, text, "stop" if cut else reason)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)


# ---- requests


def sent(message: Message) -> Message:
    """Return a message in OpenAI's form: the arguments of tool calls are JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = dict(call.get("function", call))
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({"id": f"call_{number}", "type": "function", **call, "function": function})
    return {**message, "tool_calls": calls}


def _sampling_fields(server: Server, sampling: Sampling, stops: list[int]) -> Json:
    """Return the sampling settings in the server's dialect; refuse settings that it does not support.

    - extended: vLLM, SGLang and llama.cpp know these fields or ignore them.
    - transformers: ``transformers serve`` refuses unknown fields but accepts a generation config.
    - plain: OpenAI's fields.
    """
    fields: Json = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
    }
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    min_p = sampling.min_p or 0.0
    if server.dialect == "extended":
        fields |= {"top_k": sampling.top_k or -1, "min_p": min_p, "repetition_penalty": 1.0}
        return fields | {"stop_token_ids": stops, "return_token_ids": True}
    if server.dialect == "transformers":
        config = {
            "do_sample": sampling.temperature > 0,
            "top_k": sampling.top_k or 0,
            "min_p": min_p,
            "repetition_penalty": 1.0,
            "eos_token_id": stops,
        }
        return fields | {"generation_config": json.dumps(config)}
    unsupported = [name for name in ("top_k", "min_p") if getattr(sampling, name) is not None]
    if unsupported:
        raise UserError(
            f"{server.url} does not support {' or '.join(unsupported)}; set them to null"
        )
    return fields


def _end_of_turn(tokenizer) -> int:
    """Return the token that ends the assistant's turn in training."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    tokens, _ = render_conversation(tokenizer, turns)
    for token in reversed(tokens):
        if token in tokenizer.stop_tokens:
            return token
    return tokenizer.stop_tokens[0]


# ---- answers


def base_models(answer: Json) -> list[str]:
    """Return the models in a server's list, without adapters: vLLM lists them, with their parent."""
    cards = answer.get("data")
    names = []
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict) and "id" in card and not card.get("parent"):
            names.append(str(card["id"]))
    return names


def _choice(
    url: str, answer: Json, endpoint: str, check: Callable[[bool, str], None]
) -> tuple[Json, str, str]:
    """Return the only choice of an answer, its text and its finish reason."""
    choices = answer.get("choices")
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    check(isinstance(choice, dict), "no choices")
    source = choice.get("message") if endpoint == "chat" else choice
    check(isinstance(source, dict), "no message")
    if source.get("reasoning_content") or source.get("reasoning"):
        raise UserError(
            f"{url} splits the reasoning from the answer; start the server without a reasoning parser"
        )
    text = source.get("content" if endpoint == "chat" else "text")
    check(isinstance(text, str), "no text")
    encoded = text.encode(errors="replace").decode()  # JSON can contain half a surrogate pair
    check(encoded == text, "text that is not valid Unicode")
    reason = choice.get("finish_reason")
    if reason == "abort":  # vLLM while it shuts down
        raise Transient("the server aborted the request")
    check(reason in ("stop", "length"), f"the finish_reason {reason!r}, not stop or length")
    return choice, text, reason


def _token_ids(choice: Json, usage) -> Sequence[Any] | None:
    """Return the sampled ids from ``token_ids`` (vLLM, SGLang) or llama.cpp's log-probs, or None without either."""
    ids = choice.get("token_ids")
    if ids is None:
        ids = [entry.get("id") for entry in _entries(choice)]
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        # llama.cpp omits tokens that end within a character, and a stop string's tokens.
        if count != len(ids) or None in ids:
            return None
    if not isinstance(ids, list):
        return [[ids]]  # no id
    return ids or None


def _logprobs(choice: Json) -> Sequence[Any]:
    """Return one log-prob per token, or none. llama.cpp uses the chat's form for both endpoints."""
    values = _part_of_logprobs(choice, "token_logprobs")
    if values is None:
        values = [entry.get("logprob") for entry in _entries(choice)]
    if not isinstance(values, list):
        return [[values]]  # no log-prob
    return [] if None in values else values


def _is_logprob(value) -> bool:
    """For probability 0 vLLM sends -9999, llama.cpp the least number of 32 bits, others -Infinity."""
    return type(value) in (int, float) and value <= _HIGHEST  # NaN is not


def top_logprob(answer: Json) -> float | None:
    """Return the log-prob of the most probable first token of an answer, or None if it has none."""
    choice = answer["choices"][0]
    tops = _part_of_logprobs(choice, "top_logprobs")
    values: list[Any] = []
    if isinstance(tops, list) and tops and isinstance(tops[0], dict):
        values += tops[0].values()
    else:
        for entry in _entries(choice)[:1]:
            values += [top.get("logprob") for top in dicts(entry.get("top_logprobs"))]
    numbers = [float(max(value, _LEAST)) for value in values if _is_logprob(value)]
    return max(numbers, default=None)


def _entries(choice: Json) -> list[Json]:
    return dicts(_part_of_logprobs(choice, "content"))


def _part_of_logprobs(choice: Json, key: str) -> Any:
    logprobs = choice.get("logprobs")
    return logprobs.get(key) if isinstance(logprobs, dict) else None


def dicts(value) -> list[Json]:
    """Return ``value`` if it is a list of objects, else []."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return value
    return []


def _start(value) -> str:
    return start_of(json.dumps(value), 30)


# ---- the distribution of a server's log-probs


def check_logprobs(url: str, top: Callable[[Sampling], float | None], sampling: Sampling) -> None:
    """Check that a server returns the log-probs that ``sampling`` asks for.

    vLLM and llama.cpp return log-probs at temperature 1 without truncation. With ``--logprobs-mode
    processed_logprobs`` vLLM's belong to the distribution that it samples from. SGLang divides by the temperature but
    does not truncate, unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set. The log-prob of the most probable token shows
    the difference: ``top`` asks the server for one token, always with the same prompt, and returns it, or None.
    """
    asked = sampling.logprobs_temperature
    temperature = sampling.temperature
    truncated = (
        sampling.top_k is not None or sampling.top_p not in (None, 1) or sampling.min_p is not None
    )
    if temperature == asked == 1 and not truncated:
        return
    if asked not in (1, temperature):
        raise UserError(
            f"{url} cannot return log-probs of temperature {asked:g} for samples of {temperature:g}"
        )
    plain, sharper, cut = map(top, PROBES)
    problem = ""
    if plain is None or sharper is None or cut is None or plain > -_CLEAR:
        problem = (
            "does not show of which temperature its log-probs are; set temperature to 1, and top_k, top_p and min_p to "
            "null"
        )
    elif truncated and cut - plain > _CLEAR:
        problem = (
            "returns log-probs after truncation, as vLLM does with --logprobs-mode processed_logprobs; set top_k, "
            "top_p and min_p to null"
        )
    elif temperature != 1 and asked == 1 and sharper - plain > _CLEAR:
        problem = (
            "returns log-probs of the sampling temperature instead of temperature 1; start SGLang with "
            "SGLANG_RETURN_ORIGINAL_LOGPROB=1 and vLLM with --logprobs-mode raw_logprobs, or set temperature to 1"
        )
    elif asked != 1 and sharper - plain <= _CLEAR:
        problem = (
            f"returns log-probs of temperature 1 instead of temperature {asked:g}; start vLLM with "
            "--logprobs-mode processed_logprobs, or set temperature to 1"
        )
    if problem:
        raise UserError(f"{url} {problem}")
