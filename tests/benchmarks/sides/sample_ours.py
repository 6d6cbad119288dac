"""Our sampler: ``… sample_ours MODEL DTYPE MOST``.

Each sample ends at the trace's limit instead of ``max_new_tokens``. Slots have room for the longest allowed answer.
"""

import sys
from pathlib import Path

from rocm_ext.generation import Request, Sampling, sample_seed
from rocm_ext.generation.decoder import merged
from rocm_ext.generation.local import LocalSession
from tests.benchmarks.sides.sample import DTYPES, Answers, serve, torchtune_decoder

DECODER = torchtune_decoder(Path(sys.argv[1]), DTYPES[sys.argv[2]])
MOST = int(sys.argv[3])
LOGPROBS: list[float] = []


class NoText:
    """A tokenizer without stop tokens and without text."""

    stop_tokens = (-1,)

    def decode(self, tokens: list[int]) -> str:
        return ""


class Traced(LocalSession):
    """Ends each answer at the trace's length."""

    limits: dict[tuple[str, int], Sampling]

    def _completion(self, running, sampling):
        request = running.request
        return super()._completion(running, self.limits[request.prompt_id, request.sample])


def generate(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample with our session and keep the log-probabilities."""
    samples, temperature = len(trace) // len(prompts), 0.0 if greedy else 1.0
    requests = [
        Request(str(i), k, sample_seed(0, 0, str(i), k), tuple(prompt))
        for i, prompt in enumerate(prompts)
        for k in range(samples)
    ]
    with merged(DECODER) as decoder:
        session = Traced(decoder, NoText(), free_memory)
        session.limits = {
            (request.prompt_id, request.sample): Sampling(length, temperature)
            for request, length in zip(requests, trace, strict=True)
        }
        done = list(session.generate(requests, Sampling(MOST, temperature)))
    done.sort(key=lambda completion: (int(completion.request.prompt_id), completion.request.sample))
    LOGPROBS[:] = [logprob for completion in done for logprob in completion.logprobs]
    return [completion.tokens for completion in done]


def free_memory() -> int:
    """Half of the device's free memory."""
    import psutil
    import torch

    return (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available) // 2


if __name__ == "__main__":
    serve(generate, lambda: {"logprobs": LOGPROBS})
