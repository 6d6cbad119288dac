"""Shared by the sampling sides: timed answers to orders, and torchtune's model."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.benchmarks.sides.talk import hear, pipe, reset_peak, used

PAD = 0  # prompts do not contain it
Answers = list[list[int]]  # of prompt 0: sample 0, 1, ...; of prompt 1: ...
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def serve(
    generate: Callable[[list[list[int]], list[int], bool], Answers],
    extra: Callable[[], dict] = dict,
) -> None:
    """Answer orders endlessly; each has ``prompts``, ``trace`` (tokens of each answer) and ``greedy``."""
    while True:
        order = hear()
        reset_peak()
        began = time.perf_counter(), time.process_time()
        answers = generate(order["prompts"], order["trace"], order["greedy"])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began[0], time.process_time() - began[1]
        pipe().send({"answers": answers, "seconds": seconds, **used(), **extra()})


def padded(prompts: list[list[int]]) -> torch.Tensor:
    """Pad prompts on the left: [p, s]."""
    width = max(map(len, prompts))
    return torch.tensor(
        [[PAD] * (width - len(prompt)) + prompt for prompt in prompts], device=DEVICE
    )


def torchtune_decoder(folder: Path, dtype: torch.dtype) -> Any:
    """Load a Hugging Face folder into torchtune's model."""
    from safetensors.torch import load_file
    from torchtune.models.qwen2 import qwen2
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

    c = json.loads((folder / "config.json").read_text())
    heads, kv_heads, width, tied = (
        c[key]
        for key in (
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_size",
            "tie_word_embeddings",
        )
    )
    with torch.device("meta"):
        decoder = qwen2(
            vocab_size=c["vocab_size"], num_layers=c["num_hidden_layers"], num_heads=heads, num_kv_heads=kv_heads,
            embed_dim=width, intermediate_dim=c["intermediate_size"], max_seq_len=c["max_position_embeddings"],
            norm_eps=c["rms_norm_eps"], rope_base=1e6, tie_word_embeddings=tied,
        )  # fmt: skip
    weights = {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    weights = qwen2_hf_to_tune(
        weights, num_heads=heads, num_kv_heads=kv_heads, dim=width, tie_word_embeddings=tied
    )
    decoder.load_state_dict(
        {name: value.to(DEVICE, dtype) for name, value in weights.items()}, assign=True
    )
    for module in decoder.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
    return decoder.to(DEVICE).eval()
