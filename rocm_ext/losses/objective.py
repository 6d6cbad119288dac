"""The base class of objectives. An objective gives a step's loss as a value and a derivative per label.

A usual loss builds logits [tokens, vocabulary] for all tokens, also for masked ones. It keeps them for the backward
pass and adds their gradient, which takes 7.5 GB in fp32 at 152k words and 4,096 tokens. Here the gradient of a chunk is
computed as soon as its logits exist, so memory holds one chunk's logits at a time. The idea is from Liger Kernel's
FusedLinearCrossEntropy (arXiv:2410.10989). This version is plain torch and works for any head: tied, with LoRA, with
soft-capping.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_ext.base.kinds import NULL, POSITIVE, check, integer, one_of
from rocm_ext.distributed.ranks import Ranks

REFERENCE = "reference_logprobs"  # column: log-probs of the model before the first step

Head = Callable[[Tensor], Tensor]
Columns = Mapping[str, Tensor]  # columns by name, [n] each: a number for each label
Terms = tuple[Tensor, Tensor | None]

# Labels per chunk: enough to fill the device's matrix units, with logits that are small compared to the model.
_CHUNK = {"cuda": 1024, "cpu": 256}
_KINDS = {"normalize": one_of("tokens", "sequences") | POSITIVE, "chunk_tokens": integer(1) | NULL}


class Tally:
    """Means and maxima of values that :meth:`Objective.terms` computes.

    They stay on the device until :meth:`result`, so that measuring waits for the device once per step.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._sums) + len(self._maxima)

    def mean(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add ``values``, of any shape, to the mean ``name``, weighted if ``weights`` are given; booleans give a
        share."""
        values = values.double()
        if weights is None:
            weights = torch.ones_like(values)
        total = (values * weights).sum()
        count = weights.double().sum()
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def highest(self, name: str, values: Tensor) -> None:
        """Add ``values``, of any shape but not empty, to the maximum ``name``."""
        value = values.max().double()
        highest = self._maxima.get(name, value)
        self._maxima[name] = torch.maximum(highest, value)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return means and maxima by name over all ranks. All ranks call this, also those without measurements."""
        measured = self._sums, self._counts, self._maxima
        tensors = [tensor for named in measured for tensor in named.values()]
        numbers = torch.stack(tensors).tolist() if tensors else []  # waits for the device once
        remaining = iter(numbers)
        of_rank = [{name: next(remaining) for name in named} for named in measured]
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for rank_sums, rank_counts, rank_maxima in ranks.gather(of_rank):
            for name, value in rank_sums.items():
                sums[name] = sums.get(name, 0.0) + value
                counts[name] = counts.get(name, 0.0) + rank_counts[name]
            for name, value in rank_maxima.items():
                maxima[name] = max(value, maxima.get(name, value))
        means = {}
        for name, total in sums.items():
            means[name] = total / (counts[name] or 1.0)  # all weights may be 0
        return means | maxima


class Objective(ABC):
    """A function of the labels' negative log-likelihoods (NLL).

    A subclass defines :meth:`terms`, and sets attributes of the class or the instance:

    - ``columns``: names of the per-token columns (``old_logprobs``, ``advantages``, …) that the rows must have.
    - ``whole_sequences``: :meth:`terms` gets all labels of a micro-batch at once instead of a chunk, so that it can
      sum over sequences. A micro-batch never cuts a sequence, so these sums are complete. This costs a second pass
      through the output layer: the first pass computes only the NLLs.
    - ``temperature``: divisor of the logits.
    - ``better``: ``higher`` or ``lower``, by the name of a measurement. ``early_stopping_metric`` may name these
      measurements with the prefix ``val_``.
    - ``entropy_coef``: factor of the mean entropy of the labels' distributions, in nats, which is subtracted. The mean
      is over the step's labels, whatever ``normalize`` is.
    - ``over_vocabulary``: the value of a label is a function of its logits, see :meth:`compare`, and not of its NLL.
    - ``entropy_weight``: :meth:`denominator` divided by the step's labels. A training step sets it; 0 in validation.

    If the rows have a column ``weight``, constant in a row, it multiplies value and derivative of :meth:`terms`, and
    :meth:`denominator` gets counts times the data set's mean weight. So only ratios of weights matter, whichever rows
    share a step: the loss is the same if all are 2 as if all are 1. Measurements have no weights.

    Inside :meth:`measuring`, :meth:`terms` adds further measurements to ``tally``; otherwise ``tally`` is None. The
    trainer writes these means and maxima to ``metrics.jsonl``. Inside :meth:`recording`, the labels' NLLs are kept.

    Args:
        normalize: divisor of a step's sum. ``tokens`` divides by the number of the step's labels. ``sequences``
            averages over the labels of a sequence, and then over the sequences of the step. A number divides by this
            number times the step's sequences (Dr. GRPO, arXiv:2503.20783). All counts cover the full step, over all
            micro-batches and ranks.
        chunk_tokens: number of labels whose logits are in memory at once, by default 1,024 on a GPU and 256 on a CPU.

    Raises:
        UserError: an argument is out of range.
    """

    columns: tuple[str, ...] = ()
    whole_sequences: bool = False
    over_vocabulary: bool = False
    temperature: float = 1.0
    entropy_coef: float = 0.0
    entropy_weight: float = 1.0
    better: Mapping[str, str] = {}
    tally: Tally | None = None
    recorded: list[Tensor] | None = None

    def __init__(self, normalize: str | float = "tokens", chunk_tokens: int | None = None) -> None:
        check({"normalize": normalize, "chunk_tokens": chunk_tokens}, _KINDS, "loss.")
        self.normalize = normalize
        self.chunk_tokens = chunk_tokens

    @abstractmethod
    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Compute a value per label, and its derivative with respect to the label's NLL.

        With ``whole_sequences`` a value may depend on all labels of the micro-batch. Derivative i is then the
        derivative of the *sum* of the values by the NLL of label i. ``normalize: sequences`` weighs sequences, so a
        value may then depend only on labels of the same sequence.

        The memory plan runs this method on fake tensors: shapes must not depend on values (no ``.item()``, no boolean
        masks as an index).

        Args:
            nll: [n] fp32, NLLs of the labels under the current model.
            columns: all columns of the rows by name, [n] fp32; the attribute ``columns`` names the required ones.
            sequence: [n] int64, number of the label's sequence in the micro-batch, from 0 without gaps.

        Returns:
            Value [n] and derivative [n], both fp32. None instead of a derivative means 1 everywhere.
        """

    def columns_of(self, batch: Any) -> Columns:
        """Compute further columns, [n, …] by name, from a micro-batch, before the model computes it."""
        return {}

    def chunk(self, columns: Columns) -> Any:
        """Compute the argument ``other`` of :meth:`compare` from a chunk's columns, before the chunk's logits exist."""
        return None

    def compare(self, logits: Tensor, other: Any, gradient: bool) -> Terms:
        """Compute the values of a chunk, with ``over_vocabulary``.

        Args:
            logits: [n, v], divided by the temperature.
            other: result of :meth:`chunk`.
            gradient: whether to compute the gradient.

        Returns:
            Value [n] and its gradient by ``logits`` [n, v] or None, both fp32.
        """
        raise NotImplementedError

    @contextmanager
    def measuring(self) -> Iterator[Tally]:
        """Let :meth:`terms` measure inside the context, which yields the tally."""
        self.tally = tally = Tally()
        try:
            yield tally
        finally:
            self.tally = None

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Keep the NLLs of all labels inside the context, which yields them: [n] fp32 by chunk, on the device."""
        recorded: list[Tensor] = []
        self.recorded = recorded
        try:
            yield recorded
        finally:
            self.recorded = None

    def weights(self, sequence: Tensor) -> Tensor | None:
        """Return the weights [n] fp32 of values that ``normalize`` requires, by ``sequence`` [n]. None stands for 1
        everywhere."""
        if self.normalize != "sequences":
            return None
        return 1.0 / sum_over_sequences(torch.ones_like(sequence, dtype=torch.float32), sequence)

    def denominator(self, labels: float, sequences: float) -> float:
        """Return the divisor of a step's sum, given the step's numbers of labels and of sequences with a label, times
        the mean weight of the data set's."""
        if self.normalize == "tokens":
            return labels
        return sequences if self.normalize == "sequences" else float(self.normalize) * sequences

    def chunk_for(self, device: torch.device) -> int:
        """Return the number of labels whose logits exist at once on ``device``."""
        return self.chunk_tokens or _CHUNK.get(device.type, 256)

    def __call__(
        self,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        columns: Columns,
        sequence: Tensor,
    ) -> Tensor:
        """Sum the objective over the labels of a micro-batch.

        Args:
            head: output layer; it maps [n, d] to logits [n, v].
            hidden: [n, d], hidden states that predict ``targets``.
            targets: [n], token ids of the labels.
            columns, sequence: see :meth:`terms`.

        Returns:
            Scalar in fp32, differentiable with respect to ``hidden`` and the head's parameters. Divide the sum over
            a step by :meth:`denominator`.
        """
        parameters: Any = getattr(head, "parameters", tuple)()
        trained = [p for p in parameters if p.requires_grad]
        labels = _Labels(self, targets, columns, sequence)
        return _Summed.apply(head, labels, torch.is_grad_enabled(), hidden, *trained)


class CrossEntropy(Objective):
    """The negative log-likelihood (NLL) of the labels; arguments as in :class:`Objective`."""

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the NLL, whose derivative is 1."""
        return nll, None


class _Labels:
    """The labels of a micro-batch, with their columns, sequences and weights."""

    def __init__(
        self, objective: Objective, targets: Tensor, columns: Columns, sequence: Tensor
    ) -> None:
        self.objective = objective
        self.targets = targets
        self.columns = columns
        self.sequence = sequence
        self._weights = objective.weights(sequence)
        row_weights = columns.get("weight")
        if row_weights is not None:
            self._weights = row_weights if self._weights is None else self._weights * row_weights
        self._ahead: Terms | None = None
        # Weights of 1/length would push gradients of 16-bit logits below the smallest fp16. So weights are at least 1
        # while gradients are 16 bits wide, and `scale` is multiplied in afterwards, together with the loss scale.
        self.scale: Tensor | None = None
        if self._weights is not None and len(self._weights):
            self.scale = self._weights.min()
            self._weights = self._weights / self.scale

    def chunks(self) -> Iterator[slice]:
        """Yield slices of labels; the logits of one slice exist at a time."""
        size = self.objective.chunk_for(self.targets.device)
        for start in range(0, len(self.targets), size):
            yield slice(start, start + size)

    def logits(self, head: Head, hidden: Tensor) -> Tensor:
        """Return the logits [n, v] of one chunk, divided by the temperature."""
        logits = head(hidden)
        temperature = self.objective.temperature
        return logits if temperature == 1 else logits / temperature

    def look_ahead(self, head: Head, hidden: Tensor) -> None:
        """Do the first pass for an objective with ``whole_sequences``: compute NLLs and terms of all labels."""
        if not len(self.targets):
            return
        # the second pass draws the same dropout in the head
        devices = [hidden.device] if hidden.is_cuda else []
        nll = []
        with torch.no_grad(), torch.random.fork_rng(devices):
            for rows in self.chunks():
                targets = self.targets[rows]
                chunk_nll, _ = _nll(self.logits(head, hidden[rows]), targets, False)
                nll.append(chunk_nll)
        self._ahead = self.objective.terms(torch.cat(nll), self.columns, self.sequence)

    def other(self, rows: slice) -> Any:
        """Return the result of :meth:`Objective.chunk` for a chunk."""
        if self.objective.over_vocabulary:
            return self.objective.chunk(self._columns(rows))
        return None

    def values(self, logits: Tensor, other: Any, rows: slice, gradient: bool) -> tuple[Tensor, Any]:
        """Return the values [n] of one chunk without its entropy, and their gradient [n, v] or None."""
        objective = self.objective
        targets = self.targets[rows]
        if objective.over_vocabulary:
            if objective.recorded is not None:
                nll, _ = _nll(logits, targets, False)
                objective.recorded.append(nll)
            return objective.compare(logits, other, gradient)
        nll, grad_logits = _nll(logits, targets, gradient)
        if objective.recorded is not None:
            objective.recorded.append(nll)
        value, derivative = self._terms(nll, rows)
        if gradient and derivative is not None:
            grad_logits *= derivative[:, None]
        return value, grad_logits

    def _columns(self, rows: slice) -> dict[str, Tensor]:
        return {name: column[rows] for name, column in self.columns.items()}

    def _terms(self, nll: Tensor, rows: slice) -> Terms:
        """Return the weighted value and derivative of one chunk, without its entropy."""
        if self._ahead is None:
            columns = self._columns(rows)
            value, derivative = self.objective.terms(nll, columns, self.sequence[rows])
        else:
            values, derivatives = self._ahead
            value = values[rows]
            derivative = None if derivatives is None else derivatives[rows]
        if self._weights is None:
            return value, derivative
        weights = self._weights[rows]
        return value * weights, weights if derivative is None else derivative * weights

    def add_negative_entropy(self, logits: Tensor, rows: slice, gradient: Tensor | None) -> Tensor:
        """Return ``-entropy_coef`` times the entropies of one chunk; add its derivative to ``gradient``.

        This takes two more fp32 buffers of the logits' size.
        """
        log_probabilities = logits.log_softmax(dim=-1, dtype=torch.float32)
        negative = (log_probabilities.exp() * log_probabilities).sum(dim=-1, keepdim=True)
        scale: Any = self.objective.entropy_coef * self.objective.entropy_weight
        if self.scale is not None:
            scale = scale / self.scale
        if gradient is not None:  # d sum(p log p) / d logits = p (log p - sum(p log p))
            gradient += scale * log_probabilities.exp() * (log_probabilities - negative)
        return (scale * negative).sum()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, labels, train, hidden, *parameters):  # type: ignore[override]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if train else None
        grads = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        if labels.objective.whole_sequences:
            labels.look_ahead(head, hidden)
        for rows in labels.chunks():
            other = labels.other(rows)
            with torch.set_grad_enabled(train):
                h = hidden[rows].detach().requires_grad_(train)
                logits = labels.logits(head, h)
            value, grad_logits = labels.values(logits.detach(), other, rows, train)
            total += value.sum()
            if labels.objective.entropy_coef:
                total += labels.add_negative_entropy(logits.detach(), rows, grad_logits)
            if not train:
                continue
            first, *rest = torch.autograd.grad(
                logits, (h, *parameters), grad_logits.to(logits.dtype)
            )
            grad_hidden[rows] = first
            for sum_, grad in zip(grads, rest, strict=True):
                sum_ += grad
            del logits, grad_logits, other  # frees them before the next chunk's logits exist
        ctx.scale = labels.scale
        if train:
            for i, parameter in enumerate(parameters):
                grads[i] = grads[i].to(parameter.dtype)
            ctx.save_for_backward(grad_hidden, *grads)
        return total if labels.scale is None else total * labels.scale

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        grad_hidden, *grads = ctx.saved_tensors
        grad_output = grad_output if ctx.scale is None else grad_output * ctx.scale
        return None, None, None, grad_hidden * grad_output, *(g * grad_output for g in grads)


def sum_over_sequences(values: Tensor, sequence: Tensor) -> Tensor:
    """Return for every label [n] the sum of ``values`` [n] over its ``sequence`` [n]."""
    # n sums suffice, because there are at most as many sequences as labels
    return torch.zeros_like(values).index_add_(0, sequence, values)[sequence]


def _nll(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Any]:
    """Return the NLL [n] of ``targets`` [n] under ``logits`` [n, v], and its gradient [n, v] or None, in fp32."""
    if not gradient:
        return F.cross_entropy(logits.float(), targets, reduction="none"), None
    index = targets[:, None]
    # this takes one fp32 buffer, also for 16-bit logits; logsumexp would need a second one while it runs
    log_probabilities = logits.log_softmax(dim=-1, dtype=torch.float32)
    nll = -log_probabilities.gather(-1, index).squeeze(-1)
    # d nll / d logits = softmax - onehot; the logits stay intact, because a head such as tanh needs its output again
    probabilities = log_probabilities.exp_()
    minus_one = probabilities.new_full((len(targets), 1), -1.0)
    return nll, probabilities.scatter_add_(-1, index, minus_one)
