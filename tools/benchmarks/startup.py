"""Start-up: seconds of a whole ``tune run`` that trains one step of one short row, beside stock torchtune's.

    python -m tools.benchmarks.startup

Both sides run in this environment on the same model of random weights, so that the step itself takes no time worth
naming. Sides take turns, A B B A; a warm-up of each fills the page cache first. What counts is the ratio in a round.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rocm_ext.base.process import end_with_parent
from tests.kit.tiny import run_config, write_yaml
from tools.benchmarks.protocol import ROOT, Failed, Ratio
from tools.benchmarks.work import write_random_model, write_steps

OURS, STOCK = "ours", "torchtune"
VOCAB = 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.startup", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side; even numbers balance their order")
    parser.add_argument("--preset", action="store_true", help="with the profile's environment in place from the start")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = measure(Path(folder), args.rounds, args.preset)
        except Failed as error:
            sys.exit(f"failed: {error}")
    print(report(seconds))


def measure(base: Path, rounds: int, preset: bool = False) -> dict[str, list[float]]:
    """Seconds of each side's process, by round.

    Args:
        base: an empty folder.
        rounds: of both sides.
        preset: give ours the CPU profile's environment, so that it has nothing to add.

    Raises:
        Failed: a process did not end well.
    """
    commands = write(base)
    environ = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in profile_environment():
        environ.pop(name, None)
    environs = {OURS: environ | (profile_environment() if preset else {}), STOCK: environ}
    seconds: dict[str, list[float]] = {OURS: [], STOCK: []}
    for turn in range(-1, rounds):
        for name in (OURS, STOCK) if turn % 2 == 0 else (STOCK, OURS):
            took = run(commands[name], environs[name], base / f"{name}.log")
            if turn >= 0:
                seconds[name].append(took)
    return seconds


def profile_environment() -> dict[str, str]:
    """What the CPU's hardware profile sets."""
    from rocm_ext.machine.profile import load_profile

    return {name: variable.value for name, variable in load_profile("cpu").environment.items()}


def write(base: Path) -> dict[str, list[str]]:
    """The model, a row and a config for each side; returns their commands."""
    write_random_model(base / "model", "tiny", VOCAB)
    write_steps(base / "rows.jsonl", VOCAB, 1, 0)
    rows = (base / "rows.jsonl").read_text().splitlines(keepends=True)
    (base / "rows.jsonl").write_text(rows[0])
    tune = str(Path(sys.executable).with_name("tune"))
    cfg = run_config(base / "model", base / "rows.jsonl", base / "out")
    cfg["dataset"] = {"_component_": "tools.benchmarks.sides.rows.TokenRows", "path": str(base / "rows.jsonl")}
    cfg |= {"batch_size": 1, "epochs": 1, "dtype": "fp32", "log_every_n_steps": 1}
    ours = {**cfg, "output_dir": str(base / OURS), "overwrite_output_dir": True, "sequences_per_step": 1}
    theirs = {name: value for name, value in cfg.items() if name not in ("hardware", "sequences_per_step")}
    theirs |= {
        "output_dir": str(base / STOCK),
        "device": "cpu",
        "shuffle": False,
        "gradient_accumulation_steps": 1,
        "max_steps_per_epoch": None,
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "enable_activation_checkpointing": False,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(base / STOCK / "logs"),
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
    }
    recipes = {OURS: ("lora_finetune_rocm", ours), STOCK: ("lora_finetune_single_device", theirs)}
    return {
        name: [tune, "run", recipe, "--config", str(write_yaml(base / f"{name}.yaml", content))]
        for name, (recipe, content) in recipes.items()
    }


def run(command: Sequence[str], environ: dict[str, str], log: Path) -> float:
    """Seconds from a process's start to its end."""
    with log.open("w") as out:
        began = time.perf_counter()
        options = {"stdout": out, "stderr": subprocess.STDOUT, "timeout": 600, "preexec_fn": end_with_parent}
        done = subprocess.run(command, cwd=ROOT, env=environ, **options)  # type: ignore[call-overload]
        took = time.perf_counter() - began
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return took


def report(seconds: dict[str, list[float]]) -> str:
    """The ratio, and both sides' seconds."""
    ratio = Ratio.of(seconds[OURS], seconds[STOCK])
    sides = "; ".join(
        f"{name} {sorted(each)[len(each) // 2]:.1f} s ({min(each):.1f}-{max(each):.1f})"
        for name, each in seconds.items()
    )
    return (
        f"start-up, one step of one row: ours takes {ratio.median:.2f} times stock torchtune's time "
        f"({ratio.low:.2f}-{ratio.high:.2f}, {len(seconds[OURS])} rounds); {sides}"
    )


if __name__ == "__main__":
    main()
