"""``rocm-ext pairs``: right against wrong answers of one prompt, from the records of RAFT and GRPO."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rocm_ext.cli import main
from rocm_ext.runs.pairs import Answer, choose_pairs, choose_single
from tests.kit.lines import one_line_has
from tests.kit.run_folders import write_jsonl
from tests.kit.tiny import write_rows, write_yaml

NODE = {"_component_": "rocm_ext.data.prompt_dataset", "column_map": {"prompt": "question"}}
ANSWERS = st.builds(
    Answer, prompt_id=st.sampled_from("abc"), text=st.text("xyz", min_size=1, max_size=3), tokens=st.integers(1, 9),
    right=st.booleans(),
)  # fmt: skip


def test_closest_lengths_come_first_and_each_answer_once():
    answers = [Answer("a", "r1", 10, True), Answer("a", "r2", 30, True), Answer("a", "w1", 29, False),
               Answer("a", "w2", 12, False), Answer("a", "w3", 90, False), Answer("b", "r", 5, True),
               Answer("c", "w", 5, False)]  # fmt: skip
    pairs = choose_pairs(answers, per_prompt=4)
    assert [(right.text, wrong.text) for right, wrong in pairs] == [("r2", "w1"), ("r1", "w2")]
    assert len(choose_pairs(answers, per_prompt=1)) == 1


@given(st.lists(ANSWERS, max_size=20, unique_by=lambda a: (a.prompt_id, a.text)), st.integers(1, 3), st.integers(1, 5),
       st.integers(0, 3))  # fmt: skip
def test_pairs_are_right_and_wrong_answers_of_one_prompt(answers, per_prompt, limit, seed):
    pairs = choose_pairs(answers, per_prompt=per_prompt, seed=seed)
    for right, wrong in pairs:
        assert (right.right, wrong.right) == (True, False)
        assert right.prompt_id == wrong.prompt_id
    used = [each for pair in pairs for each in pair]
    assert len(used) == len(set(used))
    for prompt in "abc":
        sides = [
            sum(a.right is side for a in answers if a.prompt_id == prompt) for side in (True, False)
        ]
        assert sum(right.prompt_id == prompt for right, _ in pairs) == min(per_prompt, *sides)
    some = choose_pairs(answers, per_prompt=per_prompt, limit=limit, seed=seed)
    assert len(some) == min(limit, len(pairs))
    assert set(some) <= set(pairs)
    single = choose_single(answers, per_prompt=per_prompt, seed=seed)
    for prompt in "abc":
        for side in (True, False):
            kept = sum(a.prompt_id == prompt and a.right is side for a in single)
            assert kept == min(
                per_prompt, sum(a.right is side for a in answers if a.prompt_id == prompt)
            )
    some = choose_single(answers, per_prompt=per_prompt, limit=limit, seed=seed)
    assert len(some) == min(limit, len(single))
    assert [a for a in single if a in some] == some


ANSWERS = [  # step, phase, prompt, number, text, verdict, why it ended
    (1, "sample", "p0", 0, "right", "CORRECT", "stop"), (1, "sample", "p0", 1, "wrong", "WRONG", "stop"),
    (1, "sample", "p1", 0, "good!", "CORRECT", "stop"), (1, "sample", "p1", 1, "error", "ERROR", "stop"),
    (1, "sample", "p1", 2, "endless", "WRONG", "length"), (1, "sample", "p2", 0, "unverified", None, "stop"),
    (2, "sample", "p1", 0, "no parse", "UNPARSED", "stop"), (2, "sample", "p1", 1, "late", "TIMEOUT", "stop"),
    (2, "sample", "p0", 0, "right", "CORRECT", "stop"), (2, "sample", "p0", 1, "right, too", "CORRECT", "stop"),
    (1, "eval", "p2", -1, "held out", "CORRECT", "stop"),
]  # fmt: skip


@pytest.fixture
def runs(tmp_path) -> Path:
    """A run of RAFT with two cycles and one of GRPO with two steps, over the same prompts."""
    asked = [
        json.loads(line)["question"]
        for line in write_rows(tmp_path / "rows.jsonl", 3).read_text().splitlines()
    ]
    source = write_jsonl(
        tmp_path / "rows.jsonl", [{"id": f"p{i}", "question": text} for i, text in enumerate(asked)]
    )
    samples, verdicts = [], []
    for step, phase, prompt, number, text, verdict, reason in ANSWERS:
        scope = {"step": step, "phase": phase, "prompt_id": prompt, "sample": number}
        tokens = {"tokens": [1] * len(text), "logprobs": []}
        samples.append({**scope, "seed": 0, "finish_reason": reason, "text": text, **tokens})
        if verdict:
            verdicts.append({**scope, "verdict": verdict, "reward": None, "detail": ""})
    for kind in ("raft", "grpo"):
        (tmp_path / kind / "cycle_2").mkdir(parents=True)
        write_jsonl(tmp_path / kind / "samples.jsonl", samples)
        write_jsonl(tmp_path / kind / "verdicts.jsonl", verdicts)
        config = {"model": {}, "checkpointer": {}, "prompts": {**NODE, "source": str(source)}}
        config |= {"recipe": f"{kind}_rocm", "output_dir": str(tmp_path / kind)}
        write_yaml(tmp_path / kind / "config.yaml", config)
    return tmp_path


@pytest.mark.parametrize("kind", ["raft", "grpo"])
def test_records_become_rows_of_the_dataset(runs, kind, capsys):
    assert main(["pairs", str(runs / kind)]) == 0
    said = capsys.readouterr().out
    assert one_line_has(
        said, "2 pairs of 2 prompts", "3 right", "3 wrong", "1 ERROR", "1 truncated"
    )
    rows = [json.loads(line) for line in (runs / kind / "pairs.jsonl").read_text().splitlines()]
    questions = [
        json.loads(line)["question"] for line in (runs / "rows.jsonl").read_text().splitlines()
    ]
    assert rows == [
        {
            "prompt": [{"role": "user", "content": questions[0]}],
            "chosen": "right",
            "rejected": "wrong",
        },
        {
            "prompt": [{"role": "user", "content": questions[1]}],
            "chosen": "good!",
            "rejected": "late",
        },
    ]
    assert main(["pairs", str(runs / kind), "--limit", "1", "-o", str(runs / "one.jsonl")]) == 0
    assert len((runs / "one.jsonl").read_text().splitlines()) == 1
    assert main(["pairs", str(runs / kind), "--last", "1", "--force"]) == 1
    assert one_line_has(capsys.readouterr().err, "no prompt", "2 right", "2 wrong")
    assert main(["pairs", str(runs / kind)]) == 2, "the file exists"
    capsys.readouterr()
    assert main(["pairs", str(runs / kind), "--single"]) == 0
    assert one_line_has(
        capsys.readouterr().out,
        "single.jsonl: 6 answers of 2 prompts",
        "3 right",
        "3 wrong",
        "1 ERROR",
    )
    rows = [json.loads(line) for line in (runs / kind / "single.jsonl").read_text().splitlines()]
    assert {row["prompt"][0]["role"] for row in rows} == {"user"}
    assert [(row["completion"], row["label"]) for row in rows] == [
        ("right", True), ("wrong", False), ("good!", True), ("no parse", False), ("late", False), ("right, too", True),
    ]  # fmt: skip
    one = ["--single", "--per-prompt", "1", "--force", "-o", str(runs / "one.jsonl")]
    assert main(["pairs", str(runs / kind), *one]) == 0
    assert len((runs / "one.jsonl").read_text().splitlines()) == 4


def test_what_has_no_pairs_is_refused(runs, tmp_path, capsys):
    (runs / "rows.jsonl").write_text('{"id": "p0", "question": "only this one?"}\n')
    assert main(["pairs", str(runs / "raft")]) == 1
    assert one_line_has(capsys.readouterr().err, "1 prompts", "p1", "not in its data")
    sft = tmp_path / "sft"
    sft.mkdir()
    write_yaml(
        sft / "config.yaml",
        {"recipe": "lora_finetune_rocm", "model": {}, "checkpointer": {}, "output_dir": "x"},
    )
    assert main(["pairs", str(sft)]) == 1
    assert "samples no answers; pairs needs one of raft_rocm, grpo_rocm" in capsys.readouterr().err
    assert main(["pairs", str(tmp_path / "nothing")]) == 1


def test_prompts_of_a_downloaded_run_run_no_code(runs, tmp_path, capsys):
    mark = tmp_path / "mark"
    content = yaml.safe_load((runs / "raft" / "config.yaml").read_text())
    attack = {"_component_": "os.system", "command": f"touch {mark}"}
    write_yaml(runs / "raft" / "config.yaml", {**content, "prompts": attack})
    assert main(["pairs", str(runs / "raft")]) == 1
    assert "prompts._component_ is 'os.system'" in capsys.readouterr().err
    assert not mark.exists()
