"""A metric logger that notes when each step was logged: the same clock for every recipe."""

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path


class StepClock:
    """Writes ``{"step", "time", "loss", "peak_memory"}`` per step to ``path``; peak memory in bytes."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w")  # noqa: SIM115 - closed by close()

    def log_dict(self, payload: Mapping, step: int) -> None:
        if "loss" in payload:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            line = {"step": step, "time": time.perf_counter(), "loss": float(payload["loss"]), "peak_memory": peak}
            self._file.write(json.dumps(line) + "\n")

    def log_config(self, config: object) -> None:
        """Part of torchtune's interface; there is nothing to log."""

    def close(self) -> None:
        self._file.close()
