"""A program of the user's as an environment: its requests, its result, and what the sandbox keeps from it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

pytest.importorskip("resource", reason="forks and POSIX signals")

from rocm_ext import pocket
from rocm_ext.base.errors import UserError
from rocm_ext.environments import Ask, Call, Environments, Program, endpoint
from rocm_ext.environments.endpoint import Endpoint, Exchange
from rocm_ext.verifiers import Verdict

KIT = Path(__file__).parents[1] / "kit"
ROW = {"prompt": "What is 3 + 4?", "answer": "7"}
KEY = ("p", 0)


def said(text, *calls, ends="stop"):
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    message = {"role": "assistant", "content": text, "usage": usage, "finish_reason": ends}
    return message | ({"tool_calls": list(calls)} if calls else {})


@contextlib.contextmanager
def talking(*command, row=ROW, **arguments):
    """Begin a conversation with a program; yield a function that says or cuts, and the first reply."""
    node = {
        "_component_": "rocm_ext.environments.Program",
        "command": ["python", *map(str, command)],
        **arguments,
    }
    with Environments(node, 60) as environments:
        first = environments.begin(KEY, row).result(60)
        yield lambda message, how="say": getattr(environments, how)(KEY, message).result(60), first


def result(code, *messages, cut=None, tmp_path, **arguments):
    """Return what a program of this code ends with."""
    tmp_path.chmod(0o755)  # the sandbox's user reads it, who is another one if this one is root
    (tmp_path / "program.py").write_text("from agent import *\n" * ("ask(" in code) + code)
    (tmp_path / "agent.py").write_text((KIT / "agent.py").read_text().partition("\nhistory")[0])
    with talking(tmp_path / "program.py", folder=str(tmp_path), **arguments) as (say, reply):
        for message in messages:
            assert isinstance(reply, Ask), reply
            reply = say(message)
        return reply if cut is None else say(cut, "cut")


@pytest.mark.wide
def test_openais_client_talks_with_the_model():
    pytest.importorskip("openai")
    with talking(KIT / "openai_agent.py") as (say, first):
        assert [message["content"] for message in first.messages] == [
            "You may call add.",
            ROW["prompt"],
        ]
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        second = say(
            said(
                "I add.",
                Call("add", {"a": 3, "b": 4}).message(0),
                Call("add", {"a": 1, "b": 1}).message(1),
            )
        )
        assert second.messages[:2] == first.messages
        call, *answers = second.messages[2:]
        assert (call["content"], len(call["tool_calls"])) == ("I add.", 2)
        assert [(m["tool_call_id"], m["content"]) for m in answers] == [
            ("call00000", "7"),
            ("call00001", "2"),
        ]
        last = say(said("It is 7."))
        assert (last.messages, last.tools, last.most) == (
            [{"role": "user", "content": "And in short?"}],
            [],
            5,
        )
        end = say(said("Seven. Or so", ends="length"))
        assert (end.verdict, end.reward, end.parts) == (Verdict.WRONG, 0.5, {"total": 5})
        assert end.detail == "Seven stop ['model']"


ASK = 'text = ask([{"role": "user", "content": row["prompt"]}])["content"]\n'


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(
    ("code", "verdict", "reward", "detail"),
    [
        (ASK + "print(1)", Verdict.CORRECT, 1.0, "last line: 1"),
        (
            ASK + "print('{\"reward\": 0.25}')\nprint()",
            Verdict.WRONG,
            0.25,
            'last line: {"reward": 0.25}',
        ),
        (ASK + "print(text)", Verdict.ERROR, None, "expected a reward as JSON"),
        (ASK + "print(2)", Verdict.ERROR, None, "in [0, 1]"),
        (ASK + "1 / 0", Verdict.ERROR, None, "status 1: ZeroDivisionError"),
        (ASK + "x = bytearray(1 << 31)", Verdict.ERROR, None, "MemoryError"),
        ("print(1)", Verdict.ERROR, None, "without a request"),
    ],
    ids=["right", "partial", "text", "too large", "raises", "memory", "no request"],
)
def test_the_last_line_is_the_reward(code, verdict, reward, detail, tmp_path):
    end = result(code, *([said("Seven.")] if "ask(" in code else []), tmp_path=tmp_path)
    assert (end.verdict, end.reward) == (verdict, reward)
    assert detail in end.detail


@pytest.mark.wide
def test_a_verifier_judges_without_showing_its_column(tmp_path):
    verifier = {"_component_": "rocm_ext.verifiers.MathAnswer"}
    code = (
        ASK + "import json\nprint(json.dumps({'answer': text if 'answer' not in row else 'seen'}))"
    )
    for text, reward in (("It is 7.", 1.0), ("It is 8.", 0.0)):
        end = result(code, said(text), tmp_path=tmp_path, verifier=verifier)
        assert (end.reward, end.verdict is Verdict.ERROR) == (reward, False)


def test_the_pocket_models_agent_answers_with_its_tools_result(tmp_path):
    tmp_path.chmod(0o755)
    stock = tmp_path / "stock.json"
    stock.write_text('{"Bd": 76}')
    row = {"prompt": 'How many "B" on shelf "d"?', "answer": "It is 76."}
    verifier = {"_component_": "rocm_ext.verifiers.ExactMatch"}
    with talking(pocket.AGENT, stock, row=row, verifier=verifier) as (say, first):
        assert first.messages == [{"role": "user", "content": row["prompt"]}]
        calls = [
            Call("stock", {"item": "B", "shelf": "d"}).message(0),
            Call("stock", {"item": "B"}).message(1),
        ]
        assert [message["content"] for message in say(said("", *calls)).messages[-2:]] == [
            "76",
            "unknown",
        ]
        assert say(said("It is 76.")).reward == 1


def test_a_verifier_does_not_hide_the_prompt():
    verifier = {"_component_": "rocm_ext.verifiers.ExactMatch", "field": "prompt"}
    with talking(KIT / "agent.py", verifier=verifier) as (_, first):
        assert first.messages == [{"role": "user", "content": ROW["prompt"]}]


def test_requests_that_nobody_waits_for_are_dropped():
    # the program has ended, and may have asked in several threads
    program = Program({}, command=["python", "-V"])
    ended = SimpleNamespace(returncode=0, killed="", stdout=b"1\n", stderr=b"")
    program._running, program._heard = SimpleNamespace(child=ended), True
    for asked in (Exchange(b'{"messages": [{}]}'), Exchange(b'{"messages": [{}]}'), None):
        program._asked.put(asked)
    assert program._next().reward == 1
    # the client has hung up, perhaps because another request of the program was answered meanwhile
    program = Program({}, command=["python", "-V"])
    program._running = SimpleNamespace(child=SimpleNamespace(returncode=None))
    (ours, theirs), (gone, end) = socket.socketpair(), socket.socketpair()
    with ours, theirs, gone:
        end.close()
        for text, client in (("old", gone), ("new", ours)):
            program._asked.put(
                Exchange(json.dumps({"messages": [{"content": text}]}).encode(), client)
            )
        assert program._next().messages == [{"content": "new"}]


_VERIFIERS = """
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

