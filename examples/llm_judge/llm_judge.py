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
from rocm_ext.verifiers import Result, Verdict, Verifier

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
        api_key_env: name of the environment variable with the API key; None without a key.
        highest: the score that becomes the reward 1; the score 0 becomes 0.
        threshold: reward from which the verdict is CORRECT.
        timeout: seconds for one verdict with all its retries; keep it below ``verify_timeout``.
        retries: number of further requests after a lost connection or HTTP 408, 429 or 5xx, with growing pauses.
        concurrency: simultaneous requests per worker.
        options: further fields of the request, such as ``response_format`` or ``max_tokens``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        template: str,
        api_key_env: str | None = None,
        highest: float = 10.0,
        threshold: float = 1.0,
        timeout: float = 50.0,
        retries: int = 5,
        concurrency: int = 8,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.url = http.checked_urls([base_url])[0] + "/v1/chat/completions"
        self.fields = {"model": model, "temperature": 0, "max_tokens": 1024, **(options or {})}
        self.template = template
        self.api_key_env = api_key_env
        self.highest = highest
        self.threshold = threshold
        self.timeout = timeout
        self.retries = retries
        self.batch_size = concurrency
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if "completion" not in names or not all(map(str.isidentifier, names)):
            raise UserError("LLMJudge: template needs {completion}, and fields as in {answer}")
        self.needs = tuple(dict.fromkeys(name for name in names if name != "completion"))

    def check(self) -> None:
        http.authorization(self.api_key_env)

    def judge_batch(self, completions: Sequence[str], rows: Sequence[Any]) -> list[Result]:
        return asyncio.run(self._judge_all(completions, rows))

    async def _judge_all(self, completions: Sequence[str], rows: Sequence[Any]) -> list[Result]:
        async with http.new_client(http.authorization(self.api_key_env)) as client:
            judging = []
            for completion, row in zip(completions, rows, strict=True):
                judging.append(self._judge(client, self.message(completion, row)))
            return await asyncio.gather(*judging)

    async def _judge(self, client: Any, message: str) -> Result:
        try:
            score = score_in(reply_in(await self._ask(client, message)))
        except (UserError, ValueError) as problem:
            return Result(Verdict.ERROR, None, f"the judge: {one_line(problem)}")
        except (http.RequestError, http.Transient) as problem:
            return Result(Verdict.ERROR, None, f"the judge: {http.in_words(problem)}")
        if not 0 <= score <= self.highest:  # NaN, too
            return Result(Verdict.ERROR, None, f"the judge gave {score:g} of {self.highest:g}")
        reward = score / self.highest
        verdict = Verdict.CORRECT if reward >= self.threshold - 1e-9 else Verdict.WRONG
        return Result(verdict, reward, f"the judge gave {score:g}")

    async def _ask(self, client: Any, message: str) -> Any:
        """Return the server's answer; a failed request is repeated while there is time."""
        deadline = time.monotonic() + self.timeout
        body = {"messages": [{"role": "user", "content": message}], **self.fields}
        failures = 0
        while True:
            try:
                seconds = deadline - time.monotonic()
                response = await http.exchange(client, "POST", self.url, seconds, body)
                return http.json_object(self.url, response)
            except (http.RequestError, http.Transient) as problem:
                pause = http.pause_after(problem, failures)
                failures += 1
                if failures > self.retries or time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)

    def message(self, completion: str, row: Any) -> str:
        """Return the message to the judge, with the completion in a fence."""
        longest = max(map(len, re.findall("`+", completion)), default=0)
        fence = "`" * max(3, longest + 1)
        values = {"completion": f"\n{fence}\n{completion}\n{fence}\n"}
        for name in self.needs:
            value = row[name]
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False, default=str)
            values[name] = value
        text = self.template.format(**values)
        return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


def reply_in(answer: Any) -> str:
    """Return the text of the model's reply; raises ValueError if it has none or was cut off."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"its server answers without a message: {json.dumps(answer)[:100]}")
    if choice.get("finish_reason") == "length":
        raise ValueError("its reply was cut off; raise max_tokens in options")
    return text


def score_in(reply: str) -> float:
    """Return the score in a judge's reply, after its reasoning; raises ValueError if it has none."""
    text = reply.rpartition("</think>")[2].strip()
    last_line = SCORE.fullmatch(text.rpartition("\n")[2].strip())
    if last_line:
        return float(last_line[1])
    fenced = FENCED.fullmatch(text)  # not search: a reply may quote a block from the completion
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        value = None
    score = value.get("score") if isinstance(value, dict) else None
    if not isinstance(score, (int, float)) or isinstance(score, bool):
        raise ValueError(f"its reply has no score as JSON or in its last line: {text[:150]!r}")
    return float(score)
