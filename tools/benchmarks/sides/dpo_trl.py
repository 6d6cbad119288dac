"""Run TRL's DPOTrainer with PEFT, as documented, on given pairs from a given adapter: ``… dpo_trl WORK``.

The reference is the model with its adapter disabled.
"""

from datasets import Dataset
from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

from tools.benchmarks.sides.talk import Pace
from tools.benchmarks.sides.trl_parts import open_model, read_work, settings


class Paced(TrainerCallback):
    """Runs the steps that the harness orders. TRL logs a step's loss after its end."""

    def __init__(self) -> None:
        self.trainer: Tokenised | None = None
        self._pace = Pace(lambda start, end: self.trainer.score(start, end))

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self._pace.step(float(logs["loss"]), float(logs["grad_norm"]))


class Tokenised(DPOTrainer):
    """Takes pairs of token ids as they are."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset

    def score(self, start: int, end: int) -> None:
        """Compute the reference's log-probs of some pairs, if the trainer does so before training."""
        batch = self.args.per_device_train_batch_size
        for at in range(start, end if self.args.precompute_ref_log_probs else start, batch):
            rows = [self.train_dataset[i] for i in range(at, min(at + batch, end))]
            self.compute_ref_log_probs(self.model, self._prepare_inputs(self.data_collator(rows)))


def main() -> None:
    """Train."""
    work, folder, rows = read_work()
    tokenizer, base = open_model(work, folder)
    options = DPOConfig(
        **settings(work, folder, work["pairs_per_step"]), max_grad_norm=1e9, beta=work["beta"],
        precompute_ref_log_probs=work["precompute"],
    )  # fmt: skip
    lora = LoraConfig.from_pretrained(folder / "peft")
    lora.inference_mode = False
    data = Dataset.from_list([{f"{name}_ids": row[name] for name in ("prompt", "chosen", "rejected")} for row in rows])
    paced = Paced()
    trainer = paced.trainer = Tokenised(
        model=base, args=options, train_dataset=data, processing_class=tokenizer, callbacks=[paced],
        peft_config=lora,
    )  # fmt: skip
    set_peft_model_state_dict(trainer.model, load_peft_weights(folder / "peft"))
    trainer.train()


if __name__ == "__main__":
    main()
