"""Ranks on several machines watch each other: torchrun sees only those of its own machine.

Every rank keeps a connection to rank 0, which carries nothing while all is well. The system closes it when a process
ends, and its keepalive probes find a machine or a link that is gone. The system answers the probes and not the process,
so neither a long computation nor a long wait for another rank counts as a loss.
"""

import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.process import tell_launcher

_MEET = 60.0  # seconds in which all ranks connect
_GRACE = 1.0  # seconds for a rank to end by itself, with its own message; less than `guarded` waits before a traceback

_watch: "Watch | None" = None


class Watch:
    """This rank's connections; a thread ends the process when another rank is lost.

    Args:
        rank: of this process.
        peers: a connection to rank 0, or on rank 0 one to each other rank.
        places: name of each rank's machine, and the machine's number.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], places: list[tuple[str, int]]) -> None:
        self._rank, self._peers, self._places = rank, peers, places
        self._closing = self._told = False
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def tell(self, text: str) -> None:
        """Tell the other ranks why this one ends."""
        self._told = True
        self._send({"rank": self._rank, "text": text})

    def close(self) -> None:
        """Stop watching; every rank has done its work."""
        self._closing = True
        self._send({})

    def _send(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.settimeout(_GRACE)
                peer.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        ranks = {peer: rank for rank, peer in self._peers.items()}
        received = dict.fromkeys(ranks, b"")
        while received and not self._closing:
            for peer in select.select(list(received), [], [])[0]:
                data, why = _read(peer)
                received[peer] += data
                if data and b"\n" not in data:
                    continue
                content = received.pop(peer).partition(b"\n")[0]  # where all ranks fail, rank 0 sends several
                message = (
                    json.loads(content) if data else {"rank": ranks[peer], "text": f"{why}; {_CURE}", "lost": True}
                )
                if message:  # an empty one says that all went well
                    self._end(message)

    def _end(self, message: dict[str, Any]) -> None:
        """End this process because another rank has failed, or is lost."""
        lost, text = message["rank"], message["text"]
        host, node = self._places[lost]
        here = node == self._places[self._rank][1]
        if not self._rank:
            self._send(message)
        time.sleep(_GRACE)
        if self._closing:
            return
        if not self._told and not (here and "lost" in message):  # torchrun tells how processes on its machine ended
            _print(f"error: {text}" if here else f"error: rank {lost} on {host}: {text}")
        os._exit(1)  # the main thread may wait for the lost rank in C++ code


_CURE = "resume_from_checkpoint=True continues the run, also on the machines that are left"


def _read(peer: socket.socket) -> tuple[bytes, str]:
    """What arrived; nothing where the connection is lost, and why that is."""
    try:
        return peer.recv(65536), "its process ended, see the messages there"
    except ConnectionResetError:
        return b"", "its process ended, see the messages there"
    except OSError as error:
        return b"", f"its machine does not answer ({error.strerror or error})"


def _print(message: str) -> None:
    if not tell_launcher(message):
        print(message, file=sys.stderr, flush=True)


def begin(rank: int, node: int, gather: Callable[[Any], list[Any]], timeout: float) -> None:
    """Connect this rank; every rank calls this together.

    Args:
        rank: of this process.
        node: number of its machine.
        gather: returns every rank's value in rank order, on every rank.
        timeout: seconds without an answer after which a machine counts as lost.

    Raises:
        UserError: rank 0 cannot be reached.
    """
    global _watch
    server = None if rank else _server()
    key = (server.getsockname()[1], secrets.token_hex(8)) if server else None
    shared = gather((socket.gethostname(), node, key))
    port, token = shared[0][2]
    hello = token.encode()
    peers, problem = {}, ""
    try:
        peers = _accept(server, hello, len(shared) - 1) if server else {0: _connect(port, hello, rank)}
    except OSError as error:
        problem = error.strerror or str(error)
    for peer in peers.values():
        _keep_alive(peer, timeout)
    places = [(host, number) for host, number, _ in shared]
    failed = [(at, problem) for at, problem in enumerate(gather(problem)) if problem]
    if failed:
        at, problem = failed[-1]
        raise UserError(
            f"rank {at} on {places[at][0]} cannot reach rank 0 on {places[0][0]}, port {port}: {problem}. The machines "
            "of a run must reach each other on every TCP port; look at their firewalls"
        )
    _watch = Watch(rank, peers, places)


def tell(text: str) -> bool:
    """Tell the other ranks why this one ends; return whether there are connections to do so."""
    if _watch is None:
        return False
    _watch.tell(text)
    return True


def close() -> None:
    """Stop watching; every rank has done its work."""
    global _watch
    if _watch is not None:
        _watch.close()
    _watch = None


def _server() -> socket.socket:
    with suppress(OSError):  # IPv6 may be switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(server: socket.socket, hello: bytes, count: int) -> dict[int, socket.socket]:
    """Wait for ``count`` ranks."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _MEET
    with server:
        while len(found) < count:
            server.settimeout(max(0.001, end - time.monotonic()))
            peer = server.accept()[0]
            peer.settimeout(5)
            said = b""
            with suppress(OSError):
                while len(said) < len(hello) + 4 and (data := peer.recv(len(hello) + 4 - len(said))):
                    said += data
            if len(said) == len(hello) + 4 and said.startswith(hello):
                found[int.from_bytes(said[-4:], "big")] = peer
            else:  # not one of ours
                peer.close()
    return found


def _connect(port: int, hello: bytes, rank: int) -> socket.socket:
    peer = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=_MEET / 2)
    peer.sendall(hello + rank.to_bytes(4, "big"))
    return peer


def _keep_alive(peer: socket.socket, timeout: float) -> None:
    """Have the system find out within about ``timeout`` seconds that the other side is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval = max(1, round(timeout / 3)), max(1, round(timeout / 9))
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": 6}
    options["TCP_USER_TIMEOUT"] = round(timeout * 1000)  # where data wait for an answer there are no probes
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
