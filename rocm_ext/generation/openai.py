"""Completions from servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, ``transformers serve``.

What was sampled is decided by the server. It must use the same weights as the run, and its own numerics and
batching make its samples differ from run to run, seeds or not; a run that resumes keeps those it has recorded.
"""

import asyncio
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rocm_ext.errors import UserError, nearest
from rocm_ext.generation.base import Completion, Request, Sampling
from rocm_ext.generation.openai_wire import (
    CHECK_TIMEOUT,
    DIALECTS,
    ENDPOINTS,
    LORA_HINT,
    Refused,
    Server,
    Transient,
    Wire,
    adapter_name,
    authorization,
    checked_urls,
    httpx,
    in_words,
    json_object,
    load_adapter,
    unload_adapter,
)
from rocm_ext.log import log

BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds


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
        self.tokenizer, self.model = tokenizer, model
        self.wire, self.path = Wire(tokenizer, endpoint), ENDPOINTS[endpoint]
        self.concurrency, self.timeout, self.retries = concurrency, float(timeout), retries
        self.lora_name, self.dynamic_lora = lora_name, dynamic_lora
        self.headers = authorization(api_key_env)
        self._servers = [Server(url) for url in checked_urls(urls)]

    @property
    def exact_tokens(self) -> bool:
        """See the class."""
        return self.wire.exact_tokens

    @property
    def has_logprobs(self) -> bool:
        """See the class."""
        return self.wire.has_logprobs

    def check(self) -> None:
        """See that every server is there, serves the model and answers a request for one token.

        The requests tell which fields a server takes, whether its answers have token ids and
        log-probabilities, and thereby ``exact_tokens`` and ``has_logprobs``.

        Raises:
            UserError: one of these fails; with the url and what the server says.
        """
        self.wire.exact_tokens = self.wire.has_logprobs = True
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
                name = adapter_name(self.lora_name, adapter)
                servers = self._load(name, adapter, stack)
                yield OpenAISession(self, [(server, name) for server in servers])

    # ---- what a server offers

    def _probe(self, server: Server) -> None:
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
                    self._first_request(client, Server(server.url, server.model, dialect))
                except Refused as error:
                    if error.status not in (400, 422) or dialect == DIALECTS[-1]:
                        raise UserError(f"{error}{self._hint(server, listed)}") from error
                else:
                    server.dialect = dialect
                    return

    def _listed(self, client: Any, server: Server) -> list[str]:
        """The base models that a server lists; none where it does not but one is named.

        Being listed decides nothing: ``transformers serve`` lists what is in its cache, not what it was
        started with.
        """
        try:
            answer = json_object(server.url, client.get(server.url + "/v1/models", timeout=CHECK_TIMEOUT))
        except httpx.RequestError as error:
            raise UserError(f"{server.url} cannot be reached: {in_words(error)}; is the server running?") from error
        except (UserError, Transient) as error:
            if getattr(error, "status", 0) in (401, 403):
                raise
            if self.model is not None:
                return []
            raise UserError(f"{server.url} does not list its models: {in_words(error)}; name one in model") from error
        cards = answer.get("data")
        cards = cards if isinstance(cards, list) else []
        # vLLM's list has adapters too, perhaps of a run that was killed; they name their parent
        return [str(card["id"]) for card in cards if isinstance(card, dict) and "id" in card and not card.get("parent")]

    def _first_request(self, client: Any, server: Server) -> None:
        """Ask for one token."""
        tokens = tuple(self.tokenizer.encode("1", add_bos=True, add_eos=False))
        request = Request("check", 0, 0, tokens, ({"role": "user", "content": "1"},))
        sampling = Sampling(max_new_tokens=1)
        body = self.wire.body(server, server.model, request, sampling)
        try:
            response = client.post(server.url + self.path, json=body)
            self.wire.completion(server.url, json_object(server.url, response), request, sampling)
        except (httpx.RequestError, Transient) as error:
            raise UserError(f"{server.url} does not answer a first request: {in_words(error)}") from error

    def _hint(self, server: Server, listed: list[str]) -> str:
        if listed and server.model not in listed:
            return f"; it serves {', '.join(listed)}, not {server.model}"
        if self.wire.endpoint == "completions":
            return "; for a server that takes no token ids, set endpoint: chat"
        return ""

    # ---- adapters

    def _load(self, name: str, adapter: Path, stack: ExitStack) -> list[Server]:
        """The servers that now serve ``adapter`` as ``name``; ``stack`` unloads it. One that has gone is left out."""
        if not self.dynamic_lora:
            raise UserError(f"dynamic_lora is false, so {adapter} cannot be served. {LORA_HINT}")
        ready, lost = [], ""
        for server in self._servers:
            try:
                load_adapter(server, name, adapter, self.headers)
            except httpx.RequestError as error:
                lost = f"{server.url} cannot be reached: {in_words(error)}"
                log.warning("%s; it is left out", lost)
                continue
            stack.callback(unload_adapter, server, name, self.headers)
            ready.append(server)
        if not ready:
            raise UserError(f"no server is left to load {adapter}: {lost}")
        return ready


class OpenAISession:
    """Servers with a model in them; made by :meth:`OpenAIEngine.session`."""

    def __init__(self, engine: OpenAIEngine, servers: list[tuple[Server, str]]) -> None:
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

    async def _work(self, client: Any, server: Server, model: str) -> None:
        while server.url not in self._gone:
            request = await self._queue.get()
            completion = await self._ask(client, server, model, request)
            if completion is None:
                self._queue.put_nowait(request)
            else:
                self._session.arrived(completion)
                self._put(completion)
            self._queue.task_done()

    async def _ask(self, client: Any, server: Server, model: str, request: Request) -> Completion | None:
        """The answer to ``request``; None: another server must answer it."""
        engine = self._engine
        body = engine.wire.body(server, model, request, self._sampling)
        attempt = 0
        while server.url not in self._gone:
            try:
                response = await client.post(server.url + engine.path, json=body)
                return engine.wire.completion(server.url, json_object(server.url, response), request, self._sampling)
            except (httpx.RequestError, Transient) as error:
                if attempt == engine.retries:
                    # named, for it may be the request's own fault: the same seed fails in the same way again
                    self._give_up(server, f"{in_words(error)} (prompt {request.prompt_id}, sample {request.sample})")
                    break
                self._session.repeated()
                await asyncio.sleep(_pause(attempt, error, engine.timeout))
                attempt += 1
        return None

    def _give_up(self, server: Server, why: str) -> None:
        if server.url in self._gone:
            return
        self._gone[server.url] = why
        if len(self._gone) == len(self._servers):
            reasons = "; ".join(f"{url}: {why}" for url, why in self._gone.items())
            raise UserError(f"no server is left after {self._engine.retries} retries each: {reasons}")
        log.warning("%s is left out, the others take its share: %s", server.url, why)


def _pause(attempt: int, error: Exception, longest: float) -> float:
    """Seconds to wait: doubling, and different for each request so that they do not come back all at once."""
    pause = min(MAX_BACKOFF, BACKOFF * 2**attempt) * random.uniform(0.5, 1)
    return max(pause, min(getattr(error, "retry_after", 0.0), longest))
