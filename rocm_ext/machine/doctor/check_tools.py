"""Programs beside the training, and what it needs of the system."""

from collections.abc import Iterator

from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding, Process, gib, unrecorded

# free bytes: fewer than the first warn, fewer than the second are an error
DISK = {"current folder": (10 * 2**30, 2**30), "Hugging Face cache": (20 * 2**30, 0)}
COMPILERS = ("gcc", "clang")


def other_processes(facts: Facts) -> Iterator[Finding]:
    """Programs that use the AMD GPU now."""
    name = "other processes"
    processes = facts.files.processes
    if not facts.amd_linux:  # the kernel lists those on AMD's GPUs
        return
    if not processes:
        yield Finding(name, "ok", "none on the GPU")
        return
    why = "they take the GPU's memory and time"
    if facts.fit.unified:
        why += "; overcommitting memory tends to hang the driver"
    pids = " ".join(str(process.pid) for process in processes)
    yield Finding(name, "warning", ", ".join(map(_told, processes)), why, f"wait for them, or: kill {pids}")


def _told(process: Process) -> str:
    memory = f": {gib(process.memory)}" if process.memory else ""
    return f"{process.pid} {process.name}".strip() + memory


def sandbox(facts: Facts) -> Iterator[Finding]:
    """Whether the sandbox of RAFT's verifiers works."""
    name, said = "sandbox", facts.said.sandbox
    if facts.machine.system != "Linux":
        return
    if facts.said.commands is not None and "bwrap" not in facts.said.commands:
        yield Finding(name, "warning", "bubblewrap is not installed", "RAFT runs model-written code in it",
                      facts.install("bubblewrap"))  # fmt: skip
    elif said is None:
        yield unrecorded(name)
    elif said.works:
        yield Finding(name, "ok", ": ".join(filter(None, ("bubblewrap works", said.found))))
    else:
        what, _, fix = said.found.partition("; ")
        why = f"{what}. RAFT runs model-written code in it"
        yield Finding(name, "warning", "bubblewrap does not work here", why, fix)


def compiler(facts: Facts) -> Iterator[Finding]:
    """The C compiler that Triton calls; verifiers of compiled languages name theirs themselves."""
    name, commands = "C compiler", facts.said.commands
    if not (facts.profile and facts.profile.settings.get("compile") is True):
        return
    if commands is None:
        yield unrecorded(name)
    elif there := [each for each in COMPILERS if each in commands]:
        yield Finding(name, "ok", ", ".join(there))
    else:
        why = f"{facts.profile.name} sets compile: True, and Triton needs one"
        yield Finding(name, "warning", "none", why, facts.install("gcc"))


def disk(facts: Facts) -> Iterator[Finding]:
    """Free space for outputs and downloads."""
    if facts.said.disk_free is None:
        yield unrecorded("disk")
        return
    for place, free in facts.said.disk_free.items():
        low, least = DISK.get(place, (0, 0))
        why = "a 7B model in bf16 takes 15 GB"
        fix = "output_dir=/a/larger/disk" if place == "current folder" else facts.export("HF_HOME", "/a/larger/disk")
        if free < low:
            yield Finding(f"disk: {place}", "error" if free < least else "warning", f"{gib(free)} free", why, fix)
        else:
            yield Finding(f"disk: {place}", "ok", f"{gib(free)} free")


CHECKS = (other_processes, sandbox, compiler, disk)
