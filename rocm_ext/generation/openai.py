"""Completions from servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, ``transformers serve``.

What was sampled is decided by the server. It must use the same weights as the run, and its own numerics and
batching make its samples differ from run to run, seeds or not; a run that resumes keeps those it has recorded.
"""

import asyncio
import hashlib
import itertools
import json
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from rocm_ext.chat import render_conversation
from rocm_ext.errors import UserError, nearest, one_line
from rocm_ext.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rocm_ext.generation.base import Completion, Request, Sampling
from rocm_ext.monitor import log

try:  # the successor of httpx, of the same interface; it needs Python 3.11
    import httpx2 as httpx
except ImportError:
    try:
        import httpx  # type: ignore[no-redef]
    except ImportError as error:
        raise UserError(
            "the openai engine needs an HTTP client, httpx2 or httpx: pip install 'torchtune-rocm[openai]'"
        ) from error

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DIALECTS = ("extended", "transformers", "plain")  # see _sampling_fields
CHECK_TIMEOUT = 10.0  # seconds, to connect and for what takes no computing
ADAPTER_TIMEOUT = 300.0  # seconds, to load an adapter
BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds
SEED_BITS = 31  # llama.cpp's seeds have 32 bits, and all of them set mean a random seed; others take 64
LORA_HINT = (
    "RAFT beyond its first cycle needs a server that takes adapters while it runs: "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK, "
    "with the adapter's folder visible to it under the same path"
)


