"""A server: HTTP in a thread of its own, the models in the caller's thread."""

import socket
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import uvicorn
from omegaconf import DictConfig

from rocm_ext.serve.adapters import Adapters
from rocm_ext.serve.app import Service, application

_GOODBYE = 1  # seconds that open requests have at the end


def serve(
    cfg: DictConfig,
    out: Path,
    listener: socket.socket,
    key: str,
    *,
    names: list[str],
    most: int,
    stopped: Callable[[], bool],
    greet: Callable[[Adapters], None],
) -> None:
    """Serve a model until the user asks to stop; then save what no checkpoint has.

    Args:
        cfg: config of the base model, see :class:`Adapters`.
        out: folder for checkpoints.
        listener: an open port.
        key: clients need it.
        names, most: see :class:`Adapters`.
        stopped: returns whether the user asked to stop.
        greet: runs once requests are accepted.

    Raises:
        UserError: the model cannot be served.
    """
    # accepted connections inherit it; else an answer of two packets waits 40 ms for the client's acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    adapters = Adapters(cfg, out, most, names)
    try:
        service = Service(adapters)
        settings = uvicorn.Config(
            application(service, key),
            log_level="warning",
            access_log=False,
            loop="asyncio",
            http="h11",
            lifespan="off",
            timeout_graceful_shutdown=_GOODBYE,
        )
        server = uvicorn.Server(settings)
        http = Thread(target=server.run, args=([listener],), daemon=True)
        http.start()
        try:
            greet(adapters)
            service.work.run(stopped)
        finally:
            server.should_exit = True
            http.join(2 * _GOODBYE)
    finally:
        adapters.close()
