"""Run TRL's DistillationTrainer with PEFT on the pocket model from a given adapter: ``… distil_trl WORK``.

In the first steps the answers are given, for the gate; then TRL samples.
"""

import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

from tools.benchmarks.sides.grpo_trl import Paced


class Given(DistillationTrainer):
    """Takes the answers of the first steps from a list, ``given``: for each step the tokens of each answer."""

    given: list[list[list[int]]]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.given:
            answers = self.given.pop(0)
            assert len(answers) == len(prompt_ids)
            return answers
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


def main() -> None:
    """Train."""
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    base, teacher = (AutoModelForCausalLM.from_pretrained(work[key], dtype="float32") for key in ("model", "teacher"))
    model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
    options = DistillationConfig(
        output_dir=work["out"], max_steps=work["steps"], per_device_train_batch_size=work["batch_size"],
        gradient_accumulation_steps=work["prompts"] // work["batch_size"], beta=work["beta"],
        max_completion_length=work["max_new_tokens"], temperature=1.0, top_k=0, shuffle_dataset=False,
        learning_rate=work["lr"], lr_scheduler_type="constant", optim="adamw_torch_fused", weight_decay=0.0,
        adam_beta1=work["betas"][0], adam_beta2=work["betas"][1], max_grad_norm=1.0, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    trainer = Given(model=model, teacher_model=teacher, args=options, train_dataset=data, processing_class=tokenizer,
                    callbacks=[Paced(1)])  # fmt: skip
    trainer.given = work["given"]
    trainer.train()
    os._exit(0)


if __name__ == "__main__":
    main()
