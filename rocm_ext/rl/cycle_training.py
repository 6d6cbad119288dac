"""A cycle's training: its SFT config, the answers that it replays, its optimiser's state, and the run's adapters."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import remove_folder, replace_folder
from rocm_ext.base.log import log
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.cycles import Cycle
from rocm_ext.rl.records import Sample, read_samples
from rocm_ext.sampling import sample_seed
from rocm_ext.train.builders import nothing_changed
from rocm_ext.train.checkpoint import STATE, Checkpoints, read_state, write_checksums
from rocm_ext.train.learner import Learner
from rocm_ext.train.trainer import Trainer


def training_config(cfg: DictConfig, **changes: Any) -> DictConfig:
    """Convert a RAFT config to the config of the SFT trainer.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it; its ``objective`` determines ``loss``.
        changes: values that replace those of ``cfg``.
    """
    trainer = config.trainer_config(cfg)
    if cfg.objective == "raft++":
        ratio = {config.COMPONENT: "rocm_ext.losses.ClippedRatio", "clip_high": cfg.clip_high}
        trainer["loss"] = trainer["loss"] | ratio
    return OmegaConf.create(trainer | changes)


def cycle_config(cfg: DictConfig, cycle: int, trained: int, folder: Path) -> DictConfig:
    """Return the config of one cycle's training.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it.
        cycle: number of the cycle, from 1; it determines the seed.
        trained: number of trained cycles before; it determines the learning rate.
        folder: output folder of the training; the training resumes if the folder has checkpoints.
    """
    lr = cfg.optimizer.lr
    return training_config(
        cfg,
        output_dir=str(folder),
        seed=sample_seed(cfg.seed, cycle, "train", 0) % 2**31,
        optimizer=OmegaConf.merge(cfg.optimizer, {"lr": max(lr * cfg.lr_decay**trained, min(cfg.lr_floor, lr))}),
        resume_from_checkpoint=(folder / "checkpoints").exists(),
        overwrite_output_dir=True,
        save_adapter_weights_only=True,
    )


def replay(cfg: DictConfig, out: Path, kept: Sequence[Sample], trained: Sequence[int]) -> list[Sample]:
    """Return the answers of earlier cycles that a cycle trains on in addition to its own.

    STaR (arXiv:2203.14465) and ReST-EM (arXiv:2312.06585) train the initial model on the newest answers alone, but ask
    every prompt each time. Cycles that ask a part of the prompts, or skip solved ones, would forget the rest; V-STaR
    (arXiv:2402.06457) adds up the answers of all iterations, as this does.

    Args:
        cfg: config of ``raft_rocm``: ``replay_cycles``, ``deduplicate`` and ``max_per_prompt``, which limits a prompt's
            answers of all cycles together. Newer answers come first.
        out: the run's output folder.
        kept: the cycle's own answers.
        trained: numbers of the trained cycles before it, in order.
    """
    count = len(trained) if (replayed := _replayed(cfg)) == "all" else min(replayed, len(trained))
    numbers = trained[len(trained) - count :]
    seen = {(sample.prompt_id, tuple(sample.tokens)) for sample in kept}
    of_prompt: dict[str, int] = {}
    for sample in kept:
        of_prompt[sample.prompt_id] = of_prompt.get(sample.prompt_id, 0) + 1
    found = []
    for number in reversed(numbers):
        for sample in read_samples(Cycle(out, number).kept):
            key, known = (sample.prompt_id, tuple(sample.tokens)), of_prompt.get(sample.prompt_id, 0)
            full = cfg.max_per_prompt is not None and known >= cfg.max_per_prompt
            if not full and not (cfg.deduplicate and key in seen):
                seen.add(key)
                of_prompt[sample.prompt_id] = known + 1
                found.append(sample)
    return found


def warn_of_old_logprobs(cfg: DictConfig, columns: Collection[str]) -> None:
    """Warn if the config replays answers for an objective that compares with the adapter that sampled them."""
    if "old_logprobs" in columns and _replayed(cfg):
        log.warning(
            "replay_cycles: the log-probs of replayed answers are those of older adapters. Many of their tokens are "
            "outside the clipping range from the start and then teach nothing"
        )


def _replayed(cfg: DictConfig) -> Any:
    if cfg.replay_cycles is None:
        return "all" if cfg.start_from == "base" else 0
    return cfg.replay_cycles


def save_optimizer(cycle: Cycle) -> None:
    """Write the optimiser's state at the end of a cycle's training, from the training's last checkpoint."""
    checkpoints = Checkpoints(cycle.folder / "checkpoints", keep=1)
    if cycle.optimizer.exists() or not checkpoints.steps():
        return
    try:
        found = checkpoints.newest(Ranks(torch.device("cpu")))  # only the main rank is here
    except UserError as error:  # the training is complete; only its optimiser's state is lost
        log.warning("%s", error)
        found = None
    if found is None or found[1]["step"] != cycle.training()["steps"]:
        checkpoints.sweep(found[1]["step"] if found else 0)  # keeps what cannot be read
        log.warning("cycle %d: its last checkpoint is not there, so the next optimiser begins anew", cycle.number)
        return
    with replace_folder(cycle.optimizer) as folder:
        torch.save({key: found[1][key] for key in ("optimizer", "scaler")}, folder / STATE)
        write_checksums(folder)


