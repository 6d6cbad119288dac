"""A model of random weights as a GGUF file, and the same weights unpacked: two layers of Qwen3-0.6B."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from omegaconf import OmegaConf

from rocm_ext.bench.probes import random_rows
from rocm_ext.data.batches import MicroBatch, collate
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import CrossEntropy
from rocm_ext.machine.numerics import DTYPES
from rocm_ext.model.build import build_model, load_weights, read_weights
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.download import published_models
from rocm_ext.model.gguf_folder import folder_of
from rocm_ext.model.weights.llama_cpp import GgufNames, add_keys, read_layout
from rocm_ext.model.weights.unpack import BLOCKS
from rocm_ext.train.learner import CausalLM
from tests.kit.gguf import NUMBERS, random_blocks

ROW = 256  # tokens at most
LIMITS = {"bf16": 1e-2, "fp32": 1e-5}  # of differences: a GPU sums in another order
SHAPE = json.loads((published_models()["Qwen/Qwen3-0.6B"] / "config.json").read_text())
SHAPE |= {"num_hidden_layers": 2, "vocab_size": 10848}


def build(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a folder's model without its weights, with LoRA of rank 16 on all linear layers."""
    model = {
        "_component_": "rocm_ext.model.from_checkpoint",
        "checkpoint_dir": str(folder),
        "lora_rank": 16,
    }
    return build_model(OmegaConf.create({**model, "lora_alpha": 32}), dtype, 0, device)


def write_random_gguf(target: Path, folder: Path, kind: str) -> None:
    """Write a model with random weights as a GGUF file: blocks in its layers, F16 in its embeddings and output layer.

    Rows that blocks do not divide get Q5_0, as llama-quantize does for Q4_K. Weights of one shape share their
    values, so that 7B parameters take seconds.

    Args:
        target: the file.
        folder: folder of the model's ``config.json``.
        kind: type of the blocks.
    """
    layout, rng, drawn = read_layout(folder), np.random.default_rng(0), {}
    names = GgufNames(layout)
    writer = gguf.GGUFWriter(target, names.arch)
    add_keys(writer, layout.keys)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(
        ["a", "b", "ab", *(f"<{number}>" for number in range(3, layout.vocabulary))]
    )
    writer.add_token_types([gguf.TokenType.NORMAL] * layout.vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    decoder = build(folder, torch.float32, torch.device("meta"))
    for name, weight in decoder.named_parameters():
        if weight.requires_grad:
            continue
        stored, (rows, *columns) = names.name(decoder.names.published(name)), weight.shape
        if not columns:
            numbers = 0.1 * rng.standard_normal(rows, np.float32)
            writer.add_tensor(stored, numbers if name.endswith("bias") else 1 + numbers)
        elif stored.startswith("blk."):
            fits = kind if columns[0] % BLOCKS[kind][0] == 0 else "Q5_0"
            if weight.shape not in drawn:
                drawn[weight.shape] = random_blocks(fits, rows, columns[0] // BLOCKS[fits][0], rng)
            writer.add_tensor(stored, drawn[weight.shape], raw_dtype=NUMBERS[fits])
        else:
            some = (0.02 * rng.standard_normal(2**20)).astype(np.float16)
            writer.add_tensor(stored, np.resize(some, weight.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sides(top: Path, kind: str, dtype: str, device: torch.device) -> list[CausalLM]:
    """Write :data:`SHAPE` as a file with blocks into ``top``, and load it packed and unpacked; the CPU unpacks."""
    (top / "config.json").write_text(json.dumps(SHAPE))
    if not (file := top / f"{kind}.gguf").exists():
        write_random_gguf(file, top, kind)
    weights = folder_of(str(file))
    checkpointer = {
        "_component_": "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": str(weights),
        "model_type": "HF",
    }
    decoders = [build(folder, DTYPES[dtype], device) for folder in (weights, top)]
    for decoder in decoders:
        load_weights(decoder, read_weights(OmegaConf.create(checkpointer)), Ranks(device))
    return [CausalLM(decoder, CrossEntropy()).train() for decoder in decoders]


def micro_batch(tokens: int, device: torch.device) -> MicroBatch:
    """Return random rows of one length, end to end."""
    count = -(-tokens // ROW)
    rows = random_rows(count, tokens // count, tokens // count, SHAPE["vocab_size"])
    return collate(rows, range(count), packed=True, pad_id=0, multiple=1).to(device)


def difference(packed: CausalLM, plain: CausalLM, batch: MicroBatch) -> float:
    """Return the largest relative difference of logits, loss or gradients, by norm."""
    results = []
    for model in (packed, plain):
        with torch.no_grad():
            logits = model.decoder(batch.tokens).float()
        loss = model(batch)
        adapter = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, adapter)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        results.append([logits, loss.detach(), flat])
    return float(
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]).max()
    )
