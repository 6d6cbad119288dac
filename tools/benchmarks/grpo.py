"""GRPO: seconds of a step, and accuracy per hour, beside TRL's GRPOTrainer with PEFT on the pocket model.

Also on a model of 40 million parameters that computes what the pocket model does: see :func:`widen`.

The sides start from the same adapter, ask the same prompts in the same order, as many answers to each, with the same
verifier, loss (DAPO), clipping, optimiser and rate. TRL samples with transformers' ``generate``. With continuous
batching, its other way without a server, its steps took eight times as long here.

Gate: in two steps all sides get the same answers and must compute the same norm of the gradient, to 1e-4. It depends on
the rewards, the advantages, the loss and every weight, that of the second step also on the update before it.

Afterwards ours drops groups with equal rewards, from which no side learns; TRL computes them. ``rocm-ext eval``
evaluates all adapters.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rocm_ext import config
from rocm_ext.base.process import end_with_parent
from rocm_ext.config import algorithms
from rocm_ext.config.algorithms import updates_of_pass, updates_of_step
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import build_model
from rocm_ext.pocket import SHAPE, load_tokenizer
from rocm_ext.rl.prompts import PromptSet, choose_by_curriculum
from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed, Ratio, Side, both, in_turn
from tools.benchmarks.work import POCKET_STEPS, pocket

OURS = "ours"
PEERS = {"TRL + PEFT": False}  # whether transformers batches continuously
GATE, WARM_UP = 2, 1  # steps
TURN = 4  # steps of a turn
TOLERANCE = 1e-4  # relative, of a gradient's norm
BATCH = 64  # rows that TRL computes at once
WIDE = {"num_layers": 10, "num_heads": 16, "num_kv_heads": 8, "embed_dim": 512, "intermediate_dim": 2048,
        "norm_eps": SHAPE["norm_eps"] / 4}  # fmt: skip
WIDE_STEPS = ["prompts_per_step=16"]


def measure(
    base: Path, rounds: int, changes: Sequence[str] = (), installed: bool = False, wide: bool = False
) -> list[dict]:
    """Gate and time the sides; return a row of the table per peer.

    Args:
        base: empty folder.
        rounds: turns of each side, of :data:`TURN` steps.
        changes: ``key=value`` for the config ``cpu_pocket_grpo``.
        installed: run peers with this environment's packages.
        wide: on the pocket model of :data:`WIDE` size.

    Raises:
        Failed: the sides compute different gradients, or one ends early.
    """
    steps = WARM_UP + rounds * TURN
    cfg = prepare(base, [*(WIDE_STEPS if wide else ()), *changes], wide)
    with ExitStack() as stack:  # one update per step: groups are dealt out in other ways
        apart = check([side.ask(steps=GATE) for side in start(stack, base / "gate", base, cfg, GATE, GATE, installed)])
    with ExitStack() as stack:
        sides, until_warm, last = [], {}, {}
        for side in start(stack, base / "timed", base, cfg, steps, 0, installed):
            side.ask(steps=WARM_UP)
            until_warm[side.name] = time.perf_counter() - side.began
            sides.append(side)
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        made: list[float] = []  # updates of our steps, which skip groups with equal rewards
        for side in in_turn(sides, rounds):
            last[side.name] = side.ask(steps=TURN)
            seconds[side.name].append(sum(step[0] for step in last[side.name]["steps"]))
            made += [step[2] for step in last[side.name]["steps"] if side.name == OURS]
        folders = {side.name: side.ask(steps=10**9)["adapter"] for side in sides}  # they end
    before, *after = (evaluate(base, folder, wide) for folder in (None, *folders.values()))
    right = dict(zip(folders, after, strict=True))
    step = {name: statistics.median(each) / TURN for name, each in seconds.items()}
    gain = {name: (right[name] - before) / (steps * step[name] / 3600) for name in right}
    warm = {name: max(0.0, value - step[name] * WARM_UP) for name, value in until_warm.items()}
    return [
        {
            "work": "grpo", "peer": peer, "vocab": 320, "dtype": "fp32", "parameters": parameters(base / "pocket"),
            **Ratio.of(seconds[peer], seconds[OURS]).describe(), "bound": None, "norm_difference": apart,
            "answers": cfg.prompts_per_step * cfg.samples_per_prompt, "steps": steps,
            "updates": [statistics.fmean(made), updates_of_step(cfg)],
            "rounds": rounds, "before": before, **both(last[OURS], last[peer]),
        } | {
            key: [each[OURS], each[peer]]
            for key, each in {"step_seconds": step, "accuracy": right, "gain_per_hour": gain,
                              "until_warm": warm}.items()
        }
        for peer in PEERS
    ]  # fmt: skip


def prepare(base: Path, changes: Sequence[str], wide: bool = False) -> DictConfig:
    """Make the pocket model, perhaps of :data:`WIDE` size, and the first adapter; return the sides' common config.

    Raises:
        Failed: the pocket model cannot be made.
    """
    pocket(base)
    if wide:
        widen(base / "pocket")
    given = [f"pocket={base}/pocket", f"output_dir={base}/out", "eval_prompts=null", "mismatch=none",
             *POCKET_STEPS, "verify_workers=1", f"checkpointer.adapter_checkpoint={base}/peft"]  # fmt: skip
    cfg = config.load("grpo_rocm", "cpu_pocket_grpo", [*given, *changes])
    cfg = algorithms.filled(cfg)
    decoder = build_model(cfg.model, torch.float32, 7, torch.device("cpu"))
    (base / "peft").mkdir()
    peft_files.write_adapter(base / "peft", decoder, cfg.checkpointer.model_type, str(base / "pocket"))
    return cfg


def widen(folder: Path) -> None:
    """Give the pocket model in ``folder`` the size of :data:`WIDE`; it computes the same.

    What is added to the residual stream is zero, more heads and wider layers write nothing into it, nor do more
    layers. Zeros halve the root of the mean square at 4 times the width; a norm's scale and epsilon make up for that.
    """
    card = json.loads((folder / "config.json").read_text())
    old, new = card["hidden_size"], WIDE["embed_dim"]
    card |= {"hidden_size": new, "intermediate_size": WIDE["intermediate_dim"],
             "num_hidden_layers": WIDE["num_layers"], "num_attention_heads": WIDE["num_heads"],
             "num_key_value_heads": WIDE["num_kv_heads"], "rms_norm_eps": WIDE["norm_eps"]}  # fmt: skip
    narrow = load_file(folder / "model.safetensors")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**card)).state_dict()
    weights = {name: value.clone() for name, value in weights.items() if name != "lm_head.weight"}
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "model.embed_tokens.weight":
            value.zero_()
        if name in narrow:
            of_norm = name.endswith("norm.weight")
            value[tuple(map(slice, narrow[name].shape))] = narrow[name] * ((old / new) ** 0.5 if of_norm else 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(card))


def parameters(folder: Path) -> float:
    """Count the weights of the model in ``folder``."""
    return float(sum(value.numel() for value in load_file(folder / "model.safetensors").values()))


def start(
    stack: ExitStack, folder: Path, base: Path, cfg: DictConfig, steps: int, given: int, installed: bool = False
) -> Iterator[Side]:
    """Start the sides one after the other, so that ours chooses its threads while no other one starts.

    Args:
        stack: ends them.
        folder: new folder for their files.
        base: folder of the model and the first adapter.
        cfg: config of ours.
        steps: of the run.
        given: steps, the first ones, whose answers are given; if there are any, a step has one update.
        installed: run peers with this environment's packages.
    """
    folder.mkdir()
    (folder / "peft").symlink_to(base / "peft")
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    cfg.update({"steps": steps, "save_every_n_steps": steps, "output_dir": str(folder / "out"),
                "metric_logger": {"_component_": "tools.benchmarks.sides.talk.StepLogger",
                                  "values": ["grad_norm", "updates"], "sign": "flat"}})  # fmt: skip
    if given:
        cfg.groups_per_update = None
    order, answers = make_work(cfg, given)
    rows = [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for _, row in order]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "given.json").write_text(json.dumps(answers))
    OmegaConf.save(cfg, folder / "ours.yaml")
    flat = [[tokens for group in step.values() for tokens in group] for step in answers]
    work = {
        "model": str(base / "pocket"), "steps": steps, "updates": updates_of_step(cfg), "prompts": cfg.prompts_per_step,
        "samples": cfg.samples_per_prompt, "max_new_tokens": cfg.max_new_tokens, "batch_size": batch_size(cfg),
        "lr": cfg.optimizer.lr, "clip_low": cfg.clip_low, "clip_high": cfg.clip_high,
        "clip_dual": cfg.clip_dual, "scale": cfg.scale,
        "verifier": OmegaConf.to_container(cfg.verifier), "given": flat,
    }  # fmt: skip
    ours = ["-m", "tools.benchmarks.sides.grpo_ours", folder / "given.json", "--config", folder / "ours.yaml"]
    yield stack.enter_context(Side(OURS, Path(sys.executable), ours, folder / "ours.log"))
    for name, continuous in PEERS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**work, "continuous": continuous, "out": str(folder / name)}))
        theirs = ["-m", "tools.benchmarks.sides.grpo_trl", path]
        yield stack.enter_context(Side(name, peers.python("trl", installed=installed), theirs, folder / f"{name}.log"))


def batch_size(cfg: DictConfig) -> int:
    """Return the rows that TRL computes at once: a part of an update's, at most :data:`BATCH`."""
    rows = cfg.prompts_per_step * cfg.samples_per_prompt // updates_of_pass(cfg)
    return max(size for size in range(1, min(BATCH, rows) + 1) if rows % size == 0)


