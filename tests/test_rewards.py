"""Rewards: what RAFT trains on, reward functions, judges, and verifiers' own time."""

import contextlib
import json
import pickle
import re
import shutil
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rocm_ext.recipes.raft_rocm import main

from rocm_ext.errors import UserError
from rocm_ext.raft.rollouts import read_records
from rocm_ext.verifiers import (
    ExactMatch,
    JsonSchema,
    LLMJudge,
    Pool,
    PythonTests,
    Regex,
    RewardFunction,
    Verdict,
    as_reward_function,
    build,
    extract_code,
    llm_judge,
)
from tests.forks import forked
from tests.raft_runs import assert_equal, cycle_row, write_run, write_world
from tests.servers import CHAT as CHAT_PATH
from tests.servers import Fake

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."
RESUME = "resume_from_checkpoint=True"


# ---- what RAFT trains on


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Write the YAML of a run whose verifier gives wrong answers the reward 0.5."""
    folder = write_world(tmp_path_factory.mktemp("rewards"))
    graded = {"verifier": {"_component_": "tests.judges.Graded"}, "eval_prompts": None}
    return partial(write_run, folder, **graded, max_new_tokens=8, samples_per_prompt=2, epochs=1)


@pytest.fixture(scope="module")
def rewarded(make, tmp_path_factory):
    """A run that keeps wrong answers with enough reward."""
    return ran(make, tmp_path_factory.mktemp("rewarded") / "run", "keep=rewarded")


def ran(make, out: Path, *overrides: str) -> Path:
    code, messages = forked(main, make(out), *overrides)
    assert code == 0, messages
    return out


def kept_verdicts(out: Path, cycle: int = 1) -> set[str]:
    verdicts = {
        (r["prompt_id"], r["sample"]): r["verdict"] for r in read_records(out / f"cycle_{cycle}/verdicts.jsonl")
    }
    return {verdicts[r["prompt_id"], r["sample"]] for r in read_records(out / f"cycle_{cycle}/kept.jsonl")}


def test_wrong_answers_are_not_trained_on_however_well_rewarded(make, rewarded, tmp_path):
    out = ran(make, tmp_path / "run")
    assert kept_verdicts(out) == {"CORRECT"}
    row = cycle_row(out, 1)
    assert row["filter"] == {"not_correct": row["verdicts"]["WRONG"], "kept": row["verdicts"]["CORRECT"]}
    assert row["pass_rate"] == row["verdicts"]["CORRECT"] / row["samples"]
    assert kept_verdicts(rewarded) == {"CORRECT", "WRONG"}
    assert cycle_row(rewarded, 1)["pass_rate"] == 1


def test_a_resumed_run_keeps_by_the_rule_that_it_began_with(make, rewarded, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(rewarded, out)
    shutil.rmtree(out / "cycle_2")
    record = json.loads((out / "run.json").read_text())
    del record["config"]["keep"]  # a run of an earlier version
    (out / "run.json").write_text(json.dumps(record))
    for cycles in (2, 3):  # and again
        ran(make, out, RESUME, f"cycles={cycles}")
    assert kept_verdicts(out, 2) == kept_verdicts(out, 3) == {"CORRECT", "WRONG"}
    shutil.rmtree(out / "cycle_3")
    ran(make, out, RESUME, "cycles=2")
    assert_equal(out, rewarded)
    ran(make, out, RESUME, "cycles=3", "keep=correct")
    assert kept_verdicts(out, 2) == {"CORRECT", "WRONG"}
    assert kept_verdicts(out, 3) == {"CORRECT"}


# ---- verifiers' own time

LONG = 1 << 18  # a search that takes quadratic time ends after the tests' time limit


@pytest.mark.parametrize(
    ("unit", "end"),
    [("~", "`"), ("`", "x`"), ("~~~ ", "`"), ("\n", "x"), (" ", "x"), ("\n ", "x"), ("int\n", "x"), ("int a\n", "x"),
     ("static ", "x"), ("```\n", ""), ("~~~~\n", "```"), ("template\n", ""), ("pub\n", ""), ("int ", "("), ("a", "(")],
)  # fmt: skip
@pytest.mark.parametrize("language", ["c", "cpp", "rust", "go", "json", "python"])
def test_extraction_takes_linear_time(unit: str, end: str, language: str):
    extract_code(unit * (LONG // len(unit)) + end, language)


def test_gnu_style_and_indented_code_is_found():
    for text in ("int\nmain (void)\n{}", "\n\n  static unsigned int f(void);", "  template <class T>\nT f();"):
        assert extract_code(text, "cpp" if "template" in text else "c") == text
    assert extract_code("pub fn main() {}", "rust") == "pub fn main() {}"


def test_a_body_after_many_blank_lines_takes_linear_time():
    row = {"entry_point": "f", "code_prefix": "def f():\n", "tests": "assert f() == 1"}
    code = "```python\n" + "\n" * LONG + "x = 1\n```"
    assert PythonTests(sandbox="rlimits", timeout=20)(code, row).verdict is Verdict.WRONG


@pytest.mark.parametrize("text", ["A" * LONG, "ß" * LONG, " " * LONG + "x", "x" + "\u0130" * LONG])
def test_text_takes_linear_time(text: str):
    assert ExactMatch(ignore_case=True)(text, {"answer": "y"}).verdict is Verdict.WRONG
    assert Regex("y$", full=True)(text, {}).verdict is Verdict.WRONG


@pytest.fixture(scope="module")
def by_row():
    """JSON judged by the schema of its row."""
    with Pool({"_component_": HERE + "JsonSchema", "field": "schema", "timeout": 2}, 1, 60) as pool:
        yield lambda text, schema: pool.submit(text, {"schema": schema}).result()


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
DEEP = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("text", "schema", "verdict"),
    [
        ('```json\n{"a": 1}\n```', SCHEMA, "CORRECT"),
        ('{"a": 1}', SCHEMA, "CORRECT"),
        ('{"a": 1}', json.dumps(SCHEMA), "CORRECT"),
        ('{"a": "x"}', SCHEMA, "WRONG"),
        ('Here it is: {"a": 1}. I hope [it] helps {you}!', SCHEMA, "CORRECT"),
        ('First {"a": 1}, then {"a": "x"}', SCHEMA, "WRONG"),  # the last counts
        ('First {"a": "x"}, then {"a": 1} and {"a": ', SCHEMA, "CORRECT"),  # and must be complete
        ('{"b": {"a": 1}}', SCHEMA, "WRONG"),  # an inner object is no answer
        ('So: {"b": {"a": 1}}', SCHEMA, "WRONG"),
        ('```python\nx = {"a": 1}\n```', SCHEMA, "UNPARSED"),
        ('{"a": 1}\n```json\n{"a": }\n```', SCHEMA, "UNPARSED"),
        ("17", {"type": "integer"}, "CORRECT"),
        ("It is 17", {"type": "integer"}, "UNPARSED"),
        ("no json", SCHEMA, "UNPARSED"),
        ("", SCHEMA, "UNPARSED"),
        ('{"a": NaN}', SCHEMA, "UNPARSED"),
        ('{"a": ' + "9" * 5000 + "}", SCHEMA, "UNPARSED"),
        ("[" * 100_000, SCHEMA, "UNPARSED"),
        ("[{" * 400_000, SCHEMA, "UNPARSED"),
        ("[]" * 500_000, SCHEMA, "WRONG"),
        ("[1,\n" * 5_000 + '"', SCHEMA, "UNPARSED"),
        ("[" * 900 + "]" * 900, DEEP, "WRONG"),
        ("x" * (1 << 21), SCHEMA, "UNPARSED"),
        ('["' + "a" * 40 + '!"]', {"items": {"pattern": "^(a|a)*$"}}, "TIMEOUT"),
        (json.dumps([{"i": i} for i in range(20_000)]), {"uniqueItems": True}, "TIMEOUT"),
        ("1e999", {"multipleOf": 0.1}, "WRONG"),
        ('["x"]', {"items": {"pattern": "(?<n"}}, "ERROR"),
        ("[1]", {"items": {"$ref": "https://example.org/no"}}, "ERROR"),
    ],
)
def test_json_schema(by_row, text: str, schema: object, verdict: str):
    result = by_row(text, schema)
    assert str(result.verdict) == verdict, result


def test_json_schema_works_in_any_process_and_refuses_bad_schemas():
    assert "/a" in JsonSchema(SCHEMA)('{"a": "x"}', {}).detail
    with pytest.raises(ValueError, match="'schema'"):
        JsonSchema(field="schema").check_row({"schema": {"type": "no such type"}})
    with pytest.raises(UserError, match="invalid JSON Schema"):
        JsonSchema({"type": 5})
    with pytest.raises(UserError, match="timeout"):
        JsonSchema({}, timeout=0)


# ---- reward functions

MINE = """
import asyncio, os, time

