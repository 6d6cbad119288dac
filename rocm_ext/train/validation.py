"""The objective on held-out rows, and the loader of a learner's micro-batches."""

import torch
from omegaconf import DictConfig

from rocm_ext.data.batches import StepLoader, Steps, width_multiple
from rocm_ext.data.rows import Rows
from rocm_ext.objectives import Tally
from rocm_ext.train.learner import Learner


def make_loader(learner: Learner, cfg: DictConfig, rows: Rows, steps: Steps, whole: bool = False) -> StepLoader:
    """Return a loader of this rank's micro-batches.

    Args:
        learner: the model, set up.
        cfg: the run's config.
        rows: rows that ``steps`` numbers.
        steps: rows of each update.
        whole: see :class:`StepLoader`.
    """
    runtime = learner.runtime
    return StepLoader(
        rows,
        steps,
        rank=runtime.ranks.rank,
        ranks=runtime.ranks.world,
        tokens_per_micro_batch=learner.tokens_per_micro_batch,
        packed=learner.packed,
        share=learner.shares,
        whole=whole,
        pad_id=getattr(learner.tokenizer, "pad_id", 0) or 0,
        multiple=width_multiple(cfg.compile, runtime.device, runtime.dtype),
        num_workers=cfg.num_workers,
        pin_memory=cfg.pin_memory,
    )


@torch.no_grad()
def validation_loss(learner: Learner, loader: StepLoader) -> tuple[float, int, dict[str, float]]:
    """Compute the objective on all rows of ``loader``, without dropout. All ranks call this.

    Args:
        learner: the model, set up; it is in training mode afterwards.
        loader: this rank's micro-batches.

    Returns:
        The normalised objective, the number of labels, and what the objective measures beside it, by name.
    """
    objective, ranks = learner.objective, learner.runtime.ranks
    learner.model.eval()
    labels = sequences = 0.0
    summed = torch.zeros((), dtype=torch.float64, device=learner.runtime.device)  # read once, at the end
    objective.tally = tally = Tally()
    try:
        for batches in loader.range(0, loader.steps.per_epoch):
            for batch in batches:
                summed += learner.model(batch.to(learner.runtime.device))
                labels, sequences = labels + len(batch.targets), sequences + batch.sequences
    finally:
        objective.tally = None
    learner.model.train()
    total, labels, sequences, measured = ranks.sum([summed.item(), labels, sequences, len(tally)])
    measurements = tally.result(ranks) if measured else {}
    return total / objective.denominator(labels, sequences), int(labels), measurements
