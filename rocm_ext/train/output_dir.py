"""The output folder of a run: one run at a time writes to it, and no run overwrites another by accident."""

import errno
import json
import os
import platform
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from omegaconf import DictConfig
from torchtune.training.seed import set_seed

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, json_object, remove_folder, replace_text, rewrite_lines
from rocm_ext.base.types import Json
from rocm_ext.distributed.ranks import Ranks, rank
from rocm_ext.machine.counters import HARDWARE_LOG, remove_logs
from rocm_ext.machine.trace import FOLDER
from rocm_ext.train.checkpoint import Checkpoints, State

_LOCK = ".lock"  # the system's lock is on this file, and ends with the process
_SOFT = ".lock.pid"  # the lock on a file system without locks
_HOLDER = ".lock.json"  # the process that holds the lock, for messages
_LETTING_GO = 30.0  # seconds: a killed process keeps its locks until all its threads have ended and its memory is free
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

    def __init__(
        self, path: Path, *, keep: int, resume: bool, overwrite: bool, ranks: Ranks
    ) -> None:
        self.path = path
        self.resume = resume
        self.overwrite = overwrite
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        names = ("checkpoints", "adapter", "metrics.jsonl")
        earlier = [name for name in names if (path / name).exists()]
        if earlier and not resume and not overwrite:
            raise UserError(
                f"output_dir {path} holds an earlier run ({', '.join(earlier)}); resume_from_checkpoint=True "
                "continues it, overwrite_output_dir=True replaces it, or choose another output_dir"
            )
        self.resumed: tuple[Path, State] | None = None
        if resume:
            self.resumed = self.checkpoints.newest(ranks)

    @classmethod
    def open(cls, cfg: DictConfig, ranks: Ranks) -> "OutputDir":
        """Create a config's output folder, and seed every random generator.

        If ``cfg.seed`` is null, this sets it to the seed of the run to resume, or to a new one.

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
        recorded = None
        if folder.resumed is not None:
            _, state = folder.resumed
            recorded = state["config"]["seed"]
        cfg.seed = pick_seed(cfg.seed, recorded, ranks)
        set_seed(seed=cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)
        if ranks.is_main:
            folder.create()
        return folder

    def earlier_plan(self, cfg: DictConfig) -> dict[str, int]:
        """The memory plan of the checkpoint that the run resumes, unless ``cfg`` asks for other micro-batches."""
        if self.resumed is None:
            return {}
        _, state = self.resumed
        if state["config"].get("tokens_per_micro_batch") != cfg.get("tokens_per_micro_batch"):
            return {}
        return state.get("plan", {})  # earlier versions saved none

    def create(self) -> None:
        """Create the folder."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def take(self, config: str, step: int | None, keeps: Callable[[Json], bool]) -> None:
        """Claim the folder for this run; called once all other set-up has succeeded.

        This removes leftovers of killed processes and, if the run overwrites an earlier one, that run's files.

        Args:
            config: text of ``config.yaml``.
            step: number of the checkpoint that the run resumes. None for a fresh run, for which ``metrics.jsonl`` loses
                all lines, and ``hardware.jsonl`` and the records of answers go.
            keeps: whether a resumed run keeps a line of ``metrics.jsonl``.
        """
        if self.overwrite and not self.resume:
            for path in self.checkpoints.steps():
                remove_folder(path)
            for name in ("adapter", "merged", FOLDER):
                shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / "summary.json").unlink(missing_ok=True)
        self.checkpoints.sweep(step or 0)
        if step is None:
            with disk_errors(self.path / HARDWARE_LOG):
                remove_logs(self.path)
                for name in ("samples", "verdicts", "turns"):
                    (self.path / f"{name}.jsonl").unlink(missing_ok=True)
                    for part in self.path.glob(f"{name}.rank*.jsonl"):
                        part.unlink()
        replace_text(self.path / "config.yaml", config)
        rewrite_lines(self.path / "metrics.jsonl", lambda line: step is not None and keeps(line))


def pick_seed(requested: int | None, recorded: int | None, ranks: Ranks) -> int:
    """Return the requested seed, else the recorded one, else a random one below 2**31; the same on all ranks."""
    seed = recorded if requested is None else requested
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    return ranks.agree(seed)


# ---- one run at a time


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Context in which only this run writes to its output ``folder``, created if needed and removed if it stays empty.

    The main rank takes the lock for all ranks. It waits for the lock of a killed process, which the system releases
    only when all threads of the process have ended. On a file system without locks, a file names the process that holds
    the folder. The file of a dead process goes where the system can exchange two names; elsewhere, as on NFS, the user
    deletes it.

    Raises:
        UserError: another run uses the folder, or it is not writable; the message says who.
    """
    if rank():
        yield
        return
    made = not folder.exists()
    record = folder / _HOLDER
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock: BaseFileLock = FileLock(folder / _LOCK, fallback_to_soft=False)
        try:
            try:
                lock.acquire(timeout=_LETTING_GO, cancel_check=lambda: not _killed(folder))
            except (NotImplementedError, OSError) as error:
                if not isinstance(error, NotImplementedError) and error.errno not in _NO_LOCKS:
                    raise
                lock = SoftFileLock(folder / _SOFT)
                lock.acquire(timeout=0)
        except Timeout:
            raise _used(folder) from None
    try:
        holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(sys.argv),
        }
        replace_text(record, json.dumps(holder) + "\n")
        yield
    finally:
        record.unlink(missing_ok=True)
        # a process that waits on the removed file notices and starts anew
        if os.name != "nt":
            (folder / _LOCK).unlink(missing_ok=True)
        lock.release()
        if made:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _holder(folder: Path) -> Json | None:
    """Return the process that holds the folder; None before it has written that."""
    with suppress(OSError):
        holder = json_object((folder / _HOLDER).read_bytes())
        if holder and {"pid", "host", "started", "command"} <= holder.keys():
            return holder
    return None


def _killed(folder: Path) -> bool:
    holder = _holder(folder)
    if holder is None or holder["host"] != platform.node():
        return False
    try:
        return psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, TypeError, ValueError):
        return True


def _used(folder: Path) -> UserError:
    who = "another process"
    holder = _holder(folder)
    if holder is not None:
        who = f"process {holder['pid']} on {holder['host']}, started {holder['started']}: {holder['command']}"
    lost = f"; if it no longer runs, delete {folder / _SOFT}" if (folder / _SOFT).exists() else ""
    return UserError(
        f"output_dir {folder} is in use by {who}. Wait for it, stop it, or choose another output_dir{lost}"
    )
