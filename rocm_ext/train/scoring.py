"""Log-probs of rows under a learner's weights, or under other weights of its adapter."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rocm_ext.data.batches import collate, count_labels, cut, row_sizes
from rocm_ext.data.rows import Rows
from rocm_ext.losses import Objective
from rocm_ext.losses.objective import Terms
from rocm_ext.model.lora import Dora, adapters
from rocm_ext.train.learner import Learner


@torch.no_grad()
def score(learner: Learner, rows: Rows, temperature: float = 1.0) -> list[np.ndarray]:
    """Compute the log-prob of each label under the learner's present weights, without dropout.

    Every rank calls this with the same rows. The ranks share the work.

    Args:
        learner: the model, set up. Its mode and objective are the same afterwards.
        rows: rows of any length; one above ``learner.tokens_per_micro_batch`` gets its own micro-batch.
        temperature: the logits are divided by it.

    Returns:
        Of each row, in its order: the log-probs of its labels, fp32. A label is a token with a label that a token of
        its own sequence predicts, see :func:`~rocm_ext.data.batches.count_labels`.
    """
    ranks, device, layout = learner.runtime.ranks, learner.runtime.device, learner.layout
    sizes = row_sizes(rows, layout.share)
    pieces = cut(sizes, layout.ranks, layout.tokens_per_micro_batch, layout.packed)[layout.rank]
    plain = Rows(rows.tokens, rows.labels, rows.lengths, {})
    recorder = _Recorder(temperature, learner.objective.chunk_tokens)
    training, objective = learner.model.training, learner.model.objective
    learner.model.eval()
    learner.model.objective = recorder
    try:
        for piece in pieces:
            batch = collate(plain, piece, layout.packed, layout.pad_id, layout.multiple, layout.share)
            learner.model(batch.to(device))
    finally:
        learner.model.objective = objective
        learner.model.train(training)
    ours = [i for piece in pieces for i in piece]
    counts = [count_labels(rows.labels[i], rows.lengths[i])[0] for i in ours]
    of_row = dict(zip(ours, np.split(recorder.logprobs(), np.cumsum(counts)[:-1]), strict=True)) if ours else {}
    by_row = {i: logprobs for part in ranks.gather(of_row) for i, logprobs in part.items()}
    return [by_row[i] for i in range(len(rows))]


@contextmanager
def reference(learner: Learner, state: Mapping[str, Tensor] | None = None, source: str = "reference") -> Iterator[None]:
    """Context in which the learner computes without its adapter, or with other weights of it.

    Afterwards it has the same weights as before, bit for bit.

    Args:
        learner: the model, set up.
        state: the adapter's weights under torchtune's names; None disables the adapter.
        source: origin of ``state``, for messages.

    Raises:
        UserError: ``state`` does not fit the model.
    """
    if state is None:
        layers = [layer for _, layer in adapters(learner.decoder)]
        try:
            for layer in layers:
                layer.disabled = True
            yield
        finally:
            for layer in layers:
                layer.disabled = False
        return
    now = [parameter.detach().clone() for parameter in learner.adapter.values()]
    learner.load_adapter(state, source)
    try:
        yield
    finally:
        _put_back(learner, now)


@contextmanager
def without_adapter(learner: Learner) -> Iterator[None]:
    """Context in which the adapter's values change nothing, also in a sampler's layout that is refreshed inside.

    Afterwards the learner has the same weights as before, bit for bit.
    """
    now = [parameter.detach().clone() for parameter in learner.adapter.values()]
    try:
        with torch.no_grad():
            for _, layer in adapters(learner.decoder):
                layer.lora_b.weight.zero_()
                if isinstance(layer, Dora):
                    layer.initialize_dora_magnitude()
        yield
    finally:
        _put_back(learner, now)


@torch.no_grad()
def _put_back(learner: Learner, values: list[Tensor]) -> None:
    for parameter, value in zip(learner.adapter.values(), values, strict=True):
        parameter.copy_(value)


class _Recorder(Objective):
    """Records the NLL of each label on the device."""

    def __init__(self, temperature: float, chunk_tokens: int | None) -> None:
        super().__init__(chunk_tokens=chunk_tokens)
        self.temperature = temperature
        self._nll: list[Tensor] = []

    def terms(self, nll: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> Terms:
        self._nll.append(nll)
        return nll, None

    def logprobs(self) -> np.ndarray:
        """Return the log-prob of each label so far, end to end, fp32."""
        return -torch.cat(self._nll).cpu().numpy() if self._nll else np.zeros(0, np.float32)