def graded(completions, answer, **kwargs):
    return [len(set(a) & set(c)) / len(set(a)) for c, a in zip(completions, answer)]

def signed(completions, prompts):
    return [1 if c == p else -1 for c, p in zip(completions, prompts)]

async def asynchronous(prompts, completions, bonus=None, log_extra=None, trainer_state=None):
    await asyncio.sleep(0)
    assert log_extra is None and trainer_state is None
    return [b or 0 for b in bonus]

def chat(completions, prompts, log_metric, **kwargs):
    log_metric("x", 1)
    assert [m["role"] for m in prompts[0]] == ["system", "user"], prompts
    return [float(c[0]["role"] == "assistant" and c[0]["content"] == "yes") for c in completions]

def odd(completions, **kwargs):
    values = {"none": None, "nan": float("nan"), "big": 7.0, "text": "1.0", "true": True, "list": [1]}
    for c in completions:
        if c == "raise": raise KeyError("oh no")
        if c == "die": os._exit(3)
        if c == "hang": time.sleep(1000)
    return [values.get(c, 1.0) for c in completions if c != "fewer"]

def sizes(completions, **kwargs):
    with open(os.environ["SIZES"], "a") as file: file.write(f"{len(completions)} {' '.join(completions)}\\n")
    if "wait" in completions: time.sleep(1)
    return [1.0] * len(completions)

