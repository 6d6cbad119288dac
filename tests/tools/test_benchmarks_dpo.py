"""The benchmark of DPO: its pairs, its gate, its arithmetic."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from tools.benchmarks import dpo, work
from tools.benchmarks.protocol import ROOT, Failed, Side

ARGS = SimpleNamespace(gpu=False, attention="sdpa")


def test_pairs_are_written_as_they_are_described(tmp_path):
    steps = work.write_pair_steps(tmp_path / "rows.jsonl", 1000, short=3, full=2)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    sides = [(len(row["prompt"]) + len(row[side]), len(row[side])) for row in rows for side in ("chosen", "rejected")]
    assert [counts for step in steps for counts in step] == sides
    assert len(rows) == 5 * dpo.PAIRS_PER_STEP
    first, second, third, *_ = (rows[i : i + dpo.PAIRS_PER_STEP] for i in range(0, len(rows), dpo.PAIRS_PER_STEP))
    assert first == second == third, "the gate repeats its pairs"
    assert max(tokens for tokens, _ in steps[0]) <= 24 < min(tokens for tokens, _ in steps[3])


def test_most_prompts_have_100_to_200_tokens():
    prompts, chosen, rejected = work.pair_lengths(np.random.default_rng(0), 20000)
    assert ((prompts >= 100) & (prompts <= 200)).mean() > 0.9
    ratios = rejected / chosen
    assert np.median(ratios) == pytest.approx(1, rel=0.02)
    assert 0.2 < (ratios > 1.25).mean() < 0.3


def test_a_side_scores_between_its_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = """from tools.benchmarks.sides.talk import Pace
scored = []
pace = Pace(lambda start, end: scored.extend(range(start, end)))
for i in range(3): pace.step(i, sum(scored))"""
    (tmp_path / "side.py").write_text(code)
    with Side("peer", sys.executable, [str(tmp_path / "side.py")], tmp_path / "log") as side:
        assert [values for _, *values in side.ask(steps=1)["steps"]] == [[0, 0]]
        assert side.ask(score=[4, 7])["seconds"] >= 0
        assert [values for _, *values in side.ask(steps=2)["steps"]] == [[1, 15], [2, 15]]


@pytest.mark.parametrize(("losses", "norms", "told"), [
    ([0.7, 0.500001], [1.0, 2.0001], None), ([0.7, 0.501], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, 2.01], "gradient norms of peer"), ([0.7, float("nan")], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, float("nan")], "gradient norms of peer"),
])  # fmt: skip
def test_other_losses_or_gradients_close_the_gate(losses, norms, told):
    found = {dpo.OURS: ([0.7, 0.5], [1.0, 2.0]), "peer": (losses, norms)}
    with pytest.raises(Failed, match=told) if told else nullcontext():
        assert dpo.check(found, dpo.TOLERANCES["fp32"])["peer"] == pytest.approx(2e-6)


@pytest.mark.parametrize(("name", "tokens", "logits", "epoch", "step"), [
    (dpo.OURS, 2 * (10 + 5 + 3 + 20 + 1 + 2), 22, 1.5, 1.0), (dpo.WHOLE, 2 * (15 + 13 + 21 + 22), 22, 1.5, 1.0),
    ("torchtune", 8 * 22, 8 * 22, 1.5, 1.5), ("TRL + PEFT, reference first", 8 * 22, 8 * 22, 1.5, 1.0),
])  # fmt: skip
def test_arithmetic_of_four_pairs(name, tokens, logits, epoch, step):
    """Prompts have 10 and 20 tokens, answers 5, 3, 1 and 2, all twice."""
    timed, task = [2 * [(15, 5), (13, 3), (21, 1), (22, 2)]], work.Task("dpo", "tiny", 512, "fp32", ())
    forward_and_back = work.flops("tiny", 512, tokens, logits)
    for kind, factor in (("dpo", epoch), ("dpo step", step)):
        assert dpo.arithmetic(task, timed, name, kind, ARGS) == pytest.approx(factor * forward_and_back)
