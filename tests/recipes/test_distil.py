"""Distillation end to end: steps equal TRL's, and runs are the same after kills, on any ranks and from any teacher."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from peft import get_peft_model_state_dict
from rocm_ext.recipes.distil_rocm import Distil, main
from safetensors.torch import load_file

from rocm_ext.base.errors import UserError
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.folder import RunFolder
from tests.kit import forks, parity
from tests.kit.forks import RESUME, kill_and_resume, several_ranks, signal_at
from tests.kit.grpo_runs import assert_equal, lines, outcome, write_run
from tests.kit.parity import their_model
from tests.kit.raft_runs import WEIGHTS, kill_at_record, loaded
from tests.kit.raft_runs import trained as train
from tests.kit.servers import MODELS, Fake
from tests.kit.tiny import metrics, run_config, write_model, write_yaml

pytest.importorskip("resource", reason="forks, POSIX signals and limits")
OF_GRPO = {"truncated", "loss"}
succeed, load, trained = (
    partial(forks.succeed, main),
    partial(loaded, Distil),
    partial(train, Distil),
)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A model with the tokens of the world's, and other layers and sizes."""
    shape = {"hidden_size": 96, "num_hidden_layers": 3, "initializer_range": 0.2}
    return write_model(tmp_path_factory.mktemp("teacher") / "teacher", **shape)


@pytest.fixture(scope="session")
def make(folder, teacher):
    """Write the YAML of a run: 4 steps of 4 prompts with an answer each."""

    def write(out: Path, **changes: object) -> Path:
        given = {
            "recipe": "distil_rocm",
            "teacher": str(teacher),
            "samples_per_prompt": 1,
        } | changes
        path = write_run(folder, out, **given)
        cfg = yaml.safe_load(path.read_text())
        for key in OF_GRPO - changes.keys():
            cfg.pop(key, None)
        return write_yaml(path, cfg)

    return write


@pytest.fixture(scope="session")
def reference(make, folder):
    """An undisturbed run."""
    out = folder / "distil_reference"
    succeed(make(out))
    return out


def test_every_step_is_in_the_records(reference):
    samples = lines(reference / "samples.jsonl")
    steps = [line for line in lines(reference / "metrics.jsonl") if "eval" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["answers"] == 4
        assert step["updates"] == 1
        assert step["loss"] > 0
        assert 0 <= step["agreement"] <= 1
        assert 0 <= step["reward"] <= 1, "the verifier measures"
    asked = [line["prompt_id"] for line in samples if line["phase"] == "sample"]
    assert len(asked) == 16
    assert len(set(asked[:12])) == 12, "in turn"
    run = RunFolder(reference)
    assert (run.recipe, run.finished, len(run.steps), len(run.evaluations["eval"])) == (
        "distil_rocm",
        True,
        4,
        3,
    )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_step_equals_trl(make, folder, teacher, tmp_path, beta):
    """An SGD step at rate 1 changes the adapter by minus the gradient of TRL's loss on the same answers."""
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    sgd = {"_component_": "torch.optim.SGD", "lr": 1.0}
    keys = {
        "beta": beta,
        "steps": 1,
        "optimizer": sgd,
        "clip_grad_norm": None,
        "eval_prompts": None,
        "dtype": "fp32",
    }
    made = load(make(tmp_path / "out", **keys))
    made.setup()
    with torch.no_grad():
        for parameter in made.learner.adapter.values():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    first = tmp_path / "first"
    first.mkdir()
    made.learner.write_adapter(first)
    made.train()
    made.cleanup()
    model, theirs = their_model(folder / "base", first, trainable=True), their_model(teacher)
    before = {
        name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()
    }
    samples = [
        line for line in lines(tmp_path / "out" / "samples.jsonl") if line["phase"] == "sample"
    ]
    count = sum(len(line["tokens"]) for line in samples)
    loss = 0.0
    for line in samples:
        ids = torch.tensor([*made.prompts.tokens[line["prompt_id"]], *line["tokens"]])[None]
        n = len(line["tokens"])
        with torch.no_grad():
            seen = theirs.model(ids).last_hidden_state[:, -n - 1 : -1]
        states = model.base_model.model.model(ids).last_hidden_state[:, -n - 1 : -1]
        heads = model.base_model.model.lm_head.weight, theirs.lm_head.weight
        part, *_ = trl._chunked_divergence_loss(
            states, seen, *heads, torch.ones(1, n), beta, num_items_in_batch=count
        )
        part.backward()
        loss += part.item()
    assert metrics(tmp_path / "out")[0] == pytest.approx(loss, rel=1e-5)
    named = model.named_parameters()
    gradients = {name.replace(".default", ""): p.grad for name, p in named if p.requires_grad}
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert {*after} == {*before} == {*gradients}
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-5, atol=1e-6)


