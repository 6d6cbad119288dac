"""The limits and the environment of a sandboxed run."""

import functools
import math
import os
import shutil
from dataclasses import dataclass, replace

from rocm_ext.errors import UserError

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # every run iterates sets in the same order
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # each thread takes 32 MB of address space
}


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        seconds: wall time.
        cpu_seconds: CPU time of each process; None: the wall time, rounded up, plus one.
        memory_mb: address space of each process, and resident memory of all together.
        processes: processes and threads.
        file_mb: size of a file.
        tmp_mb: size of /tmp.
        open_files: open files of a process.
        output_bytes: of stdout, and of stderr.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 32
    tmp_mb: int = 64
    open_files: int = 128
    output_bytes: int = 1 << 20

    def prlimit(self, processes: bool) -> list[str]:
        """The command that sets the limits and runs the command after it.

        Args:
            processes: limit the number of processes, too.
        """
        cpu = math.ceil(self.seconds) + 1 if self.cpu_seconds is None else self.cpu_seconds
        limits = [f"--as={self.memory_mb << 20}", f"--cpu={cpu}:{cpu + 1}", f"--fsize={self.file_mb << 20}"]
        limits += [f"--nofile={self.open_files}", "--core=0"] + [f"--nproc={self.processes}"] * processes
        return [tool("prlimit"), *limits, "--"]

    def within(self, seconds: float) -> "Limits":
        """The same limits with another wall time."""
        return replace(self, seconds=max(0.0, seconds))


@functools.cache
def tool(name: str, missing: str | None = None) -> str:
    """The path of a system program.

    Args:
        name: the program.
        missing: what to say if it is missing; None: that util-linux has it.

    Raises:
        UserError: it is not installed.
    """
    path = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:" + os.environ.get("PATH", ""))
    if path is None:
        raise UserError(missing or f"{name} is not installed: `apt install util-linux`")
    return path