class OpenAIEngine:
    """Samples from servers that serve the run's base model; several share the load.

    Every answer is one HTTP request. All sampling settings are sent, neutral ones too: vLLM takes what is
    missing from the model's generation_config.json, llama.cpp has defaults that truncate the distribution.
    Servers that refuse what is not OpenAI's own are sent less; see :meth:`check`.

    Args:
        tokenizer: a torchtune model tokenizer, the run's.
        urls: of the servers, ``http://host:8000`` or ``http://host:8000/v1``.
        model: as the servers call it; None: the only one they list.
        endpoint: ``completions`` sends the token ids of the prompt, so that its template is exactly the
            run's. ``chat`` sends messages, to which the server applies its own template.
        api_key_env: the name of the environment variable that holds the API key, if one is needed.
        concurrency: requests under way at each url.
        timeout: seconds without an answer before a request is repeated.
        retries: of a request, after lost connections, time-outs and the answers 408, 429 and 5xx, with
            pauses that double from half a second to 30 s, or as long as the server asks for (up to
            ``timeout``). A url that still fails is left out, its share goes to the others.
        lora_name: adapters are served as ``<lora_name>-<hash of the adapter>``.
        dynamic_lora: the servers load adapters at run time, as vLLM does. Their names and paths are sent
            to ``/v1/load_lora_adapter``.

    Attributes:
        exact_tokens: all token ids so far are the server's: vLLM's from 0.10.2 on, SGLang's of July 2026 and
            later, and llama.cpp's but for answers with characters of several tokens or cut at a stop string.
            Others are made again from the text. Known after :meth:`check`, may become false later.
        has_logprobs: all log-probabilities so far are the server's. vLLM's and llama.cpp's are of the
            unmodified distribution unless told otherwise (``--logprobs-mode``, ``post_sampling_probs``);
            SGLang's are at the sampling temperature unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set.

    Raises:
        UserError: an argument is none of these.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        urls: Sequence[str],
        model: str | None = None,
        endpoint: str = "completions",
        api_key_env: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
        lora_name: str = "raft",
        dynamic_lora: bool = True,
    ) -> None:
        if endpoint not in ENDPOINTS:
            raise UserError(f"endpoint {endpoint!r} is unknown{nearest(endpoint, ENDPOINTS)}")
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if type(value) is not int or value < least:
                raise UserError(f"{name} is {value!r}; expected a whole number of at least {least}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise UserError(f"timeout is {timeout!r}; expected seconds above 0")
        if not isinstance(lora_name, str) or not re.fullmatch(r"[\w.-]+", lora_name):
            raise UserError(f"lora_name is {lora_name!r}; expected letters, digits, dots, - and _")
        self.tokenizer = tokenizer
        self.model, self.endpoint = model, endpoint
        self.concurrency, self.timeout, self.retries = concurrency, float(timeout), retries
        self.lora_name, self.dynamic_lora = lora_name, dynamic_lora
        self.exact_tokens = self.has_logprobs = False
        self.headers = _headers(api_key_env)
        self._servers = [_Server(url) for url in _checked_urls(urls)]
        self._end_of_turn = _end_of_turn(tokenizer)
        self._told: set[str] = set()

    def check(self) -> None:
        """See that every server is there, serves the model and answers a request for one token.

        The requests tell which fields a server takes, whether its answers have token ids and
        log-probabilities, and thereby ``exact_tokens`` and ``has_logprobs``.

        Raises:
            UserError: one of these fails; with the url and what the server says.
        """
        self.exact_tokens = self.has_logprobs = True
        for server in self._servers:
            self._probe(server)
        if len(names := {server.model for server in self._servers}) > 1:
            raise UserError(f"the urls serve different models: {', '.join(sorted(names))}; name one in model")

    @contextmanager
    def session(self, adapter: Path | None) -> Iterator["OpenAISession"]:
        """Ready to sample; an adapter is loaded by all servers and unloaded at the end.

        Raises:
            UserError: a server cannot be reached or does not take the adapter.
        """
        if any(not server.dialect for server in self._servers):
            self.check()
        with ExitStack() as stack:
            if adapter is None:
                yield OpenAISession(self, [(server, server.model) for server in self._servers])
            else:
                name = _adapter_name(self.lora_name, adapter)
                servers = self._load(name, adapter, stack)
                yield OpenAISession(self, [(server, name) for server in servers])

    def tell_once(self, text: str) -> None:
        """A warning, unless it was given before."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    # ---- what a server offers

    def _probe(self, server: "_Server") -> None:
        """Find the server's model and dialect."""
        timeout = httpx.Timeout(self.timeout, connect=CHECK_TIMEOUT)
        # A server may close the connection on which it refused something, so every request has its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(headers=self.headers, timeout=timeout, limits=limits) as client:
            listed = self._listed(client, server)
            if self.model is None and len(listed) != 1:
                raise UserError(f"{server.url} serves {', '.join(listed) or 'no model'}; name one in model")
            server.model = self.model or listed[0]
            for dialect in DIALECTS:
                try:
                    self._first_request(client, _Server(server.url, server.model, dialect))
                except _Refused as error:
                    if error.status not in (400, 422) or dialect == DIALECTS[-1]:
                        raise UserError(f"{error}{self._hint(server, listed)}") from error
                else:
                    server.dialect = dialect
                    return

    def _listed(self, client: Any, server: "_Server") -> list[str]:
        """The base models that a server lists; none where it does not but one is named.

        Being listed decides nothing: ``transformers serve`` lists what is in its cache, not what it was
        started with.
        """
        try:
            answer = _json(server.url, client.get(server.url + "/v1/models", timeout=CHECK_TIMEOUT))
        except httpx.RequestError as error:
            raise UserError(f"{server.url} cannot be reached: {_what(error)}; is the server running?") from error
        except (UserError, _Transient) as error:
            if getattr(error, "status", 0) in (401, 403):
                raise
            if self.model is not None:
                return []
            raise UserError(f"{server.url} does not list its models: {_what(error)}; name one in model") from error
        cards = answer.get("data")
        cards = cards if isinstance(cards, list) else []
        # vLLM's list has adapters too, perhaps of a run that was killed; they name their parent
        return [str(card["id"]) for card in cards if isinstance(card, dict) and "id" in card and not card.get("parent")]

    def _first_request(self, client: Any, server: "_Server") -> None:
        """Ask for one token."""
        tokens = tuple(self.tokenizer.encode("1", add_bos=True, add_eos=False))
        request = Request("check", 0, 0, tokens, ({"role": "user", "content": "1"},))
        sampling = Sampling(max_new_tokens=1)
        body = self.body(server, server.model, request, sampling)
        try:
            response = client.post(server.url + ENDPOINTS[self.endpoint], json=body)
            self.completion(server.url, _json(server.url, response), request, sampling)
        except (httpx.RequestError, _Transient) as error:
            raise UserError(f"{server.url} does not answer a first request: {_what(error)}") from error

    def _hint(self, server: "_Server", listed: list[str]) -> str:
        if listed and server.model not in listed:
            return f"; it serves {', '.join(listed)}, not {server.model}"
        if self.endpoint == "completions":
            return "; for a server that takes no token ids, set endpoint: chat"
        return ""

    # ---- adapters

    def _load(self, name: str, adapter: Path, stack: ExitStack) -> list["_Server"]:
        """The servers that now serve ``adapter`` as ``name``; ``stack`` unloads it. One that has gone is left out."""
        if not self.dynamic_lora:
            raise UserError(f"dynamic_lora is false, so {adapter} cannot be served. {LORA_HINT}")
        ready, lost = [], ""
        for server in self._servers:
            try:
                # An adapter of this name is left from a killed run: the same weights, but maybe elsewhere.
                self._adapter_call(server, "unload", {"lora_name": name})
                response = self._adapter_call(
                    server, "load", {"lora_name": name, "lora_path": str(adapter.expanduser().resolve())}
                )
            except httpx.RequestError as error:
                lost = f"{server.url} cannot be reached: {_what(error)}"
                log.warning("%s; it is left out", lost)
                continue
            if response.status_code != 200:
                said = f"HTTP {response.status_code}: {_message(response)}"
                raise UserError(f"{server.url} does not load the adapter {adapter} ({said}). {LORA_HINT}")
            stack.callback(self._unload, server, name)
            ready.append(server)
        if not ready:
            raise UserError(f"no server is left to load {adapter}: {lost}")
        return ready

    def _unload(self, server: "_Server", name: str) -> None:
        try:
            response = self._adapter_call(server, "unload", {"lora_name": name})
        except httpx.RequestError as error:
            log.warning("%s cannot be asked to unload %s: %s", server.url, name, _what(error))
        else:
            if response.status_code != 200:
                log.warning("%s does not unload %s: %s", server.url, name, _message(response))

    def _adapter_call(self, server: "_Server", verb: str, body: dict[str, str]) -> Any:
        timeout = httpx.Timeout(ADAPTER_TIMEOUT, connect=CHECK_TIMEOUT)
        return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, headers=self.headers, timeout=timeout)

    # ---- requests and answers

    def body(self, server: "_Server", model: str, request: Request, sampling: Sampling) -> dict[str, Any]:
        """The JSON to ask ``server`` for one answer."""
        stops = list(self.tokenizer.stop_tokens)
        body = {"model": model, "seed": request.seed & (1 << SEED_BITS) - 1}
        if self.endpoint == "chat":
            if not request.messages:
                raise UserError(f"prompt {request.prompt_id} has no messages, which endpoint: chat sends")
            body |= {"messages": [dict(message) for message in request.messages], "logprobs": True, "top_logprobs": 1}
        else:
            body |= {"prompt": list(request.tokens), "logprobs": 1}
        return body | _sampling_fields(server, sampling, stops)

    def completion(self, url: str, answer: dict[str, Any], request: Request, sampling: Sampling) -> Completion:
        """What ``answer`` says, see :class:`Completion`.

        Raises:
            UserError: it is not an answer to such a request.
            _Transient: the server gave the request up.
        """
        choice, text, reason = _choice(url, answer, self.endpoint)
        prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if isinstance(prompt, list) and prompt != list(request.tokens):
            self.tell_once(f"{url} renders prompts otherwise than the run: its chat template differs")
        text, cut = _until(text, sampling.stop_strings)
        reason = "stop" if cut else reason
        by_token = reason == "stop" and not cut and not isinstance(choice.get("stop_reason"), str)
        tokens = _token_ids(choice, answer.get("usage"))
        logprobs = _logprobs(choice)
        if tokens is None:
            self.exact_tokens = False
            self.tell_once(f"{url} gives no token ids; they are made again from the text, perhaps differently")
            tokens = self.tokenizer.encode(text, add_bos=False, add_eos=False) + [self._end_of_turn] * by_token
            logprobs = None
        if logprobs is None or len(logprobs) != len(tokens):
            self.has_logprobs = False
            self.tell_once(f"{url} gives no log-probabilities of the sampled tokens")
            logprobs = []
        return Completion(request, tokens, logprobs, text, reason)


