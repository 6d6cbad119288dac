"""GRPO: the share of a step outside sampling, verifying and updates: ``python -m tools.benchmarks.overhead``.

A step's ``seconds`` in ``metrics.jsonl`` contain ``sample_seconds``, which include the wait for verdicts, and
``train_seconds``, the time of the optimiser updates. The rest chooses prompts, copies the adapter into the sampler,
compares rewards, packs rows and writes files. It is measured at 64 x 8 answers of the pocket model, whose sampling and
updates are so short that the rest is most visible, and at the 41 M model of the other benchmarks.

The bookkeeping of many synthetic steps must not grow with the number of earlier steps: choosing prompts, records,
selection, reasons to stop and metrics are timed without a model, and printed by tenths of the steps.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.files import append_line, read_lines
from rocm_ext.config import algorithms
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl import evaluation
from rocm_ext.rl.prompts import choose_by_curriculum
from rocm_ext.rl.records import Records, to_result, to_sample
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import select
from tests.kit.grpo_runs import write_run
from tools.benchmarks.work import LORA, POCKET_STEPS, pocket, run_python, write_random_model

RECIPE = "rocm_ext.recipes.grpo_rocm"
SHAPES = {"pocket": 0.08, "41M": 0.02}  # goal: the largest share
WARM_UP = 2  # steps


# ---- shares of real steps


def run_pocket(base: Path, steps: int, changes: Sequence[str]) -> Path:
    """Do ``steps`` steps of the pocket model without evaluation; return the output folder."""
    pocket(base)
    out = base / "pocket_run"
    run_python("-m", RECIPE, "--config", "cpu_pocket_grpo", f"pocket={base}/pocket", f"output_dir={out}",
               f"steps={steps}", "eval_prompts=null", "save_every_n_steps=1000", *POCKET_STEPS, *changes)  # fmt: skip
    return out


def run_41m(base: Path, steps: int, changes: Sequence[str]) -> Path:
    """Do ``steps`` steps of 16 x 8 answers of 64 tokens of the 41 M model; return the output folder."""
    write_random_model(base / "small", "small", 152064, initializer_range=0.06)
    with (base / "prompts.jsonl").open("w") as file:
        for number in range(64):  # about as long as GSM8K's with a chat template
            words = " ".join(f"Natalia sold {number + i} clips in May." for i in range(6))
            file.write(json.dumps({"question": words, "answer": "1"}) + "\n")
    out = base / "small_run"
    path = write_run(base, out, base="small", steps=steps, eval_prompts=None, save_every_n_steps=1000,
                     prompts_per_step=16, samples_per_prompt=8, max_new_tokens=64)  # fmt: skip
    cfg = OmegaConf.load(path)
    cfg.model.update(LORA)
    cfg.tokenizer.update(
        {"_component_": "tools.benchmarks.sides.rows.wide_tokenizer", "max_seq_len": 512}
    )
    OmegaConf.save(cfg, path)
    run_python("-m", RECIPE, "--config", path, *changes)
    return out


def shares(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return each step's share outside sampling, verifying and updates, from the lines of ``metrics.jsonl``."""
    steps = [line for line in lines if "eval" not in line]
    return [
        1 - (line["sample_seconds"] + line["train_seconds"]) / line["seconds"] for line in steps
    ]


# ---- bookkeeping of synthetic steps


