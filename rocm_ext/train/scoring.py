"""Score rows without training: log-probs under any adapter, stored log-probs of a reference, the held-out objective."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import remove_folder, replace_bytes
from rocm_ext.base.log import Progress, log
from rocm_ext.data.batches import (
    MicroBatch,
    StepLoader,
    Steps,
    collate,
    count_labels,
    cut,
    label_counts,
    row_sizes,
    rows_per_step,
)
from rocm_ext.data.rows import ROUTES, Rows
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import CrossEntropy, Objective, UnpairedPreference
from rocm_ext.losses.objective import REFERENCE
from rocm_ext.model.lora import reset, trained
from rocm_ext.runs.intervals import Interval, paired_ratio
from rocm_ext.train.learner import Learner

FILE = "reference.safetensors"
MISMATCHED = "mismatched"
PARTS = "reference.parts"  # folder of scored blocks, until all are done
_BLOCK = 512  # rows that are scored and saved together


@torch.no_grad()
def score(
    learner: Learner, rows: Rows, temperature: float = 1.0, replay: bool = False
) -> list[np.ndarray]:
    """Compute the labels' log-probs under the learner's present weights, without dropout.

    Every rank calls this with the same rows. The ranks share the work.

    Args:
        learner: the model, set up. Its mode and objective are the same afterwards.
        rows: rows of any length; one above ``learner.tokens_per_micro_batch`` gets a micro-batch alone.
        temperature: the logits are divided by it.
        replay: whether routers choose the experts of the rows' :data:`~rocm_ext.data.rows.ROUTES`.

    Returns:
        By row, the log-probs of its labels in order, fp32; see :func:`~rocm_ext.data.batches.count_labels`.
    """
    columns = {ROUTES: rows.columns[ROUTES]} if replay else {}
    plain = Rows(rows.tokens, rows.labels, rows.lengths, {}, columns)
    plain_nll = CrossEntropy(chunk_tokens=learner.objective.chunk_tokens)
    plain_nll.temperature = temperature
    with plain_nll.recording() as recorded:
        order = compute(learner, plain, plain_nll)
    return logprobs_by_row(plain, order, recorded, learner.runtime.ranks)


@torch.no_grad()
def compute(learner: Learner, rows: Rows, objective: Objective) -> list[int]:
    """Compute an objective on rows without dropout, for what it records; the learner is the same afterwards.

    Returns:
        The indices of this rank's rows in the order of their labels, see :func:`micro_batches`.
    """
    order, batches = micro_batches(learner, rows)
    training = learner.model.training
    before = learner.model.objective
    learner.model.eval()
    learner.model.objective = objective
    try:
        for batch in batches:
            learner.model(batch.to(learner.runtime.device))
    finally:
        learner.model.objective = before
        learner.model.train(training)
    return order


def micro_batches(learner: Learner, rows: Rows) -> tuple[list[int], Iterator[MicroBatch]]:
    """Cut rows of any length to this rank's micro-batches.

    Returns:
        The indices of the rows in the order of their labels, and the micro-batches.
    """
    layout = learner.layout
    sizes = row_sizes(rows, layout.share)
    of_ranks = cut(sizes, layout.ranks, layout.tokens_per_micro_batch, layout.packed)
    pieces = of_ranks[layout.rank]
    batches = (
        collate(rows, piece, layout.packed, layout.pad_id, layout.multiple, layout.share)
        for piece in pieces
    )
    return list(chain.from_iterable(pieces)), batches


def logprobs_by_row(
    rows: Rows, order: Sequence[int], recorded: Sequence[Tensor], ranks: Ranks
) -> list[np.ndarray]:
    """Return the labels' log-probs by row, fp32.

    Args:
        rows: rows that all ranks have computed together.
        order: indices of this rank's rows, from :func:`micro_batches`.
        recorded: the NLLs of their labels, from :meth:`rocm_ext.losses.Objective.recording`.
        ranks: all ranks; they call this together.
    """
    logprobs = np.zeros(0, np.float32)
    if recorded:
        logprobs = -torch.cat(list(recorded)).cpu().numpy()
    of_rank: dict[int, np.ndarray] = {}
    begin = 0
    for row in order:
        labels, _ = count_labels(rows.labels[row], rows.lengths[row])
        of_rank[row] = logprobs[begin : begin + labels]
        begin += labels
    by_row: dict[int, np.ndarray] = {}
    for part in ranks.gather(of_rank):
        by_row |= part
    return [by_row[row] for row in range(len(rows))]


@contextmanager
def reference(
    learner: Learner, state: Mapping[str, Tensor] | None = None, source: str = "reference"
) -> Iterator[None]:
    """Context in which the learner computes without its adapter, or with another one.

    Afterwards it has the same weights as before, bit for bit.

    Args:
        learner: the model, set up.
        state: the adapter's weights under torchtune's names; None disables the adapter.
        source: origin of ``state``, for messages.
    """
    if state is None:
        layers = [layer for _, layer in trained(learner.decoder)]
        try:
            for layer in layers:
                layer.disabled = True
            yield
        finally:
            for layer in layers:
                layer.disabled = False
        return
    with _restoring(learner):
        learner.load_adapter(state, source)
        yield


@contextmanager
def without_adapter(learner: Learner) -> Iterator[None]:
    """Context in which the adapter's values change nothing, also in a sampler's layout that is refreshed inside.

    Afterwards the learner has the same weights as before, bit for bit.
    """
    with _restoring(learner):
        for _, layer in trained(learner.decoder):
            reset(layer)
        yield


@contextmanager
def _restoring(learner: Learner) -> Iterator[None]:
    """Context after which the adapter has its present values again."""
    values = {name: p.detach().clone() for name, p in learner.adapter.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in learner.adapter.items():
                parameter.copy_(values[name])


class Validation(NamedTuple):
    """A model's results on held-out rows.

    Attributes:
        loss: the normalised objective without an entropy bonus.
        labels: number of labels.
        measurements: the objective's other measurements by name.
        sums: [blocks] sum of the objective over as many rows as a step has, by block of rows in their order.
        sizes: [blocks] divisors of these sums.
    """

    loss: float
    labels: int
    measurements: dict[str, float]
    sums: np.ndarray
    sizes: np.ndarray

    def rise(self, before: Sequence[float]) -> Interval:
        """Return the rise of the loss since a validation with the sums ``before``."""
        return paired_ratio(self.sums - before, self.sizes)


@torch.no_grad()
def validation_loss(learner: Learner, rows: Rows) -> Validation:
    """Compute the objective on all held-out ``rows``, without dropout. All ranks call this.

    Afterwards the model is in training mode.
    """
    objective = learner.objective
    ranks = learner.runtime.ranks
    cfg = learner.cfg
    set_baseline(learner, rows, range(len(rows)))
    steps = Steps(len(rows), rows_per_step(cfg, ranks.world), shuffle=False)
    loader = StepLoader(rows, steps, learner.layout, cfg.num_workers, cfg.pin_memory)
    learner.model.eval()
    objective.entropy_weight = 0.0  # a training step sets it
    labels = 0.0  # with the weights of their rows, as the sequences
    sequences = 0.0
    sizes = []
    device = learner.runtime.device
    summed = torch.zeros((), dtype=torch.float64, device=device)
    summed_up_to = []  # a block, on the device; read once, at the end
    with objective.measuring() as tally:
        for update in loader.range(0, steps.per_epoch):
            labels += update.labels
            sequences += update.sequences
            for batch in update.batches:
                summed += learner.model(batch.to(device))
            summed_up_to.append(summed.clone())
            sizes.append(objective.denominator(update.labels, update.sequences))
    learner.model.train()
    *sums, measured = ranks.sum([*torch.stack(summed_up_to).tolist(), len(tally)])
    loss = sums[-1] / objective.denominator(labels, sequences)
    measurements = tally.result(ranks) if measured else {}
    count = sum(of_row for of_row, _ in label_counts(rows))
    by_block = np.diff(sums, prepend=0.0)
    return Validation(loss, count, measurements, by_block, np.array(sizes))


def set_baseline(learner: Learner, rows: Rows, numbers: Iterable[int]) -> None:
    """Set the baseline of KTO for the rows ``numbers`` of an update or a validation. All ranks call this.

    The baseline is a mean over prompts with answers to other prompts, see :meth:`Rows.mismatched`: the log-prob under
    the present weights minus the reference's log-prob, and at least 0. Other objectives have none.
    """
    objective = learner.objective
    if not isinstance(objective, UnpairedPreference) or objective.baseline is None:
        return
    mismatched = rows.beside[MISMATCHED].part(numbers)
    divergences = []
    pairs = zip(score(learner, mismatched), mismatched.columns[REFERENCE], strict=True)
    for ours, theirs in pairs:
        divergences.append(ours.sum(dtype=np.float64) - theirs.sum(dtype=np.float64))
    objective.baseline = max(0.0, fmean(divergences))


# ---- log-probs of the reference, stored in the output folder


def add_reference_logprobs(learner: Learner, sets: Mapping[str, Rows], folder: Path) -> None:
    """Add the column ``reference_logprobs``: the labels' log-probs under the learner's present weights.

    If the objective has a baseline, ``rows.beside`` gets mismatched rows with this column.

    The file ``reference.safetensors`` keeps log-probs for the same rows, base model, adapter and dtype. For other rows
    the learner computes them, and the main rank writes the file. Blocks of many rows are saved one by one, so that a
    resumed run continues. All ranks call this.

    Args:
        learner: the model, set up, before its first step.
        sets: rows by name.
        folder: output folder of the run.

    Raises:
        UserError: a log-prob is not finite, or the file cannot be written.
    """
    ranks = learner.runtime.ranks
    path = folder / FILE
    sets = dict(sets)
    if isinstance(learner.objective, UnpairedPreference) and learner.objective.baseline is not None:
        for name, rows in list(sets.items()):
            # no data set's name has a dot
            rows.beside[MISMATCHED] = sets[f"{name}.{MISMATCHED}"] = rows.mismatched()
    model = _fingerprint(learner)
    fingerprints = {name: f"{model} {rows.fingerprint()}" for name, rows in sets.items()}
    logprobs = ranks.agree(_read(path, fingerprints) if ranks.is_main else None)
    if logprobs:
        log.info("reference log-probs: %s (%s)", path, ", ".join(logprobs))
    missing = [name for name in sets if name not in logprobs]
    for name in missing:
        logprobs[name] = _score(learner, sets[name], name, folder / PARTS, model)
    if missing:
        ranks.on_main(lambda: replace_bytes(path, save(logprobs, metadata=fingerprints)))
    if ranks.is_main and (folder / PARTS).exists():
        remove_folder(folder / PARTS)
    for name, rows in sets.items():
        ends = np.cumsum([labels for labels, _ in label_counts(rows)])
        by_row = np.split(logprobs[name], ends[:-1])
        rows.add_labels_column(REFERENCE, by_row)


def _fingerprint(learner: Learner) -> str:
    """Hash base model, adapter and dtype, which determine a row's log-probs.

    The hash skips A where B is zero, because the layer adds nothing. So fresh adapters are equal under every seed.
    """
    digest = hashlib.sha256(f"{learner.base_fingerprint} {learner.runtime.dtype}".encode())
    state = learner.adapter_state()
    for name, tensor in sorted(state.items()):
        b = state.get(name.replace("lora_a", "lora_b"))
        adds_nothing = "lora_a" in name and b is not None and not b.any()
        if not adds_nothing:
            digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path, fingerprints: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the log-probs in ``path`` with the fingerprints ``fingerprints``, by name."""
    if not path.is_file():
        return {}
    stored = {}
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            for name, fingerprint in fingerprints.items():
                if metadata.get(name) == fingerprint:
                    logprobs = file.get_tensor(name)
                    if np.isfinite(logprobs).all():
                        stored[name] = logprobs
    except (SafetensorError, OSError) as error:
        log.warning("cannot read %s (%s); its log-probs are computed again", path, error)
        return {}
    return stored


