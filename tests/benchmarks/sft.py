"""LoRA SFT: seconds of an optimiser step on the same rows, from the same adapter, with the same AdamW.

Gate: in fp32 the losses of 20 steps agree to 1e-5 relative with ours, before anything is timed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import peers
from tests.benchmarks.protocol import Failed, Ratio, Side, in_turn, libraries
from tests.benchmarks.work import (
    LORA,
    SEQUENCES_PER_STEP,
    flops,
    padded,
    write_adapter,
    write_random_model,
    write_steps,
)
from tests.tiny import run_config, write_yaml

GATE, WARM_UP = 20, 2  # steps
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
        module: of the side.
        environment: of :data:`tests.benchmarks.peers.PINS`.
        batch: rows of a micro-batch, padded to the longest.
        all_logits: it computes those of tokens that no label follows, too.
        changes: to its config.
    """

    module: str
    environment: str
    batch: int
    all_logits: bool
    changes: dict[str, Any] = field(default_factory=dict)


PEERS = {
    "torchtune as shipped": Peer("sft_torchtune", "torchtune", 2, True),
    "torchtune batch 1": Peer("sft_torchtune", "torchtune", 1, True),
    "torchtune batch 8": Peer("sft_torchtune", "torchtune", 8, True),
    "torchtune compiled": Peer("sft_torchtune", "torchtune", 2, True, {"compile": True}),
    "torchtune batch 1 compiled": Peer("sft_torchtune", "torchtune", 1, True, {"compile": True}),
    "torchtune batch 8 compiled": Peer("sft_torchtune", "torchtune", 8, True, {"compile": True}),
    "TRL + PEFT": Peer("sft_trl", "trl", 8, True),
    "TRL + PEFT batch 2": Peer("sft_trl", "trl", 2, True),
}


def compare(base: Path, vocab: int, dtype: str, names: Sequence[str], args: argparse.Namespace) -> list[dict]:
    """Gate and time one model; a row of the table for each peer."""
    base.mkdir()
    steps_each = args.steps
    full = WARM_UP + args.rounds * steps_each
    write_random_model(base / "model", args.shape, vocab)
    steps = write_steps(base / "rows.jsonl", vocab, GATE, full)
    write_adapter(base)
    if dtype != "fp32":
        with ExitStack() as stack:
            gate(start(stack, base, "fp32", names, len(steps), args), TOLERANCE)
    with ExitStack() as stack:
        sides = start(stack, base, dtype, names, len(steps), args)
        apart = gate(sides, TOLERANCE if dtype == "fp32" else 0.05)
        return measure(sides, base, vocab, dtype, steps, apart, args)


def start(
    stack: ExitStack, base: Path, dtype: str, names: Sequence[str], steps: int, args: argparse.Namespace
) -> list[Side]:
    """Ours and the peers' processes, which wait for orders."""
    sides = []
    for name in ("ours", *names):
        peer = PEERS.get(name)
        python = Path(sys.executable) if peer is None else peers.python(peer.environment, args.gpu)
        arguments = command(base, name, peer, dtype, steps, args)
        sides.append(stack.enter_context(Side(name, python, arguments, base / f"{name}.log")))
    return sides


