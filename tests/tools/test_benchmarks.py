"""The benchmark harness: its gates can fail, and its arithmetic is right."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from rocm_ext.losses import CrossEntropy
from rocm_ext.model import build, lora
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import build_model
from rocm_ext.model.hf.decoder import TransformersDecoder
from rocm_ext.model.native.decoder import NativeDecoder
from tests.kit.parity import our_model
from tests.kit.processes import wait_for_end
from tools.benchmarks import __main__ as command
from tools.benchmarks import (
    beside,
    dpo,
    experts,
    protocol,
    sampling,
    sft,
    training,
    unpacking,
    work,
)
from tools.benchmarks.protocol import ROOT, Failed, Ratio, Side, take_turns


# ------------------------------------------------------------------------------------------------------- sides
@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def side(tmp_path, code: str) -> Side:
    (tmp_path / "side.py").write_text(
        "from tools.benchmarks.sides.talk import Pace, hear, pipe\n" + code
    )
    return Side("peer", sys.executable, [str(tmp_path / "side.py")], tmp_path / "log")


def test_a_side_does_as_many_steps_as_it_is_told(tmp_path):
    with side(tmp_path, "pace = Pace()\nfor i in range(10): pace.step(float(i))") as peer:
        assert [loss for _, loss in peer.ask(steps=3)["steps"]] == [0, 1, 2]
        answer = peer.ask(steps=2)
        assert [loss for _, loss in answer["steps"]] == [3, 4]
        assert all(seconds >= 0 for seconds, _ in answer["steps"])
        assert answer["peak_memory"] > 2**20


@pytest.mark.parametrize(
    "code", ["raise ValueError('torn')", "hear(); print('torn'); raise SystemExit(3)"]
)
def test_a_side_that_ends_is_told_with_its_last_words(tmp_path, code):
    with side(tmp_path, code) as peer, pytest.raises(Failed, match=r"(?s)peer ended:.*torn"):
        peer.ask(steps=1)


def test_a_side_that_hangs_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "PATIENCE", 0.5)
    with (
        side(tmp_path, "import time; time.sleep(600)") as peer,
        pytest.raises(Failed, match="has not answered"),
    ):
        peer.ask(steps=1)


ENDED = """
import os, signal, sys
from pathlib import Path
from tools.benchmarks.protocol import Side
with Side("peer", sys.executable, ["-c", "import time; time.sleep(600)"], Path("log")) as side:
    print(side._process.pid, flush=True)
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    signal.pause()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_side_ends_with_the_benchmark(tmp_path, how):
    ended = subprocess.run([sys.executable, "-c", ENDED, how], capture_output=True, text=True, cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert ended.returncode
    wait_for_end(int(ended.stdout), seconds=10)


def test_a_failed_comparison_loses_no_other(tmp_path, monkeypatch, capsys):
    def compared(folder, task, **_):
        if task.vocab == 1:
            raise Failed("closed")
        return []

    monkeypatch.setitem(command.COMPARE, "sft", compared)
    cycle = {"work": "cycle", "runs": 1, "outside": 0.1, "range": [0, 1]}
    monkeypatch.setattr(command.cycle, "measure", lambda folder, runs: [cycle])
    monkeypatch.setattr(
        sys, "argv", ["x", "--work", "sft", "cycle", "--shape", "tiny", "--vocab", "1", "2"]
    )
    with pytest.raises(SystemExit) as left:
        command.main()
    captured = capsys.readouterr()
    assert (left.value.code, captured.err.count("failed: closed"), "10.0%" in captured.out) == (
        1,
        1,
        True,
    )


def test_sides_take_turns_and_ratios_are_of_the_same_round():
    order = []
    assert take_turns({side: side for side in "ABC"}, 3, order.append) == dict.fromkeys(
        "ABC", [None] * 3
    )
    assert "".join(order) == "ABCCBAABC"
    found = Ratio.of([2.0, 30.0, 4.0], [1.0, 10.0, 1.0])
    assert (found.median, found.low, found.high) == (3.0, 2.0, 4.0)


# -------------------------------------------------------------------------------------------------------- work


def test_steps_are_written_as_they_are_described(tmp_path):
    steps = work.write_steps(tmp_path / "rows.jsonl", 1000, short=2, full=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    described = [row for step in steps for row in step]
    assert len(rows) == 3 * work.SEQUENCES_PER_STEP
    assert [
        (len(r["tokens"]), sum(label != -100 for label in r["labels"])) for r in rows
    ] == described
    assert max(tokens for tokens, _ in steps[0]) <= 24 < min(tokens for tokens, _ in steps[2])
    padded = [work.padded([[(3, 1), (5, 2), (2, 1), (2, 2)]], batch) for batch in (1, 2, 4)]
    assert padded == [12, 14, 20]


@pytest.mark.parametrize(("shape", "tokens"), [("tiny", 96), ("qwen3-tiny", 32)])
def test_saved_work_is_counted_as_torch_counts_it(tmp_path, shape, tokens):
    """Count the matrix products of one of our steps, up to adapters of rank 1 and short attention."""
    vocab, trained = 512, 40 * tokens // 96
    folder = work.write_random_model(tmp_path / "model", shape, vocab)
    cfg = OmegaConf.create({**work.model_config(folder, shape), "lora_rank": 1})
    decoder = build_model(cfg, torch.float32, 0, torch.device("cpu"))
    frozen = sum(
        p.numel() for name, p in decoder.named_parameters() if "lora_" not in name and p.ndim == 2
    )
    assert work.parameters(shape, vocab) == frozen
    decoder.to_empty(device="cpu")  # the values do not matter
    lora.init_adapters(decoder, 0, torch.device("cpu"))
    width = work.SHAPES[shape]["hidden_size"]
    head = torch.zeros(width, vocab)
    with FlopCounterMode(display=False) as counter:
        hidden = torch.zeros(
            1, tokens, width, requires_grad=True
        )  # a deeper layer's input needs a gradient
        for layer in decoder.layers:
            hidden = layer(hidden)
        targets = torch.zeros(trained, dtype=torch.int64)
        CrossEntropy()(
            lambda h: h @ head, hidden[0, :trained], targets, {}, torch.zeros_like(targets)
        ).backward()
    assert counter.get_total_flops() == pytest.approx(
        work.flops(shape, vocab, tokens, trained), rel=0.12
    )


@torch.no_grad()
def test_the_twin_is_the_same_model_without_a_native_decoder(tmp_path):
    work.write_random_model(tmp_path / "model", "qwen3-tiny", 512)
    work.write_foreign_twin(tmp_path / "twin", tmp_path / "model")
    work.write_adapter(tmp_path, "qwen3-tiny")
    native, foreign = (
        our_model(tmp_path / name, **work.LORA_OF_FOLDER) for name in ("model", "twin")
    )
    assert isinstance(native, NativeDecoder)
    assert isinstance(foreign, TransformersDecoder)
    assert foreign.packs
    tokens = torch.arange(10, 40)[None]
    torch.testing.assert_close(foreign(tokens), native(tokens), rtol=1e-5, atol=1e-5)
    for decoder in (native, foreign):  # both start from the same adapter
        build.check_adapter(
            decoder, peft_files.read_adapter(tmp_path / "peft", decoder, "HF"), "peft"
        )


# ------------------------------------------------------------------------------------------------------- gates
@pytest.mark.parametrize(
    ("found", "passes"), [(1.000001, True), (1.01, False), (float("nan"), False)]
)
def test_losses_that_differ_close_the_gate(found, passes, tmp_path, monkeypatch):
    losses = {"ours": 1.0, "TRL + PEFT": found}

    def started(name, *_):
        steps = {"steps": [(1.0, losses[name])] * training.GATE}
        return SimpleNamespace(name=name, began=0.0, ask=lambda steps=0, answer=steps: answer)

    monkeypatch.setattr(training, "Side", started)
    monkeypatch.setattr(training, "command", lambda *_: [])
    monkeypatch.setattr(training.peers, "python", lambda *_: "")
    task = work.Task("sft", "tiny", 512, "fp32", ("TRL + PEFT",))
    stack = SimpleNamespace(enter_context=lambda each: each)
    closed = nullcontext() if passes else pytest.raises(Failed, match=r"losses of TRL \+ PEFT")
    with closed:
        args = SimpleNamespace(gpu=False, installed=True)
        assert training.gate(stack, sft.WORK, tmp_path, task, 1, args)[1][
            "TRL + PEFT"
        ] == pytest.approx(1e-6)


@pytest.mark.parametrize(("change", "message"), [
    ({}, None), ({"greedy": [[1, 2]]}, "greedy answers of peer differ"),
    ({"behind": 0.5}, "less probable than the best"), ({"bias": 1.0}, "tokens sampled by ours are off"),
    ({"said": 0.5}, "our log-probabilities have mean"),
])  # fmt: skip
def test_other_answers_close_the_gate(change, message):
    rng = np.random.default_rng(0)
    surprise = (rng.normal(change.get("bias", 0.0), 1.0, 1000)).tolist()
    said = [-1.0 + change.get("said", 0.0)] * 10
    judged = {"behind": change.get("behind", 0.0), "surprise": surprise, "logprobs": [-1.0] * 10}

    with pytest.raises(Failed, match=message) if message else nullcontext():
        sampling.check_greedy("peer", change.get("greedy", [[1, 1]]), [[1, 1]], judged, "fp32")
        sampling.check_sampled("ours", {"logprobs": said}, judged, "fp32")


@pytest.mark.parametrize(
    ("way", "counted"), [("ours", (170, 130)), ("each row", (520, 400)), ("all logits", (520,) * 2)]
)
def test_what_a_way_to_sample_computes(way, counted):
    """Prompts have 10 and 30 tokens, answers 5, 10, 15 and 100."""
    task = work.Task("sampling", "tiny", 512, "fp32", ())
    prompts, trace = [[1] * 10, [1] * 30], [5, 10, 15, 100]
    layers, head = (work.flops("tiny", 512, *each) for each in ((1, 0), (0, 1)))
    expected = counted[0] * layers + counted[1] * head
    assert sampling.computed(task, prompts, trace, way) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------- DPO
ARGS = SimpleNamespace(gpu=False, attention="sdpa")


def test_pairs_are_written_as_they_are_described(tmp_path):
    steps = work.write_pair_steps(tmp_path / "rows.jsonl", 1000, short=3, full=2)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    sides = [
        (len(row["prompt"]) + len(row[side]), len(row[side]))
        for row in rows
        for side in ("chosen", "rejected")
    ]
    assert [counts for step in steps for counts in step] == sides
    pairs = dpo.WORK.rows
    assert len(rows) == 5 * pairs
    first, second, third, *_ = (rows[i : i + pairs] for i in range(0, len(rows), pairs))
    assert first == second == third, "the gate repeats its pairs"
    assert max(tokens for tokens, _ in steps[0]) <= 24 < min(tokens for tokens, _ in steps[3])


def test_a_side_scores_between_its_steps(tmp_path):
    code = """scored = []
pace = Pace(lambda start, end: scored.extend(range(start, end)))
for i in range(3): pace.step(i, sum(scored))"""
    with side(tmp_path, code) as peer:
        assert [values for _, *values in peer.ask(steps=1)["steps"]] == [[0, 0]]
        assert peer.ask(score=[4, 7])["seconds"] >= 0
        assert [values for _, *values in peer.ask(steps=2)["steps"]] == [[1, 15], [2, 15]]


@pytest.mark.parametrize(("losses", "norms", "told"), [
    ([0.7, 0.500001], [1.0, 2.0001], None), ([0.7, 0.501], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, 2.01], "gradient norms of peer"), ([0.7, float("nan")], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, float("nan")], "gradient norms of peer"),
])  # fmt: skip
def test_other_losses_or_gradients_close_the_gate(losses, norms, told):
    found = {training.OURS: ([0.7, 0.5], [1.0, 2.0]), "peer": (losses, norms)}
    with pytest.raises(Failed, match=told) if told else nullcontext():
        assert training.check(found, dpo.WORK.tolerances["fp32"])["peer"] == pytest.approx(2e-6)


