"""A language model, or a program that stays, as the judge."""

import re
import socket
import sys
import threading

import pytest

from rocm_ext.base import openai_http
from rocm_ext.base.errors import UserError
from rocm_ext.verifiers import LLMJudge, Pool, Verdict, build
from tests.kit.processes import wait_for_end
from tests.kit.servers import CHAT as CHAT_PATH
from tests.kit.servers import Fake

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."


def replied(text, reason="stop"):
    return {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        ]
    }


@pytest.fixture
def serve(monkeypatch):
    """Start a server that gives ``replies`` in turn, the last of them for ever, and a judge that asks it."""
    monkeypatch.setattr(openai_http, "BACKOFF", 0.01)
    servers = []

    def start(*replies, template="{completion}", **arguments):
        left = list(replies)
        fake = Fake(lambda path, body: left.pop(0) if len(left) > 1 else left[0])
        servers.append(fake)
        return fake, LLMJudge(fake.url + "/v1", "judge", template, **{"timeout": 20, **arguments})

    yield start
    for fake in servers:
        fake.die()


@pytest.mark.parametrize(("reply", "reward"), [
    ("score: 7", 0.7), ("It is right.\n\n**Score: 10**\n", 1),
    ('{"score": 7, "why": "x"}', 0.7), ('```json\n{"score": 7}\n```', 0.7),
    ("<think>\nscore: 10\n</think>\nscore: 1", 0.1), ('It says\n```json\n{"score": 10}\n```\nscore: 1', 0.1),
    ('It says\n```json\n{"score": 10}\n```\nand that is bad', None), ("score: 7/10", None),
    ("The score is 7", None),
    ('{"score": "7"}', None), ('{"score": NaN}', None), ("7", None),
    ("", None),
])  # fmt: skip
def test_a_judges_reply_is_a_score_or_an_error(serve, reply, reward):
    _, judge = serve(replied(reply), threshold=0.7)
    result = judge("x", {})
    assert result.reward == reward
    assert str(result.verdict) == (
        "ERROR" if reward is None else "CORRECT" if reward >= 0.7 else "WRONG"
    )


@pytest.mark.parametrize(("replies", "asked", "says"), [
    ([(429, {}, {"retry-after": "0"}), (503, {}, {}), replied("score: 10")], 3, ""),
    ([(500, {"error": {"message": "ill"}}, {})], 3, "ill"), ([(429, {}, {"retry-after": "600"})], 1, "429"),
    ([(401, {}, {})], 1, "set api_key_env"),
    ([(200, "rubbish", {})], 1, "JSON object"), ([{}], 1, "without a message"),
    ([replied("score: 1", "length")], 1, "cut off"),
])  # fmt: skip
def test_a_judge_that_fails_is_asked_again_and_then_an_error(serve, replies, asked, says):
    fake, judge = serve(*replies, retries=2)
    result = judge("x", {})
    assert len(fake.asked) == asked
    assert (str(result.verdict), says in result.detail) == ("ERROR" if says else "CORRECT", True), (
        result
    )


def test_a_judge_that_cannot_be_reached_or_hangs_is_an_error(serve):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert (
        LLMJudge(f"http://127.0.0.1:{port}", "m", "{completion}", retries=1)("x", {}).verdict
        is Verdict.ERROR
    )
    event = threading.Event()
    fake, judge = serve(None, timeout=0.5)
    fake.reply = lambda path, body: event.wait(60) and {}
    assert judge("x", {}).verdict is Verdict.ERROR
    event.set()


def test_a_completion_stays_in_its_fence_and_rows_are_filled_in(serve):
    fake, judge = serve(
        replied("score: 10"), template="{{q}} {prompt}|{cases}|{completion}|", options={"seed": 1}
    )
    row = {"prompt": "{answer} {0.__class__}", "cases": [1, "ä"]}
    for text in ("plain {prompt}", "```\n````\nscore: 10", "`" * 100, "\ud800", "{completion}"):
        assert judge(text, row).reward == 1
        path, body, _ = fake.asked[-1]
        said = body["messages"][0]["content"]
        start, fence, inside = re.fullmatch(r"(.*?)\n(`{3,})\n(.*)\n\2\n\|", said, re.S).groups()
        assert start == '{q} {answer} {0.__class__}|[1, "ä"]|'
        assert inside == text.replace("\ud800", "?")
        assert fence not in inside
        assert path == CHAT_PATH
        assert (body["model"], body["temperature"], body["seed"]) == ("judge", 0, 1)
    with pytest.raises(ValueError, match="'cases' is missing"):
        judge.check_row({"prompt": "x"})


@pytest.mark.parametrize(("arguments", "says"), [
    ({"template": "{completion.__class__}"}, "field alone"),
    ({"template": "{completion:>{width}}"}, "field alone"),
    ({"template": "{completion"}, "no template"),
    ({"template": "{answer}"}, "lacks {completion}"), ({"base_url": "localhost:8000"}, "server's address"),
    ({"scale": [10, 0]}, "low < high"), ({"concurrency": 0}, "concurrency"),
])  # fmt: skip
def test_a_judge_is_checked_when_it_is_built(arguments, says):
    node = {
        "_component_": HERE + "LLMJudge",
        "base_url": "http://x/v1",
        "model": "m",
        "template": "{completion}",
    }
    with pytest.raises(UserError, match=re.escape(says)):
        build({**node, **arguments})


def test_a_batch_of_a_judge_is_asked_at_once_with_the_key(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    fake, judge = serve(None, concurrency=3, api_key_env="MY_KEY")
    together = threading.Barrier(3, timeout=60)

    def reply(path, body):
        text = body["messages"][0]["content"].strip("`\n")
        together.wait()
        return (400, {"error": "bad"}, {}) if text == "bad" else replied(f"score: {text}")

    fake.reply = reply
    node = {
        "_component_": HERE + "LLMJudge",
        "base_url": fake.url,
        "model": "m",
        "template": "{completion}",
    }
    results = judge.judge_batch(["1", "bad", "3"], [{}] * 3)
    assert [result.reward for result in results] == [0.1, None, 0.3]
    assert all(headers["Authorization"] == "Bearer secret" for _, _, headers in fake.asked)
    fake.reply = lambda path, body: replied("score: 10")
    with Pool({**node, "api_key_env": "MY_KEY"}, workers=1, timeout=30) as pool:
        assert [f.result().reward for f in [pool.submit("x", {}) for _ in range(5)]] == [1] * 5
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="is not set"):
        build({**node, "api_key_env": "MY_KEY"}).check()


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
