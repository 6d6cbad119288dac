"""The sides' work: a model with random weights, rows of token ids, lengths of answers."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rocm_ext import pocket as pocket_model
from tests.kit.families import folder_config, write_family
from tests.kit.tiny import run_config, write_model

# Qwen2.5's shapes, and Qwen3's by their names. The small ones have two heads per KV head.
SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1},
    "small": {"hidden_size": 256, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2},
    "medium": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
               "num_key_value_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen3-tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 128},
    "qwen3-small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 128},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip
# torchtune's config adapts these and the MLP. Its rank 32 at width 896 corresponds to rank 8 at the small width.
LORA = {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "lora_rank": 8, "lora_alpha": 16}
LORA_OF_FOLDER = {"lora_rank": 8, "lora_alpha": 16}  # on all linear layers of the decoder's layers
SEQUENCES_PER_STEP = 32
IGNORE = -100


@dataclass(frozen=True)
class Task:
    """A comparison: the work, a shape of :data:`SHAPES` with a vocabulary, the dtype, and the peers."""

    work: str
    shape: str
    vocab: int
    dtype: str
    peers: tuple[str, ...]

    def describe(self, peer: str) -> dict[str, Any]:
        """Return the table's columns that describe the comparison with ``peer``."""
        return {"work": self.work, "shape": self.shape, "vocab": self.vocab, "dtype": self.dtype, "peer": peer,
                "parameters": parameters(self.shape, self.vocab)}  # fmt: skip


def parameters(shape: str, vocab: int) -> int:
    """Count the model's weights, without norms and biases."""
    c = SHAPES[shape]
    tables = 1 if c.get("tie_word_embeddings", True) else 2
    return layer_weights(shape) * c["num_hidden_layers"] + tables * vocab * c["hidden_size"]


def is_qwen3(shape: str) -> bool:
    """Whether ``shape`` is one of Qwen3's."""
    return shape.startswith("qwen3-")


