"""A server of Tinker's protocol in threads of this process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import httpx
import tinker

from rocm_ext.config.chosen_model import find_target
from rocm_ext.serve.adapters import Adapters
from rocm_ext.serve.server import serve
from rocm_ext.training.opening import config_for

KEY = "tml-of-the-tests"
OVERRIDES = ("hardware=cpu", "tokenizer.max_seq_len=128", "startup_checks=False")


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: its address.
        adapters: its models, which only its own thread may change.
    """

    url: str
    adapters: Adapters

    def client(self) -> tinker.ServiceClient:
        """Return a client of the SDK with a session of its own."""
        return tinker.ServiceClient(base_url=self.url, api_key=KEY)

    def http(self) -> httpx.Client:
        """Return a plain HTTP client with the key."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"x-api-key": KEY}, timeout=60)

    def wait(self, name: str) -> httpx.Response:
        """Return the answer to a request."""
        with self.http() as http:
            return http.post("/retrieve_future", json={"request_id": name})


@contextmanager
def served(folder: Path, out: Path, most: int = 2) -> Iterator[Served]:
    """Serve a model's folder inside the context."""
    cfg = config_for(find_target(str(folder), None), OVERRIDES)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    stop = Event()
    ready = Event()
    made: list[Adapters] = []
    out.mkdir(parents=True, exist_ok=True)

    def greet(adapters: Adapters) -> None:
        made.append(adapters)
        ready.set()

    def run() -> None:
        try:
            serve(
                cfg,
                out,
                listener,
                KEY,
                names=["base"],
                most=most,
                stopped=stop.is_set,
                greet=greet,
            )
        finally:
            ready.set()

    thread = Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield Served(f"http://{host}:{port}", made[0])
    finally:
        stop.set()
        thread.join()
