"""vLLM: ``… sample_vllm MODEL DTYPE MOST``, offline, in this process; an answer is a request with its length.

vLLM computes a prompt once for its samples, because it caches prefixes.
"""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's memory is this process's

from vllm import LLM, SamplingParams

from tools.benchmarks.sides.sample import Answers, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def generate(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample with ``LLM.generate``."""
    samples = len(trace) // len(prompts)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(samples)]
    settings = [
        SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, seed=i,
                       temperature=0.0 if greedy else 1.0)
        for i, n in enumerate(trace)
    ]  # fmt: skip
    return [
        list(done.outputs[0].token_ids)
        for done in MODEL.generate(requests, settings, use_tqdm=False)
    ]


if __name__ == "__main__":
    MODEL = LLM(
        sys.argv[1], dtype=DTYPES[sys.argv[2]], max_model_len=512 + int(sys.argv[3]), skip_tokenizer_init=True,
        gpu_memory_utilization=0.8,
    )  # fmt: skip
    serve(generate)
