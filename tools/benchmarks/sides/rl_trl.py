"""Run TRL's GRPOTrainer or DistillationTrainer with PEFT on the pocket model, from a given adapter: ``… rl_trl WORK``.

GRPO's verifier judges as a reward function. In the first steps the answers are given, for the gate; then TRL samples.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tools.benchmarks.sides.talk import Pace


class Paced(TrainerCallback):
    """Counts a step each time TRL has logged all updates of its answers."""

    def __init__(self, updates: int) -> None:
        self._pace, self._updates = Pace(), updates
        self._norms: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "grad_norm" in logs:
            self._norms.append(float(logs["grad_norm"]))
            if len(self._norms) == self._updates:
                self._pace.step(sum(self._norms) / self._updates)
                self._norms = []


def given(trainer: type, more: tuple) -> type:
    """Return ``trainer`` with the attribute ``given``: the first steps' answers, as tokens.

    Args:
        trainer: class of TRL.
        more: what its method returns after the answers.
    """

    class Given(trainer):
        given: list[list[list[int]]]

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            if self.given:
                answers = self.given.pop(0)
                assert len(answers) == len(prompt_ids)
                return (answers, *more) if more else answers
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    return Given


def grpo(work: dict[str, Any], answers: int) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """Return the trainer, the config's options, and further arguments of the trainer."""
    from trl import GRPOConfig, GRPOTrainer

    from rocm_ext.verifiers import as_reward_function

    options = GRPOConfig(
        **shared(work), max_steps=work["steps"] * work["updates"], steps_per_generation=answers // work["batch_size"],
        gradient_accumulation_steps=answers // work["batch_size"] // work["updates"],
        num_generations=work["samples"], loss_type="dapo", epsilon=work["clip_low"], epsilon_high=work["clip_high"],
        delta=work["clip_dual"], beta=0.0, scale_rewards={"std": "group", "none": "none"}[work["scale"]],
        mask_truncated_completions=True,
    )  # fmt: skip
    return (
        given(GRPOTrainer, (None,)),
        options,
        {"reward_funcs": as_reward_function(work["verifier"])},
    )


def distil(work: dict[str, Any], answers: int) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """See :func:`grpo`."""
    from trl import DistillationConfig, DistillationTrainer

    options = DistillationConfig(
        **shared(work), max_steps=work["steps"], gradient_accumulation_steps=answers // work["batch_size"],
        beta=work["beta"], adam_beta1=work["betas"][0], adam_beta2=work["betas"][1],
    )  # fmt: skip
    teacher = AutoModelForCausalLM.from_pretrained(work["teacher"], dtype="float32")
    return given(DistillationTrainer, ()), options, {"teacher_model": teacher}


def shared(work: dict[str, Any]) -> dict[str, Any]:
    """Return the options of both trainers."""
    return {
        "output_dir": work["out"], "per_device_train_batch_size": work["batch_size"],
        "max_completion_length": work["max_new_tokens"], "temperature": 1.0, "top_k": 0, "shuffle_dataset": False,
        "learning_rate": work["lr"], "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": False, "gradient_checkpointing": False,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip


def main() -> None:
    """Train until the harness ends this process."""
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    base = AutoModelForCausalLM.from_pretrained(work["model"], dtype="float32")
    model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
    make = {"grpo": grpo, "distil": distil}[work["work"]]
    trainer_of, options, more = make(work, work["prompts"] * work["samples"])
    data = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    trainer = trainer_of(
        model=model, args=options, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
        callbacks=[Paced(work["updates"])], **more,
    )  # fmt: skip
    trainer.given = work["given"]
    trainer.train()


if __name__ == "__main__":
    main()
