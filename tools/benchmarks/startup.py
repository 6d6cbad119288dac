"""Start-up: seconds of a complete ``tune run`` that trains one step of one short row, and of torchtune's.

    python -m tools.benchmarks.startup

Both sides run in this environment on the same model of random weights, so that the step itself takes hardly any time.
A warm-up of each fills the page cache first. What counts is the ratio in a round.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rocm_ext.base.process import end_with_parent
from rocm_ext.machine.profile import load_profile
from tests.kit.tiny import run_config, write_yaml
from tools.benchmarks.protocol import ROOT, Failed, Ratio, take_turns
from tools.benchmarks.training import torchtune_keys
from tools.benchmarks.work import write_random_model, write_steps

OURS, STOCK = "ours", "torchtune"
VOCAB = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.startup", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="turns of each side; even numbers balance their order"
    )
    parser.add_argument(
        "--preset",
        action="store_true",
        help="with the profile's environment in place from the start",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = measure(Path(folder), args.rounds, args.preset)
        except Failed as error:
            sys.exit(f"failed: {error}")
    sides = "; ".join(
        f"{k} {median(v):.1f} s ({min(v):.1f}-{max(v):.1f})" for k, v in seconds.items()
    )
    print("start-up, one step of one row: ours takes", Ratio.of(seconds[OURS], seconds[STOCK]).cell(),
          f"times stock torchtune's time, {args.rounds} rounds; {sides}")  # fmt: skip


def measure(base: Path, rounds: int, preset: bool = False) -> dict[str, list[float]]:
    """Return the seconds of each side's process, by round.

    Args:
        base: an empty folder.
        rounds: turns of each side.
        preset: give ours the CPU profile's environment, so that it has nothing to add.

    Raises:
        Failed: a process ended with an error.
    """
    sets = {name: variable.value for name, variable in load_profile("cpu").environment.items()}
    environ = {name: value for name, value in os.environ.items() if name not in sets}
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environs = {OURS: environ | (sets if preset else {}), STOCK: environ}
    commands = write(base)
    seconds = take_turns(
        {name: name for name in environs}, rounds + 1,
        lambda name: run(commands[name], environs[name], base / f"{name}.log"),
    )  # fmt: skip
    return {name: each[1:] for name, each in seconds.items()}  # the first warms up


def write(base: Path) -> dict[str, list[str]]:
    """Write the model, a row and a config for each side; return their commands."""
    write_random_model(base / "model", "tiny", VOCAB)
    write_steps(base / "rows.jsonl", VOCAB, 1, 0)
    rows = (base / "rows.jsonl").read_text().splitlines(keepends=True)
    (base / "rows.jsonl").write_text(rows[0])
    cfg = run_config(base / "model", base / "rows.jsonl", base / "out")
    cfg["dataset"] = {
        "_component_": "tools.benchmarks.sides.rows.TokenRows",
        "path": str(base / "rows.jsonl"),
    }
    cfg |= {"batch_size": 1, "epochs": 1, "dtype": "fp32", "log_every_n_steps": 1}
    ours = {
        **cfg,
        "output_dir": str(base / OURS),
        "overwrite_output_dir": True,
        "sequences_per_step": 1,
    }
    logger = "torchtune.training.metric_logging.DiskLogger"
    theirs = {
        **{name: value for name, value in cfg.items() if name not in ("hardware", "sequences_per_step")},
        **torchtune_keys(gpu=False, accumulated=1), "output_dir": str(base / STOCK), "max_steps_per_epoch": None,
        "metric_logger": {"_component_": logger, "log_dir": str(base / STOCK / "logs")},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    }  # fmt: skip
    recipes = {OURS: ("lora_finetune_rocm", ours), STOCK: ("lora_finetune_single_device", theirs)}
    tune = str(Path(sys.executable).with_name("tune"))
    return {
        name: [tune, "run", recipe, "--config", str(write_yaml(base / f"{name}.yaml", content))]
        for name, (recipe, content) in recipes.items()
    }


def run(command: Sequence[str], environ: Mapping[str, str], log: Path) -> float:
    """Return the seconds from a process's start to its end."""
    with log.open("w") as out:
        began = time.perf_counter()
        options = {
            "stdout": out,
            "stderr": subprocess.STDOUT,
            "timeout": 600,
            "preexec_fn": end_with_parent,
        }
        done = subprocess.run(command, cwd=ROOT, env=environ, **options)  # type: ignore[call-overload]
        took = time.perf_counter() - began
    if done.returncode:
        raise Failed(
            f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-3000:]}"
        )
    return took


if __name__ == "__main__":
    main()
