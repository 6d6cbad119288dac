"""Log-probs of rows under the reference, which is the model before the first step."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rocm_ext.data.batches import labelled
from rocm_ext.data.rows import Rows
from rocm_ext.files import replace_bytes
from rocm_ext.log import log
from rocm_ext.train.learner import Learner
from rocm_ext.train.scoring import score

FILE = "reference.safetensors"
COLUMN = "reference_logprobs"
_BLOCK = 2048  # rows scored between two log lines


def add_reference_logprobs(learner: Learner, sets: Mapping[str, Rows], folder: Path) -> None:
    """Add the column ``reference_logprobs``: each label's log-prob under the learner's present weights.

    The log-probs are read from ``reference.safetensors`` where that file has them for the same rows, base model,
    adapter and dtype. Otherwise the learner scores the rows, and the main rank writes the file. All ranks call this.

    Args:
        learner: the model, set up, before its first step.
        sets: rows by name.
        folder: output folder of the run.

    Raises:
        UserError: the file cannot be written.
    """
    ranks, path = learner.runtime.ranks, folder / FILE
    model = _fingerprint(learner)
    wanted = {name: f"{model} {rows.fingerprint()}" for name, rows in sets.items()}
    found = ranks.agree(_read(path, wanted) if ranks.is_main else None)
    if found:
        log.info("reference log-probs: %s (%s)", path, ", ".join(found))
    if missing := [name for name in sets if name not in found]:
        for name in missing:
            found[name] = _score(learner, sets[name], name)
        ranks.on_main(lambda: replace_bytes(path, save(found, metadata=wanted)))
    for name, rows in sets.items():
        _add(rows, found[name])


def _fingerprint(learner: Learner) -> str:
    """Hash what the log-probs depend on beside the rows: base model, adapter and dtype."""
    digest = hashlib.sha256(f"{learner.base_fingerprint} {learner.runtime.dtype}".encode())
    for name, tensor in sorted(learner.adapter_state().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path, wanted: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the log-probs in ``path`` whose fingerprint is the one in ``wanted``, by name."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            known = file.metadata() or {}
            return {
                name: file.get_tensor(name) for name, fingerprint in wanted.items() if known.get(name) == fingerprint
            }
    except (SafetensorError, OSError) as error:
        log.warning("cannot read %s (%s); its log-probs are computed again", path, error)
        return {}


def _score(learner: Learner, rows: Rows, name: str) -> np.ndarray:
    """Return the log-probs of all labels of ``rows``, end to end."""
    began, parts = time.perf_counter(), []
    for start in range(0, len(rows), _BLOCK):
        block = rows.part(range(start, min(start + _BLOCK, len(rows))))
        parts += score(learner, block)
        log.info("reference log-probs of %s: %s of %s rows", name, f"{len(parts):,}", f"{len(rows):,}")
    log.info("reference log-probs of %s: %.0f s", name, time.perf_counter() - began)
    return np.concatenate(parts)


def _add(rows: Rows, logprobs: np.ndarray) -> None:
    rows.columns[COLUMN], start = [], 0
    for labels, lengths in zip(rows.labels, rows.lengths, strict=True):
        column, mask = np.zeros(len(labels), dtype=np.float32), labelled(labels, lengths)
        end = start + int(mask.sum())
        column[mask], start = logprobs[start:end], end
        rows.columns[COLUMN].append(column)
