"""What a sandboxed run may use, and the fixed things that it gets."""

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
    "PYTHONHASHSEED": "0",  # sets iterate alike in every run
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # each thread takes 32 MB of address space
}


@dataclass(frozen=True)
class Limits:
    """What a run may use. ``cpu_seconds`` None: the wall time, rounded up, and one more."""

    seconds: float = 10.0  # wall time
    cpu_seconds: int | None = None  # per process
    memory_mb: int = 512  # address space per process, and resident memory of all together
    processes: int = 32  # threads count
    file_mb: int = 32  # per file
    tmp_mb: int = 64  # /tmp
    open_files: int = 128
    output_bytes: int = 1 << 20  # stdout, and stderr

    def prlimit(self, processes: bool) -> list[str]:
        """The command that sets them and runs what follows; ``processes``: their number, too."""
        cpu = math.ceil(self.seconds) + 1 if self.cpu_seconds is None else self.cpu_seconds
        limits = [f"--as={self.memory_mb << 20}", f"--cpu={cpu}:{cpu + 1}", f"--fsize={self.file_mb << 20}"]
        limits += [f"--nofile={self.open_files}", "--core=0"] + [f"--nproc={self.processes}"] * processes
        return [tool("prlimit"), *limits, "--"]

    def within(self, seconds: float) -> "Limits":
        """The same with other wall time."""
        return replace(self, seconds=max(0.0, seconds))


@functools.cache
def tool(name: str, missing: str | None = None) -> str:
    """The path of a program.

    Raises:
        UserError: it is not installed.
    """
    path = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:" + os.environ.get("PATH", ""))
    if path is None:
        raise UserError(missing or f"{name} is not installed: `apt install util-linux`")
    return path