traces = [SimpleNamespace(reward=reward, metrics={"tests": reward}, errors=[]) for reward in REWARDS]
env = MagicMock()
env.taskset.include.return_value = ["task"]
env.run_episode = AsyncMock(return_value=SimpleNamespace(ok=True, errors=[], traces=traces))
Runtime = resolve_env_config = EvalClientConfig = ModelContext = MagicMock()
load_environment = lambda config: env
"""


@pytest.mark.parametrize("rewards", [[0.25], [1.0, 0.25]])
def test_an_episode_of_verifiers_has_one_reward(rewards, tmp_path):
    """Attempts of one episode would all be trained with the reward of the last."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").touch()
    (tmp_path / "verifiers" / "v1.py").write_text(f"REWARDS = {rewards}\n{_VERIFIERS}")
    program = Path(__file__).parents[2] / "examples" / "agent" / "play_verifiers.py"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "OPENAI_BASE_URL": "http://localhost/v1",
    }
    ran = subprocess.run(
        [sys.executable, program],
        input='{"task": 0}\n',
        env=environment,
        capture_output=True,
        text=True,
    )
    if len(rewards) == 1:
        assert json.loads(ran.stdout) == {"reward": 0.25, "parts": {"tests": 0.25}}, ran.stderr
    else:
        assert (ran.stdout, ran.returncode) == ("", 1)
        assert "an episode of 2 agents" in ran.stderr


