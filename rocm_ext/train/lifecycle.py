"""The life of a run: its process with machine, device and ranks; set-up and clean-up; signals."""

import os
import shlex
import signal
import sys
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext.base import heartbeat
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration, log, warn
from rocm_ext.base.process import stop_signals, survive_terminal
from rocm_ext.distributed.ranks import (
    Ranks,
    local_rank,
    local_world_size,
    machine_index,
    several_machines,
)
from rocm_ext.machine import numerics, trace
from rocm_ext.machine.budget import (
    Budget,
    gpu_memory_in_use,
    memory_budget,
    open_device,
    readable,
)
from rocm_ext.machine.cooling import check_sensors, cooling, end_pauses
from rocm_ext.machine.counters import log_of, recording
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.profile import COMPILE, Profile, check_locked, check_profile, load_profile
from rocm_ext.machine.threads import choose_threads, cores
from rocm_ext.machine.trace import Trace
from rocm_ext.model import compiling
from rocm_ext.model.families import CONFIG
from rocm_ext.model.sampler import MIN_ROWS
from rocm_ext.model.weights.llama_cpp import way_out
from rocm_ext.runs.records import read_yaml
from rocm_ext.train.machines import check_machines
from rocm_ext.train.output_dir import hold

# ---- signals


class Interrupted(Exception):
    """The user asked to stop, or another process continues; all finished work is saved.

    Args:
        where: position in the run, such as ``at step 7``; it follows the word "stopped" in the log.
        signum: number of the signal; 0 if another process goes on.
    """

    def __init__(self, where: str, signum: int = 0) -> None:
        super().__init__(where, signum)
        self.where, self.signum = where, signum


