"""LoRA training, for SFT and DPO: seconds of a step on the same rows, from the same adapter, with the same AdamW.

Gate: before timing starts, losses (for DPO also the gradients' norms) of 20 steps must agree with ours, in fp32 to
1e-5 relative. The fp32 gate also precedes bf16, whose losses may differ by 5 %.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.kit.families import folder_config
from tests.kit.tiny import run_config, write_yaml
from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed, Side, Timed, difference, take_turns
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
)

OURS = "ours"
BACKED = "ours on transformers' code"
GATE = 20  # steps
SIDES = "tools.benchmarks.sides"
MEASURED = ("losses", "gradient norms")  # values that a side reports after the seconds of a step

Steps = Sequence[Sequence[tuple[int, int]]]  # by step: tokens and trained tokens of the sequences


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
        environment: key of :data:`tools.benchmarks.peers.PINS`, or :data:`OURS`.
        batch: rows of a micro-batch, padded to the longest; ours packs them.
        changes: changes to the config.
        packs: torchtune's packs in a step, each a micro-batch; 0: rows are not packed.
        reference_first: whether DPO's reference scores all pairs before training.
    """

    environment: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    packs: int = 0
    reference_first: bool = False

    def all_logits(self, gpu: bool) -> bool:
        """Whether it also computes logits of tokens without a label; without Triton TRL's fused head does so."""
        return self.environment == "torchtune" or (self.environment == "trl" and not gpu)


@dataclass(frozen=True)
class Work:
    """What is trained, and how it is compared.

    Attributes:
        name: the work's name in the table.
        ours: our way to train.
        peers: the other ways, by name.
        write_steps: writes the rows of steps, see :func:`tools.benchmarks.work.write_steps`.
        warm_up: steps before those that are timed.
        config: keys of our config and torchtune's.
        losses: the config's ``loss``, by environment.
        logger: metric logger, by environment.
        entry: module that starts ours.
        dataset: class of :mod:`tools.benchmarks.sides.rows`.
        tolerances: by dtype, the relative differences of :data:`MEASURED` that the gate allows; None: any.
        sequences: sequences of a row: 2 for a pair.
    """

    name: str
    ours: Peer
    peers: Mapping[str, Peer]
    write_steps: Callable[[Path, int, int, int], list[list[tuple[int, int]]]]
    warm_up: int
    config: Mapping[str, Any]
    losses: Mapping[str, Mapping[str, Any]]
    logger: Mapping[str, str]
    entry: str
    dataset: str
    tolerances: Mapping[str, tuple[float | None, ...]]
    sequences: int = 1

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return SEQUENCES_PER_STEP // self.sequences

    def of(self, name: str) -> Peer:
        """Return how a side trains."""
        return self.peers.get(name, self.ours)

    def packs(self, name: str) -> bool:
        """Whether a side computes no padding; what fills torchtune's packs does not count."""
        peer = self.of(name)
        return peer.environment == OURS or peer.packs > 0

    def start(
        self, base: Path, name: str, task: Task, steps: int, args: argparse.Namespace
    ) -> Side:
        """Start a side, which waits for orders."""
        environment = self.of(name).environment
        ours = environment == OURS
        python = (
            Path(sys.executable) if ours else peers.python(environment, args.gpu, args.installed)
        )
        return Side(
            name, python, command(self, base, name, task, steps, args), base / f"{name}.log"
        )

    def step(self, side: Side, number: int) -> tuple[float, dict[str, Any]]:
        """Do the step ``number``, from 0; return the seconds of the reference's scoring before it, and the answer."""
        scoring, first = 0.0, self.rows * number
        if self.of(side.name).reference_first:
            scoring = side.ask(score=[first, first + self.rows])["seconds"]
        return scoring, side.ask(steps=1)


def compare(
    work: Work, base: Path, task: Task, args: argparse.Namespace, gated: set[str]
) -> list[dict]:
    """Gate and time one model.

    Args:
        work: what is trained.
        base: empty folder.
        task: the comparison.
        args: the command's options.
        gated: peers that have passed the fp32 gate; this call adds to them.

    Returns:
        A row of the table for each peer; for DPO two: an epoch, and a step alone.

    Raises:
        Failed: a side fails the gate or ends early.
    """
    write_random_model(base / "model", task.shape, task.vocab)
    steps = work.write_steps(base / "rows.jsonl", task.vocab, GATE, work.warm_up + args.rounds)
    write_adapter(base, task.shape)
    if BACKED in task.peers:
        write_foreign_twin(base / "twin", base / "model")
    if task.dtype != "fp32" and not gated.issuperset(task.peers):
        with ExitStack() as stack:
            gate(stack, work, base, replace(task, dtype="fp32"), len(steps), args)
    with ExitStack() as stack:
        sides, apart, until_warm = gate(stack, work, base, task, len(steps), args)
        gated.update(task.peers)
        return measure(sides, work, task, steps, apart, until_warm, args)