@pytest.mark.parametrize("new", [True, False])
def test_a_limit_ends_requests(new, tmp_path):
    code = ASK + "try: ask([{'role': 'user', 'content': 'more'}])\nexcept Exception as error: "
    code += "print(0.5 if b'context_length_exceeded' in error.read() else 0)"  # as agent libraries look for it
    full = said("It is")
    end = result(code, full, tmp_path=tmp_path, cut=said("more", ends="length") if new else full)
    if new:
        assert end.verdict is Verdict.ERROR, "the second message came, and nothing was printed"
    else:
        assert end.reward == 0.5
    end = result(ASK + ASK + ASK, full, tmp_path=tmp_path, cut=full)
    assert (end.verdict, end.reward) == (Verdict.WRONG, 0.0)
    assert "400" in end.detail


@pytest.mark.parametrize(("handled", "first"), [(True, False), (False, False), (False, True)])
def test_a_refused_request_ends_no_conversation(handled, first, tmp_path):
    """A program that fails at one has reward 0 if the model has spoken: else an answer that loses could withdraw."""
    odd = "ask([{'role': 'nobody', 'content': text}])\n"
    catch = f"try: {odd}except Exception as problem: print(int('no such role' in problem.read().decode()))"
    (tmp_path / "agent.py").write_text((KIT / "agent.py").read_text().partition("\nhistory")[0])
    code = ("text = ''\n" if first else ASK) + (catch if handled else odd)
    (tmp_path / "program.py").write_text("from agent import *\n" + code)
    tmp_path.chmod(0o755)
    with talking(tmp_path / "program.py", folder=str(tmp_path)) as (say, reply):
        reply = reply if first else say(said("Seven."))
        assert reply.messages[0]["role"] == "nobody"
        end = say("no such role", "refuse")
    assert end.reward == (1 if handled else None if first else 0)
    assert handled or "no such role" in end.detail


@pytest.fixture
def connect():
    """An endpoint with the key ``right``: a function that connects, sends, and returns the socket."""
    listening, opened = socket.create_server(("127.0.0.1", 0), backlog=99), []

    def connect(sent=b""):
        opened.append(socket.create_connection(listening.getsockname(), 30))
        opened[-1].sendall(sent)
        return opened[-1]

    Endpoint(listening, "right", SimpleQueue())
    yield connect
    for connection in opened:
        connection.close()


POST, RIGHT = b"POST /v1/chat/completions HTTP/1.1\r\n", b"Authorization: Bearer right\r\n"


@pytest.mark.parametrize(("sent", "status"), [
    (POST + b"Content-Length: 4000000\r\n\r\n", b"401"),
    (POST + RIGHT + b"Content-Length: 5000000\r\n\r\n", b"400"),
    (POST + RIGHT + b"Content-Length: 1\r\n\r\n{", b"400"),
    (POST + RIGHT + b"X-More: %s\r\n" % (b"x" * 1000) * 80, b"431"),
])  # fmt: skip
def test_the_endpoint_refuses_before_it_reads(connect, sent, status):
    assert connect(sent).recv(12) == b"HTTP/1.1 " + status


@pytest.mark.parametrize("sent", [b"", b"POST /v1", POST + RIGHT + b"Content-Length: 9\r\n\r\n"])
def test_a_slow_client_is_left(connect, sent, monkeypatch):
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.1)
    assert connect(sent).recv(1) == b""


