"""The surroundings of a part: device, sizes of models, folders. Importing this module does not import torch."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_ext.base.files import replace_text

if TYPE_CHECKING:
    import torch

    from rocm_ext.bench.probes import Bench

Row = dict[str, Any]
CONFIGS = {"pocket": "cpu_pocket", "0.5b": "mi50_qwen0_5b", "7b": "mi300x_qwen7b"}
GIB = 2**30


class Skipped(Exception):
    """A part cannot run here; the message says why."""


def check(what: str, ok: bool, found: str) -> Row:
    """Return the row of a check."""
    return {"what": what, "ok": bool(ok), "found": found}


def speed(what: str, value: float, unit: str, note: str = "", **data: Any) -> Row:
    """Return the row of a measurement.

    Args:
        what: the measured quantity.
        value: the value in ``unit``.
        unit: the unit.
        note: further facts for the table.
        data: further values for the JSON file and for later parts.
    """
    return {"what": what, "value": value, "unit": unit, "note": note, **data}


@dataclass(frozen=True)
class Here:
    """The surroundings of a part.

    Attributes:
        device: cuda or cpu.
        tiny: whether models are small and steps few.
        folder: folder of the files that all parts share.
        earlier: results of the earlier parts, as in the JSON file, by name.
    """

    device: str
    tiny: bool
    folder: Path
    earlier: Mapping[str, Mapping[str, Any]]

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    def size(self, size: str) -> str:
        """Return ``size``, or the pocket model's where models are small."""
        return "pocket" if self.tiny else size

    @cached_property
    def torch_device(self) -> "torch.device":
        """The device; this starts CUDA or HIP."""
        import torch

        return torch.device(self.device)

    def bench(self, size: str, *overrides: str) -> "Bench":
        """Return the config, machine and device that the probes of ``rocm-ext bench`` measure.

        Args:
            size: a key of :data:`CONFIGS`; small models replace it.
            overrides: ``key=value``.
        """
        from rocm_ext.bench.probes import Bench
        from rocm_ext.bench.sweep import Spec
        from rocm_ext.machine.budget import memory_budget
        from rocm_ext.machine.detect import detect
        from rocm_ext.machine.profile import choose_profile, load_profile

        machine = detect()
        profile = load_profile(choose_profile(machine)[0])
        budget, _ = memory_budget(profile, machine)
        given = (
            f"hardware={profile.name}",
            *(["tokenizer.max_seq_len=128"] if self.tiny else []),
            *overrides,
        )
        return Bench(Spec(CONFIGS[self.size(size)], given, budget, 0.05 if self.tiny else 1.0))

    def world(self, name: str, make: Callable[[Path], Any], gib: float = 0.0) -> tuple[Path, Any]:
        """Return a folder that all parts share, and what ``make`` returned when it filled it.

        Args:
            name: the folder's name.
            make: fills the folder; its result must fit into JSON.
            gib: size of the files.

        Raises:
            Skipped: the disk has too little room.
        """
        folder = self.folder / name
        done = folder / "made.json"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            if (free := shutil.disk_usage(self.folder).free / GIB) < gib + 1:
                raise Skipped(
                    f"needs {gib + 1:.0f} GiB of disk in {self.folder}, {free:.0f} are free"
                )
            folder.mkdir()
            replace_text(done, json.dumps(make(folder)))
        return folder, json.loads(done.read_text())

    def of(self, part: str, key: str) -> Any:
        """Return a value of an earlier part's rows, or None: the part did not run, or its rows do not have it."""
        rows = self.earlier.get(part, {}).get("rows", [])
        return next((row[key] for row in rows if key in row), None)
