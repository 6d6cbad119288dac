"""Reward functions in TRL's signature, both ways, and answers judged in batches."""

import pickle
import sys
import time
from pathlib import Path

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.verifiers import Pool, Result, RewardFunction, as_reward_function, build
from tests.kit.tiny import write_model

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."

MINE = """
import asyncio, os, time
from rocm_ext.verifiers import Result, Verdict

def wait():
    open("waiting", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)

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
    if "wait" in completions: wait()
    return [1.0] * len(completions)

class Pairs:
    def __init__(self, batch_size=2): self.batch_size = batch_size
    def __call__(self, completion, row):
        if completion == "wait": wait()
        return Result(Verdict.CORRECT, 1.0, "alone")
    def judge_batch(self, completions, rows):
        result = [Result(Verdict.CORRECT, 1.0, f"one of {len(rows)}") for _ in completions]
        return {"a": result, "fewer": result[1:], "tuple": tuple(result), "none": [None, *result[1:]]}[completions[0]]

class Sizeless(Pairs):
    def __init__(self): pass

def parted(completions, log_metric, **kwargs):
    log_metric("long", max(map(len, completions)) / 10)
    log_metric("unknown", float("nan"))
    given = {"none": None, "lacks": {"form": 1}, "plain": 0.5}
    return [given.get(c, {"reward": 0.25, "form": True, "sum": len(c), "unknown": None}) for c in completions]

def trained(completions, completion_ids): pass
def placed(completions, /, **columns): pass
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
    yield lambda name, **more: {
        "_component_": HERE + "RewardFunction",
        "function": f"my_rewards.{name}",
        **more,
    }
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("node", "completion", "row", "verdict", "reward"),
    [
        ({"name": "graded"}, "ab", TEXT, "WRONG", 0.5),
        ({"name": "graded", "threshold": 0.5}, "ab", TEXT, "CORRECT", 0.5),
        ({"name": "signed", "scale": [-1, 1]}, "q", TEXT, "CORRECT", 1),
        ({"name": "signed"}, "x", TEXT, "ERROR", None),
        ({"name": "asynchronous"}, "x", {**TEXT, "bonus": 1}, "CORRECT", 1),
        ({"name": "chat"}, "yes", CHAT, "CORRECT", 1),
        (
            {"name": "chat", "conversational": True},
            "yes",
            {"prompt": "q", "system": "s"},
            "CORRECT",
            1,
        ),
        *(
            ({"name": "odd"}, text, TEXT, "ERROR", None)
            for text in ("none", "nan", "big", "text", "list", "raise", "fewer")
        ),
    ],
)
def test_a_reward_function_judges(mine, node, completion, row, verdict, reward):
    verifier = build(mine(**node))
    verifier.check_row(row)
    result = verifier(completion, row)
    assert (str(result.verdict), result.reward) == (verdict, reward), result


@pytest.mark.parametrize(("node", "says"), [
    ({"name": "grades"}, "did you mean graded"),
    ({"name": "trained"}, "needs completion_ids, which only a trainer has"), ({"name": "Factory"}, "is a class"),
    ({"name": "placed"}, "completions by position only"), ({"name": "graded", "scale": [-1e308, 1e308]}, "low < high"),
    ({"name": "graded", "scale": [1, 1]}, "low < high"),
    ({"name": "graded", "threshold": 0}, "threshold"),
])  # fmt: skip
def test_a_reward_function_that_cannot_be_called_is_refused(mine, node, says):
    with pytest.raises(UserError, match=says):
        build(mine(**node))
    for name, column in (("graded", "answer"), ("odd", "prompt")):
        with pytest.raises(ValueError, match=f"'{column}' is missing"):
            build(mine(name)).check_row({"prompt": "q"} if column == "answer" else {})


def test_parts_of_a_reward_come_out_of_the_workers(mine):
    """A mapping has them for an answer, TRL's ``log_metric`` for a call."""
    texts = ["abc", "plain", "none", "lacks"]
    with Pool(mine("parted", batch_size=1), workers=1, timeout=30) as pool:
        parted, plain, none, lacks = [
            future.result() for future in [pool.submit(text, TEXT) for text in texts]
        ]
    assert (str(parted.verdict), parted.reward) == ("WRONG", 0.25)
    assert parted.parts == {"long": 0.3, "form": 1, "sum": 3}
    assert (plain.reward, plain.parts) == (0.5, {"long": 0.5})
    assert (str(none.verdict), str(lacks.verdict)) == ("ERROR", "ERROR")
    assert "expected 'reward' beside its parts" in lacks.detail
    weighted = {"_component_": HERE + "Weighted", "verifiers": [mine("parted")], "weights": [1]}
    assert build(weighted)("abc", TEXT).parts == {
        "parted": 0.25,
        "parted/long": 0.3,
        "parted/form": 1,
        "parted/sum": 3,
    }


