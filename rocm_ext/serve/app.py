"""The HTTP of Tinker's protocol: routes, the key, limits, sessions. It computes nothing: calls go to ``work``.

A call that computes gets a ``request_id`` at once; ``retrieve_future`` waits for its answer. Mistakes of a client are
``{"error": one line, "category": "user"}``, with an HTTP status where the call was not accepted, else as answer.
"""

import asyncio
import hmac
import json
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker import types

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.serve import samples
from rocm_ext.serve.adapters import Adapters, Sampler
from rocm_ext.serve.protocol import computation, parse
from rocm_ext.serve.work import MOST_BYTES, Answer, Failed, Full, Later, Work

MOST_BODY = 2**26  # bytes; the SDK cuts calls into bodies of 5 MB
_WAIT = 30.0  # seconds that retrieve_future waits; the SDK gives up after 45
_SILENT = 60.0  # seconds without a heartbeat, of which the SDK sends one in 10, after which a session's models may end
_PROTOBUF = "application/x-protobuf"
_LONGEST_LIFE = 10 * 366 * 86400  # seconds
_API = "/api/v1"


@dataclass
class Session:
    """A client's session.

    Attributes:
        heard: when the client was last heard.
        ended: whether it has finished.
        models: ids of its models.
        samplers: ids of its sampling sessions.
    """

    heard: float
    ended: bool = False
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        """Whether its models may end to make room for others."""
        return self.ended or time.monotonic() - self.heard > _SILENT


class Unknown(UserError):
    """Something that a client names is not here; HTTP's 404."""


