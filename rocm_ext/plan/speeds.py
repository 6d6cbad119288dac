"""How fast a machine is: measured by ``rocm-ext bench``, else as its data sheet says."""

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
    """What a machine reaches.

    Attributes:
        source: where the numbers are from.
        measured: whether they were measured on that machine.
        flops: floating-point operations per second of matrix products, by dtype (bf16, fp16, fp32).
        bandwidth: bytes per second, read and written, of its memory.
        memory: bytes of the device; None where that has to be looked up on the machine itself.
        efficiency: time that a training step should take over the time that it takes; 1 until measured.
        decode_efficiency: the same of a decoding step.
        link: bytes per second that a GPU receives from the others; PCIe 4 unless known.
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
        """How long ``operations`` take one after another, each bound by compute or by memory."""
        rate = self.rate(dtype)
        return sum(max(op.flops / rate, op.bytes / self.bandwidth) for op in operations) / self.efficiency

    def rate(self, dtype: str) -> float:
        """FLOP/s in ``dtype``.

        Raises:
            UserError: there is no figure for it.
        """
        if dtype not in self.flops:
            raise UserError(f"no figure for {dtype} on this machine ({self.source}); there are {', '.join(self.flops)}")
        return self.flops[dtype]


def figures_for(profile: Profile, machine: Machine, bench: Path | None = None) -> Figures:
    """The best that is known about the machine that ``profile`` describes.

    Args:
        profile: the run's hardware.
        machine: where this runs; another machine's figures are its data sheet's.
        bench: what ``rocm-ext bench`` wrote, here or on such a machine; None: its file of this machine, if any.

    Raises:
        UserError: ``bench`` was named and is none, or of other hardware; or there are no figures at all.
    """
    measured = BenchFile.read(bench) if bench else of_this_machine(machine) if _is(profile, machine) else None
    if measured and bench and not _is(profile, replace(machine, **_known(measured.machine))):
        raise UserError(f"{bench} was measured on {measured.machine}, hardware={profile.name} is {profile.title}")
    if measured:
        sheet = profile.figures.get(str(measured.machine.get("arch")), {})
        source = f"measured {measured.date} by rocm-ext bench"
        sizes = _sizes(sheet, profile.figures["reached"]) if sheet else {}
        return Figures(**{**sizes, **measured.figures, "source": source, "measured": True})
    if profile.match.get("backend") == "cpu":
        return measure_cpu()
    archs = [arch for arch in profile.figures if arch != "reached"]
    if not archs:
        raise UserError(f"hardware={profile.name} has no figures of its machine; measure it: rocm-ext bench")
    own = profile.fits(machine) and machine.arch in archs
    sheet, reached = profile.figures[str(machine.arch) if own else archs[0]], profile.figures["reached"]
    return Figures(
        source=f"data sheet of {sheet['machine']}, of which {reached['compute']:.0%} of compute and "
        f"{reached['bandwidth']:.0%} of bandwidth are taken to be reached",
        measured=False,
        flops={d: sheet[d] * 1e12 * reached["compute"] for d in ("bf16", "fp16", "fp32") if d in sheet},
        bandwidth=sheet["bandwidth"] * 1e9 * reached["bandwidth"],
        **_sizes(sheet, reached),
    )


def _sizes(sheet: Mapping[str, Any], reached: Mapping[str, float]) -> dict[str, Any]:
    """What bench does not measure: the memory of the machine that is sold, and what a GPU receives from others."""
    link = {"link": sheet["link"] * 1e9 * reached["bandwidth"]} if "link" in sheet else {}
    return {"memory": int(sheet["memory"] * GIB), **link}


def _is(profile: Profile, machine: Machine) -> bool:
    return profile.fits(machine) or profile.match.get("backend") == "cpu" == machine.backend


def _known(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: machine.get(key) for key in ("backend", "arch")}


def measure_cpu() -> Figures:
    """Figures of this CPU, in half a second: a matrix product in each dtype, and a copy."""
    flops = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(512, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
        flops[name] = 2 * 512 * 1024 * 1024 / _fastest(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    source = torch.zeros(32 * 2**20 // 4)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    why = "matrix products and copies of this CPU, measured just now; a step takes longer than they add up to"
    return Figures(why, False, flops, bandwidth)


def _fastest(work: Callable[[], Any], seconds: float = 0.1) -> float:
    """Seconds of the fastest of some calls."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
