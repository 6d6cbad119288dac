"""Routers' choices in sampling, and their replay in training."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rocm_ext.recipes.grpo_rocm import main

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import collate
from rocm_ext.data.rows import ROUTES
from rocm_ext.model.hf.experts import experts_of
from rocm_ext.rl.records import Sample, to_sample
from rocm_ext.rl.selection import to_rows
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.sampling import Completion, LocalEngine, Request, Sampling
from tests.kit.families import folder_config
from tests.kit.forks import forked, succeed, succeed_on_ranks
from tests.kit.grpo_runs import assert_equal, lines, write_run
from tests.kit.hf_models import write_common
from tests.kit.parity import our_model
from tests.kit.raft_runs import WEIGHTS, write_world
from tests.kit.replay import Recorded, capture
from tests.kit.tiny import metrics, write_yaml
from tests.sampling.test_transformers_engine import NEVER, ask, prompts

NAMES = ("qwen3 moe", "gpt-oss", "deepseek 3")
TEXTS = prompts(20, 30)  # long enough that a pack holds them once


def sampled(decoder, graphs: bool = False) -> list[Sample]:
    """Sample three answers of 12 tokens to each prompt."""
    made = LocalEngine(
        decoder=decoder, tokenizer=NEVER, free_memory=lambda: 2**31, graphs=graphs, routes=True
    )
    with made.session(None) as session:
        found = sorted(session.generate(ask(TEXTS, 3), Sampling(12)), key=lambda c: c.request.key)
    return [to_sample(Sample.of(completion).record()) for completion in found]


@torch.no_grad()
def with_other_routers(folder: Path):
    """Load a model whose routers are a little other ones."""
    decoder = our_model(folder)
    torch.manual_seed(1)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    return decoder


def rows_of(samples: list[Sample], join: bool):
    rows, _ = to_rows(samples, {str(i): text for i, text in enumerate(TEXTS)})
    rows.add_labels_column(ROUTES, [sample.chosen_experts() for sample in samples])
    return rows.join_groups([sample.prompt_id for sample in samples], 10**6)[0] if join else rows


def batch_of(samples: list[Sample]):
    rows = rows_of(samples, join=True)
    return collate(rows, list(range(len(rows))), packed=True, pad_id=0, multiple=8, share=True)


def computed(decoder, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the labels' tokens, and the experts that compute these tokens: [n, layers, chosen]."""
    used: list[torch.Tensor] = []
    experts = experts_of(decoder).values()
    hooks = [
        module.register_forward_pre_hook(lambda _, args: used.append(args[1])) for module in experts
    ]
    logits = decoder.output(decoder.hidden_states(batch).flatten(0, 1)[batch.index])
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(used, 1)[batch.index]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", NAMES)
def test_training_computes_the_experts_of_sampling(folder_of, name):
    samples = sampled(with_other_routers(folder_of(name)))
    decoder = our_model(folder_of(name)).train()
    decoder.replay_routes()
    batch = batch_of(samples)
    recorded = torch.from_numpy(np.concatenate([sample.chosen_experts() for sample in samples]))

    expected, used = computed(decoder, batch)
    recorded = recorded.view(len(recorded), -1, used.shape[-1])
    assert torch.equal(used, recorded.to(used))
    differs, given = decoder.replay.differing()
    assert int(given.any(-1).any(-1).sum()) == len(batch.index.unique())
    expected.logsumexp(-1).sum().backward()
    grads = [p.grad for p in decoder.parameters() if p.requires_grad]
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    assert any(grad is not None and grad.any() for grad in grads)

    batch.routes = None
    logits, own = computed(decoder, batch)
    assert decoder.replay.differing() is None
    assert not torch.equal(own, used)
    assert (logits - expected).abs().max() > 1e-3
    assert int(differs.sum()) > 0
    # in the first layer with experts both passes have the same inputs
    others = (used[:, 0, :, None] != own[:, 0, None]).all(-1)
    assert torch.equal(differs[batch.index, 0], others)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_sampling(folder_of, name):
    decoder = our_model(folder_of(name)).eval()
    samples = sampled(decoder)
    decoder.replay_routes()
    batch = batch_of(samples)
    with torch.no_grad():
        logits, _ = computed(decoder, batch)
    found = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    told = torch.tensor([value for sample in samples for value in sample.logprobs])
    torch.testing.assert_close(found, told, atol=2e-5, rtol=0)


def test_a_shared_token_has_the_experts_of_its_first_answer(folder_of):
    samples = sampled(our_model(folder_of("qwen3 moe")))[:3]
    rows = rows_of(samples, join=False)
    for i, column in enumerate(rows.columns[ROUTES]):
        column[len(TEXTS[0])] = i
    padded = collate(rows, [0, 1, 2], packed=False, pad_id=0, multiple=8)
    assert padded.routes.shape[:2] == padded.tokens.shape
    assert padded.routes[:, len(TEXTS[0]) - 1, 0].tolist() == [0, 1, 2]
    rows, _ = rows.join_groups(["0"] * 3, 10**6)
    batch = collate(rows, [0], packed=True, pad_id=0, multiple=1, share=True)
    assert batch.routes[0, len(TEXTS[0]) - 1].tolist() == [0] * batch.routes.shape[2]
    assert (batch.routes[0, : len(TEXTS[0]) - 1] == -1).all()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", NAMES)
