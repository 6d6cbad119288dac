"""Conversations with environments in GRPO and RAFT, also on servers: what is recorded, trained on and resumed."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import yaml
from rocm_ext.recipes.grpo_rocm import GRPO, main
from rocm_ext.recipes.raft_rocm import main as raft_main
from tokenizers import Tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.rl.records import PhaseRecords, to_sample
from rocm_ext.sampling import local
from tests.kit import forks
from tests.kit.forks import RESUME, forked, refused, succeed
from tests.kit.grpo_runs import assert_equal, lines
from tests.kit.raft_runs import cycle_line, kill_at_record, loaded
from tests.kit.servers import COMPLETIONS, Fake, Sampler, Vllm, is_check
from tests.kit.tiny import metrics, write_yaml

AGENT = Path(__file__).parents[1] / "kit/agent.py"
SHORT = {
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "steps": 2,
    "groups_per_update": None,
    "lr_scheduler": None,
}


@pytest.fixture
def write(pocket_dir, tmp_path):
    """Return a function that writes the config of a run on the pocket model, with Echo's arguments."""

    def write(
        name: str = "run", echo: dict | None = None, base: str = "cpu_pocket_grpo", **changes
    ) -> Path:
        cfg = yaml.safe_load(
            (Path(config.__file__).parents[2] / "recipe_configs" / f"{base}.yaml").read_text()
        )
        cfg |= {
            "pocket": str(pocket_dir), "output_dir": str(tmp_path / name), "verifier": None, "eval_prompts": None,
            "environment": {"_component_": "tests.kit.games.Echo", **(echo or {})}, "max_new_tokens": 60,
            "max_environment_tokens": 96, "max_error_share": 1.0, "verify_timeout": 10,
            **(SHORT if base == "cpu_pocket_grpo" else {}), **changes,
        }  # fmt: skip
        return write_yaml(tmp_path / f"{name}.yaml", cfg)

    return write


def run(path: Path, *overrides: str, **more) -> Path:
    succeed(more.pop("main", main), path, *overrides, **more)
    return Path(yaml.safe_load(path.read_text())["output_dir"])


@pytest.mark.wide
@pytest.mark.parametrize("opening", ["Ready?", ""])
def test_the_model_is_trained_on_the_tokens_that_it_sampled(write, opening):
    out = run(write(echo={"opening": opening}))
    assert max(metrics(out, "mismatch_max")) < 1e-4, (
        "the trainer computes them behind the same tokens"
    )
    assert min(metrics(out, "grad_norm")) > 0
    for line in lines(out / "samples.jsonl"):
        sample = to_sample(line)
        ((ids, own, part),) = sample.sequences([1, 2, 3])
        assert (
            [i for i, mine in zip(ids, own, strict=True) if mine]
            == sample.tokens[part]
            == sample.tokens
        )
        roles, turns = (
            [message["role"] for message in sample.messages],
            len(sample.given) - bool(opening),
        )
        assert roles == ["user"] * bool(opening) + ["assistant", "user"] * turns + ["assistant"]
        assert line["text"] == sample.messages[-1]["content"]


@pytest.mark.wide
def test_raft_keeps_conversations(write):
    path = write(
        base="cpu_pocket_raft",
        cycles=1,
        prompts_per_cycle=8,
        epochs=1,
        keep="rewarded",
        reward_threshold=0.5,
    )
    out = run(path, main=raft_main)
    assert cycle_line(out, 1)["kept"] > 0
    assert (out / "adapter").is_dir()


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["raise", "exit", "hang"])
def test_a_fault_costs_its_conversation(write, fault):
    out = run(write(echo={"fault": fault}, verify_timeout=2 if fault == "hang" else 60))
    verdicts = lines(out / "verdicts.jsonl")
    errors = [line for line in verdicts if line["verdict"] == "ERROR"]
    assert len(verdicts) == 16
    assert 0 < len(errors) < 8
    said = {"raise": "a fault", "exit": "died", "hang": "hung for 2 s"}[fault]
    assert all(said in line["detail"] and line["reward"] is None for line in errors)
    assert sum(metrics(out, "errors")) == len(errors)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("limits", "detail"), [
    ({"max_turns": 2}, "cut at max_turns"),
    ({"max_environment_tokens": 30}, "cut at max_environment_tokens"),
    ({"max_new_tokens": 30}, "cut at max_new_tokens"),
])  # fmt: skip
def test_limits_end_conversations(write, limits, detail):
    out = run(write(steps=1, truncated="keep", **limits))
    verdicts = lines(out / "verdicts.jsonl")
    cut = {
        (line["prompt_id"], line["sample"]): line for line in verdicts if detail in line["detail"]
    }
    assert cut
    for line in lines(out / "samples.jsonl"):
        assert (line["finish_reason"] == "length") == ((line["prompt_id"], line["sample"]) in cut)
        assert len(line["tokens"]) <= limits.get("max_new_tokens", 60)
        assert sum(len(ids) for _, ids, _ in line["given"]) <= limits.get(
            "max_environment_tokens", 96
        )
        assert sum(message["role"] == "assistant" for message in line["messages"]) <= limits.get(
            "max_turns", 8
        )
    assert all(line["reward"] == 0.25 for line in cut.values()), "what judge says"


