"""Write small models with random weights in real architectures, as Hugging Face folders, and configs for them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rocm_ext.base.files import read_lines

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEXT = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "How many clips did Natalia sell altogether in April and May? She sold 48/2 = 24 clips in May.",
    "system user assistant The answer is 72. Weng earns $12 an hour for babysitting, 0.2 per minute.",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def write_tokenizer(folder: Path, text: list[str] = TEXT, size: int = 400) -> int:
    """Train a Qwen2-style byte-level BPE tokenizer on ``text``, write it, and return the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return tokenizer.get_vocab_size()


def write_model(
    folder: Path,
    family: str = "qwen2",
    text: list[str] = TEXT,
    shards: int = 1,
    vocab: int | None = None,
    **shape,
) -> Path:
    """Write a random model with its tokenizer in Hugging Face's format. ``family``: qwen2 or llama."""
    folder.mkdir(parents=True)
    size = write_tokenizer(folder, text, shape.pop("tokens", 400))
    vocab = vocab or -(-size // 64) * 64
    torch.manual_seed(0)
    if family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=vocab, rope_theta=1e6, **{**SHAPE, **shape})
        )
        for layer in model.model.layers:  # biases start at zero, which would hide errors
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(proj.bias, std=0.1)
    else:
        rope = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        }
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=vocab, rope_parameters=rope, **{**SHAPE, **shape})
        )
    model = model.to(shape.get("dtype", torch.float32))
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards + 1 if shards > 1 else "50GB")
    return folder


def write_rows(path: Path, count: int, start: int = 0) -> Path:
    """Write question and answer rows of varied length."""
    with path.open("w") as file:
        for i in range(start, start + count):
            words = " ".join(TEXT[i % 3].split()[: 4 + i * 7 % 13])
            row = {
                "question": f"{words} {i}?",
                "answer": f"It is {i * 37 % 101}. " + "So it is. " * (i % 4),
            }
            file.write(json.dumps(row) + "\n")
    return path


def base_config(rows: Path, out: Path) -> dict:
    """Return what run configs have in common for rows of :func:`write_rows`, without the model."""
    return {
        "hardware": "cpu",
        "output_dir": str(out),
        "tokenizer": {"max_seq_len": 128},
        "dataset": {
            "_component_": "rocm_ext.data.sft_dataset",
            "source": str(rows),
            "column_map": {"prompt": "question", "completion": "answer"},
        },
        "seed": 1,
        "batch_size": 4,
        "sequences_per_step": 8,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }


def run_config(model: Path, rows: Path, out: Path, **changes) -> dict:
    """Return a run config for a model of :func:`write_model`, as a user would write it."""
    family = json.loads((model / "config.json").read_text())
    shape = {
        "vocab_size": family["vocab_size"],
        "num_layers": family["num_hidden_layers"],
        "num_heads": family["num_attention_heads"],
        "num_kv_heads": family["num_key_value_heads"],
        "embed_dim": family["hidden_size"],
        "max_seq_len": family["max_position_embeddings"],
        "norm_eps": family["rms_norm_eps"],
    }
    lora = {
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 4,
        "lora_alpha": 8,
    }
    qwen = family["model_type"] == "qwen2"
    if qwen:
        shape |= {
            "intermediate_dim": family["intermediate_size"],
            "tie_word_embeddings": family["tie_word_embeddings"],
        }
    else:
        shape |= {"intermediate_dim": family["intermediate_size"]}
    cfg = base_config(rows, out)
    return {
        **cfg,
        "model": {
            "_component_": "torchtune.models.qwen2.lora_qwen2"
            if qwen
            else "torchtune.models.llama3_1.lora_llama3_1",
            **lora,
            **shape,
        },
        "tokenizer": {
            **cfg["tokenizer"],
            "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
            "path": str(model / "vocab.json"),
            "merges_file": str(model / "merges.txt"),
            "special_tokens_path": str(model / "tokenizer.json"),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(model),
            "checkpoint_files": sorted(p.name for p in model.glob("*.safetensors")),
            "model_type": "QWEN2" if qwen else "LLAMA3",
            "output_dir": "${output_dir}",
        },
        **changes,
    }


def tune(
    *args: str, cwd: Path | None = None, env: dict | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run ``tune ARGS`` in the folder ``cwd``."""
    command = [str(Path(sys.executable).with_name("tune")), *map(str, args)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout
    )


def exit_code(main: Callable[[], object], *arguments: object) -> int:
    """Call a recipe's ``main`` as ``tune`` does; return its exit code."""
    before, sys.argv = sys.argv, ["tune", *map(str, arguments)]
    try:
        main()
    except SystemExit as leaving:
        return leaving.code or 0
    finally:
        sys.argv = before
    raise AssertionError("main returned")


def write_yaml(path: Path, content: dict) -> Path:
    """Write ``content`` as a YAML file."""
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def read_records(path: Path) -> list[dict]:
    """Return the lines of a run's records, or of a cycle's kept answers; [] if the file is missing."""
    return list(read_lines(path, keys=("prompt_id", "sample")))


def metrics(out: Path, key: str = "loss") -> list[float]:
    """Return one value per line of a run's ``metrics.jsonl`` that has ``key``."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]
