"""On-policy distillation: the model answers, and learns at each token what its teacher would say (GKD)."""

import json
import math
import random
from pathlib import Path

from rocm_ext import training


def main(pocket="demo/pocket", teacher="demo/sft/adapter", steps=20, prompts=256):
    """Train the pocket model on what its teacher would say."""
    draw = random.Random(0)
    lines = Path(pocket, "train.jsonl").read_text().splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    with training.open(
        "cpu_pocket_distil", f"pocket={pocket}", output_dir="demo/python_distil"
    ) as model:
        taught = model.teacher(pocket, adapter=teacher)
        for step in range(steps):
            answers = model.sample(draw.sample(questions, prompts), max_new_tokens=32)
            rows = [answer.row() for group in answers for answer in group]
            rate = 2e-3 * (1 + math.cos(math.pi * step / steps)) / 2
            for _ in range(2):
                draw.shuffle(rows)
                for start in range(0, len(rows), 64):
                    output = model.forward_backward(rows[start : start + 64], "jsd", teacher=taught)
                    model.optim_step(lr=min(rate, 2e-3 * (model.step + 1) / 10))
            print(f"step {step + 1}: divergence {output.loss:.4f}")
        model.export("demo/python_distil/adapter")


if __name__ == "__main__":
    main()
