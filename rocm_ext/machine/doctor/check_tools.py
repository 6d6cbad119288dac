"""Programs beside the training, and programs that verifiers call."""

from collections.abc import Iterator

from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.findings import Finding, gib, unrecorded
from rocm_ext.machine.doctor.recorded import Process

# free bytes: fewer than the first warn, fewer than the second are an error
DISK = {"current folder": (10 * 2**30, 2**30), "Hugging Face cache": (20 * 2**30, 0)}
COMPILERS = ("gcc", "g++", "clang", "clang++", "rustc", "go")


def other_processes(facts: Facts) -> Iterator[Finding]:
    """Programs that use the GPU now."""
    name = "other processes"
    if facts.fit.backend == "cpu" or not (facts.linux or facts.said.processes):
        return
    if facts.fit.backend == "cuda" and facts.said.processes is None:
        yield unrecorded(name, "needs NVML: pip install nvidia-ml-py")
        return
    processes = facts.files.processes if facts.amd else facts.said.processes or ()
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


def compilers(facts: Facts) -> Iterator[Finding]:
    """The compilers that verifiers and Triton call."""
    name, commands = "compilers", facts.said.commands
    if commands is None:
        yield unrecorded(name)
        return
    there = [compiler for compiler in COMPILERS if compiler in commands]
    if facts.profile and facts.profile.settings.get("compile") is True and not {"gcc", "clang"} & set(there):
        why = f"{facts.profile.name} sets compile: True, and Triton needs a C compiler"
        yield Finding(name, "warning", ", ".join(there) or "none", why, facts.install("gcc"))
        return
    rust, go = "rustc" in there, "go" in there
    c = {"gcc", "clang"} & set(there) and {"g++", "clang++"} & set(there)
    lacking = [language for language, has in (("C and C++", c), ("Rust", rust), ("Go", go)) if not has]
    found = ", ".join(there) or "none"
    yield Finding(name, "ok", found, f"verifiers of {', '.join(lacking)} need their compilers" if lacking else "")


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


def threads(facts: Facts) -> Iterator[Finding]:
    """On a CPU: at most one thread per physical core that this process may use."""
    name, said = "threads", facts.said
    if facts.fit.backend != "cpu":
        return
    most = [number for number in (facts.files.cores, said.cpus, said.cpu_quota) if number]
    if said.threads is None or not most:
        yield unrecorded(name)
        return
    useful = max(1, int(min(most)))
    limit = "" if said.cpu_quota is None else f", a cgroup allows {said.cpu_quota:g} CPUs"
    found = f"torch uses {said.threads}; {facts.files.cores or said.cpus} physical cores{limit}"
    if said.threads > useful:
        yield Finding(name, "warning", found, "threads that share a core make the others wait",
                      facts.export("OMP_NUM_THREADS", str(useful)))  # fmt: skip
    else:
        yield Finding(name, "ok", found)


CHECKS = (other_processes, sandbox, compilers, disk, threads)
