"""Sampling in this process from models that transformers computes."""

import gc
import json
import logging
import shutil
import signal
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rocm_ext.recipes.raft_rocm import main as raft_main
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rocm_ext import cli
from rocm_ext.base.errors import UserError
from rocm_ext.model.hf.decoder import TransformersDecoder
from rocm_ext.model.hf.sampler import TransformersSlots
from rocm_ext.model.lora import adapters
from rocm_ext.model.sampler import sampler_of
from rocm_ext.model.token_rows import token_rows
from rocm_ext.sampling import LocalEngine, Sampling, local
from rocm_ext.sampling.local import LocalSession
from rocm_ext.sampling.slots import Graphs
from tests.kit.families import folder_config
from tests.kit.forks import forked, several_ranks, succeed, succeed_on_ranks
from tests.kit.hf_models import CARE, COMMON, MORE, write_common, write_theirs, write_wider
from tests.kit.lines import one_line_has
from tests.kit.parity import our_model
from tests.kit.plans import planned_and_measured_sampling
from tests.kit.raft_runs import WEIGHTS, held_out, kill_at_record, write_run
from tests.kit.replay import Recorded, capture
from tests.kit.samples import Words, answers_of
from tests.kit.samples import ask as any_ask
from tests.kit.samples import prompts as any_prompts
from tests.kit.tiny import SHAPE, write_rows, write_yaml
from tests.model.test_transformers_models import some

pytestmark = pytest.mark.usefixtures("any_torchao")
FAST = ("gemma 3", "qwen3.5", "gpt-oss")  # sliding windows, recurrent states, sinks and experts
REFUSED = {
    "rwkv": "its cache is not", "bloom": "its attention is not", "doge": "DogeAttention makes masks of its own",
    "llama4_text": "it has chunked attention",
}  # fmt: skip
CPU = torch.device("cpu")


prompts, ask = partial(any_prompts, seed=3, words=(5, 300)), partial(any_ask, cycle=1)
NEVER = SimpleNamespace(stop_tokens=(-1,), decode=lambda tokens: "")


def engine(decoder, tokenizer=NEVER, free: int = 2**31, **options) -> LocalEngine:
    return LocalEngine(decoder=decoder, tokenizer=tokenizer, free_memory=lambda: free, **options)


def sampled(made: LocalEngine, requests, sampling: Sampling) -> dict:
    with made.session(None) as session:
        return answers_of(session, requests, sampling)


@torch.no_grad()
def trained(folder: Path, **lora):
    """Load our decoder with adapters that change it."""
    decoder = our_model(folder, **lora)
    torch.manual_seed(7)
    for _, layer in adapters(decoder):
        layer.lora_b.weight.normal_(std=0.1)
    for _, rows in token_rows(decoder):
        rows.weight.normal_(std=0.3)
    return decoder


# ---- the same function
LENGTHS = (
    1,
    3,
    9,
    20,
    33,
)  # shorter and longer than windows of 6, and too short for some convolutions


