"""Runs of the pocket model on the device: SFT, DPO, RAFT, GRPO and distillation, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from rocm_ext.base.files import read_lines
from tools.benchmarks.protocol import Failed
from tools.gpu.here import Here, Row, check

CONFIGS = {"lora_finetune_rocm": "cpu_pocket", "dpo_rocm": "cpu_pocket_dpo", "raft_rocm": "cpu_pocket_raft",
           "grpo_rocm": "cpu_pocket_grpo", "distil_rocm": "cpu_pocket_distil"}  # fmt: skip
WEIGHTS = "adapter/adapter_model.safetensors"
COMMON = [
    "dtype=fp32",
    "compile=False",
    "save_every_n_steps=3",
    "save_adapter_weights_only=True",
    "metric_logger=null",
]
SAMPLED = [
    "verifier._component_=tests.kit.judges.Coin",
    "verify_workers=1",
    "eval_prompts=null",
    "max_new_tokens=16",
]
TRAINED = ["epochs=1", "max_steps_per_epoch=8", "sequences_per_step=8"]
CHANGES = {
    "lora_finetune_rocm": TRAINED,
    "dpo_rocm": [*TRAINED, "checkpointer.adapter_checkpoint=null"],
    "raft_rocm": [*SAMPLED, "prompts_per_cycle=16", "cycles=2", "epochs=4", "drop_truncated=False",
                  "sequences_per_step=8"],
    "grpo_rocm": [*SAMPLED, "prompts_per_step=8", "steps=8", "groups_per_update=4", "truncated=keep",
                  "eval_every_n_steps=100"],
    # the model in 8 bits differs from itself, so there is something to learn
    "distil_rocm": [*SAMPLED, "prompts_per_step=32", "steps=8", "updates_per_step=1", "groups_per_update=null",
                    "eval_every_n_steps=100", "teacher_adapter=null", "teacher_quantize_base=fp8"],
}  # fmt: skip
PAIRS = 100
CLOSE = 1e-3  # relative, of a step's loss; kernels that add in any order do not repeat their sums bit for bit


class Kill:
    """A metric logger that kills its process right after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def log_dict(self, payload: object, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def log_config(self, config: object) -> None:
        """Do nothing; torchtune's interface requires this method."""

    def close(self) -> None:
        """Do nothing; no file is open."""


def resumed(here: Here, recipe: str) -> Iterator[Row]:
    """Run a recipe undisturbed; run it again with a kill in the middle, and resume it.

    Raises:
        Failed: a run ends otherwise than expected.
    """
    pocket, _ = here.world("pocket", make_pocket)
    undisturbed, killed = (here.folder / f"{recipe}_{name}" for name in ("whole", "killed"))
    run = _runner(here, recipe, pocket)
    run(undisturbed)
    yield check(f"{recipe} runs to its end", True, _said(undisturbed))
    run(
        killed,
        f"metric_logger._component_={__name__}.Kill",
        "metric_logger.step=5",
        ended_by=signal.SIGKILL,
    )
    run(killed, "resume_from_checkpoint=True")
    if recipe in ("lora_finetune_rocm", "dpo_rocm"):
        yield _same_losses(recipe, killed, undisturbed)
    else:
        yield _every_answer_once(recipe, killed, undisturbed)


def make_pocket(folder: Path) -> None:
    """Make a barely trained pocket model, and pairs of right and wrong answers."""
    import torch

    from rocm_ext.pocket import make

    torch.set_num_threads(min(4, torch.get_num_threads()))  # 16 threads in two parts took minutes
    make(folder / "model", seed=7, target=0.01)
    rows = read_lines(folder / "model" / "train.jsonl")
    pairs = [
        {"prompt": row["prompt"], "chosen": _answer(row), "rejected": _answer(other)}
        for row, other in pairwise(islice(rows, PAIRS))
        if row["answer"] != other["answer"]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def _answer(row: dict[str, Any]) -> str:
    return row["messages"][-1]["content"]


def _runner(here: Here, recipe: str, pocket: Path) -> Callable[..., None]:
    changes = [
        f"pocket={pocket / 'model'}",
        f"hardware={'auto' if here.gpu else 'cpu'}",
        *COMMON,
        *CHANGES[recipe],
    ]
    if recipe == "dpo_rocm":
        changes.append(f"dataset.source={pocket / 'pairs.jsonl'}")

    def run(out: Path, *more: str, ended_by: int = 0) -> None:
        run_recipe(recipe, CONFIGS[recipe], *changes, f"output_dir={out}", *more, ended_by=ended_by)

    return run


def run_recipe(recipe: str, config: str | Path, *changes: str, ended_by: int = 0) -> None:
    """Run a recipe in a separate process: torchtune starts CUDA as it is imported, and no fork survives that.

    Args:
        recipe: its name.
        config: name or file.
        changes: ``key=value``.
        ended_by: the signal that ends the run.

    Raises:
        Failed: it ends otherwise.
    """
    command = [
        sys.executable,
        "-m",
        f"rocm_ext.recipes.{recipe}",
        "--config",
        str(config),
        *changes,
    ]
    top = str(Path(__file__).parents[2])  # of the kill and of the judges that configs name
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [top, os.environ.get("PYTHONPATH")]))
    }
    said = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        for line in process.stdout or ():
            print(line, end="")  # into the part's log, whose last line a time limit names
            said = (said + line)[-400:]
    if process.returncode != -ended_by:
        raise Failed(
            f"{recipe} ended with {process.returncode} instead of {-ended_by}: {said.strip()}"
        )


def _losses(out: Path) -> list[float]:
    if not (
        losses := [line["loss"] for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    ):
        raise Failed(f"{out / 'metrics.jsonl'} is missing or has no losses")
    return losses


def _said(out: Path) -> str:
    missing = [path for path in (out / WEIGHTS, out / "summary.json") if not path.exists()]
    if missing:
        raise Failed(f"{missing[0]} is missing")
    return "adapter and summary are written"


def _same_losses(recipe: str, killed: Path, undisturbed: Path) -> Row:
    again, expected = _losses(killed), _losses(undisturbed)
    exact = (killed / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    apart = max(abs(a - b) / abs(b) for a, b in zip(again, expected, strict=False))
    right = len(again) == len(expected) and apart <= CLOSE
    how = "bit for bit" if exact else f"losses off by {apart:.1e} at most"
    return check(
        f"{recipe}, killed and resumed, equals the undisturbed run",
        right,
        f"{len(again)} steps, {how}",
    )


def _every_answer_once(recipe: str, killed: Path, undisturbed: Path) -> Row:
    """A kill neither loses nor repeats an answer; the answers may differ where sums are not repeated bit for bit."""
    again, expected = (_answers(out) for out in (killed, undisturbed))
    right = again.keys() == expected.keys() and set(again.values()) == {1}
    exact = (killed / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    said = f"{sum(again.values())} answers{', adapter bit for bit' if exact else ''}"
    return check(f"{recipe}, killed and resumed, has every answer once", right, said)


def _answers(out: Path) -> Counter:
    return Counter(
        (
            path.parent.name if path.parent != out else "",
            line.get("step"),
            line["prompt_id"],
            line["sample"],
        )
        for path in out.rglob("samples.jsonl")
        for line in read_lines(path, problems=[])
    )
