"""Write folders like those of the recipes' runs, without running a recipe."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.tiny import write_yaml

MACHINE = "1 x Radeon 8060S Graphics (gfx1151), Linux, torch 2.11.0+rocm7.2"
CONFIG: dict[str, Any] = {
    "loss": {"_component_": "rocm_ext.losses.CrossEntropy"},
    "hardware": "strix_halo",
    "dtype": "bf16",
    "model": {"_component_": "torchtune.models.qwen2_5.lora_qwen2_5_7b_base", "lora_rank": 16},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/models/Qwen2.5-7B-Instruct",
    },
    "tokenizer": {
        "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
        "path": "/models/vocab.json",
    },
    "dataset": {
        "_component_": "rocm_ext.data.sft_dataset",
        "source": "train.jsonl",
        "train_on_input": False,
    },
    "validation_fraction": 0.0,
    "shuffle": True,
    "data_seed": 0,
    "batch_size": 2,
    "sequences_per_step": 16,
    "compile": False,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-4},
    "epochs": 1,
    "seed": 0,
    "resume_from_checkpoint": False,
}


def curve(steps: int, noise_seed: int = 0) -> np.ndarray:
    """Return [steps] losses of a run: a falling trend plus easier and harder rows."""
    t = np.arange(steps)
    rows = np.random.default_rng(noise_seed).normal(size=steps)
    return (0.9 + 1.1 * np.exp(-t / 60)) * np.exp(0.12 * rows)


def write_jsonl(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def append_jsonl(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def remove_lines(path: Path, step: int, phase: str) -> None:
    """Remove the records of a phase."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [line for line in lines if (line["step"], line["phase"]) != (step, phase)])


def step_lines(
    losses: Sequence[float], speed: float = 1000.0, memory: int = 40 << 30
) -> list[dict[str, Any]]:
    """Return lines of ``metrics.jsonl``. The step determines its tokens, as its rows do in a real run."""
    lines = []
    for step, loss in enumerate(losses, start=1):
        tokens = 4000 + zlib.crc32(b"%d" % step) % 2000
        rate = speed * (1 + 0.03 * float(np.sin(step))) * (0.2 if step == 1 else 1)
        lines.append(
            {
                "step": step,
                "epoch": 1,
                "loss": float(loss),
                "lr": 2e-4 * min(1, step / 10),
                "grad_norm": 0.5 + 0.1 * float(np.cos(step)),
                "tokens": tokens,
                "tokens_per_second": rate,
                "padding": 0.0,
                "seconds": tokens / rate,
                "peak_memory": memory,
            }
        )
    return lines


def _config(folder: Path, **settings: Any) -> dict[str, Any]:
    checkpointer = {**CONFIG["checkpointer"], "output_dir": str(folder)}
    return {**CONFIG, "checkpointer": checkpointer, "output_dir": str(folder), **settings}


