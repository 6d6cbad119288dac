"""Prompts, requests and training of tests of sampling in this process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rocm_ext.model.lora import trained
from rocm_ext.sampling import Request, Sampling, sample_seed

STOPS = tuple(range(5, 331, 16))  # enough stop tokens that answers have many lengths


class Words:
    """A tokenizer whose ids are letters: 0 is a, 26 is a again, and so on."""

    def __init__(self, stop_tokens: Iterable[int] = STOPS) -> None:
        self.stop_tokens = list(stop_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def prompts(
    *lengths: int, seed: int = 1, words: tuple[int, int] = (0, 331)
) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(*words, (n,), generator=generator).tolist()) for n in lengths]


def ask(texts: Sequence[tuple[int, ...]], samples: int = 1, cycle: int = 0) -> list[Request]:
    return [
        Request(str(i), sample, sample_seed(0, cycle, str(i), sample), tokens)
        for i, tokens in enumerate(texts)
        for sample in range(samples)
    ]


def answers_of(session: Any, requests: Iterable[Request], sampling: Sampling) -> dict:
    """Return completions by prompt and sample."""
    return {c.request.key: c for c in session.generate(requests, sampling)}


@torch.no_grad()
def train(decoder: torch.nn.Module, seed: int) -> None:
    """Change every adapter value, as a step of training does."""
    torch.manual_seed(seed)
    for _, layer in trained(decoder):
        for key in layer.adapter_params():
            parameter = layer.get_parameter(key)
            parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
