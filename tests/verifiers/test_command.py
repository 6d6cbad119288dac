"""A program that stays, as the judge."""

import sys

import pytest

from rocm_ext.verifiers import Pool, Verdict, build
from tests.kit.processes import wait_for_end

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."


PROGRAM = """
import json, os, subprocess, sys, time
print("started", file=sys.stderr, flush=True)
def say(**answer): print(json.dumps(answer), flush=True)
for count, line in enumerate(sys.stdin):
    request = json.loads(line)
    number, text = request["id"], request["completion"]
    if text == "die": print("oh no", file=sys.stderr); os._exit(3)
    if text == "hang": time.sleep(1000)
    if text == "close": os.close(1); time.sleep(1000)
    if text == "noise": print("loading the model", flush=True)
    if text == "flood": print("x" * (1 << 21), flush=True)
    if text == "loud": print("x" * (1 << 18), file=sys.stderr, flush=True)
    if text == "other": say(id=number - 1, verdict="CORRECT", reward=1); continue
    if text == "anonymous": say(verdict="CORRECT", reward=1); continue
    if text == "verdict": say(id=number, verdict="MAYBE", reward=1); continue
    if text == "reward": say(id=number, verdict="CORRECT", reward=7); continue
    if text == "error": say(id=number, verdict="ERROR", reward=None, detail="no idea"); continue
    if text == "twice": os.write(1, b"{}\\n{}\\n"); continue
    say(id=number, verdict="CORRECT", reward=1, detail=f"{os.getpid()} {count}")
"""


def persistent(timeout: float = 30) -> dict:
    command = [sys.executable, "-S", "-c", PROGRAM]
    return {
        "_component_": HERE + "Command",
        "command": command,
        "persistent": True,
        "timeout": timeout,
    }


def test_a_persistent_program_answers_many_requests():
    with Pool(persistent(), workers=1, timeout=60) as pool:
        texts = ["a", "x" * (1 << 20), "loud", "error", "b"]
        results = [future.result() for future in [pool.submit(text, {"y": text}) for text in texts]]
    assert [str(result.verdict) for result in results] == ["CORRECT"] * 3 + ["ERROR", "CORRECT"]
    pids, counts = zip(*(result.detail.split() for result in results if result.reward), strict=True)
    assert len(set(pids)) == 1
    assert counts == ("0", "1", "2", "4")
    assert results[3].detail == "no idea"
    wait_for_end(int(pids[0]))


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("text", "says"), [
    ("die", "ended with 3 instead of answering; its stderr: started oh no"),
    ("hang", "has not answered within 2 s; its stderr: started"), ("close", "closed its stdout"),
    ("noise", "loading the model"), ("flood", "printed more than"), ("other", "the id is"), ("anonymous", "'id'"),
    ("verdict", "MAYBE"), ("reward", "[0, 1]"), ("twice", "printed more than one line"),
])  # fmt: skip
def test_a_persistent_program_that_fails_is_started_anew(text, says):
    judge = build(persistent(timeout=2 if text == "hang" else 30))
    first = judge("a", {})
    failed = judge(text, {})
    assert (failed.verdict, says in failed.detail) == (Verdict.ERROR, True), failed
    wait_for_end(int(first.detail.split()[0]))
    again = judge("a", {})
    assert again.detail.split()[1] == "0"
    del judge
    wait_for_end(int(again.detail.split()[0]))


def test_a_persistent_program_that_does_not_run_is_an_error():
    assert "cannot be run" in build({**persistent(), "command": ["/"]})("a", {}).detail
    once = build({**persistent(), "command": ["true"]})
    assert ["instead of answering" in once("a", {}).detail for _ in range(2)] == [True, True]
