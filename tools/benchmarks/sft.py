"""LoRA SFT: seconds of an optimiser step on the same rows, from the same adapter, with the same AdamW.

Gate: in fp32 the losses of 20 steps must agree with ours to 1e-5 relative before timing starts. The fp32 gate also
precedes bf16, whose own losses may differ by 5 %. In bf16 torchtune's adapters and optimiser state are bf16; ours and
PEFT's are fp32.

"As shipped" means batch size, loss, AdamW and flags of qwen2_5/0.5B_lora_single_device.yaml. Rank, rate, schedule and
rows are the same for all sides.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.kit.families import folder_config
from tests.kit.tiny import run_config, write_yaml
from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed, Ratio, Side, both, in_turn
from tools.benchmarks.work import (
    SEQUENCES_PER_STEP,
    Task,
    flops,
    is_qwen3,
    model_config,
    padded,
    write_adapter,
    write_foreign_twin,
    write_random_model,
    write_steps,
)

OURS = "ours"
BACKED = "ours on transformers' code"
GATE, WARM_UP = 20, 2  # steps
RATE = 3e-4
PACKS = 4  # of torchtune's in a step: each has about 1,700 tokens
TOLERANCES = {"fp32": 1e-5, "bf16": 0.05}  # relative, of a step's loss


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
        module: of the side.
        environment: of :data:`tools.benchmarks.peers.PINS`, or :data:`OURS`.
        batch: rows of a micro-batch, padded to the longest; ours packs them.
        changes: to its config.
        packs: of torchtune's that a step's rows fill; a micro-batch is a pack. 0: rows are not packed.
    """

    module: str
    environment: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    packs: int = 0

    def all_logits(self, gpu: bool) -> bool:
        """Whether it also computes logits of tokens without a label; without Triton TRL's fused head does so."""
        return self.environment == "torchtune" or (self.environment == "trl" and not gpu)

    def padding_free(self, args: argparse.Namespace) -> bool:
        """Whether it packs rows end to end."""
        return self.environment == OURS or (self.environment == "trl" and args.gpu and args.attention != "sdpa")

    def runs(self, shape: str) -> bool:
        """Whether it runs ``shape``: torchtune has no Qwen3, and Qwen3 alone has a twin without a native decoder."""
        return self.environment == "trl" or is_qwen3(shape) == (self.environment == OURS)


PEERS = {
    "torchtune as shipped": Peer("sft_torchtune", "torchtune", 2),
    "torchtune batch 1": Peer("sft_torchtune", "torchtune", 1),
    "torchtune batch 8": Peer("sft_torchtune", "torchtune", 8),
    "torchtune compiled": Peer("sft_torchtune", "torchtune", 2, {"compile": True}),
    "torchtune batch 1 compiled": Peer("sft_torchtune", "torchtune", 1, {"compile": True}),
    "torchtune batch 8 compiled": Peer("sft_torchtune", "torchtune", 8, {"compile": True}),
    "torchtune packed": Peer("sft_torchtune", "torchtune", 1, packs=PACKS),
    "torchtune packed, compiled": Peer("sft_torchtune", "torchtune", 1, {"compile": True}, PACKS),
    "TRL + PEFT": Peer("sft_trl", "trl", 8),
    "TRL + PEFT batch 2": Peer("sft_trl", "trl", 2),
    BACKED: Peer("", OURS, 2),
}


def compare(base: Path, task: Task, args: argparse.Namespace, gated: set[str]) -> list[dict]:
    """Gate and time one model; return a row of the table per peer.

    Args:
        base: empty folder.
        task: the comparison.
        args: of the command.
        gated: peers that have passed the fp32 gate; this call adds to them.

    Raises:
        Failed: a side fails the gate or ends early.
    """
    write_random_model(base / "model", task.shape, task.vocab)
    steps = write_steps(base / "rows.jsonl", task.vocab, GATE, WARM_UP + args.rounds)
    write_adapter(base, task.shape)
    if BACKED in task.peers:
        write_foreign_twin(base / "twin", base / "model")
    return gated_and_timed(gate, measure, base, task, steps, args, gated)


