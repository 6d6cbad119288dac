"""The pocket model from SFT to DPO, by the commands that a user types: DPO raises the held-out accuracy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.held_out import held_out
from rocm_ext.runs.intervals import paired_gain
from tests.kit.tiny import tune

SFT_STEPS = 20


def rocm_ext(*args: object) -> str:
    done = subprocess.run([sys.executable, "-m", "rocm_ext.cli", *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_dpo_raises_the_accuracy_of_raft(tmp_path):
    """SFT, a cycle of RAFT, pairs from its answers, DPO: held-out accuracy rises, with a paired interval above 0."""
    pocket = tmp_path / "pocket"
    rocm_ext("pocket", pocket)

    def train(recipe: str, config: str, out: str, *changes: str) -> None:
        done = tune("run", recipe, "--config", config, f"pocket={pocket}", f"output_dir={tmp_path / out}", *changes,
                    cwd=tmp_path, timeout=1800)  # fmt: skip
        assert done.returncode == 0, done.stderr

    def evaluate(out: str) -> dict[str, bool]:
        """Return whether the greedy answer to each held-out prompt is right."""
        kept = tmp_path / f"eval_{out}"
        scores = json.loads(rocm_ext("eval", "--config", "cpu_pocket_raft", "--json", "--adapter", adapter(out),
                                     "--output", kept, f"pocket={pocket}", "verify_workers=1"))  # fmt: skip
        (found,) = held_out(RunFolder(kept))
        right = found.greedy()
        assert (len(right), sum(right.values())) == (scores["prompts"], scores["correct"]) == (400, scores["correct"])
        return right

    def adapter(out: str) -> Path:
        return tmp_path / out / "adapter"

    train("lora_finetune_rocm", "cpu_pocket", "sft", f"max_steps_per_epoch={SFT_STEPS}", "epochs=1")
    train("raft_rocm", "cpu_pocket_raft", "raft", "cycles=1", "prompts_per_cycle=null", "epochs=3",
          "sequences_per_step=32", "verify_workers=1", f"checkpointer.adapter_checkpoint={adapter('sft')}")  # fmt: skip
    rocm_ext("pairs", tmp_path / "raft")
    train("dpo_rocm", "cpu_pocket_dpo", "dpo", f"dataset.source={tmp_path / 'raft' / 'pairs.jsonl'}", "epochs=4",
          f"checkpointer.adapter_checkpoint={adapter('raft')}")  # fmt: skip
    before, after = evaluate("raft"), evaluate("dpo")
    assert before.keys() == after.keys()
    lost, won = (sum(before[each] != right == after[each] for each in before) for right in (False, True))
    assert paired_gain(lost, won, len(before)).low > 0
