"""Log-probs of rows under the reference, which is the model before the first step."""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import remove_folder, replace_bytes
from rocm_ext.base.log import Progress, log
from rocm_ext.data.batches import label_counts
from rocm_ext.data.rows import Rows
from rocm_ext.train.learner import Learner
from rocm_ext.train.scoring import score

FILE = "reference.safetensors"
COLUMN = "reference_logprobs"
PARTS = "reference.parts"  # folder of the blocks that are scored, until all are
_BLOCK = 512  # rows that are scored before they are saved


def add_reference_logprobs(learner: Learner, sets: Mapping[str, Rows], folder: Path) -> None:
    """Add the column ``reference_logprobs``: each label's log-prob under the learner's present weights.

    The log-probs are read from ``reference.safetensors`` where that file has them for the same rows, base model,
    adapter and dtype. Otherwise the learner scores the rows, and the main rank writes the file. Many rows are scored in
    blocks, each of which is saved, so that a killed run does not begin again. All ranks call this.

    Args:
        learner: the model, set up, before its first step.
        sets: rows by name.
        folder: output folder of the run.

    Raises:
        UserError: a log-prob is not finite, or the file cannot be written.
    """
    ranks, path = learner.runtime.ranks, folder / FILE
    model = _fingerprint(learner)
    fingerprints = {name: f"{model} {rows.fingerprint()}" for name, rows in sets.items()}
    logprobs = ranks.agree(_read(path, fingerprints) if ranks.is_main else None)
    if logprobs:
        log.info("reference log-probs: %s (%s)", path, ", ".join(logprobs))
    if missing := [name for name in sets if name not in logprobs]:
        for name in missing:
            logprobs[name] = _score(learner, sets[name], name, folder / PARTS, model)
        ranks.on_main(lambda: replace_bytes(path, save(logprobs, metadata=fingerprints)))
    if ranks.is_main and (folder / PARTS).exists():
        remove_folder(folder / PARTS)
    for name, rows in sets.items():
        ends = np.cumsum([labels for labels, _ in label_counts(rows)])
        rows.add_labels_column(COLUMN, np.split(logprobs[name], ends[:-1]))


def _fingerprint(learner: Learner) -> str:
    """Hash what the log-probs depend on beside the rows: base model, adapter and dtype.

    A layer whose B is zero adds nothing, whatever its A is. So fresh adapters are equal under every seed.
    """
    digest = hashlib.sha256(f"{learner.base_fingerprint} {learner.runtime.dtype}".encode())
    state = learner.adapter_state()
    idle = {name.replace("lora_b", "lora_a") for name, tensor in state.items() if "lora_b" in name and not tensor.any()}
    for name, tensor in sorted(state.items()):
        if name not in idle:
            digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path, fingerprints: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the log-probs in ``path`` whose fingerprint is the one in ``fingerprints``, by name."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name, of in fingerprints.items() if metadata.get(name) == of}
    except (SafetensorError, OSError) as error:
        log.warning("cannot read %s (%s); its log-probs are computed again", path, error)
        return {}
    return {name: logprobs for name, logprobs in stored.items() if np.isfinite(logprobs).all()}


def _score(learner: Learner, rows: Rows, name: str, folder: Path, model: str) -> np.ndarray:
    """Return the log-probs of all labels of ``rows``, end to end.

    Args:
        learner: the model.
        rows: the rows.
        name: their key in the config.
        folder: keeps the blocks that are scored.
        model: fingerprint of the model.

    Raises:
        UserError: a log-prob is not finite.
    """
    ranks = learner.runtime.ranks
    blocks = [rows.part(range(at, min(at + _BLOCK, len(rows)))) for at in range(0, len(rows), _BLOCK)]
    fingerprints = [{name: f"{model} {block.fingerprint()}"} for block in blocks]
    paths = [folder / f"{name}_{i:06d}.safetensors" for i in range(len(blocks))]
    parts = ranks.agree(
        [_read(*each).get(name) for each in zip(paths, fingerprints, strict=True)] if ranks.is_main else None
    )
    done = sum(part is not None for part in parts)
    if done:
        log.info("reference log-probs of %s: %d of %d blocks were kept", name, done, len(blocks))
    with closing(Progress(len(blocks), done, ranks.is_main, unit=f"reference log-probs of {name}, block")) as progress:
        for i, block in enumerate(blocks):
            if parts[i] is not None:
                continue
            scored = score(learner, block)
            _check_finite(scored, name, i * _BLOCK)
            parts[i] = logprobs = np.concatenate(scored)
            if len(blocks) > 1:
                ranks.on_main(partial(_keep, paths[i], save({name: logprobs}, metadata=fingerprints[i])))
            progress.update(f"{len(block):,} rows")
    return np.concatenate(parts)


def _keep(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_bytes(path, content)


def _check_finite(scored: list[np.ndarray], name: str, first: int) -> None:
    """Refuse log-probs of rows, from number ``first`` on, that are not finite."""
    bad = [first + i for i, logprobs in enumerate(scored) if not np.isfinite(logprobs).all()]
    if bad:
        raise UserError(
            f"{name}: the reference's log-probs of {len(bad)} rows are not finite, the first of row {bad[0]}; look at "
            "the model's weights and at this row, or set dtype=fp32"
        )
