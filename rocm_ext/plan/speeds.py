"""The planned machine and its speeds, from ``rocm-ext bench`` or from a data sheet."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.machine.bench_file import BenchFile, of_this_machine
from rocm_ext.machine.budget import GIB, memory_budget, nominal_budget
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.numerics import DTYPES, dtype_name, pick_dtype
from rocm_ext.machine.profile import Chip, Profile, chips_of, load_profile, named_chips
from rocm_ext.plan.costs import Operation

# Published runs reach these shares, least and most, of speeds computed from a data sheet: see
# tests/plan/published_speeds.yaml
PUBLISHED = {"training": (0.65, 1.2), "sampling": (0.65, 0.85)}
_FUSED = 0.5  # share of its time that a kernel other than a matrix product takes once torch.compile has fused it


@dataclass(frozen=True)
class Figures:
    """The speeds that a machine reaches.

    Attributes:
        source: origin of the numbers.
        measured: whether ``rocm-ext bench`` measured them on that machine.
        sheet: chip whose data sheet the figures come from.
        flops: floating-point operations per second of matrix products, by dtype (bf16, fp16, fp32).
        bandwidth: memory bandwidth, in bytes per second, read and written.
        memory: bytes of the device, or None.
        efficiency: computed time of a training step divided by its measured time. 1 if that was not measured.
        decode_efficiency: the same for a decoding step.
        link: bytes per second that a GPU receives from the others; default: PCIe 4.
        attention: speed of fused attention relative to matrix products.
        launch: seconds in which the host starts a kernel, while the device computes earlier ones.
    """

    source: str
    measured: bool
    flops: Mapping[str, float]
    bandwidth: float
    memory: int | None = None
    efficiency: float = 1.0
    decode_efficiency: float = 1.0
    link: float = 25e9
    attention: float = 1.0
    launch: float = 0.0
    sheet: str | None = None

    @property
    def published(self) -> Mapping[str, tuple[float, float]] | None:
        """The shares of a data sheet's figures that published runs reach; None for other figures."""
        return PUBLISHED if self.sheet else None

    def seconds(self, operations: Iterable[Operation], dtype: str, compiled: bool = False) -> float:
        """Seconds of ``operations`` in sequence. Compute or memory limits every kernel, the host limits their sum.

        Args:
            operations: kernels as eager mode runs them.
            dtype: dtype of the matrix products.
            compiled: whether torch.compile fuses the kernels other than matrix products.
        """
        rate = self.rate(dtype)
        attention_rate = rate * self.attention
        total = launching = 0.0
        for op in operations:
            computing = op.flops / (attention_rate if op.attention else rate)
            seconds = max(computing, op.bytes / self.bandwidth)
            share = _FUSED if compiled and not op.flops else 1
            total += share * seconds
            launching += share * self.launch
        return max(total, launching) / self.efficiency

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in ``dtype``.

        Raises:
            UserError: there is no figure for ``dtype``.
        """
        if dtype not in self.flops:
            raise UserError(
                f"no figure for {dtype} on this machine ({self.source}); known: {', '.join(self.flops)}"
            )
        return self.flops[dtype]


def figures_for(
    profile: Profile, machine: Machine, bench: Path | None = None, chip: str | None = None
) -> Figures:
    """Return the best figures available for the machine that ``profile`` describes.

    Args:
        profile: the run's hardware.
        machine: this machine. If ``profile`` describes another one, the figures come from a data sheet.
        bench: file that ``rocm-ext bench`` wrote on such a machine. Without it, this machine's default file, if it
            exists.
        chip: name of one of the profile's chips. Without it, this machine's chip, or the profile's first.

    Raises:
        UserError: ``bench`` is not a bench file or comes from other hardware, or the profile has no chip.
    """
    likely: list[str] = []  # the profile's chips that this machine may have
    named: list[str] = []  # those that its name means; without such a chip, the name
    if profile.fits(machine) and machine.backend != "cpu":
        memory = None if machine.unified else machine.total_memory
        likely = chips_of(profile, machine.arch, machine.name, memory)
        named = named_chips(profile, machine.arch, machine.name or "", memory) or [
            machine.name or ""
        ]
    here = _describes(profile, machine)
    if bench:
        file = BenchFile.read(bench)
        _check_file(bench, file, profile, machine, chip)
        return _measured(file, profile, chip)
    if here and (chip is None or chip in named):
        own_file = of_this_machine(machine)
        if own_file:
            return _measured(own_file, profile, chip)
    if profile.match.get("backend") == "cpu":
        return measure_cpu()
    if not profile.chips:
        raise UserError(
            f"hardware={profile.name} has no data sheet of its machine; measure it with rocm-ext bench"
        )
    name = chip or (likely or list(profile.chips))[0]
    another = here and not chip and name not in named
    return _computed(profile, name, note=f"; {machine.name} has none here" if another else "")


def _check_file(
    bench: Path, file: BenchFile, profile: Profile, machine: Machine, chip: str | None
) -> None:
    """Refuse a bench file of other hardware than the plan's."""
    key = file.machine
    arch, name = key.get("arch"), key.get("name")
    measured = replace(machine, backend=str(key.get("backend")), arch=arch)
    if not _describes(profile, measured):
        raise UserError(
            f"{bench} was measured on {dict(key)}, but hardware={profile.name} is {profile.title}"
        )
    may_be = named_chips(profile, arch, name or "")
    if chip and chip not in may_be:
        raise UserError(
            f"{bench} was measured on {' or '.join(may_be) or name or arch}, but --machine is {chip}"
        )


