"""Training rows of sampled answers."""

from collections.abc import Mapping, Sequence

import numpy as np

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.rl.records import Sample


def to_rows(samples: Sequence[Sample], prompts: Mapping[str, Sequence[int]]) -> Rows:
    """Convert samples to training rows: the tokens of prompt and answer as sampled, with labels on the answer only.

    Args:
        samples: samples to train on.
        prompts: token ids of each prompt, by id.
    """
    rows = Rows([], [], [], {"rows": len(samples)})
    for sample in samples:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
    return rows