@pytest.mark.parametrize(("name", "tokens", "logits", "epoch", "step"), [
    (training.OURS, 2 * (10 + 5 + 3 + 20 + 1 + 2), 22, 1.5, 1.0), (dpo.UNSHARED, 2 * (15 + 13 + 21 + 22), 22, 1.5, 1.0),
    ("torchtune", 8 * 22, 8 * 22, 1.5, 1.5), ("TRL + PEFT, reference first", 8 * 22, 8 * 22, 1.5, 1.0),
])  # fmt: skip
def test_arithmetic_of_four_pairs(name, tokens, logits, epoch, step):
    """Prompts have 10 and 20 tokens, answers 5, 3, 1 and 2, all twice."""
    timed, task = (
        [2 * [(15, 5), (13, 3), (21, 1), (22, 2)]],
        work.Task("dpo", "tiny", 512, "fp32", ()),
    )
    forward_and_back = work.flops("tiny", 512, tokens, logits)
    for kind, factor in (("dpo", epoch), ("dpo step", step)):
        assert training.arithmetic(dpo.WORK, task, timed, name, kind, ARGS) == pytest.approx(
            factor * forward_and_back
        )


# ------------------------------------------------------------------------------------- environments, the command


def test_the_sets_name_peers_that_there_are():
    for task in (*command.SMALL_SET, *command.SLOW_SET, *command.GPU_SET):
        assert set(task.peers) <= set(command.PEERS[task.work])
        assert task.shape in work.SHAPES
    small = [work.parameters(task.shape, task.vocab) for task in command.SMALL_SET]
    assert 10e6 <= min(small) <= max(small) <= 60e6


