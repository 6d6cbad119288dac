"""Distillation: seconds of a step on the pocket model, and on random models with a usual vocabulary.

Both sides learn KL(model || teacher) over the complete vocabulary from one answer to each prompt. The pocket model's
teacher is the pocket model with weights changed at random. The other models have random weights, and end an answer
with the same small probability at each token, so most answers have 20 to 200 tokens.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rocm_ext import config
from rocm_ext.data.batches import Steps
from rocm_ext.pocket import load_tokenizer
from rocm_ext.rl.prompts import PromptSet
from tools.benchmarks import rl
from tools.benchmarks.work import pocket, write_random_model

NOISE = 0.1  # of each weight's standard deviation
STEPS = ["updates_per_step=1", "groups_per_update=null", "lr_scheduler=null", "verifier=null",
         "eval_prompts=null"]  # fmt: skip
SPREAD = 5  # factor of random embeddings, which makes logits vary by 1 or 2
END = 0.01  # probability that an answer of a random model ends with the next token


@dataclass(frozen=True)
class Pair:
    """A model and its teacher, of :data:`tools.benchmarks.work.SHAPES`; None stands for the pocket model.

    Attributes:
        vocabulary: number of tokens.
        changes: changes to the config.
    """

    student: str | None
    teacher: str | None
    vocabulary: int
    changes: list[str]


POCKET = Pair(None, None, 320, ["prompts_per_step=256", "optimizer.lr=3e-4"])
RANDOM = Pair(
    "small", "medium", 32_000, ["prompts_per_step=16", "max_new_tokens=200", "optimizer.lr=3e-5"]
)


def measure(base: Path, rounds: int, installed: bool = False, pair: Pair = POCKET) -> list[dict]:
    """Gate and time the sides in the empty folder ``base``; return a row of the table.

    Args, Raises: see :func:`tools.benchmarks.rl.measure`.
    """
    cfg = prepare(base, pair)
    columns, _ = rl.measure(base, "distil", cfg, describe, rounds, installed)
    return [
        {**columns, "parameters": rl.parameters(base / "teacher"), "answers": cfg.prompts_per_step}
    ]


def prepare(base: Path, pair: Pair = POCKET) -> DictConfig:
    """Make the model, its teacher and the first adapter; return the sides' common config."""
    pocket(base)
    if pair.student is None:
        shutil.copytree(base / "pocket", base / "teacher")
        change_weights(base / "teacher")
    else:
        extend_tokenizer(base / "pocket" / "tokenizer.json", pair.vocabulary)
        shutil.copytree(base / "pocket", base / "teacher")
        randomize(base / "pocket", pair.student, pair.vocabulary)
        randomize(base / "teacher", pair.teacher, pair.vocabulary)
    given = [f"pocket={base}/pocket", f"teacher={base}/teacher", "teacher_adapter=null", f"output_dir={base}/out",
             f"checkpointer.adapter_checkpoint={base}/peft"]  # fmt: skip
    cfg = config.load("distil_rocm", "cpu_pocket_distil", [*given, *STEPS, *pair.changes])
    rl.write_adapter(base, cfg)
    return cfg


def change_weights(folder: Path) -> None:
    """Change the weights in ``folder`` at random."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: w + NOISE * w.std() * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})


def extend_tokenizer(path: Path, vocabulary: int) -> None:
    """Add tokens that no text has to a ``tokenizer.json``, up to ``vocabulary`` tokens."""
    described = json.loads(path.read_text())
    words = described["model"]["vocab"]
    for number in range(len(words) + len(described["added_tokens"]), vocabulary):
        words[f"unused {number}"] = number
    path.write_text(json.dumps(described))


def randomize(folder: Path, shape: str, vocabulary: int) -> None:
    """Replace the model in ``folder`` by one with random weights, whose answers end with probability :data:`END`.

    A coordinate of the hidden states that is the same for all tokens decides on the end. It is the first one of the
    embeddings, which are the output layer, too.
    """
    made = write_random_model(folder / "made", shape, vocabulary)
    model = AutoModelForCausalLM.from_pretrained(made)
    end = load_tokenizer(folder).special_tokens["<|im_end|>"]
    embeddings = model.model.embed_tokens.weight.data
    embeddings *= SPREAD
    embeddings[:, 0] = 5 * embeddings.std()
    embeddings[end] = 0.0
    hidden = some_hidden_states(model, vocabulary)
    others = model.lm_head(hidden).logsumexp(-1)
    wanted = others + torch.tensor(END / (1 - END)).log()
    embeddings[end, 0] = (wanted / hidden[:, 0]).mean()
    model.save_pretrained(folder)
    card = json.loads((folder / "config.json").read_text())
    card["eos_token_id"] = end
    (folder / "config.json").write_text(json.dumps(card))


@torch.no_grad()
def some_hidden_states(model: Any, vocabulary: int) -> Tensor:
    """Return the hidden states [n, d] of random tokens before the output layer."""
    tokens = torch.randint(vocabulary, (4, 64), generator=torch.Generator().manual_seed(0))
    return model.model(tokens).last_hidden_state.flatten(0, 1)


def describe(
    cfg: DictConfig, given: int
) -> tuple[list[dict], list[dict[str, list[list[int]]]], dict[str, Any]]:
    """See :data:`tools.benchmarks.rl.Describe`."""
    prompts, folder = PromptSet(cfg), Path(cfg.checkpointer.checkpoint_dir)
    order = Steps(len(prompts.training), cfg.prompts_per_step, data_seed=cfg.seed)
    asked = [[prompts.training[i] for i in order[step]] for step in range(cfg.steps)]
    tokenizer = load_tokenizer(folder)
    answers = [
        {
            prompt.id: [rl.encoded(tokenizer, prompt.row["messages"][-1]["content"])]
            for prompt in step
        }
        for step in asked[:given]
    ]
    more = {
        "teacher": str(folder.parent / "teacher"),
        "betas": list(cfg.optimizer.betas),
        "beta": cfg.beta,
        "batch_size": min(rl.BATCH, cfg.prompts_per_step),
    }
    return [prompt.row for step in asked for prompt in step], answers, more