def test_graphs_keep_the_same_experts(folder_of, name, monkeypatch):
    decoder = with_other_routers(folder_of(name))
    expected = sampled(decoder)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Recorded, "replays", 0)
    found = sampled(decoder, graphs=True)
    assert Recorded.replays > 5
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    assert [s.routes for s in found] == [s.routes for s in expected]


def test_records(folder_of):
    request = Request("a", 0, 1, (5, 6))
    plain = Sample.of(Completion(request, [7], [-0.5], "x", "stop"))
    assert "routes" not in plain.record()
    assert to_sample(plain.record()) == plain
    with pytest.raises(UserError, match="no routes"):
        plain.chosen_experts()
    routes = np.array([[[300, 1], [0, 127]]], np.int16)
    kept = Sample.of(Completion(request, [7], [-0.5], "x", "stop", routes))
    assert to_sample(kept.record()).chosen_experts().tolist() == [[300, 1, 0, 127]]


# ---- whole runs
@pytest.fixture(scope="module")
def make(folder_of, tmp_path_factory):
    """Return a function that writes a run of a model."""
    top = write_world(tmp_path_factory.mktemp("runs"))

    def write(out: str, name: str = "qwen3 moe", folder: Path | None = None, **changes) -> Path:
        base = top / name.replace(" ", "_")
        if not base.exists():
            shutil.copytree(folder or folder_of(name), base)
        changes = {
            "steps": 2,
            "eval_every_n_steps": 4,
            "save_every_n_steps": 1,
            "router_replay": True,
        } | changes
        path = write_run(top, top / out, **changes)
        cfg = yaml.safe_load(path.read_text())
        cfg |= {key: folder_config(base, path, top / out)[key] for key in ("model", "tokenizer")}
        del cfg["checkpointer"]
        return write_yaml(path, cfg)

    return write


def run(path: Path, *overrides: str) -> Path:
    succeed(main, path, *overrides)
    return Path(yaml.safe_load(path.read_text())["output_dir"])


@pytest.mark.wide
def test_a_run_replays_and_resumes(make):
    changes = {"updates_per_step": 2, "old_logprobs": "trainer"}
    expected = run(make("whole", **changes))
    assert all("routes" in line for line in lines(expected / "samples.jsonl"))
    assert all(0 <= share < 0.2 for share in metrics(expected, "routing_mismatch"))
    assert len(metrics(expected, "routing_mismatch")) == 2

    def prepare() -> None:
        def train_on(self, *_):
            os.kill(os.getpid(), signal.SIGKILL)

        PolicyTrainer.train_on = train_on

    path = make("killed", **changes)
    assert forked(main, path, prepare=prepare)[0] == -signal.SIGKILL
    assert_equal(run(path, "resume_from_checkpoint=True"), expected)

    recomputed = run(make("recomputed", enable_activation_checkpointing=True, **changes))
    assert (recomputed / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()


@pytest.mark.wide
def test_two_ranks_equal_one(make):
    expected, path = run(make("one", steps=1)), make("two", steps=1)
    succeed_on_ranks(main, path)
    found = path.parent / "two"
    # log-probs of transformers' code differ by rounding in other batches
    keys = ("phase", "prompt_id", "sample", "tokens", "routes")
    mine, theirs = (
        sorted([s[key] for key in keys] for s in lines(out / "samples.jsonl"))
        for out in (found, expected)
    )
    assert mine == theirs
    for name in ("routing_mismatch", "loss", "grad_norm"):
        assert metrics(found, name) == pytest.approx(metrics(expected, name), abs=1e-4)


SERVERS = (
    "engine._component_=rocm_ext.sampling.OpenAIEngine",
    "engine.urls=[http://localhost:1/v1]",
)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("kind", "overrides", "says"),
    [
        ("qwen3 moe", SERVERS, "does not return which experts"), ("native", (), "the model has no experts"),
        ("gemma 3", (), "has no experts"), ("qwen3 moe", ["compile=True"], "compile=False"),
        ("qwen3 moe", ["router_replay=3"], "router_replay is 3"),
    ],
)  # fmt: skip
def test_refusals(make, tmp_path, kind, overrides, says):
    path = make("refused", "qwen3 moe" if kind == "native" else kind)
    if kind == "native":
        path = write_run(path.parent, tmp_path / "native", router_replay=True)
    code, messages = forked(main, path, *overrides)
    assert code == 1, messages
    assert "Traceback" not in messages
    assert says in messages.strip().splitlines()[-1]


def test_routers_of_another_kind_are_refused(tmp_path):
    decoder = our_model(write_common(tmp_path / "phimoe", "phimoe"))
    with pytest.raises(UserError, match=r"Phimoe.* does not choose experts with one topk"):
        decoder.replay_routes()