def gate(
    stack: ExitStack, work: Work, base: Path, task: Task, steps: int, args: argparse.Namespace
) -> tuple[dict[str, Side], dict[str, float], dict[str, float]]:
    """Start ours and the peers, run their first steps, which have short rows, and compare the values.

    Returns:
        By side: the side, the largest relative difference of its losses from ours, and the seconds of imports, set-up,
        compilation and the reference's scoring of all pairs.

    Raises:
        Failed: a difference exceeds the tolerance.
    """
    sides, values, until_warm = {}, {}, {}
    for name in (OURS, *task.peers):
        sides[name] = stack.enter_context(work.start(base, name, task, steps, args))
        seconds, *values[name] = zip(*sides[name].ask(steps=GATE)["steps"], strict=True)
        until_warm[name] = max(
            0.0, time.perf_counter() - sides[name].began - GATE * statistics.median(seconds)
        )
    return sides, check(values, work.tolerances[task.dtype]), until_warm


def check(
    values: Mapping[str, Sequence[Sequence[float]]], tolerances: Sequence[float | None]
) -> dict[str, float]:
    """Return the largest relative difference of each side's losses from ours.

    Args:
        values: by side, the losses and the gradients' norms of the steps.
        tolerances: the relative differences that they may have; None: any.

    Raises:
        Failed: a difference exceeds the tolerance.
    """
    for i, limit in enumerate(tolerances):
        for name, theirs in values.items():
            apart, expected = difference(theirs[i], values[OURS][i]), values[OURS][i]
            if limit is not None and not apart <= limit:  # also NaN
                said = f"{MEASURED[i]} of {name} differ from ours by {apart:.1e}"
                raise Failed(f"{said}: {list(theirs[i])} against {list(expected)}")
    return {name: difference(theirs[0], values[OURS][0]) for name, theirs in values.items()}


