"""A language model as the judge, on a server that speaks OpenAI's protocol."""

import asyncio
import json
import re
import string
import time
from collections.abc import Sequence
from typing import Any

from rocm_ext.base import openai_http as http
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.types import Json, Row
from rocm_ext.verifiers.base import Result, Verifier, check_time, error, field, short
from rocm_ext.verifiers.reward_function import checked_scale, scaled

SCORE = re.compile(
    r"[*_]{0,2}score[*_]{0,2}\s*:\s*[*_]{0,2}(-?\d{1,15}(?:\.\d{1,15})?)[*_]{0,2}\.?", re.I
)
FENCED = re.compile(r"```(?:json)?\n([^`]*)```")


class LLMJudge(Verifier):
    """Asks a language model for a score of the completion.

    ``template`` is the message to the model. ``{completion}`` and the names of row fields in braces stand for their
    values; ``{{`` and ``}}`` are braces. The completion stands in a fence that is longer than any in it, so that it
    cannot end the fence. It can still try to talk the judge into a good score: a score is an opinion.

    The reply must be a JSON object with a number ``score``, or end with a line like ``score: 7``. Any other reply is an
    ERROR, and so is an unreachable server: neither is ever the reward 0.

    Args:
        base_url: the server's address, such as ``http://localhost:8000/v1``.
        model: the server's name of the model.
        template: see above.
        api_key_env: name of the environment variable with the API key; None: no key.
        scale: the scores that become the rewards 0 and 1.
        threshold: reward, in [0, 1], from which the verdict is CORRECT.
        timeout: seconds for one verdict with all its retries; keep it below ``verify_timeout``.
        retries: number of further requests after a lost connection or HTTP 408, 429 or 5xx, with growing pauses.
        concurrency: simultaneous requests per worker.
        max_tokens: length limit of the reply.
        options: further fields of the request, such as ``response_format``; they replace ours, and null removes one.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        template: str,
        api_key_env: str | None = None,
        scale: Sequence[float] = (0.0, 10.0),
        threshold: float = 1.0,
        timeout: float = 50.0,
        retries: int = 5,
        concurrency: int = 8,
        max_tokens: int = 1024,
        options: Json | None = None,
    ) -> None:
        self.url = http.checked_urls([base_url])[0] + "/v1/chat/completions"
        self.scale, self.threshold = checked_scale("LLMJudge", scale, threshold)
        numbers = {
            "retries": (retries, 0, 100),
            "concurrency": (concurrency, 1, 1024),
            "max_tokens": (max_tokens, 1, 10**6),
        }
        for name, (value, least, most) in numbers.items():
            if not (type(value) is int and least <= value <= most):
                raise UserError(
                    f"LLMJudge: {name} must be a whole number from {least} to {most}, found {value!r}"
                )
        check_time("LLMJudge", timeout)
        self.parts = parsed_template(template)
        self.needs = tuple(
            dict.fromkeys(name for _, name in self.parts if name not in (None, "completion"))
        )
        self.api_key_env, self.timeout, self.retries, self.batch_size = (
            api_key_env,
            timeout,
            retries,
            concurrency,
        )
        fields = {"model": model, "temperature": 0, "max_tokens": max_tokens, **(options or {})}
        self.fields = {name: value for name, value in fields.items() if value is not None}

    def check(self) -> None:
        http.authorization(self.api_key_env)

    def judge_batch(self, completions: Sequence[str], rows: Sequence[Row]) -> list[Result]:
        async def judge_all() -> list[Result]:
            headers = http.authorization(self.api_key_env)
            async with http.httpx.AsyncClient(headers=headers, timeout=self.timeout) as client:
                judging = (
                    self._judge(client, text, row)
                    for text, row in zip(completions, rows, strict=True)
                )
                return await asyncio.gather(*judging)

        return asyncio.run(judge_all())

    async def _judge(self, client: Any, completion: str, row: Row) -> Result:
        try:
            text = filled(self.parts, completion, row)
            answer = await asyncio.wait_for(self._ask(client, text), self.timeout)
            score = score_in(_reply(answer))
        except (TimeoutError, asyncio.TimeoutError):  # one class from Python 3.11 on
            return error(f"the judge has not replied within {self.timeout:g} s")
        except (UserError, ValueError) as problem:
            return error(f"the judge: {one_line(problem)}")
        except Exception as problem:  # of the connection
            return error(f"the judge: {http.in_words(problem)}")
        return scaled(score, self.scale, self.threshold, "the judge")

    async def _ask(self, client: Any, text: str) -> Json:
        """The server's answer; a failed request is repeated while there is time."""
        deadline = time.monotonic() + self.timeout
        body = {"messages": [{"role": "user", "content": text}], **self.fields}
        failures = 0
        while True:
            try:
                return http.json_object(
                    self.url, await http.exchange(client, "POST", self.url, self.timeout, body)
                )
            except (http.RequestError, http.Transient) as problem:
                pause = http.pause_after(problem, failures)
                failures += 1
                if failures > self.retries or time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)


def parsed_template(template: str) -> list[tuple[str, str | None]]:
    """The parts of a template: (text, name of the value that follows it or None)."""
    try:
        parts = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as problem:
        raise UserError(f"LLMJudge: template is no template: {problem}") from problem
    for _, name, spec, conversion in parts:
        if not (name is None or (re.fullmatch(r"\w+", name) and not spec and not conversion)):
            raise UserError(
                f"LLMJudge: template has {{{name}}}; expected the name of a field alone, like {{answer}}"
            )
    if "completion" not in (name for _, name, _, _ in parts):
        raise UserError("LLMJudge: template lacks {completion}")
    return [(text, name) for text, name, _, _ in parts]


def filled(parts: Sequence[tuple[str, str | None]], completion: str, row: Row) -> str:
    """The judge's message, with the completion in a fence; raises ValueError if the row lacks a field."""
    longest = max(map(len, re.findall("`+", completion)), default=0)
    fence = "`" * max(3, longest + 1)
    texts = []
    for text, name in parts:
        texts.append(text)
        if name == "completion":
            texts.append(f"\n{fence}\n{completion}\n{fence}\n")
        elif name is not None:
            value = field(row, name)
            texts.append(
                value
                if isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, default=str)
            )
    return "".join(texts).encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


def _reply(answer: Json) -> str:
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        text = reason = None
    if not isinstance(text, str):
        raise ValueError(f"its server answers without a message: {short(json.dumps(answer), 100)}")
    if reason == "length":
        raise ValueError("its reply was cut off; raise max_tokens")
    return text


def score_in(reply: str) -> float:
    """The score in a judge's reply, after its reasoning; raises ValueError if it has none."""
    text = reply.rpartition("</think>")[2].strip()
    if last := SCORE.fullmatch(text.rpartition("\n")[2].strip()):
        return float(last[1])
    fenced = FENCED.fullmatch(text)  # not search: a reply may quote a block from the completion
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        value = None
    score = value.get("score") if isinstance(value, dict) else None
    if not isinstance(score, (int, float)) or isinstance(score, bool):
        raise ValueError(
            f"its reply has no score as JSON or in its last line: {short(text, 150)!r}"
        )
    return float(score)
