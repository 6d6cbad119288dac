"""GRPO and RAFT on servers that follow vLLM's rules and answer with a real model."""

import json
import logging
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes.grpo_rocm import GRPO, main
from rocm_ext.recipes.raft_rocm import RAFT

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.evaluate.answers import evaluate
from rocm_ext.model.lora import adapters
from rocm_ext.rl.records import PhaseRecords
from rocm_ext.train.learner import Learner
from tests.kit import grpo_runs, raft_runs
from tests.kit.forks import (
    RESUME,
    forked,
    forked_ranks,
    several_ranks,
    signal_at,
    succeed,
    succeed_on_ranks,
)
from tests.kit.grpo_runs import lines
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import held_out, loaded, records, trained
from tests.kit.servers import COMPLETIONS, error, is_check, vllm_form

OVERLAP = {"max_staleness": 1}
BOTH = pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sequential", marks=pytest.mark.wide),
        pytest.param(OVERLAP, id="overlap"),
    ],
)


def engine(fakes, **more) -> dict:
    urls = [fake.url for fake in fakes]
    return {
        "_component_": "rocm_ext.sampling.OpenAIEngine",
        "urls": urls,
        "patience": "1 s",
        **more,
    }


@pytest.fixture
def make(folder, tmp_path):
    """Write the YAML of a run of GRPO on servers: 4 steps of 4 prompts with 4 answers each, without evaluation."""

    def make(*fakes, concurrency=None, **changes):
        more = {"concurrency": concurrency} if concurrency else {}
        changes = {
            "max_new_tokens": 6,
            "engine": engine(fakes, **more),
            "eval_prompts": None,
            **changes,
        }
        if changes["eval_prompts"] == "held out":
            del changes["eval_prompts"]
        return grpo_runs.write_run(folder, tmp_path / "out", **changes)

    return make


@pytest.fixture
def make_raft(folder, tmp_path):
    """Write the YAML of a run of RAFT on servers: 2 cycles of 6 prompts with 2 answers each."""
    small = {"prompts_per_cycle": 6, "samples_per_prompt": 2, "epochs": 1}
    return lambda *fakes, **more: raft_runs.write_run(
        folder, tmp_path / "out", **{"engine": engine(fakes), **small, **more}
    )


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


train, train_raft = partial(trained, GRPO), partial(trained, RAFT)


def loads(fake, out) -> dict[str, int]:
    """Count the loads of each path in ``out``."""
    paths = [body["lora_path"] for verb, body in fake.adapter_calls() if verb == "load"]
    return Counter(str(Path(path).relative_to(out)) for path in paths)


def assert_whole(out, steps=4, evaluations=0) -> None:
    """Every answer is in the records once, and nothing of the servers' adapters is left."""
    for name in ("samples", "verdicts"):
        keys = [
            (s["step"], s["phase"], s["prompt_id"], s["sample"])
            for s in lines(out / f"{name}.jsonl")
        ]
        assert len(keys) == len(set(keys)) == steps * 16 + evaluations * 6, name
    assert [line["step"] for line in lines(out / "metrics.jsonl") if "eval" not in line] == list(
        range(1, steps + 1)
    )
    assert not (out / "policy").exists()
    assert not list(out.glob("*.rank*"))


def policies(out) -> dict[int, set[int]]:
    """Return the steps after which the adapters sampled, by the step that their answers are for."""
    found: dict[int, set[int]] = {}
    for line in lines(out / "samples.jsonl"):
        if line["phase"] == "sample":
            found.setdefault(line["step"], set()).add(line["policy"])
    return found


def lags(out) -> list[float]:
    return [line["policy_lag"] for line in lines(out / "metrics.jsonl") if "eval" not in line]


@pytest.mark.wide
def test_each_step_samples_with_its_adapter(serve, make, out, messages):
    fake = serve()
    train(make(fake, prompts_per_step=2))
    assert loads(fake, out) == {
        ".adapter-check": 1,
        "policy/step_1": 1,
        "policy/step_2": 1,
        "policy/step_3": 1,
    }
    assert policies(out) == {1: {0}, 2: {1}, 3: {2}, 4: {3}}
    assert fake.rules.adapters == {}
    assert not (out / "policy").exists()
    for line in lines(out / "metrics.jsonl"):
        assert line["mismatch_mean"] < 1e-4
        assert line["policy_lag"] == line["hidden_seconds"] == 0
    assert not [line for line in messages if fake.url in line]


@pytest.mark.wide
def test_each_cycle_samples_with_its_adapter(serve, make_raft, out, messages):
    fake = serve()
    train_raft(make_raft(fake))
    assert [len(records(out, cycle, "samples")) for cycle in (1, 2)] == [12, 12]
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    # the check before sampling, the evaluations, and cycle 2's sampling
    assert loads(fake, out) == {".adapter-check": 1, "cycle_1/adapter": 2, "cycle_2/adapter": 1}
    assert fake.rules.adapters == {}
    assert not (out / ".adapter-check").exists()
    assert not [line for line in messages if fake.url in line]


