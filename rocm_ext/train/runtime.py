"""This process: its machine, device, dtype and place among the ranks."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.log import log, warn
from rocm_ext.distributed.ranks import Ranks, local_rank, local_world_size
from rocm_ext.machine import numerics
from rocm_ext.machine.budget import memory_budget, open_device
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.profile import Profile, check_locked, check_profile, load_profile
from rocm_ext.machine.threads import choose_threads, cores
from rocm_ext.machine.trace import Trace
from rocm_ext.runs.records import read_yaml
from rocm_ext.train.machines import check_machines


@dataclass(frozen=True)
class Runtime:
    """Hardware and settings that this process computes with.

    Attributes:
        profile: hardware profile that the config names.
        machine: hardware that was detected.
        device: this rank's device, opened and, on unified memory, capped.
        dtype: dtype of weights and activations.
        ranks: this process and its place among all ranks.
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

        On a CPU both configs get the number of threads in place of ``auto``, so that the run records it.

        Args:
            cfg: config of the SFT recipe or of a recipe that extends it.
            run_cfg: config of the run, the same on all of its machines; by default ``cfg``.

        Raises:
            UserError: the machine does not match the profile, a setting is locked, the device is missing, or the
                machines of the run differ.
        """
        profile, machine = load_profile(cfg.hardware), detect()
        warnings = check_profile(profile, machine, local_world_size())
        settings: Any = OmegaConf.to_container(cfg)
        warnings += check_locked(profile, settings, list(cfg.hardware_overrides))
        dtype, why = numerics.pick_dtype(cfg.dtype, machine)
        opened = open_device(profile, machine, local_rank(), cfg.memory_fraction, cfg.device)
        ranks = Ranks.from_env(opened, cfg.node_timeout)
        run = cfg if run_cfg is None else run_cfg
        check_machines(run, dtype, ranks)
        warn(warnings)
        log.info("hardware %s: %s", profile.name, machine)
        log.info("dtype %s (%s)", dtype, why)
        cfg.cpu_threads = run.cpu_threads = _use_threads(run, opened, ranks)
        return cls(profile, machine, opened, dtype, ranks)

    def budget(self, taken: int = 0) -> int:
        """Return how many bytes this process may use on its device, with the ``taken`` bytes that it uses already."""
        return memory_budget(self.profile, self.machine, taken=taken)[0]


def _use_threads(cfg: DictConfig, device: torch.device, ranks: Ranks) -> int | str:
    """Give torch its threads; return what the run records as ``cpu_threads``, with which it resumes."""
    count, why = cfg.cpu_threads, "as the config says"
    if count == "auto":
        if device.type != "cpu":
            return "auto"
        deterministic = cfg.cudnn_deterministic_mode not in (None, False, "default")
        recorded = _recorded_threads(cfg)
        chosen = (recorded, "as the run began") if recorded else choose_threads(os.environ, deterministic)
        count, why = min(ranks.gather(chosen))  # all ranks wait for the slowest one
    torch.set_num_threads(count)
    log.info("cpu_threads %d (%s)", count, why)
    if device.type == "cpu" and count > (most := cores()):
        log.warning(
            "cpu_threads is %d, and this process may use %g cores; threads without a core make the others wait. "
            "cpu_threads=%d is faster, with results that are equal up to rounding",
            count,
            most,
            max(1, int(most)),
        )
    return count


def _recorded_threads(cfg: DictConfig) -> int | None:
    """The number of the run to resume; None without one."""
    problems: list[str] = []
    path = Path(cfg.output_dir) / "config.yaml"
    count = read_yaml(path, problems).get("cpu_threads") if cfg.resume_from_checkpoint else None
    warn(problems)
    return count if type(count) is int else None
