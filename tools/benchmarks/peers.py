"""The peers' virtual environments, with pinned packages, made on first use.

The environments share this library's torch, so all sides compute with the same build. A package index may not have
that build (ROCm, a vendor's image). Links make torch and its requirements visible to the environment.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from rocm_ext.machine.bench_file import cache_folder
from tools.benchmarks.protocol import Failed

# The packages that a user of the peer installs in addition to torch, as of 2026-11; TRL gets our verifier's, too.
PINS = {
    "torchtune": ["torchtune==0.6.1", "torchao==0.13.0", "datasets==5.2.0"],
    "trl": [
        "trl==1.16.0",
        "transformers==5.24.0",
        "peft==0.21.2",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "math-verify==0.9.0",
    ],
}
ON_A_GPU = {"trl": ["liger-kernel==0.6.4"]}


def python(peer: str, gpu: bool = False, installed: bool = False) -> Path:
    """Return the interpreter of ``peer``'s environment; the first call takes a minute or two to make it.

    Args:
        peer: a key of :data:`PINS`.
        gpu: also install packages for GPUs.
        installed: return this interpreter, whose packages are used as they are.

    Raises:
        Failed: pip could not install the pinned packages, or there are none.
    """
    if installed:
        return Path(sys.executable)
    if peer not in PINS:
        raise Failed(
            f"{peer} has no pinned environment here; add --installed where it is installed"
        )
    pins = PINS[peer] + (ON_A_GPU.get(peer, []) if gpu else [])
    key = hashlib.sha256(
        "\n".join([sys.version, metadata.version("torch"), sys.prefix, *pins]).encode()
    )
    folder = (
        (cache_folder() or Path(tempfile.gettempdir())) / "peers" / f"{peer}-{key.hexdigest()[:12]}"
    )
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # tests run in several processes
        if not (folder / "ready").exists():
            make(peer, folder, interpreter, pins)
    return interpreter


def pins_of(peer: str) -> list[str]:
    """Return the pins of what a peer of the tables is made of."""
    parts = {
        "torchtune": ["torchtune"],
        "TRL": ["trl", "transformers", "peft"],
        "transformers": ["transformers"],
    }
    named = parts.get(peer.split()[0], [])
    return [pin for pins in PINS.values() for pin in pins if pin.split("==")[0] in named]


def make(peer: str, folder: Path, interpreter: Path, pins: Sequence[str]) -> None:
    """Make the environment of ``peer`` in ``folder``, with the interpreter ``interpreter``.

    Raises:
        Failed: pip could not install the pinned packages.
    """
    print(
        f"making an environment for {peer} ({', '.join(pins)}) in {folder}",
        file=sys.stderr,
        flush=True,
    )
    venv.create(folder, with_pip=True, clear=True)
    lib = subprocess.check_output(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    link_torch(folder / "torch")
    Path(lib, "torch.pth").write_text(f"{folder / 'torch'}\n")
    if subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *pins]).returncode:
        raise Failed(
            f"no environment for {peer}: pip could not install {', '.join(pins)}, see above"
        )
    (folder / "ready").touch()


def link_torch(target: Path) -> None:
    """Fill ``target`` with links to torch, its requirements, and their metadata for pip."""
    target.mkdir()
    for name in closure("torch"):
        distribution = metadata.distribution(name)
        top = {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }
        for part in top:
            if not (target / part).exists():
                (target / part).symlink_to(Path(str(distribution.locate_file(part))))


def closure(name: str, seen: set[str] | None = None) -> Iterator[str]:
    """Yield ``name`` and all installed distributions that it requires."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    try:
        requires = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    yield name
    for requirement in requires:
        if "extra ==" not in requirement:
            yield from closure(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], seen)