def computed_again() -> None:
    """Let the sampler compute a conversation's history anew each turn, as it does after a kill."""
    local.LocalSession._keeps = lambda *_: False


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "count"), [("samples.jsonl", 7), ("verdicts.jsonl", 12), ("turns.jsonl", 30)]
)
def test_killed_and_resumed(write, name, count):
    whole = run(write("whole"), prepare=computed_again)
    path, kills = write("killed"), kill_at_record(name, count)
    code, _ = forked(main, path, prepare=lambda: (computed_again(), kills()))
    assert code == -9
    left = path.with_name("killed") / "turns.jsonl"
    before = {line["behind"] for line in map(json.loads, left.read_text().splitlines()[:-1])}

    def noted() -> None:
        computed_again()
        append = PhaseRecords.append

        def note(self, record):
            append(self, record)
            assert record.get("behind") not in before, "a message is sampled twice"

        PhaseRecords.append = note

    assert_equal(run(path, RESUME, prepare=noted), whole)
    assert before
    assert not left.exists()


@pytest.mark.wide
@forks.several_ranks
def test_ranks_and_kept_caches_change_no_answer(write):
    one, again = run(write("one", steps=1)), run(write("again", steps=1), prepare=computed_again)
    forks.succeed_on_ranks(main, two := write("two", steps=1))
    assert answers(one) == answers(again) == answers(two.with_name("two"))


def test_turns_of_a_named_set_have_the_seeds_of_one_alone(write):
    prompts = {
        "_component_": "rocm_ext.data.prompt_dataset",
        "source": "${pocket}/heldout.jsonl",
        "limit": 3,
    }
    texts = []
    for name, sets in (("plain", prompts), ("named", {"sums": prompts})):
        out = run(write(name, eval_prompts=sets, eval_samples=2, steps=1, prompts_per_step=1))
        drawn = [line for line in lines(out / "samples.jsonl") if line["phase"] == "eval"]
        assert max(len(line["given"]) for line in drawn) > 0, "a conversation has several turns"
        texts.append(sorted(json.dumps(line["tokens"]) for line in drawn))
    assert texts[0] == texts[1]


def answers(out: Path) -> list[tuple]:
    return sorted(
        (line["prompt_id"], line["sample"], line["tokens"]) for line in lines(out / "samples.jsonl")
    )


def test_what_an_environment_says_is_text(write, pocket_dir):
    out = run(write(steps=1, environment={"_component_": "tests.kit.games.Hostile"}))
    begins = Tokenizer.from_file(str(pocket_dir / "tokenizer.json")).token_to_id("<|im_start|>")
    given = [ids for line in lines(out / "samples.jsonl") for _, ids, _ in line["given"]]
    assert given
    assert all(ids.count(begins) == 2 for ids in given), "its turn and the model's"


@pytest.mark.parametrize(("changes", "said"), [
    ({"verifier": {"_component_": "rocm_ext.verifiers.MathAnswer"}}, "verifier and environment are both set"),
    ({"environment": None}, "verifier or environment must be set"),
    ({"environment": {"_component_": "tests.kit.judges.Coin"}}, "is not derived from"),
    ({"stop_strings": ["x"]}, "stop_strings is ['x']"),
    ({"max_environment_tokens": 10_000}, "remove the prompt"),
    ({"echo": {"opening": "Are you ready? " * 9}, "max_environment_tokens": 20, "max_error_share": 0.5},
     "max_environment_tokens is 20"),
])  # fmt: skip
def test_mistakes_are_one_line(write, changes, said):
    with pytest.raises(UserError) as caught:
        loaded(GRPO, write(**changes)).check()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_first_request_is_for_the_run_to_refuse(write):
    environment = {"_component_": "tests.kit.games.Malformed"}
    loaded(GRPO, write(environment=environment, max_error_share=0.5)).check()


@pytest.mark.wide
def test_ctrl_c_does_not_wait_for_tools(write):
    path = write(steps=1, echo={"pause": 900}, verify_timeout=1000)

    def interrupt_soon(self, record) -> None:
        if len(self.records) == 8:  # the first messages of all conversations
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    code, said = forked(main, path, prepare=forks.hook(PhaseRecords, "append", interrupt_soon))
    assert code == 130, said
    assert len(lines(path.with_name("run") / "turns.jsonl")) == 8


# ---- on servers


@pytest.fixture
def fake(pocket_dir):
    """A server of the pocket model; it calls ``fake.before(body)`` before each answer, and sends what this returns."""
    files = ("vocab.json", "merges.txt", "tokenizer.json")
    rules = Vllm(
        Sampler(pocket_dir, qwen2_5_tokenizer(*(str(pocket_dir / name) for name in files)))
    )

    def reply(path, body):
        answer = fake.before(body) if path == COMPLETIONS and not is_check(body) else None
        return answer or rules(path, body)

    fake = Fake(reply)
    fake.before, fake.rules = lambda body: None, rules
    yield fake
    fake.die()


