"""The limits and the environment of a sandboxed run."""

import functools
import math
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.base.errors import UserError

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # every run iterates sets in the same order
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a thread takes 32 MB of address space
}


@dataclass(frozen=True)
class Limits:
    """Limits of a run.

    Attributes:
        seconds: wall time.
        cpu_seconds: CPU time per process; 0 sets no limit. By default the wall time, rounded up, plus one.
        memory_mb: address space per process, and resident memory of all processes together.
        processes: number of processes and threads.
        file_mb: size of a file.
        tmp_mb: size of /tmp.
        open_files: number of open files per process.
        output_bytes: size of stdout, and of stderr.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 32
    tmp_mb: int = 64
    open_files: int = 128
    output_bytes: int = 1 << 20

    def resources(self, processes: bool) -> dict[str, tuple[int, int]]:
        """(soft, hard) by the name of the constant ``RLIMIT_...``, with or without the number of processes."""
        cpu = math.ceil(self.seconds) + 1 if self.cpu_seconds is None else self.cpu_seconds
        most = {
            "AS": self.memory_mb << 20,
            "FSIZE": self.file_mb << 20,
            "NOFILE": self.open_files,
            "CORE": 0,
        }
        if processes:
            most["NPROC"] = self.processes
        limits = {name: (value, value) for name, value in most.items()}
        if cpu:
            limits["CPU"] = (cpu, cpu + 1)
        return limits

    def prlimit(self) -> list[str]:
        """The command prefix that sets all limits but the number of processes."""
        command = [tool("prlimit")]
        for name, (soft, hard) in self.resources(processes=False).items():
            command.append(f"--{name.lower()}={soft}:{hard}")
        return [*command, "--"]

    def impose(self, pid: int, processes: bool) -> None:
        """Set the limits of process ``pid``, which it and its children cannot raise.

        If the machine runs out of memory, the kernel ends these processes first.
        """
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        for name, (soft, hard) in self.resources(processes).items():
            number = getattr(resource, f"RLIMIT_{name}")
            _, most = resource.prlimit(pid, number)
            most = hard if most == resource.RLIM_INFINITY else min(hard, most)
            resource.prlimit(pid, number, (min(soft, most), most))


def check_limits(who: str, timeout: float, memory_mb: int, least: int = 128) -> None:
    """Raise UserError unless a user's limit of time is positive, and that of memory at least ``least`` MB."""
    if not (timeout > 0 and memory_mb >= least):
        raise UserError(
            f"{who} needs timeout > 0 and memory_mb >= {least}, found {timeout} and {memory_mb}"
        )


def program(name: str) -> str | None:
    """The path of a system program, or None if it is not installed."""
    return shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:" + os.environ.get("PATH", ""))


@functools.cache
def tool(name: str) -> str:
    """The path of a program of util-linux; raises UserError if it is not installed."""
    if (path := program(name)) is None:
        raise UserError(f"{name} is not installed: `apt install util-linux`")
    return path
