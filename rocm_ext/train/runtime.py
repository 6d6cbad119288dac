"""This process: its machine, device, dtype and place among the ranks."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext.hardware import numerics
from rocm_ext.hardware.budget import memory_budget, open_device
from rocm_ext.hardware.machine import Machine, detect
from rocm_ext.hardware.profile import Profile, check_locked, check_profile, load_profile
from rocm_ext.hardware.threads import use_threads
from rocm_ext.hardware.trace import Trace
from rocm_ext.log import log, warn
from rocm_ext.ranks import Ranks, local_rank, local_world_size
from rocm_ext.train.nodes import check_machines


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
    def open(cls, cfg: DictConfig, whole: DictConfig | None = None) -> "Runtime":
        """Check the machine against its profile, open the device and join the other ranks.

        Args:
            cfg: config of the SFT recipe or of a recipe that extends it.
            whole: config of the run, the same on all of its machines; by default ``cfg``.

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
        check_machines(cfg if whole is None else whole, dtype, ranks)
        fixed = cfg.cudnn_deterministic_mode not in (None, False, "default")
        use_threads(cfg.cpu_threads, opened, os.environ, fixed)
        warn(warnings)
        log.info("hardware %s: %s", profile.name, machine)
        log.info("dtype %s (%s)", dtype, why)
        return cls(profile, machine, opened, dtype, ranks)

    def budget(self, taken: int = 0) -> int:
        """Return how many bytes this process may use on its device, with the ``taken`` bytes that it uses already."""
        return memory_budget(self.profile, self.machine, taken=taken)[0]
