"""Completions from servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, ``transformers serve``.

The server decides what it samples. It must use the same weights as the run. Its numerics and batching make
samples differ from run to run, even with the same seeds. A resumed run keeps the samples it has recorded.
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
    """Samples from servers that serve the run's base model; several servers share the load.

    Every answer is one HTTP request. A request contains all sampling settings, also neutral ones: vLLM fills
    gaps from the model's generation_config.json, and llama.cpp's defaults truncate the distribution. A server
    that refuses fields beyond OpenAI's own gets fewer; see :meth:`check`.

    Args:
        tokenizer: the run's torchtune model tokenizer.
        urls: the servers' addresses, ``http://host:8000`` or ``http://host:8000/v1``.
        model: the servers' name of the model; None: the only one they list.
        endpoint: ``completions`` sends the token ids of the prompt, so the run's chat template applies
            exactly. ``chat`` sends messages, to which the server applies its own template.
        api_key_env: name of the environment variable with the API key, if the servers need one.
        concurrency: simultaneous requests per url.
        timeout: seconds without an answer before a request is repeated.
        retries: repetitions of a request after lost connections, time-outs and the answers 408, 429 and 5xx.
            The pauses double from half a second to 30 s. A server may ask for longer pauses, up to
            ``timeout``. A url that still fails is dropped, and the other urls take its requests.
        lora_name: servers serve adapters as ``<lora_name>-<hash of the adapter>``.
        dynamic_lora: the servers load adapters at run time, as vLLM does. The engine posts the adapter's name
            and path to ``/v1/load_lora_adapter``.

    Attributes:
        exact_tokens: whether all token ids so far came from the server. These servers send them: vLLM from
            0.10.2, SGLang from July 2026, and llama.cpp, except for answers with characters of several
            tokens and answers cut at a stop string. Other ids are re-encoded from the text. The value is known
            after :meth:`check` and may become False later.
        has_logprobs: whether all log-probabilities so far came from the server. Those of vLLM and llama.cpp
            belong to the unmodified distribution by default (``--logprobs-mode``, ``post_sampling_probs``
            change that). SGLang's belong to the sampling temperature unless
            ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set.

    Raises:
        UserError: an argument is invalid.
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
        """Check that every server is reachable, serves the model and answers a request for one token.

        The requests find out which fields a server accepts and whether its answers contain token ids and
        log-probabilities. They set ``exact_tokens`` and ``has_logprobs``.

        Raises:
            UserError: a check fails; the message has the url and the server's own message.
        """
        self.wire.exact_tokens = self.wire.has_logprobs = True
        for server in self._servers:
            self._probe(server)
        if len(names := {server.model for server in self._servers}) > 1:
            raise UserError(f"the urls serve different models: {', '.join(sorted(names))}; set model to one of them")

    @contextmanager
    def session(self, adapter: Path | None) -> Iterator["OpenAISession"]:
        """Open a session; all servers load the adapter and unload it at the end.

        Args:
            adapter: PEFT folder; None: the base model.

        Raises:
            UserError: no server can be reached, or a server refuses the adapter.
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
        # A server may close the connection after refusing a request, so every request gets a new one.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(headers=self.headers, timeout=timeout, limits=limits) as client:
            listed = self._listed(client, server)
            if self.model is None and len(listed) != 1:
                raise UserError(f"{server.url} serves {', '.join(listed) or 'no model'}; set model to the name of one")
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
        """Return the base models that a server lists; [] if listing fails and the config names a model.

        A model may be served without being listed: ``transformers serve`` lists its cache.
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
            raise UserError(f"{server.url} does not list its models: {in_words(error)}; set model") from error
        cards = answer.get("data")
        cards = cards if isinstance(cards, list) else []
        # vLLM also lists adapters, perhaps those of a killed run; adapters name their parent.
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
            raise UserError(f"{server.url} does not answer the first request: {in_words(error)}") from error

    def _hint(self, server: Server, listed: list[str]) -> str:
        if listed and server.model not in listed:
            return f"; it serves {', '.join(listed)}, not {server.model}"
        if self.wire.endpoint == "completions":
            return "; if the server does not accept token ids, set endpoint: chat"
        return ""

    # ---- adapters

    def _load(self, name: str, adapter: Path, stack: ExitStack) -> list[Server]:
        """Load ``adapter`` as ``name`` on every server and register its unloading with ``stack``.

        Returns:
            The servers that loaded it, without those that cannot be reached.
        """
        if not self.dynamic_lora:
            raise UserError(f"dynamic_lora is false, so no server can load {adapter}. {LORA_HINT}")
        ready, lost = [], ""
        for server in self._servers:
            try:
                load_adapter(server, name, adapter, self.headers)
            except httpx.RequestError as error:
                lost = f"{server.url} cannot be reached: {in_words(error)}"
                log.warning("%s; continuing without it", lost)
                continue
            stack.callback(unload_adapter, server, name, self.headers)
            ready.append(server)
        if not ready:
            raise UserError(f"no server can load {adapter}: {lost}")
        return ready


class OpenAISession:
    """Servers with a loaded model; :meth:`OpenAIEngine.session` makes one."""

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
        """Yield a completion of each request as soon as it arrives. Closing the iterator cancels open requests.

        Raises:
            UserError: a server refuses a request or sends an invalid answer, or every server has failed.
                Completions that arrived earlier have been yielded.
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

        # The loop runs in its own thread, so servers stay busy while the caller works on a completion.
        thread = threading.Thread(target=work, name="openai-engine", daemon=True)
        self._mark = time.monotonic()
        thread.start()
        try:
            while (item := results.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            with suppress(RuntimeError):  # the loop is closed: no request is open
                loop.call_soon_threadsafe(task.cancel)
            thread.join()

    def stats(self) -> dict[str, float]:
        """Return ``tokens``, ``tokens_per_second`` while generating, and ``retried`` requests."""
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
    """The open requests of one ``generate``. Every url has workers, which take requests from one queue."""

    def __init__(self, session: OpenAISession, sampling: Sampling, put: Callable[[Completion], None]) -> None:
        self._session, self._sampling, self._put = session, sampling, put
        self._engine, self._servers = session._engine, session._servers
        self._gone: dict[str, str] = {}  # url -> why

    async def run(self, requests: Sequence[Request]) -> None:
        """Answer all ``requests``; the first error of a worker cancels the rest."""
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
        """Return the answer to ``request``, or None if another server must answer it."""
        engine = self._engine
        body = engine.wire.body(server, model, request, self._sampling)
        attempt = 0
        while server.url not in self._gone:
            try:
                response = await client.post(server.url + engine.path, json=body)
                return engine.wire.completion(server.url, json_object(server.url, response), request, self._sampling)
            except (httpx.RequestError, Transient) as error:
                if attempt == engine.retries:
                    # Name the request: it may be the cause, and the same seed would fail in the same way again.
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
            raise UserError(f"all servers failed after {self._engine.retries} retries each: {reasons}")
        log.warning("dropping %s, the other servers take its requests: %s", server.url, why)


def _pause(attempt: int, error: Exception, longest: float) -> float:
    """Return the seconds to wait; they double, with random jitter so that requests do not return all at once."""
    pause = min(MAX_BACKOFF, BACKOFF * 2**attempt) * random.uniform(0.5, 1)
    return max(pause, min(getattr(error, "retry_after", 0.0), longest))
