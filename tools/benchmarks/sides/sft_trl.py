"""Run TRL's SFTTrainer with PEFT, as documented, on given rows from a given adapter: ``… sft_trl WORK``."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tools.benchmarks.sides.talk import Pace


class Paced(TrainerCallback):
    """Runs the steps that the harness orders. TRL logs a step's loss after its end."""

    def __init__(self) -> None:
        self._pace = Pace()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self._pace.step(float(logs["loss"]))


def main() -> None:
    """Train."""
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    gpu = torch.cuda.is_available()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = "<|endoftext|>"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[work["dtype"]]
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, attn_implementation=work["attention"] if gpu else "sdpa"
    )
    model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
    batch = work["batch_size"]
    liger = gpu and find_spec("liger_kernel") is not None
    options = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=work["steps"], per_device_train_batch_size=batch,
        gradient_accumulation_steps=work["sequences_per_step"] // batch, train_sampling_strategy="sequential",
        learning_rate=work["lr"], lr_scheduler_type="constant", optim="adamw_torch_fused", weight_decay=0.01,
        max_grad_norm=1.0, bf16=dtype == torch.bfloat16, fp16=False, gradient_checkpointing=False, max_length=None,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not gpu,
        use_liger_kernel=liger, padding_free=gpu and work["attention"] != "sdpa",
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows])
    SFTTrainer(
        model=model, args=options, train_dataset=data, processing_class=tokenizer, callbacks=[Paced()]
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
