"""The wire: `python -m tools.benchmarks.serve`: a step of a client of `rocm-ext serve`, by the recipe's step.

Both train on the same rows, 32 a step, with the same micro-batches. Rounds alternate their order; only ratios within a
round count.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker
from tinker import types

from tests.kit.families import folder_config
from tests.kit.tiny import write_yaml
from tools.benchmarks.protocol import ROOT, Ratio, take_turns
from tools.benchmarks.work import (
    IGNORE,
    SEQUENCES_PER_STEP,
    pocket,
    write_random_model,
    write_steps,
)

WARM = 3  # steps that are not counted
RANK = 16


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.serve", description=__doc__)
    option = parser.add_argument
    option("--model", choices=("pocket", "48m"), default="pocket")
    masked = "train on answers alone; a client also gets the log-probs of prompts, which a recipe does not compute"
    option("--masked", action="store_true", help=masked)
    option("--rounds", type=int, default=4)
    option("--steps", type=int, default=20, help="steps of a round (default: 20)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        config, rows = prepare(base, args.model, args.steps + WARM, args.masked)
        with served(config, base) as (url, key):
            sides = {
                "recipe": lambda: recipe_step(config),
                "wire": lambda: wire_step(url, key, str(config), rows),
            }
            seconds = take_turns(sides, args.rounds, lambda side: side())
    for name, each in seconds.items():
        print(f"{name}: {', '.join(f'{value:.2f}' for value in each)} s", file=sys.stderr)
    ratio = Ratio.of(seconds["wire"], seconds["recipe"])
    print(
        f"{args.model}: a step over the wire takes {ratio.median:.3f} of the recipe's "
        f"({ratio.low:.3f} to {ratio.high:.3f}, {args.rounds} pairs)"
    )


def prepare(base: Path, model: str, steps: int, masked: bool) -> tuple[Path, list[dict]]:
    """Write the model, its config and the rows; return the config's file and the rows."""
    if model == "pocket":
        folder = pocket(base)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    else:
        vocabulary = 32768
        folder = write_random_model(base / "model", "qwen3-small", vocabulary)
    path = base / "rows.jsonl"
    write_steps(path, vocabulary, 0, steps)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not masked:
        for row in rows:
            row["labels"] = [IGNORE, *row["tokens"][1:]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = folder_config(folder, path, base / "out", {"lora_rank": RANK, "lora_alpha": 32})
    cfg |= {
        "dataset": {"_component_": "tools.benchmarks.sides.rows.TokenRows", "path": str(path)},
        "tokenizer": {"max_seq_len": 700},  # more than any row has
        "recipe": "lora_finetune_rocm",
        "epochs": 1,
        "max_steps_per_epoch": steps,
        "sequences_per_step": SEQUENCES_PER_STEP,
        "batch_size": 4,
        "shuffle": False,
        "cpu_threads": 2,
        "overwrite_output_dir": True,
        "save_adapter_weights_only": True,
    }
    return write_yaml(base / "run.yaml", cfg), rows


@contextmanager
def served(config: Path, base: Path) -> Iterator[tuple[str, str]]:
    """Serve the config's model; yield address and key."""
    command = [sys.executable, "-m", "rocm_ext.cli", "serve", "--out", str(base / "served")]
    with subprocess.Popen(
        [*command, "--port", "0", "--trust-config", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.readline() + process.stdout.readline()
        values = dict(re.findall(r"export (\w+)=(\S+)", printed))
        yield values["TINKER_BASE_URL"], values["TINKER_API_KEY"]
        process.kill()


def recipe_step(config: Path) -> float:
    """Return the median seconds of a step of the recipe."""
    subprocess.run(
        [Path(sys.executable).with_name("tune"), "run", "lora_finetune_rocm", "--config", config],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = (config.parent / "out" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines[WARM:])


def wire_step(url: str, key: str, name: str, rows: list[dict]) -> float:
    """Return the median seconds of a client's step; the datums are made beforehand, as by a data loader."""
    data = [datum(row) for row in rows]
    seconds = []
    with tinker.ServiceClient(base_url=url, api_key=key) as client:
        trainer = client.create_lora_training_client(name, rank=RANK, seed=0).result()
        for first in range(0, len(data), SEQUENCES_PER_STEP):
            began = time.perf_counter()
            batch = data[first : first + SEQUENCES_PER_STEP]
            gradients = trainer.forward_backward(batch, "cross_entropy")
            step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
            gradients.result()
            step.result()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:])


def datum(row: dict) -> types.Datum:
    """Return a row as the protocol has it."""
    targets = row["tokens"][1:]
    weights = [0.0 if label == IGNORE else 1.0 for label in row["labels"][1:]]
    return types.Datum(
        model_input=types.ModelInput.from_ints(row["tokens"][:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


if __name__ == "__main__":
    main()
