"""What `tune run` does with any recipe."""

import time
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from rocm_ext.hardware.counter_log import recording
from rocm_ext.log import duration, log
from rocm_ext.train.interrupt import Interrupted
from rocm_ext.train.runtime import Runtime


class Recipe(Protocol):
    """A class that :func:`run` can run."""

    cfg: DictConfig
    runtime: Runtime

    def setup(self) -> None:
        """Everything that can fail for the user's reasons, the cheap parts first."""

    def train(self) -> None:
        """All of the work, then the outputs."""

    def cleanup(self) -> None:
        """Close files and leave the process group."""


def run(recipe: Recipe) -> None:
    """Set ``recipe`` up, train while the hardware's counters are recorded, and clean up.

    Raises:
        SystemExit: 128 + the signal's number, where Ctrl-C or SIGTERM asked to stop and all is saved.
    """
    began, cfg = time.monotonic(), recipe.cfg
    recipe.setup()
    seconds = cfg.hardware_log_seconds if recipe.runtime.ranks.is_main else None
    try:
        with recording(Path(cfg.output_dir), seconds):
            recipe.train()
    except Interrupted as stop:
        log.info("stopped %s, all saved; go on with resume_from_checkpoint=True", stop.where)
        recipe.cleanup()
        raise SystemExit(128 + stop.signum) from None
    recipe.cleanup()
    log.info("done in %s", duration(time.monotonic() - began))
