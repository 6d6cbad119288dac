"""Environments and tools in TRL's form."""

import ast
import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="forks and POSIX signals")

from rocm_ext.base.errors import UserError
from rocm_ext.environments import Call, Environments, processes
from rocm_ext.verifiers import Verdict

WORLDS = "tests.kit.trl_worlds."
ROW = {"prompt": "Count.", "target": 6}


def call(name, number=0, **arguments):
    return Call(name, arguments).message(number)


def said(text, *calls):
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def talk(environments, *messages, row=ROW, cut=None):
    key = ("p", 0)
    replies = [environments.begin(key, row).result(30)]
    replies += [environments.say(key, message).result(30) for message in messages]
    replies += [] if cut is None else [environments.cut(key, cut).result(30)]
    environments.end(key)
    return replies


def opened(factory, **arguments):
    return Environments(
        {"_component_": "rocm_ext.environments.Trl", "factory": WORLDS + factory, **arguments}, 30
    )


def test_an_environment_with_a_reward_of_its_own():
    with opened("Rewarded") as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["add", "double"]
        amount = environments.tools[0]["function"]["parameters"]["properties"]["amount"]
        assert amount == {"type": "integer", "description": "How much to add."}
        opening, first, second, end = talk(
            environments,
            said("", call("add", amount=3)),
            said("", call("double"), call("add", 1, amount=-1), call("_hidden", 2)),
            said("Done."),
        )
        assert opening == [{"role": "user", "content": " The target is 6."}]
        assert [message["content"] for message in first] == ['{"value": 3}']
        assert [message["content"][:5] for message in second] == ["6", "error", "error"]
        assert (end.verdict, end.reward) == (Verdict.CORRECT, 1.0)
        *_, end = talk(environments, said("I give up."))
        assert (end.verdict, end.reward) == (Verdict.WRONG, 0.0)


def test_a_conversation_that_ends_while_a_message_is_sent(monkeypatch):
    ended, future, end = threading.Event(), processes.Future, processes._Talk.end

    def ends(*arguments):
        end(*arguments)
        ended.set()

    def waits():
        environments.end(("p", 0))
        assert ended.wait(30)
        return future()

    with opened("Rewarded") as environments:
        environments.begin(("p", 0), ROW).result(30)
        monkeypatch.setattr(processes._Talk, "end", ends)
        monkeypatch.setattr(processes, "Future", waits)
        assert environments.say(("p", 0), said("Done.")).result(10).verdict is Verdict.ERROR


def test_an_environment_with_a_reward_function():
    with opened("Silent", reward=WORLDS + "nearness", threshold=0.9) as environments:
        opening, _, end = talk(environments, said("", call("add", amount=3)), said("Done."))
        assert opening == []
        assert end.reward == pytest.approx(0.7)
        cut = talk(environments, said("", call("add", amount=5)), cut=said("and th"))[-1]
        assert (cut.verdict, cut.reward) == (Verdict.CORRECT, pytest.approx(0.9))
        last = said("", call("add", amount=5))
        cut = talk(environments, last, cut=last)[
            -1
        ]  # the last message of those allowed, whose result nobody reads
        assert cut.reward == 0.0, (
            "the function gets a conversation that ends with the tool's result"
        )


@pytest.mark.parametrize(("arguments", "message"), [
    ({"factory": "Timeless"}, "without a method reset"),
    ({"factory": "Counter"}, "needs either a method get_reward or"),
    ({"factory": "Rewarded", "reward": WORLDS + "nearness"}, "needs either a method get_reward or"),
    ({"factory": "Counter", "reward": WORLDS + "trainers_own"}, "needs completion_ids"),
    ({"factory": "Countr"}, "has no 'Countr'"),
])  # fmt: skip
def test_mistakes(arguments, message):
    with pytest.raises(UserError, match=message) as raised, opened(**arguments):
        pass
    assert "\n" not in str(raised.value)


SCRIPT = [  # the model's messages, turn by turn, as Qwen3 writes calls; the last ends the conversation
    '<tool_call>\n{"name": "add", "arguments": {"amount": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "double", "arguments": {}}\n</tool_call>',
    "Done.",
]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("factory", ["Rewarded", "Counter"])
def test_rewards_equal_those_of_trls_trainer(factory, tmp_path, monkeypatch):
    """TRL's trainer, whose model says what the script says, and ours get the same rewards from the same messages."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    from datasets import Dataset
    from transformers import AutoTokenizer

    from tests.kit import trl_worlds
    from tests.kit.tiny import write_model

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = write_model(tmp_path / "model", max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        Path(grpo.__file__).parents[1] / "chat_templates/qwen3.jinja"
    ).read_text()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    seen, rewards = [], []

    class Scripted(grpo.GRPOTrainer):
        turn = 0

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids = self.processing_class(SCRIPT[self.turn] + "<|im_end|>")["input_ids"]
            self.turn += 1
            return [list(ids) for _ in prompt_ids], None

        def _calculate_rewards(self, *args):
            rewards.append(super()._calculate_rewards(*args))
            return rewards[0]

    def reward(prompts, completions, **columns):
        seen.append((prompts, completions))
        return trl_worlds.nearness(prompts, completions, **columns)

    args = grpo.GRPOConfig(
        str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=2000,
        report_to=[], use_cpu=True, logging_steps=1,
    )  # fmt: skip
    row = {"prompt": [{"role": "user", "content": "Count."}], "target": 6}
    trainer = Scripted(
        str(folder), [reward], args, Dataset.from_list([row] * 2), processing_class=tokenizer,
        environment_factory=getattr(trl_worlds, factory),
    )  # fmt: skip
    trainer._generate_and_score_completions([row, row])

    with opened(
        factory, **({} if factory == "Rewarded" else {"reward": WORLDS + "nearness"})
    ) as environments:
        opening, first, second, end = talk(
            environments, said("", call("add", amount=2)), said("", call("double")), said(SCRIPT[2])
        )
    assert end.reward == pytest.approx(
        rewards[0][0, -1].item()
    )  # the last of the trainer's rewards
    [prompt, _], [completion, _] = seen[0]
    assert [m["content"] for m in prompt] == [row["prompt"][0]["content"] + opening[0]["content"]]
    assert [m["role"] for m in completion] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    results = [m["content"] for m in completion if m["role"] == "tool"]
    assert results[1] == second[0]["content"]
    assert ast.literal_eval(results[0]) == json.loads(
        first[0]["content"]
    )  # Python's form there, JSON here
