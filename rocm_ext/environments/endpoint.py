"""OpenAI's chat completions for one conversation, whose owner answers the requests."""

import io
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

_BYTES, _HEAD = 4 << 20, 1 << 16  # the largest body and head of a request
_DEEPEST = 100  # records of the run could not be written with more
_LONGEST = 1 << 30  # bytes that are thrown away after a refusal
_THREADS = 64  # the process has one for each connection
_PATIENCE = 60.0  # seconds that a client may take to send a head, a body, or to receive a response
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
    """The conversation takes no more requests.

    The response says that the context is full, after which clients do not retry, and some return a partial result.
    """


class Exchange:
    """A request, and the response that waits for the model's message; raises ValueError if it is not supported."""

    def __init__(self, body: bytes, client: socket.socket | None = None) -> None:
        self._client = client
        asked = json.loads(body)
        messages = asked.get("messages") if isinstance(asked, dict) else None
        if not isinstance(messages, list) or not messages:
            raise ValueError("expected an object with a list of messages")
        tools = asked.get("tools")
        if tools is None:
            tools = []
        most = asked.get("max_completion_tokens")
        if most is None:
            most = asked.get("max_tokens")
        stop = asked.get("stop") or []
        self._stop = [stop] if isinstance(stop, str) else stop

        def check(fits: bool, problem: str) -> None:
            if not fits:
                raise ValueError(problem)

        check(_depth(asked) <= _DEEPEST, f"more than {_DEEPEST} levels of objects and lists")
        check(_are(dict, messages), "messages must be objects")
        for key, values in _REFUSED.items():
            check(asked.get(key) in values, f"{key} is not supported")
        check(_are(dict, tools), "tools must be a list of objects")
        positive = type(most) is int and most >= 1
        check(most is None or positive, f"max_tokens must be a positive integer, found {most!r}")
        texts = _are(str, self._stop) and all(self._stop)
        check(texts, f"stop must be a text or a list of texts, found {stop!r}")
        if asked.get("tool_choice") == "none":
            tools = []
        self.ask = Ask(messages, tools, most)
        self.streams = bool(asked.get("stream"))
        options = asked.get("stream_options")
        self.sizes = isinstance(options, dict) and bool(options.get("include_usage"))
        self._response: SimpleQueue[Message | Exception] = SimpleQueue()

    def gone(self) -> bool:
        """Whether the client has hung up."""
        if self._client is None:
            return False
        try:
            return not self._client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answer(self, message: Message | Exception) -> None:
        """Respond with the model's message; a ValueError refuses the request."""
        self._response.put(message)

    def completion(self) -> Json:
        """Wait for the response, and return it in OpenAI's form; an error that came instead is raised."""
        response = self._response.get()
        if isinstance(response, Exception):
            raise response
        text = response["content"]
        ends = response["finish_reason"]
        for stop in self._stop:
            text, cut, _ = text.partition(stop)
            if cut:
                ends = "stop"
        message = {"role": "assistant", "content": text}
        calls = response.get("tool_calls")
        if calls:
            ends = "tool_calls"
            message |= {"content": text or None, "tool_calls": []}
            for call in calls:
                arguments = json.dumps(call["function"]["arguments"])
                function = {**call["function"], "arguments": arguments}
                message["tool_calls"].append(
                    {"id": call["id"], "type": "function", "function": function}
                )
        sizes = response["usage"]
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


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)


