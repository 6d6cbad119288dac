"""DPO: learn from pairs of a right and a wrong answer, which `rocm-ext pairs` took from a run of RAFT."""

import json
import math
import random
from pathlib import Path

from rocm_ext import training


def main(pocket="demo/pocket", run="demo/raft", epochs=2, pairs_per_step=32):
    """Train the adapter of a run on its pairs."""
    draw = random.Random(0)
    pairs = [json.loads(line) for line in Path(run, "pairs.jsonl").read_text().splitlines()]
    overrides = f"pocket={pocket}", f"checkpointer.adapter_checkpoint={run}/adapter"
    with training.open("cpu_pocket_dpo", *overrides, output_dir="demo/python_dpo") as model:
        rows = model.with_reference(pairs)  # log-probs of the model as it begins
        steps = epochs * math.ceil(len(rows) / pairs_per_step)
        for _ in range(epochs):
            order = draw.sample(range(len(rows)), len(rows))
            for start in range(0, len(rows), pairs_per_step):
                step = rows.part(order[start : start + pairs_per_step])
                output = model.forward_backward(step, "dpo", rpo_alpha=1.0)
                rate = 1e-3 * (1 + math.cos(math.pi * model.step / steps)) / 2
                model.optim_step(lr=min(rate, 1e-3 * (model.step + 1) / 10))
        print(f"{model.step} steps; accuracy of the last: {output.metrics['accuracy']:.0%}")
        model.export("demo/python_dpo/adapter")


if __name__ == "__main__":
    main()