def make_work(cfg: DictConfig, given: int) -> tuple[list[tuple[str, Any]], list[dict[str, list[list[int]]]]]:
    """Return the prompts in the order in which ours asks them, and given answers to those of the first steps.

    Each group has right and wrong answers, so that none is dropped.
    """
    prompts, rng = PromptSet(cfg), random.Random(0)
    tokenizer = load_tokenizer(Path(cfg.checkpointer.checkpoint_dir))
    asked: dict[str, list[tuple[int, float | None]]] = {}
    order, answers = [], []
    for step in range(1, cfg.steps + 1):
        ids = choose_by_curriculum([prompt.id for prompt in prompts.training], asked, step, cfg.steps,
                                   count=cfg.prompts_per_step, curriculum="none", seed=cfg.seed)  # fmt: skip
        for each in ids:
            asked.setdefault(each, []).append((step, None))
        order += [(each, prompts[each].row) for each in ids]
        if step <= given:
            answers.append({each: group(tokenizer, prompts[each].row, cfg.samples_per_prompt, prompts, rng)
                            for each in ids})  # fmt: skip
    return order, answers


def group(tokenizer: Any, row: Any, count: int, prompts: Any, rng: random.Random) -> list[list[int]]:
    """Return the tokens of ``count`` answers to a row; some are those of other rows, and wrong."""
    right = rng.randrange(1, count)
    texts = [row["messages"][-1]["content"]] * right
    while len(texts) < count:
        other = rng.choice(prompts.training).row
        if other["answer"] != row["answer"]:
            texts.append(other["messages"][-1]["content"])
    end = tokenizer.special_tokens["<|im_end|>"]
    return [[*tokenizer.encode(text, add_bos=False, add_eos=False), end] for text in texts]


def check(answers: Sequence[dict]) -> float:
    """Return the largest relative difference of the peers' gradient norms from ours, whose answer is the first.

    Raises:
        Failed: it exceeds the tolerance.
    """
    ours, *theirs = ([step[1] for step in answer["steps"]] for answer in answers)
    apart = [abs(a - b) / b for norms in theirs for a, b in zip(norms, ours, strict=True)]
    if not all(each <= TOLERANCE for each in apart):  # NaN, too
        raise Failed(f"gradient norms differ by {max(apart):.1e}: {ours} against {theirs}")
    return max(apart)


def evaluate(base: Path, adapter: str | Path | None, wide: bool = False) -> float:
    """Return the share of the held-out prompts that an adapter, or the model without one, answers correctly.

    Raises:
        Failed: the evaluation failed.
    """
    command = ["-m", "rocm_ext.cli", "eval", "--config", "cpu_pocket_raft", "--json", f"pocket={base}/pocket"]
    command += ["--adapter", str(adapter)] if adapter else []
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, preexec_fn=end_with_parent)
    if done.returncode:
        raise Failed(f"cannot evaluate {adapter}: {done.stderr[-2000:]}")
    scores = json.loads(done.stdout)
    return scores["correct"] / scores["prompts"]
