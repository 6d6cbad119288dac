"""The output folder of a run: one run at a time writes to it, and none overwrites another by accident."""

import errno
import json
import os
import platform
import random
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout, UnixFileLock
from omegaconf import DictConfig
from torchtune import training

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, json_object, replace_text
from rocm_ext.distributed.ranks import Ranks, rank
from rocm_ext.machine.counter_log import remove_logs
from rocm_ext.machine.counters import HARDWARE_LOG
from rocm_ext.machine.trace import FOLDER
from rocm_ext.train.checkpoint import Checkpoints
from rocm_ext.train.metrics import Metrics

LOCK = ".lock"  # the system's lock is on this file, and ends with the process
HOLDER = ".lock.json"  # who holds it
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of file systems without locks


class OutputDir:
    """``output_dir`` of a run.

    Args:
        path: the folder; it need not exist.
        keep: number of checkpoints to keep.
        resume: whether this run continues the one in the folder.
        overwrite: whether this run replaces the one in the folder.
        ranks: all processes of the run.

    Attributes:
        checkpoints: the run's checkpoints.
        resumed: the checkpoint to resume from and its state, or None.

    Raises:
        UserError: the folder holds another run, or its checkpoints cannot be read.
    """

    def __init__(self, path: Path, *, keep: int, resume: bool, overwrite: bool, ranks: Ranks) -> None:
        self.path, self.resume, self.overwrite = path, resume, overwrite
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        earlier = [name for name in ("checkpoints", "adapter", "metrics.jsonl") if (path / name).exists()]
        if earlier and not resume and not overwrite:
            raise UserError(
                f"output_dir {path} holds an earlier run ({', '.join(earlier)}); resume_from_checkpoint=True "
                "continues it, overwrite_output_dir=True replaces it, or choose another output_dir"
            )
        self.resumed: tuple[Path, dict[str, Any]] | None = self.checkpoints.newest(ranks) if resume else None

    @classmethod
    def open(cls, cfg: DictConfig, ranks: Ranks) -> "OutputDir":
        """Create a config's output folder, and seed every random generator.

        If ``cfg.seed`` is null, this sets it to the seed of the run to resume, or to a new one.

        Args:
            cfg: config of the run; this may change its ``seed``.
            ranks: all processes of the run; only the main one creates the folder.

        Raises:
            UserError: the folder holds another run, its checkpoints cannot be read, or it is not writable.
        """
        folder = cls(
            Path(cfg.output_dir),
            keep=cfg.keep_last_n_checkpoints,
            resume=cfg.resume_from_checkpoint,
            overwrite=cfg.overwrite_output_dir,
            ranks=ranks,
        )
        cfg.seed = pick_seed(cfg.seed, folder.resumed[1]["config"]["seed"] if folder.resumed else None, ranks)
        training.set_seed(seed=cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)
        if ranks.is_main:
            folder.create()
        return folder

    def create(self) -> None:
        """Create the folder.

        Raises:
            UserError: the folder cannot be created, or is not writable.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def take(self, config: str, step: int | None, keeps: Callable[[dict[str, Any]], bool]) -> Metrics:
        """Claim the folder for this run; called once all other set-up has succeeded.

        This removes leftovers of killed processes and, if the run overwrites an earlier one, that run's files.

        Args:
            config: text of ``config.yaml``.
            step: number of the checkpoint that the run resumes. None: a fresh run, for which ``metrics.jsonl`` loses
                all lines, and ``hardware.jsonl`` goes.
            keeps: whether a resumed run keeps a line of ``metrics.jsonl``.

        Returns:
            The open ``metrics.jsonl``.

        Raises:
            UserError: the disk is full, or a file cannot be written.
        """
        if self.overwrite and not self.resume:
            self.checkpoints.clear()
            for name in ("adapter", "merged", FOLDER):
                shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / "summary.json").unlink(missing_ok=True)
        self.checkpoints.sweep(step or 0)
        if step is None:
            with disk_errors(self.path / HARDWARE_LOG):
                remove_logs(self.path)
        replace_text(self.path / "config.yaml", config)
        return Metrics(self.path / "metrics.jsonl", lambda line: step is not None and keeps(line))


def pick_seed(requested: int | None, recorded: int | None, ranks: Ranks) -> int:
    """Choose a run's seed, the same on all ranks.

    Args:
        requested: the config's seed, or None.
        recorded: seed of the run to resume, or None.
        ranks: all processes of the run.

    Returns:
        The requested seed, else the recorded one, else a random one below 2**31.
    """
    drawn = random.SystemRandom().randrange(2**31)
    return ranks.agree(next(seed for seed in (requested, recorded, drawn) if seed is not None))


# ---- one run at a time


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Context in which only this run writes to ``folder``, which is created if needed and removed if it stays empty.

    The main rank takes the lock for all ranks. The system releases the lock of a dead process at once. On a file
    system without locks, the record of the holder decides: a process that no longer runs holds nothing.

    Args:
        folder: output folder of the run.

    Raises:
        UserError: another run uses the folder, or it is not writable; the message says who.
    """
    if rank():
        yield
        return
    made = not folder.exists()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    record = folder / HOLDER
    if lock is None:
        _claim(folder)
    try:
        if lock is not None:
            replace_text(record, _me())
        yield
    finally:
        record.unlink(missing_ok=True)
        if lock is not None:
            if isinstance(lock, UnixFileLock):  # who waits on the removed file notices and starts anew
                (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        if made:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _lock(folder: Path) -> Any:
    """Take the system's lock; None if the file system has none.

    Raises:
        UserError: another process has it.
        OSError: the folder is not writable.
    """
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filelock tells that it uses another kind of lock
            lock.acquire(timeout=0)
    except Timeout:
        raise _used(folder) from None
    except NotImplementedError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return lock


def _claim(folder: Path) -> None:
    """Create the record of the holder, after removing that of a dead one.

    Raises:
        UserError: the holder runs, or runs on another host.
    """
    record, removing = folder / HOLDER, folder / f"{HOLDER}.removing"
    mine = folder / f"{HOLDER}.{platform.node()}.{os.getpid()}"
    with disk_errors(record):
        try:
            mine.write_text(_me())
            if _runs(_read(record)) is False:
                os.link(mine, removing)  # one process at a time, which looks again: another may hold the folder now
                try:
                    if _runs(_read(record)) is False:
                        record.unlink()
                finally:
                    removing.unlink()
            os.link(mine, record)  # appears with its content, and fails if another has one
        except FileExistsError:
            raise _used(folder) from None
        finally:
            mine.unlink(missing_ok=True)


def _used(folder: Path) -> UserError:
    holder = _read(folder / HOLDER)
    runs = _runs(holder)
    lost = "" if runs else f"; if it no longer runs, delete {folder / HOLDER}"
    if not holder or runs is False:  # the holder has not written its record yet
        return UserError(f"output_dir {folder} is in use by another process; choose another output_dir{lost}")
    return UserError(
        f"output_dir {folder} is in use by process {holder['pid']} on {holder['host']}, started {holder['started']}: "
        f"{holder['command']}. Wait for it, stop it, or choose another output_dir{lost}"
    )


def _me() -> str:
    """The record of this process."""
    record = {
        "pid": os.getpid(),
        "host": platform.node(),
        "namespace": _namespace(),
        "created": _created(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
    }
    return json.dumps(record) + "\n"


def _read(record: Path) -> dict[str, Any]:
    try:
        holder = json_object(record.read_bytes()) or {}
    except OSError:
        return {}
    return holder if {"pid", "host", "namespace", "created", "started", "command"} <= holder.keys() else {}


def _runs(holder: dict[str, Any]) -> bool | None:
    """Whether the holder runs; None if it is on another host or in another container, or its record is unreadable."""
    if not holder:
        return None
    if (holder["host"], holder["namespace"]) != (platform.node(), _namespace()):
        return None
    try:
        process = psutil.Process(holder["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and _created(process.pid) == holder["created"]
    except psutil.Error:
        return False


def _created(pid: int) -> str:
    """What tells a process from another with its id: its boot and its ticks since, which no set clock moves."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return str(psutil.Process(pid).create_time())  # without /proc


def _namespace() -> str:
    """The container in which process ids count; empty where there are none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