def load_optimizer(trainer: Trainer, cycle: Cycle) -> None:
    """Give a new training the optimiser's state of an earlier cycle: the moments and the loss scale, no learning rate.

    Args:
        trainer: a trainer; one that has resumed already has its own state.
        cycle: the cycle that the training goes on from.

    Raises:
        UserError: the state cannot be read.
    """
    if trainer.step:
        return
    if not cycle.optimizer.exists():
        log.warning("%s is not there: the optimiser begins anew", cycle.optimizer)
        return
    try:
        state = read_state(cycle.optimizer)
    except Exception as error:  # torch.load raises whatever the damaged bytes lead to
        raise UserError(
            f"the optimiser's state of cycle {cycle.number} cannot be read ({one_line(error)}). Restore "
            f"{cycle.optimizer}, or delete it: the optimiser then begins anew"
        ) from error
    fresh = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict({**fresh, "state": state["optimizer"]["state"]})
    trainer.scaler.load_state_dict(state["scaler"])


def clean_up(cycle: Cycle, trained: Sequence[Cycle], keep_optimizer: bool) -> None:
    """Remove what a finished training no longer needs; doing it again changes nothing.

    Args:
        cycle: the trained cycle.
        trained: all trained cycles up to this one, in order.
        keep_optimizer: keep the optimiser's state for the next cycle. That of the cycle before stays too, so that a
            user can delete the newest cycle and have it done again.
    """
    if keep_optimizer:
        save_optimizer(cycle)
    for earlier in trained[-4:-2]:
        shutil.rmtree(earlier.optimizer, ignore_errors=True)
    Checkpoints(cycle.folder / "checkpoints", keep=1).discard()


class Adapters:
    """Loads the adapters of earlier cycles from their files, so that a resumed run does the same as any other.

    Args:
        cfg: config of ``raft_rocm``.
        learner: the model, set up, with the run's initial adapter.
        out: the run's output folder.

    Attributes:
        first: weights of the run's initial adapter, under torchtune's names.
    """

    def __init__(self, cfg: DictConfig, learner: Learner, out: Path) -> None:
        self._cfg, self._learner, self._out = cfg, learner, out
        self.first = learner.adapter_state()
        self._pruned: set[int] = set()

    def folder(self, cycle: int) -> Path:
        """Return the PEFT folder of a cycle's adapter; cycle 0 has the ``adapter_checkpoint`` of the config, if any."""
        first = self._cfg.checkpointer.get("adapter_checkpoint")
        return Path(first) if first and cycle == 0 else Cycle(self._out, cycle).adapter

    def load(self, cycle: int) -> None:
        """Load the adapter that a cycle wrote into the learner; cycle 0 is the initial adapter."""
        self._learner.load_adapter(self._state(cycle), str(self.folder(cycle)))

    def before(self, cycle: int) -> tuple[str, Mapping[str, torch.Tensor]] | None:
        """Return the folder's name and the weights of the last adapter before that of ``cycle``; None without one."""
        folders = (self.folder(earlier) for earlier in range(cycle - 1, -1, -1))
        folder = next((folder for folder in folders if folder.exists()), None)
        return None if folder is None else (str(folder), self._learner.read_adapter(folder))

    def exists(self, cycle: int) -> bool:
        """Return whether the adapter of a cycle is there; ``keep_last_n_adapters`` removes adapters."""
        return not cycle or self.folder(cycle).exists()

    def check_changed(self, cycle: int, start: int) -> None:
        """Check that a cycle's training changed the adapter.

        Args:
            cycle: the trained cycle.
            start: the cycle with whose adapter the training started.

        Raises:
            UserError: the adapter equals the one that the training started from.
        """
        before, after = self._state(start), self._state(cycle)
        if all(torch.equal(before[name], tensor) for name, tensor in after.items()):
            steps = Cycle(self._out, cycle).training()["steps"]
            raise UserError(f"cycle {cycle}: {nothing_changed(steps, 'the cycle')}")

    def prune(self, keep: Collection[int], trained: Sequence[int]) -> None:
        """Remove the adapters of the cycles in ``trained`` that are not in ``keep``."""
        for cycle in trained:
            if cycle not in keep and cycle not in self._pruned:
                folder = Cycle(self._out, cycle).adapter
                if folder.exists():
                    remove_folder(folder)
                shutil.rmtree(folder.with_name(f".{folder.name}.tmp"), ignore_errors=True)  # a killed process's
                self._pruned.add(cycle)

    def _state(self, cycle: int) -> Mapping[str, torch.Tensor]:
        return self._learner.read_adapter(self.folder(cycle)) if cycle else self.first