class Service:
    """The endpoints of the protocol over the models in ``adapters``.

    Attributes:
        work: does the calls; run it in the thread that made ``adapters``.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.work = Work(partial(samples.answer, adapters))
        self._sessions: dict[str, Session] = {}
        # by id of a sampling session: its adapter, and the path that the client knows
        self._samplers: dict[str, tuple[Sampler, str | None]] = {}

    def routes(self) -> list[Route]:
        """Return the routes of the protocol."""
        calls: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.client_dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "sessions/{session}/finish": self.finish_session,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "unload_model": self.unload_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "load_weights": self.load_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
            "weights_info": self.weights_info,
        }
        reads: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler}": self.get_sampler,
            "training_runs": self.training_runs,
            "training_runs/{run}": self.training_run,
            "training_runs/{run}/checkpoints": self.list_checkpoints,
            "sessions/{session}": self.get_session,
            "sessions": self.list_sessions,
        }
        made = [
            Route(f"{_API}/{path}", _endpoint(call), methods=["POST"])
            for path, call in calls.items()
        ]
        made += [
            Route(f"{_API}/{path}", _endpoint(call), methods=["GET"])
            for path, call in reads.items()
        ]
        path = f"{_API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
        made.append(Route(path, _endpoint(self.delete_checkpoint), methods=["DELETE"]))
        return made

    # ---- clients

    async def healthz(self, request: Request) -> Json:
        return {"status": "ok"}

    async def client_config(self, request: Request) -> Json:
        return {"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False}

    async def client_dynamic_config(self, request: Request) -> Json:
        return {"sample_cancel_enabled": False}

    async def telemetry(self, request: Request) -> Json:
        return {"status": "accepted"}  # and dropped

    async def capabilities(self, request: Request) -> Json:
        adapters = self._adapters
        models = [
            {
                "model_name": name,
                "max_context_length": adapters.longest,
                "trainable": True,
                "sampleable": True,
            }
            for name in adapters.names
        ]
        return {"supported_models": models}

    async def create_session(self, request: Request) -> Json:
        parse(types.CreateSessionRequest, await _json(request))
        began = datetime.now().strftime("%Y%m%d-%H%M%S")
        session = f"{began}-{secrets.token_hex(4)}"
        self._sessions[session] = Session(time.monotonic())
        return {"type": "create_session", "session_id": session}

    async def session_heartbeat(self, request: Request) -> Json:
        given = parse(types.SessionHeartbeatRequest, await _json(request))
        self._session(given.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request) -> Json:
        session = self._session(request.path_params["session"])
        session.ended = True
        for model in session.models:
            self.work.end(model, f"end {model}", partial(self._unload, model))
        return {}

    async def get_session(self, request: Request) -> Json:
        session = self._session(request.path_params["session"])
        return {"training_run_ids": session.models, "sampler_ids": session.samplers}

    async def list_sessions(self, request: Request) -> Json:
        return {"sessions": list(self._sessions)}

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise Unknown(f"session {name} is not known here: the server was started again")
        session = self._sessions[name]
        session.heard = time.monotonic()
        return session

    # ---- models

    async def create_model(self, request: Request) -> Json:
        given = parse(types.CreateModelRequest, await _json(request))
        self._adapters.check_name(given.base_model)
        _check_optimizer(given.optimizer_config)
        lora = given.lora_config or types.LoraConfig(rank=32)
        return self._new_model(
            given.session_id,
            given.model_seq_id,
            lambda model: self._adapters.create(model, lora, given.user_metadata),
            lambda model: {"model_id": model, "type": "create_model"},
        )

    async def load_weights(self, request: Request) -> Json:
        given = parse(types.LoadWeightsRequest, await _json(request))
        _check_optimizer(given.optimizer_config)
        if given.weights_access_token is not None:
            raise UserError("weights_access_token is not served; there are no accounts here")
        if given.base_model is not None:
            self._adapters.check_name(given.base_model)

        def answer(model: str) -> Json:
            return {"path": given.path, "model_id": model, "type": "load_weights"}

        if given.model_id is not None:
            model = given.model_id

            def load() -> Answer:
                self._adapters.load_into(model, given.path, given.optimizer)
                return answer(model)

            return self._add(model, _number(given.seq_id), load)
        if given.session_id is None or given.model_seq_id is None:
            raise UserError("load_weights names neither model_id nor session_id with model_seq_id")
        session = given.session_id
        return self._new_model(
            session,
            given.model_seq_id,
            lambda model: self._adapters.load(
                model, given.path, given.optimizer, given.user_metadata
            ),
            answer,
        )

    def _new_model(
        self,
        session_id: str,
        number: int,
        make: Callable[[str], None],
        answer: Callable[[str], Json],
    ) -> Json:
        """Add a call that makes the session's model ``number``."""
        session = self._session(session_id)
        model = f"{session_id}:train:{number}"  # the SDK makes the same id
        came = time.monotonic()

        def alone() -> Answer:
            self._make_room(session)
            if self._adapters.full and self._may_end(came, session):
                raise Later
            make(model)
            return answer(model)

        reply = self._add(model, 0, alone)
        if model not in session.models:
            session.models.append(model)
        return reply

    def _make_room(self, own: Session) -> None:
        """End models of sessions that are gone while no more can be made, of the longest silent ones first."""
        others = (session for session in list(self._sessions.values()) if session is not own)
        for session in sorted(others, key=lambda session: session.heard):
            for model in session.models:
                if self._adapters.full and session.gone:
                    self._unload(model)

    def _may_end(self, since: float, own: Session) -> bool:
        """Return whether another session with models has been silent since then: its script may have ended.

        Few scripts finish their session, and none that is killed.
        """
        open_models = self._adapters.trained
        for session in list(self._sessions.values()):
            silent = session is not own and session.heard < since
            if silent and any(model in open_models for model in session.models):
                return True
        return False

    async def unload_model(self, request: Request) -> Json:
        given = parse(types.UnloadModelRequest, await _json(request))
        name = f"end {given.model_id}"
        if self.work.find(name) is None:
            self._adapters.of(given.model_id)
        self.work.end(given.model_id, name, partial(self._unload, given.model_id))
        return {"request_id": name, "model_id": given.model_id}

    def _unload(self, model: str) -> Answer:
        self._adapters.unload(model)
        self.work.drop(model)
        return {"model_id": model, "type": "unload_model"}

    async def get_info(self, request: Request) -> Json:
        given = parse(types.GetInfoRequest, await _json(request))
        adapters = self._adapters
        trained = adapters.of(given.model_id)
        name = adapters.names[0]
        return {
            "type": "get_info",
            "model_id": given.model_id,
            "model_name": name,
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": adapters.folder},
            "is_lora": True,
            "lora_rank": trained.lora.rank,
        }

    async def forward_backward(self, request: Request) -> Json:
        if request.headers.get("content-encoding"):
            raise UserError("the body is compressed, which client/config switches off here")
        body = await request.body()
        call = computation(body)
        work = partial(self._adapters.compute, call)
        return self._add(call.model, _number(call.number), work, len(body))

    async def optim_step(self, request: Request) -> Json:
        given = parse(types.OptimStepRequest, await _json(request))
        settings = given.optim_params
        if not isinstance(settings, types.AdamParams):
            raise UserError(f"optimizer {settings.type} is not served; adam_params are")

        def step() -> Answer:
            return {"metrics": self._adapters.step(given.model_id, settings)}

        return self._add(given.model_id, _number(given.seq_id), step)

    def _add(self, model: str, number: int, alone: Callable[[], Answer], size: int = 0) -> Json:
        """Add a call of a model; return what the client asks for its answer with."""
        if number and not any(model in session.models for session in self._sessions.values()):
            self._adapters.of(model)  # says that it is not here
        name = f"{model}.{number}"
        self.work.add(model, number, name, size, alone)
        return {"request_id": name, "model_id": model}

    # ---- checkpoints

    async def save_weights(self, request: Request) -> Json:
        given = parse(types.SaveWeightsRequest, await _json(request))
        notes = _notes(given)

        def save() -> Answer:
            path = self._adapters.save(given.model_id, given.path, given.overwrite, notes)
            return {"path": path, "type": "save_weights"}

        return self._add(given.model_id, _number(given.seq_id), save)

    async def save_weights_for_sampler(self, request: Request) -> Json:
        given = parse(types.SaveWeightsForSamplerRequest, await _json(request))
        if given.kind != "snapshot":
            raise UserError(f"kind {given.kind} is not served; a sampler here is a snapshot")
        notes = _notes(given)
        number = given.sampling_session_seq_id
        if (given.path is None) == (number is None):
            raise UserError("a sampler has either a path, its name, or a sampling_session_seq_id")

        def save() -> Answer:
            answer: Json = {"type": "save_weights_for_sampler"}
            if given.path is not None:
                path = self._adapters.save_sampler(given.model_id, given.path, notes)
                return answer | {"path": path}
            sampler = self._adapters.snapshot(given.model_id, notes)
            session, _, _ = given.model_id.rpartition(":train:")
            assert number is not None
            return answer | {"sampling_session_id": self._new_sampler(session, number, sampler)}

        return self._add(given.model_id, _number(given.seq_id), save)

    async def weights_info(self, request: Request) -> Json:
        content = await _json(request)
        _, notes = self._adapters.checkpoints.find(str(content.get("tinker_path")))
        lora = notes["lora"]
        trains = {key: lora.get(key) for key in ("train_unembed", "train_mlp", "train_attn")}
        base = notes["base_model"]
        return {"base_model": base, "is_lora": True, "lora_rank": lora.get("rank"), **trains}

    async def training_runs(self, request: Request) -> Json:
        offset, limit = _page(request)
        runs = [_run(name, described) for name, described in self._adapters.checkpoints.runs()]
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": runs[offset : offset + limit], "cursor": cursor}

    async def training_run(self, request: Request) -> Json:
        wanted = request.path_params["run"]
        for name, described in self._adapters.checkpoints.runs():
            if name == wanted:
                return _run(name, described)
        raise Unknown(f"there is no run {wanted}")

    async def list_checkpoints(self, request: Request) -> Json:
        run = request.path_params["run"]
        found = []
        for label, folder, notes in self._adapters.checkpoints.of_run(run):
            kind = "sampler" if label.startswith("sampler") else "training"
            size = sum(file.stat().st_size for file in folder.iterdir())
            found.append(
                {
                    "checkpoint_id": label,
                    "checkpoint_type": kind,
                    "time": _iso(notes["created"]),
                    "tinker_path": f"tinker://{run}/{label}",
                    "size_bytes": size,
                    "user_metadata": notes.get("user_metadata"),
                }
            )
        return {"checkpoints": found}

    async def delete_checkpoint(self, request: Request) -> Response:
        place = request.path_params
        path = f"tinker://{place['run']}/{place['kind']}/{place['name']}"
        # in the thread that writes them
        name = f"delete {secrets.token_hex(8)}"
        self.work.end(name, name, partial(self._delete, name, path))
        return await self._result(name)

    def _delete(self, name: str, path: str) -> Answer:
        self.work.drop(name)
        self._adapters.checkpoints.remove(path)
        return {}

    # ---- samplers

    async def create_sampling_session(self, request: Request) -> Json:
        given = parse(types.CreateSamplingSessionRequest, await _json(request))
        sampler = self._sampler(given.model_path, given.base_model)
        name = self._new_sampler(
            given.session_id, given.sampling_session_seq_id, sampler, given.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampler(self, path: str | None, base_model: str | None) -> Sampler:
        if path is not None:
            return self._adapters.sampler_at(path)
        if base_model is None:
            raise UserError("a sampler needs model_path or base_model")
        self._adapters.check_name(base_model)
        return Sampler()

    def _new_sampler(
        self, session_id: str, number: int, sampler: Sampler, path: str | None = None
    ) -> str:
        """Return the id of a new sampling session."""
        session = self._session(session_id)
        name = f"{session_id}:sample:{number}"
        if name not in self._samplers:
            session.samplers.append(name)
            self._samplers[name] = sampler, path
        return name

    async def get_sampler(self, request: Request) -> Json:
        sampler = request.path_params["sampler"]
        _, path = self._find_sampler(sampler)
        return {"sampler_id": sampler, "base_model": self._adapters.names[0], "model_path": path}

    def _find_sampler(self, name: str) -> tuple[Sampler, str | None]:
        if name not in self._samplers:
            raise Unknown(f"sampler {name} is not known here: the server was started again")
        return self._samplers[name]

    async def asample(self, request: Request) -> Json:
        body = await request.body()
        given = parse(types.SampleRequest, _object(body))
        if given.sampling_session_id is not None:
            if given.seq_id is None:
                raise UserError("seq_id is missing: the number of the call in its sampling session")
            sampler, _ = self._find_sampler(given.sampling_session_id)
            name = f"{given.sampling_session_id}.{given.seq_id}"
        else:
            sampler = self._sampler(given.model_path, given.base_model)
            name = f"sample.{secrets.token_hex(8)}"
        adapters = self._adapters
        asked = samples.read(given, name, sampler, adapters.vocabulary, adapters.window)
        self.work.add_sample(asked.kind, name, len(body), asked)
        ids = [f"{name}.{number}" for number in range(asked.samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    # ---- answers

    async def retrieve_future(self, request: Request) -> Response:
        given = parse(types.FutureRetrieveRequest, await _json(request))
        return await self._result(given.request_id)

    async def _result(self, name: str) -> Response:
        """Wait for the answer to a call; after some time tell the client to ask again."""
        future = self.work.find(name)
        if future is None:
            raise Unknown(
                f"request {name} is not known here: the server was started again, or its answer is no longer kept"
            )
        waiting = asyncio.wrap_future(future)
        await asyncio.wait([waiting], timeout=_WAIT)
        if not waiting.done():
            # else asyncio reports an error that nobody read
            waiting.add_done_callback(_read)
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(again)
        try:
            answer = waiting.result()
        except Failed as failure:
            return _error(str(failure), 200, failure.category)
        if isinstance(answer, bytes):
            return Response(answer, media_type=_PROTOBUF)
        return JSONResponse(answer)


def _read(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def application(service: Service, key: str) -> ASGIApp:
    """Return the application that a server runs; clients need ``key``."""
    app = Starlette(routes=service.routes(), exception_handlers={HTTPException: _no_route})
    return _Guard(app, key)


class _Guard:
    """Refuses requests without the key and bodies that are too long, before anything reads them."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            return await refusal(scope, receive, send)
        left = MOST_BODY

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, _TOO_LONG)
            return message

        await self._app(scope, limited, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        given = headers.get(b"x-api-key", b"")
        if path != f"{_API}/healthz" and not hmac.compare_digest(given, self._key):
            return _error(
                "the key is missing or wrong; set TINKER_API_KEY to the one that the server printed",
                401,
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BODY:
            return _error(_TOO_LONG, 413)
        return None


_TOO_LONG = f"the body is longer than {MOST_BODY // 2**20} MiB"


def _endpoint(
    call: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with a call's JSON, or with its error in one line."""

    async def endpoint(request: Request) -> Response:
        try:
            answer = await call(request)
        except Unknown as error:
            return _error(str(error), 404)
        except UserError as error:
            return _error(str(error), 400)
        except Full:
            return _error(
                f"too many calls wait, or more than {MOST_BYTES // 2**20} MiB of them; try again",
                429,
            )
        except HTTPException:
            raise
        except Exception as error:  # a fault here is one line for the client
            log.error("%s", traceback.format_exc())
            return _error(f"{type(error).__name__}: {one_line(error)}", 500)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return endpoint


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        what = f"{request.method} {request.url.path} is not served"
        return _error(f"{what}; docs/serve.md lists what is", error.status_code)
    return _error(str(error.detail), error.status_code)


def _error(message: str, status: int, category: str | None = None) -> JSONResponse:
    if category is None:
        category = "user" if status < 500 else "server"
    printable = message.encode(errors="replace").decode()  # it may quote half of a character
    return JSONResponse({"error": printable, "category": category}, status)


async def _json(request: Request) -> Json:
    return _object(await request.body())


def _object(body: bytes) -> Json:
    try:
        content = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError("the body must be a JSON object")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"it has {name}")


def _number(seq_id: int | None) -> int:
    """Return a call's place in the order of its model's calls."""
    if not seq_id or seq_id < 1:
        raise UserError(f"seq_id is {seq_id}; expected the number of the call, from 1")
    return seq_id


def _check_optimizer(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise UserError(f"optimizer {config.type} is not served; adamw is")


def _notes(given: Any) -> Json:
    """Return what a client says about a checkpoint; nothing here removes one that has expired."""
    notes: Json = {"user_metadata": given.user_metadata}
    if given.ttl_seconds is not None:
        if not 0 < given.ttl_seconds <= _LONGEST_LIFE:
            raise UserError(f"ttl_seconds is {given.ttl_seconds}; expected 1 to {_LONGEST_LIFE}")
        notes["expires"] = time.time() + given.ttl_seconds
    return notes


def _page(request: Request) -> tuple[int, int]:
    query = request.query_params
    try:
        return max(0, int(query.get("offset", 0))), max(0, int(query.get("limit", 20)))
    except ValueError as error:
        raise UserError(f"offset and limit are numbers: {error}") from error


def _run(name: str, described: Json) -> Json:
    return {
        "training_run_id": name,
        "base_model": described["base_model"],
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": described["lora"]["rank"],
        "last_request_time": _iso(described["created"]),
        "user_metadata": described.get("user_metadata"),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
