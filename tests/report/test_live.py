"""A run that is read again and again while it goes on."""

import os
import shutil
from pathlib import Path

import pytest

from rocm_ext import report
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.tails import Tails
from tests.kit.run_folders import curve, grpo, hardware, raft, sft


def two_ranks(folder: Path) -> Path:
    """Move every second line of a run's journals to another rank's file, as in a running run."""
    for stem in ("samples", "verdicts"):
        lines = (folder / f"{stem}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{stem}.jsonl").write_text("".join(lines[::2]))
        (folder / f"{stem}.rank1.jsonl").write_text("".join(lines[1::2]))
    return folder


RUNS = {
    "sft": lambda path: hardware(
        sft(path, curve(60), validation={20: 1.4, 60: 1.1}, finished=False)
    ),
    "raft": lambda path: hardware(raft(path, [[True, False]] * 3, drawn=2, finished=False)),
    "grpo": lambda path: hardware(
        grpo(path, {0: [True, False], 6: [True, True]}, steps=6, finished=False)
    ),
    "ranks": lambda path: two_ranks(grpo(path, {0: [True, False]}, steps=5, finished=False)),
}


def drawn(run: RunFolder) -> str:
    return report.render(report.content([run]))


@pytest.mark.parametrize("kind", RUNS)
def test_a_growing_run_reads_as_one_that_is_read_anew(tmp_path, kind):
    whole, run = RUNS[kind](tmp_path / "whole" / "run"), tmp_path / "run"
    shutil.copytree(whole, run)
    growing = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
    for path in growing:
        os.truncate(path, 0)
    tails = Tails()
    for share in (0.0, 0.2, 0.5, 0.51, 0.3, 0.8, 1.0):
        for path, content in growing.items():
            end = int(len(content) * share)  # lines end anywhere
            if share == 0.3:  # the run was resumed from here, and writes other values from now on
                end = content.rfind(b"\n", 0, end) + 1
                os.truncate(path, end)
                growing[path] = content[:end] + content[end:].replace(b": 0.", b": 0.1")
            with path.open("r+b") as file:
                file.write(growing[path][:end])
        assert drawn(RunFolder(run, tails)) == drawn(RunFolder(run))
    for path in growing:  # the same file, rewritten and longer
        path.write_bytes(path.read_bytes().replace(b'"step": ', b'"x": 1, "step": '))
    assert drawn(RunFolder(run, tails)) == drawn(RunFolder(run))
    assert not RunFolder(run, tails).problems
