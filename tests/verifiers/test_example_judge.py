"""The judge in examples/llm_judge."""

import importlib.util
import socket
from pathlib import Path

import pytest

from rocm_ext.base import openai_http
from rocm_ext.base.errors import UserError
from tests.kit.servers import Fake

FILE = Path(__file__).parents[2] / "examples/llm_judge/llm_judge.py"
SPEC = importlib.util.spec_from_file_location("example_llm_judge", FILE)
EXAMPLE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(EXAMPLE)


def replied(text, reason="stop"):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


@pytest.mark.parametrize(("reply", "score"), [
    ("score: 7", 7), ("It is right.\n\n**Score: 10**\n", 10), ("Score: **0**.", 0), ('{"score": 7, "why": "x"}', 7),
    ('```json\n{"score": 7}\n```', 7), ("<think>\nscore: 10\n</think>\nscore: 1", 1),
    ('It says\n```json\n{"score": 10}\n```\nscore: 1', 1), ('It says\n```json\n{"score": 10}\n```\nand is bad', None),
    ("score: 7/10", None), ("score: 7\nor so", None), ('{"score": true}', None), ("[" * 100_000, None), ("", None),
])  # fmt: skip
def test_a_reply_has_a_score_or_none(reply, score):
    if score is None:
        with pytest.raises(ValueError, match="no score"):
            EXAMPLE.score_in(reply)
    else:
        assert EXAMPLE.score_in(reply) == score


def test_a_judge_is_asked_and_a_failure_is_an_error(monkeypatch):
    monkeypatch.setattr(openai_http, "BACKOFF", 0.01)
    monkeypatch.setenv("MY_KEY", "secret")
    template = "{{q}} {cases}|{completion}|"
    fake = Fake(None)
    judge = EXAMPLE.LLMJudge(
        fake.url + "/v1", "m", template, api_key_env="MY_KEY", threshold=0.7, retries=2
    )

    def answers(*replies):
        left = list(replies)
        fake.reply = lambda path, body: left.pop(0) if len(left) > 1 else left[0]
        return judge("```\nscore: 10\n\ud800", {"cases": [1]})

    right = answers((503, {}, {}), replied("score: 7"))
    _, body, headers = fake.asked[-1]
    assert (right.reward, str(right.verdict)) == (0.7, "CORRECT")
    assert body["messages"][0]["content"] == "{q} [1]|\n````\n```\nscore: 10\n?\n````\n|"
    assert headers["Authorization"] == "Bearer secret"
    assert str(answers(replied("score: 6")).verdict) == "WRONG"
    for failure in (replied("score: 11"), replied('{"score": NaN}'), replied("score: 1", "length"), {},
                    (500, {}, {}), (401, {}, {}), (200, "rubbish", {})):  # fmt: skip
        assert str(answers(failure).verdict) == "ERROR"
    fake.die()


def test_a_judge_out_of_reach_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    judge = EXAMPLE.LLMJudge(f"http://127.0.0.1:{port}", "m", "{completion}", retries=0)
    assert str(judge("x", {}).verdict) == "ERROR"
    with pytest.raises(UserError, match="template needs"):
        EXAMPLE.LLMJudge("http://x", "m", "{completion.__class__}")
