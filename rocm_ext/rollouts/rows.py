"""Training rows of sampled answers."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.rollouts.samples import Sample

ROW_COLUMNS = ("old_logprobs",)  # what :func:`to_rows` can give an objective


def to_rows(kept: Sequence[Sample], prompts: Mapping[str, Sequence[int]], columns: Collection[str]) -> Rows:
    """Convert samples to training rows: the tokens of prompt and answer as sampled, with labels on the answer only.

    Args:
        kept: samples to train on.
        prompts: token ids of each prompt, by id.
        columns: columns that the objective needs; the rows get ``old_logprobs``, the log-probs of sampling, if this
            names it.
    """
    old_logprobs: list[np.ndarray] = []
    wanted = {"old_logprobs": old_logprobs} if "old_logprobs" in columns else {}
    rows = Rows([], [], [], {"rows": len(kept)}, wanted)
    for sample in kept:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
        if wanted:
            old_logprobs.append(np.array([*[0.0] * len(prompt), *sample.logprobs], dtype=np.float32))
    return rows
