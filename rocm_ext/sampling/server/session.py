"""One session's requests: many at once, to several servers that may fail.

Servers may load adapters at run time, as vLLM does. It answers 400 if a name is already loaded, and 404 if a request
names an adapter that is not loaded (``vllm/entrypoints/openai/models/serving.py``).
"""

import asyncio
import hashlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any

from rocm_ext.base import openai_http as http
from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.heartbeat import RETRY, beat
from rocm_ext.base.log import duration, log
from rocm_ext.base.types import Json
from rocm_ext.model.adapters.peft_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rocm_ext.sampling.engine import Completion, Request, Sampling
from rocm_ext.sampling.server.wire import EndpointFormat, Server, dicts

_POLL = 0.2  # seconds between looks at whether the user asked to stop
_NONE_YET = 0.05  # seconds between looks for new requests
_TELL = 30.0  # seconds between lines about a server that fails
_CHECK_PATIENCE = 5.0  # seconds for which a server may fail while others wait to sample
_LOAD_TIMEOUT = 300.0  # seconds
LORA_HINT = (
    "To sample with a trained adapter, a server must load adapters at run time: "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK "
    "(and --enforce-eager on AMD GPUs), with the adapter's folder visible to it under the same path"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter for servers.

    Attributes:
        name: the servers' name of the adapter.
        folder: the absolute PEFT folder.
    """

    name: str
    folder: Path

    @classmethod
    def read(cls, prefix: str, folder: Path) -> "Adapter":
        """Name the adapter in a PEFT folder by a hash of its files, because servers cache adapters by name."""
        digest = hashlib.sha256()
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            with explain_errors(f"{folder} is not an adapter in PEFT's format"):
                digest.update((folder / file).read_bytes())
        return cls(f"{prefix}-{digest.hexdigest()[:12]}", folder.expanduser().resolve())


async def load_adapter(client, server: Server, adapter: Adapter) -> None:
    """Make a server serve ``adapter``, unless it already does; ``client`` is an ``httpx.AsyncClient``.

    Raises:
        UserError: the server refuses.
        Transient: the server fails; another attempt may succeed.
        httpx.RequestError: the server cannot be reached.
    """
    body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
    url = f"{server.url}/v1/load_lora_adapter"
    response = await http.exchange(client, "POST", url, _LOAD_TIMEOUT, body)
    status = response.status_code
    if status == 200 or (status == 400 and adapter.name in await _served(client, server)):
        return  # 400: another rank may have loaded it
    problem = (
        f"does not load the adapter {adapter.folder} (HTTP {status}: {http.message_of(response)})"
    )
    if status in (408, 429) or status >= 500:
        raise http.Transient(f"it {problem}")
    raise UserError(f"{server.url} {problem}. {LORA_HINT}")


async def load_anew(client, server: Server, adapter: Adapter) -> None:
    """Load ``adapter`` after unloading the same name, which a killed run may have loaded from another path."""
    await _unload(client, server, adapter, _LOAD_TIMEOUT)
    await load_adapter(client, server, adapter)


async def unload_adapter(client, server: Server, adapter: Adapter) -> None:
    """Unload ``adapter``; log a warning if the server refuses."""
    response = await _unload(client, server, adapter, http.CHECK_TIMEOUT)
    if response.status_code not in (200, 404):  # 404: the server was restarted
        log.warning(
            "%s does not unload %s: %s", server.url, adapter.name, http.message_of(response)
        )


async def _unload(client, server: Server, adapter: Adapter, seconds: float) -> Any:
    url = f"{server.url}/v1/unload_lora_adapter"
    return await http.exchange(client, "POST", url, seconds, {"lora_name": adapter.name})


async def _served(client, server: Server) -> set[str]:
    """Return the names of models and adapters that a server lists."""
    try:
        response = await http.exchange(client, "GET", server.url + "/v1/models", http.CHECK_TIMEOUT)
        answer = http.json_object(server.url, response)
    except (UserError, http.Transient):
        return set()
    return {str(card.get("id")) for card in dicts(answer.get("data"))}


# ---- requests


class NoServer(UserError):
    """Every server has failed, for ``reasons``."""

    def __init__(self, reasons: str) -> None:
        super().__init__(
            f"no server is left: {reasons}. All answers so far are saved; once a server is well again, continue with "
            "resume_from_checkpoint=True",
            RETRY,
        )
        self.reasons = reasons


@dataclass(frozen=True)
class Terms:
    """How a session asks its servers.

    Attributes:
        wire: converter of requests and answers.
        headers: headers of every request.
        concurrency: simultaneous requests per server.
        timeout: seconds without an answer before a request counts as failed.
        patience: seconds for which a server may fail.
        stopped: returns whether the user asked to stop.
    """

    wire: EndpointFormat
    headers: Mapping[str, str]
    concurrency: int
    timeout: float
    patience: float
    stopped: Callable[[], bool]


class OpenAISession:
    """Servers with a loaded model; ``OpenAIEngine.session`` makes one.

    Args:
        terms: how to ask the servers.
        servers: the servers.
        adapter: the adapter to sample with, or None for the base model.

    Attributes:
        servers, adapter: see above.
        given_up: whether a server failed for too long; the next ``generate`` asks it again.
    """

    def __init__(self, terms: Terms, servers: Sequence[Server], adapter: Adapter | None) -> None:
        self.terms = terms
        self.servers = servers
        self.adapter = adapter
        self.given_up = False
        self.retried = 0
        self._tokens = 0
        self._seconds = 0.0

    def generate(
        self, requests: Iterable[Request | None], sampling: Sampling
    ) -> Iterator[Completion]:
        """Yield completions as they arrive. Closing the iterator cancels open requests.

        Another thread takes requests one at a time, when a server is free; None says that a later one may come. The
        iterator ends early once the user asks to stop.

        Raises:
            UserError: a server refuses a request, or every server has failed; earlier completions have been yielded.
        """
        results: queue.SimpleQueue[Completion | BaseException | None] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        batch = _Batch(self, sampling, results.put)
        self.given_up = False
        task = loop.create_task(batch.run(requests))

        def work() -> None:
            end = None
            try:
                loop.run_until_complete(task)
            except BaseException as error:  # the caller's thread raises it
                end = error
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            results.put(end)

        # The loop runs in another thread, so servers stay busy while the caller works on a completion.
        thread = threading.Thread(target=work, name="openai-engine", daemon=True)
        mark = time.monotonic()
        thread.start()
        try:
            while not self.terms.stopped():
                try:
                    result = results.get(timeout=_POLL)
                except queue.Empty:
                    if batch.asking:
                        beat()  # requests have a time limit
                    continue
                finally:
                    self.given_up = batch.given_up
                if result is None:
                    return
                if isinstance(result, BaseException):
                    raise result
                now = time.monotonic()
                self._tokens += len(result.tokens)
                self._seconds += now - mark
                mark = now
                yield result
        finally:
            with suppress(RuntimeError):  # the loop is closed: no request is open
                loop.call_soon_threadsafe(task.cancel)
            thread.join()

    def ask_each(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> dict[str, list[Completion]]:
        """Ask every server the same requests; :meth:`stats` does not count them.

        A failing server gets little time to recover if there are others, because they wait.

        Returns:
            The answering servers' completions by url, in the order of ``requests``; fewer if the user asks to stop.
        """
        terms = self.terms
        if len(self.servers) > 1:
            terms = replace(terms, patience=min(terms.patience, _CHECK_PATIENCE))
        by_url = {}
        for server in self.servers:
            session = OpenAISession(terms, [server], self.adapter)
            by_request = {}
            try:
                for completion in session.generate(requests, sampling):
                    by_request[id(completion.request)] = completion
            except NoServer as error:
                log.warning("nothing checks the adapter in this phase of %s", error.reasons)
                continue
            known = (by_request.get(id(request)) for request in requests)
            by_url[server.url] = list(filter(None, known))
        return by_url

    def stats(self) -> dict[str, float]:
        """Return ``tokens``, ``tokens_per_second`` while generating, and ``retried`` requests."""
        speed = self._tokens / self._seconds if self._seconds else 0.0
        return {"tokens": self._tokens, "tokens_per_second": speed, "retried": self.retried}


@dataclass
class _State:
    """State that the workers of one server share.

    Attributes:
        answered: number of answers so far.
        restored: number of reloads by adapter.
        restoring: lock for loading an adapter again.
        last_line: time of the last log line about the server's failure; None while it does not fail.
        gone: why the server was given up; empty before.
    """

    answered: int = 0
    restored: Counter[Adapter | None] = field(default_factory=Counter)
    restoring: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_line: float | None = None
    gone: str = ""


class _Batch:
    """The open requests of one ``generate``. Every server has workers, which take requests from one queue.

    A failed request returns to the queue, so that another server can answer it while the worker waits.

    Attributes:
        asking: number of open requests.
    """

    def __init__(
        self, session: OpenAISession, sampling: Sampling, put: Callable[[Completion], None]
    ) -> None:
        self.session = session
        self.sampling = sampling
        self.put = put
        self.states = {server.url: _State() for server in session.servers}
        self.queue: asyncio.Queue[Request] = asyncio.Queue()
        self.asking = 0

    @property
    def given_up(self) -> bool:
        """Whether a server was given up."""
        return any(state.gone for state in self.states.values())

    async def run(self, requests: Iterable[Request | None]) -> None:
        """Answer ``requests``; the first error of a worker cancels the rest."""
        terms = self.session.terms
        servers = self.session.servers
        at_once = terms.concurrency * len(servers)
        share = length_hint(requests, at_once) or 1
        self.room = asyncio.Semaphore(min(at_once, share))
        async with http.new_client(terms.headers) as client:
            done = asyncio.ensure_future(self._take(iter(requests)))
            tasks = [done]
            for _ in range(min(terms.concurrency, share)):
                for server in servers:
                    worker = _RequestLoop(self, client, server)
                    tasks.append(asyncio.ensure_future(worker.run()))
            pending = set(tasks)
            try:
                while not done.done():
                    finished, pending = await asyncio.wait(
                        pending, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in finished:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, requests: Iterator[Request | None]) -> None:
        """Take requests while workers have room, and wait until all are answered."""
        end = object()
        while True:
            await self.room.acquire()
            request = next(requests, end)
            if request is end:
                break
            if isinstance(request, Request):
                self.queue.put_nowait(request)
            else:
                self.room.release()
                await asyncio.sleep(_NONE_YET)
        await self.queue.join()

    def give_up(self, server: Server, why: str) -> None:
        """Stop asking a server; raise :class:`NoServer` if it was the last one."""
        state = self.states[server.url]
        if state.gone:
            return
        state.gone = why
        if all(other.gone for other in self.states.values()):
            raise NoServer("; ".join(f"{url}: {other.gone}" for url, other in self.states.items()))
        log.warning("giving up %s, the other servers take its requests: %s", server.url, why)


class _RequestLoop:
    """One of a server's simultaneous requests."""

    def __init__(self, batch: _Batch, client, server: Server) -> None:
        self._batch = batch
        self._client = client
        self._server = server
        self._terms = batch.session.terms
        self._state = batch.states[server.url]
        # since the server last answered: its failures, the seconds waited, and its answers before
        self._failures = 0
        self._waited = 0.0
        self._answered = 0

    async def run(self) -> None:
        """Answer requests until the server is given up."""
        waiting = self._batch.queue
        while not self._state.gone:
            request = await waiting.get()
            self._batch.asking += 1
            try:
                completion = None if self._state.gone else await self._try(request)
                if completion is not None:
                    self._batch.put(completion)
                    self._batch.room.release()
                else:
                    waiting.put_nowait(request)
            finally:
                self._batch.asking -= 1
                waiting.task_done()
            if self._failures:
                await asyncio.sleep(self._pause)

    async def _try(self, request: Request) -> Completion | None:
        """Ask once; return None if the server failed."""
        began = time.monotonic()
        state = self._state
        try:
            completion = await self._ask(request)
        except (http.RequestError, http.Transient) as error:
            self._failed(error, time.monotonic() - began, request)
            return None
        except UserError as error:
            if isinstance(error, http.Refused) and error.status not in (401, 403):
                raise  # any server would refuse this request
            self._batch.give_up(self._server, str(error))
            return None
        if state.last_line is not None:
            log.info("%s answers again", self._server.url)
            state.last_line = None
        state.answered += 1
        self._failures = 0
        self._waited = 0.0
        return completion

    async def _ask(self, request: Request) -> Completion:
        wire = self._terms.wire
        server = self._server
        sampling = self._batch.sampling
        adapter = request.adapter or self._batch.session.adapter
        restored = self._state.restored[adapter]
        model = adapter.name if adapter else server.model
        body = wire.body(server, model, request, sampling)
        response = await self._post(body)
        if response.status_code == 404:  # the server was restarted
            await self._restore(adapter, restored, http.message_of(response))
            response = await self._post(body)
            if response.status_code == 404:
                raise http.Transient(f"HTTP 404: {http.message_of(response)}")
        answer = http.json_object(server.url, response)
        return wire.completion(server.url, answer, request, sampling)

    async def _post(self, body: Json) -> Any:
        url = self._server.url + self._terms.wire.path
        return await http.exchange(self._client, "POST", url, self._terms.timeout, body)

    async def _restore(self, adapter: Adapter | None, restored: int, problem: str) -> None:
        """Load the adapter again, unless another worker has done so since ``restored``."""
        state = self._state
        if adapter is None:
            raise http.Transient(f"HTTP 404: {problem}")
        async with state.restoring:
            if state.restored[adapter] != restored:
                return
            try:
                await load_adapter(self._client, self._server, adapter)
            except UserError as error:
                raise http.Transient(f"HTTP 404: {problem}; {error}") from error
            state.restored[adapter] += 1
            log.warning(
                "%s had lost the adapter %s and has loaded it again",
                self._server.url,
                adapter.folder,
            )

    def _failed(self, error: Exception, seconds: float, request: Request) -> None:
        """Set the pause before the next attempt, or give the server up."""
        self._batch.session.retried += 1
        state = self._state
        patience = self._terms.patience
        problem = http.in_words(error)
        if state.answered != self._answered:  # the server has answered another worker meanwhile
            self._failures = 0
            self._waited = 0.0
            self._answered = state.answered
        if self._failures:
            self._waited += seconds
        if self._waited >= patience:
            # The message names the request, which may be the cause: with the same seed it would fail again.
            where = f"prompt {request.prompt_id}, sample {request.sample}"
            self._batch.give_up(self._server, f"{problem}, for {duration(self._waited)} ({where})")
            return
        self._pause = min(http.pause_after(error, self._failures), patience - self._waited)
        now = time.monotonic()
        if state.last_line is None or now - state.last_line >= _TELL:
            state.last_line = now
            since = f"{duration(self._waited)} of {duration(patience)}"
            log.info("waiting for %s, %s so far: %s", self._server.url, since, problem)
        self._failures += 1
        self._waited += self._pause
