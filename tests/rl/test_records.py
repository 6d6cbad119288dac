"""Records on disk: whatever a kill leaves behind, every complete line counts."""

import json
from pathlib import Path

import torch

from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl import records
from rocm_ext.rl.records import Records
from tests.kit.run_folders import write_jsonl


def line(sample: int) -> dict:
    return {"step": 1, "phase": "sample", "prompt_id": "é", "sample": sample, "text": "a" * 99}


def verdict(step: int, prompt: str, sample: int, verdict: str) -> dict:
    reward = {"CORRECT": 1.0, "WRONG": 0.0}.get(verdict)
    return {"step": step, "phase": "sample", "prompt_id": prompt, "sample": sample, "verdict": verdict,
            "reward": reward, "detail": ""}  # fmt: skip


def opened(folder: Path):
    """Open the samples of an unfinished step."""
    samples, *_ = Records(folder, Ranks(torch.device("cpu")), 0, -1).phase(1, "sample")
    return samples


def test_lines_of_a_killed_run_are_joined_without_its_torn_ones(tmp_path):
    for number, name in enumerate(("samples.jsonl", "samples.rank1.jsonl", "samples.rank2.jsonl")):
        whole, torn = (json.dumps(line(2 * number + i)) + "\n" for i in range(2))
        (tmp_path / name).write_text(whole + torn[:50])
    samples = opened(tmp_path)
    assert samples.records.keys() == {("é", 0), ("é", 2), ("é", 4)}
    samples.append({"prompt_id": "é", "sample": 1})
    samples.file.close()
    assert opened(tmp_path).records.keys() == {("é", 0), ("é", 2), ("é", 4), ("é", 1)}
    assert {path.name for path in tmp_path.glob("samples*")} == {"samples.jsonl"}


def test_finished_steps_give_pass_rates_and_the_next_one_goes_on(tmp_path):
    judged = [verdict(1, "a", i, said) for i, said in enumerate(("CORRECT", "WRONG", "ERROR"))]
    judged += [verdict(1, "b", 0, "ERROR"), verdict(2, "c", 0, "CORRECT")]
    write_jsonl(tmp_path / "verdicts.jsonl", judged)
    run = Records(tmp_path, Ranks(torch.device("cpu")), 1, -1)
    run.finish(1, run.verdicts(1, "sample"))
    assert run.asked == {"a": [(1, 0.5)], "b": [(1, None)]}
    left = [run.phase(step, "sample")[1].records.keys() for step in (1, 2)]
    assert left == [set(), {("c", 0)}]


def test_removing_old_samples_does_not_read_evaluations_again(tmp_path, monkeypatch):
    """Its cost does not grow with the number of evaluations, whose samples stay."""
    read, original = [], records.rewrite_lines

    def rewrite(path: Path, keep) -> None:
        read.append(path.read_text().count("\n"))
        original(path, keep)

    monkeypatch.setattr(records, "rewrite_lines", rewrite)
    run = Records(tmp_path, Ranks(torch.device("cpu")), 0, -1)
    for step in range(1, 101):
        for phase, count in (("sample", 2), ("eval", 10)):
            samples, *_ = run.phase(step, phase)
            for index in range(count):
                samples.append({"prompt_id": "a", "sample": index})
        run.keep_samples_from(step)
    assert sum(read) <= 4 * 100 * 12
    run.keep_samples_from(101, at_once=True)
    run.close()
    assert (tmp_path / "samples.jsonl").read_text().count("\n") == 100 * 10
