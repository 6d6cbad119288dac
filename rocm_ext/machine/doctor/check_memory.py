"""Memory, as the kernel, HIP and torch each see it."""

import math
from collections.abc import Iterator

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import HostMemory, budget_from
from rocm_ext.machine.doctor.facts import ENOUGH, Facts
from rocm_ext.machine.doctor.recorded import Finding, gib, unrecorded

STALL = 0.25  # seconds of the mapped copy; a kernel that stalls takes a second and more
SMALL_CARVE_OUT = 4 * 2**30  # the smallest setting of some machines


def host_memory(facts: Facts) -> Iterator[Finding]:
    """The host's memory, and whether a cgroup allows less."""
    name, total, available = "host memory", facts.host_total, facts.available
    if total is None:
        yield unrecorded(name)
        return
    found = gib(total) + ("" if available is None else f", {gib(available)} available")
    limit = facts.said.memory_limit
    if limit is not None and limit < total:
        yield Finding(name, "warning", f"{found}, {gib(limit)} for this container or session",
                      "a cgroup kills processes that take more, and the memory budget ignores its limit",
                      "raise the limit: docker run --memory, or MemoryMax= in systemd")  # fmt: skip
    else:
        yield Finding(name, "ok", found)


def gpu_memory(facts: Facts) -> Iterator[Finding]:
    """The GPUs' memory, as the kernel, torch and HIP report it. On unified memory, training uses GTT."""
    name, total = "GPU memory", facts.installed_gib
    torch = facts.said.torch.gpus if facts.said.torch else ()
    sizes = [{"VRAM": card.vram, "GTT": card.gtt} for card in facts.cards] if facts.amd_linux else []
    told = [", ".join(f"{label} {gib(size)}" for label, size in both.items() if size is not None) for both in sizes]
    found = [_counted(told), f"torch: {_counted([gib(gpu.total_memory) for gpu in torch])}" if torch else ""]
    if hip := facts.said.hip_memory:
        found.append(f"{gib(hip.available)} free")
    text = "; ".join(filter(None, found))
    if facts.fit.backend == "cpu" or not (torch or facts.amd_linux or facts.said.torch is None):
        return
    if facts.said.torch is None or (facts.amd_linux and not any(told)):
        yield unrecorded(name, text)
        return
    seen = torch[0].total_memory if torch else math.inf
    little = facts.unified and total is not None and seen < ENOUGH * total * 2**30 and facts.linux
    if little and not (facts.too_little or facts.in_carve_out):  # otherwise the check of the cause warns
        why = f"of {total} GiB torch sees {gib(seen)}"
        yield Finding(name, "warning", text, why, facts.boot(facts.memory_parameters))
    else:
        yield Finding(name, "ok", text, facts.too_little if facts.unified else "")


def _counted(texts: list[str]) -> str:
    """``8 x 191.7 GiB`` for eight equal GPUs."""
    counts = {text: texts.count(text) for text in texts if text}
    return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())


def carve_out(facts: Facts) -> Iterator[Finding]:
    """Unified memory that the BIOS reserves for the GPU: a small carve-out is best."""
    name, size = "carve-out", facts.carve_out
    if not facts.amd_linux or not facts.unified:
        return
    smaller = "BIOS: UMA frame buffer (dedicated graphics memory) 512 MB, or the smallest"
    if size is None:
        yield unrecorded(name)
    elif size > SMALL_CARVE_OUT:
        found = f"the BIOS reserves {gib(size)} for the GPU"
        why = "the GPU maps host memory, which is larger, so neither it nor the host uses the carve-out"
        if facts.in_carve_out:  # pages_limit alone would move the GPU to the little memory that the host has left
            why = "the GPU uses this memory only, and the host cannot use it"
            smaller += f"; only then boot with {facts.memory_parameters}"
        yield Finding(name, "warning", found, why, smaller)
    else:
        yield Finding(name, "ok", f"{gib(size)}; small is right on unified memory")


def budget(facts: Facts) -> Iterator[Finding]:
    """What a run may take, computed as the recipes do."""
    name, profile = "memory budget", facts.profile
    if profile is None:
        return
    here = facts.machine.backend == profile.match.get("backend")
    if (
        facts.available is None
        or facts.host_total is None
        or (facts.said.torch is None and profile.memory["of"] != "host")
    ):
        yield unrecorded(name)
    elif here:
        try:
            host = HostMemory(facts.host_total, facts.available, facts.gtt, facts.carve_out)
            size, why = budget_from(profile, facts.machine, host)
        except UserError as error:
            what, _, fix = str(error).partition(". ")
            yield Finding(name, "error", "nothing is left for training", what, fix)
        else:
            yield Finding(name, "ok", f"{gib(size)} for training: {why}")


def copies(facts: Facts) -> Iterator[Finding]:
    """Whether copies from mapped files stall, from which most programs load their weights."""
    name, took = "copies to the GPU", facts.said.copies
    if took is None:
        if facts.machine.arch is not None:
            yield unrecorded(name)
        return
    found = f"{took.size / 2**20:.0f} MiB in {took.mapped:.3g} s from a mapped file, in {took.read:.3g} s if read first"
    if took.mapped > max(STALL, 5 * took.read):
        why = "the kernel stalls on mapped files; this library reads its weights, programs that map theirs load slowly"
        yield Finding(name, "warning", found, why, facts.upgrade)
    else:
        yield Finding(name, "ok", found)


CHECKS = (host_memory, gpu_memory, carve_out, budget, copies)
