"""RAFT on servers that follow vLLM's rules and answer with a real model."""

import json
import logging
from collections import Counter

import pytest
import torch
from rocm_ext.recipes.raft_rocm import RAFT, main

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.evaluate.answers import evaluate
from rocm_ext.model.lora import adapters
from rocm_ext.rl.server_check import _share
from rocm_ext.train.learner import Learner
from tests.kit.forks import forked_ranks
from tests.kit.raft_runs import records
from tests.kit.servers import error, is_check
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("served")
    write_model(top / "base", initializer_range=0.1)
    write_rows(top / "prompts.jsonl", 6)
    write_rows(top / "heldout.jsonl", 6, start=100)
    return top


@pytest.fixture
def make(folder, tmp_path):
    """Write the YAML of a run on servers: 2 cycles of 6 prompts with 2 answers each."""

    def prompts(name):
        component = "rocm_ext.data.prompt_dataset"
        return {"_component_": component, "source": str(folder / name), "column_map": {"prompt": "question"}}

    def make(*fakes, **changes):
        cfg = run_config(folder / "base", folder / "prompts.jsonl", tmp_path / "out")
        del cfg["dataset"]
        cfg |= {
            "prompts": prompts("prompts.jsonl"), "eval_prompts": prompts("heldout.jsonl"),
            "verifier": {"_component_": "tests.kit.judges.Coin"}, "verify_workers": 1,
            "engine": {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": [fake.url for fake in fakes],
                       "patience": "1 s"},
            "cycles": 2, "samples_per_prompt": 2, "max_new_tokens": 12, "drop_truncated": False,
            "skip_solved": False, "retry_unsolved_after": 1,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-3}, **changes,
        }  # fmt: skip
        return write_yaml(tmp_path / "run.yaml", cfg)

    return make


def train(path, *overrides):
    raft = RAFT(config.load("raft_rocm", str(path), list(overrides)))
    raft.setup()
    raft.train()
    raft.cleanup()
    return raft


def sampled(out, phase):
    cycle, _, kind = phase.removeprefix("cycle_").partition("/")
    return records(out, int(cycle), "samples", kind or "sample")


def loads(fake):
    """Count the loads of each path."""
    return Counter(body["lora_path"] for verb, body in fake.adapter_calls() if verb == "load")


@pytest.mark.wide
def test_each_cycle_samples_with_its_adapter(serve, make, tmp_path, messages):
    fake = serve()
    train(make(fake))
    out = tmp_path / "out"
    assert [len(sampled(out, f"cycle_{cycle}")) for cycle in (1, 2)] == [12, 12]
    assert json.loads((out / "summary.json").read_text())["cycles"][-1]["cycle"] == 2
    adapters = [str(out / f"cycle_{cycle}" / "adapter") for cycle in (1, 2)]
    # the check before sampling, the evaluations, and cycle 2's sampling
    assert loads(fake) == {str(out / ".adapter-check"): 1, adapters[0]: 2, adapters[1]: 1}
    assert fake.rules.adapters == {}
    assert not (out / ".adapter-check").exists()
    assert not [line for line in messages if fake.url in line]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("stale", "phase", "other"),
    [("base", "cycle_1/eval", "without an adapter"), ("cycle_1", "cycle_2/eval", "the adapter of cycle 1")],
)
def test_a_server_that_keeps_its_old_weights_is_an_error(serve, make, tmp_path, stale, phase, other):
    honest, fake = serve(), serve(stale)
    with pytest.raises(UserError, match=f"{fake.url} does not sample with the adapter that it has loaded: .*{other}"):
        train(make(honest, fake))
    assert not sampled(tmp_path / "out", phase)
    assert honest.rules.adapters == fake.rules.adapters == {}