def trained(completions, completion_ids): pass
class Factory: pass
"""
TEXT = {"prompt": "q", "answer": "abcd"}
ASKED = [{"role": "user", "content": "q"}]
CHAT = {"prompt": "q", "system": "s", "messages": [*ASKED, {"role": "assistant", "content": "a"}]}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Reward functions of the user's, in the module ``my_rewards`` in the current directory."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SIZES", str(tmp_path / "sizes"))
    yield lambda name, **more: {"_component_": HERE + "RewardFunction", "function": f"my_rewards.{name}", **more}
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("node", "completion", "row", "verdict", "reward"),
    [
        ({"name": "graded"}, "abcd", TEXT, "CORRECT", 1),
        ({"name": "graded"}, "ab", TEXT, "WRONG", 0.5),
        ({"name": "graded", "threshold": 0.5}, "ab", TEXT, "CORRECT", 0.5),
        ({"name": "signed", "scale": [-1, 1]}, "q", TEXT, "CORRECT", 1),
        ({"name": "signed", "scale": [-1, 1]}, "x", TEXT, "WRONG", 0),
        ({"name": "signed", "scale": [-3, 1], "threshold": 0.5}, "x", TEXT, "CORRECT", 0.5),
        ({"name": "signed"}, "x", TEXT, "ERROR", None),
        ({"name": "asynchronous"}, "x", {**TEXT, "bonus": 1}, "CORRECT", 1),
        ({"name": "chat"}, "yes", CHAT, "CORRECT", 1),
        ({"name": "chat", "conversational": True}, "yes", {"prompt": "q", "system": "s"}, "CORRECT", 1),
        ({"name": "signed", "conversational": False}, "q", CHAT, "CORRECT", 1),
        *(
            ({"name": "odd"}, text, TEXT, "ERROR", None)
            for text in ("none", "nan", "big", "text", "list", "raise", "fewer")
        ),
        ({"name": "odd"}, "true", TEXT, "CORRECT", 1),
    ],
)
def test_a_reward_function_judges(mine, node, completion, row, verdict, reward):
    verifier = build(mine(**node))
    verifier.check_row(row)
    result = verifier(completion, row)
    assert (str(result.verdict), result.reward) == (verdict, reward), result


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"name": "grades"}, "did you mean graded"),
        ({"name": "trained"}, "needs completion_ids, which only a trainer has"),
        ({"name": "Factory"}, "is a class"),
        ({"name": "graded", "scale": [1, 1]}, "low < high"),
        ({"name": "graded", "scale": [0, float("inf")]}, "low < high"),
        ({"name": "graded", "threshold": 0}, "threshold"),
        ({"name": "graded", "batch_size": 0}, "batch_size"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused(mine, node, says):
    with pytest.raises(UserError, match=says):
        build(mine(**node))


def test_a_reward_function_says_which_columns_it_needs(mine):
    with pytest.raises(ValueError, match="'answer' is missing"):
        build(mine("graded")).check_row({"prompt": "q"})
    with pytest.raises(ValueError, match="'prompt' is missing"):
        build(mine("odd")).check_row({})


def test_one_bad_answer_spoils_no_other_of_its_batch(mine):
    texts = ["a", "raise", "b", "die", "none", "c", "fewer", "text", "d"]
    with Pool(mine("odd"), workers=1, timeout=30) as pool:
        results = [future.result() for future in [pool.submit(text, TEXT) for text in texts]]
    bad = {"raise": "oh no", "die": "exited with 3", "none": "None", "fewer": "0 rewards for 1", "text": "text"}
    for text, result in zip(texts, results, strict=True):
        assert str(result.verdict) == ("ERROR" if text in bad else "CORRECT"), (text, result)
        assert bad.get(text, "") in result.detail


def test_a_batch_that_hangs_is_judged_one_by_one(mine):
    with Pool(mine("odd"), workers=1, timeout=2) as pool:
        futures = [pool.submit(text, TEXT) for text in ("a", "b", "hang", "c")]
        assert [str(future.result().verdict) for future in futures] == ["CORRECT", "CORRECT", "ERROR", "CORRECT"]


def test_waiting_answers_come_in_one_call_those_to_a_prompt_together(mine, tmp_path):
    rows = [{"prompt": "p"}, {"prompt": "q"}]
    with Pool(mine("sizes", batch_size=3), workers=1, timeout=30) as pool:
        first = pool.submit("wait", rows[0])
        while not (tmp_path / "sizes").exists():
            time.sleep(0.01)
        futures = [pool.submit(text, rows[text[0] == "q"]) for text in ("p1", "q1", "p2", "q2", "p3")]
        assert all(future.result().reward == 1 for future in (first, *futures))
    assert (tmp_path / "sizes").read_text().splitlines() == ["1 wait", "3 p1 p2 p3", "2 q1 q2"]


def test_workers_outlive_the_thread_that_opened_their_pool(mine):
    opened = []
    opener = threading.Thread(target=lambda: opened.append(Pool(mine("odd"), workers=1, timeout=30).__enter__()))
    opener.start()
    opener.join()
    with contextlib.closing(opened[0]) as pool:
        assert [pool.submit("a", TEXT).result().reward for _ in range(2)] == [1, 1]


def test_closing_a_pool_drops_what_waits(mine):
    with Pool(mine("odd", batch_size=2), workers=1, timeout=30) as pool:
        futures = [pool.submit("hang", TEXT) for _ in range(6)]
    assert all(future.cancelled() or future.result().verdict is Verdict.ERROR for future in futures)


def test_rewards_of_trl_judge_as_in_trl():
    from trl.rewards import accuracy_reward, think_format_reward

    texts = ["So \\boxed{\\frac{1}{3}}", "\\boxed{\\frac{1}{2}}", "<think>\nx\n</think>\n1", "no"]
    row = {"prompt": "q", "solution": "$\\frac{1}{3}$"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    for function, expected in (
        (accuracy_reward, accuracy_reward(completions, solution=[row["solution"]] * 4)),
        (think_format_reward, think_format_reward(completions)),
    ):
        name = f"trl.rewards.{function.__name__}"
        with Pool({"_component_": HERE + "RewardFunction", "function": name, "conversational": True}, 1, 60) as pool:
            assert [f.result().reward for f in [pool.submit(text, row) for text in texts]] == expected
    with pytest.raises(ValueError, match="solution"):
        RewardFunction(accuracy_reward, conversational=True).check_row({"prompt": "q"})
    assert (
        "does not apply" in RewardFunction(accuracy_reward, conversational=True)("1", {**row, "solution": "?"}).detail
    )


def test_a_verifier_rewards_in_trls_trainer():
    trl, torch = pytest.importorskip("trl"), pytest.importorskip("torch")
    rewards = [
        as_reward_function({"_component_": HERE + "ExactMatch"}),
        pickle.loads(pickle.dumps(as_reward_function({"_component_": HERE + "MathAnswer", "field": "gold"}))),
    ]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=1), environments=None, _log_completion_extra=print, _log_metric=print,
        reward_funcs=rewards, reward_processing_classes=[None, None],
        reward_func_names=[reward.__name__ for reward in rewards],
    )  # fmt: skip
    ask = partial(trl.GRPOTrainer._calculate_rewards, trainer)
    inputs = [{"prompt": "q", "answer": "7", "gold": "7"}, {"prompt": "q", "answer": "x", "gold": 7}]
    texts, found = ["7", "\\boxed{8}"], torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert trainer.reward_func_names == ["ExactMatch", "MathAnswer"]
    assert torch.equal(ask(inputs, ["q", "q"], texts, [[1], [2]]), found)
    chats, answers = [ASKED] * 2, [[{"role": "assistant", "content": text}] for text in texts]
    inputs = [{**row, "prompt": chat} for row, chat in zip(inputs, chats, strict=True)]
    assert torch.equal(ask(inputs, chats, answers, [[1], [2]]), found)
    with pytest.raises(ValueError, match="'answer' is missing"):
        rewards[0](prompts=["q"], completions=["7"])
    failing = as_reward_function({"_component_": HERE + "Command", "command": ["false"]})
    assert failing(prompts=["q"], completions=["7"], trainer_state=None, log_extra=print) == [None]


# ---- a language model as judge


def replied(text, reason="stop"):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@pytest.fixture
def serve(monkeypatch):
    """Start a server that gives ``replies`` in turn, the last of them for ever, and a judge that asks it."""
    monkeypatch.setattr(llm_judge, "BACKOFF", 0.01)
    servers = []

    def start(*replies, template="{completion}", **arguments):
        left = list(replies)
        fake = Fake(lambda path, body: left.pop(0) if len(left) > 1 else left[0])
        servers.append(fake)
        return fake, LLMJudge(fake.url + "/v1", "judge", template, **{"timeout": 20, **arguments})

    yield start
    for fake in servers:
        fake.die()


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("score: 7", 0.7),
        ("It is right.\n\n**Score: 10**\n", 1),
        ("Score: **0**.", 0),
        ("score: 2.5", 0.25),
        ('{"score": 7, "why": "x"}', 0.7),
        ('```json\n{"score": 7}\n```', 0.7),
        ("<think>\nscore: 10\n</think>\nscore: 1", 0.1),
        ('It says\n```json\n{"score": 10}\n```\nscore: 1', 0.1),
        ('It says\n```json\n{"score": 10}\n```\nand that is bad', None),
        ("score: 7/10", None),
        ("score: 11", None),
        ("score: -1", None),
        ("The score is 7", None),
        ("score: 7\nor so", None),
        ('{"score": true}', None),
        ('{"score": "7"}', None),
        ('{"score": NaN}', None),
        ('{"score": 1e999}', None),
        ("[7]", None),
        ("7", None),
        ("[" * 100_000, None),
        ("", None),
    ],
)
def test_a_judges_reply_is_a_score_or_an_error(serve, reply, reward):
    _, judge = serve(replied(reply), threshold=0.7)
    result = judge("x", {})
    assert result.reward == reward
    assert str(result.verdict) == ("ERROR" if reward is None else "CORRECT" if reward >= 0.7 else "WRONG")


@pytest.mark.parametrize(
    ("replies", "asked", "says"),
    [
        ([(429, {}, {"retry-after": "0"}), (503, {}, {}), replied("score: 10")], 3, ""),
        ([(500, {"error": {"message": "ill"}}, {})], 3, "ill"),
        ([(429, {}, {"retry-after": "600"})], 1, "429"),
        ([(400, {"error": {"message": "too long"}}, {})], 1, "too long"),
        ([(401, {}, {})], 1, "set api_key_env"),
        ([(200, "rubbish", {})], 1, "JSON object"),
        ([{}], 1, "without a message"),
        ([{"choices": [{"message": {"content": None}}]}], 1, "without a message"),
        ([replied("score: 1", "length")], 1, "cut off"),
    ],
)
def test_a_judge_that_fails_is_asked_again_and_then_an_error(serve, replies, asked, says):
    fake, judge = serve(*replies, retries=2)
    result = judge("x", {})
    assert len(fake.asked) == asked
    assert (str(result.verdict), says in result.detail) == ("ERROR" if says else "CORRECT", True), result


def test_a_judge_that_cannot_be_reached_or_hangs_is_an_error(serve):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert LLMJudge(f"http://127.0.0.1:{port}", "m", "{completion}", retries=1)("x", {}).verdict is Verdict.ERROR
    event = threading.Event()
    fake, judge = serve(None, timeout=0.5)
    fake.reply = lambda path, body: event.wait(60) and {}
    assert judge("x", {}).verdict is Verdict.ERROR
    event.set()


def test_a_completion_stays_in_its_fence_and_rows_are_filled_in(serve):
    fake, judge = serve(replied("score: 10"), template="{{q}} {prompt}|{cases}|{completion}|", options={"seed": 1})
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"template": "{completion.__class__}"}, "field alone"),
        ({"template": "{completion[0]}"}, "field alone"),
        ({"template": "{completion!r}"}, "field alone"),
        ({"template": "{completion:>{width}}"}, "field alone"),
        ({"template": "{}{completion}"}, "field alone"),
        ({"template": "{completion"}, "no template"),
        ({"template": "{answer}"}, "lacks {completion}"),
        ({"base_url": "localhost:8000"}, "server's address"),
        ({"scale": [10, 0]}, "low < high"),
        ({"retries": -1}, "retries"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_a_judge_is_checked_when_it_is_built(arguments, says):
    node = {"_component_": HERE + "LLMJudge", "base_url": "http://x/v1", "model": "m", "template": "{completion}"}
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
    node = {"_component_": HERE + "LLMJudge", "base_url": fake.url, "model": "m", "template": "{completion}"}
    results = judge.judge_batch(["1", "bad", "3"], [{}] * 3)
    assert [result.reward for result in results] == [0.1, None, 0.3]
    assert all(headers["Authorization"] == "Bearer secret" for _, _, headers in fake.asked)
    fake.reply = lambda path, body: replied("score: 10")
    with Pool({**node, "api_key_env": "MY_KEY"}, workers=1, timeout=30) as pool:
        assert [f.result().reward for f in [pool.submit("x", {}) for _ in range(5)]] == [1] * 5
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="is not set"):
        build({**node, "api_key_env": "MY_KEY"}).check()


# ---- a program that stays


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
    if text == "twice": sys.stdout.write(json.dumps({"id": number, "verdict": "CORRECT", "reward": 1}) + "\\n")
    say(id=number, verdict="CORRECT", reward=1, detail=f"{os.getpid()} {count}")
"""


def persistent(timeout: float = 30) -> dict:
    command = [sys.executable, "-S", "-c", PROGRAM]
    return {"_component_": HERE + "Command", "command": command, "persistent": True, "timeout": timeout}


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("die", "ended with 3 instead of answering; its stderr: started oh no"),
        ("hang", "has not answered within 2 s; its stderr: started"),
        ("close", "closed its stdout"),
        ("noise", "loading the model"),
        ("flood", "printed more than"),
        ("other", "the id is"),
        ("anonymous", "'id'"),
        ("verdict", "MAYBE"),
        ("reward", "[0, 1]"),
        ("twice", "printed more than one line"),
    ],
)
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


def wait_for_end(pid: int) -> None:
    """Return once the process has ended; the test's time limit ends the waiting."""
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        time.sleep(0.01)