PARTS = ("train_on", "finish_step", "save_checkpoint")
KILLS = [kill_at_record("samples.jsonl", 12), kill_at_record("verdicts.jsonl", 5)]
KILLS += [
    signal_at(PolicyTrainer, name, lambda self, *_: self.step >= 2, before=True) for name in PARTS
]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("kill", KILLS)
def test_killed_and_resumed(make, reference, tmp_path, kill):
    kill_and_resume(main, make(tmp_path / "out"), kill)
    assert_equal(tmp_path / "out", reference)


@pytest.mark.wide
@several_ranks
@pytest.mark.parametrize(("loss", "base"), [("jsd", False), ("reverse_kl", False), ("jsd", True)])
def test_two_ranks_equal_one(make, reference, tmp_path, loss, base):
    own = {"teacher": "base", "teacher_adapter": str(reference / "adapter")} if base else {}
    changes = {"loss": loss, "steps": 2, **own}
    succeed(make(tmp_path / "one", **changes))
    forks.succeed_on_ranks(main, make(tmp_path / "two", **changes))
    assert len(outcome(tmp_path / "two")["samples"]) == len(outcome(tmp_path / "one")["samples"])
    for key in ("loss", "grad_norm"):
        found, expected = (metrics(tmp_path / out, key) for out in ("two", "one"))
        assert len(expected) == 2
        assert found == pytest.approx(expected, rel=1e-4)
    found, expected = (load_file(tmp_path / out / WEIGHTS) for out in ("two", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("loss", ["jsd", "reverse_kl"])
def test_an_adapter_teaches_its_own_base(make, reference, folder, tmp_path, loss):
    """The teacher is the base with an adapter: the same as that model as a folder, and a model of its own adapter."""
    changes = {
        "steps": 2,
        "eval_prompts": None,
        "loss": loss,
        "teacher_adapter": str(reference / "adapter"),
    }
    for name, teacher in (("shared", "base"), ("apart", str(folder / "base"))):
        trained(make(tmp_path / name, teacher=teacher, **changes))
    found, expected = (metrics(tmp_path / out) for out in ("shared", "apart"))
    assert found[0] > 0
    assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (load_file(tmp_path / out / WEIGHTS) for out in ("shared", "apart"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_server_teaches_as_the_model_that_it_serves(make, teacher, tmp_path):
    theirs, failures = their_model(teacher), [503]

    def reply(path, body):
        if path == MODELS:
            return {"data": [{"id": "large"}, {"id": "old", "parent": "large"}]}
        if len(body["prompt"]) > 2 and failures:
            return failures.pop(), {}, {}
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            logprobs = theirs(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return {
            "choices": [
                {"text": "", "logprobs": {"token_logprobs": [None, *logprobs.tolist(), -1.0]}}
            ]
        }

    fake, changes = Fake(reply), {"loss": "reverse_kl", "steps": 2, "eval_prompts": None}
    trained(make(tmp_path / "server", teacher=f"{fake.url}/v1", **changes))
    trained(make(tmp_path / "here", **changes))
    assert {body["model"] for path, body, _ in fake.asked if body} == {"large"}
    assert not failures
    found, expected = (metrics(tmp_path / out) for out in ("server", "here"))
    assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (load_file(tmp_path / out / WEIGHTS) for out in ("server", "here"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_base_brings_back_what_an_adapter_changed(make, reference, tmp_path):
    path = make(tmp_path / "out", teacher="base", steps=12, lr_scheduler=None, eval_prompts=None)
    cfg = yaml.safe_load(path.read_text())
    cfg["checkpointer"]["adapter_checkpoint"] = str(reference / "adapter")
    trained(write_yaml(path, cfg))
    losses = metrics(tmp_path / "out")
    assert losses[-1] < losses[0] / 2


def test_given_answers_are_learned_without_sampling(make, tmp_path):
    trained(make(tmp_path / "out", given_answers="answer", steps=12, eval_prompts=None, beta=0.0))
    losses = metrics(tmp_path / "out")
    assert losses[-1] < losses[0]
    assert not (tmp_path / "out" / "samples.jsonl").read_text()


@pytest.fixture(scope="module")
def places(reference, tmp_path_factory) -> dict[str, Path]:
    """An adapter, a model with another tokenizer, and one that takes 32 tokens."""
    top = tmp_path_factory.mktemp("teachers")
    other = write_model(
        top / "other", text=["Totally different words make other merges, of course."]
    )
    short = write_model(top / "short", max_position_embeddings=32)
    return {"adapter": reference / "adapter", "other": other, "short": short}


@pytest.mark.parametrize(("overrides", "key"), [
    ("teacher=base", "teacher is base"),
    ("teacher=nowhere/at/all", "teacher's folder nowhere/at/all"),
    ("teacher={adapter}", "is an adapter; set teacher_adapter"),
    ("teacher=base teacher_adapter={adapter} model.apply_lora_to_mlp=False", "adapts down_proj"),
    ("teacher_quantize_base=nf4", "teacher: quantize_base"),  # rows of 96 weights make no blocks of 4 bits
    ("teacher={other}", "/other has another tokenizer: token"),
    ("teacher={short} eval_prompts=null max_new_tokens=30", "32 that the teacher takes"),
    ("loss=reverse_kl updates_per_step=2", "loss=reverse_kl"),
    ("loss=reverse_kl top_p=0.9", "top_p is 0.9, and loss=reverse_kl"),
    ("verifier=null", "set verifier"),
    ("teacher=http://127.0.0.1:9 loss=reverse_kl", "127.0.0.1:9 cannot be reached"),
    ("teacher=http://127.0.0.1:9 loss=reverse_kl teacher_adapter=x", "teacher_adapter is 'x'"),
    ("teacher_model=large", "teacher_model is 'large'"),
    ("samples_per_prompt=2 temperature=0", "samples_per_prompt=1"),
])  # fmt: skip
def test_bad_input_is_a_line(make, places, tmp_path, overrides, key):
    with pytest.raises(UserError) as raised:
        load(make(tmp_path / "out"), *overrides.format(**places).split()).setup()
    assert key in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_the_longest_given_answer_is_planned(make, tmp_path):
    made = load(make(tmp_path / "out", given_answers="answer", max_new_tokens=1, eval_prompts=None))
    made.setup()
    rows, _ = made.rows(made.sample(1))
    assert not made.sessions_stay_open
    assert made.learner.tokens_per_micro_batch >= 4 * max(map(len, rows.tokens))  # the batch size
    made.cleanup()


def test_a_step_whose_verifier_fails_learns_nothing(make, tmp_path, caplog):
    verifier = {"_component_": "tests.kit.judges.Tired", "fails": list(range(1, 100))}
    trained(
        make(tmp_path / "out", verifier=verifier, max_error_share=1.0, steps=2, eval_prompts=None)
    )
    assert [line["updates"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [0, 0]
    assert "no step had an update" in caplog.text


def test_tokens_that_the_teacher_lacks_are_not_learned(make, folder, tmp_path):
    """The model's vocabulary has more padding than the teacher's, and random weights sample it."""
    wide, path = (
        write_model(tmp_path / "wide", vocab=1024, initializer_range=0.1),
        make(tmp_path / "out", steps=1),
    )
    cfg = yaml.safe_load(path.read_text())
    cfg["checkpointer"]["checkpoint_dir"], cfg["model"]["vocab_size"] = str(wide), 1024
    trained(
        write_yaml(path, cfg),
        "teacher=" + str(folder / "base"),
        "max_new_tokens=1",
        "prompts_per_step=12",
    )
    sampled = [
        line for line in lines(tmp_path / "out" / "samples.jsonl") if line["phase"] == "sample"
    ]
    words = json.loads((folder / "base" / "config.json").read_text())["vocab_size"]
    known = sum(max(line["tokens"]) < words for line in sampled)
    assert 0 < known < len(sampled)
    assert metrics(tmp_path / "out", "trained_groups") == [known]


def test_another_teacher_is_another_run(make, folder, reference, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "moved")
    load(make(reference), RESUME, f"teacher={tmp_path / 'moved'}").setup()
    with pytest.raises(UserError, match="belongs to another run: teacher"):
        load(make(reference), RESUME, f"teacher={folder / 'base'}").setup()


@pytest.mark.parametrize("loss", ["jsd", "reverse_kl"])
def test_the_loss_alone_has_no_teacher(folder, tmp_path, loss):
    component = {"_component_": "rocm_ext.losses.Distillation", "loss": loss}
    cfg = run_config(folder / "base", folder / "prompts.jsonl", tmp_path / "out", loss=component)
    with pytest.raises(
        UserError, match=f"teacher_{'hidden' if loss == 'jsd' else 'logprobs'}.*start distil_rocm"
    ):
        parity.prepare(cfg)
