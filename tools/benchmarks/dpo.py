"""LoRA DPO: seconds of an epoch on the same pairs, from the same adapter, with the same AdamW.

The reference is the model before training. Ours scores all pairs once, before the first step; TRL can do the same.
torchtune, and TRL by default, compute the reference in each step. So a row of the table is the time of an epoch: the
step and, where the reference comes first, the scoring of the step's pairs, in the same turn. Another row has the step
alone, which is what further epochs take.

Gate: in fp32 the losses of 20 steps must agree with ours to 1e-5 relative, and the gradients' norms to 1e-4, before
timing starts. These steps repeat the same pairs, so that the losses fall from log 2 to a fifth of it, and the reference
matters. The fp32 gate also precedes bf16, whose own losses may differ by 5 %.

torchtune's config is llama3_1/8B_lora_dpo_single_device.yaml: batch size 4, loss, AdamW. "As shipped" also checkpoints
activations, which takes time and saves memory. Rank, rate, schedule and pairs are the same for all sides.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.tiny import write_yaml
from tools.benchmarks import peers, sft
from tools.benchmarks.protocol import Failed, Ratio, Side, both, in_turn
from tools.benchmarks.work import (
    SEQUENCES_PER_STEP,
    Task,
    flops,
    is_qwen3,
    padded,
    write_adapter,
    write_pair_steps,
    write_random_model,
)

OURS, WHOLE = sft.OURS, "ours without shared prompts"
GATE, WARM_UP = 20, 1  # steps
PAIRS_PER_STEP = SEQUENCES_PER_STEP // 2
BATCH = 4  # pairs of a micro-batch
RATE, BETA = 1e-3, 0.1
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (0.05, None)}  # relative, of a step's loss and of its gradient's norm


@dataclass(frozen=True)
class Peer(sft.Peer):
    """A way to train on pairs.

    Attributes:
        reference_first: whether the reference scores all pairs before training.
    """

    reference_first: bool = False

    def padding_free(self, args: argparse.Namespace) -> bool:
        """Whether it packs pairs end to end; TRL's DPO does not."""
        return self.environment == OURS

    def runs(self, shape: str) -> bool:
        """Whether it runs ``shape``: torchtune has no Qwen3."""
        return self.environment != "torchtune" or not is_qwen3(shape)


US = Peer("dpo_ours", OURS, BATCH, reference_first=True)
PEERS = {
    "torchtune": Peer("dpo_torchtune", "torchtune", BATCH),
    "torchtune batch 1": Peer("dpo_torchtune", "torchtune", 1),
    "torchtune as shipped": Peer("dpo_torchtune", "torchtune", BATCH, {"enable_activation_checkpointing": True}),
    "TRL + PEFT": Peer("dpo_trl", "trl", BATCH),
    "TRL + PEFT batch 1": Peer("dpo_trl", "trl", 1),
    "TRL + PEFT, reference first": Peer("dpo_trl", "trl", BATCH, reference_first=True),
    WHOLE: US,
}


def compare(base: Path, task: Task, args: argparse.Namespace, gated: set[str]) -> list[dict]:
    """Gate and time one model; return two rows of the table per peer, of an epoch and of a step alone.

    Args, Raises: see :func:`tools.benchmarks.sft.compare`.
    """
    write_random_model(base / "model", task.shape, task.vocab)
    steps = write_pair_steps(base / "rows.jsonl", task.vocab, GATE, WARM_UP + args.rounds)
    write_adapter(base, task.shape)
    return sft.gated_and_timed(gate, measure, base, task, steps, args, gated)


def gate(
    stack: ExitStack, base: Path, task: Task, steps: int, args: argparse.Namespace
) -> tuple[list[Side], dict[str, float], dict[str, float]]:
    """Start ours and the peers, run their first steps, and compare losses and gradients.

    Returns:
        The sides; the largest relative difference of each side's losses from ours; the seconds that each side needed
        beyond the time of warm steps: imports, set-up and, where the reference comes first, the scoring of all pairs.

    Raises:
        Failed: a difference exceeds the tolerance.
    """
    sides, found, until_warm = [], {}, {}
    for name in (OURS, *task.peers):
        arguments = command(base, name, task, steps, args)
        sides.append(stack.enter_context(Side(name, python(name, args), arguments, base / f"{name}.log")))
        done = sides[-1].ask(steps=GATE)["steps"]
        found[name] = [[step[i] for step in done] for i in (1, 2)]
        step = statistics.median(seconds for seconds, *_ in done)
        until_warm[name] = max(0.0, time.perf_counter() - sides[-1].began - GATE * step)
    return sides, check(found, TOLERANCES[task.dtype]), until_warm


def check(
    found: dict[str, Sequence[Sequence[float]]], tolerances: tuple[float | None, float | None]
) -> dict[str, float]:
    """Return the largest relative difference of each side's losses from ours.

    Args:
        found: the losses and the gradients' norms of the steps, by side.
        tolerances: of both, relative; None: any.

    Raises:
        Failed: a difference exceeds the tolerance.
    """
    for what, i in (("losses", 0), ("gradient norms", 1)):
        for name, values in found.items():
            apart, limit = sft.difference(values[i], found[OURS][i]), tolerances[i]
            if limit is not None and not apart <= limit:  # NaN, too
                raise Failed(f"{what} of {name} differ from ours by {apart:.1e}: {values[i]} against {found[OURS][i]}")
    return {name: sft.difference(values[0], found[OURS][0]) for name, values in found.items()}


