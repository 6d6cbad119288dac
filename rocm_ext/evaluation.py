"""How often a model is right: greedy answers to rows whose answer is known.

The rule: a reply is right if the last number in it equals the row's ``answer``. Steps may come first,
thousands may have commas, and ``85.0`` equals ``85``.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torchtune.models.qwen2 import Qwen2Tokenizer, qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.models.qwen2_5._tokenizer import Qwen2_5Tokenizer
from torchtune.modules import TransformerDecoder, local_kv_cache
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json

from rocm_ext.chat import render_prompt
from rocm_ext.errors import UserError, one_line
from rocm_ext.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS, merged_weight, updates_by_weight

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
# A minus sign behind a digit, a word or a bracket is a subtraction.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


# ---- scoring


@dataclass(frozen=True)
class Score:
    """``correct`` of ``total`` replies are right."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.total)
        return (
            f"accuracy {100 * self.accuracy:.1f} % ({self.correct}/{self.total}), "
            f"95 % interval {100 * low:.1f}–{100 * high:.1f}"
        )


def wilson(k: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of the proportion ``k / n`` (Wilson 1927), as fractions.

    Unlike the normal approximation it stays within 0 and 1 and has a width at ``k = 0`` and ``k = n``.
    """
    p, z2 = k / n, Z95**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


def final_number(text: str) -> Decimal | None:
    """The last number in ``text``, or None."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def accuracy(
    model: TransformerDecoder,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> Score:
    """Score the greedy reply to each row's ``prompt``, as one user turn, against its ``answer``.

    Args: as in :func:`greedy`.
    """
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": row["prompt"]}]) for row in rows]
    replies = greedy(model, tokenizer, prompts, max_new_tokens, batch_size)
    found = [final_number(tokenizer.decode(reply)) for reply in replies]
    right = sum(a == Decimal(row["answer"]) for a, row in zip(found, rows, strict=True))
    return Score(right, len(rows))


# ---- decoding


def greedy(
    model: TransformerDecoder,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[list[int]]:
    """The most probable token at each step, until a stop token (not included) or ``max_new_tokens``.

    Prompts of one length go through the model together, so that none is padded and a reply depends on its
    own prompt only (up to the rounding of the matrix products).

    Args:
        model: in evaluation mode, without a KV cache.
        tokenizer: gives ``stop_tokens``.
        prompts: token ids of each prompt, as :func:`rocm_ext.chat.render_prompt` makes them.
        max_new_tokens: of each reply.
        batch_size: prompts at once, at most.

    Returns:
        The token ids of each reply, in the order of ``prompts``.

    Raises:
        UserError: a prompt and its reply may get longer than the model's ``max_seq_len``.
    """
    longest = max(map(len, prompts), default=0) + max_new_tokens
    if longest > model.max_seq_len:
        raise UserError(
            f"the longest prompt and {max_new_tokens} new tokens are {longest} tokens; "
            f"the model takes {model.max_seq_len}. Lower --max-new-tokens"
        )
    replies: list[list[int]] = [[] for _ in prompts]
    for batch in _equal_lengths(prompts, batch_size):
        tokens = torch.tensor([prompts[i] for i in batch], device=next(model.parameters()).device)
        decoded = _decode(model, tokens, tokenizer.stop_tokens, max_new_tokens)
        for i, reply in zip(batch, decoded, strict=True):
            replies[i] = reply
    return replies


def _equal_lengths(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    def length(i: int) -> int:
        return len(prompts[i])

    for _, group in groupby(sorted(range(len(prompts)), key=length), key=length):
        same = list(group)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


@torch.no_grad()
def _decode(model: TransformerDecoder, tokens: Tensor, stops: Sequence[int], max_new_tokens: int) -> list[list[int]]:
    """Greedy replies to ``tokens [b, s]``."""
    b, s = tokens.shape
    device, dtype = tokens.device, next(model.parameters()).dtype
    longest = s + max_new_tokens
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    positions = torch.arange(longest, device=device)
    stop = torch.tensor(list(stops), device=device)
    stopped = torch.zeros(b, dtype=torch.bool, device=device)
    new: list[Tensor] = []  # [b] each
    with local_kv_cache(model, batch_size=b, device=device, dtype=dtype, decoder_max_seq_len=longest):
        now = positions[:s]
        while len(new) < max_new_tokens and not stopped.all():
            logits = _last_logits(model, tokens, causal[now].expand(b, -1, -1), now.expand(b, -1))
            new.append(logits.argmax(-1))
            stopped |= torch.isin(new[-1], stop)
            tokens, now = new[-1][:, None], positions[s + len(new) - 1 : s + len(new)]
    return [_until(reply, stops) for reply in torch.stack(new, 1).tolist()] if new else [[]] * b


def _last_logits(model: TransformerDecoder, tokens: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
    """Logits [b, vocab] of the token behind ``tokens [b, s]``; no other position's are built."""
    h = model.tok_embeddings(tokens)
    for layer in model.layers:
        h = layer(h, mask=mask, input_pos=input_pos)
    return model.output(model.norm(h[:, -1]))


def _until(reply: list[int], stops: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(reply) if token in stops), len(reply))
    return reply[:end]


# ---- what to evaluate


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first ``limit`` rows of a JSONL file, or all.

    Raises:
        UserError: the file is absent or empty, or a row lacks ``prompt`` or a number as ``answer``.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not lines:
        raise UserError(f"{path} has no rows")
    return [_row(line, f"{path}: row {i}") for i, line in enumerate(lines, start=1)]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        answer = final_number(str(row["answer"]))
        if not isinstance(row["prompt"], str) or answer is None:
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{where} is not {{"prompt": text, "answer": number}}') from error
    return {**row, "answer": str(answer)}


def load_tokenizer(folder: Path, max_seq_len: int | None = None) -> Qwen2Tokenizer:
    """torchtune's tokenizer for the Qwen2 or Qwen2.5 model in ``folder``."""
    names = ("vocab.json", "merges.txt", "tokenizer.json")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"no tokenizer in {folder}: {', '.join(missing)} missing")
    special = parse_hf_tokenizer_json(str(folder / names[2]))
    cls = Qwen2_5Tokenizer if "<tool_call>" in special else Qwen2Tokenizer
    return cls(str(folder / names[0]), str(folder / names[1]), special, max_seq_len)


def load_model(
    folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> TransformerDecoder:
    """The Qwen2 or Qwen2.5 model in ``folder``, in evaluation mode.

    Args:
        folder: in Hugging Face's format.
        adapter: PEFT folder of a LoRA or DoRA adapter to merge into the weights.
        dtype: of all weights.
        device: where to.

    Raises:
        UserError: a file is missing or torn, the architecture is another one, or the adapter does not fit.
    """
    config = _json(folder / "config.json")
    shape = _shape(config, folder)
    weights = _weights(folder)
    if adapter is not None:
        _merge(weights, adapter)
    with torch.device("meta"):
        model = qwen2(**shape)
    state = qwen2_hf_to_tune(weights, tie_word_embeddings=shape["tie_word_embeddings"])
    state = {name: tensor.to(device, dtype) for name, tensor in state.items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(f"the weights in {folder} do not fit its config.json: {one_line(error)}") from error
    with torch.device(device):
        for module in model.modules():
            if isinstance(
                module, Qwen2RotaryPositionalEmbeddings
            ):  # its tables are no weights, so they are still on meta
                module.rope_init()
    return model.eval().requires_grad_(False)


def _shape(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """torchtune's arguments of ``qwen2`` from a Hugging Face config."""
    if config.get("model_type") != "qwen2":
        found = config.get("model_type")
        raise UserError(f"{folder} is a {found} model; only qwen2 (Qwen2 and Qwen2.5) can be evaluated")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # newer | older transformers
    unsupported = {
        "use_sliding_window": config.get("use_sliding_window"),
        "head_dim": config.get("head_dim", width // heads) != width // heads,
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, used in unsupported.items() if used)
        raise UserError(f"{folder}: torchtune's qwen2 has no {names}")
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": width,
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": rope.get("rope_theta", config.get("rope_theta", 1e6)),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def _weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"no model*.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in _tensors(file).items()}


def _merge(weights: dict[str, Tensor], adapter: Path) -> None:
    """Merge a PEFT LoRA or DoRA adapter into ``weights``, which have Hugging Face's names."""
    config = _json(adapter / ADAPTER_CONFIG)
    extras = ("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora", "fan_in_fan_out")
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(map(config.get, extras)):
        raise UserError(f"{adapter} is no plain LoRA or DoRA adapter (without bias, {', '.join(extras)})")
    updates = updates_by_weight(_tensors(adapter / ADAPTER_WEIGHTS))
    if strange := sorted(updates.keys() - weights.keys()):
        raise UserError(f"adapter {adapter} has weights for {strange[0]}, which the model has not")
    for name, update in updates.items():
        weights[name] = merged_weight(weights[name], update, config["lora_alpha"] / config["r"])


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