class Synthetic:
    """Steps without a model: random answers and verdicts, and everything else as in the recipe.

    Args:
        out: empty folder.
        cfg: a config of ``grpo_rocm``.
        prompts: number of training prompts.
    """

    def __init__(self, out: Path, cfg: DictConfig, prompts: int) -> None:
        self._out, self._cfg, self._rng = out, algorithms.filled(cfg), random.Random(0)
        self._ids = [str(i) for i in range(prompts)]
        self.records = Records.open(out, Ranks(torch.device("cpu")), 0, -1)
        self._metrics, self._lines = out / "metrics.jsonl", list[dict[str, Any]]()

    def step(self, number: int) -> float:
        """Do step ``number``, and every tenth time an evaluation; return the seconds of the bookkeeping."""
        cfg, began = self._cfg, time.perf_counter()
        asked = choose_by_curriculum(self._ids, self.records.asked, number, cfg.steps, count=cfg.prompts_per_step,
                                  curriculum=cfg.curriculum, seed=0)  # fmt: skip
        phase = self._phase(number, "sample", asked, cfg.samples_per_prompt)
        selected = select([phase], asked, cfg)
        self.records.finish(number, selected.results)
        self._log(
            {"step": number, **selected.measurements(), "updates": 1, "loss": 0.1, "seconds": 1.0}
        )
        if number % cfg.eval_every_n_steps == 0:
            self._phase(number, "eval", self._ids[:100], 1)
            self._log(
                {
                    "step": number,
                    "eval": {"prompts": 100, "correct": 50, "pass_at_1": 0.5},
                    "seconds": 1.0,
                }
            )
        if cfg.keep_samples != "all" and number % cfg.keep_samples == 0:
            self.records.keep_samples_from(number - cfg.keep_samples + 1)
        evaluation.flat_reason(self._lines, max_flat_steps=cfg.max_flat_steps)
        limits = {"min_entropy": 0.01, "stop_after_no_gain": 10**6, "max_length_share": 1.0}
        evaluation.stop_reason(self._lines, OmegaConf.create(limits), entropy_steps=3)
        return time.perf_counter() - began

    def _phase(self, number: int, phase: str, asked: Sequence[str], count: int) -> Answers:
        samples, verdicts, _ = self.records.phase(number, phase)
        for prompt in asked:
            for sample in range(count):
                right = self._rng.random() < 0.5
                samples.append({"prompt_id": prompt, "sample": sample, "seed": 1, "finish_reason": "stop",
                                "text": "x" * 60, "tokens": list(range(20)), "logprobs": [-0.5] * 20,
                                "seconds": 0.1})  # fmt: skip
                verdicts.append({"prompt_id": prompt, "sample": sample, "verdict": "CORRECT" if right else "WRONG",
                                 "reward": float(right), "detail": "", "seconds": 0.1})  # fmt: skip
        samples.collect()
        verdicts.collect()
        return Answers({key: to_sample(record) for key, record in samples.records.items()},
                     {key: to_result(record) for key, record in verdicts.records.items()}, {})  # fmt: skip

    def _log(self, line: dict[str, Any]) -> None:
        append_line(self._metrics, line)
        self._lines.append(line)


def bookkeeping(steps: int, **changes: Any) -> tuple[list[float], float]:
    """Time ``steps`` synthetic steps; return their seconds, and those of a resumed run reading the records."""
    given = [*POCKET_STEPS, *(f"{key}={value}" for key, value in changes.items())]
    cfg = config.load("grpo_rocm", "cpu_pocket_grpo", given)
    cfg.steps = steps
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Synthetic(Path(folder), cfg, prompts=2000)
        seconds = [synthetic.step(number) for number in range(1, steps + 1)]
        synthetic.records.close()
        began = time.perf_counter()
        Records.open(Path(folder), Ranks(torch.device("cpu")), steps, steps).close()
        return seconds, time.perf_counter() - began


def growth(seconds: Sequence[float]) -> float:
    """Return the mean time of the last tenth of the steps, divided by the mean time of the first tenth."""
    size = max(1, len(seconds) // 10)
    return sum(seconds[-size:]) / sum(seconds[:size])


# ---- the command


def main() -> None:
    """Print the shares and the growth."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.overhead", description=__doc__.splitlines()[0]
    )
    option = parser.add_argument
    option(
        "--shapes",
        nargs="*",
        choices=SHAPES,
        default=list(SHAPES),
        help="models of the shares (default: both)",
    )
    option(
        "--steps",
        type=int,
        default=12,
        help="steps of a run, of which the first 2 are not counted (default: 12)",
    )
    option(
        "--set",
        nargs="*",
        default=[],
        metavar="key=value",
        help="changes to the configs of the runs",
    )
    option("--synthetic", type=int, default=1000, help="synthetic steps; 0: none (default: 1000)")
    args = parser.parse_args()
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            out = {"pocket": run_pocket, "41M": run_41m}[shape](Path(folder), args.steps, args.set)
            lines = [line for line in read_lines(out / "metrics.jsonl") if "eval" not in line][
                WARM_UP:
            ]
        rest, names = shares(lines), ("seconds", "sample_seconds", "wait_seconds", "train_seconds")
        parts = ", ".join(f"{name} {median(line[name] for line in lines):.3f}" for name in names)
        print(f"{shape}: {median(rest):.1%} of a step ({min(rest):.1%}-{max(rest):.1%}, {len(rest)} steps; goal "
              f"{SHAPES[shape]:.0%}); medians {parts}")  # fmt: skip
    settings: list[dict[str, Any]] = [
        {"keep_samples": "all"},
        {"keep_samples": 10},
        {"curriculum": "informative"},
    ]
    for changes in settings if args.synthetic else []:
        seconds, resumed = bookkeeping(args.synthetic, **changes)
        size = max(1, len(seconds) // 10)
        tenths = " ".join(
            f"{1e3 * median(seconds[i : i + size]):.1f}" for i in range(0, len(seconds), size)
        )
        print(f"{changes}: median ms by tenths {tenths}; last / first tenth {growth(seconds):.2f}; "
              f"a resumed run reads the records in {resumed:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
