"""How often a step makes the host wait for the device.

A GPU computes behind the host. Where the host reads a value or copies without ``non_blocking``, it waits for all work
that it has queued, and the GPU then waits for the host. One wait per step is the least: it brings the step's results.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.kit.tiny import write_model, write_rows

pytestmark = [
    pytest.mark.wide,  # importing the compiler takes most of the time
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot pretend to have an accelerator",
    ),
]


@pytest.fixture(scope="module")
def waits(tmp_path_factory) -> dict[str, list[str]]:
    top = tmp_path_factory.mktemp("syncs")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 32)
    asked = [[{"role": "user", "content": f"What is {i}?"}] for i in range(32)]
    answers = [[{"role": "assistant", "content": f"It is {i}." * (1 + i % 4)}] for i in range(33)]
    pairs = [{"chosen": asked[i] + answers[i], "rejected": asked[i] + answers[i + 1]} for i in range(32)]
    (top / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.kit.syncs", str(top)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=top)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_training_step_waits_once(waits):
    assert len(waits["training"]) == 1, waits["training"]


def test_what_a_loss_measures_waits_once_more(waits):
    assert len(waits["pairs"]) == 2, waits["pairs"]


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "top_k", "min_p"])
def test_a_decoding_step_waits_once(waits, sampling):
    assert len(waits[sampling]) == 1, waits[sampling]


def test_top_p_asks_once_more_whether_1024_tokens_hold_enough(waits):
    assert len(waits["top_p"]) == 2, waits["top_p"]


def test_a_read_in_the_step_is_found(waits):
    assert len(waits["a read"]) == 2, waits["a read"]
