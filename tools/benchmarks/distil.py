"""Distillation: seconds of a step beside TRL's DistillationTrainer with PEFT, on the pocket model and its teacher.

Both sides start from the same adapter, ask the same prompts in the same order, one answer each, and learn KL(model ||
teacher) over the whole vocabulary with the same optimiser, rate and answers in an update. TRL samples with
transformers' ``generate``. The teacher is the pocket model, or one of 40 million parameters, with weights changed at
random.

Gate: in two steps both get the same answers and must compute the same norm of the gradient, to 1e-4.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from rocm_ext import config
from rocm_ext.data.batches import Steps
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import build_model
from rocm_ext.pocket import load_tokenizer
from rocm_ext.rl.prompts import PromptSet
from tools.benchmarks import peers
from tools.benchmarks.grpo import BATCH, GATE, OURS, TURN, WARM_UP, check, parameters, widen
from tools.benchmarks.protocol import Ratio, Side, both, in_turn
from tools.benchmarks.work import pocket

PEER = "TRL + PEFT"
NOISE = 0.1  # of each weight's standard deviation
STEPS = ["prompts_per_step=256", "updates_per_step=1", "groups_per_update=null", "optimizer.lr=3e-4",
         "lr_scheduler=null", "verifier=null", "eval_prompts=null"]  # fmt: skip


def measure(base: Path, rounds: int, installed: bool = False, wide: bool = False) -> list[dict]:
    """Gate and time the sides; return a row of the table.

    Args:
        base: empty folder.
        rounds: turns of each side.
        installed: run the peer with this environment's packages.
        wide: with a teacher of 40 million parameters.

    Raises:
        Failed: the sides compute different gradients, or one ends early.
    """
    steps = WARM_UP + rounds * TURN
    cfg = prepare(base, wide)
    with ExitStack() as stack:
        apart = check([side.ask(steps=GATE) for side in start(stack, base / "gate", base, cfg, GATE, GATE, installed)])
    with ExitStack() as stack:
        sides, last, until_warm = [], {}, {}
        for side in start(stack, base / "timed", base, cfg, steps, 0, installed):
            side.ask(steps=WARM_UP)
            until_warm[side.name] = time.perf_counter() - side.began
            sides.append(side)
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        for side in in_turn(sides, rounds):
            last[side.name] = side.ask(steps=TURN)
            seconds[side.name].append(sum(step[0] for step in last[side.name]["steps"]))
    step = {name: statistics.median(each) / TURN for name, each in seconds.items()}
    return [
        {
            "work": "distil", "peer": PEER, "vocab": 320, "dtype": "fp32", "parameters": parameters(base / "teacher"),
            **Ratio.of(seconds[PEER], seconds[OURS]).describe(), "bound": None, "norm_difference": apart,
            "answers": cfg.prompts_per_step, "steps": steps, "rounds": rounds, **both(last[OURS], last[PEER]),
            "step_seconds": [step[OURS], step[PEER]],
            "until_warm": [max(0.0, until_warm[name] - step[name] * WARM_UP) for name in (OURS, PEER)],
        }
    ]  # fmt: skip


def prepare(base: Path, wide: bool) -> DictConfig:
    """Make the model, its teacher and the first adapter; return the sides' common config."""
    pocket(base)
    (base / "teacher").mkdir()
    for file in (base / "pocket").iterdir():
        if file.is_file():
            (base / "teacher" / file.name).write_bytes(file.read_bytes())
    if wide:
        widen(base / "teacher")
    weights = load_file(base / "teacher" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {name: w + NOISE * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(noisy, base / "teacher" / "model.safetensors", {"format": "pt"})
    given = [f"pocket={base}/pocket", f"teacher={base}/teacher", "teacher_adapter=null", f"output_dir={base}/out",
             f"checkpointer.adapter_checkpoint={base}/peft"]  # fmt: skip
    cfg = config.load("distil_rocm", "cpu_pocket_distil", [*given, *STEPS])
    decoder = build_model(cfg.model, torch.float32, 7, torch.device("cpu"))
    (base / "peft").mkdir()
    peft_files.write_adapter(base / "peft", decoder, cfg.checkpointer.model_type, str(base / "pocket"))
    return cfg


def start(
    stack: ExitStack, folder: Path, base: Path, cfg: DictConfig, steps: int, given: int, installed: bool
) -> Iterator[Side]:
    """Start the sides; arguments as of :func:`tools.benchmarks.grpo.start`."""
    folder.mkdir()
    (folder / "peft").symlink_to(base / "peft")
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    logger = {"_component_": "tools.benchmarks.sides.talk.StepLogger", "values": ["grad_norm"], "sign": "flat"}
    cfg.update({"steps": steps, "save_every_n_steps": steps, "output_dir": str(folder / "out"),
                "metric_logger": logger})  # fmt: skip
    prompts = PromptSet(cfg)
    order = Steps(len(prompts.training), cfg.prompts_per_step, data_seed=cfg.seed)
    asked = [[prompts.training[i].row for i in order[step]] for step in range(steps)]
    ids = [[prompts.training[i].id for i in order[step]] for step in range(given)]
    tokenizer = load_tokenizer(base / "pocket")
    end = tokenizer.special_tokens["<|im_end|>"]

    def answers(rows: Sequence[dict]) -> list[list[int]]:
        texts = [row["messages"][-1]["content"] for row in rows]
        return [[*tokenizer.encode(text, add_bos=False, add_eos=False), end] for text in texts]

    told = [answers(rows) for rows in asked[:given]]
    by_id = [{each: [tokens] for each, tokens in zip(*step, strict=True)} for step in zip(ids, told, strict=True)]
    (folder / "given.json").write_text(json.dumps(by_id))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": r["prompt"]}) + "\n" for s in asked for r in s))
    OmegaConf.save(cfg, folder / "ours.yaml")
    work = {
        "model": str(base / "pocket"), "teacher": str(base / "teacher"), "steps": steps, "given": told,
        "prompts": cfg.prompts_per_step, "max_new_tokens": cfg.max_new_tokens, "batch_size": BATCH,
        "lr": cfg.optimizer.lr, "betas": list(cfg.optimizer.betas), "beta": cfg.beta, "out": str(folder / PEER),
    }  # fmt: skip
    (folder / "theirs.json").write_text(json.dumps(work))
    ours = ["-m", "tools.benchmarks.sides.grpo_ours", folder / "given.json", "--config", folder / "ours.yaml"]
    yield stack.enter_context(Side(OURS, Path(sys.executable), ours, folder / "ours.log"))
    theirs = ["-m", "tools.benchmarks.sides.distil_trl", folder / "theirs.json"]
    yield stack.enter_context(Side(PEER, peers.python("trl", installed=installed), theirs, folder / "theirs.log"))
