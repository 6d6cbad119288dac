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
    pairs = [
        {"chosen": asked[i] + answers[i], "rejected": asked[i] + answers[i + 1]} for i in range(32)
    ]
    (top / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.kit.syncs", str(top)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environ, cwd=top
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["training", "greedy", "sampled", "top_k", "min_p"])
def test_a_step_waits_once(waits, what):
    assert len(waits[what]) == 1, waits[what]


# what a loss of pairs measures; whether 1,024 tokens hold enough for top_p; a read that the test adds to a step
@pytest.mark.parametrize("what", ["pairs", "top_p", "a read"])
def test_a_step_waits_once_more(waits, what):
    assert len(waits[what]) == 2, waits[what]