def _score(learner: Learner, rows: Rows, name: str, folder: Path, model: str) -> np.ndarray:
    """Return the log-probs of all labels of ``rows``, end to end; ``folder`` keeps scored blocks.

    ``name`` is the rows' key in the config, and ``model`` the fingerprint of the model.
    """
    ranks = learner.runtime.ranks
    blocks = []
    for begin in range(0, len(rows), _BLOCK):
        end = min(begin + _BLOCK, len(rows))
        blocks.append(rows.part(range(begin, end)))
    fingerprints = [{name: f"{model} {block.fingerprint()}"} for block in blocks]
    paths = [folder / f"{name}_{i:06d}.safetensors" for i in range(len(blocks))]

    def scored_before() -> list[np.ndarray | None]:
        if len(blocks) > 1:
            folder.mkdir(exist_ok=True)
        stored = map(_read, paths, fingerprints)
        return [logprobs.get(name) for logprobs in stored]

    parts = ranks.on_main(scored_before)
    done = sum(part is not None for part in parts)
    if done:
        log.info("reference log-probs of %s: %d of %d blocks were kept", name, done, len(blocks))
    with closing(
        Progress(len(blocks), done, ranks.is_main, unit=f"reference log-probs of {name}, block")
    ) as progress:
        for i, block in enumerate(blocks):
            if parts[i] is not None:
                continue
            scored = score(learner, block)
            bad = []
            for row, values in enumerate(scored, start=i * _BLOCK):
                if not np.isfinite(values).all():
                    bad.append(row)
            if bad:
                raise UserError(
                    f"{name}: the reference's log-probs of {len(bad)} rows are not finite, the first of row {bad[0]}; "
                    "look at the model's weights and at this row, or set dtype=fp32"
                )
            parts[i] = logprobs = np.concatenate(scored)
            if len(blocks) > 1:
                content = save({name: logprobs}, metadata=fingerprints[i])
                ranks.on_main(partial(replace_bytes, paths[i], content))
            progress.update(f"{len(block):,} rows")
    return np.concatenate(parts)