def _measured(file: BenchFile, profile: Profile, chip: str | None) -> Figures:
    """Return a bench file's figures; memory and link come from the chip's data sheet."""
    machine = file.machine
    likely = [chip] if chip else chips_of(profile, machine.get("arch"), machine.get("name"))
    sheet = profile.chips.get(likely[0]) if likely else None
    figures = _sizes(sheet, profile) | file.figures
    return Figures(source=f"measured {file.date} by rocm-ext bench", measured=True, **figures)


def _computed(profile: Profile, name: str, note: str) -> Figures:
    """Return the figures of a chip's data sheet that runs are assumed to reach; ``note`` follows the chip's name."""
    sheet = profile.chips[name]
    reached = {**profile.reached, **sheet.reached}
    compute, bandwidth = reached["compute"], reached["bandwidth"]
    rates = {"bf16": sheet.bf16, "fp16": sheet.fp16, "fp32": sheet.fp32}
    shares = f"{compute:.0%} of its compute and {bandwidth:.0%} of its bandwidth"
    return Figures(
        source=f"data sheet of {name}{note}, assuming {shares}",
        measured=False,
        sheet=name,
        flops={dtype: rate * 1e12 * compute for dtype, rate in rates.items() if rate},
        bandwidth=sheet.bandwidth * 1e9 * bandwidth,
        **assumed(reached),
        **_sizes(sheet, profile),
    )


def assumed(reached: Mapping[str, float]) -> dict[str, Any]:
    """Return the assumed figures, which bench does not measure, as arguments of :class:`Figures`."""
    if not reached:
        return {}
    compute = reached["compute"]
    attention = reached.get("attention", compute) / compute
    return {"attention": attention, "launch": reached.get("launch", 0.0) * 1e-6}


def _sizes(sheet: Chip | None, profile: Profile) -> dict[str, Any]:
    """Return memory and link of the data sheet, as arguments of :class:`Figures`."""
    sizes: dict[str, Any] = {}
    if sheet is not None:
        sizes["memory"] = int(sheet.memory * GIB)
        if sheet.link:
            sizes["link"] = sheet.link * 1e9 * profile.reached["bandwidth"]
    return sizes


def _describes(profile: Profile, machine: Machine) -> bool:
    """Whether the profile is for this machine; the CPU's is for every machine that computes on its CPU."""
    return profile.fits(machine) or machine.backend == "cpu" == profile.match.get("backend")


def measure_cpu() -> Figures:
    """Measure this CPU in half a second: a matrix product in fp32 and bf16, and a copy."""
    flops = {}
    for dtype in ("fp32", "bf16"):
        a = torch.randn(512, 1024, dtype=DTYPES[dtype])
        b = torch.randn(1024, 1024, dtype=DTYPES[dtype])
        seconds = _fastest(partial(torch.matmul, a, b))
        flops[dtype] = 2 * 512 * 1024 * 1024 / seconds
    source = torch.zeros(32 * 2**20 // 4)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    why = "matrix products and copies on this CPU, measured just now; a step takes longer than their sum"
    return Figures(why, False, flops, bandwidth)


def _fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of the calls that a tenth of a second allows, at least three."""
    work()
    times: list[float] = []
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True)
class Target:
    """The planned machine.

    Attributes:
        profile: hardware profile.
        name: description of the machine.
        here: whether it is this machine.
        figures: speeds.
        budget: bytes that a process may use, and the reason.
        device: kind of device; it need not exist here.
        dtype: dtype of weights and activations.
    """

    profile: Profile
    name: str
    here: bool
    figures: Figures
    budget: tuple[int, str]
    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype's name in configs."""
        return dtype_name(self.dtype)

    @classmethod
    def of(
        cls, cfg: DictConfig, machine: Machine, bench: Path | None = None, chip: str | None = None
    ) -> "Target":
        """Return the target of a config; its ``hardware`` names the profile. See :func:`figures_for`.

        Raises:
            UserError: the machine's speeds are unknown, or its unified memory leaves nothing to train in.
        """
        profile = load_profile(cfg.hardware)
        here = chip is None and (profile.memory["of"] == "host" or profile.fits(machine))
        figures = figures_for(profile, machine, bench, chip)
        if here:
            title = str(machine)
            budget = memory_budget(profile, machine)
            dtype, _ = pick_dtype(cfg.dtype, machine)
        else:
            title = f"{chip or profile.title}; this is another machine"
            budget = nominal_budget(profile, figures.memory or 0)
            best = "bf16" if "bf16" in figures.flops else "fp32"
            dtype = DTYPES[best if cfg.dtype == "auto" else cfg.dtype]
        device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
        return cls(profile, title, here, figures, budget, device, dtype)