@pytest.mark.parametrize(("options", "told"), [
    (["--vocab", "512"], "add --shape"), (["--shape", "tiny", "--all"], "drop one of them"),
    (["--rounds", "0"], "must be at least 1"),
    (["--shape", "tiny", "--work", "sft", "--peers", "transformers generate"], "none of --peers"),
    (["--shape", "qwen3-tiny", "--peers", "TRL + PEFT", "torchtune compiled"], "not run with torchtune compiled"),
    (["--shape", "tiny", "--peers", training.BACKED], "does not run with ours on"),
])  # fmt: skip
def test_no_option_is_ignored(options, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *options])
    with pytest.raises(SystemExit) as left:
        command.parse()
    assert left.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("rates", "holds", "told"), [
    ([18.0, 30.0], True, "| 0.95 (0.90-1.00) | at least 0.9: holds |"),
    ([17.0, 26.0], False, "| 0.86 (0.85-0.87) | at least 0.9: FAILS |"),
])  # fmt: skip
def test_the_chosen_number_is_held_against_the_best_one(rates, holds, told):
    """Ratios are within a round, to the number whose median is best, here 1."""
    result = beside.Result(
        "qwen", "4 busy loops", {"1": [20.0, 30.0], "2": [4.0, 6.0], "auto": rates}, threads=1
    )
    lines = list(result.lines())
    assert (result.best, result.holds) == ("1", holds)
    assert lines[1] == "| qwen | 4 busy loops | 2 | 5 | 0.20 (0.20-0.20) |  |"
    assert lines[2].startswith("| qwen | 4 busy loops | auto, which is 1 | ")
    assert lines[2].endswith(told)