class Interrupt:
    """Context in which Ctrl-C, SIGTERM and SIGHUP only set ``signum``; a second Ctrl-C stops at once.

    The context may be nested. A process that ignores SIGHUP, as under ``nohup``, continues to ignore it.

    Attributes:
        signum: number of the last signal, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._depth = 0

    def __enter__(self) -> "Interrupt":
        self._depth += 1
        if self._depth == 1:
            signals = (signal.SIGINT, *stop_signals())
            self._earlier = {signum: signal.signal(signum, self._note) for signum in signals}
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            for signum, handler in self._earlier.items():
                signal.signal(signum, handler)

    def check(self, where: str, ranks: Ranks) -> None:
        """Leave the run if any rank received a signal; all ranks call this.

        Raises:
            Interrupted: with ``where`` in the run, and the highest signal number.
        """
        signum = max(signum or 0 for signum in ranks.gather(self.signum))
        if signum:
            raise Interrupted(where, signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        # torchrun sends SIGTERM after a Ctrl-C; that one still waits
        if signum == self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum
        survive_terminal()
        end_pauses()
        log.info("stopping once the current work is saved ...")


# ---- this process


@dataclass(frozen=True)
class Runtime:
    """Hardware and settings that this process computes with.

    Attributes:
        profile: hardware profile that the config names.
        machine: hardware that was detected.
        device: this rank's device, opened and, on unified memory, capped.
        dtype: dtype of weights and activations.
        ranks: this process among all ranks.
        trace: records steps, see ``profile_steps``.
    """

    profile: Profile
    machine: Machine
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    trace: Trace = field(default_factory=Trace)

    @classmethod
    def open(cls, cfg: DictConfig, run_cfg: DictConfig | None = None) -> "Runtime":
        """Check the machine against its profile, open the device and join the other ranks.

        In both configs it replaces ``compile: auto``, and on a CPU ``cpu_threads: auto``, by what it chooses, so that
        the run records that.

        Args:
            cfg: config of the SFT recipe or of a recipe that extends it.
            run_cfg: config of the run, the same on all of its machines; by default ``cfg``.

        Raises:
            UserError: the machine does not match the profile, a setting is locked, the device is missing, or the
                machines of the run differ.
        """
        profile = load_profile(cfg.hardware)
        machine = detect()
        warnings = check_profile(profile, machine, local_world_size())
        settings: Any = OmegaConf.to_container(cfg)
        warnings += check_locked(profile, settings, list(cfg.hardware_overrides))
        dtype, why = numerics.pick_dtype(cfg.dtype, machine)
        opened = open_device(profile, machine, local_rank(), cfg.memory_fraction, cfg.device)
        ranks = Ranks.from_env(opened, cfg.node_timeout)
        run = run_cfg or cfg
        check_machines(run, dtype, ranks)
        warn(warnings)
        log.info("hardware %s: %s", profile.name, machine)
        log.info("dtype %s (%s)", dtype, why)
        cfg.cpu_threads = run.cpu_threads = _use_threads(run, opened, ranks)
        if run.compile == compiling.AUTO:
            cfg.compile = run.compile = _choose_compile(run, profile, machine, ranks)
        return cls(profile, machine, opened, dtype, ranks)

    def budget(self, taken: int = 0) -> int:
        """Return how many bytes this process may use on its device, including ``taken`` bytes in use."""
        return self.budget_and_reason(taken)[0]

    def budget_and_reason(self, taken: int = 0) -> Budget:
        """Return :meth:`budget` and where it comes from."""
        return memory_budget(self.profile, self.machine, taken=taken)

    def held_by_others(self) -> int:
        """Return how many bytes of unified memory other processes hold through the GPU."""
        if not self.machine.unified or self.device.type != "cuda":
            return 0
        return max(0, gpu_memory_in_use() - torch.cuda.memory_reserved(self.device))


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _use_threads(cfg: DictConfig, device: torch.device, ranks: Ranks) -> int | str:
    """Set the number of torch's threads; return the value of ``cpu_threads`` that the run records and resumes with."""
    count = cfg.cpu_threads
    why = "as the config says"
    if count == "auto":
        if device.type != "cpu":
            return "auto"
        recorded = _recorded(cfg, "cpu_threads")
        if type(recorded) is int:
            chosen = (recorded, "as the run began")
        else:
            deterministic = cfg.cudnn_deterministic_mode not in (None, False, "default")
            chosen = choose_threads(os.environ, deterministic)
        count, why = min(ranks.gather(chosen))  # all ranks wait for the slowest one
    torch.set_num_threads(count)
    log.info("cpu_threads %d (%s)", count, why)
    most = cores()
    if device.type == "cpu" and count > most:
        log.warning(
            "cpu_threads is %d, and this process may use %g cores; threads without a core make the others wait. "
            "cpu_threads=%d is faster, with results that are equal up to rounding",
            count,
            most,
            max(1, int(most)),
        )
    return count


def _choose_compile(
    cfg: DictConfig, profile: Profile, machine: Machine, ranks: Ranks
) -> bool | str:
    """Choose ``compile`` for ``auto``; one rank that cannot compile decides for all."""
    chosen = (_recorded(cfg, "compile"), "as the run began")
    if chosen[0] not in COMPILE:
        chosen = compiling.choose_compile(cfg, profile, machine)
    value, why = min(ranks.gather(chosen), key=lambda choice: bool(choice[0]))
    log.info("%s", compiling.in_words(value, why))
    return value


def _recorded(cfg: DictConfig, key: str) -> Any:
    """Return the value of ``key`` with which the run that this one resumes began, if it resumes one."""
    if not cfg.resume_from_checkpoint:
        return None
    problems: list[str] = []
    recorded = read_yaml(Path(cfg.output_dir) / "config.yaml", problems).get(key)
    warn(problems)
    return recorded


# ---- from set-up to clean-up


class RunnableRecipe(Protocol):
    """A recipe that :func:`run` can run.

    Attributes:
        cfg: config of the run.
        runtime: machine, device, dtype and ranks; :meth:`check` sets it.
    """

    cfg: DictConfig
    runtime: Runtime

    def check(self) -> None:
        """Do all set-up that needs no weights, cheap steps first, so that a user's mistake ends the run early."""

    def setup(self) -> None:
        """Prepare the run: :meth:`check`, then read the weights."""

    def train(self) -> None:
        """Do all of the work, then write the outputs."""

    def cleanup(self) -> None:
        """Close files and leave the process group."""