class OpenAISession:
    """Servers with a model in them; made by :meth:`OpenAIEngine.session`."""

    def __init__(self, engine: OpenAIEngine, servers: "list[tuple[_Server, str]]") -> None:
        self._engine, self._servers = engine, servers
        self._tokens = self._retried = 0
        self._seconds, self._mark = 0.0, 0.0

    @property
    def exact_tokens(self) -> bool:
        """See :class:`OpenAIEngine`."""
        return self._engine.exact_tokens

    @property
    def has_logprobs(self) -> bool:
        """See :class:`OpenAIEngine`."""
        return self._engine.has_logprobs

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions of ``requests``, each as soon as it arrives. Closing the iterator ends what is under way.

        Raises:
            UserError: a server refuses a request or answers nonsense, or no server is left. What had arrived
                before has been yielded.
        """
        results: queue.SimpleQueue[Completion | BaseException | None] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(_Batch(self, sampling, results.put).run(requests))

        def work() -> None:
            try:
                loop.run_until_complete(task)
                end = None
            except BaseException as error:  # for the caller's thread to raise
                end = error
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            results.put(end)

        # The loop has its own thread, so that servers are kept busy while the caller works on a completion.
        thread = threading.Thread(target=work, name="openai-engine", daemon=True)
        self._mark = time.monotonic()
        thread.start()
        try:
            while (item := results.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            with suppress(RuntimeError):  # the loop is closed: nothing is under way
                loop.call_soon_threadsafe(task.cancel)
            thread.join()

    def stats(self) -> dict[str, float]:
        """``tokens``, ``tokens_per_second`` while generating, and ``retried`` requests."""
        speed = self._tokens / self._seconds if self._seconds else 0.0
        return {"tokens": self._tokens, "tokens_per_second": speed, "retried": self._retried}

    def arrived(self, completion: Completion) -> None:
        """Count a completion."""
        now = time.monotonic()
        self._tokens += len(completion.tokens)
        self._seconds, self._mark = self._seconds + now - self._mark, now

    def repeated(self) -> None:
        """Count a retry."""
        self._retried += 1


# ---- many requests at once


@dataclass
class _Server:
    """``url`` without ``/v1``, and what was found out about it."""

    url: str
    model: str = ""
    dialect: str = ""


class _Batch:
    """Requests under way. Every url has workers, which take requests from one queue."""

    def __init__(self, session: OpenAISession, sampling: Sampling, put: Callable[[Completion], None]) -> None:
        self._session, self._sampling, self._put = session, sampling, put
        self._engine, self._servers = session._engine, session._servers
        self._gone: dict[str, str] = {}  # url -> why

    async def run(self, requests: Sequence[Request]) -> None:
        engine = self._engine
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        for request in requests:
            self._queue.put_nowait(request)
        timeout = httpx.Timeout(engine.timeout, connect=min(engine.timeout, CHECK_TIMEOUT), pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # the workers are the limit
        async with httpx.AsyncClient(headers=engine.headers, timeout=timeout, limits=limits) as client:
            done = asyncio.ensure_future(self._queue.join())
            workers = [
                asyncio.ensure_future(self._work(client, server, model))
                for _ in range(min(engine.concurrency, len(requests)))
                for server, model in self._servers
            ]
            pending = {done, *workers}
            try:
                while not done.done():
                    finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in finished:
                        task.result()
            finally:
                for task in (done, *workers):
                    task.cancel()
                await asyncio.gather(done, *workers, return_exceptions=True)

    async def _work(self, client: Any, server: _Server, model: str) -> None:
        while server.url not in self._gone:
            request = await self._queue.get()
            completion = await self._ask(client, server, model, request)
            if completion is None:
                self._queue.put_nowait(request)
            else:
                self._session.arrived(completion)
                self._put(completion)
            self._queue.task_done()

    async def _ask(self, client: Any, server: _Server, model: str, request: Request) -> Completion | None:
        """The answer to ``request``; None: another server must answer it."""
        engine = self._engine
        body = engine.body(server, model, request, self._sampling)
        for attempt in itertools.count():
            if server.url in self._gone:
                return None
            try:
                response = await client.post(server.url + ENDPOINTS[engine.endpoint], json=body)
                return engine.completion(server.url, _json(server.url, response), request, self._sampling)
            except (httpx.RequestError, _Transient) as error:
                if attempt == engine.retries:
                    # named, for it may be the request's own fault: the same seed fails in the same way again
                    self._give_up(server, f"{_what(error)} (prompt {request.prompt_id}, sample {request.sample})")
                    return None
                self._session.repeated()
                await asyncio.sleep(_pause(attempt, error, engine.timeout))
        return None

    def _give_up(self, server: _Server, why: str) -> None:
        if server.url in self._gone:
            return
        self._gone[server.url] = why
        if len(self._gone) == len(self._servers):
            reasons = "; ".join(f"{url}: {why}" for url, why in self._gone.items())
            raise UserError(f"no server is left after {self._engine.retries} retries each: {reasons}")
        log.warning("%s is left out, the others take its share: %s", server.url, why)


# ---- what is sent


def _sampling_fields(server: _Server, sampling: Sampling, stops: list[int]) -> dict[str, Any]:
    """The sampling settings as a server takes them.

    extended: vLLM, SGLang and llama.cpp know these fields or pass over them. transformers: ``transformers
    serve`` refuses unknown fields, but takes a generation config. plain: OpenAI's own fields.
    """
    fields: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    fields["top_p"] = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    min_p = 0.0 if sampling.min_p is None else sampling.min_p
    if server.dialect == "extended":
        fields |= {"top_k": sampling.top_k or -1, "min_p": min_p, "repetition_penalty": 1.0}
        return fields | {"stop_token_ids": stops, "return_token_ids": True}
    if server.dialect == "transformers":
        config = {"do_sample": sampling.temperature > 0, "top_k": sampling.top_k or 0, "min_p": min_p}
        return fields | {"generation_config": json.dumps({**config, "repetition_penalty": 1.0, "eos_token_id": stops})}
    if asked := [name for name in ("top_k", "min_p") if getattr(sampling, name) is not None]:
        raise UserError(f"{server.url} takes no {' and no '.join(asked)}; set them to null")
    return fields


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    # The value may be the key itself, by mistake: it is not repeated.
    if not isinstance(api_key_env, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not the key")
    if not (key := os.environ.get(api_key_env, "").strip()):
        raise UserError("the environment variable that api_key_env names is not set; export it with the API key")
    return {"Authorization": f"Bearer {key}"}


def _checked_urls(urls: Any) -> list[str]:
    """The urls without ``/v1``."""
    if isinstance(urls, str) or not isinstance(urls, Sequence) or not len(urls):
        raise UserError("urls must be a list with at least one url, like [http://localhost:8000]")
    plain = []
    for url in urls:
        if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", url):
            raise UserError(f"{url!r} in urls is no address of a server; expected one like http://localhost:8000")
        plain.append(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    if twice := {url for url in plain if plain.count(url) > 1}:
        raise UserError(f"urls names {', '.join(sorted(twice))} twice")
    return plain


def _end_of_turn(tokenizer: Any) -> int:
    """The token that ends the assistant's turn in training."""
    tokens, _ = render_conversation(
        tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    )
    return next((token for token in reversed(tokens) if token in tokenizer.stop_tokens), tokenizer.stop_tokens[0])


