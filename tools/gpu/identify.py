"""Which machine this is, in a separate process, because asking torch starts CUDA or HIP."""

import os
import platform
from collections.abc import Iterator
from importlib import metadata

from rocm_ext.machine.detect import detect
from rocm_ext.machine.environment import environment_for
from rocm_ext.machine.profile import choose_profile, load_profile
from tools.benchmarks.protocol import Failed
from tools.gpu.here import GIB, Here, Row

PACKAGES = (
    "torchtune-rocm",
    "torch",
    "torchtune",
    "torchao",
    "triton",
    "transformers",
    "trl",
    "peft",
    "vllm",
)


def identify(here: Here) -> Iterator[Row]:
    """The machine, the versions, and the environment variables of its hardware profile.

    Raises:
        Failed: torch sees no GPU.
    """
    machine = detect()
    if here.gpu and machine.backend == "cpu":
        raise Failed(
            f"torch {machine.torch} sees no GPU. `rocm-ext doctor` says why; --device cpu --tiny needs none"
        )
    profile = load_profile(choose_profile(machine)[0])
    said = (
        str(machine)
        if here.gpu
        else f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    yield {
        "machine": f"{said}, {machine.total_memory / GIB:.1f} GiB",
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions()]),
        "profile": profile.name,
        "environment": {
            name: new.value for name, new in environment_for(profile, machine, os.environ).items()
        },
    }


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