def run(recipe: RunnableRecipe) -> None:
    """Set ``recipe`` up, train while recording the hardware's counters, and clean up.

    The run holds its output folder meanwhile. With ``validate_only`` it only checks ``recipe``.

    Raises:
        SystemExit: Ctrl-C, SIGTERM or SIGHUP stopped the run, and all finished work is saved; the code is 128 + the
            signal's number.
    """
    began = time.monotonic()
    cfg = recipe.cfg
    out = Path(cfg.output_dir)
    check_sensors(cfg.pause_at_celsius)
    with hold(out):
        if cfg.validate_only:
            recipe.check()
            recipe.cleanup()
            log.info("valid: all checks that need no weights have passed")
            return
        try:
            recipe.setup()
            runtime = recipe.runtime
            profile = runtime.trace.on(
                out / trace.FOLDER, cfg.profile_steps or 0, runtime.device, runtime.ranks.rank
            )
            heat = cooling(cfg.pause_at_celsius)
            with _recording(cfg, runtime.ranks), profile, heat:
                recipe.train()
        except RuntimeError as error:
            on_cpu = "can't allocate memory" in str(error)
            if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
                raise
            raise UserError(_out_of_memory(recipe, error), heartbeat.RETRY) from error
        except Interrupted as stop:
            log.info("stopped %s, all saved; continue with resume_from_checkpoint=True", stop.where)
            recipe.cleanup()
            if stop.signum:
                heartbeat.note(saved=stop.where)
            else:
                heartbeat.note(segment=stop.where)
            raise SystemExit(128 + stop.signum if stop.signum else 0) from None
        recipe.cleanup()
        log.info("done in %s", duration(time.monotonic() - began))
        if (out / "adapter").is_dir():
            name = shlex.quote(str(out))
            base = Path(cfg.checkpointer.checkpoint_dir)
            export = ""
            if (base / CONFIG).is_file():  # Meta's format has none, and cannot be exported
                export = f"; take it elsewhere: rocm-ext export {name} {way_out(base)}"
            log.info("try it: rocm-ext chat %s%s", name, export)


def _out_of_memory(recipe: RunnableRecipe, error: RuntimeError) -> str:
    """Describe planned and measured memory when it ran out, and say what to change."""
    cfg = recipe.cfg
    learner = getattr(recipe, "learner", None)
    sentences = " ".join(str(error).split()).split(". ")
    reason = ". ".join(sentences[:3]).rstrip(".")
    text = f"out of memory at {readable(peak_memory(recipe.runtime.device))}: {reason[:200]}."
    if learner is None or not hasattr(learner, "planned_budget"):
        return f"{text} Free memory, or use a smaller model"
    peak = learner.planned_peak
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    if any(name.startswith("rocm_ext.sampling") for name in modules):
        cures = [f"max_new_tokens={cfg.max_new_tokens // 2}"]
        slots = cfg.engine.get("slots")
        if slots != MIN_ROWS:
            cures.insert(0, f"engine.slots={max(MIN_ROWS, (slots or 0) // 2)}")
    else:
        cures = learner.cures(0.8 * peak) or learner.cures(peak)
        cures.append(
            "rows of half the length (tokenizer.max_seq_len) or shorter answers (max_new_tokens)"
        )
    planned = f"{readable(peak)} of {readable(learner.planned_budget)}"
    return (
        f"{text} Planned for training: {planned}. Set {' or '.join(cures)}. "
        "resume_from_checkpoint=True continues, but not with other rows or shorter answers, which need a new run"
    )


def _recording(cfg: DictConfig, ranks: Ranks) -> AbstractContextManager[None]:
    """Context in which one rank per machine records the machine's counters."""
    first = ranks.is_main
    if several_machines():
        first = local_rank() == 0
        ranks.barrier()  # a fresh run has removed earlier files by now
    seconds = cfg.hardware_log_seconds if first else None
    number = 0 if ranks.is_main else machine_index()
    return recording(Path(cfg.output_dir), seconds, name=log_of(number))
