"""A machine's speeds, measured by ``rocm-ext bench`` or taken from its data sheet."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocm_ext.errors import UserError
from rocm_ext.hardware.bench_file import BenchFile, of_this_machine
from rocm_ext.hardware.budget import GIB
from rocm_ext.hardware.machine import Machine
from rocm_ext.hardware.profile import Profile
from rocm_ext.plan.costs import Operation


@dataclass(frozen=True)
class Figures:
    """The speeds that a machine reaches.

    Attributes:
        source: origin of the numbers.
        measured: whether ``rocm-ext bench`` measured them on that machine.
        flops: floating-point operations per second of matrix products, by dtype (bf16, fp16, fp32).
        bandwidth: of memory, in bytes per second, read and written.
        memory: bytes of the device; None if only the machine itself can tell.
        efficiency: computed over measured time of a training step; 1 until measured.
        decode_efficiency: computed over measured time of a decoding step; 1 until measured.
        link: bytes per second that a GPU receives from the others; PCIe 4 by default.
    """

    source: str
    measured: bool
    flops: Mapping[str, float]
    bandwidth: float
    memory: int | None = None
    efficiency: float = 1.0
    decode_efficiency: float = 1.0
    link: float = 25e9

    def seconds(self, operations: Iterable[Operation], dtype: str) -> float:
        """Seconds of ``operations`` in sequence, each bound by compute or by memory.

        Raises:
            UserError: there is no figure for ``dtype``.
        """
        rate = self.rate(dtype)
        return sum(max(op.flops / rate, op.bytes / self.bandwidth) for op in operations) / self.efficiency

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in ``dtype``.

        Raises:
            UserError: there is no figure for ``dtype``.
        """
        if dtype not in self.flops:
            raise UserError(f"no figure for {dtype} on this machine ({self.source}); known: {', '.join(self.flops)}")
        return self.flops[dtype]


def figures_for(profile: Profile, machine: Machine, bench: Path | None = None) -> Figures:
    """Return the best figures available for the machine that ``profile`` describes.

    Args:
        profile: the run's hardware.
        machine: this machine. If ``profile`` describes another one, the figures come from its data sheet.
        bench: file that ``rocm-ext bench`` wrote on such a machine; None: this machine's default file, if it exists.

    Raises:
        UserError: ``bench`` is not a bench file or comes from other hardware, or the profile has no figures.
    """
    measured = BenchFile.read(bench) if bench else of_this_machine(machine) if _is(profile, machine) else None
    if measured and bench and not _is(profile, replace(machine, **_known(measured.machine))):
        raise UserError(f"{bench} was measured on {measured.machine}, but hardware={profile.name} is {profile.title}")
    if measured:
        sheet = profile.figures.get(str(measured.machine.get("arch")), {})
        source = f"measured {measured.date} by rocm-ext bench"
        sizes = _sizes(sheet, profile.figures["reached"]) if sheet else {}
        return Figures(**{**sizes, **measured.figures, "source": source, "measured": True})
    if profile.match.get("backend") == "cpu":
        return measure_cpu()
    archs = [arch for arch in profile.figures if arch != "reached"]
    if not archs:
        raise UserError(f"hardware={profile.name} has no figures for its machine; measure it with rocm-ext bench")
    own = profile.fits(machine) and machine.arch in archs
    sheet, reached = profile.figures[str(machine.arch) if own else archs[0]], profile.figures["reached"]
    return Figures(
        source=f"data sheet of {sheet['machine']}, assuming {reached['compute']:.0%} of its compute and "
        f"{reached['bandwidth']:.0%} of its bandwidth",
        measured=False,
        flops={d: sheet[d] * 1e12 * reached["compute"] for d in ("bf16", "fp16", "fp32") if d in sheet},
        bandwidth=sheet["bandwidth"] * 1e9 * reached["bandwidth"],
        **_sizes(sheet, reached),
    )


def _sizes(sheet: Mapping[str, Any], reached: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures that bench does not measure: the memory of the machine as sold, and the GPUs' link."""
    link = {"link": sheet["link"] * 1e9 * reached["bandwidth"]} if "link" in sheet else {}
    return {"memory": int(sheet["memory"] * GIB), **link}


def _is(profile: Profile, machine: Machine) -> bool:
    return profile.fits(machine) or profile.match.get("backend") == "cpu" == machine.backend


def _known(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: machine.get(key) for key in ("backend", "arch")}


def measure_cpu() -> Figures:
    """Measure this CPU in half a second: a matrix product in fp32 and bf16, and a copy."""
    flops = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(512, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
        flops[name] = 2 * 512 * 1024 * 1024 / _fastest(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    source = torch.zeros(32 * 2**20 // 4)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    why = "matrix products and copies on this CPU, measured just now; a step takes longer than their sum"
    return Figures(why, False, flops, bandwidth)


def _fastest(work: Callable[[], Any], seconds: float = 0.1) -> float:
    """Seconds of the fastest call among those that fit into ``seconds``; at least three calls."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
