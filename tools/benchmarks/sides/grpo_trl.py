"""Run TRL's GRPOTrainer with PEFT on the pocket model from a given adapter: ``… grpo_trl WORK``.

The verifier judges as a reward function. In the first steps the answers are given, for the gate; then TRL samples.
"""

import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rocm_ext.verifiers import as_reward_function
from tools.benchmarks.sides.talk import Pace, pipe


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


class Given(GRPOTrainer):
    """Takes the answers of the first steps from a list, ``given``: for each step the tokens of each answer."""

    given: list[list[list[int]]]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.given:
            answers = self.given.pop(0)
            assert len(answers) == len(prompt_ids)
            return answers, None
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


def main() -> None:
    """Train, then write the adapter and tell its folder."""
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    base = AutoModelForCausalLM.from_pretrained(work["model"], dtype="float32")
    model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
    answers, batch = work["prompts"] * work["samples"], work["batch_size"]
    options = GRPOConfig(
        output_dir=work["out"], max_steps=work["steps"] * work["updates"], per_device_train_batch_size=batch,
        steps_per_generation=answers // batch, gradient_accumulation_steps=answers // batch // work["updates"],
        num_generations=work["samples"], max_completion_length=work["max_new_tokens"], temperature=1.0, top_k=0,
        shuffle_dataset=False, loss_type="dapo", epsilon=work["clip_low"], epsilon_high=work["clip_high"],
        delta=work["clip_dual"], beta=0.0, scale_rewards={"std": "group", "none": "none"}[work["scale"]],
        mask_truncated_completions=True,
        learning_rate=work["lr"], lr_scheduler_type="constant", optim="adamw_torch_fused", weight_decay=0.0,
        max_grad_norm=1.0, bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
        use_transformers_continuous_batching=work["continuous"],
    )  # fmt: skip
    data = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    reward = as_reward_function(work["verifier"])
    trainer = Given(
        model=model, args=options, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
        reward_funcs=reward, callbacks=[Paced(work["updates"])],
    )  # fmt: skip
    trainer.given = work["given"]
    trainer.train()
    adapter = Path(work["out"]) / "adapter"
    model.save_pretrained(adapter)
    pipe().send({"adapter": str(adapter)})
    reward.close()
    os._exit(0)


if __name__ == "__main__":
    main()