def _adapter_name(prefix: str, adapter: Path) -> str:
    """A name of its own for every adapter: servers keep what they have cached under a name."""
    digest = hashlib.sha256()
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        try:
            digest.update((adapter / file).read_bytes())
        except OSError as error:
            raise UserError(f"{adapter} is no adapter in PEFT's format: {one_line(error)}") from error
    return f"{prefix}-{digest.hexdigest()[:12]}"


def _pause(attempt: int, error: Exception, longest: float) -> float:
    """Seconds to wait: doubling, and different for each request so that they do not come back all at once."""
    pause = min(MAX_BACKOFF, BACKOFF * 2**attempt) * random.uniform(0.5, 1)
    return max(pause, min(getattr(error, "retry_after", 0.0), longest))


# ---- what comes back


class _Transient(Exception):
    """The server may answer if it is asked again, not before ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Refused(UserError):
    """The server does not want this request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _json(url: str, response: Any) -> dict[str, Any]:
    """The JSON object in a response."""
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise _Transient(f"HTTP {status}: {_message(response)}", _retry_after(response))
    if status != 200:
        hint = "; set api_key_env" if status in (401, 403) else ""
        raise _Refused(f"{url} refuses a request with HTTP {status}: {_message(response)}{hint}", status)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UserError(
            f"{url} answers with no JSON object; is it an OpenAI-compatible server? {_start(response.text)}"
        )
    return answer


