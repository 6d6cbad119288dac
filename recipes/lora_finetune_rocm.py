"""LoRA supervised fine-tuning on 1…N ranks.

    tune run lora_finetune_rocm --config strix_halo_qwen7b
    tune run --nproc_per_node 8 lora_finetune_rocm --config mi300x_qwen72b

``LoRAFinetune.check`` and ``setup`` are the table of contents. To change a part, subclass ``Learner`` (model, loss) or
``Trainer`` (optimiser, schedule, step) and pass the class to the recipe: see docs/extending.md.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.config.checks.training import check_values
from rocm_ext.data import overview
from rocm_ext.data.mixture import Mixture, lines
from rocm_ext.data.rows import Rows
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.data.training_rows import ValidationRows, training_rows, validation_sets
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.download import use_downloaded
from rocm_ext.plan import workload
from rocm_ext.runs.records import ROWS
from rocm_ext.train.builders import check_tokenizer, nothing_changed
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt, Runtime, run
from rocm_ext.train.machines import SAME_DATA, check_same
from rocm_ext.train.metrics import log_config, setup_metric_logger
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.trainer import Trainer


class LoRAFinetune:
    """Fine-tunes LoRA or DoRA adapters of a torchtune model.

    Args:
        cfg: config of ``lora_finetune_rocm`` or of a recipe that extends it, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that trains the model.

    Attributes:
        columns: columns that :meth:`add_columns` adds to the rows; this recipe has none.
    """

    columns: tuple[str, ...] = ()

    def __init__(
        self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[Trainer] = Trainer
    ) -> None:
        check_values(cfg)
        self.cfg = cfg
        self.learner_cls = learner
        self.trainer_cls = trainer
        self.metric_logger: Any = None

    def check(self) -> None:
        """Do all set-up that needs no weights, cheap steps first, so that a user's mistake ends the run early."""
        cfg = self.cfg
        self.runtime = Runtime.open(cfg)
        use_downloaded(cfg, self.runtime.ranks)
        self.folder = OutputDir.open(cfg, self.runtime.ranks)
        tokenizer = open_tokenizer(cfg)
        check_tokenizer(tokenizer, cfg)
        self.learner = self.learner_cls(cfg, self.runtime, tokenizer)
        self.evaluation = self.setup_evaluation()
        rows, validation_rows = self.setup_data(tokenizer)
        self.rows = rows
        self.validation_rows = validation_rows
        self.parts = {"dataset": rows, **validation_sets(validation_rows)}
        check_same(
            lambda: {key: part.fingerprint() for key, part in self.parts.items()},
            self.runtime.ranks,
            SAME_DATA,
        )
        for part in self.parts.values():
            self.learner.check_rows(part, self.columns)
        self.trainer_cls.check(cfg, self.learner, len(rows))
        mixture = Mixture.of(cfg.dataset, rows)
        mixture.check()
        for line in lines(mixture.table()):
            log.info("%s", line)
        shares = self.learner.shares
        work = workload.describe(rows, len(rows), "the run's rows", shares, mixture)
        self.learner.plan(work, before=self.folder.earlier_plan(self.cfg))
        if self.folder.resumed is None:  # a run that has begun has shown that it fits
            self.learner.check_budget()

    def setup(self) -> None:
        """Prepare the run: :meth:`check`, then read the weights and claim the output folder."""
        self.check()
        self.metric_logger = setup_metric_logger(self.cfg, self.runtime.ranks.is_main)
        self.learner.load()
        self._first = peft_files.fingerprint(self.learner.adapter_state())
        self.add_columns(self.folder.path, self.parts)
        self.trainer = self.trainer_cls(
            self.learner,
            self.rows,
            self.cfg,
            self.folder,
            validation_rows=self.validation_rows,
            metric_logger=self.metric_logger,
            interrupt=self.evaluation.interrupt if self.evaluation else Interrupt(),
            evaluation=self.evaluation,
        )
        fresh = self.folder.resumed is None
        self.trainer.open()
        if fresh and self.runtime.ranks.is_main:
            overview.write(
                self.folder.path / ROWS,
                lambda: overview.of_rows(
                    self.cfg, self.learner.tokenizer, self.parts, ranks=self.runtime.ranks.world
                ),
            )
        log_config(self.metric_logger, self.cfg)

    def setup_evaluation(self) -> Any:
        """Return a :class:`rocm_ext.evaluate.answers.Evaluator` of ``eval_prompts``; None without them."""
        if self.cfg.eval_prompts is None:
            return None
        # this import takes time, which most runs save
        from rocm_ext.evaluate.answers import Evaluator

        evaluation = Evaluator(self.cfg, self.learner)
        evaluation.check()
        return evaluation

    def setup_data(self, tokenizer: Any) -> tuple[Rows, ValidationRows]:
        """Read and tokenise the training rows, and the validation rows, of named data sets by name, or None."""
        return training_rows(
            self.cfg,
            tokenizer,
            self.learner.decoder.max_seq_len,
            cached=tokenizer is self.learner.tokenizer,  # a recipe may bring another tokenizer
            progress=self.runtime.ranks.is_main and os.isatty(2),
        )

    def add_columns(self, folder: Path, rows: Mapping[str, Rows]) -> None:
        """Add the columns in :attr:`columns` to the rows, by their keys in the config, before the first step."""

    def train(self) -> None:
        """Train to the last step, write the outputs, and warn if the adapter is unchanged.

        Raises:
            Interrupted: the user asked to stop; the last step is saved.
        """
        self.trainer.train()
        if peft_files.fingerprint(self.learner.adapter_state()) == self._first:
            log.warning("%s", nothing_changed(self.trainer.step, "the run"))
        if self.evaluation is not None:
            self.evaluation.report_gain_at(*self.trainer.chosen())

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        if self.metric_logger is not None:
            self.metric_logger.close()
        self.runtime.ranks.close()


@config.recipe_main("lora_finetune_rocm")
def main(cfg: DictConfig) -> None:
    """LoRA fine-tuning: `tune run lora_finetune_rocm --config NAME [key=value ...]`."""
    run(LoRAFinetune(cfg))


if __name__ == "__main__":
    main()
