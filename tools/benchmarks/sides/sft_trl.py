"""Run TRL's SFTTrainer with PEFT, as documented, on given rows from a given adapter: ``… sft_trl WORK``."""

from importlib.util import find_spec

from datasets import Dataset
from peft import PeftModel
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tools.benchmarks.sides.talk import Pace
from tools.benchmarks.sides.trl_parts import GPU, open_model, read_work, settings


class Paced(TrainerCallback):
    """Runs the steps that the harness orders. TRL logs a step's loss after its end."""

    def __init__(self) -> None:
        self._pace = Pace()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self._pace.step(float(logs["loss"]))


def main() -> None:
    """Train."""
    work, folder, rows = read_work()
    tokenizer, base = open_model(work, folder)
    model = PeftModel.from_pretrained(base, folder / "peft", is_trainable=True)
    options = SFTConfig(
        **settings(work, folder, work["sequences_per_step"]), max_grad_norm=1.0,
        use_liger_kernel=GPU and find_spec("liger_kernel") is not None,
        padding_free=GPU and work["attention"] != "sdpa",
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["tokens"], "labels": row["labels"]} for row in rows])
    SFTTrainer(
        model=model, args=options, train_dataset=data, processing_class=tokenizer, callbacks=[Paced()]
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
