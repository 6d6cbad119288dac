"""Checks that the machines of a run share versions, config, model, data and output folder. One machine skips them."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
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
from rocm_ext.base.nested import flatten
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
    check_same(
        lambda: {"dtype": str(dtype)}, ranks, "set dtype to one that every machine computes in"
    )
    model = Path(
        str(cfg.checkpointer.checkpoint_dir)
    )  # one that the hub has is compared when its weights are read
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
    of_ranks: list[tuple[str, Mapping[str, object]]] = ranks.gather((platform.node(), values()))
    first_host, first = of_ranks[0]
    for rank, (host, others) in enumerate(of_ranks):
        differences = []
        for name in sorted({*first, *others}):
            if first.get(name) != others.get(name):
                differences.append(_difference(name, first.get(name), others.get(name)))
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"rank 0 on {first_host} and rank {rank} on {host} differ in {'; '.join(differences[:3])}{more}. "
                f"Please {cure}"
            )


def _difference(name: str, one: Any, other: Any) -> str:
    return name if len(str(one)) == len(str(other)) == 64 else f"{name} ({one} and {other})"


def _versions() -> dict[str, str]:
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    digest, here = sha256(), Path(rocm_ext.__file__).parent
    for path in sorted(here.rglob("*.py")):  # two clones may have the same version
        digest.update(str(path.relative_to(here)).encode() + path.read_bytes())
    return versions | {"the files of torchtune-rocm": digest.hexdigest()}


def _listing(model: Path) -> dict[str, str]:
    """The files of a model's folder: sizes of the weights, hashes of the texts."""
    contents: dict[str, str] = {}
    for path in sorted(model.iterdir()) if model.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            small = path.suffix not in _WEIGHTS
            key = f"the model's {path.name}"
            contents[key] = (
                sha256(path.read_bytes()).hexdigest() if small else f"{path.stat().st_size} bytes"
            )
    return contents


def _check_shared(folder: Path, ranks: Ranks) -> None:
    """Check that all machines write to the same output folder, and see at once which files others write or remove."""
    name = f".machine-{ranks.agree(time.time_ns())}-"
    hosts: Sequence[tuple[int, str]] = sorted(set(ranks.gather((machine_index(), platform.node()))))
    files = {number: folder / f"{name}{number}" for number, _ in hosts}
    mine, first, problem = files[machine_index()], not local_rank(), ""
    seen = [
        number for number, file in files.items() if file.exists()
    ]  # none; a client may remember that
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
        missing = [number for number, file in files.items() if not file.exists()]
        late = bool(missing)
        end = time.monotonic() + _PATIENCE
        while missing and time.monotonic() < end:
            time.sleep(0.2)
            with suppress(OSError):
                listdir(folder)  # has an NFS client ask the server
            missing = [number for number in missing if not files[number].exists()]
        if missing:
            others = " and ".join(host for number, host in hosts if number in missing)
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
        seen = [number for number, file in files.items() if file.exists()]
        refuse(filter(None, ranks.gather(_late(folder, "removed") if seen else "")))
    finally:
        if first:
            mine.unlink(missing_ok=True)


def _late(folder: Path, what: str) -> str:
    return (
        f"output_dir {folder.absolute()} is shared, but {platform.node()} does not see at once which files others have "
        f"{what}. Mount it without a cache of names: for NFS with the option lookupcache=none, on every machine"
    )