def test_experts_give_the_same_before_they_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "1", "--size", "4", "2", "16", "16", "6"])
    experts.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.count("|") for line in lines] == [11] * 5
    assert all(re.search(r" ms \| [\d.]+ × .* \| [\d.]+ × ", line) for line in lines[1:])
    build = experts.build

    def heavier(way, *args):
        layer = build(way, *args)
        if way == "eager":
            layer.experts.down_proj.data *= 1.01
        return layer

    monkeypatch.setattr(experts, "build", heavier)
    with pytest.raises(Failed, match="eager differs from ours"):
        experts.main()


@pytest.mark.wide
def test_blocks_give_the_same_before_they_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(unpacking, "SHAPE", {**unpacking.SHAPE, "hidden_size": 256, "intermediate_size": 256,
                                             "num_attention_heads": 2, "num_key_value_heads": 1})  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # which the benchmark sets
    monkeypatch.setattr(
        sys, "argv", ["x", "--rounds", "1", "--kinds", "Q6_K", "--tokens", "5", "300"]
    )
    unpacking.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| Q6_K | ")]
    assert len(lines) == 2
    assert all(re.search(r"( \| [\d.]+ × \([\d.]+-[\d.]+\)){2} \|$", line) for line in lines)
    sides = unpacking.sides

    def heavier(*args):
        packed, plain = sides(*args)
        plain.decoder.layers[1].mlp.w2.weight.data *= 1.1
        return packed, plain

    monkeypatch.setattr(unpacking, "sides", heavier)
    with pytest.raises(Failed, match="Q6_K in bf16: logits, loss or gradients are off"):
        unpacking.main()
