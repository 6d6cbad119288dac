"""Open a model for training in Python. This file imports no torch, which reads the machine's environment."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from rocm_ext.base import deferred
from rocm_ext.base.log import log, setup_logging
from rocm_ext.config.chosen_model import ChosenModel, find_target, sample_here, sampling_config
from rocm_ext.config.startup import prepare_for

if TYPE_CHECKING:
    from rocm_ext.losses import Objective
    from rocm_ext.training.model import Model
    from rocm_ext.training.rows import Data

_RANK = 16  # of a fresh adapter on a model's folder


def open_model(
    name: str | Path,
    *overrides: str,
    adapter: str | Path | None = None,
    rank: int | None = None,
    output_dir: str | Path | None = None,
    state: str | Path | None = None,
    seed: int | None = None,
) -> "Model":
    """Open a model to train it.

    Args:
        name: a config's name or file, the ``output_dir`` of a run, a model's folder, a GGUF file, or a model's name on
            the hub.
        overrides: ``key=value``, as on the command line.
        adapter: PEFT folder to begin with; by default the run's, or a fresh one.
        rank: rank of a fresh adapter, whose alpha is twice as much; by default the config's, or 16.
        output_dir: folder for ``config.yaml`` and ``metrics.jsonl``; without, nothing is kept but what you save.
        state: folder from :meth:`rocm_ext.training.model.Model.save` to continue from, bit for bit; ``output_dir``, if
            it is that of the saved model, keeps the lines of the steps until then.
        seed: seed of adapter, dropout and samples; by default the config's, or a random one.

    Raises:
        UserError: nothing has this name, or the machine or its memory does not allow it.
    """
    setup_logging()
    target = find_target(str(name), None if adapter is None else Path(adapter))
    deferred.defer()
    for line in prepare_for(target.hardware(overrides), restart=False):
        log.info("%s", line)
    cfg = config_for(target, overrides, rank)
    if seed is not None:
        cfg.seed = seed
    from rocm_ext.training.model import Model

    folder = None if output_dir is None else Path(output_dir)
    return Model(cfg, folder, None if state is None else Path(state))


def config_for(
    target: ChosenModel, overrides: Sequence[str], rank: int | None = None
) -> DictConfig:
    """Return the config to train and sample a model in this process."""
    usual: tuple[str, ...] = ()
    if not target.has_file and target.adapter is None:
        usual = _sizes(_RANK)
    asked = () if rank is None else _sizes(rank)
    cfg = sampling_config(target.load([*usual, *overrides, *asked]))
    sample_here(cfg)
    cfg.prompts = cfg.eval_prompts = cfg.metric_logger = None
    return cfg


def _sizes(rank: int) -> tuple[str, ...]:
    return f"model.lora_rank={rank}", f"model.lora_alpha={2 * rank}"


def fine_tune(
    name: str | Path,
    data: "Data",
    *overrides: str,
    epochs: int = 1,
    rows_per_step: int = 32,
    lr: float | None = None,
    loss: "str | Objective" = "cross_entropy",
    **opening: Any,
) -> "Model":
    """Train on rows as ``lora_finetune_rocm`` does, and return the trained model.

    Args:
        name, overrides, opening: see :func:`open_model`.
        data: rows, see :func:`rocm_ext.training.rows.to_rows`.
        epochs: passes over the rows, each in a new order.
        rows_per_step: rows of an optimiser step.
        lr: learning rate at the start; by default the config's. The config's schedule lowers it, if it has one.
        loss: see :meth:`Model.forward_backward`.

    Raises:
        UserError: as :func:`open_model` and :meth:`Model.forward_backward`.
    """
    if lr is not None:
        overrides = (*overrides, f"optimizer.lr={lr}")
    model = open_model(name, *overrides, **opening)
    try:
        model.train_on(data, epochs, rows_per_step, loss)
    except BaseException:
        model.close()
        raise
    return model
