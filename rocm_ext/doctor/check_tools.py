"""What runs beside a training, and what verifiers call."""

from collections.abc import Iterator

from rocm_ext.doctor.facts import Facts
from rocm_ext.doctor.recorded import Process
from rocm_ext.doctor.rows import Row, gib, unrecorded

# bytes free below which to warn, and below which nothing can be saved
DISK = {"current folder": (10 * 2**30, 2**30), "Hugging Face cache": (20 * 2**30, 0)}
COMPILERS = ("gcc", "g++", "clang", "clang++", "rustc", "go")


def other_processes(facts: Facts) -> Iterator[Row]:
    name = "other processes"
    if facts.fit.backend == "cpu" or not (facts.linux or facts.said.processes):
        return
    if facts.fit.backend == "cuda" and facts.said.processes is None:
        yield unrecorded(name, "needs NVML: pip install nvidia-ml-py")
        return
    processes = facts.files.processes if facts.amd else facts.said.processes or ()
    if not processes:
        yield Row(name, "ok", "nobody else computes on the GPU")
        return
    why = "they share its memory and its time"
    if facts.fit.unified:
        why += "; taking more than there is tends to hang the driver"
    pids = " ".join(str(process.pid) for process in processes)
    yield Row(name, "warning", ", ".join(map(_told, processes)), why, f"wait for them, or: kill {pids}")


def _told(process: Process) -> str:
    memory = f": {gib(process.memory)}" if process.memory else ""
    return f"{process.pid} {process.name}".strip() + memory


def sandbox(facts: Facts) -> Iterator[Row]:
    name, said = "sandbox", facts.said.sandbox
    if facts.machine.system != "Linux":
        return
    if facts.said.commands is not None and "bwrap" not in facts.said.commands:
        yield Row(name, "warning", "bubblewrap is not installed", "RAFT runs code that models write in it",
                  facts.install("bubblewrap"))  # fmt: skip
    elif said is None:
        yield unrecorded(name)
    elif said.works:
        yield Row(name, "ok", "bubblewrap works")
    else:
        what, _, fix = said.found.partition("; ")
        why = f"{what}. RAFT runs code that models write in it"
        yield Row(name, "warning", "bubblewrap does not work here", why, fix)


def compilers(facts: Facts) -> Iterator[Row]:
    name, commands = "compilers", facts.said.commands
    if commands is None:
        yield unrecorded(name)
        return
    there = [compiler for compiler in COMPILERS if compiler in commands]
    if facts.profile and facts.profile.settings.get("compile") is True and not {"gcc", "clang"} & set(there):
        yield Row(name, "warning", ", ".join(there) or "none", f"{facts.profile.name} sets compile: True, and Triton "
                  "needs a C compiler", facts.install("gcc"))  # fmt: skip
        return
    rust, go = "rustc" in there, "go" in there
    c = {"gcc", "clang"} & set(there) and {"g++", "clang++"} & set(there)
    lacking = [language for language, has in (("C and C++", c), ("Rust", rust), ("Go", go)) if not has]
    found = ", ".join(there) or "none"
    yield Row(name, "ok", found, f"verifiers of {', '.join(lacking)} need one" if lacking else "")


def disk(facts: Facts) -> Iterator[Row]:
    if facts.said.disk_free is None:
        yield unrecorded("disk")
        return
    for place, free in facts.said.disk_free.items():
        low, least = DISK.get(place, (0, 0))
        why = "a 7B model in bf16 takes 15 GB"
        fix = "output_dir=/a/larger/disk" if place == "current folder" else facts.export("HF_HOME", "/a/larger/disk")
        if free < low:
            yield Row(f"disk: {place}", "error" if free < least else "warning", f"{gib(free)} free", why, fix)
        else:
            yield Row(f"disk: {place}", "ok", f"{gib(free)} free")


def threads(facts: Facts) -> Iterator[Row]:
    """On a CPU, one thread per physical core that this process may use."""
    name, said = "threads", facts.said
    if facts.fit.backend != "cpu":
        return
    most = [number for number in (facts.files.cores, said.cpus, said.cpu_quota) if number]
    if said.threads is None or not most:
        yield unrecorded(name)
        return
    useful = max(1, int(min(most)))
    limit = "" if said.cpu_quota is None else f", a cgroup allows {said.cpu_quota:g} CPUs"
    found = f"torch takes {said.threads}; {facts.files.cores or said.cpus} physical cores{limit}"
    if said.threads > useful:
        yield Row(name, "warning", found, "threads without a core of their own make the others wait",
                  facts.export("OMP_NUM_THREADS", str(useful)))  # fmt: skip
    else:
        yield Row(name, "ok", found)


CHECKS = (other_processes, sandbox, compilers, disk, threads)
