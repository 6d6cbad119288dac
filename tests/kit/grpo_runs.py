"""Small runs of GRPO for tests, in the worlds of :mod:`tests.kit.raft_runs`."""

import json
from pathlib import Path

from tests.kit.raft_runs import WEIGHTS, sampling_config
from tests.kit.tiny import write_yaml

FIT = ("shuffle", "data_seed", "sequences_per_step", "gradient_accumulation_steps", "max_steps_per_epoch", "epochs")
TIMING = (
    "seconds", "tokens_per_second", "peak_memory", "sample_seconds", "wait_seconds", "hidden_seconds", "train_seconds",
)  # fmt: skip


def write_run(folder: Path, out: Path, base: str = "base", **changes) -> Path:
    """Write the YAML of a run: 4 steps of 4 prompts with 4 answers each.

    Args:
        folder: from :func:`tests.kit.raft_runs.write_world`.
        out: output folder of the run; the YAML lies beside it.
        base: folder of the model.
        changes: other values.
    """
    cfg = {
        **{key: value for key, value in sampling_config(folder, out, base).items() if key not in (*FIT, "loss")},
        "recipe": "grpo_rocm",
        "steps": 4,
        "prompts_per_step": 4,
        "truncated": "keep",
        "eval_every_n_steps": 2,
        "lr_scheduler": None,
        **changes,
    }
    out.parent.mkdir(exist_ok=True, parents=True)
    return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(out: Path) -> dict:
    """Return everything that must be equal in all runs: records, the adapter, training curves and scores."""
    found: dict = {"adapter": (out / WEIGHTS).read_bytes()}
    for name in ("samples", "verdicts", "metrics"):
        records = [{k: v for k, v in line.items() if k not in TIMING} for line in lines(out / f"{name}.jsonl")]
        found[name] = sorted(map(json.dumps, records))
    return found


def assert_equal(out: Path, reference: Path) -> None:
    found, expected = outcome(out), outcome(reference)
    for name in expected:
        assert found[name] == expected[name], name