@pytest.mark.wide
def test_an_error_on_one_rank_ends_all(serve, make, tmp_path):
    fake = serve()
    rules = fake.reply

    def refuses(path, body):
        adapter = fake.rules.adapters.get((body or {}).get("model"), "")
        if "cycle_1" in adapter and body["temperature"] == 0 and body["prompt"] == refused and not is_check(body):
            return error(400, "too long", "BadRequestError")
        return rules(path, body)

    path = make(fake)
    raft = RAFT(config.load("raft_rocm", str(path)))
    raft.setup()
    refused = raft.prompts.tokens[raft.prompts.held_out[1].id]
    raft.cleanup()
    fake.reply = refuses
    ends = forked_ranks(main, path, "overwrite_output_dir=True")
    assert [code for code, _ in ends] == [1, 1]
    said = [messages for _, messages in ends]
    asked = next(rank for rank in range(2) if "HTTP 400: too long; waiting for the other ranks' answers" in said[rank])
    assert f"rank {asked}: Refused:" in said[1 - asked]  # either rank may ask for it
    assert "HTTP 400: too long" in said[1 - asked]
    assert fake.rules.adapters == {}


def test_a_server_without_adapters_is_found_before_sampling(serve, make, tmp_path):
    fake = serve(lora=False)
    with pytest.raises(UserError, match=r"HTTP 404: Not Found\).*vllm serve MODEL.*set cycles=1"):
        train(make(fake))
    assert fake.bodies() == []
    assert not (tmp_path / "out").exists()


def test_layers_that_servers_would_scale_wrongly_are_refused(serve, make, monkeypatch):
    """vLLM reads r and alpha of an adapter, and not its patterns."""
    setup_model = Learner.setup_model

    def uneven(self):
        decoder = setup_model(self)
        next(layer for _, layer in adapters(decoder)).alpha = 3
        return decoder

    monkeypatch.setattr(Learner, "setup_model", uneven)
    fake = serve()
    with pytest.raises(UserError, match=r"scale all layers of an adapter alike.*model\.alpha_pattern.*LocalEngine"):
        train(make(fake))
    assert not loads(fake)


@pytest.mark.wide
def test_evaluations_sample_in_process_if_the_server_takes_no_adapters(serve, make, tmp_path, messages, caplog):
    caplog.set_level(logging.INFO, "rocm_ext")
    fake = serve(lora=False)
    path = make(fake, profile_steps=3)
    raft = train(path, "cycles=1")
    out = tmp_path / "out"
    assert "Evaluations sample in this process instead" in "\n".join(messages)
    assert any("profile_steps: training is recorded; sampling is not" in line for line in messages)
    assert len(fake.bodies()) == len(sampled(out, "cycle_1")) == 12
    assert len(sampled(out, "cycle_1/eval")) == 6
    # the same scores as of an evaluation with the local engine
    cfg = config.load("raft_rocm", str(path), [f"output_dir={tmp_path}/again"])
    cfg.engine = {"_component_": "rocm_ext.sampling.LocalEngine"}
    scores = evaluate(cfg, out / "cycle_1" / "adapter")[0].scores
    assert scores == json.loads((out / "cycle_1" / "eval.json").read_text())
    assert raft.engines.sample is not raft.engines.eval


@pytest.mark.wide
def test_the_first_adapter_is_tried_before_sampling(serve, make, tmp_path):
    fake, once = serve(), ("cycles=1", "eval_prompts=null")
    train(make(fake), *once)
    assert not loads(fake)
    first = tmp_path / "out" / "adapter"
    again = (*once, f"checkpointer.adapter_checkpoint={first}")
    train(make(fake, output_dir=str(tmp_path / "next")), *again)
    assert loads(fake) == {str(first): 2}
    fake.rules.lora = False
    with pytest.raises(UserError, match="start without an adapter_checkpoint and with cycles=1"):
        train(make(fake, output_dir=str(tmp_path / "third")), *again)


@pytest.mark.parametrize(("noise", "step", "told"), [(0.02, 0.05, True), (0.02, 0.002, False), (0.0, 0.0, False)])
def test_the_share_of_the_new_adapter(noise, step, told):
    """Its interval holds the true share, and is narrow unless rounding hides the adapters' difference."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda scale: scale * torch.randn(200, generator=generator, dtype=torch.float64)  # noqa: E731
    old = -draw(1.0).abs()
    new = old + draw(step)
    for truth, served in ((1.0, new), (0.0, old)):
        low, high = _share(served + draw(noise), new, old)
        assert low <= truth <= high
        assert (low > 0.5 or high < 0.5) == told