def _events(completion: Json, sizes: bool) -> bytes:
    """Return a completion as a stream of events: its message, its end and, if ``sizes``, its size."""
    (choice,) = completion["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        message["tool_calls"] = [{"index": number, **call} for number, call in calls]
    contents = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if sizes:
        contents.append({"choices": [], "usage": completion["usage"]})
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    events = [json.dumps(head | content) for content in contents]
    events.append("[DONE]")
    return "".join(f"data: {event}\n\n" for event in events).encode()


def _problem(why: str, code: str | None = None) -> bytes:
    error = {"message": why, "type": "invalid_request_error", "code": code}
    return json.dumps({"error": error}).encode()


class Endpoint(ThreadingHTTPServer):
    """Serves a listening socket in new threads: puts requests that bring the key into the queue ``asked``, one by one.

    Attributes:
        refused: why the last refused request that brought the key got status 400.
    """

    refused = ""

    def __init__(
        self, listening: socket.socket, key: str, asked: "SimpleQueue[Exchange | None]"
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.key = key
        self.asked = asked
        self.turn = threading.Lock()  # belongs to the one request whose body is in memory
        thread = threading.Thread(target=self.serve_forever, args=(3600.0,), daemon=True)
        thread.start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection beyond the limit."""
        if threading.active_count() <= _THREADS:
            return True
        why = _problem("too many connections are open; close some, and ask again")
        request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n" + why)
        return False

    def handle_error(self, *request: Any) -> None:
        """Keep quiet about clients that hang up."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*request)


class _Incoming(io.RawIOBase):
    """Bytes of a client, up to a size and an instant: one that sends a byte now and then holds no thread for ever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def expect(self, size: int) -> None:
        """Begin to read up to ``size`` bytes."""
        self.left = size
        self._until = time.monotonic() + _PATIENCE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.left:
            return 0
        self._connection.settimeout(max(0.001, self._until - time.monotonic()))
        size = self._connection.recv_into(buffer, min(len(buffer), self.left))
        self._connection.settimeout(None)  # else Exchange.gone waits
        self.left -= size
        return size


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms after its headers
    server: Endpoint

    def setup(self) -> None:
        """Limit what the client sends."""
        super().setup()
        self.incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self.incoming)

    def handle_one_request(self) -> None:
        """Answer a request, whose head has limits of its own."""
        self.incoming.expect(_HEAD)
        super().handle_one_request()

    def do_GET(self) -> None:
        """List the model."""
        models = [{"id": _MODEL, "object": "model", "created": 0, "owned_by": "torchtune-rocm"}]
        if self._welcome("/models"):
            listing = {"object": "list", "data": models}
            self._send(json.dumps(listing).encode())

    def do_POST(self) -> None:
        """Queue a request, and send its completion."""
        if not self._welcome("/chat/completions"):
            return
        try:
            with self.server.turn:
                exchange = Exchange(self._body(), self.connection)
                self.server.asked.put(exchange)
                completion = exchange.completion()
        except (ValueError, RecursionError) as problem:
            code = "context_length_exceeded" if isinstance(problem, AtLimit) else None
            self.server.refused = one_line(problem)
            self._fail(400, self.server.refused, code)
            return
        if exchange.streams:
            self._send(_events(completion, exchange.sizes), "text/event-stream")
        else:
            self._send(json.dumps(completion).encode())

    def _welcome(self, path: str) -> bool:
        """Whether a request has a whole head, the key and the path; the response says what it lacks."""
        asked = self.path.partition("?")[0].rstrip("/")
        if not self.incoming.left:
            self._fail(431, f"more than {_HEAD} bytes of headers")
        elif self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._fail(401, "the key is not OPENAI_API_KEY's")
        elif not asked.endswith(path):
            self._fail(404, f"{self.path} is not served; only chat completions are")
        else:
            return True
        return False

    def _body(self) -> bytes:
        size = self.headers.get("Content-Length", "")
        length = int(size) if size.isdecimal() and len(size) <= 9 else -1
        if not 0 <= length <= _BYTES:
            raise ValueError(f"a body of {size or 'unknown'} bytes; expected at most {_BYTES}")
        self.incoming.expect(length)
        return self.rfile.read(length)

    def _fail(self, status: int, why: str, code: str | None = None) -> None:
        self._send(_problem(why, code), status=status)
        self.incoming.expect(_LONGEST)
        while self.rfile.read1():  # else a client that still sends its body hears no response
            pass

    def _send(self, data: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.connection.settimeout(_PATIENCE)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status != 200:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""