def layer_weights(shape: str) -> int:
    """Count the weights of a layer's seven matrices."""
    c = SHAPES[shape]
    width, heads = c["hidden_size"], c["num_attention_heads"]
    of_heads = (heads + c["num_key_value_heads"]) * c.get("head_dim", width // heads)
    return 2 * width * of_heads + 3 * width * c["intermediate_size"]


def write_random_model(folder: Path, shape: str, vocab: int, **config) -> Path:
    """Write a Hugging Face folder with random weights, of ``shape`` with ``vocab`` tokens."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = {
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **SHAPES[shape],
        **config,
    }
    if is_qwen3(shape):
        return write_family(
            folder, "qwen3", vocab_size=vocab, **{"initializer_range": 0.02, **config}
        )
    return write_model(folder, vocab=vocab, **config)


def pocket(base: Path) -> Path:
    """Return the pocket model in ``base``; make it if it is missing, once for all comparisons of a process."""
    folder = base / "pocket"
    if not folder.exists():
        shutil.copytree(Path(_pocket().name) / "pocket", folder)
    return folder


@cache
def _pocket() -> TemporaryDirectory[str]:
    top = TemporaryDirectory()
    pocket_model.make(Path(top.name) / "pocket")
    return top


def write_foreign_twin(folder: Path, model: Path) -> None:
    """Write the Qwen3 model of the folder ``model`` as an architecture without a native decoder.

    It is a Qwen3-MoE model whose layers are all dense: the same weights, the same function and transformers' code.
    """
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    dense = list(range(config["num_hidden_layers"]))
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "mlp_only_layers": dense,
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


def gsm8k_lengths(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the token counts of ``rows`` prompts and answers like those of GSM8K's training split.

    They are log-normal with GSM8K's medians (51 and 104) and deviations, cut at its extremes. GSM8K's numbers count
    words, digits and runs of signs, which are the tokens of Qwen2.5's tokenizer for such text. The default system
    prompt and the roles of Qwen2.5's chat template add 34 tokens.
    """
    prompts = np.exp(rng.normal(np.log(51), 0.36, rows)).clip(11, 206) + 34
    answers = np.exp(rng.normal(np.log(104), 0.43, rows)).clip(26, 436) + 2
    return prompts.astype(int), answers.astype(int)


def write_steps(path: Path, vocab: int, short: int, full: int) -> list[list[tuple[int, int]]]:
    """Write the rows of ``short`` steps of 12 to 24 tokens, for gates, and of ``full`` steps of GSM8K's lengths.

    Returns:
        By step: tokens and trained tokens of its rows.
    """
    rng = np.random.default_rng(1)
    steps = []
    with path.open("w") as file:
        for step in range(short + full):
            if step < short:
                prompts, answers = (rng.integers(6, 13, SEQUENCES_PER_STEP) for _ in range(2))
            else:
                prompts, answers = gsm8k_lengths(rng, SEQUENCES_PER_STEP)
            for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
                tokens = rng.integers(10, vocab, prompt + answer).tolist()
                file.write(
                    json.dumps({"tokens": tokens, "labels": [IGNORE] * prompt + tokens[prompt:]})
                    + "\n"
                )
            steps.append(
                [(p + a, a) for p, a in zip(prompts.tolist(), answers.tolist(), strict=True)]
            )
    return steps


def pair_lengths(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the token counts of ``pairs`` prompts, chosen and rejected answers.

    Prompts and chosen answers have GSM8K's lengths. Each prompt has 60 tokens more for a system prompt, so most have
    100 to 200. The rejected answer answers the same question, so its length is the chosen one's times a log-normal
    factor with deviation 0.3.
    """
    prompts, chosen = gsm8k_lengths(rng, pairs)
    rejected = (chosen * np.exp(rng.normal(0, 0.3, pairs))).clip(10, 600)
    return prompts + 60, chosen, rejected.astype(int)


def write_pair_steps(path: Path, vocab: int, short: int, full: int) -> list[list[tuple[int, int]]]:
    """Write the pairs of ``short`` equal steps of short answers, for gates, and of ``full`` steps of real lengths.

    The short steps repeat the same pairs, so that their losses move far from the first, which is log 2.

    Returns:
        By step: tokens and trained tokens of its sequences, in pairs of the chosen and the rejected one.
    """
    rng, steps = np.random.default_rng(1), []
    pairs = SEQUENCES_PER_STEP // 2
    with path.open("w") as file:
        for step in range(1 + full):
            lengths = (
                [rng.integers(6, 13, pairs) for _ in range(3)]
                if step == 0
                else pair_lengths(rng, pairs)
            )
            rows, counts = [], []
            for prompt, *answers in zip(*(each.tolist() for each in lengths), strict=True):
                asked = rng.integers(10, vocab, prompt).tolist()
                said = [rng.integers(10, vocab, answer).tolist() for answer in answers]
                rows.append({"prompt": asked, "chosen": said[0], "rejected": said[1]})
                counts += [(prompt + answer, answer) for answer in answers]
            repeats = short if step == 0 else 1
            file.writelines(json.dumps(row) + "\n" for _ in range(repeats) for row in rows)
            steps += [counts] * repeats
    return steps


def write_adapter(base: Path, shape: str) -> None:
    """Write the initial adapter of all sides: ``adapter.pt`` in torchtune's format, and ``peft/``."""
    import torch
    from omegaconf import OmegaConf

    from rocm_ext.model.adapters import peft_files
    from rocm_ext.model.build import build_model

    cfg = model_config(base / "model", shape)
    decoder = build_model(OmegaConf.create(cfg), torch.float32, 7, torch.device("cpu"))
    torch.save(peft_files.adapter_state(decoder), base / "adapter.pt")
    (base / "peft").mkdir()
    peft_files.write_adapter(
        base / "peft", decoder, "HF" if is_qwen3(shape) else "QWEN2", str(base / "model")
    )


def model_config(folder: Path, shape: str) -> dict[str, Any]:
    """Return the part ``model`` of a run's config."""
    if is_qwen3(shape):
        return folder_config(folder, folder, folder, LORA_OF_FOLDER)["model"]
    return {**run_config(folder, folder, folder)["model"], **LORA}


def flops(shape: str, vocab: int, tokens: int, logits: int) -> float:
    """FLOP of a LoRA step's matrix products, forward and input gradients.

    Args:
        shape: of :data:`SHAPES`.
        vocab: rows of the output layer.
        tokens: that pass through the layers.
        logits: number of tokens that pass through the output layer.
    """
    c = SHAPES[shape]
    return 4.0 * (
        tokens * layer_weights(shape) * c["num_hidden_layers"] + logits * c["hidden_size"] * vocab
    )


def padded(steps: Sequence[Sequence[tuple[int, int]]], batch: int) -> int:
    """Count the tokens of batches of ``batch`` rows, padded to their longest row."""
    return sum(
        batch * max(tokens for tokens, _ in rows[i : i + batch])
        for rows in steps
        for i in range(0, len(rows), batch)
    )
