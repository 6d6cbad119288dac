"""Requests for the model's messages in a conversation queue: what they go on from, and those that are odd."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("resource", reason="forks and POSIX signals")

from rocm_ext.data.render import render_prompt
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.environments import Ask
from rocm_ext.pocket import write_tokenizer
from rocm_ext.rl.conversations import ConversationQueue, Limits
from rocm_ext.rl.selection import Selected
from rocm_ext.sampling import Completion, Request, RequestQueue, Sampling
from rocm_ext.verifiers import Result, Verdict
from tests.kit.chats import assistant, user

END = Result(Verdict.CORRECT, 1.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [])
    component = {"_component_": "rocm_ext.data.HFTokenizer", "path": str(folder / "tokenizer.json")}
    more = {"chat_template": "auto", "chat_template_args": {}, "chat_template_date": "2024-07-26"}
    return open_tokenizer(
        OmegaConf.create(
            {"tokenizer": component, "checkpointer": {"checkpoint_dir": str(folder)}, **more}
        )
    )


class Script:
    """The environment's side: it replies to each conversation with the same list, or with the list of its number."""

    def __init__(self, replies, at_once=8):
        self.replies, self.at_once, self.heard, self.open, self.most = replies, at_once, [], {}, 0

    def begin(self, key, row):
        self.open[key] = iter(
            self.replies[key[1]] if isinstance(self.replies, dict) else self.replies
        )
        self.most = max(self.most, len(self.open))
        return self.say(key, None)

    def say(self, key, message):
        self.heard.append(message)
        future = Future()
        future.set_result(next(self.open[key]))
        return future

    refuse = say

    def end(self, key):
        del self.open[key]


def talk(tokenizer, texts, replies, samples=1, **more):
    """Return the samples and results of conversations in which the model says ``texts``, and their other side."""
    messages, script, found = (user("What is 3 + 4?"),), Script(replies, **more), []
    ids = tuple(render_prompt(tokenizer, messages))
    requests = RequestQueue(Request("p", i, 1, ids, messages) for i in range(samples))
    records = SimpleNamespace(records={}, append=json.dumps)
    queue = ConversationQueue(
        requests, Sampling(99), script, tokenizer, Limits(8, 500), lambda: False, {"p": {}}, records
    )
    said = {i: iter(texts) for i in range(samples)}
    for asked in queue.prompts():
        for request in asked:
            text, (end, *_) = next(said[request.sample]), tokenizer.stop_tokens
            tokens = [*tokenizer.encode(text, add_bos=False, add_eos=False), end]
            queue.add(Completion(request, tokens, [0.0] * len(tokens), text, "stop"))
        found += queue.ended()
    return found, script


@pytest.mark.parametrize("blank", ["", None, " ", [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("system", [False, True])
def test_the_model_may_have_said_nothing(tokenizer, blank, system):
    """A history that is rendered anew has an empty message, too."""
    more = [{"role": "system", "content": "Speak."}] * system
    asks = [Ask([user("hi")], []), Ask([*more, user("hi"), assistant(blank), user("and?")], [])]
    [(sample, result)], _ = talk(
        tokenizer, [blank if isinstance(blank, str) else "", "no"], [*asks, END]
    )
    assert result == END, result.detail
    assert [fresh for _, _, fresh in sample.given] == [True, system]


def test_messages_that_a_program_rewrites_are_no_turns(tokenizer):
    asks = [Ask([user("hi")], []), Ask([user("hi"), assistant("YES"), user("and?")], [])]
    [(sample, _)], _ = talk(tokenizer, ["yes", "no"], [*asks, END])
    assert [message["content"] for message in sample.messages] == ["hi", "yes", "YES", "and?", "no"]
    assert sample.tools is None
    assert Selected._of_conversations(SimpleNamespace(samples={"a": sample})) == {
        "turns": 2,
        "rewritten": 1,
    }


SAME = {"name": "add", "arguments": '{"a": 3}'}


@pytest.mark.parametrize("said", [
    assistant(None, tool_calls=[SAME]),
    {"role": "assistant", "tool_calls": [{"id": "call00000", "type": "function", "index": 0, "function": SAME}]},
    assistant("", tool_calls=[{"id": "call00000", "type": "function", "function": SAME}]),
], ids=["bare", "verifiers", "OpenEnv"])  # fmt: skip
def test_calls_come_back_in_other_forms(tokenizer, said):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    answered = [said, {"role": "tool", "content": "7"}]
    [(sample, result)], script = talk(
        tokenizer,
        [call, "It is 7."],
        [Ask([user("hi")], tools), Ask([user("hi"), *answered], tools), END],
    )
    assert result == END, result.detail
    assert "tool_calls" in script.heard[1]
    assert sample.tools == tools
    assert [message["role"] for message in sample.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [fresh for _, _, fresh in sample.given] == [True, False]


@pytest.mark.parametrize("ask", [
    Ask([user("hi")], [{"name": "f", "parameters": {"enum": 5}}]),
    Ask([user("hi")], [{"name": "f", "anyOf": 7}]),
    Ask([user("\ud800")], []),
    Ask([{"role": ["user"], "content": "hi"}], []),
])  # fmt: skip
def test_an_odd_request_is_refused_and_the_conversation_goes_on(tokenizer, ask):
    replies = {0: [ask, Ask([user("hi")], []), END], 1: [ask] * 9, 2: [Ask([user("hi")], []), END]}
    found, script = talk(tokenizer, ["yes"], replies, samples=3)
    verdicts = {sample.sample: result.verdict for sample, result in found}
    assert verdicts == {0: Verdict.CORRECT, 1: Verdict.ERROR, 2: Verdict.CORRECT}
    assert sum("cannot be rendered" in str(heard) for heard in script.heard) == 1 + 8


def test_a_prompts_conversations_wait_for_room(tokenizer):
    found, script = talk(tokenizer, ["yes"], [Ask([user("hi")], []), END], samples=5, at_once=2)
    assert sorted(sample.sample for sample, _ in found) == [0, 1, 2, 3, 4]
    assert script.most == 2
