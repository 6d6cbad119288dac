"""Environments on a server of OpenEnv's own package."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="forks and POSIX signals")

from rocm_ext.base.errors import UserError
from rocm_ext.environments import Environments
from rocm_ext.verifiers import Verdict

HAS = importlib.util.find_spec("openenv") is not None
needs_openenv = pytest.mark.skipif(not HAS, reason="needs openenv")
ROOT = Path(__file__).parents[2]
GAME = "tests.kit.openenv_game."


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.openenv_server", str(port), "3"], cwd=ROOT
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the server died"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def opened(url, **arguments):
    node = {
        "_component_": "rocm_ext.environments.OpenEnv",
        "url": url,
        "reset": ["seed"],
        "timeout": 20,
        **arguments,
    }
    return Environments(node, 30)


def talk(environments, *texts, seed=7, cut=None, number=0):
    key = ("p", number)
    replies = [environments.begin(key, {"prompt": "Play.", "seed": seed}).result(30)]
    replies += [environments.say(key, said(text)).result(30) for text in texts]
    replies += [] if cut is None else [environments.cut(key, said(cut)).result(30)]
    environments.end(key)
    return replies


def text_of(reply):
    assert [message["role"] for message in reply] == ["user"], reply
    return reply[0]["content"]


@needs_openenv
def test_actions_by_json(url):
    with opened(url) as environments:
        opening, low, no_json, no_object, no_action, end = talk(
            environments, '{"number": 3}', "seven", "7", '{"digit": 7}', '{"number": 7}'
        )
        assert '"Guess a number."' in text_of(opening)
        assert '"higher"' in text_of(low)
        assert text_of(no_json).startswith("error: the action cannot be read")
        assert "expected" in text_of(no_object) or "JSON object" in text_of(no_object)
        assert "VALIDATION_ERROR" in text_of(no_action)
        assert (end.verdict, end.reward) == (Verdict.WRONG, 0.75)


@needs_openenv
def test_fields_totals_and_cuts(url):
    with opened(
        url, action="number", observation="text", threshold=0.5, total="last"
    ) as environments:
        opening, high, end = talk(environments, "9", "7")
        assert [text_of(opening), text_of(high)] == ["Guess a number.", "lower"]
        assert (end.verdict, end.reward) == (Verdict.CORRECT, 0.5)
        assert talk(environments, "9", "8", "8", cut="7")[-1].reward == 0.0
        broken = talk(environments, "13")[-1]
        assert broken.verdict is Verdict.ERROR
        assert "the game broke" in broken.detail


@needs_openenv
def test_an_own_client(url):
    arguments = {
        "client": GAME + "GameClient",
        "action": GAME + "last_number",
        "observation": GAME + "shout",
    }
    with opened(url, **arguments, scale=[0, 2]) as environments:
        opening, no_number, high, end = talk(environments, "I do not know.", "It is 9", "It is 7.")
        assert [text_of(opening), text_of(high)] == ["GUESS A NUMBER.", "LOWER"]
        assert "there is no number in it" in text_of(no_number)
        assert end.reward == 0.375


@needs_openenv
def test_sessions_beside_each_other(url):
    with opened(url, action="number", observation="text") as environments:
        for number in range(3):
            assert (
                text_of(environments.begin(("p", number), {"seed": number}).result(30))
                == "Guess a number."
            )
        full = environments.begin(("p", 3), {"seed": 3}).result(30)
        assert full.verdict is Verdict.ERROR
        assert "CAPACITY" in full.detail
        for number in range(3):
            assert environments.say(("p", number), said(str(number))).result(30).reward == 0.5
            environments.end(("p", number))


@needs_openenv
def test_no_server():
    with opened("http://127.0.0.1:9", action="number") as environments:
        assert talk(environments)[0].verdict is Verdict.ERROR


@needs_openenv
@pytest.mark.parametrize(("arguments", "message"), [
    ({"total": "mean"}, "total is 'mean'; expected sum or last"), ({"scale": [1, 0]}, "scale must be"),
    ({"action": GAME + "last_numbr"}, "has no 'last_numbr'"),
])  # fmt: skip
def test_mistakes(arguments, message):
    with (
        pytest.raises(UserError, match=message) as raised,
        opened("http://127.0.0.1:9", **arguments),
    ):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(HAS, reason="needs an environment without openenv")
def test_without_the_package():
    with pytest.raises(UserError, match="pip install"), opened("http://127.0.0.1:9"):
        pass
