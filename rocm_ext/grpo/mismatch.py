"""Whether the log-probs of sampler and trainer have moved apart: a pure function of ``metrics.jsonl``."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_FACTOR = 5.0  # of the median of all earlier steps
_LEAST = 0.02  # nats per token; 16-bit servers and answers of the step before give 1e-4 to 1e-2
_STEPS = 3  # earlier steps that a median needs


def grown(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if the newest step's divergence is far above that of the steps before it.

    Args:
        lines: the lines of ``metrics.jsonl``, in order.

    Returns:
        The warning, in one line; None if there is nothing to warn of, or if the step before deserved the same warning.
    """
    values = [line["mismatch_kl"] for line in lines if line.get("mismatch_kl") is not None]
    if not _is_high(values) or _is_high(values[:-1]) or lines[-1].get("mismatch_kl") is None:
        return None
    return (
        f"step {lines[-1]['step']}: the log-probs of the sampler and those of the trainer differ more than before: "
        f"mismatch_kl is {values[-1]:.2g} nats per token, and was {median(values[:-1]):.2g} in the median of the "
        "earlier steps. A server may sample with an old adapter, or the policy changes fast: lower lr"
    )


def _is_high(values: Sequence[float]) -> bool:
    earlier = values[:-1]
    return len(earlier) >= _STEPS and values[-1] > max(_LEAST, _FACTOR * median(earlier))