def python(name: str, args: argparse.Namespace) -> Path:
    """Return a side's interpreter."""
    environment = of(name).environment
    return Path(sys.executable) if environment == OURS else peers.python(environment, args.gpu, args.installed)


def command(base: Path, name: str, task: Task, steps: int, args: argparse.Namespace) -> list[str | Path]:
    """Write the side's config and return the arguments of its interpreter."""
    peer = of(name)
    module = f"tools.benchmarks.sides.{peer.module}"
    if peer.environment == "trl":
        work = {"dtype": task.dtype, "batch_size": peer.batch, "pairs_per_step": PAIRS_PER_STEP, "steps": steps,
                "lr": RATE, "beta": BETA, "attention": args.attention, "precompute": peer.reference_first}  # fmt: skip
        (base / f"{name}.json").write_text(json.dumps(work))
        return ["-m", module, base / f"{name}.json"]
    cfg = sft.config(base, name, task, steps)
    cfg["dataset"]["_component_"] = "tools.benchmarks.sides.rows.TokenPairs"
    cfg["metric_logger"] = {"_component_": f"{module}.Logger"}
    cfg["optimizer"]["lr"] = RATE
    cfg |= {"batch_size": peer.batch, "clip_grad_norm": None}  # torchtune's recipe does not clip
    if peer.environment == OURS:
        cfg |= {
            "hardware": "auto" if args.gpu else "cpu", "overwrite_output_dir": True, "num_workers": 0,
            "sequences_per_step": PAIRS_PER_STEP,
            "loss": {"_component_": "rocm_ext.losses.Preference", "beta": BETA},
        }  # fmt: skip
        return [
            "-m",
            module,
            "whole" if name == WHOLE else "shared",
            "--config",
            write_yaml(base / f"{name}.yaml", cfg),
            *args.ours,
        ]
    cfg.pop("hardware")
    cfg.pop("sequences_per_step")
    cfg["checkpointer"].pop("adapter_checkpoint")
    cfg |= {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": BETA},
            **sft.of_torchtune(args, PAIRS_PER_STEP // peer.batch), **peer.changes}  # fmt: skip
    return ["-m", module, base / "adapter.pt", "--config", write_yaml(base / f"{name}.yaml", cfg)]


def measure(
    sides: Sequence[Side], task: Task, steps: list, apart: dict[str, float], until_warm: dict[str, float], args: Any
) -> list[dict]:
    """Time the sides in turns on the same steps; return two rows of the table per peer."""
    for side in sides:
        side.ask(steps=WARM_UP)
    step: dict[str, list[float]] = {side.name: [] for side in sides}
    reference: dict[str, list[float]] = {side.name: [] for side in sides}
    losses: dict[str, list[float]] = {side.name: [] for side in sides}
    last = {}
    for side in in_turn(sides, args.rounds):
        first = PAIRS_PER_STEP * (GATE + WARM_UP + len(step[side.name]))
        scoring = side.ask(score=[first, first + PAIRS_PER_STEP])["seconds"] if of(side.name).reference_first else 0.0
        reference[side.name].append(scoring)
        last[side.name] = side.ask(steps=1)
        ((seconds, loss, _),) = last[side.name]["steps"]
        step[side.name].append(seconds)
        losses[side.name].append(loss)
    epoch = {name: [sum(each) for each in zip(step[name], reference[name], strict=True)] for name in step}
    timed = steps[GATE + WARM_UP :]
    tokens = sum(row[0] for rows in timed for row in rows)
    described = []
    for name in task.peers:
        common = {
            **task.describe(name), "ours": OURS,
            "loss_difference": max(apart[name], sft.difference(losses[name], losses[OURS])),
            "tokens_per_second": tokens / len(timed) / statistics.median(epoch[OURS]),
            "until_warm": [until_warm[OURS], until_warm[name]], **both(last[OURS], last[name]),
        }  # fmt: skip
        for work, seconds in (("dpo", epoch), ("dpo step", step)):
            mine, theirs = (arithmetic(task, timed, each, work, args) for each in (OURS, name))
            described.append({
                **common, "work": work, **Ratio.of(seconds[name], seconds[OURS]).describe(), "bound": theirs / mine,
                "seconds": [statistics.median(seconds[OURS]), statistics.median(seconds[name])],
            })  # fmt: skip
    return described


def of(name: str) -> Peer:
    """Return how a side trains."""
    return PEERS.get(name, US)


def arithmetic(task: Task, timed: Sequence, name: str, work: str, args: argparse.Namespace) -> float:
    """FLOP of a side's matrix products, see :func:`tools.benchmarks.work.flops`.

    Args:
        task: the comparison.
        timed: tokens and trained tokens of the sequences, by step.
        name: of the side.
        work: ``dpo`` for the steps and the reference, ``dpo step`` for what happens in the steps.
        args: of the command.
    """
    peer = of(name)
    tokens, trained = (sum(row[i] for rows in timed for row in rows) for i in (0, 1))
    prompts = 0 if name != OURS else sum(row[0] - row[1] for rows in timed for row in rows[::2])
    computed = tokens - prompts if peer.padding_free(args) else padded(timed, 2 * peer.batch)
    logits = computed if peer.all_logits(args.gpu) else trained
    in_step = work == "dpo" or not peer.reference_first
    # the reference has a forward pass, and no gradients
    return flops(task.shape, task.vocab, computed, logits) * (1.5 if in_step else 1.0)
