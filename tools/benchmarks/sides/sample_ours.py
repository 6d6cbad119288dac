"""Our samplers: ``… sample_ours MODEL DTYPE MOST [transformers]``, with a native decoder or transformers' forward.

Each sample ends at the trace's limit instead of ``max_new_tokens``. Slots have room for the longest allowed answer.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rocm_ext.model.native.decoder import native
from rocm_ext.model.sampler import sampler_of
from rocm_ext.sampling import Request, Sampling, sample_seed
from rocm_ext.sampling.local import LocalSession
from tools.benchmarks.sides.sample import DEVICE, DTYPES, Answers, serve, torchtune_decoder

TRANSFORMERS = sys.argv[4:5] == ["transformers"]
MOST = int(sys.argv[3])
LOGPROBS: list[float] = []


def transformers_decoder(folder: Path, dtype: torch.dtype) -> Any:
    """Load a Hugging Face folder as transformers' model."""
    from safetensors.torch import load_file
    from torchtune.modules.peft import LoRALinear
    from torchtune.training import set_default_dtype

    from rocm_ext.distributed.ranks import Ranks
    from rocm_ext.model.build import Weights, load_weights
    from rocm_ext.model.hf.decoder import build
    from rocm_ext.model.lora import Sizes, adopt, init_adapters

    with set_default_dtype(dtype):
        made: Any = build(
            folder,
            json.loads((folder / "config.json").read_text()),
            kind=partial(LoRALinear),
            sizes=Sizes(rank=1, alpha=1),
            targets=["q_proj"],
            parameters=None,
            trust_remote_code=False,
        )
    adopt(made, {})
    init_adapters(made, 0, DEVICE)
    state = {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    load_weights(made, Weights(state, "HF"), Ranks(DEVICE))
    return made


FOLDER, DTYPE = Path(sys.argv[1]), DTYPES[sys.argv[2]]
DECODER = (
    transformers_decoder(FOLDER, DTYPE)
    if TRANSFORMERS
    else native(torchtune_decoder(FOLDER, DTYPE))
)


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
    with sampler_of(DECODER, True) as decoder:  # the adapter, which is zero, is merged
        session = Traced(decoder, NoText(), free_memory, graphs=False if TRANSFORMERS else None)
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

    return (
        torch.cuda.mem_get_info()[0]
        if torch.cuda.is_available()
        else psutil.virtual_memory().available
    ) // 2


if __name__ == "__main__":
    serve(generate, lambda: {"logprobs": LOGPROBS})
