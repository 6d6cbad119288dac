"""Run TRL's SFTTrainer or DPOTrainer with PEFT, as documented, from a given adapter: ``… train_trl WORK``.

DPO's reference is the model with its adapter disabled.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tools.benchmarks.sides.talk import Pace

GPU = torch.cuda.is_available()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Paced(TrainerCallback):
    """Runs the steps that the harness orders. TRL logs a step's loss after its end."""

    def __init__(self) -> None:
        self.trainer: TokenisedDPO | None = None
        self._pace = Pace(lambda start, end: self.trainer.score(start, end))

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            norm = [float(logs["grad_norm"])] if self.trainer else []
            self._pace.step(float(logs["loss"]), *norm)


class TokenisedDPO(DPOTrainer):
    """Takes pairs of token ids as they are."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset

    def score(self, start: int, end: int) -> None:
        """Compute the reference's log-probs of some pairs."""
        batch = self.args.per_device_train_batch_size
        for at in range(start, end, batch):
            rows = [self.train_dataset[i] for i in range(at, min(at + batch, end))]
            self.compute_ref_log_probs(self.model, self._prepare_inputs(self.data_collator(rows)))


def main() -> None:
    """Train."""
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    batch = work["batch_size"]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = "<|endoftext|>"
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=DTYPES[work["dtype"]],
        attn_implementation="sdpa",
    )
    settings = {
        "output_dir": str(folder / "trl"), "max_steps": work["steps"], "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": work["rows_per_step"] // batch, "train_sampling_strategy": "sequential",
        "learning_rate": work["lr"], "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "weight_decay": 0.01, "bf16": work["dtype"] == "bf16", "fp16": False, "gradient_checkpointing": False,
        "max_length": None, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": not GPU,
    }  # fmt: skip
    paced = Paced()
    shared = {"processing_class": tokenizer, "callbacks": [paced]}
    if work["work"] == "sft":
        options = SFTConfig(
            **settings,
            max_grad_norm=1.0,
            use_liger_kernel=GPU and find_spec("liger_kernel") is not None,
        )
        data = Dataset.from_list(
            [{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows]
        )
        model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
        trainer = SFTTrainer(model=model, args=options, train_dataset=data, **shared)
    else:
        options = DPOConfig(
            **settings,
            max_grad_norm=1e9,
            beta=work["beta"],
            precompute_ref_log_probs=work["precompute"],
        )
        lora = LoraConfig.from_pretrained(folder / "peft")
        lora.inference_mode = False
        sides = ("prompt", "chosen", "rejected")
        data = Dataset.from_list([{f"{name}_ids": row[name] for name in sides} for row in rows])
        trainer = paced.trainer = TokenisedDPO(
            model=base, args=options, train_dataset=data, peft_config=lora, **shared
        )  # fmt: skip
        set_peft_model_state_dict(trainer.model, load_peft_weights(folder / "peft"))
    trainer.train()


if __name__ == "__main__":
    main()
