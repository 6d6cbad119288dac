"""Two machines for tests: network namespaces joined by a link, each with a host name of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PORT = 29500


class Machine:
    """A network namespace that shares the file system with the test.

    Args:
        number: of the machine in its run.
        name: of the namespace and of the host.
        first: address of the first machine.
    """

    def __init__(self, number: int, name: str, first: str) -> None:
        self.number, self.name, self._first = number, name, first

    def tune(self, recipe: str, path: Path, *overrides: str, ranks: int = 1, nodes: int = 2) -> subprocess.Popen:
        """Start ``tune run`` on this machine, with ``ranks`` processes; its output is text."""
        meeting = ["--nnodes", str(nodes), "--node_rank", str(self.number), "--rdzv_endpoint", f"{self._first}:{PORT}"]
        tune = str(Path(sys.executable).with_name("tune"))
        run = [tune, "run", *meeting, "--nproc_per_node", str(ranks), recipe, "--config", str(path), *overrides]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *run]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named], env=environ, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def link(self, state: str) -> None:
        """Switch this machine's end of the link ``up`` or ``down``."""
        _ip("-n", self.name, "link", "set", "veth", state)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Context with two machines; skips the test where the system does not allow network namespaces."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs ip and unshare")
    names = [f"tt{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "veth", "netns", names[0], "type", "veth", "peer", "name", "veth", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces need root and their kernel modules: {error.stderr.decode().strip()}")
        for number, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "veth")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "veth", "up")
        first, second = (Machine(number, name, "10.77.0.1") for number, name in enumerate(names))
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
