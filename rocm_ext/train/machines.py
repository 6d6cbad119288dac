"""Checks that the machines of a run share versions, config, model, data and output folder. One machine skips them."""

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from os import listdir
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import rocm_ext
from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.files import disk_errors
from rocm_ext.base.structure import flatten
from rocm_ext.config import references
from rocm_ext.distributed.ranks import Ranks, local_rank, machine_index, several_machines

_PACKAGES = ("torchtune-rocm", "torch", "torchtune", "torchao", "transformers", "tokenizers")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
SAME_DATA = "give every machine the same data"  # the cure of a difference in rows or prompts
_PATIENCE = 10.0  # seconds in which a file of another machine must appear


def check_machines(cfg: DictConfig, dtype: Any, ranks: Ranks) -> None:
    """Check that the machines of a run have the same versions, config, dtype and model, and share the output folder.

    Every rank calls this together, with the run's config and its dtype.

    Raises:
        UserError: on every rank; the message names the first difference and what to do.
    """
    if not several_machines():
        return
    check_same(_versions, ranks, "install the same versions on every machine")
    settings: Any = OmegaConf.to_container(cfg)
    flat = flatten(settings) | references.digests(cfg)
    check_same(lambda: flat, ranks, "start every machine with the same config and overrides")
    cure = "set dtype to one that every machine computes in"
    check_same(lambda: {"dtype": str(dtype)}, ranks, cure)
    # a model that the hub has is compared when its weights are read
    model = Path(str(cfg.checkpointer.checkpoint_dir))
    check_same(lambda: _listing(model), ranks, f"copy {model} from one machine to the others")
    _check_shared(Path(cfg.output_dir), ranks)


def check_same(values: Callable[[], Mapping[str, object]], ranks: Ranks, cure: str) -> None:
    """Check that ``values`` are the same on every machine; every rank calls this together.

    Args:
        values: returns values by name; called on several machines only. Messages omit hashes of 64 characters.
        ranks: all processes of the run.
        cure: what to do about a difference.

    Raises:
        UserError: on every rank; the message names the values that differ, and the machines.
    """
    if not several_machines():
        return
    of_ranks: Any = ranks.gather((platform.node(), values()))
    first_host, first = of_ranks[0]
    for rank, (host, others) in enumerate(of_ranks):
        differences = []
        for name in sorted({*first, *others}):
            ours, theirs = first.get(name), others.get(name)
            if ours == theirs:
                continue
            are_hashes = len(str(ours)) == len(str(theirs)) == 64
            differences.append(name if are_hashes else f"{name} ({ours} and {theirs})")
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"rank 0 on {first_host} and rank {rank} on {host} differ in {'; '.join(differences[:3])}{more}. "
                f"Please {cure}"
            )


def _versions() -> dict[str, str]:
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    digest = sha256()
    here = Path(rocm_ext.__file__).parent
    for path in sorted(here.rglob("*.py")):  # two clones may have the same version
        digest.update(str(path.relative_to(here)).encode() + path.read_bytes())
    return versions | {"the files of torchtune-rocm": digest.hexdigest()}


def _listing(model: Path) -> dict[str, str]:
    """The files of a model's folder: sizes of the weights, hashes of the texts."""
    contents: dict[str, str] = {}
    for path in sorted(model.iterdir()) if model.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            content = f"{path.stat().st_size} bytes"
            if path.suffix not in _WEIGHTS:
                content = sha256(path.read_bytes()).hexdigest()
            contents[f"the model's {path.name}"] = content
    return contents


def _check_shared(folder: Path, ranks: Ranks) -> None:
    """Check that all machines write to the same output folder, and see at once which files others write or remove."""
    name = f".machine-{ranks.agree(time.time_ns())}-"
    hosts: dict[int, str] = dict(ranks.gather((machine_index(), platform.node())))
    files = {number: folder / f"{name}{number}" for number in sorted(hosts)}
    mine = files[machine_index()]
    first = not local_rank()
    problem = ""

    def seen() -> set[int]:
        return {number for number, file in files.items() if file.exists()}

    seen()  # none; a client may remember that
    try:
        ranks.barrier()
        if first:
            try:
                with disk_errors(mine):
                    folder.mkdir(parents=True, exist_ok=True)
                    mine.write_bytes(b"")
            except UserError as error:
                problem = str(error)
        refuse(filter(None, ranks.gather(problem)))
        missing = files.keys() - seen()
        late = bool(missing)
        end = time.monotonic() + _PATIENCE
        while missing and time.monotonic() < end:
            time.sleep(0.2)
            with suppress(OSError):
                listdir(folder)  # has an NFS client ask the server
            missing -= seen()
        if missing:
            others = " and ".join(hosts[number] for number in sorted(missing))
            problem = (
                f"output_dir {folder.absolute()} is not shared: {platform.node()} does not see what {others} writes "
                "there. Mount one folder under this path on every machine"
            )
        elif late:
            problem = _late(folder, "created")
        refuse(filter(None, ranks.gather(problem)))
        if first:
            mine.unlink()
        ranks.barrier()
        problem = _late(folder, "removed") if seen() else ""
        refuse(filter(None, ranks.gather(problem)))
    finally:
        if first:
            mine.unlink(missing_ok=True)


def _late(folder: Path, what: str) -> str:
    return (
        f"output_dir {folder.absolute()} is shared, but {platform.node()} does not see at once which files others have "
        f"{what}. Mount it without a cache of names: for NFS with the option lookupcache=none, on every machine"
    )