@pytest.mark.parametrize("name", some("gemma 3", "qwen3.5"))
@torch.no_grad()
def test_greedy_answers_equal_generate(folder_of, name):
    theirs = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()
    texts = prompts(*LENGTHS)
    found = sampled(engine(our_model(folder_of(name))), ask(texts), Sampling(24, temperature=0))
    for i, text in enumerate(texts):
        options = {
            "do_sample": False,
            "max_new_tokens": 24,
            "use_cache": True,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        expected = theirs.generate(torch.tensor([text]), **options)[0, len(text) :].tolist()
        assert len(expected) == 24
        assert found[str(i), 0].tokens == expected


@pytest.mark.wide
@pytest.mark.parametrize(
    "kind", [*MORE, *(kind for kind in CARE if kind not in (*REFUSED, "phi3", *MORE))]
)
@torch.no_grad()
def test_more_architectures(tmp_path, kind):
    """Their config has a window, which some of them do not use and ``generate`` takes for one."""
    base = write_common(tmp_path / kind, kind, **CARE.get(kind, {}))
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    decoder = our_model(base)
    assert (decoder.graph_obstacle == "") == (kind != "phimoe"), decoder.graph_obstacle
    for completion in sampled(engine(decoder), ask(prompts(*LENGTHS)), Sampling(24)).values():
        check_logprobs(lambda row: theirs(row, use_cache=False).logits, completion)


def check_logprobs(logits_of, completion) -> None:
    """Compare recorded log-probs with those of a forward pass over prompt and answer."""
    torch.testing.assert_close(*logprobs(logits_of, completion), rtol=0, atol=1e-4)


def logprobs(logits_of, completion) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the recorded log-probs, and those of a forward pass over prompt and answer."""
    prompt, answer = completion.request.tokens, torch.tensor(completion.tokens)
    logits = logits_of(torch.tensor([[*prompt, *completion.tokens]]))[0, len(prompt) - 1 : -1]
    return torch.tensor(completion.logprobs), logits.float().log_softmax(-1).gather(
        1, answer[:, None]
    )[:, 0]


def test_longrope_is_that_of_short_rows(tmp_path):
    """Rows of 10 tokens and more have other frequencies from their first token on."""
    limit = {**CARE["phi3"], "original_max_position_embeddings": 10}
    decoder = our_model(write_common(tmp_path / "base", "phi3", **limit)).eval()
    for completion in sampled(engine(decoder), ask(prompts(1, 5)), Sampling(5)).values():
        check_logprobs(decoder, completion)
    with pytest.raises(UserError, match="the model takes at most 10"):
        sampled(engine(decoder), ask(prompts(5)), Sampling(6))


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True, "trainable_tokens": list(range(100, 200))},
        {
            "target_modules": ["o_proj", "lm_head"],
            "trainable_tokens": {"embed_tokens": list(range(100, 200))},
        },
        {"target_parameters": "all-experts", "trainable_tokens": list(range(100, 200))},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("merge", [None, False])
@torch.no_grad()
def test_logprobs_are_those_of_the_model_under_training(folder_of, lora, merge):
    decoder = trained(
        folder_of(
            "gpt-oss" if lora.keys() & {"target_modules", "target_parameters"} else "gemma 3"
        ),
        **lora,
    ).train()
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    # truncation and temperature do not show in log-probs
    found = sampled(
        engine(decoder, merge=merge),
        ask(prompts(*LENGTHS), 2),
        Sampling(12, temperature=0.7, top_k=20),
    )
    assert len(found) == 10
    assert decoder.training
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in decoder.named_parameters()
    )
    decoder.eval()
    for completion in found.values():
        check_logprobs(decoder, completion)


@pytest.mark.parametrize("name", some("qwen3.5"))
@torch.no_grad()
def test_a_seed_gives_the_same_answer_in_any_batch(folder_of, name):
    decoder = trained(folder_of(name))
    requests = ask(prompts(9, 20, 3, 33), 9)
    whole = sampled(engine(decoder, Words(), slots=36), requests, Sampling(24))
    assert len({len(completion.tokens) for completion in whole.values()}) > 5
    assert {completion.finish_reason for completion in whole.values()} == {"stop", "length"}
    for options, some_of_them in (({"slots": 16}, requests), ({}, requests[30:4:-3])):
        found = sampled(engine(decoder, Words(), **options), some_of_them, Sampling(24))
        assert len(found) == len(some_of_them)
        for key, completion in found.items():
            assert completion.tokens == whole[key].tokens
            assert completion.logprobs == pytest.approx(whole[key].logprobs, abs=1e-4)
            if (
                decoder.packs and "experts" not in str(decoder) and "conv" not in str(decoder)
            ):  # states are padded
                assert completion.logprobs == whole[key].logprobs
    pairs = [logprobs(decoder.eval(), completion) for completion in whole.values()]
    far = sum(int(((found - expected).abs() > 1e-4).sum()) for found, expected in pairs)
    assert far <= (
        name == "granite hybrid"
    )  # one token, whose second and third expert tie within 5e-7


@pytest.mark.parametrize("name", FAST)
def test_the_cache_goes_when_its_session_ends(folder_of, monkeypatch, name):
    """At once, and not when Python next looks for cycles."""
    made, begin = [], TransformersSlots.__init__

    def begun(self, *args):
        made.append(weakref.ref(self))
        begin(self, *args)

    monkeypatch.setattr(TransformersSlots, "__init__", begun)
    gc.collect()
    gc.disable()
    try:
        sampled(engine(our_model(folder_of(name))), ask(prompts(3, 5), 2), Sampling(4))
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_prompts_may_run_together(folder_of, monkeypatch):
    """As on a GPU: prompts of several lengths, padded, give the answers of single ones."""
    texts = prompts(9, 300, 4, 20, 290, 280, 275, 33)
    decoder = trained(folder_of("gemma 3"))
    expected = sampled(engine(decoder), ask(texts), Sampling(12, temperature=0))
    alone = TransformersDecoder.sampler

    def together(self, merge):
        sampler = alone(self, merge)
        sampler.together = True
        return sampler

    monkeypatch.setattr(TransformersDecoder, "sampler", together)
    found = sampled(engine(decoder), ask(texts), Sampling(12, temperature=0))
    assert {key: c.tokens for key, c in found.items()} == {
        key: c.tokens for key, c in expected.items()
    }
    for completion in found.values():
        check_logprobs(decoder.eval(), completion)


# ---- memory


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", some("gemma 3", but=("granite hybrid",)))  # see docs/limits.md
def test_planned_peak_of_sampling_covers_the_measured_one(tmp_path, name, dtype):
    base = write_wider(tmp_path / "base", name, vocab_size=2048)
    node = {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(base)}
    planned, peak = planned_and_measured_sampling(node, our_model(base).to(dtype), 32, 200)
    assert 1 <= planned / peak < 3


# ---- whole runs
def raft_config(base: Path, folder: Path, out: Path, **changes) -> Path:
    """Write the YAML of one cycle of 4 prompts with 4 answers each; its engine is the default."""
    for name, count, start in (("prompts", 4, 0), ("heldout", 2, 100)):
        write_rows(folder / f"{name}.jsonl", count, start)
    (folder / "torchtune").mkdir(
        exist_ok=True
    )  # what `write_run` reads, and the model below replaces
    (folder / "torchtune" / "config.json").write_text(
        json.dumps({**SHAPE, "vocab_size": 1, "model_type": "qwen2"})
    )
    path = write_run(folder, out, base="torchtune", cycles=1, epochs=1, **changes)
    cfg = yaml.safe_load(path.read_text())
    cfg |= {key: folder_config(base, path, out)[key] for key in ("model", "tokenizer")}
    del cfg["checkpointer"]
    return write_yaml(path, cfg)


@pytest.fixture
def raft(folder_of, tmp_path):
    """Return a function that writes a run of the model ``name``."""

    def make(name: str, out: str, **changes) -> Path:
        base = tmp_path / name.replace(" ", "_")
        if not base.exists():
            shutil.copytree(folder_of(name), base)
        return raft_config(base, tmp_path, tmp_path / out, **changes)

    return make


def records(out: Path) -> list[dict]:
    """Return the samples of the first cycle."""
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    of_cycle = [line for line in lines if (line["step"], line["phase"]) == (1, "sample")]
    return sorted(of_cycle, key=lambda r: (r["prompt_id"], r["sample"]))


@pytest.mark.parametrize("name", some("gemma 3"))
@pytest.mark.wide
def test_killed_while_sampling_and_resumed_and_evaluated(raft, tmp_path, capsys, name):
    whole, out, path = tmp_path / "whole", tmp_path / "out", raft(name, "out")
    assert forked(raft_main, raft(name, "whole"))[0] == 0
    assert forked(raft_main, path, prepare=kill_at_record("samples.jsonl", 9))[0] == -signal.SIGKILL
    succeed(raft_main, path, "resume_from_checkpoint=True")
    for file in (WEIGHTS, f"cycle_1/{WEIGHTS}"):
        assert (out / file).read_bytes() == (whole / file).read_bytes(), file
    assert held_out(out) == held_out(whole)
    for found, expected in zip(*(records(top) for top in (out, whole)), strict=True):
        assert found.pop("logprobs") == pytest.approx(expected.pop("logprobs"), abs=1e-4)
        assert found == expected
    adapter = out / f"cycle_1/{WEIGHTS}"
    changed = [tensor.any() for key, tensor in load_file(adapter).items() if "lora_B" in key]
    assert changed
    assert all(changed)
    assert (
        cli.main(["eval", "--json", "--config", str(path), "--adapter", str(adapter.parent)]) == 0
    )
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated == held_out(out)[1]


@several_ranks
@pytest.mark.wide
@pytest.mark.parametrize("name", FAST)
def test_two_ranks_sample_like_one(raft, tmp_path, name):
    assert forked(raft_main, raft(name, "one"))[0] == 0
    succeed_on_ranks(raft_main, raft(name, "two"))
    one, two = (records(tmp_path / out) for out in ("one", "two"))
    assert [record["tokens"] for record in two] == [record["tokens"] for record in one]
    found, expected = (load_file(tmp_path / out / WEIGHTS) for out in ("two", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# ---- bad input


@pytest.mark.parametrize(("slots", "tokenizer", "message"), [
    (3, Words(), "engine.slots is 3"), (None, SimpleNamespace(stop_tokens=()), "no stop_tokens"),
])  # fmt: skip
def test_mistakes(folder_of, slots, tokenizer, message):
    decoder = our_model(folder_of("gemma 3"))
    with pytest.raises(UserError, match=message):
        engine(decoder, tokenizer, slots=slots).check()
    with pytest.raises(UserError, match="the model takes at most 512"):
        sampled(engine(decoder), ask(prompts(9)), Sampling(510))


@pytest.mark.parametrize(("kind", "message"), REFUSED.items())
def test_models_with_code_of_their_own_are_refused(tmp_path, kind, message):
    shape = {**COMMON, "n_head": 4, "n_layer": 2, "attention_hidden_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(
        tmp_path / "base"
    )
    with pytest.raises(
        UserError, match=rf"cannot be sampled from in this process: {message}.*OpenAIEngine"
    ):
        engine(our_model(tmp_path / "base")).check()


@pytest.mark.wide
def test_longrope_s_limit_is_known_before_the_weights(tmp_path, capsys):
    shape = {
        "rope_parameters": CARE["phi3"]["rope_parameters"],
        "original_max_position_embeddings": 10,
    }
    path = raft_config(
        write_theirs(tmp_path / "base", "phi 3", **shape), tmp_path, tmp_path / "run"
    )
    for file in tmp_path.glob("base/*.safetensors"):
        file.unlink()
    code, said = forked(raft_main, path)
    assert code == 1
    assert "prompts.jsonl:1: " in said
    assert one_line_has(said, "more than the 10", "lower max_new_tokens")
    assert cli.main(["plan", "--config", str(path)]) == 1
    assert "the model takes at most 10" in capsys.readouterr().err


def greedy(decoder, graphs: bool) -> dict:
    with sampler_of(decoder) as made:
        session = LocalSession(made, NEVER, lambda: 2**31, 16, graphs)
        done = answers_of(session, ask(prompts(*LENGTHS), 5), Sampling(24, temperature=0))
    return {key: completion.tokens for key, completion in done.items()}


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", some(*FAST, "qwen3 moe"))
def test_recorded_steps_give_the_same_answers(folder_of, name, monkeypatch):
    """States advance once a token, addresses stay, and no shape or number of the recording depends on values."""
    decoder = trained(folder_of(name))
    expected = sampled(engine(decoder), ask(prompts(*LENGTHS), 5), Sampling(24, temperature=0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Recorded, "replays", 0)
    assert decoder.graph_obstacle == ""
    assert greedy(decoder, True) == {key: completion.tokens for key, completion in expected.items()}
    assert Recorded.replays > 20


def test_a_capture_that_fails_ends_graphs(folder_of, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder = trained(folder_of("qwen3.5"))
    expected = greedy(decoder, False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    with pytest.raises(UserError, match=r"not permitted.*graphs=False"):
        greedy(decoder, True)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(local, "Graphs", lambda used, asked: Graphs(True))
        assert greedy(decoder, None) == expected
    assert one_line_has(caplog.messages, "cannot capture", "launches each kernel instead")


@pytest.mark.parametrize(
    "act", [lambda x: x + float(x.sum()), lambda x: x + torch.ones(len(x)).to(x.device)[:1]]
)
def test_a_model_that_needs_the_host_takes_no_graphs(folder_of, tmp_path, monkeypatch, act):
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path)
    )  # else what other tests remember of this model answers
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

    inner = Gemma3MLP.forward
    monkeypatch.setattr(
        Gemma3MLP, "forward", lambda self, x: inner(self, act(x) if x.shape[1] == 1 else x)
    )
    decoder = our_model(folder_of("gemma 3"))
    assert "Gemma3ForCausalLM depends on values or needs the host" in decoder.graph_obstacle
    with pytest.raises(UserError, match="no graph can replay a step"):
        engine(decoder, graphs=True)
    assert sampled(engine(decoder), ask(prompts(4)), Sampling(2))


# ---- a session stays open while the model is trained