def gated_and_timed(
    gate: Callable[..., Any], measure: Callable[..., list[dict]], base: Path, task: Task, steps: list,
    args: argparse.Namespace, gated: set[str],
) -> list[dict]:  # fmt: skip
    """Let ``gate`` start and check the sides, before bf16 in fp32, too; return what ``measure`` finds."""
    if task.dtype != "fp32" and not gated.issuperset(task.peers):
        with ExitStack() as stack:
            gate(stack, base, replace(task, dtype="fp32"), len(steps), args)
    with ExitStack() as stack:
        sides, apart, until_warm = gate(stack, base, task, len(steps), args)
        gated.update(task.peers)
        return measure(sides, task, steps, apart, until_warm, args)


def gate(
    stack: ExitStack, base: Path, task: Task, steps: int, args: argparse.Namespace
) -> tuple[list[Side], dict[str, float], dict[str, float]]:
    """Start ours and the peers, run their first steps, which have short rows, and compare the losses.

    Returns:
        The sides; the largest relative difference of each side's losses from ours; the seconds that each side needed
        beyond the time of warm steps: imports, set-up, compiling.

    Raises:
        Failed: a difference exceeds the tolerance, in fp32 1e-5.
    """
    sides, losses, until_warm = [], {}, {}
    for name in (OURS, *task.peers):
        arguments = command(base, name, PEERS.get(name), task, steps, args)
        sides.append(stack.enter_context(Side(name, python(name, args), arguments, base / f"{name}.log")))
        found = sides[-1].ask(steps=GATE)["steps"]
        losses[name] = [loss for _, loss in found]
        step = statistics.median(seconds for seconds, _ in found)
        until_warm[name] = max(0.0, time.perf_counter() - sides[-1].began - GATE * step)
    apart = {name: difference(found, losses[OURS]) for name, found in losses.items()}
    for name, value in apart.items():
        if not value <= TOLERANCES[task.dtype]:
            raise Failed(f"losses of {name} differ from ours by {value:.1e}: {losses[name]} against {losses[OURS]}")
    return sides, apart, until_warm


def python(name: str, args: argparse.Namespace) -> Path:
    """Return a side's interpreter."""
    ours = name not in PEERS or PEERS[name].environment == OURS
    return Path(sys.executable) if ours else peers.python(PEERS[name].environment, args.gpu, args.installed)


