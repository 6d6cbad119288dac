"""GRPO and distillation beside TRL's trainers with PEFT, on the pocket model or a larger one that computes the same.

The sides start from the same adapter, and ask the same prompts in the same order, with the same optimiser, rate and
answers in an update. TRL samples with transformers' ``generate``.

Gate: in two steps both sides get the same answers and must compute the same norm of the gradient, to 1e-4.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import build_model
from rocm_ext.pocket import SHAPE
from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed, Side, Timed, difference, take_turns

OURS, PEER = "ours", "TRL + PEFT"
GATE, WARM_UP = 2, 1  # steps
TURN = 4  # steps of a turn
TOLERANCE = 1e-4  # relative, of a gradient's norm
BATCH = 64  # rows that TRL computes at once
WIDE = {"num_layers": 10, "num_heads": 16, "num_kv_heads": 8, "embed_dim": 512, "intermediate_dim": 2048,
        "norm_eps": SHAPE["norm_eps"] / 4}  # fmt: skip

# Of a config and the number of steps whose answers are given: the rows of the prompts in the order of the steps, the
# given answers by step and prompt, and further settings of TRL's side. It may change the config.
Describe = Callable[
    [DictConfig, int], tuple[list[dict], list[dict[str, list[list[int]]]], dict[str, Any]]
]


def measure(
    base: Path, work: str, cfg: DictConfig, describe: Describe, rounds: int, installed: bool
) -> tuple[dict[str, Any], list[list[float]]]:
    """Gate and time the sides.

    Args:
        base: folder of the model and the first adapter.
        work: ``grpo`` or ``distil``.
        cfg: our config.
        describe: see :data:`Describe`.
        rounds: turns of each side, of :data:`TURN` steps.
        installed: run the peer with this environment's packages.

    Returns:
        The columns of the table; our steps' seconds, norms and updates.

    Raises:
        Failed: the sides compute different gradients, or one ends early.
    """
    steps = WARM_UP + rounds * TURN

    def begin(stack: ExitStack, name: str, count: int, given: int) -> Iterator[Side]:
        return start(stack, base / name, base, work, cfg, describe, count, given, installed)

    with ExitStack() as stack:
        apart = check([side.ask(steps=GATE) for side in begin(stack, "gate", GATE, GATE)])
    with ExitStack() as stack:
        sides, until_warm = {}, {}
        for side in begin(stack, "timed", steps, 0):
            side.ask(steps=WARM_UP)
            until_warm[side.name] = time.perf_counter() - side.began
            sides[side.name] = side
        turns = take_turns(sides, rounds, lambda side: side.ask(steps=TURN))
    seconds = {
        name: [sum(step[0] for step in answer["steps"]) for answer in each]
        for name, each in turns.items()
    }
    step = {name: statistics.median(each) / TURN for name, each in seconds.items()}
    warm = {name: max(0.0, value - step[name] * WARM_UP) for name, value in until_warm.items()}
    columns = {
        "work": work, "peer": PEER, "vocab": vocabulary(base / "pocket"), "dtype": "fp32", "bound": None,
        "norm_difference": apart,
        "steps": steps, "rounds": rounds, "step_seconds": [step[OURS], step[PEER]],
        **Timed(seconds, {name: each[-1] for name, each in turns.items()}, warm).describe(OURS, PEER),
    }  # fmt: skip
    return columns, [step for answer in turns[OURS] for step in answer["steps"]]


def start(
    stack: ExitStack, folder: Path, base: Path, work: str, cfg: DictConfig, describe: Describe, steps: int, given: int,
    installed: bool = False,
) -> Iterator[Side]:  # fmt: skip
    """Start the sides one after the other, so that ours chooses its threads while the other one does not start yet.

    Args:
        stack: ends the sides.
        folder: new folder for their files.
        base: folder of the model and the first adapter.
        work: ``grpo`` or ``distil``.
        cfg: our config.
        describe: see :data:`Describe`.
        steps: steps of the run.
        given: number of first steps whose answers are given.
        installed: run the peer with this environment's packages.
    """
    folder.mkdir()
    (folder / "peft").symlink_to(base / "peft")
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    logger = {"_component_": "tools.benchmarks.sides.talk.StepLogger", "values": ["grad_norm", "updates"],
              "sign": "flat"}  # fmt: skip
    cfg.update({"steps": steps, "save_every_n_steps": steps, "output_dir": str(folder / "out"),
                "metric_logger": logger})  # fmt: skip
    rows, answers, more = describe(cfg, given)
    (folder / "prompts.jsonl").write_text(
        "".join(
            json.dumps({key: row.get(key) for key in ("prompt", "answer")}) + "\n" for row in rows
        )
    )
    (folder / "given.json").write_text(json.dumps(answers))
    OmegaConf.save(cfg, folder / "ours.yaml")
    theirs = {
        "work": work, "model": str(base / "pocket"), "steps": steps, "prompts": cfg.prompts_per_step, "samples": 1,
        "updates": 1, "max_new_tokens": cfg.max_new_tokens, "batch_size": BATCH, "lr": cfg.optimizer.lr,
        "given": [[tokens for group in step.values() for tokens in group] for step in answers],
        "out": str(folder / PEER), **more,
    }  # fmt: skip
    (folder / "theirs.json").write_text(json.dumps(theirs))
    ours = [
        "-m",
        "tools.benchmarks.sides.grpo_ours",
        folder / "given.json",
        "--config",
        folder / "ours.yaml",
    ]
    yield stack.enter_context(Side(OURS, Path(sys.executable), ours, folder / "ours.log"))
    python, arguments = (
        peers.python("trl", installed=installed),
        ["-m", "tools.benchmarks.sides.rl_trl"],
    )
    yield stack.enter_context(
        Side(PEER, python, [*arguments, folder / "theirs.json"], folder / "theirs.log")
    )


def check(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest relative difference of the peer's gradient norms from ours, whose answer is the first.

    Raises:
        Failed: it exceeds the tolerance.
    """
    ours, theirs = ([step[1] for step in answer["steps"]] for answer in answers)
    apart = difference(theirs, ours)
    if not apart <= TOLERANCE:  # also NaN
        raise Failed(f"gradient norms differ by {apart:.1e}: {ours} against {theirs}")
    return apart