def _choice(url: str, answer: dict[str, Any], endpoint: str) -> tuple[dict[str, Any], str, str]:
    """The only choice in an answer, its text and its finish reason."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise _nonsense(url, "no choices", answer)
    source: Any = choice.get("message") if endpoint == "chat" else choice
    if not isinstance(source, dict):
        raise _nonsense(url, "no message", answer)
    if source.get("reasoning_content") or source.get("reasoning"):
        raise UserError(f"{url} splits the reasoning from the answer; start the server without a reasoning parser")
    text = source.get("content" if endpoint == "chat" else "text")
    if not isinstance(text, str):
        raise _nonsense(url, "no text", answer)
    reason = choice.get("finish_reason")
    if reason == "abort":  # vLLM, on its way down
        raise _Transient("the server gave the request up")
    if reason not in ("stop", "length"):
        raise _nonsense(url, f"the finish_reason {reason!r}, not stop or length", answer)
    return choice, text, reason


def _token_ids(choice: dict[str, Any], usage: Any) -> list[int] | None:
    """The sampled ids: ``token_ids`` (vLLM, SGLang) or those in llama.cpp's log-probabilities; None: neither."""
    ids = choice.get("token_ids")
    if ids is None:
        ids = [entry.get("id") for entry in _entries(choice)]
        # llama.cpp leaves out tokens that end within a character, and those of a stop string
        if not isinstance(usage, dict) or usage.get("completion_tokens") != len(ids):
            return None
    valid = isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)
    return ids if valid else None


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    """One per token: of the completions' form, or of the chat's, which llama.cpp uses for both."""
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if values is None:
        values = [entry.get("logprob") for entry in _entries(choice)]
    valid = isinstance(values, list) and values and all(type(value) in (int, float) for value in values)
    return [float(value) for value in values] if valid else None


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return content if isinstance(content, list) and all(isinstance(entry, dict) for entry in content) else []


def _until(text: str, stop_strings: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first stop string, and whether there is one. transformers leaves it in."""
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def _retry_after(response: Any) -> float:
    """The header's seconds, or the time until its date."""
    value = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds())
    return 0.0


def _message(response: Any) -> str:
    """What the server says about an error: OpenAI's ``error.message``, FastAPI's ``detail``, or the body."""
    with suppress(ValueError):
        body = response.json()
        if isinstance(body, dict):
            said = body.get("error", body.get("detail", body.get("message")))
            said = said.get("message", said) if isinstance(said, dict) else said
            if said:
                return _start(said if isinstance(said, str) else json.dumps(said), 500)
    return _start(response.text)


def _nonsense(url: str, what: str, answer: dict[str, Any]) -> UserError:
    return UserError(f"{url} answers with {what}: {_start(json.dumps(answer))}")


def _start(text: str, length: int = 200) -> str:
    text = " ".join(text.split())
    return text[:length] or "(nothing)"


def _what(error: Exception) -> str:
    """An error of the client in words."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer in time ({type(error).__name__})"
    return str(error) if isinstance(error, _Transient | UserError) else one_line(error)
