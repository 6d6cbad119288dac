"""LoRA training on pairs of a chosen and a rejected answer (DPO and its kin), on 1…N ranks.

    tune run dpo_rocm --config strix_halo_qwen3_4b_dpo
    tune run --nproc_per_node 8 dpo_rocm --config mi300x_qwen3_8b_dpo

This is the SFT recipe with other rows and another loss. A row is a pair, so both sides are in one micro-batch. The
reference is the model before the first step: it scores all rows once, and its log-probs stay in the output folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.base.files import read_lines
from rocm_ext.base.log import warn
from rocm_ext.data.rows import Rows
from rocm_ext.data.training_rows import ValidationRows, refuse_single_answers
from rocm_ext.losses.objective import REFERENCE
from rocm_ext.train.lifecycle import run
from rocm_ext.train.metrics import falling_likelihood
from rocm_ext.train.scoring import add_reference_logprobs


class DPO(LoRAFinetune):
    """Trains LoRA or DoRA adapters on pairs; see :class:`LoRAFinetune`."""

    columns = (REFERENCE,)

    def setup_data(self, tokenizer: Any) -> tuple[Rows, ValidationRows]:
        """Read and tokenise the pairs, as :meth:`LoRAFinetune.setup_data` does."""
        rows, validation = super().setup_data(tokenizer)
        refuse_single_answers(self.cfg.recipe, rows, validation)
        return rows, validation

    def add_columns(self, folder: Path, rows: Mapping[str, Rows]) -> None:
        """Add the reference's log-probs, if the loss needs them."""
        if REFERENCE in self.learner.objective.columns:
            add_reference_logprobs(self.learner, rows, folder)

    def train(self) -> None:
        """Train as :meth:`LoRAFinetune.train` does, and warn if the chosen answers became less likely all the way."""
        super().train()
        if self.runtime.ranks.is_main:
            lines = list(read_lines(self.trainer.folder.path / "metrics.jsonl"))
            warn(filter(None, [falling_likelihood(lines)]))


@config.recipe_main("dpo_rocm")
def main(cfg: DictConfig) -> None:
    """Training on preferences: `tune run dpo_rocm --config NAME [key=value ...]`."""
    run(DPO(cfg))


if __name__ == "__main__":
    main()
