"""A run's measurements: what the lines of ``metrics.jsonl`` show, and metric loggers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune.training.metric_logging import MetricLoggerInterface, TensorBoardLogger, WandBLogger

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import read_lines
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config import references
from rocm_ext.runs.records import of_sets

_SCORES = ("correct", "prompts", "pass_at_1", "interval")  # of a summary's evaluations
_QUARTERS = 4  # parts of a run to compare: single steps have different pairs
_FEWEST_VALIDATIONS = 3  # validations have the same pairs


def summarize(path: Path) -> dict[str, float]:
    """Summarise the training steps in a ``metrics.jsonl``: their number, losses, tokens, seconds and speed."""
    steps = [line for line in read_lines(path) if "loss" in line]
    if not steps:  # lost, see `describe_lost`
        return {"steps": 0}
    tokens = sum(line["tokens"] for line in steps)
    seconds = sum(line["seconds"] for line in steps)
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def scores_of(lines: Iterable[Json]) -> list[Json]:
    """Return step and scores of the evaluations in the ``lines`` of a ``metrics.jsonl``, of named sets by column."""
    evaluations = []
    for line in lines:
        scores: Json = {}
        for name in of_sets([line], "eval"):
            kept = {key: line[name][key] for key in _SCORES}
            scores |= kept if name == "eval" else {name: kept}
        if scores:
            evaluations.append({"step": line["step"], **scores})
    return evaluations


def falling_likelihood(lines: Sequence[Json]) -> str | None:
    """Return a warning if the chosen answers' likelihood falls all the way in the ``lines`` of a ``metrics.jsonl``.

    Losses of pairs see only the margin. It also grows where both sides become less likely, the chosen one less so.
    Then the model moves to answers that are in no pair (arXiv:2404.04626). There is no warning if the
    likelihood rises somewhere, or too few lines have it.
    """
    held_out = [line["val_logprobs_chosen"] for line in lines if "val_logprobs_chosen" in line]
    rewards = [line["reward_chosen"] for line in lines if "reward_chosen" in line and "kl" in line]
    if len(held_out) >= _FEWEST_VALIDATIONS:
        what = "log-prob of the chosen validation answers"
        values = held_out
    elif len(rewards) >= 2 * _QUARTERS:
        what = "reward of the chosen answers"
        values = [0.0]  # before the first step
        for begin, end in pairwise(
            round(i * len(rewards) / _QUARTERS) for i in range(_QUARTERS + 1)
        ):
            values.append(fmean(rewards[begin:end]))
    else:
        return None
    if not all(later < earlier for earlier, later in pairwise(values)):
        return None
    return (
        f"the {what} fell all the way, from {values[0]:.2f} to {values[-1]:.2f}: the model moves away from the chosen "
        "answers, too. Raise loss.beta, lower the learning rate, or set loss.rpo_alpha=1; for single answers, raise "
        "loss.desirable_weight"
    )


# ---- metric loggers


def setup_metric_logger(cfg: DictConfig, is_main: bool) -> Any:
    """Build the config's metric logger.

    Returns:
        The logger; None on ranks other than the main one, and if the config names no logger.

    Raises:
        UserError: the logger cannot be built.
    """
    if cfg.metric_logger is None or not is_main:
        return None
    TensorBoardLogger._writer = None  # type: ignore[attr-defined]  # its __del__ reads it, also without tensorboard
    logger = config.instantiate(cfg.metric_logger, key="metric_logger")
    if not all(callable(getattr(logger, method, None)) for method in ("log_dict", "close")):
        raise UserError(
            f"metric_logger {cfg.metric_logger[config.COMPONENT]} makes a {type(logger).__name__}; expected a logger "
            "with the methods log_dict and close, such as those of torchtune.training.metric_logging"
        )
    return logger


def log_config(logger: Any, cfg: DictConfig) -> None:
    """Give a run's config to its metric logger, if there is one; a failure is a warning.

    torchtune's loggers save it as ``output_dir/torchtune_config.yaml``. Weights & Biases, Comet and MLflow also show
    it; TensorBoard gets it as a text.
    """
    if isinstance(logger, WandBLogger):
        # a resumed run differs at least in resume_from_checkpoint
        logger.config_allow_val_change = True
    try:
        if hasattr(logger, "log_config"):
            with references.kept():  # some resolve it
                logger.log_config(cfg)
        # torchtune only saves a file
        if isinstance(logger, TensorBoardLogger) and logger._writer is not None:
            logger._writer.add_text("config", indent(OmegaConf.to_yaml(cfg), " " * 4))
    except Exception as error:  # a service may raise anything, and the run does not need it
        log.warning("metric_logger: it did not take the config: %s", one_line(error))


class TrackioLogger(MetricLoggerInterface):
    """A metric logger that keeps curves in trackio, on this machine and without an account: ``trackio show``.

    Args:
        project: name of a group of runs.
        name: the run's name; a resumed run with this name continues its curves. By default trackio chooses one.
        more: other arguments of ``trackio.init``, such as ``server_url``.

    Raises:
        UserError: the package trackio is missing.
    """

    def __init__(self, project: str, name: str | None = None, **more: Any) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError(
                "TrackioLogger needs the extra: pip install 'torchtune-rocm[trackio]'"
            ) from error
        fixed = {
            "resume": "allow" if name else "never",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        self._run = trackio.init(project, name, **fixed | more)

    def log_config(self, config: DictConfig) -> None:
        """Show the run's config; trackio takes it with the first values."""
        self._run.config |= OmegaConf.to_container(config, resolve=True)

    def log(self, name: str, data: Any, step: int) -> None:
        """Log one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Log the values of a step."""
        values = {name: float(value) for name, value in payload.items()}
        self._run.log(values, step=step)

    def close(self) -> None:
        """Wait until all values are written."""
        self._run.finish()


def describe_lost(path: Path, steps: int, logged: Collection[int]) -> str:
    """Describe which of the finished ``steps`` ``path`` lacks, which has those ``logged``. Empty if it has all."""
    lost = set(range(1, steps + 1)).difference(logged)
    if not lost:
        return ""
    return f"{path} lacks {len(lost)} of {steps} finished steps, such as step {min(lost)}"