def command(
    work: Work, base: Path, name: str, task: Task, steps: int, args: argparse.Namespace
) -> list[str | Path]:
    """Write the side's config and return the arguments of its interpreter."""
    peer, path = work.of(name), base / f"{name}.yaml"
    if peer.environment == "trl":
        given = {"work": work.name, "dtype": task.dtype, "batch_size": peer.batch, "rows_per_step": work.rows,
                 "steps": steps, "lr": work.config["optimizer"]["lr"],
                 "beta": work.losses[OURS].get("beta"), "precompute": peer.reference_first}  # fmt: skip
        (base / f"{name}.json").write_text(json.dumps(given))
        return ["-m", f"{SIDES}.train_trl", base / f"{name}.json"]
    cfg = config(work, base, name, task, steps)
    if peer.environment == OURS:
        cfg |= {"hardware": "auto" if args.gpu else "cpu", "overwrite_output_dir": True, "num_workers": 0,
                "sequences_per_step": work.rows}  # peers also load rows in their process  # fmt: skip
        return ["-m", work.entry, "--config", write_yaml(path, cfg), *args.ours]
    for ours in ("hardware", "sequences_per_step"):
        cfg.pop(ours)
    cfg["checkpointer"].pop("adapter_checkpoint")
    if peer.packs:
        packed = {"rows": SEQUENCES_PER_STEP, "packs": peer.packs, "packed": True}
        cfg["dataset"] |= {"_component_": f"{SIDES}.rows.PackedRows", **packed}
    cfg |= {**torchtune_keys(args.gpu, peer.packs or work.rows // peer.batch), **peer.changes}
    module = f"{SIDES}.train_torchtune"
    return ["-m", module, work.name, base / "adapter.pt", "--config", write_yaml(path, cfg)]


def torchtune_keys(gpu: bool, accumulated: int) -> dict[str, Any]:
    """Return the keys that torchtune's recipes need and ours lack, for steps of ``accumulated`` micro-batches."""
    return {
        "device": "cuda" if gpu else "cpu", "gradient_accumulation_steps": accumulated, "shuffle": False,
        "resume_from_checkpoint": False, "enable_activation_checkpointing": False, "compile": False,
        "log_every_n_steps": 1, "save_adapter_weights_only": True,
        # The recipes require a scheduler; this one keeps the rate constant.
        "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                         "num_warmup_steps": 0, "num_cycles": 0.0},
    }  # fmt: skip


def config(work: Work, base: Path, name: str, task: Task, steps: int) -> dict[str, Any]:
    """Return the keys that ours and torchtune's configs share."""
    model, rows, out = (
        base / ("twin" if name == BACKED else "model"),
        base / "rows.jsonl",
        base / "out" / name,
    )
    peer = work.of(name)
    cfg = (folder_config if is_qwen3(task.shape) else run_config)(model, rows, out)
    # torchtune's names of the layers differ from the files'
    first = {"adapter_checkpoint": str(base / ("peft" if is_qwen3(task.shape) else "adapter.pt"))}
    loss = work.losses.get(peer.environment)
    return cfg | {
        "model": model_config(model, task.shape), "checkpointer": cfg.get("checkpointer", {}) | first,
        "dataset": {"_component_": f"{SIDES}.rows.{work.dataset}", "path": str(rows)},
        "tokenizer": cfg["tokenizer"] | {"max_seq_len": None},
        "metric_logger": {"_component_": f"{SIDES}.{work.logger[peer.environment]}"}, "batch_size": peer.batch,
        "epochs": 1, "max_steps_per_epoch": steps, "shuffle": False, "dtype": task.dtype, **work.config,
        **({"loss": loss} if loss else {}),
    }  # fmt: skip


def measure(
    sides: Mapping[str, Side], work: Work, task: Task, steps: Steps, apart: Mapping[str, float],
    until_warm: dict[str, float], args: argparse.Namespace,
) -> list[dict]:  # fmt: skip
    """Time the sides in turns on the same steps; return the table's rows."""
    for name, side in sides.items():
        warm = [step[0] for step in side.ask(steps=work.warm_up)["steps"]]
        until_warm[name] += max(0.0, sum(warm) - work.warm_up * warm[-1])
    numbers = {name: iter(range(GATE + work.warm_up, len(steps))) for name in sides}
    turns = take_turns(sides, args.rounds, lambda side: work.step(side, next(numbers[side.name])))
    last = {name: each[-1][1] for name, each in turns.items()}
    step, losses = (
        {k: [answer["steps"][0][i] for _, answer in turns[k]] for k in turns} for i in (0, 1)
    )
    epoch = {
        name: [scoring + answer["steps"][0][0] for scoring, answer in each]
        for name, each in turns.items()
    }
    timed = steps[GATE + work.warm_up :]
    tokens = sum(row[0] for rows in timed for row in rows) / len(timed)
    described = []
    for ours, name in pairs(task.peers):
        common = {
            **task.describe(name), "ours": ours, "tokens_per_second": tokens / statistics.median(epoch[ours]),
            "loss_difference": max(apart[name], difference(losses[name], losses[OURS])),
        }  # fmt: skip
        for kind, seconds in (
            (("sft", step),) if work.name == "sft" else (("dpo", epoch), ("dpo step", step))
        ):
            theirs, mine = (
                arithmetic(work, task, timed, each, kind, args) for each in (name, OURS)
            )
            row = {**common, "work": kind, **Timed(seconds, last, until_warm).describe(ours, name)}
            if work.name == "dpo":
                row["seconds"] = [
                    statistics.median(seconds[OURS]),
                    statistics.median(seconds[name]),
                ]
            described.append({**row, "bound": theirs / mine})
    return described


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to compare, one of ours first: ours with each peer, then ours on transformers' code."""
    first = [OURS, BACKED] if BACKED in names else [OURS]
    return [(ours, name) for ours in first for name in names if name != ours]


def arithmetic(
    work: Work, task: Task, timed: Steps, name: str, kind: str, args: argparse.Namespace
) -> float:
    """FLOP of a side's matrix products, see :func:`tools.benchmarks.work.flops`.

    Args:
        work: what is trained.
        task: the comparison.
        timed: tokens and trained tokens of the sequences, by step.
        name: the side.
        kind: ``sft``; ``dpo`` for the steps and the reference, ``dpo step`` for what happens in the steps.
        args: the command's options.
    """
    peer = work.of(name)
    tokens, trained = (sum(row[i] for rows in timed for row in rows) for i in (0, 1))
    computed = tokens if work.packs(name) else padded(timed, work.sequences * peer.batch)
    if name == OURS and work.sequences == 2:  # computes the prompt of a pair once
        computed -= sum(row[0] - row[1] for rows in timed for row in rows[::2])
    logits = computed if peer.all_logits(args.gpu) else trained
    # the reference has a forward pass, and no gradients
    with_reference = kind == "dpo" or (kind == "dpo step" and not peer.reference_first)
    return flops(task.shape, task.vocab, computed, logits) * (1.5 if with_reference else 1.0)
