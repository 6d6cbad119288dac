"""torchtune: ``… sample_torchtune MODEL DTYPE MOST``: ``generation.generate`` with a local cache, left-padded.

torchtune's PPO recipe calls it in the same way. torchtune decodes all rows until the last one has ended. So this side
asks for that many tokens, which saves the search for stop tokens. torchtune gathers the logits of all steps;
its hook drops them here. If the logits do not fit into half of the memory, the rows run in several batches.
"""

import os
import sys
from pathlib import Path

import torch
from torchtune.generation import generate as torchtune_generate
from torchtune.generation import generate_next_token
from torchtune.modules.common_utils import local_kv_cache

from tools.benchmarks.sides.sample import (
    DEVICE,
    DTYPES,
    PAD,
    Answers,
    padded,
    serve,
    torchtune_decoder,
)

DTYPE = DTYPES[sys.argv[2]]
MODEL = torchtune_decoder(Path(sys.argv[1]), DTYPE)


def generate(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample in batches whose logits fit into half of the memory."""
    samples, longest = len(trace) // len(prompts), max(map(len, prompts))
    per_row = 4 * MODEL.tok_embeddings.num_embeddings * longest
    at_once = max(1, min(len(prompts), memory() // 2 // per_row // samples))
    at_once = -(-len(prompts) // -(-len(prompts) // at_once))  # batches of one size
    answers: Answers = []
    for first in range(0, len(prompts), at_once):
        part = slice(first * samples, (first + at_once) * samples)
        answers += batch(prompts[first : first + at_once], trace[part], greedy)
    return answers


def batch(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample one batch with torchtune's ``generate``."""
    tokens = padded(prompts).repeat_interleave(len(trace) // len(prompts), 0)
    rows, width = tokens.shape
    length = width + max(trace)

    def without_logits(*args, **kwargs):
        drawn, logits = generate_next_token(*args, **kwargs)
        return drawn, logits[:, :0]

    with local_kv_cache(
        MODEL, batch_size=rows, device=DEVICE, dtype=DTYPE, decoder_max_seq_len=length
    ):
        out, _ = torchtune_generate(
            MODEL, tokens, max_generated_tokens=max(trace), pad_id=PAD, temperature=1.0,
            top_k=1 if greedy else None, custom_generate_next_token=without_logits,
        )  # fmt: skip
    return [row[width : width + n] for row, n in zip(out.tolist(), trace, strict=True)]


def memory() -> int:
    """Bytes of the device's memory."""
    if DEVICE.type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    serve(generate)
