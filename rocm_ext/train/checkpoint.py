"""Checkpoints of a run. Writing one is atomic, and a run that resumes from it equals an undisturbed run bit for bit."""

import hashlib
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, remove_folder, replace_folder
from rocm_ext.base.log import log
from rocm_ext.config import difference, references
from rocm_ext.distributed.ranks import Ranks

STATE = "state.pt"
CHECKSUMS = "SHA256SUMS"  # `sha256sum -c` reads it

# content of ``state.pt``, by name; see :meth:`rocm_ext.train.loop.Training.save_checkpoint`
State = dict[str, Any]


class Best(TypedDict, total=False):
    """The best adapter so far, and why it is the best: by its answers' score, or by a metric of validations."""

    step: int
    adapter: dict[str, Tensor]
    score: int
    metric: str
    value: float
    loss: float | None


class RngState(TypedDict, total=False):
    """The state of every random generator; ``device`` is missing on a CPU."""

    python: Any
    numpy: Any
    torch: Tensor
    device: Tensor


class Checkpoints:
    """The checkpoint folders of a run, such as ``step_00000012``.

    Args:
        folder: folder that holds them.
        keep: number of checkpoints to keep; saving removes older ones.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[Path]:
        """Return the checkpoint folders, oldest first."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.folder}: {error.strerror}") from error
        return sorted(self.folder / name for name in names if re.fullmatch(r"step_\d+", name))

    def save(self, step: int, state: State, write_more: Callable[[Path], None]) -> None:
        """Write a checkpoint with its checksums, and remove old ones; ``write_more`` adds files to its folder.

        Raises:
            UserError: the disk is full; earlier checkpoints stay as they are.
        """
        with replace_folder(self.folder / f"step_{step:08d}") as folder:
            write_state(folder, state, write_more)
        for other in self.steps()[: -self.keep]:
            remove_folder(other)

    def sweep(self, step: int) -> None:
        """Prepare the folder for a run that continues after ``step``.

        This removes folders that a killed process left half written or half removed. It renames later, unreadable
        checkpoints, so that saving neither replaces nor removes them.
        """
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.steps():
            if int(path.name.removeprefix("step_")) > step:
                names = (path.with_name(f"{path.name}.unreadable{n or ''}") for n in count())
                aside = next(name for name in names if not name.exists())
                with disk_errors(path):
                    path.rename(aside)
                log.warning("checkpoint %s is kept as %s", path, aside.name)

    def newest(self, ranks: Ranks) -> tuple[Path, State] | None:
        """Read the newest checkpoint that all ranks can read, and warn about newer ones.

        Returns:
            The checkpoint's folder and its state; None if there is no checkpoint.

        Raises:
            UserError: there are checkpoints, and none can be read; the message has the reasons.
        """
        skipped: list[tuple[Path, str]] = []
        for path in reversed(ranks.agree(self.steps())):
            state: State = {}
            problem = None
            try:
                state = read_state(path)
            except Exception as error:  # torch.load raises whatever the damaged bytes lead to
                problem = str(error).split("\n")[0] or type(error).__name__
            reasons = [reason for reason in ranks.gather(problem) if reason is not None]
            if not reasons:
                for newer, reason in skipped:
                    log.warning("checkpoint %s cannot be read and is skipped: %s", newer, reason)
                return path, state
            skipped.append((path, reasons[0]))
        if skipped:
            problems = "; ".join(f"{path}: {reason}" for path, reason in skipped)
            raise UserError(
                f"no checkpoint can be read ({problems}). Nothing was changed. Check the disk or restore the "
                f"files, and resume again, or delete {self.folder} to train from the beginning"
            )
        return None


def write_state(folder: Path, state: State, write_more: Callable[[Path], None]) -> None:
    """Write ``state.pt``, the files that ``write_more`` adds, and their checksums, into an empty folder."""
    torch.save(state, folder / STATE)
    write_more(folder)
    names = sorted(file.name for file in folder.iterdir())
    (folder / CHECKSUMS).write_bytes(_checksums(folder, names))


def read_state(path: Path) -> State:
    """Read ``state.pt`` in a folder, after its checksums.

    Raises:
        Exception: a file cannot be read or is damaged; torch raises many kinds.
    """
    expected = (path / CHECKSUMS).read_bytes()
    lines = expected.decode(errors="replace").splitlines()
    names = [line.partition("  ")[2] for line in lines]
    if STATE not in names or any(os.path.basename(name) != name for name in names):
        raise ValueError(f"{CHECKSUMS} is damaged")
    actual = _checksums(path, names)
    if actual != expected:
        pairs = zip(names, actual.decode().splitlines(), lines, strict=True)
        changed = [name for name, now, was in pairs if now != was]
        raise ValueError(f"the checksum of {', '.join(changed) or CHECKSUMS} does not match")
    return torch.load(path / STATE, map_location="cpu", weights_only=True)


def _checksums(folder: Path, names: list[str]) -> bytes:
    """Return the content of ``SHA256SUMS`` for files of ``folder``."""
    lines = []
    for name in names:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        lines.append(f"{digest.hexdigest()}  {name}\n")
    return "".join(lines).encode()


def rng_state(device: torch.device) -> RngState:
    """Return the state of the random generators of Python, numpy and torch, and on a GPU of ``device``."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state: RngState = {
        "python": random.getstate(),
        "numpy": [name, numbers, *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Restore every random generator to a ``state`` from :func:`rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


def check_same_run(
    path: Path,
    state: State,
    cfg: DictConfig,
    identity: Mapping[str, str | int | None],
    free: frozenset[str],
) -> None:
    """Check that this run and the one it resumes are the same.

    Args:
        path: source of ``state``, for messages.
        state: ``config``, ``environment`` and ``identity`` of the run to resume.
        cfg: config of this run.
        identity: further values that the two runs share, by name.
        free: keys that may differ.

    Raises:
        UserError: the runs differ in a way that changes the results; the message names every difference.
    """
    now: Any = OmegaConf.to_container(cfg)
    before = references.begun_as(cfg, state["config"], state["environment"])
    problems = difference(before, now, free)
    for what, value in identity.items():
        was = state["identity"].get(what)
        if was == value:
            continue
        problem = f"{what}: was {was}, is {value}"
        if len(str(was)) == 64:  # hashes tell a reader nothing
            problem = f"{what} changed"
        if what.startswith("tokens_per_micro_batch"):  # auto may choose another number today
            problem += f" (set tokens_per_micro_batch={was})"
        problems.append(problem)
    if problems:
        config = Path(cfg.output_dir) / "config.yaml"
        how = f", as --config {config} does" if config.is_file() else ""
        raise UserError(
            f"{path} belongs to another run: {'; '.join(problems)}. "
            f"Undo these changes{how}, or start a new run in another output_dir"
        )