def write_adapter(base: Path, cfg: DictConfig) -> None:
    """Write the first adapter of both sides as ``peft/`` in ``base``."""
    decoder = build_model(cfg.model, torch.float32, 7, torch.device("cpu"))
    (base / "peft").mkdir()
    peft_files.write_adapter(
        base / "peft", decoder, cfg.checkpointer.model_type, str(base / "pocket")
    )


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return an answer's tokens with its end."""
    return [
        *tokenizer.encode(text, add_bos=False, add_eos=False),
        tokenizer.special_tokens["<|im_end|>"],
    ]


def widen(folder: Path) -> None:
    """Give the pocket model in ``folder`` the size of :data:`WIDE`; it computes the same.

    What is added to the residual stream is zero, and so is what more heads, wider layers and more layers write into
    it. At 4 times the width, zeros halve the root of the mean square; a norm's scale and epsilon make up for that.
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
        if (
            name.endswith(("o_proj.weight", "down_proj.weight"))
            or name == "model.embed_tokens.weight"
        ):
            value.zero_()
        if name in narrow:
            of_norm = name.endswith("norm.weight")
            value[tuple(map(slice, narrow[name].shape))] = narrow[name] * (
                (old / new) ** 0.5 if of_norm else 1
            )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(card))


def vocabulary(folder: Path) -> int:
    """Return the number of tokens of the model in ``folder``."""
    card = json.loads((folder / "config.json").read_text())
    return card["vocab_size"]


def parameters(folder: Path) -> float:
    """Count the weights of the model in ``folder``."""
    return float(sum(value.numel() for value in load_file(folder / "model.safetensors").values()))
