"""Detect lost ranks on other machines; torchrun detects only losses on its machine.

Every rank keeps a connection to rank 0, which carries nothing while all is well. The system closes the connection when
a process ends, and its keepalive probes detect a lost machine or link. The system answers the probes, not the process,
so neither a long computation nor a long wait for another rank counts as a loss.

A token that the ranks exchange before keeps strangers out, and rank 0 listens on the addresses at which others reach
it. Messages are neither signed nor encrypted: see docs/several-machines.md.
"""

import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.process import tell_launcher
from rocm_ext.base.types import Json

_MEET = 60.0  # seconds in which all ranks connect
_STRANGERS = 256  # connections without the token; above this number the oldest is closed
_LONGEST = 1 << 16  # bytes of a message
_GRACE = 1.0  # seconds for a rank to end by itself, with a message; less than `guarded` waits before a traceback

_watch: "Watch | None" = None


class Watch:
    """This rank's connections; a thread ends the process when another rank is lost.

    Args:
        rank: this process's rank.
        peers: connections by rank: to rank 0, or on rank 0 to all others.
        machines: name and index of the ranks' machines.
    """

    def __init__(
        self, rank: int, peers: dict[int, socket.socket], machines: list[tuple[str, int]]
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._machines = machines
        self._closing = False
        self._reported = False
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def tell(self, text: str) -> None:
        """Tell the other ranks why this rank ends."""
        self._reported = True
        self._send({"rank": self._rank, "text": text})

    def close(self) -> None:
        """Stop watching; every rank has done its work."""
        self._closing = True
        self._send({})

    def _send(self, message: Json) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.settimeout(_GRACE)
                peer.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        received = dict.fromkeys(self._peers, b"")
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closing:
                for key, _ in selector.select():
                    rank, peer = key.data, key.fileobj  # type: ignore[assignment]
                    data, reason = _read(peer)
                    lines, _, rest = (received[rank] + data).rpartition(b"\n")
                    received[rank] = rest[:_LONGEST]
                    message = self._first_message(lines)
                    if message is None and not data:
                        message = {"rank": rank, "text": f"{reason}; {_CURE}", "lost": True}
                    if message is not None:
                        selector.unregister(peer)
                    if message:  # an empty message says that all went well
                        self._end(message)

    def _first_message(self, lines: bytes) -> Json | None:
        """The first message in the lines; if all ranks fail, rank 0 sends several."""
        for line in lines.split(b"\n"):
            message = self._parsed(line)
            if message is not None:
                return message
        return None

    def _parsed(self, line: bytes) -> Json | None:
        """The message in a line; None for anything else."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict):
            return None
        rank, text = message.get("rank"), message.get("text")
        if not message:
            return message
        known = type(rank) is int and 0 <= rank < len(self._machines)
        return message if known and isinstance(text, str) else None

    def _end(self, message: Json) -> None:
        """End this process: another rank has failed or is lost."""
        failed, text = message["rank"], message["text"]
        host, machine = self._machines[failed]
        here = machine == self._machines[self._rank][1]
        if not self._rank:
            self._send(message)
        time.sleep(_GRACE)
        if self._closing:
            return
        reported_by_torchrun = here and "lost" in message  # it watches the processes on its machine
        if not self._reported and not reported_by_torchrun:
            line = f"error: {text}" if here else f"error: rank {failed} on {host}: {text}"
            if not tell_launcher(line):
                print(line, file=sys.stderr, flush=True)
        os._exit(1)  # the main thread may wait for the lost rank in C++ code


_CURE = "resume_from_checkpoint=True continues the run, also on the machines that are left"


def _read(peer: socket.socket) -> tuple[bytes, str]:
    """The received bytes, and the reason for a lost connection, if they are empty."""
    try:
        return peer.recv(65536), "its process ended, see the messages there"
    except ConnectionResetError:
        return b"", "its process ended, see the messages there"
    except OSError as error:
        return b"", f"its machine does not answer ({error.strerror or error})"


def begin(rank: int, machine: int, gather: Callable[[Any], list[Any]], timeout: float) -> None:
    """Connect this rank; every rank calls this together.

    Args:
        rank: this process's rank.
        machine: index of its machine.
        gather: function that returns every rank's value in rank order, on every rank.
        timeout: seconds without an answer after which a machine counts as lost.

    Raises:
        UserError: rank 0 cannot be reached.
    """
    global _watch
    problem = address = ""
    if rank:
        try:
            address = _reached()
        except OSError as error:
            problem = error.strerror or str(error)
    shared = gather((socket.gethostname(), machine, address))
    machines = [(host, number) for host, number, _ in shared]
    addresses = [at for _, _, at in shared]  # at which the ranks reach rank 0
    servers = {}
    if not rank:
        servers = {at: _server(at) for at in set(addresses) if at}
    ports = {at: server.getsockname()[1] for at, server in servers.items()}
    ports, token = gather((ports, secrets.token_hex(16)))[0]
    hello = token.encode()
    peers: dict[int, socket.socket] = {}
    if all(addresses[1:]):  # else a rank has a problem already
        try:
            if rank:
                peers = {0: _connect(address, ports[address], hello, rank)}
            else:
                peers = _accept(list(servers.values()), hello, len(shared) - 1)
        except OSError as error:
            problem = error.strerror or str(error)
    for peer in peers.values():
        _keep_alive(peer, timeout)
    problems = gather(problem)
    failed = [number for number, text in enumerate(problems) if text]
    if failed:
        last = failed[-1]
        port = f", port {ports[addresses[last]]}" if addresses[last] else ""
        raise UserError(
            f"rank {last} on {machines[last][0]} cannot reach rank 0 on {machines[0][0]}{port}: {problems[last]}. "
            "The machines of a run must reach one another on every TCP port; look at their firewalls"
        )
    _watch = Watch(rank, peers, machines)


def tell(text: str) -> bool:
    """Tell the other ranks why this rank ends; return whether they are connected."""
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


def _reached() -> str:
    """The address at which this process reaches rank 0's machine, where torchrun's store listens."""
    store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(store, timeout=_MEET / 2) as probe:
        return str(probe.getpeername()[0])


def _server(address: str) -> socket.socket:
    """Listen at ``address``, or at all addresses if this machine lacks it, as behind a NAT."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((address, 0), family=family)
    return socket.create_server(("", 0), family=family)


def _accept(servers: Sequence[socket.socket], hello: bytes, count: int) -> dict[int, socket.socket]:
    """Wait for ``count`` ranks, which send ``hello`` and their numbers.

    Raises:
        TimeoutError: a rank is missing after a minute.
    """
    peers: dict[int, socket.socket] = {}
    received: dict[socket.socket, bytes] = {}  # from incomplete connections, the oldest first
    length = len(hello) + 4
    end = time.monotonic() + _MEET
    with ExitStack() as stack, selectors.DefaultSelector() as selector:

        def drop(peer: socket.socket) -> bytes:
            selector.unregister(peer)
            return received.pop(peer)

        def admit(server: socket.socket) -> None:
            if len(received) >= _STRANGERS:
                oldest = next(iter(received))
                drop(oldest)
                oldest.close()
            with suppress(OSError):  # it has left again
                peer, _ = server.accept()
                peer.setblocking(False)
                selector.register(peer, selectors.EVENT_READ)
                received[peer] = b""

        def hear(peer: socket.socket) -> None:
            data = b""
            with suppress(OSError):
                data = peer.recv(length - len(received[peer]))
            received[peer] += data
            if data and len(received[peer]) < length:
                return
            content = drop(peer)
            if hmac.compare_digest(content[:-4], hello):
                peers[int.from_bytes(content[-4:], "big")] = peer
            else:  # not one of ours
                peer.close()

        for server in servers:
            stack.enter_context(server).setblocking(False)
            selector.register(server, selectors.EVENT_READ)
        while len(peers) < count and time.monotonic() < end:
            for key, _ in selector.select(end - time.monotonic()):
                if key.fileobj in servers:
                    admit(key.fileobj)  # type: ignore[arg-type]
                elif key.fileobj in received:  # it may have been dropped meanwhile
                    hear(key.fileobj)  # type: ignore[arg-type]
        for peer in list(received):
            drop(peer)
            peer.close()
    if len(peers) < count:
        raise TimeoutError("timed out")
    return peers


def _connect(address: str, port: int, hello: bytes, rank: int) -> socket.socket:
    peer = socket.create_connection((address, port), timeout=_MEET / 2)
    peer.sendall(hello + rank.to_bytes(4, "big"))
    return peer


def _keep_alive(peer: socket.socket, timeout: float) -> None:
    """Have the system detect a lost peer within about ``timeout`` seconds."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1, round(timeout / 3)),
        "TCP_KEEPINTVL": max(1, round(timeout / 9)),
        "TCP_KEEPCNT": 6,
        "TCP_USER_TIMEOUT": round(
            timeout * 1000
        ),  # there are no probes while data wait for an answer
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
