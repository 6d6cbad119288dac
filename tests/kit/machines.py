"""Two machines for tests: network namespaces joined by a link, each with a host name of its own.

Where the system does not allow namespaces, both are this machine, and talk over its loopback.
"""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).parents[2]
PORT = 29500


class Machine:
    """A machine that shares the file system with the test.

    Args:
        number: of the machine in its run.
        endpoint: address and port where the machines meet.
        namespace: its network namespace; None: this machine's.

    Attributes:
        name: of the host.
    """

    def __init__(self, number: int, endpoint: str, namespace: str | None) -> None:
        self.number, self._endpoint, self._namespace = number, endpoint, namespace
        self.name = namespace or platform.node()

    def tune(self, recipe: str, path: Path, *overrides: str, ranks: int = 1) -> subprocess.Popen:
        """Start ``tune run`` on this machine, with ``ranks`` processes; its errors are text."""
        meeting = [
            "--nnodes",
            "2",
            "--node_rank",
            str(self.number),
            "--rdzv_endpoint",
            self._endpoint,
        ]
        tune = str(Path(sys.executable).with_name("tune"))
        command = [
            tune,
            "run",
            *meeting,
            "--nproc_per_node",
            str(ranks),
            recipe,
            "--config",
            str(path),
            *overrides,
        ]
        if self._namespace is not None:
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
            command = ["ip", "netns", "exec", self._namespace, *named, *command]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        return subprocess.Popen(
            command, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Context with two machines."""
    names = [f"tt{os.getpid()}{letter}" for letter in "ab"]
    try:
        if _join(names):
            yield (
                Machine(0, f"10.77.0.1:{PORT}", names[0]),
                Machine(1, f"10.77.0.1:{PORT}", names[1]),
            )
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        yield Machine(0, endpoint, None), Machine(1, endpoint, None)
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _join(names: list[str]) -> bool:
    """Make two namespaces with a link; return whether the system allows it."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return False
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "veth",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth",
            "netns",
            names[1],
        )
    except subprocess.CalledProcessError:
        return False
    for number, name in enumerate(names):
        _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "veth")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "veth", "up")
    return True
