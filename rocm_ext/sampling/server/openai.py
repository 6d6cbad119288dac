"""Completions from servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, ``transformers serve``.

The server decides what it samples. It must use the same weights as the run. Its numerics and batching make
samples differ from run to run, even with the same seeds. A resumed run keeps the samples it has recorded.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rocm_ext.base import openai_http as http
from rocm_ext.base.errors import UserError, one_line, require_known
from rocm_ext.base.heartbeat import RETRY
from rocm_ext.base.kinds import Kind, check, integer, number
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.sampling.engine import Request, Sampling
from rocm_ext.sampling.server.session import (
    LORA_HINT,
    Adapter,
    OpenAISession,
    Terms,
    load_anew,
    unload_adapter,
)
from rocm_ext.sampling.server.wire import (
    DIALECTS,
    ENDPOINTS,
    PROBES,
    EndpointFormat,
    Server,
    base_models,
    check_logprobs,
    top_logprob,
)

_KINDS = {
    "concurrency": integer(1, 1024),  # files that a process may usually have open
    "timeout": number(lambda x: 0 < x <= 604800, "seconds above 0, at most 604800"),
    "lora_name": Kind(
        lambda name: isinstance(name, str) and bool(re.fullmatch(r"[\w.-]+", name)),
        ("letters, digits, dots, - and _",),
    ),
}


class OpenAIEngine:
    """Samples from servers that serve the run's base model; several servers share the load.

    Every answer is one HTTP request. A request contains all sampling settings, also neutral ones: vLLM fills gaps from
    the model's generation_config.json, and llama.cpp's defaults truncate the distribution. A server that refuses fields
    beyond OpenAI's gets fewer; see :meth:`check`.

    A request that fails goes to another server. The failing server is asked again after pauses that double from half a
    second to 30 s. Lost connections, time-outs and the answers 404, 408, 429 and 5xx are failures. After 404 a server
    gets its adapter again, because a restart loses it. The session gives a server up that fails for ``patience``.

    On several ranks, the main rank checks the servers, loads adapters and unloads them; every rank samples.

    Args:
        tokenizer: the run's torchtune model tokenizer.
        urls: the servers' addresses, ``http://host:8000`` or ``http://host:8000/v1``.
        model: the servers' name of the model, unless they list only one.
        endpoint: ``completions`` sends the prompt's token ids, so the run's chat template applies exactly. ``chat``
            sends messages, to which the server applies its template.
        api_key_env: name of the environment variable with the API key, if the servers need one.
        concurrency: simultaneous requests per rank and url.
        timeout: seconds for a complete answer before a request counts as failed.
        patience: time after which a failing server is given up: seconds, or text such as ``10 min``.
        lora_name: servers serve adapters as ``<lora_name>-<hash of the adapter>``. They load adapters at run time, as
            vLLM does: the engine posts name and path to ``/v1/load_lora_adapter``.
        decoder: the run's model, whose vocabulary must contain the answers' token ids; without it they are not checked.
        ranks: the run's processes; by default this one alone.
        stopped: returns whether the user asked to stop; by default never.

    Attributes:
        exact_tokens: whether all token ids so far came from the server. vLLM sends them from 0.10.2 on, SGLang from
            July 2026 on, and llama.cpp except for answers with characters of several tokens and answers cut at a stop
            string. Other ids are re-encoded from the text. The value is known after :meth:`check` and may become False
            later.
        has_logprobs: whether all log-probs so far came from the server. By default vLLM's and llama.cpp's belong to
            temperature 1, and SGLang's to the sampling temperature; :meth:`check_logprobs` finds out.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self,
        tokenizer,
        *,
        urls: Sequence[str],
        model: str | None = None,
        endpoint: str = "completions",
        api_key_env: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        patience: float | str = "10 min",
        lora_name: str = "raft",
        decoder=None,
        ranks: Ranks | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        require_known("endpoint", endpoint, ENDPOINTS)
        given = {"concurrency": concurrency, "timeout": timeout, "lora_name": lora_name}
        check(given, _KINDS, "engine.")
        self.wire = EndpointFormat(tokenizer, endpoint)
        if decoder is not None:
            self.wire.vocabulary = decoder.tok_embeddings.num_embeddings
        self.terms = Terms(
            self.wire,
            http.authorization(api_key_env),
            concurrency,
            float(timeout),
            http.seconds_of(patience, "patience"),
            stopped or (lambda: False),
        )
        self.tokenizer = tokenizer
        self.model = model
        self.lora_name = lora_name
        self._servers = [Server(url) for url in http.checked_urls(urls)]
        self._ranks = ranks or Ranks(torch.device("cpu"))
        # servers and number of sessions by the name of the loaded adapter, on the main rank
        self._usable: dict[str, list[Server]] = {}
        self._sessions: Counter[str] = Counter()
        self._unreachable: set[str] = set()  # urls that the log names, until they answer again

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

        The requests find out which fields a server accepts and whether its answers contain token ids and log-probs.
        They set ``exact_tokens`` and ``has_logprobs``.

        Raises:
            UserError: a check fails; the message has the url and the server's message.
        """
        checked = self._ranks.on_main(self._checked)
        self._servers, self.wire.exact_tokens, self.wire.has_logprobs = checked

    def check_logprobs(self, sampling: Sampling) -> None:
        """Check that every server returns the log-probs that ``sampling`` asks for."""
        self._check_once()
        self._ranks.on_main(lambda: self._check_logprobs(sampling))

    def _check_once(self) -> None:
        if any(not server.dialect for server in self._servers):
            self.check()

    def check_adapter(self, adapter: Path) -> None:
        """Check that every server can load the PEFT folder ``adapter`` and answer with it."""
        self._check_once()
        self._ranks.on_main(lambda: self._try_adapter(Adapter.read(self.lora_name, adapter)))

    def check_exchange(self) -> None:
        """Refuse a vLLM that may finish running requests with an adapter that it loads meanwhile (its issue 47724)."""
        self._ranks.on_main(self._check_versions)

    @contextmanager
    def session(self, adapter: Path | None) -> Iterator[OpenAISession]:
        """Open a session; all servers load the adapter and unload it at the end.

        Sessions with the same adapter share it: the first loads it, and the last unloads it. vLLM up to 0.24.0 may then
        answer other sessions' running requests with the wrong adapter (its issue 47724).

        All ranks open the session; it ends once all have left it. An error on one rank ends it with an error on all.

        Raises:
            UserError: the servers refuse the adapter, or another rank failed.
        """
        self._check_once()
        loaded = None
        servers = self._servers
        if adapter is not None:
            loaded, servers = self._ranks.on_main(lambda: self._load(adapter))
        try:
            yield OpenAISession(self.terms, servers, loaded)
        except GeneratorExit:
            self._leave(loaded, servers)
            raise
        except Exception as error:
            self._leave(loaded, servers, one_line(error))
            raise
        except BaseException:  # a second Ctrl-C waits for no rank
            self._unload(loaded, servers)
            raise
        self._leave(loaded, servers)

    # ---- ranks

    def _leave(self, adapter: Adapter | None, servers: Sequence[Server], failure: str = "") -> None:
        """Wait for the other ranks, then unload the adapter."""
        if failure and self._ranks.world > 1:
            log.warning(
                "rank %d: %s; waiting for the other ranks' answers", self._ranks.rank, failure
            )
        failures = self._ranks.gather(failure)
        self._unload(adapter, servers)
        if failure:
            return
        for rank, other in enumerate(failures):
            if other:
                raise UserError(f"rank {rank}: {other}")

    # ---- what a server offers

    def _checked(self) -> tuple[list[Server], bool, bool]:
        """Return the servers with their models and dialects, and whether they send token ids and log-probs."""
        self.wire.exact_tokens = self.wire.has_logprobs = True
        servers = [self._probe(server) for server in self._servers]
        names = {server.model for server in servers}
        if len(names) > 1:
            raise UserError(
                f"the urls serve different models: {', '.join(sorted(names))}; set model to one of them"
            )
        return servers, self.wire.exact_tokens, self.wire.has_logprobs

    def _exchange(self, url: str, path: str, seconds: float, body=None) -> Json:
        """Return the JSON object with which a server answers: to GET, or to POST with a body."""

        async def run() -> Any:
            method = "GET" if body is None else "POST"
            # A server may close the connection after it refuses a request, so every request gets a new one.
            async with http.new_client(self.terms.headers) as client:
                return await http.exchange(client, method, url + path, seconds, body)

        return http.json_object(url, asyncio.run(run()))

    def _probe(self, server: Server) -> Server:
        """Return the server with its model and dialect."""
        listed = self._listed(server)
        if self.model is None and len(listed) != 1:
            raise UserError(
                f"{server.url} serves {', '.join(listed) or 'no model'}; set model to the name of one"
            )
        model = self.model or listed[0]
        for dialect in DIALECTS:
            candidate = Server(server.url, model, dialect)
            try:
                self._first_request(candidate, model)
                break
            except http.Refused as error:
                if error.status not in (400, 422) or dialect == DIALECTS[-1]:
                    raise UserError(f"{error}{self._hint(candidate, listed)}") from error
        return candidate

    def _listed(self, server: Server) -> list[str]:
        """Return the base models that a server lists; [] if listing fails and the config names a model.

        A model may be served without being listed, as by ``transformers serve`` before 5.24.
        """
        try:
            answer = self._exchange(server.url, "/v1/models", http.CHECK_TIMEOUT)
        except http.RequestError as error:
            raise UserError(
                f"{server.url} cannot be reached: {http.in_words(error)}; is the server running?",
                RETRY,
            ) from error
        except (UserError, http.Transient) as error:
            if getattr(error, "status", 0) in (401, 403):
                raise
            if self.model is not None:
                return []
            raise UserError(
                f"{server.url} does not list its models: {http.in_words(error)}; set model"
            ) from error
        return base_models(answer)

    def _check_logprobs(self, sampling: Sampling) -> None:
        def top(server: Server, probe: Sampling) -> float | None:
            return top_logprob(self._first_request(server, server.model, probe))

        for server in self._servers:
            check_logprobs(server.url, partial(top, server), sampling)

    def _check_versions(self) -> None:
        for server in self._servers:
            url = server.url
            try:
                answer = self._exchange(url, "/version", http.CHECK_TIMEOUT)
            except (http.RequestError, UserError, http.Transient):
                continue  # not vLLM
            version = str(answer.get("version"))
            minor = re.match(r"0\.(\d+)\.", version)
            # 0.1.dev is built from sources without tags, perhaps with the fix
            if minor and int(minor[1]) <= 24 and not version.startswith("0.1.dev"):
                raise UserError(
                    f"{url} runs vLLM {version}, which may finish running requests with an adapter that it loads "
                    "meanwhile (vLLM issue 47724); take one newer than 0.24, or set max_staleness=0"
                )

    def _first_request(self, server: Server, model: str, sampling: Sampling = PROBES[0]) -> Json:
        """Ask ``model`` for one token, and return the answer."""
        tokens = self.tokenizer.encode("1", add_bos=True, add_eos=False)
        message = {"role": "user", "content": "1"}
        request = Request("check", 0, 0, tuple(tokens), (message,))
        body = self.wire.body(server, model, request, sampling)
        try:
            answer = self._exchange(server.url, self.wire.path, self.terms.timeout, body)
            self.wire.completion(server.url, answer, request, sampling)
        except (http.RequestError, http.Transient) as error:
            raise UserError(
                f"{server.url} does not answer the first request: {http.in_words(error)}", RETRY
            ) from error
        return answer

    def _hint(self, server: Server, listed: list[str]) -> str:
        if listed and server.model not in listed:
            return f"; it serves {', '.join(listed)}, not {server.model}"
        if self.wire.endpoint == "completions":
            return "; if the server does not accept token ids, set endpoint: chat"
        return ""

    # ---- adapters

    def _on_each(
        self, servers: Sequence[Server], action: Callable[[Any, Server], Awaitable[None]]
    ) -> list[tuple[Server, BaseException | None]]:
        """Run ``action(client, server)`` on all servers at once; return the servers with errors, None for success."""

        async def run() -> list[BaseException | None]:
            async with http.new_client(self.terms.headers) as client:
                actions = [action(client, server) for server in servers]
                return await asyncio.gather(*actions, return_exceptions=True)

        errors = asyncio.run(run())
        return list(zip(servers, errors, strict=True))

    def _try_adapter(self, adapter: Adapter) -> None:
        """Load ``adapter`` on every server, ask for one token, and unload it."""
        answers = self._load_everywhere(adapter)
        self._sessions[adapter.name] += 1
        try:
            for server, error in answers:
                if isinstance(error, http.RequestError | http.Transient):
                    raise UserError(f"{server.url}: {http.in_words(error)}. {LORA_HINT}") from error
                if error is not None:
                    raise error
            for server in self._servers:
                self._first_request(server, adapter.name)
        finally:
            self._unload(adapter, [server for server, error in answers if error is None])

    def _load_everywhere(self, adapter: Adapter) -> list[tuple[Server, BaseException | None]]:
        return self._on_each(
            self._servers, lambda client, server: load_anew(client, server, adapter)
        )

    def _load(self, folder: Path) -> tuple[Adapter, list[Server]]:
        """Load the adapter in a folder on all servers; return it and the servers that do not refuse it.

        A failing server gets the adapter once it works again.
        """
        adapter = Adapter.read(self.lora_name, folder)
        name = adapter.name
        if not self._sessions[name]:
            answers = self._load_everywhere(adapter)
            usable = []
            for server, error in answers:
                if isinstance(error, http.RequestError | http.Transient):
                    self._tell_unreachable(server, error)
                elif isinstance(error, UserError):
                    log.warning("%s; continuing without it", error)
                    continue
                elif error is not None:
                    raise error
                else:
                    self._unreachable.discard(server.url)
                usable.append(server)
            if not usable:
                raise UserError("; ".join(str(error) for _, error in answers))
            self._usable[name] = usable
        self._sessions[name] += 1
        return adapter, self._usable[name]

    def _unload(self, adapter: Adapter | None, servers: Sequence[Server]) -> None:
        if adapter is None or not self._ranks.is_main:
            return
        self._sessions[adapter.name] -= 1
        if self._sessions[adapter.name]:
            return
        answers = self._on_each(
            servers, lambda client, server: unload_adapter(client, server, adapter)
        )
        for server, error in answers:
            if isinstance(error, http.RequestError):
                self._tell_unreachable(server, error)
            elif error is not None:
                raise error

    def _tell_unreachable(self, server: Server, error: Exception) -> None:
        """Log that a server fails to load or unload an adapter, once until it works again: a run has many sessions."""
        if server.url not in self._unreachable:
            self._unreachable.add(server.url)
            log.warning(
                "%s fails to load or unload an adapter: %s; it gets it once it works again",
                server.url,
                http.in_words(error),
            )
