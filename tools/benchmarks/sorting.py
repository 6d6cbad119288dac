"""A task for :mod:`tools.benchmarks.learning`: a small model sorts digits, and hardly ever without an error."""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from rocm_ext import pocket
from rocm_ext.verifiers import Result, Verdict, Verifier

HELD_OUT, TRAIN, POOL = 400, 3000, 20_000  # rows; the model is trained on the last ones
STEPS = 25  # training steps: a third of the digits are in place, one answer of a thousand is right


@dataclass(frozen=True)
class Problem:
    """Some digits to sort."""

    digits: str

    def row(self, rng: random.Random | None = None) -> dict[str, Any]:
        """Return the problem as a training row, as in :mod:`rocm_ext.pocket`; there is one wording."""
        prompt, answer = f"Sort {self.digits}.", "".join(sorted(self.digits))
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "prompt": prompt, "answer": answer}


class Positions(Verifier):
    """Rewards the share of the answer's digits that stand where they belong; if all do, it is CORRECT."""

    needs = ("answer",)

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        """Judge the last number of a completion."""
        numbers = re.findall(r"\d+", completion)
        if not numbers:
            return Result(Verdict.UNPARSED, 0.0, "no number")
        if numbers[-1] == row["answer"]:
            return Result(Verdict.CORRECT, 1.0)
        same = sum(a == b for a, b in zip(numbers[-1], row["answer"]))  # noqa: B905 - lengths may differ
        return Result(
            Verdict.WRONG,
            same / max(len(numbers[-1]), len(row["answer"])),
            f"{same} digits in place",
        )


def make(folder: Path, count: int = 8, seed: int = 0) -> dict[str, Any]:
    """Train the model in ``folder``, unless it is there, with the files of a pocket model; return its card.

    Args:
        folder: the model's folder.
        count: digits of a problem, 1 to 9.
        seed: seed of the problems and the weights.
    """
    if (folder / pocket.CARD).exists():
        return json.loads((folder / pocket.CARD).read_text())
    rng = random.Random(f"digits {seed}")
    drawn: dict[str, None] = {}
    while len(drawn) < HELD_OUT + TRAIN + POOL:
        drawn["".join(rng.choices("123456789", k=count))] = None
    problems = [Problem(each) for each in drawn]
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"heldout": problems[:HELD_OUT], "train": problems[HELD_OUT : HELD_OUT + TRAIN]}
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(each.row()) + "\n" for each in some)
        )
    pool = problems[HELD_OUT + TRAIN :]
    pocket.write_tokenizer(folder, [each.row() for each in pool])
    tokenizer = pocket.load_tokenizer(folder)
    model = pocket.new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=pocket.LEARNING_RATE)
    for batch in islice(pocket.batches_of(tokenizer, pool, rng), STEPS):
        pocket.update(model, optimizer, *batch)
    pocket.sharpen(model)
    score = pocket.accuracy(model, tokenizer, [each.row() for each in rows["heldout"]])
    pocket.write_model(folder, model, tokenizer)
    card = {"task": "sorting", "steps": STEPS, "correct": score.correct, "total": score.total}
    (folder / pocket.CARD).write_text(json.dumps(card) + "\n")
    return card
