"""The objective on held-out rows."""

import torch

from rocm_ext.data.batches import StepLoader, Steps, rows_per_step
from rocm_ext.data.rows import Rows
from rocm_ext.losses import Tally
from rocm_ext.train.learner import Learner


@torch.no_grad()
def validation_loss(learner: Learner, rows: Rows) -> tuple[float, int, dict[str, float]]:
    """Compute the objective on all of ``rows``, without dropout. All ranks call this.

    Args:
        learner: the model, set up; it is in training mode afterwards.
        rows: held-out rows.

    Returns:
        The normalised objective, the number of labels, and what the objective measures beside it, by name.
    """
    objective, ranks, cfg = learner.objective, learner.runtime.ranks, learner.cfg
    steps = Steps(len(rows), rows_per_step(cfg, ranks.world), shuffle=False)
    loader = StepLoader(rows, steps, learner.layout, cfg.num_workers, cfg.pin_memory)
    learner.model.eval()
    labels = sequences = 0
    summed = torch.zeros((), dtype=torch.float64, device=learner.runtime.device)  # read once, at the end
    objective.tally = tally = Tally()
    try:
        for update in loader.range(0, steps.per_epoch):
            labels, sequences = labels + update.labels, sequences + update.sequences
            for batch in update.batches:
                summed += learner.model(batch.to(learner.runtime.device))
    finally:
        objective.tally = None
    learner.model.train()
    total, measured = ranks.sum([summed.item(), len(tally)])
    measurements = tally.result(ranks) if measured else {}
    return total / objective.denominator(labels, sequences), labels, measurements