def test_the_endpoint_has_no_thread_for_one_connection_too_many(connect):
    for _ in range(endpoint._THREADS):
        last = connect()
    assert b"too many connections" in last.recv(1000)


def test_a_program_reaches_its_endpoint_and_files_alone(tmp_path):
    outside = tmp_path.parent / "outside.txt"
    outside.write_text("a secret")
    listening = socket.create_server(("127.0.0.1", 0))  # on this machine, where no network may be
    code = (
        ASK
        + f"""
import socket
seen = []
for address in (("1.1.1.1", 53), {listening.getsockname()!r}):
    try: seen.append(socket.create_connection(address, 1))
    except OSError: pass
for path in ({str(outside)!r}, "/etc/passwd"):
    try: seen.append(open(path).read())
    except OSError: pass
try: seen.append(ask([{{"role": "user", "content": "x" * (5 << 20)}}]))
except Exception as error: seen += [] if "400" in str(error) else [str(error)]
os.environ["OPENAI_API_KEY"] = "another"
try: seen.append(ask([{{"role": "user", "content": "x"}}]))
except Exception as error: seen += [] if "401" in str(error) else [str(error)]
print(int(not seen))
"""
    )
    with listening:
        assert result(code, said("Seven."), tmp_path=tmp_path).reward == 1


@pytest.mark.parametrize(("body", "problem"), [
    ("[]", "messages"), ('{"messages": []}', "messages"), ('{"messages": ["hello"]}', "object"),
    ('{"messages": [{}], "n": 2}', "n is not"),
    ('{"messages": [{}], "response_format": {"type": "json_object"}}', "response_format"),
    ('{"messages": [{}], "tools": {}}', "tools"), ('{"messages": [{}], "max_tokens": 0}', "max_tokens"),
    ('{"messages": [{}], "stop": 5}', "stop"), ('{"messages": [{}], "stop": [5]}', "stop"),
    ('{"messages": [{}], "functions": [{}]}', "functions"), ("{", "Expecting"),
    ('{"messages": [{"more": ' + "[" * 200 + "]" * 200 + "}]}", "more than 100 levels"),
])  # fmt: skip
def test_requests_that_cannot_be_answered(body, problem):
    with pytest.raises(ValueError, match=problem):
        Exchange(body.encode())


@pytest.mark.parametrize(("arguments", "problem"), [
    ({"command": "python agent.py"}, "expected a list"),
    ({"command": ["python", "missing.py"]}, "there is no file missing.py"),
    ({"command": ["no-such-program"]}, "no-such-program"),
    ({"command": ["python", "-V"], "folder": "missing"}, "not a folder"),
    ({"command": ["python", "-V"], "folder": str(Path.home())}, "home"),
    ({"command": ["python", "-V"], "memory_mb": 1}, "memory_mb"),
    ({"command": ["python", "-V"], "sandbox": "none"}, "sandbox"),
    ({"command": ["python", "-V"], "verifier": {"_component_": "rocm_ext.verifiers.MajorityAnswer"}}, "group"),
])  # fmt: skip
def test_mistakes(arguments, problem):
    with pytest.raises(UserError, match=problem) as raised:
        Program({}, **arguments)
    assert "\n" not in str(raised.value)


def test_files_of_the_command(tmp_path):
    paths = [tmp_path / folder / "it is.py" for folder in ("a b", "c")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"# {path}")
    code = "x = 1; " * 100  # too long for the name of a file
    with pytest.raises(UserError, match="two files are named"):
        Program({}, command=["python", "-c", code, *map(str, paths)])


def test_a_tool_choice_of_none_shows_no_tools():
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function"}],
        "tool_choice": "none",
    }
    assert Exchange(json.dumps(body).encode()).ask.tools == []


def test_a_folder_must_be_readable_in_the_sandbox(tmp_path):
    tmp_path.chmod(0o700)
    readable = (
        contextlib.nullcontext() if os.geteuid() else pytest.raises(UserError, match="chmod -R")
    )
    with readable:  # as root, the sandbox takes another user's id
        Program({}, command=["python", "-V"], folder=str(tmp_path)).check()
