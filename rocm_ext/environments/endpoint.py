"""OpenAI's chat completions for one conversation, whose owner answers the requests."""

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from rocm_ext.base.errors import one_line
from rocm_ext.base.types import Json, Message
from rocm_ext.environments.base import Ask

_BYTES = 4 << 20  # the largest request
_MODEL = "model"  # the listed name; requests may give any
# unsupported keys: the values that request nothing
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "functions": (None, []),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
    "modalities": (None, ["text"]),
}


class AtLimit(ValueError):
    """The conversation takes no more requests."""


class Exchange:
    """A request, and the response that waits for the model's message; raises ValueError if it is not supported."""

    def __init__(self, body: bytes, client: socket.socket | None = None) -> None:
        asked, self._client = json.loads(body), client
        if not (isinstance(asked, dict) and isinstance(asked.get("messages"), list) and asked["messages"]):
            raise ValueError("expected an object with a list of messages")
        tools, stop = [] if asked.get("tools") is None else asked["tools"], asked.get("stop") or []
        limits = (asked.get(key) for key in ("max_completion_tokens", "max_tokens"))
        most = next((limit for limit in limits if limit is not None), None)
        positive = type(most) is int and most >= 1
        self._stop = [stop] if isinstance(stop, str) else stop
        problems = {
            "messages must be objects": not _are(dict, asked["messages"]),
            **{f"{key} is not supported": asked.get(key) not in values for key, values in _REFUSED.items()},
            "tools must be a list of objects": not _are(dict, tools),
            f"max_tokens must be a positive integer, found {most!r}": most is not None and not positive,
            f"stop must be a text or a list of texts, found {stop!r}": not (_are(str, self._stop) and all(self._stop)),
        }
        for problem, holds in problems.items():
            if holds:
                raise ValueError(problem)
        self.ask = Ask(asked["messages"], [] if asked.get("tool_choice") == "none" else tools, most)
        self.streams, options = bool(asked.get("stream")), asked.get("stream_options")
        self.sizes = isinstance(options, dict) and bool(options.get("include_usage"))
        self._response: SimpleQueue[Message | str] = SimpleQueue()

    def gone(self) -> bool:
        """Whether the client has hung up."""
        try:
            return self._client is not None and not self._client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as problem:
            return not isinstance(problem, BlockingIOError)

    def answer(self, message: Message | str) -> None:
        """Respond with the model's message; a text refuses the request.

        A refusal says that the context is full, after which clients do not retry, and some return a partial result.
        """
        self._response.put(message)

    def completion(self) -> Json:
        """Wait for the response, and return it in OpenAI's form; raises AtLimit if the request was refused."""
        said = self._response.get()
        if isinstance(said, str):
            raise AtLimit(said)
        text, ends = said["content"], said["finish_reason"]
        for stop in self._stop:
            text, cut, _ = text.partition(stop)
            ends = "stop" if cut else ends
        message: Message = {"role": "assistant", "content": text}
        if calls := said.get("tool_calls"):
            message |= {"content": text or None, "tool_calls": []}
            for call in calls:
                function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
            ends = "tool_calls"
        sizes = said["usage"]
        return {
            "id": f"chatcmpl-{time.time_ns()}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": _MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": ends, "logprobs": None}],
            "usage": {**sizes, "total_tokens": sum(sizes.values())},
        }


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _events(completion: Json, sizes: bool) -> bytes:
    """Return a completion as a stream of events: its message, its end and, if ``sizes``, its size."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        *([head | {"choices": [], "usage": completion["usage"]}] if sizes else []),
    ]
    return b"".join(b"data: %s\n\n" % text.encode() for text in [*map(json.dumps, chunks), "[DONE]"])


class Endpoint(ThreadingHTTPServer):
    """Serves a listening socket in new threads: puts requests that bring the key into the queue ``asked``."""

    def __init__(self, listening: socket.socket, key: str, asked: "SimpleQueue[Exchange | None]") -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.key, self.asked = listening, key, asked
        threading.Thread(target=self.serve_forever, args=(3600.0,), daemon=True).start()

    def handle_error(self, *request: Any) -> None:
        """Keep quiet about clients that hang up."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms after its headers
    server: Endpoint

    def do_GET(self) -> None:
        """List the model."""
        if self._welcome():
            known = self.path.rstrip("/").endswith("/models")
            models = [{"id": _MODEL, "object": "model", "created": 0, "owned_by": "torchtune-rocm"}]
            self._send({"object": "list", "data": models}) if known else self._fail(404, f"{self.path} is not served")

    def do_POST(self) -> None:
        """Queue a request, and send its completion."""
        size = self.headers.get("Content-Length", "")
        left = int(size) if size.isdecimal() and len(size) <= 9 else -1
        if not 0 <= left <= _BYTES:
            self.close_connection = True
            while left > 0 and (part := self.rfile.read(min(left, _BYTES))):  # else the client hears no response
                left -= len(part)
            self._fail(400, f"a body of {size or 'unknown'} bytes; expected at most {_BYTES}")
            return
        body = self.rfile.read(left)
        if not self._welcome():
            return
        if not self.path.partition("?")[0].endswith("/chat/completions"):
            self._fail(404, f"{self.path} is not served; only chat completions are")
            return
        try:
            exchange = Exchange(body, self.connection)
            self.server.asked.put(exchange)
            completion = exchange.completion()
        except (ValueError, RecursionError) as problem:
            self._fail(400, one_line(problem), "context_length_exceeded" if isinstance(problem, AtLimit) else None)
            return
        if exchange.streams:
            self._send(_events(completion, exchange.sizes), "text/event-stream")
        else:
            self._send(completion)

    def _welcome(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._fail(401, "the key is not OPENAI_API_KEY's")
        return False

    def _fail(self, status: int, why: str, code: str | None = None) -> None:
        self._send({"error": {"message": why, "type": "invalid_request_error", "code": code}}, status=status)

    def _send(self, content: Any, kind: str = "application/json", status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""
