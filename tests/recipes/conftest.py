"""What several tests of recipes share: a small world, and a run of RAFT in it, to be read only; servers."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two base models, 12 prompts and 6 held-out prompts."""
    from tests.kit.raft_runs import write_world

    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def make(folder: Path) -> Callable[..., Path]:
    """Write the YAML of a run of RAFT: 2 cycles of 12 prompts with 4 answers each."""
    from tests.kit.raft_runs import write_run

    return partial(write_run, folder)


@pytest.fixture(scope="session")
def reference(make: Callable[..., Path], folder: Path) -> Path:
    """An undisturbed run of RAFT, whose metric logger writes the file ``log``."""
    from rocm_ext.recipes.raft_rocm import main

    from tests.kit.forks import succeed

    out = folder / "reference"
    logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(out),
        "filename": "log",
    }
    succeed(main, make(out, metric_logger=logger))
    return out


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Any]]:
    """Start a server on the base model; ``stale`` is that of :class:`Sampler`.

    It calls ``fake.before(path, body)`` before each answer; what this returns is sent instead. ``fake.exchanged`` has
    the requests that exchange adapters while it answers, which a server may not survive (vLLM issue 47724).
    """
    from torchtune.models.qwen2_5 import qwen2_5_tokenizer

    from tests.kit.servers import LOAD, UNLOAD, Fake, Sampler, Vllm

    base = folder / "base"
    tokenizer = qwen2_5_tokenizer(
        *(str(base / file) for file in ("vocab.json", "merges.txt", "tokenizer.json"))
    )
    fakes = []

    def serve(stale=None, lora=True):
        rules = Vllm(Sampler(base, tokenizer, stale), lora=lora)
        answering = []

        def reply(path, body):
            if path in (LOAD, UNLOAD):
                fake.exchanged += [path] * bool(answering)
                return rules(path, body)
            answering.append(body)
            try:
                return fake.before(path, body) or rules(path, body)
            finally:
                answering.pop()

        fake = Fake(reply)
        fake.rules, fake.before, fake.exchanged = rules, lambda path, body: None, []
        fakes.append(fake)
        return fake

    yield serve
    for fake in fakes:
        fake.die()