@pytest.mark.wide
def test_the_next_step_samples_while_this_one_trains(serve, make, out, messages):
    fake = serve()

    class Slow(GRPO):
        def rows(self, selected):
            """Train once the next step's answers are there."""
            number = self.trainer.step + 1
            while (
                number < 4
                and sum(line["step"] == number + 1 for line in lines(out / "samples.jsonl")) < 16
            ):
                time.sleep(0.01)
            return super().rows(selected)

    trained(Slow, make(fake, **OVERLAP))
    assert loads(fake, out) == {
        ".adapter-check": 1,
        "policy/step_1": 1,
        "policy/step_2": 1,
        "policy/step_3": 1,
    }
    assert policies(out) == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert lags(out) == [0, 1, 1, 1]
    steps = lines(out / "metrics.jsonl")
    assert steps[0]["mismatch_mean"] < 1e-4 < min(step["mismatch_mean"] for step in steps[1:])
    assert all(0 <= step["hidden_seconds"] <= step["sample_seconds"] for step in steps)
    assert steps[0]["hidden_seconds"] < max(
        step["hidden_seconds"] for step in steps
    )  # no step trains before the first
    assert fake.rules.adapters == {}
    assert_whole(out)
    assert not [line for line in messages if fake.url in line]


@pytest.mark.wide
def test_an_evaluation_does_not_stop_sampling(serve, make, out):
    """Answers to train on arrive between those of an evaluation, each with the adapter that it was asked of."""
    fake, of_evaluations = serve(), []

    def before(path, body):
        if path == COMPLETIONS:
            of_evaluations.append(body["temperature"] == 0)
            time.sleep(0.05)

    fake.before = before
    train(make(fake, max_staleness=2, eval_prompts="held out", eval_every_n_steps=1, concurrency=2))
    assert_whole(out, evaluations=5)
    first, last = (
        of_evaluations.index(True, 6),
        len(of_evaluations) - of_evaluations[::-1].index(True),
    )
    assert False in of_evaluations[first : last - 6]
    assert max(lags(out)) <= 2
    assert fake.rules.adapters == {}


@pytest.mark.wide
@several_ranks
@BOTH
def test_two_ranks_share_two_servers(serve, make, out, changes):
    fakes = [serve(), serve()]
    succeed_on_ranks(main, make(*fakes, **changes, eval_prompts="held out"))
    assert_whole(out, evaluations=3)
    assert max(lags(out)) <= len(changes)
    for fake in fakes:
        assert fake.rules.adapters == {}
        assert changes or fake.exchanged == []


@pytest.mark.wide(always=1)
@BOTH
@pytest.mark.parametrize(
    ("stale", "other"),
    [
        ("base", "without an adapter"),
        pytest.param("step_1", "the adapter of step 1", marks=pytest.mark.wide),
    ],
)
def test_a_server_with_an_old_adapter_is_an_error(serve, make, out, changes, stale, other):
    honest, fake = serve(), serve(stale)
    with pytest.raises(
        UserError,
        match=f"{fake.url} does not sample with the adapter that it has loaded: .*{other}",
    ):
        train(make(honest, fake, **changes))
    assert honest.rules.adapters == fake.rules.adapters == {}
    assert not (out / "policy").exists()


@pytest.mark.wide
def test_a_server_that_turns_stale_later_shows_in_the_mismatch(serve, make, out, messages):
    """The check at step 4 has passed; the mismatch of step 6 makes step 7 check again."""
    fake = serve()

    def before(path, body):
        if "step_5" in fake.rules.adapters.get((body or {}).get("model"), ""):
            fake.rules.answer.stale = "base"

    fake.before = before
    with pytest.raises(UserError, match=f"{fake.url} does not sample with the adapter"):
        train(make(fake, steps=10, optimizer={"_component_": "torch.optim.AdamW", "lr": 2e-2}))
    assert [line["step"] for line in lines(out / "metrics.jsonl")][-1] == 6
    assert one_line_has(messages, "step 6", "log-probs", "sampler", "trainer")


