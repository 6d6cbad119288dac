"""Runs and their checkpoints: folders of the server's output, whole or absent.

``tinker://RUN/weights/NAME`` has adapter, optimiser and generators, ``tinker://RUN/sampler_weights/NAME`` the adapter
alone, and ``RUN/snapshots`` samplers without a name.
"""

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_json, remove_folder, replace_folder, replace_text
from rocm_ext.base.types import Json

SNAPSHOTS = 16  # samplers without a name that are kept, by model
TRAINING = "weights"
SAMPLERS = "sampler_weights"
_NOTES = "checkpoint.json"
_RUN_FILE = "run.json"
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(_LABEL)
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(rf"tinker://({_RUN.pattern})/({TRAINING}|{SAMPLERS})/({_LABEL})")
_DESCRIBED = {
    "run": str,
    "base_model": str,
    "lora": dict,
    "created": float,
}  # what run.json must have
_NOTED = {
    "version": str,
    "base_model": str,
    "base_fingerprint": str,
    "lora": dict,
    "created": float,
}


class Checkpoints:
    """The runs in a folder.

    Args:
        out: the folder.
        base_model: name of the base model.
        fingerprint: hash of its weights; checkpoints of others are refused.
    """

    def __init__(self, out: Path, base_model: str, fingerprint: str) -> None:
        self._out = out
        self._base = {"base_model": base_model, "base_fingerprint": fingerprint}
        for left in out.glob("*/snapshots"):  # of a killed server; nobody knows their names
            shutil.rmtree(left, ignore_errors=True)

    def begin(self, run: str, lora: Json, metadata: object) -> None:
        """Write the description of a new run."""
        folder = self._folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        described = {
            "run": run,
            "base_model": self._base["base_model"],
            "lora": lora,
            "created": time.time(),
            "user_metadata": metadata,
        }
        replace_text(folder / _RUN_FILE, json.dumps(described, indent=1))

    def new(self, run: str, kind: str, label: str, overwrite: bool = False) -> Path:
        """Return the folder for a new checkpoint; a UserError if it exists or its name is malformed."""
        if _NAME.fullmatch(label) is None:
            raise UserError(
                f"checkpoint name {label[:40]!r} must be letters, digits, '.', '_' and '-', at most 128"
            )
        folder = self._folder(run) / kind / label
        if folder.exists() and not overwrite:
            raise UserError(
                f"tinker://{run}/{kind}/{label} exists; take another name, or overwrite=True"
            )
        return folder

    def new_snapshot(self, run: str) -> Path:
        """Return the folder for a sampler without a name."""
        return self._folder(run) / "snapshots" / secrets.token_hex(8)

    def notes(self, lora: Json, step: int, further: Json) -> dict[str, str]:
        """Return the file that describes a checkpoint, by its name."""
        content = {
            "version": secrets.token_hex(8),  # tells a checkpoint from one that it replaced
            **self._base,
            "lora": lora,
            "step": step,
            "created": time.time(),
        }
        return {_NOTES: json.dumps(content | further, indent=1)}

    def write_sampler(
        self, folder: Path, notes: dict[str, str], write: Callable[[Path], None]
    ) -> None:
        """Write a sampler; ``write`` writes its adapter."""
        with replace_folder(folder) as new:
            for name, text in notes.items():
                (new / name).write_text(text)
            write(new)

    def forget(self, run: str) -> None:
        """Remove the samplers without a name of a run that has ended."""
        shutil.rmtree(self._folder(run) / "snapshots", ignore_errors=True)

    def read_notes(self, folder: Path) -> Json | None:
        """Return what a checkpoint says about itself; None if it is gone or damaged."""
        return _valid(folder / _NOTES, _NOTED)

    def find(self, path: str, kind: str | None = None) -> tuple[Path, Json]:
        """Return folder and notes of a checkpoint of this base model, of any kind or of the given one."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise UserError(f"{path[:200]!r} is no checkpoint; expected tinker://RUN/weights/NAME")
        folder = self._folder(match[1]) / match[2] / match[3]
        notes = self.read_notes(folder)
        if notes is None:
            raise UserError(f"there is no checkpoint {path} in {self._out}")
        if kind is not None and match[2] != kind:
            raise UserError(
                f"{path} has no optimiser to train on; name one of tinker://{match[1]}/{TRAINING}"
            )
        if notes["base_fingerprint"] != self._base["base_fingerprint"]:
            raise UserError(f"{path} belongs to another base model, {notes['base_model']}")
        return folder, notes

    def remove(self, path: str) -> None:
        """Remove a checkpoint."""
        folder, _ = self.find(path)
        remove_folder(folder)

    def runs(self) -> Iterator[tuple[str, Json]]:
        """Yield the runs with their descriptions, the newest first."""
        for file in sorted(self._out.glob(f"*/{_RUN_FILE}"), reverse=True):
            described = _valid(file, _DESCRIBED)
            if described is not None:
                yield described["run"], described

    def of_run(self, run: str) -> Iterator[tuple[str, Path, Json]]:
        """Yield the checkpoints of a run: kind and name, folder, and notes."""
        if _RUN.fullmatch(run) is None:
            return
        for kind in (TRAINING, SAMPLERS):
            for file in sorted((self._folder(run) / kind).glob(f"*/{_NOTES}")):
                folder = file.parent
                notes = self.read_notes(folder)
                if notes is not None and not folder.name.startswith("."):
                    yield f"{kind}/{folder.name}", folder, notes

    def _folder(self, run: str) -> Path:
        """Return the folder of a run; ids have colons, which some file systems do not take."""
        return self._out / run.replace(":", "-")


def _valid(file: Path, types: dict[str, type]) -> Json | None:
    """Return a file's JSON object; None if it lacks a key or is damaged."""
    try:
        content = read_json(file)
    except UserError:
        return None
    if content is None:
        return None
    fits = all(isinstance(content.get(key), kind) for key, kind in types.items())
    return content if fits else None
