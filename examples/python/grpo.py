"""GRPO: sample groups of answers, verify them, and learn from those above the mean of their group."""

import json
import math
import random
from pathlib import Path

from rocm_ext import training
from rocm_ext.verifiers import MathAnswer

verify = MathAnswer()  # compares the last number with the row's answer


def read(path):
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def accuracy(model, problems):
    """Return the share of right greedy answers."""
    questions = [problem["prompt"] for problem in problems]
    right = 0
    groups = model.sample(questions, max_new_tokens=32, temperature=0)
    for problem, (answer,) in zip(problems, groups, strict=True):
        right += verify(answer.text, problem).reward
    return right / len(problems)


def rows_of(problem, answers):
    """Return the answers with a reward above their group's mean, as rows with their advantages."""
    rewards = [verify(answer.text, problem).reward for answer in answers]
    mean = sum(rewards) / len(rewards)
    rows = []
    for answer, reward in zip(answers, rewards, strict=True):
        if reward > mean:
            rows.append(answer.row(advantages=reward - mean))
    return rows


def main(pocket="demo/pocket", steps=4, prompts=1280, passes=6):
    """Train the pocket model, and print its share of right answers after each step."""
    draw = random.Random(0)
    problems = read(f"{pocket}/train.jsonl")
    held_out = read(f"{pocket}/heldout.jsonl")
    with training.open(
        "cpu_pocket_grpo", f"pocket={pocket}", output_dir="demo/python_grpo"
    ) as model:
        print(f"before: {accuracy(model, held_out):.1%} right")
        for step in range(steps):
            chosen = draw.sample(problems, prompts)
            groups = model.sample([p["prompt"] for p in chosen], samples=4, max_new_tokens=32)
            rows = []
            for problem, answers in zip(chosen, groups, strict=True):
                rows += rows_of(problem, answers)
            for number in range(passes):
                draw.shuffle(rows)
                done = (step + number / passes) / steps
                rate = 2e-3 * (1 + math.cos(math.pi * done)) / 2
                for start in range(0, len(rows), 96):
                    model.forward_backward(rows[start : start + 96], "cispo", clip_high=0.01)
                    model.optim_step(lr=min(rate, 2e-3 * (model.step + 1) / 16))
            print(f"step {step + 1}: {accuracy(model, held_out):.1%} right")
        model.export("demo/python_grpo/adapter")


if __name__ == "__main__":
    main()
