"""``metrics.jsonl``: a run's measurements, one line per step, and their summary; trackio beside it."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.training.metric_logging import MetricLoggerInterface

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, read_lines, replace_text


class Metrics:
    """Writes ``metrics.jsonl``: one JSON object per line, each written immediately.

    Opening an existing file rewrites it without the lines that ``keep`` rejects and without an incomplete last line.

    Args:
        path: path of the file.
        keep: whether to keep an earlier process's line; a resumed run drops the steps that it will repeat.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True) -> None:
        lines = [line for line in read_metrics(path) if keep(line)]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._path = path

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full, or the file cannot be written.
        """
        with disk_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ``metrics.jsonl`` without an incomplete last one.

    Raises:
        UserError: a line is damaged; the message names it.
    """
    return list(read_lines(path))


def summarize(path: Path) -> dict[str, Any]:
    """Summarise the training steps in a ``metrics.jsonl``: their number, losses, tokens, seconds and speed."""
    steps = [line for line in read_metrics(path) if "loss" in line]
    tokens, seconds = sum(s["tokens"] for s in steps), sum(s["seconds"] for s in steps)
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class TrackioLogger(MetricLoggerInterface):
    """A metric logger that keeps curves in trackio, on this machine and without an account: ``trackio show``.

    Args:
        project: groups runs.
        name: of the run; one that is resumed with its name continues its curves. None: trackio chooses one.
        more: other arguments of ``trackio.init``, such as ``server_url``.

    Raises:
        UserError: the package trackio is missing.
    """

    def __init__(self, project: str, name: str | None = None, **more: Any) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError("TrackioLogger needs the extra: pip install 'torchtune-rocm[trackio]'") from error
        own = {"resume": "allow" if name else "never", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project, name, **own | more)

    def log_config(self, config: DictConfig) -> None:
        """Show the run's config; trackio takes it with the first values."""
        self._run.config |= OmegaConf.to_container(config, resolve=True)

    def log(self, name: str, data: Any, step: int) -> None:
        """Log one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Log the values of a step."""
        self._run.log({name: float(value) for name, value in payload.items()}, step=step)

    def close(self) -> None:
        """Wait until all values are written."""
        self._run.finish()
