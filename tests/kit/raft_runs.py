"""Small runs of RAFT for tests: a model with random weights, its prompts, and what must be equal in equal runs."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocm_ext import config
from rocm_ext.base.files import read_lines
from rocm_ext.rl.records import PhaseRecords
from tests.kit.tiny import read_records, run_config, write_model, write_rows, write_yaml

SFT_ONLY = ("dataset", "dataset_val", "validation_fraction")
WEIGHTS = "adapter/adapter_model.safetensors"
TIMING = (
    "seconds",
    "tokens_per_second",
    "peak_memory",
)  # ends of the names of what differs between equal runs


def write_world(top: Path) -> Path:
    """Write base models of peaked distributions, 12 prompts, and 6 and 12 held-out prompts."""
    write_model(top / "base", initializer_range=0.1)
    write_model(top / "llama", "llama", initializer_range=0.1)
    write_rows(top / "prompts.jsonl", 12)
    write_rows(top / "heldout.jsonl", 6, start=100)
    write_rows(top / "others.jsonl", 12, start=200)
    return top


def prompts_in(path: Path, **more: Any) -> dict:
    """Return the component of the prompts in a file of :func:`write_world`."""
    component = "rocm_ext.data.prompt_dataset"
    return {
        "_component_": component,
        "source": str(path),
        "column_map": {"prompt": "question"},
        **more,
    }


def sampling_config(folder: Path, out: Path, base: str) -> dict:
    """Return what configs of runs that sample in a folder of :func:`write_world` have in common."""
    cfg = run_config(folder / base, folder / "prompts.jsonl", out)
    return {key: value for key, value in cfg.items() if key not in SFT_ONLY} | {
        "prompts": prompts_in(folder / "prompts.jsonl"),
        "eval_prompts": prompts_in(folder / "heldout.jsonl"),
        "verifier": {"_component_": "tests.kit.judges.Coin"},
        "verify_workers": 1,
        "samples_per_prompt": 4,
        "max_new_tokens": 12,
        "save_every_n_steps": 2,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-3},
    }


def write_run(folder: Path, out: Path, base: str = "base", **changes) -> Path:
    """Write the YAML of a run: 2 cycles of 12 prompts with 4 answers each.

    Args:
        folder: from :func:`write_world`.
        out: output folder of the run; the YAML lies beside it.
        base: folder of the model.
        changes: other values.
    """
    cfg = {
        **sampling_config(folder, out, base),
        "cycles": 2,
        "drop_truncated": False,
        "skip_solved": False,
        "retry_unsolved_after": 1,
        "epochs": 2,
        "optimizer_state": "cycle" if changes.get("start_from") == "base" else "run",
        **changes,
    }
    out.parent.mkdir(exist_ok=True, parents=True)
    return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)


def loaded(recipe: Callable[..., Any], path: Path, *overrides: str) -> Any:
    """Return ``recipe`` for the config ``path``, before its set-up."""
    return recipe(config.load(config.recipe_of(str(path)), str(path), list(overrides)))


def trained(recipe: Callable[..., Any], path: Path, *overrides: str) -> Any:
    """Run ``recipe`` on the config ``path`` in this process, and return it after its end."""
    made = loaded(recipe, path, *overrides)
    made.setup()
    made.train()
    made.cleanup()
    return made


def kill_at_record(name: str, count: int) -> Callable[[], None]:
    """Patch the records so that writing record ``count`` kills the process halfway through the record."""

    def prepare() -> None:
        original, begun = PhaseRecords.append, []

        def append(self, record):
            if self.file.part.name == name:
                begun.append(record)
            if len(begun) == count:
                text = json.dumps(record, ensure_ascii=False).encode()
                with self.file.part.open("ab") as file:
                    file.write(text[: len(text) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, record)

        PhaseRecords.append = append  # type: ignore[method-assign]

    return prepare


def cycle_line(out: Path, cycle: int) -> dict:
    """Return the line of a cycle in ``metrics.jsonl``."""
    (line,) = [
        line
        for line in read_lines(out / "metrics.jsonl")
        if line["step"] == cycle and "eval" not in line
    ]
    return line


def held_out(out: Path) -> dict[int, dict]:
    """Return the scores by cycle."""
    return {
        line["step"]: line["eval"] for line in read_lines(out / "metrics.jsonl") if "eval" in line
    }


def records(out: Path, cycle: int, name: str, phase: str = "sample") -> list[dict]:
    """Return the samples or the verdicts of a cycle."""
    return [
        line
        for line in read_records(out / f"{name}.jsonl")
        if (line["step"], line["phase"]) == (cycle, phase)
    ]


def outcome(out: Path) -> dict:
    """Return everything that must be equal in all runs: records, adapters, training curves and scores."""
    found: dict = {"adapter": (out / WEIGHTS).read_bytes()}
    names = ("samples.jsonl", "verdicts.jsonl", "metrics.jsonl")
    for path in sorted([*(out / name for name in names), *out.glob("cycle_*/*.jsonl")]):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [{k: v for k, v in line.items() if not k.endswith(TIMING)} for line in lines]
        found[str(path.relative_to(out))] = sorted(map(json.dumps, lines))
    for path in out.glob(f"cycle_*/{WEIGHTS}"):
        found[str(path.relative_to(out))] = path.read_bytes()
    return found


def assert_equal(out: Path, reference: Path) -> None:
    found, expected = outcome(out), outcome(reference)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