@pytest.fixture
def serve(write, fake):
    """Return a function that writes the config of a run on the server: 2 steps of 2 prompts with 4 answers each."""

    def serve(name="run", concurrency=4, **changes):
        engine = {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": [fake.url], "patience": "1 s",
                  "concurrency": concurrency}  # fmt: skip
        return write(name, engine=engine, **changes)

    return serve


def given(out):
    """Return what the environment and the template gave, and how often."""
    samples = lines(out / "samples.jsonl")
    return {
        (turn, tuple(ids)) for line in samples for turn, (_, ids, _) in enumerate(line["given"])
    }


@pytest.mark.wide
def test_each_turn_is_sent_and_trained_as_its_ids(serve, write, fake):
    out = run(serve())
    assert max(metrics(out, "mismatch_max")) < 1e-4, (
        "the trainer computes them behind the same tokens"
    )
    assert given(out) == given(run(write("local"))), "the same as in this process"
    samples, rows = map(to_sample, lines(out / "samples.jsonl")), []
    sent = {tuple(body["prompt"]) for body in fake.bodies()}
    for sample in samples:
        start = next(ids for ids in sorted(sent, key=len) if follows(sample, ids, sent))
        ((ids, own, _),) = sample.sequences(list(start))
        rows.append(ids)
        ends = [end for end in range(1, len(ids)) if own[end] and not own[end - 1]]
        assert len(ends) == 3, "turns"
        assert all(tuple(ids[:end]) in sent for end in ends)
    assert len(rows) == 16


def follows(sample, start, sent) -> bool:
    """Whether the prompt of the sample's second turn behind ``start`` was sent."""
    first, ids, _ = sample.given[0]
    return (*start, *sample.tokens[:first], *ids) in sent


@pytest.mark.wide
def test_conversations_that_wait_block_no_request(serve, fake):
    """While the first conversations' tools work, others take their places; the server is never asked too much."""
    lengths = []
    fake.before = lambda body: lengths.append(len(body["prompt"]))
    run(serve(steps=1, concurrency=2, echo={"pause": 3.0}))
    assert max(lengths[:8]) < 40 < max(lengths), (
        "first turns, four times as many as the server takes at once"
    )
    assert fake.most == 2


# ---- with an agent that is a program of the user's


@pytest.fixture
def program(write):
    """Return a function that writes the config of a run with the agent of the tests, and its arguments."""

    def program(name, *arguments, **changes):
        command = ["python", str(AGENT), *arguments]
        environment = {"_component_": "rocm_ext.environments.Program", "command": command}
        return write(name, environment=environment, **{"verify_timeout": 60, **changes})

    return program


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_program_s_model_is_trained_on_its_tokens(program, forgets):
    """Where the agent leaves out what was said, the history is rendered anew, and the conversation has two rows."""
    # long enough for some conversations to end, whatever this processor's pocket model says
    longer = {"samples_per_prompt": 8, "max_new_tokens": 160}
    out = run(program("run", *["forgets"] * forgets, steps=1, truncated="keep", **longer))
    assert max(metrics(out, "mismatch_max")) < 1e-4, (
        "the trainer computes them behind the same tokens"
    )
    assert metrics(out, "rewritten") == [pytest.approx(float(forgets), abs=0.3)]
    assert metrics(out, "reward/asked") == [2]
    samples = [line for line in lines(out / "samples.jsonl") if line["finish_reason"] == "stop"]
    assert samples
    for line in samples:
        rows = list(to_sample(line).sequences([1, 2, 3]))
        assert len(rows) == 1 + forgets
        own = [i for ids, mine, _ in rows for i, is_own in zip(ids, mine, strict=True) if is_own]
        assert own == line["tokens"]
        assert [message["role"] for message in line["messages"]] == [
            "assistant",
            "user",
            "assistant",
        ]
        assert "<|im_end|>" not in line["messages"][1]["content"], "it cannot end its turn"


@pytest.mark.wide
def test_killed_with_a_program_and_resumed(program):
    whole = run(program("whole"), prepare=computed_again)
    path, kills = program("killed"), kill_at_record("turns.jsonl", 20)
    assert forked(main, path, prepare=lambda: (computed_again(), kills()))[0] == -9
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(AGENT.name) in " ".join(p.info["cmdline"] or ())
    ]
    psutil.wait_procs(left, timeout=30)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], (
        "the kernel ends programs"
    )
    assert_equal(run(path, RESUME, prepare=computed_again), whole)


@pytest.mark.wide
def test_a_program_that_fails_ends_the_run_with_its_last_words(program):
    assert "ended with status 1: a fault" in refused(
        main, program("fails", "fails", steps=1, max_error_share=0.1)
    )
