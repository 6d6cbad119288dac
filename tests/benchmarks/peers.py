"""The peers' own virtual environments, made when they are first needed, pinned.

torch itself is not installed again: both sides compute with the very build that this library runs on, which
no index may have (ROCm, a vendor's image). The environment sees it, and what it needs, through links.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rocm_ext.hardware.bench_file import cache_folder
from tests.benchmarks.protocol import Failed

# What a user of the peer installs beside torch, as of 2026-11.
PINS = {
    "torchtune": ["torchtune==0.6.1", "torchao==0.13.0", "datasets==5.2.0"],
    "trl": ["trl==1.16.0", "transformers==5.23.0", "peft==0.19.1", "accelerate==1.15.0", "datasets==5.2.0"],
}
ON_A_GPU = {"trl": ["liger-kernel==0.6.4"]}


def python(peer: str, gpu: bool = False) -> Path:
    """The interpreter of ``peer``'s environment; the first call takes a minute or two.

    Raises:
        Failed: pip could not install the pinned packages.
    """
    pins = PINS[peer] + (ON_A_GPU.get(peer, []) if gpu else [])
    key = hashlib.sha256("\n".join([sys.version, metadata.version("torch"), sys.prefix, *pins]).encode())
    folder = (cache_folder() or Path(tempfile.gettempdir())) / "peers" / f"{peer}-{key.hexdigest()[:12]}"
    found = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "ready").exists():
        print(f"making the environment of {peer} ({', '.join(pins)}) in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        lib = subprocess.check_output(
            [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        link_torch(folder / "torch")
        Path(lib, "torch.pth").write_text(f"{folder / 'torch'}\n")
        if subprocess.run([found, "-m", "pip", "install", "--quiet", *pins]).returncode:
            raise Failed(f"no environment for {peer}: pip could not install {', '.join(pins)}, see above")
        (folder / "ready").touch()
    return found


def link_torch(target: Path) -> None:
    """Fill ``target`` with links to torch and its requirements, each with its metadata, which pip reads."""
    target.mkdir()
    for name in closure("torch"):
        distribution = metadata.distribution(name)
        top = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for part in top:
            if not (target / part).exists():
                (target / part).symlink_to(Path(str(distribution.locate_file(part))))


def closure(name: str, seen: set[str] | None = None) -> Iterator[str]:
    """``name`` and all installed distributions that it needs."""
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