@pytest.mark.wide
@several_ranks
def test_an_error_beside_training_reaches_every_rank(serve, make):
    fake = serve()

    def before(path, body):
        if (
            body
            and any("step_1" in at for at in fake.rules.adapters.values())
            and not is_check(body)
        ):
            return error(400, "too long", "BadRequestError")
        return None

    fake.before = before
    for code, messages in forked_ranks(main, make(fake, **OVERLAP)):
        assert (code, "too long" in messages, "Traceback" in messages) == (1, True, False)
    assert fake.rules.adapters == {}


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("empty", ["some groups", "all groups"])
def test_answers_without_tokens_are_no_update(serve, make, out, empty):
    fake = serve()

    def before(path, body):
        if (
            path == COMPLETIONS
            and not is_check(body)
            and (empty == "all groups" or sum(body["prompt"]) % 2)
        ):
            return vllm_form(body, "", None, None, finish_reason="length", logprobs=None)
        return None

    fake.before = before
    turns = {"_component_": "tests.kit.judges.Turns"}
    train(make(fake, groups_per_update=1, steps=2, verifier=turns, concurrency=1))
    assert_whole(out, steps=2)
    updates = [line["updates"] for line in lines(out / "metrics.jsonl")]
    assert updates == [0, 0] if empty == "all groups" else 0 < sum(updates) < 8


def at_sample(step: int, count: int, signum: int):
    """Return a ``prepare`` that sends ``signum`` once a step has ``count`` samples."""

    def when(phase, record):
        return (
            phase._scope[:2] == (step, "sample")
            and "text" in record
            and len(phase.records) == count
        )

    return signal_at(PhaseRecords, "append", when, signum)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("signum", "staleness"), [(signal.SIGKILL, 1), (signal.SIGINT, 1), (signal.SIGKILL, 2)]
)
def test_stopped_beside_training(serve, make, out, signum, staleness):
    fake = serve()
    path = make(fake, max_staleness=staleness, curriculum="informative")
    code, messages = forked(main, path, prepare=at_sample(3, 5, signum))
    if signum == signal.SIGKILL:
        assert code == -signum
    else:
        assert code == 128 + signum, messages
        assert "all saved; continue with resume_from_checkpoint=True" in messages
        assert fake.rules.adapters == {}
        assert not (out / "policy").exists()
    before = [line for line in lines(out / "samples.jsonl") if line["step"] == 3]
    assert 5 <= len(before) < 16
    succeed(main, path, RESUME)
    assert_whole(out)
    assert (
        before
        == [line for line in lines(out / "samples.jsonl") if line["step"] == 3][: len(before)]
    )
    assert max(lags(out)) <= staleness


@pytest.mark.wide
def test_a_resumed_run_asks_anew_what_is_too_old(serve, make, out):
    fake = serve()
    path = make(fake, max_staleness=3)
    code, _ = forked(main, path, prepare=at_sample(4, 5, signal.SIGKILL))
    assert code == -signal.SIGKILL
    assert max(policies(out)) == 4
    succeed(main, path, RESUME, "max_staleness=1")
    assert_whole(out)
    assert max(lags(out)) <= 1
    assert all(step - 1 - min(found) <= 1 for step, found in policies(out).items())


@pytest.mark.wide
def test_answers_of_an_older_adapter_are_weighed(serve, make, out):
    """The gradient is that of truncated importance weights, by autograd on whole logits."""
    expected = {}

    class Measured(GRPO):
        def rows(self, selected):
            for kind in ("weighed", "unweighed"):
                expected.setdefault(kind, []).append(self.norm(selected, kind == "weighed"))
            return super().rows(selected)

        def norm(self, selected, weighed):
            parameters = list(self.learner.adapter.values())
            total, labels = torch.zeros(()), 0
            for key, advantage in selected.advantages.items():
                sample, prompt = selected.samples[key], self.prompts.tokens[key[0]]
                logits = self.learner.decoder(torch.tensor([[*prompt, *sample.tokens]]))[
                    0, len(prompt) - 1 : -1
                ]
                ours = (
                    logits.float()
                    .log_softmax(-1)
                    .gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
                )
                weights = (ours.detach() - torch.tensor(sample.logprobs)).exp().clamp(max=1.2)
                total = total - advantage * (ours * (weights if weighed else 1.0)).sum()
                labels += len(sample.tokens)
            gradients = torch.autograd.grad(total / labels, parameters)
            return float(torch.stack([gradient.norm() for gradient in gradients]).norm())

    optimizer = {"_component_": "torch.optim.AdamW", "lr": 2e-2}
    trained(Measured, make(serve(), **OVERLAP, optimizer=optimizer, mismatch_limits=[0, 1.2]))
    norms = [line["grad_norm"] for line in lines(out / "metrics.jsonl")]
    assert norms == pytest.approx(expected["weighed"], rel=1e-4)
    assert norms[0] == pytest.approx(expected["unweighed"][0], rel=1e-4)
    for norm, unweighed in list(zip(norms, expected["unweighed"], strict=True))[1:]:
        assert abs(norm / unweighed - 1) > 1e-3


