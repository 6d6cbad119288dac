"""The machine that a plan is for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from rocm_ext.machine.budget import memory_budget, nominal_budget
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.numerics import DTYPES, pick_dtype
from rocm_ext.machine.profile import Profile, load_profile
from rocm_ext.plan.speeds import Figures, figures_for


@dataclass(frozen=True)
class Target:
    """The machine that a plan is for, and what a process computes with there.

    Attributes:
        profile: its hardware profile.
        name: description of the machine.
        here: whether it is this machine.
        figures: its speeds.
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

    @classmethod
    def of(cls, cfg: DictConfig, machine: Machine, bench: Path | None = None, chip: str | None = None) -> "Target":
        """Return the target of a config.

        Args:
            cfg: config of any recipe; its ``hardware`` names the profile.
            machine: this machine.
            bench: file that ``rocm-ext bench`` wrote; None: this machine's default file, if it exists.
            chip: a machine as sold with this chip of the profile's; None: this machine where the profile describes it.

        Raises:
            UserError: the machine's speeds are unknown, or its unified memory leaves nothing to train in.
        """
        profile = load_profile(cfg.hardware)
        here = chip is None and (profile.memory["of"] == "host" or profile.fits(machine))
        figures = figures_for(profile, machine, bench, chip)
        best = "bf16" if "bf16" in figures.flops else "fp32"
        return cls(
            profile=profile,
            name=str(machine) if here else f"{chip or profile.title}; this is another machine",
            here=here,
            figures=figures,
            budget=memory_budget(profile, machine) if here else nominal_budget(profile, figures.memory or 0),
            device=torch.device("cpu" if cfg.device == "cpu" else "cuda"),
            dtype=pick_dtype(cfg.dtype, machine)[0] if here else DTYPES[best if cfg.dtype == "auto" else cfg.dtype],
        )