def command(
    base: Path, name: str, peer: Peer | None, task: Task, steps: int, args: argparse.Namespace
) -> list[str | Path]:
    """Write the side's config and return the arguments of its interpreter."""
    if peer is not None and peer.environment == "trl":
        work = {"dtype": task.dtype, "batch_size": peer.batch, "sequences_per_step": SEQUENCES_PER_STEP,
                "steps": steps, "lr": RATE, "attention": args.attention}  # fmt: skip
        (base / f"{name}.json").write_text(json.dumps(work))
        return ["-m", f"tools.benchmarks.sides.{peer.module}", base / f"{name}.json"]
    cfg = config(base, name, task, steps)
    path = base / f"{name}.yaml"
    if peer is None or peer.environment == OURS:
        cfg |= {
            "hardware": "auto" if args.gpu else "cpu",
            "overwrite_output_dir": True,
            "batch_size": 2,
            "num_workers": 0,
        }  # peers also load rows in their process
        cfg |= {"sequences_per_step": SEQUENCES_PER_STEP}
        return ["-m", "rocm_ext.recipes.lora_finetune_rocm", "--config", write_yaml(path, cfg), *args.ours]
    for ours in ("hardware", "sequences_per_step"):
        cfg.pop(ours)
    cfg["checkpointer"].pop("adapter_checkpoint")
    if peer.packs:
        packed = {"rows": SEQUENCES_PER_STEP, "packs": peer.packs, "packed": True}
        cfg["dataset"] = {**cfg["dataset"], "_component_": "tools.benchmarks.sides.rows.PackedRows", **packed}
    cfg |= {"batch_size": peer.batch, "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            **of_torchtune(args, peer.packs or SEQUENCES_PER_STEP // peer.batch), **peer.changes}  # fmt: skip
    return ["-m", f"tools.benchmarks.sides.{peer.module}", base / "adapter.pt", "--config", write_yaml(path, cfg)]


def of_torchtune(args: argparse.Namespace, accumulated: int) -> dict[str, Any]:
    """Return what torchtune's recipes need beside ours, for steps of ``accumulated`` micro-batches."""
    return {
        "device": "cuda" if args.gpu else "cpu", "gradient_accumulation_steps": accumulated,
        "resume_from_checkpoint": False, "enable_activation_checkpointing": False, "compile": False,
        "log_every_n_steps": 1, "save_adapter_weights_only": True,
        # The recipes require a scheduler; this one keeps the rate constant.
        "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                         "num_warmup_steps": 0, "num_cycles": 0.0},
    }  # fmt: skip


def config(base: Path, name: str, task: Task, steps: int) -> dict[str, Any]:
    """Return what ours and torchtune's configs share."""
    model, rows, out = base / ("twin" if name == BACKED else "model"), base / "rows.jsonl", base / "out" / name
    cfg = (folder_config if is_qwen3(task.shape) else run_config)(model, rows, out)
    cfg["model"] = model_config(model, task.shape)
    # torchtune's names of the layers differ from the files'
    first = {"adapter_checkpoint": str(base / ("peft" if is_qwen3(task.shape) else "adapter.pt"))}
    return cfg | {
        "checkpointer": cfg.get("checkpointer", {}) | first,
        "dataset": {"_component_": "tools.benchmarks.sides.rows.TokenRows", "path": str(rows)},
        "tokenizer": cfg["tokenizer"] | {"max_seq_len": None},
        "metric_logger": {"_component_": "tools.benchmarks.sides.talk.StepLogger"},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": RATE},
        "epochs": 1, "max_steps_per_epoch": steps, "shuffle": False, "dtype": task.dtype, "clip_grad_norm": 1.0,
    }  # fmt: skip


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN if one is NaN."""
    apart = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def measure(
    sides: Sequence[Side], task: Task, steps: list, apart: dict[str, float], until_warm: dict[str, float], args: Any
) -> list[dict]:
    """Time the sides in turns on the same steps; return a row of the table per peer."""
    for side in sides:
        warm = [seconds for seconds, _ in side.ask(steps=WARM_UP)["steps"]]
        until_warm[side.name] += max(0.0, sum(warm) - WARM_UP * warm[-1])
    runs: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    last = {}
    for side in in_turn(sides, args.rounds):
        last[side.name] = side.ask(steps=1)
        runs[side.name] += last[side.name]["steps"]
    timed = steps[GATE + WARM_UP :]
    tokens, trained = (sum(row[i] for rows in timed for row in rows) for i in (0, 1))
    seconds, losses = ({name: [step[i] for step in each] for name, each in runs.items()} for i in (0, 1))
    work = {OURS: flops(task.shape, task.vocab, tokens, trained)}
    for name in task.peers:
        packed = PEERS[name].padding_free(args) or PEERS[name].packs  # leaving out what fills torchtune's packs
        computed = tokens if packed else padded(timed, PEERS[name].batch)
        logits = computed if PEERS[name].all_logits(args.gpu) else trained
        work[name] = flops(task.shape, task.vocab, computed, logits)
    return [
        {
            **task.describe(name), "ours": ours, **Ratio.of(seconds[name], seconds[ours]).describe(),
            "bound": work[name] / work[ours],
            "loss_difference": max(apart[name], difference(losses[name], losses[OURS])),
            "tokens_per_second": tokens / len(timed) / statistics.median(seconds[ours]),
            "until_warm": [until_warm[ours], until_warm[name]],
            **both(last[ours], last[name]),
        }
        for ours, name in pairs(task.peers)
    ]  # fmt: skip


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to compare, one of ours first: ours with each peer, then ours on transformers' code."""
    first = [OURS, BACKED] if BACKED in names else [OURS]
    return [(ours, name) for ours in first for name in names if name != ours]