def sft(
    folder: Path,
    losses: Sequence[float],
    *,
    speed: float = 1000.0,
    memory: int = 40 << 30,
    validation: Mapping[int, float] | None = None,
    finished: bool = True,
    lines: list[dict[str, Any]] | None = None,
    right: Mapping[int, Sequence[bool]] | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of a run of ``lora_finetune_rocm``; ``right`` is that of :func:`grpo`."""
    folder.mkdir(parents=True)
    config = _config(folder, **settings)
    write_yaml(folder / "config.yaml", config)
    lines = step_lines(losses, speed, memory) if lines is None else lines
    held_out = [
        {"step": s, "epoch": 1, "val_loss": v, "val_tokens": 5000}
        for s, v in (validation or {}).items()
    ]
    answers, verdicts = [], []
    held_out += [
        _evaluated(step, passed, answers, verdicts) for step, passed in (right or {}).items()
    ]
    write_jsonl(folder / "metrics.jsonl", [*lines, *held_out])
    if right:
        write_jsonl(folder / "samples.jsonl", answers)
        write_jsonl(folder / "verdicts.jsonl", verdicts)
    if finished:
        summary = {
            "steps": len(lines),
            "first_loss": lines[0]["loss"],
            "last_loss": lines[-1]["loss"],
            "tokens": sum(line["tokens"] for line in lines),
            "seconds": sum(line["seconds"] for line in lines),
            "tokens_per_second": speed,
            "best_validation": None,
            "adapter_is": "last",
            "peak_memory": memory,
            "machine": MACHINE,
            "dtype": "bfloat16",
            "ranks": 1,
            "data_sets": [
                {"name": name, "rows_given": rows}
                for name, rows in (("a.jsonl", 3000), ("b.jsonl", 12))
            ],
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=2))
        (folder / "adapter").mkdir()
    return folder


def raft(
    folder: Path,
    right: Sequence[Sequence[bool]],
    *,
    answers: int = 24,
    seconds: float = 100.0,
    finished: bool = True,
    drawn: int = 0,
    texts: Mapping[str, str] | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of a run of ``raft_rocm``.

    Args:
        right: for each cycle from 0 on, whether each held-out prompt's greedy answer is right.
        answers: number of answers that each cycle samples, with verdicts of all kinds.
        drawn: number of answers per held-out prompt for pass@k.
        texts: texts of the first answers, by verdict.
    """
    folder.mkdir(parents=True)
    config = _config(folder, cycles=len(right) - 1, **settings)
    config |= {
        "recipe": settings.get("recipe", "raft_rocm"),
        "dataset": None,
        "samples_per_prompt": 4,
        "max_new_tokens": 512,
    }
    write_yaml(folder / "config.yaml", config)
    lines: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for cycle, passed in enumerate(right):
        if cycle:
            write_jsonl(folder / f"cycle_{cycle}" / "metrics.jsonl", step_lines(curve(12, cycle)))
            sampled, judged = _sampled(cycle, answers, texts or {})
            samples, verdicts = samples + sampled, verdicts + judged
            lines.append(_cycle_line(cycle, answers, seconds))
        lines.append(_evaluated(cycle, passed, samples, verdicts, drawn) | {"tokens": 500})
    for name, written in (("metrics", lines), ("samples", samples), ("verdicts", verdicts)):
        write_jsonl(folder / f"{name}.jsonl", written)
    if finished:
        summary = {
            "steps": len(right) - 1,
            "stopped": None,
            "machine": MACHINE,
            "dtype": "bfloat16",
            "ranks": 1,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "adapter").mkdir()
    return folder


def _cycle_line(cycle: int, answers: int, seconds: float) -> dict[str, Any]:
    """Return the line of a cycle in ``metrics.jsonl``."""
    kept = answers // 2 - 1
    return {
        "step": cycle,
        "answers": answers,
        "sampled_tokens": 5000,
        "sample_seconds": 0.7 * seconds,
        "wait_seconds": 0.1,
        "reward": 0.4,
        "right": 0.5,
        "entropy": 0.3 / cycle,
        "verdicts": {"CORRECT": answers // 2, "WRONG": answers - answers // 2},
        "pass_rate": 0.5,
        "filter": {"below_threshold": answers // 2, "duplicate": 1, "kept": kept},
        "kept": kept,
        "loss": 1.5,
        "tokens": 60000,
        "tokens_per_second": 1000.0,
        "train_seconds": 0.2 * seconds,
        "updates": 12,
        "first_loss": 2.0,
        "last_loss": 1.5,
        "seconds": 0.9 * seconds,
    }


def _sampled(cycle: int, answers: int, texts: Mapping[str, str]) -> tuple[list[dict], list[dict]]:
    """Return the samples and the verdicts of a cycle."""
    kinds = ["CORRECT", "WRONG", "CORRECT", "UNPARSED", "WRONG", "TIMEOUT", "CORRECT", "ERROR"]
    samples, verdicts, scope = [], [], {"step": cycle, "phase": "sample"}
    for i in range(answers):
        verdict = kinds[i % len(kinds)]
        prompt, sample = f"prompt{i // 4}", i % 4
        text = texts.get(verdict, f"So the answer of cycle {cycle} is {i}.")
        samples.append({**scope, **_sample(prompt, sample, text, 10 + 7 * i % 90)})
        reward = {"CORRECT": 1.0, "ERROR": None}.get(verdict, 0.25 * (i % 3))
        detail = texts.get("detail", f"found {i}")
        judged = {"verdict": verdict, "reward": reward, "detail": detail}
        verdicts.append({**scope, "prompt_id": prompt, "sample": sample, **judged})
    return samples, verdicts


def _sample(prompt: str, sample: int, text: str, tokens: int) -> dict[str, Any]:
    return {
        "prompt_id": prompt,
        "sample": sample,
        "seed": 1,
        "finish_reason": "stop",
        "text": text,
        "tokens": list(range(tokens)),
        "logprobs": [-0.5] * tokens,
    }


def grpo(
    folder: Path,
    right: Mapping[int, Sequence[bool]],
    *,
    steps: int = 20,
    planned: int | None = None,
    prompts: int = 4,
    samples: int = 4,
    seconds: float = 10.0,
    finished: bool = True,
    **settings: Any,
) -> Path:
    """Write the folder of a run of ``grpo_rocm``.

    Args:
        right: for each evaluated step from 0 on, whether each held-out prompt's greedy answer is right.
        steps: steps done; the fourth had equal rewards in all groups.
        planned: steps in the config; None: ``steps``.
        prompts, samples: prompts of a step, and answers to each.
        seconds: duration of a step.
    """
    folder.mkdir(parents=True)
    config = _config(folder, recipe="grpo_rocm", steps=planned or steps, dataset=None, **settings)
    config |= {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_new_tokens": 512}
    write_yaml(folder / "config.yaml", config)
    lines, answers, verdicts = [], [], []
    for step in range(steps + 1):
        if step:
            for own in policy_answers(step, prompts, samples):
                answers.append({"step": step, "phase": "sample", **own[0], "seconds": 0.5})
                verdicts.append({"step": step, "phase": "sample", **own[1], "seconds": 0.1})
            lines.append(policy_line(step, prompts * samples, prompts, seconds))
        if (passed := right.get(step)) is not None:
            lines.append(_evaluated(step, passed, answers, verdicts))
    write_jsonl(folder / "metrics.jsonl", lines)
    write_jsonl(folder / "samples.jsonl", answers)
    write_jsonl(folder / "verdicts.jsonl", verdicts)
    if finished:
        summary = {
            "steps": steps,
            "adapter_is": "best by held-out score",
            "stopped": None,
            "machine": MACHINE,
        }
        summary |= {"dtype": "bfloat16", "ranks": 1, "peak_memory": 30 << 30}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "adapter").mkdir()
    return folder


def policy_line(step: int, answers: int, groups: int, seconds: float) -> dict[str, Any]:
    """Return the line of a GRPO step in ``metrics.jsonl``; step 4 made no update."""
    line: dict[str, Any] = {
        "step": step,
        "lr": 1e-4,
        "tokens": 900 + step,
        "tokens_per_second": 300.0,
        "padding": 0.1,
        "seconds": seconds,
        "sample_seconds": 0.5 * seconds,
        "wait_seconds": 0.1 * seconds,
        "train_seconds": 0.3 * seconds,
        "answers": answers,
        "sampled_tokens": 50 * answers,
        "reward": 0.3 + 0.01 * step,
        "reward_std": 0.4,
        "right": 0.25 + 0.01 * step,
        "errors": 1,
        "flat": 0.25,
        "groups": groups,
        "trained_groups": groups - 1,
        "mean_tokens": 50.0,
        "mean_tokens_right": 40.0,
        "mean_tokens_wrong": 55.0,
        "distinct": 0.9 - 0.01 * step,
        "all_right": 0.15,
        "all_wrong": 0.1,
        "pass_at_1": 0.25 + 0.01 * step,
        "pass_at_2": 0.4,
        "reward/form": 0.8,
        "reward/sum": 0.2 + 0.01 * step,
        "truncated": 0.05,
        "entropy": 0.6 - 0.01 * step,
        "length_share": 0.02,
        "updates": 1,
        "policy_lag": 0,
        "mismatch_mean": 0.01,
        "mismatch_max": 0.4,
        "mismatch_kl": 0.001,
    }
    if step == 4:
        return {**line, "updates": 0, "flat": 1.0, "trained_groups": 0, "tokens": 0}
    ratio = {
        "ratio_mean": 1.0,
        "ratio_max": 1.6,
        "clipped_low": 0.01,
        "clipped_high": 0.02,
        "kl": 0.003 * step,
    }
    ratio |= {
        "lr_sum": 3e-5 * step,
        "informative_answers": 96,
        "effective_tokens": 40.0,
        "improbable_share": 0.4,
    }
    return {**line, "loss": -0.01 * step, "grad_norm": 0.3, **ratio}


def policy_answers(
    step: int, prompts: int, samples: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return answers of a step with their verdicts: groups that are mixed, all right, all wrong and with an ERROR."""
    found = []
    for prompt in range(prompts):
        for sample in range(samples):
            verdict = (
                "CORRECT" if sample % 2 else "WRONG",
                "CORRECT",
                "WRONG",
                "ERROR" if not sample else "CORRECT",
            )[prompt % 4]
            answer = _sample(
                f"prompt{prompt}", sample, f"step {step}: {prompt} and {sample}", 20 + 5 * sample
            )
            if prompt % 4 == 2 and sample == 1:
                answer["finish_reason"] = "length"
            reward = {"CORRECT": 1.0, "ERROR": None}.get(verdict, 0.0)
            key = {"prompt_id": f"prompt{prompt}", "sample": sample}
            found.append(
                (answer, {**key, "verdict": verdict, "reward": reward, "detail": f"found {prompt}"})
            )
    return found


def _evaluated(
    step: int, passed: Sequence[bool], answers: list, verdicts: list, drawn: int = 0
) -> dict[str, Any]:
    """Add the records of an evaluation, and return its line of ``metrics.jsonl``."""
    for i, ok in enumerate(passed):
        head = {"step": step, "phase": "eval"}
        answers.append(
            {**head, **_sample(f"held{i}", -1, f"held-out answer {i}", 20), "seconds": 0.5}
        )
        verdict = {
            "verdict": "CORRECT" if ok else "WRONG",
            "reward": float(ok),
            "detail": "",
            "seconds": 0.1,
        }
        verdicts += [
            {**head, "prompt_id": f"held{i}", "sample": sample, **verdict}
            for sample in (-1, *range(drawn))
        ]
    share = sum(passed) / len(passed)
    at = {str(k): {"pass": share ** (1 / k), "interval": [0, 1]} for k in (1, 2, 4) if k <= drawn}
    scores = {
        "prompts": len(passed),
        "correct": sum(passed),
        "pass_at_1": share,
        "interval": [0, 1],
    }
    return {"step": step, "eval": {**scores, "pass_at_k": at, "truncated": 1}, "seconds": 3.0}


def hardware(folder: Path, gpus: int = 1, lines: int = 120, pause_at: int | None = None) -> Path:
    """Write ``hardware.jsonl`` with GPUs of different loads."""
    now, readings = 1.75e9, []
    for i in range(lines):
        now += 9 * 3600 if i == pause_at else 5
        cards: list[dict[str, Any]] = [
            {
                "id": f"0000:c{gpu}:00.0", "name": "AMD Instinct MI300X", "busy": 90 - 10 * gpu + i % 5,
                "vram_used": (40 + gpu) << 30, "gtt_used": 1 << 28, "power": 600 + i % 7, "temperature": 60 + i % 3,
                "clock": 2000,
            }
            for gpu in range(gpus)
        ]  # fmt: skip
        if i % 10 == 3 and cards:
            del cards[0]["power"]
        host = {
            "cpu": 12.5,
            "memory_used": 100 << 30,
            "memory_total": 200 << 30,
            "process_memory": 9 << 30,
        }
        readings.append({"time": now, "gpus": cards, "host": host})
    write_jsonl(folder / "hardware.jsonl", readings)
    return folder
