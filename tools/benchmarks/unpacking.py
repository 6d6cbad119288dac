"""A LoRA step over a GGUF file's blocks beside the same weights unpacked: ``python -m tools.benchmarks.unpacking``.

Times the forward and backward pass of a micro-batch on two layers of Qwen3-0.6B, with their share of its output layer.
A cell of the table is the time over blocks, divided by that over weights of the same values in the compute dtype. Both
sides take turns in one process. First their logits, losses and gradients must agree.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rocm_ext.bench.probes import random_rows, wait
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
from tests.kit.gguf import random_blocks
from tools.benchmarks.protocol import Failed, Ratio, take_turns

KINDS, TOKENS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4"), (256, 2048)
ROW = 256  # tokens at most
LIMITS = {"bf16": 1e-2, "fp32": 1e-5}  # of differences; a CPU has none, a GPU sums in another order
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
            writer.add_tensor(
                stored, drawn[weight.shape], raw_dtype=gguf.GGMLQuantizationType[fits]
            )
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


def step(model: CausalLM, batch: MicroBatch) -> tuple[float, list[Tensor]]:
    """Return the seconds of a forward and backward pass, and the loss with the adapter's gradients."""
    adapter = [p for p in model.parameters() if p.requires_grad]
    began = time.perf_counter()
    loss = model(batch)
    gradients = torch.autograd.grad(loss, adapter)
    wait(loss.device)
    return time.perf_counter() - began, [loss.detach(), *gradients]


def difference(packed: CausalLM, plain: CausalLM, batch: MicroBatch) -> float:
    """Return the largest relative difference of logits, loss or gradients, by norm."""
    results = []
    for model in (packed, plain):
        with torch.no_grad():
            logits = model.decoder(batch.tokens).float()
        loss, *gradients = step(model, batch)[1]
        results.append([logits, loss, torch.cat([gradient.flatten() for gradient in gradients])])
    return float(
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]).max()
    )


def compare(
    top: Path, kind: str, dtype: str, tokens: Sequence[int], rounds: int, device: torch.device
) -> list[Ratio]:
    """Return a row of the table: the ratios with each number of tokens.

    Raises:
        Failed: logits, losses or gradients differ.
    """
    packed, plain = sides(top, kind, dtype, device)
    ratios = []
    for batch in (micro_batch(count, device) for count in tokens):
        apart = difference(packed, plain, batch)
        if not apart <= LIMITS[dtype]:
            raise Failed(
                f"{kind} in {dtype}: logits, loss or gradients are off by {apart:.1e}; nothing was timed"
            )
        times = take_turns(
            {"plain": plain, "packed": packed},
            rounds,
            lambda side, batch=batch: step(side, batch)[0],
        )
        ratios.append(Ratio.of(times["packed"], times["plain"]))
    return ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.unpacking", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", choices=BLOCKS, default=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds\n"
    )
    print(
        "| type | dtype |",
        " | ".join(f"{count:,} tokens" for count in args.tokens),
        "|",
        flush=True,
    )
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # where a file's config.json and tokenizer go
        for kind in args.kinds:
            for dtype in LIMITS:
                ratios = compare(Path(folder), kind, dtype, args.tokens, args.rounds, device)
                cells = [ratio.cell(" ×") for ratio in ratios]
                print("|", " | ".join([kind, dtype, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