def test_one_bad_answer_spoils_no_other_of_its_batch(mine):
    texts = ["a", "raise", "b", "die", "none", "c", "fewer", "text", "d"]
    with Pool(mine("odd"), workers=1, timeout=30) as pool:
        results = [future.result() for future in [pool.submit(text, TEXT) for text in texts]]
    bad = {
        "raise": "oh no",
        "die": "exited with 3",
        "none": "None",
        "fewer": "0 rewards for 1",
        "text": "text",
    }
    for text, result in zip(texts, results, strict=True):
        assert str(result.verdict) == ("ERROR" if text in bad else "CORRECT"), (text, result)
        assert bad.get(text, "") in result.detail


@pytest.mark.wide
def test_a_batch_that_hangs_is_judged_one_by_one(mine):
    with Pool(mine("odd"), workers=1, timeout=1) as pool:
        futures = [pool.submit(text, TEXT) for text in ("a", "b", "hang", "c")]
        assert [str(future.result().verdict) for future in futures] == [
            "CORRECT",
            "CORRECT",
            "ERROR",
            "CORRECT",
        ]


def judged_together(pool: Pool, answers: list[tuple[str, dict]]) -> list[Result]:
    """Submit the answers while the pool's only worker waits for them all to be there."""
    pool.submit("wait", {"prompt": "w"})
    while not Path("waiting").exists():
        time.sleep(0.01)
    futures = [pool.submit(text, row) for text, row in answers]
    Path("go").touch()
    return [future.result() for future in futures]


def test_a_class_of_ones_own_judges_batches(mine):
    with Pool({"_component_": "my_rewards.Pairs"}, workers=1, timeout=30) as pool:
        results = judged_together(
            pool, [(text, {}) for text in ("a", "a", "fewer", "b", "tuple", "b", "none", "b")]
        )
    details = [result.detail for result in results]
    assert details[:6] == ["one of 2", "one of 2", "alone", "alone", "alone", "alone"]
    assert details[6:] == ["Pairs returned NoneType, not a Result", "one of 2"]
    for node in (
        {"_component_": "my_rewards.Pairs", "batch_size": 0},
        {"_component_": "my_rewards.Sizeless"},
    ):
        with (
            pytest.raises(UserError, match="batch_size must be"),
            Pool(node, workers=1, timeout=30),
        ):
            pass


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
        with Pool(
            {"_component_": HERE + "RewardFunction", "function": name, "conversational": True},
            1,
            60,
        ) as pool:
            assert [
                f.result().reward for f in [pool.submit(text, row) for text in texts]
            ] == expected
    with pytest.raises(ValueError, match="solution"):
        RewardFunction(accuracy_reward, conversational=True).check_row({"prompt": "q"})
    unknown = RewardFunction(accuracy_reward, conversational=True)("1", {**row, "solution": "?"})
    assert "does not apply" in unknown.detail


@pytest.mark.wide
def test_a_verifier_rewards_as_trls_trainer_asks(tmp_path):
    trl, datasets, torch = (pytest.importorskip(name) for name in ("trl", "datasets", "torch"))
    write_model(tmp_path / "model")
    rewards = [
        as_reward_function({"_component_": HERE + "ExactMatch"}),
        pickle.loads(
            pickle.dumps(as_reward_function({"_component_": HERE + "MathAnswer", "field": "gold"}))
        ),
    ]
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=8, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "q", "answer": "7", "gold": "7"}] * 4)
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"), reward_funcs=rewards, args=settings, train_dataset=rows
    )
    assert trainer.reward_func_names == ["ExactMatch", "MathAnswer"]
    inputs = [
        {"prompt": "q", "answer": "7", "gold": "7"},
        {"prompt": "q", "answer": "x", "gold": 7},
    ]
    texts, found = ["7", "\\boxed{8}"], torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(trainer._calculate_rewards(inputs, ["q", "q"], texts, [[1], [2]]), found)
    chats, answers = [ASKED] * 2, [[{"role": "assistant", "content": text}] for text in texts]
    inputs = [{**row, "prompt": chat} for row, chat in zip(inputs, chats, strict=True)]
    assert torch.equal(trainer._calculate_rewards(inputs, chats, answers, [[1], [2]]), found)
    trainer.train()
    assert 0 <= trainer.state.log_history[0]["rewards/ExactMatch/mean"] <= 1
    with pytest.raises(ValueError, match="'answer' is missing"):
        rewards[0](prompts=["q"], completions=["7"])
    failing = as_reward_function({"_component_": HERE + "Command", "command": ["false"]})
    assert failing(prompts=["q"], completions=["7"], trainer_state=None, log_extra=print) == [None]