def test_a_server_without_adapters_is_refused_before_sampling(serve, make, make_raft, folder, out):
    fake = serve(lora=False)
    for start, cure in ((lambda: train(make(fake, **OVERLAP)), "max_staleness=0"),
                        (lambda: train_raft(make_raft(fake)), "cycles=1")):  # fmt: skip
        with pytest.raises(UserError, match=f"HTTP 404: Not Found.*vllm serve MODEL.*set {cure}"):
            start()
    assert fake.bodies() == []
    assert not out.exists()
    fake = serve()
    model = {
        "_component_": "rocm_ext.model.from_checkpoint",
        "checkpoint_dir": str(folder / "base"),
    }
    rows = {"model": {**model, "trainable_tokens": [3]}, "checkpointer": None}
    with pytest.raises(
        UserError, match=r"no server is known to load .* rows of tokens.*sample in this process"
    ):
        train(make(fake, **rows))
    assert fake.adapter_calls() == fake.bodies() == []


def test_layers_that_servers_would_scale_wrongly_are_refused(serve, make_raft, monkeypatch):
    """vLLM reads r and alpha of an adapter, and not its patterns."""
    setup_model = Learner.setup_model

    def uneven(self):
        decoder = setup_model(self)
        next(layer for _, layer in adapters(decoder)).alpha = 3
        return decoder

    monkeypatch.setattr(Learner, "setup_model", uneven)
    fake = serve()
    with pytest.raises(
        UserError, match=r"scale all layers of an adapter alike.*model\.alpha_pattern.*LocalEngine"
    ):
        train_raft(make_raft(fake))
    assert fake.bodies() == []


@pytest.mark.wide
def test_a_vllm_that_mixes_adapters_up_samples_no_step_ahead(serve, make, out):
    fake = serve()
    fake.rules.version = "0.24.0+rocm722"
    with pytest.raises(
        UserError, match=f"^{fake.url} runs vLLM 0.24.0.*issue 47724.* or set max_staleness=0$"
    ):
        train(make(fake, **OVERLAP))
    assert fake.bodies() == []
    train(make(fake, steps=1))
    fake.rules.version = "0.1.dev1+g1234567.rocm700"  # of sources without tags
    train(make(fake, steps=1, overwrite_output_dir=True, **{"max_staleness": 1}))


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("changes", "setting", "missing"),
    [({}, "mismatch=truncate", "logprobs"), ({}, "mismatch=truncate", "token_ids"),
     ({"mismatch": "none", "kl_coef": 0.1}, "kl_coef=0.1", "logprobs"),
     ({"mismatch": "none", "min_entropy": 0.1}, "min_entropy", "logprobs"),
     ({"mismatch": "none", "old_logprobs": "sampler", "updates_per_step": 2}, "old_logprobs=sampler", "logprobs")],
)  # fmt: skip
def test_a_server_without_log_probs_is_refused_before_sampling(
    serve, make, changes, setting, missing
):
    fake = serve()
    without(fake, missing)
    with pytest.raises(
        UserError, match=f"^{setting}: the engine returns no token ids and log-probs of sampling"
    ):
        loaded(GRPO, make(fake, **changes)).check()
    assert fake.bodies() == []


def test_log_probs_of_another_temperature_are_refused(serve, make):
    fake = serve()
    with pytest.raises(
        UserError, match=f"mismatch=truncate: {fake.url} returns log-probs of temperature 1 .* 0.7"
    ):
        loaded(GRPO, make(fake, temperature=0.7)).check()
    assert fake.bodies() == []


def without(fake, key) -> None:
    """Make a server send answers without ``key``."""
    original = fake.reply

    def reply(path, body):
        answer = original(path, body)
        if path == COMPLETIONS and isinstance(answer, dict):
            del answer["choices"][0][key]
        return answer

    fake.reply = reply


@pytest.mark.wide
def test_evaluations_sample_here_if_servers_take_no_adapter(
    serve, make_raft, out, messages, caplog
):
    caplog.set_level(logging.INFO, "rocm_ext")
    fake = serve(lora=False)
    path = make_raft(fake, profile_steps=3)
    raft = train_raft(path, "cycles=1")
    assert "Evaluations sample in this process instead" in "\n".join(messages)
    assert any("profile_steps: training is recorded; sampling is not" in line for line in messages)
    assert len(fake.bodies()) == len(records(out, 1, "samples")) == 12
    assert len(records(out, 1, "samples", "eval")) == 6
    # the same scores as of an evaluation with the local engine
    cfg = config.load("raft_rocm", str(path), [f"output_dir={out}/again"])
    cfg.engine = {"_component_": "rocm_ext.sampling.LocalEngine"}
    scores = evaluate(cfg, out / "cycle_1" / "adapter")[0].scores
    assert scores == held_out(out)[1]
    assert raft.engines.sample is not raft.engines.eval