def command(
    base: Path, name: str, peer: Peer | None, dtype: str, steps: int, args: argparse.Namespace
) -> list[str | Path]:
    """Arguments of the side's interpreter; writes the config that they name."""
    rate = 3e-4
    if peer is not None and peer.environment == "trl":
        work = {"dtype": dtype, "batch_size": peer.batch, "sequences_per_step": SEQUENCES_PER_STEP, "steps": steps,
                "lr": rate, "attention": args.attention}  # fmt: skip
        (base / "work.json").write_text(json.dumps(work))
        return ["-m", f"tests.benchmarks.sides.{peer.module}", base]
    cfg = run_config(base / "model", base / "rows.jsonl", base / "out" / name)
    cfg["model"].update(LORA)
    cfg["dataset"] = {"_component_": "tests.benchmarks.sides.rows.TokenRows", "path": str(base / "rows.jsonl")}
    cfg["tokenizer"]["max_seq_len"] = None
    cfg |= {
        "metric_logger": {"_component_": "tests.benchmarks.sides.talk.StepLogger"},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": rate},
        "epochs": 1, "max_steps_per_epoch": steps, "shuffle": False, "dtype": dtype, "clip_grad_norm": 1.0,
    }  # fmt: skip
    path = base / f"{name}.yaml"
    if peer is None:
        cfg |= {"hardware": "auto" if args.gpu else "cpu", "overwrite_output_dir": True, "batch_size": 2}
        cfg |= {"sequences_per_step": SEQUENCES_PER_STEP}
        cfg["checkpointer"]["adapter_checkpoint"] = str(base / "adapter.pt")
        return ["-m", "rocm_ext.recipes.lora_finetune_rocm", "--config", write_yaml(path, cfg), *args.ours]
    for ours in ("hardware", "sequences_per_step"):
        cfg.pop(ours)
    cfg |= {
        "device": "cuda" if args.gpu else "cpu", "batch_size": peer.batch,
        "gradient_accumulation_steps": SEQUENCES_PER_STEP // peer.batch, "resume_from_checkpoint": False,
        "enable_activation_checkpointing": False, "compile": False, "log_every_n_steps": 1,
        "save_adapter_weights_only": True, "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        # a constant rate, in the scheduler that the recipe insists on
        "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                         "num_warmup_steps": 0, "num_cycles": 0.0}, **peer.changes,
    }  # fmt: skip
    return ["-m", f"tests.benchmarks.sides.{peer.module}", base / "adapter.pt", "--config", write_yaml(path, cfg)]


def gate(sides: Sequence[Side], tolerance: float) -> dict[str, float]:
    """Largest relative difference of each side's losses from ours over the first steps.

    Raises:
        Failed: it is above ``tolerance``.
    """
    losses = {side.name: [loss for *_, loss in side.ask(steps=GATE)["steps"]] for side in sides}
    apart = {name: difference(found, losses["ours"]) for name, found in losses.items()}
    for name, value in apart.items():
        if not value <= tolerance:
            raise Failed(f"losses of {name} are up to {value:.1e} from ours: {losses[name]} against {losses['ours']}")
    return apart


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference."""
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


def measure(
    sides: Sequence[Side], base: Path, vocab: int, dtype: str, steps: list, apart: dict[str, float], args: Any
) -> list[dict]:
    """Let the sides take turns on the same steps."""
    first = {side.name: side.ask(steps=WARM_UP)["steps"][0][0] for side in sides}
    runs: dict[str, list[list]] = {side.name: [] for side in sides}
    peaks = {}
    for _, side in in_turn(sides, args.rounds):
        answer = side.ask(steps=args.steps)
        runs[side.name].append(answer["steps"])
        peaks[side.name] = answer["peak_memory"]
    timed = steps[GATE + WARM_UP :]
    tokens, trained = (sum(row[i] for rows in timed for row in rows) for i in (0, 1))
    seconds = {name: [sum(step[0] for step in turn) / len(turn) for turn in turns] for name, turns in runs.items()}
    ours = flops(args.shape, vocab, tokens, trained)
    rows = []
    for side in sides[1:]:
        peer, name = PEERS[side.name], side.name
        computed = padded(timed, peer.batch)
        ratio = Ratio.of(seconds[name], seconds["ours"])
        losses = [[loss for turn in runs[each] for *_, loss in turn] for each in (name, "ours")]
        rows.append({
            "work": "sft", "shape": args.shape, "vocab": vocab, "dtype": dtype, "peer": name,
            "speedup": ratio.median, "range": [ratio.low, ratio.high], "rounds": args.rounds,
            "bound": flops(args.shape, vocab, computed, computed if peer.all_logits else trained) / ours,
            "loss_difference": max(apart[name], difference(*losses)),
            "tokens_per_second": tokens / len(timed) / statistics.median(seconds["ours"]),
            "first_step_seconds": [first["ours"], first[name]],
            "peak_memory": [peaks["ours"], peaks[name]],
            "libraries": [0, 0] if args.gpu else [
                libraries(Path(sys.executable), "rocm_ext.recipes.lora_finetune_rocm"),
                libraries(peers.python(peer.environment), "tests.benchmarks.sides.sft_trl" if peer.environment == "trl"
                          else "torchtune.training")],
        })  # fmt: skip
    return rows
