"""What to measure: plain values, which the parent sends to its children."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import Lock

# In the order of the table. Each is a module of this package with ``measure(bench, values)``.
PROBES = ("gemm", "bandwidth", "link", "attention", "loader", "training", "decoding")


@dataclass(frozen=True)
class Spec:
    """One run of ``rocm-ext bench``.

    Attributes:
        config: config whose model is measured: a name or a file.
        overrides: ``key=value``.
        budget: bytes that a probe may take on the device.
        quick: fewer and shorter measurements.
        seconds: the least time of a measurement.
    """

    config: str
    overrides: tuple[str, ...]
    budget: int
    quick: bool
    seconds: float


@dataclass(frozen=True)
class Item:
    """One thing to measure.

    Attributes:
        probe: one of :data:`PROBES`.
        values: the probe's arguments.
        environ: environment variables of the child.
        skip: the reason to leave this out; empty: measure it.
    """

    probe: str
    values: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)
    skip: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def items(machine: Machine, locked: Mapping[str, Lock], quick: bool) -> list[Item]:
    """What is worth measuring on ``machine``, but for training steps; :mod:`rocm_ext.bench.sweep` chooses those.

    Args:
        machine: machine to measure.
        locked: settings that are not measured.
        quick: measure fewer.
    """
    made = [*_gemm(machine), *_bandwidth(machine), *_links(machine), *_attention(machine, quick)]
    return [*made, *_loader(machine, locked, quick), *_decoding(quick)]


def dtypes(machine: Machine) -> list[str]:
    """The dtypes that ``machine`` computes natively; any CPU counts as having bf16."""
    return [
        "fp32",
        *(["bf16"] if machine.bf16 or machine.backend == "cpu" else []),
        *["fp16"] * (machine.backend != "cpu"),
    ]


def refused(wanted: Mapping[str, Any], locked: Mapping[str, Lock]) -> str:
    """The reason why ``wanted`` is not measured; empty: it is."""
    for key, value in wanted.items():
        if (lock := locked.get(key)) and value not in (lock.value, *lock.also):
            return f"locked here: {lock.reason} (--risky measures it)"
    return ""


def _gemm(machine: Machine) -> Iterator[Item]:
    libraries: list[tuple[str, dict[str, str]]] = [("default", {})]
    if machine.backend == "rocm":  # both torch and rocBLAS may choose hipBLASLt
        names = ("ROCBLAS_USE_HIPBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")
        libraries = [("rocBLAS", dict.fromkeys(names, "0")), ("hipBLASLt", dict.fromkeys(names, "1"))]
    for library, environ in libraries:
        for dtype in dtypes(machine):
            for direction in ("forward", "dgrad", "wgrad"):
                yield Item("gemm", {"direction": direction, "dtype": dtype, "library": library}, environ)


def _bandwidth(machine: Machine) -> Iterator[Item]:
    yield Item("bandwidth", {"what": "device copy"})
    if machine.backend != "cpu":
        for what in ("host to device", "device to host", "both ways"):
            for pinned in (False, True):
                yield Item("bandwidth", {"what": what, "pinned": pinned})


def _links(machine: Machine) -> Iterator[Item]:
    if machine.backend != "cpu" and machine.gpu_count > 1:
        yield Item("link", {"what": "GPU to GPU"})
        if machine.system != "Windows":  # without process groups
            yield Item("link", {"what": "all-reduce", "ranks": machine.gpu_count})


def _attention(machine: Machine, quick: bool) -> Iterator[Item]:
    backends = ["flash", "math", "eager"] if machine.backend == "cpu" else ["flash", "efficient", "math", "eager"]
    for tokens in (512,) if quick else (512, 2048):
        for backend in backends:
            yield Item("attention", {"backend": backend, "tokens": tokens})


def _loader(machine: Machine, locked: Mapping[str, Lock], quick: bool) -> Iterator[Item]:
    pins = (False,) if machine.backend == "cpu" else (False, True)
    for workers in (0, 2) if quick else (0, 2, 4, 8):
        for pinned in pins:
            wanted = {"num_workers": workers, "pin_memory": pinned}
            yield Item("loader", wanted, skip=refused(wanted, locked))


def _decoding(quick: bool) -> Iterator[Item]:
    for slots in (16, 64) if quick else (16, 32, 64, 128, 256):
        yield Item("decoding", {"slots": slots})
