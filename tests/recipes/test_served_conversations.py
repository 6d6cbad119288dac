"""Conversations with environments on servers that follow vLLM's rules: what is sent, trained on and resumed."""

import json

import pytest
from rocm_ext.recipes.grpo_rocm import GRPO, main
from rocm_ext.recipes.raft_rocm import main as raft_main
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.rl.records import to_sample
from tests.kit.forks import forked
from tests.kit.grpo_runs import lines
from tests.kit.servers import COMPLETIONS, Fake, Sampler, Vllm, is_check
from tests.kit.tiny import metrics
from tests.recipes.test_conversations import kill_at_record, run, write  # noqa: F401


@pytest.fixture
def fake(pocket_dir):
    """A server of the pocket model; it calls ``fake.before(body)`` before each answer, and sends what this returns."""
    files = ("vocab.json", "merges.txt", "tokenizer.json")
    rules = Vllm(Sampler(pocket_dir, qwen2_5_tokenizer(*(str(pocket_dir / name) for name in files))))

    def reply(path, body):
        answer = fake.before(body) if path == COMPLETIONS and not is_check(body) else None
        return answer or rules(path, body)

    fake = Fake(reply)
    fake.before, fake.rules = lambda body: None, rules
    yield fake
    fake.die()


@pytest.fixture
def serve(write, fake):  # noqa: F811
    """Return a function that writes the config of a run on the server: 2 steps of 2 prompts with 4 answers each."""

    def serve(name="run", concurrency=4, **changes):
        engine = {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": [fake.url], "patience": "1 s",
                  "concurrency": concurrency}  # fmt: skip
        return write(name, engine=engine, **changes)

    return serve


def given(out):
    """Return what the environment and the template gave, and how often."""
    samples = lines(out / "samples.jsonl")
    return {(turn, tuple(ids)) for line in samples for turn, (_, ids, _) in enumerate(line["given"])}


@pytest.mark.wide
def test_each_turn_is_sent_and_trained_as_its_ids(serve, write, fake):  # noqa: F811
    out = run(serve())
    assert max(metrics(out, "mismatch_max")) < 1e-4, "the trainer computes them behind the same tokens"
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
def test_raft_on_a_server(serve, fake):
    changes = {"cycles": 1, "prompts_per_cycle": 24, "epochs": 1, "keep": "rewarded", "reward_threshold": 0.5}
    out = run(serve(base="cpu_pocket_raft", **changes), main=raft_main)
    (cycle,) = json.loads((out / "summary.json").read_text())["cycles"]
    assert cycle["filter"]["kept"] > 0
    assert any(len(body["prompt"]) > 40 for body in fake.bodies())


@pytest.mark.wide
def test_limits_reach_the_server(serve, fake):
    out = run(serve(steps=1, prompts_per_step=1, max_new_tokens=30, truncated="keep"))
    assert max(len(line["tokens"]) for line in lines(out / "samples.jsonl")) == 30
    assert {body["max_tokens"] for body in fake.bodies()} > {30}


@pytest.mark.wide
@pytest.mark.parametrize(("name", "count"), [("samples.jsonl", 7), ("verdicts.jsonl", 12)])
def test_killed_and_resumed(serve, name, count):
    path = serve()
    assert forked(main, path, prepare=kill_at_record(name, count))[0] == -9
    assert_whole(run(path, "resume_from_checkpoint=True"))


def assert_whole(out) -> None:
    for name in ("samples", "verdicts"):
        keys = {(line["step"], line["prompt_id"], line["sample"]) for line in lines(out / f"{name}.jsonl")}
        assert len(keys) == len(lines(out / f"{name}.jsonl")) == 16, name
    assert max(metrics(out, "mismatch_max")) < 1e-4


@pytest.mark.wide
def test_messages_without_log_probs_are_asked_again(serve, fake):
    def before(body):
        answer = fake.rules(COMPLETIONS, body)
        if len(body["prompt"]) > 40:
            del answer["choices"][0]["logprobs"]
        return answer

    fake.before = before
    path = serve()
    code, said = forked(main, path)
    assert code == 1
    assert sum("has no token ids and log-probs" in line for line in said.splitlines()) == 1
    fake.before = lambda body: None
    assert_whole(run(path, "resume_from_checkpoint=True"))


@pytest.mark.wide
def test_conversations_that_wait_block_no_request(serve, fake):
    """While the first conversations' tools work, others take their places; the server is never asked too much."""
    lengths = []
    fake.before = lambda body: lengths.append(len(body["prompt"]))
    run(serve(steps=1, concurrency=2, echo={"pause": 3.0}))
    assert max(lengths[:8]) < 40 < max(lengths), "first turns, four times as many as the server takes at once"
    assert fake.most == 2


def test_messages_are_refused(serve):
    cfg = config.load("grpo_rocm", str(serve()))
    cfg.engine.endpoint = "chat"
    with pytest.raises(UserError, match=r"set engine.endpoint=completions"):
        GRPO(cfg).check()
