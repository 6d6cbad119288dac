"""A loop in Python computes what the recipes compute, and continues bit for bit."""

import json
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from safetensors.torch import load_file

from rocm_ext import training
from rocm_ext.base.errors import UserError
from rocm_ext.losses import CrossEntropy, PolicyGradient
from rocm_ext.train.lifecycle import Runtime
from tests.kit.families import write_family
from tests.kit.raft_runs import trained
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "base", initializer_range=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder in Hugging Face's format."""
    return write_family(tmp_path_factory.mktemp("folder") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 24)


@pytest.fixture(scope="module")
def rows(rows_file):
    """The file's rows under the names that a dialect has."""
    lines = map(json.loads, rows_file.read_text().splitlines())
    return [{"prompt": line["question"], "completion": line["answer"]} for line in lines]


@pytest.fixture(scope="module")
def config(base, rows_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    return write_yaml(
        folder / "run.yaml", run_config(base, rows_file, folder / "sft") | {"seed": 3}
    )


@pytest.fixture(scope="module")
def model(config):
    with training.open(config) as model:
        yield model


@pytest.fixture(autouse=True)
def _no_gradients_wait(model):
    """Tests share the model; each begins without gradients, and with the weights that the last one left."""
    yield
    model.forget_gradients()


def state(model):
    return {name: value.clone() for name, value in model.learner.adapter_state().items()}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.learner.adapter.items() if p.grad is not None}


def answers(model, **settings):
    groups = model.sample(["Why?", "Who?"], samples=2, max_new_tokens=8, seed=1, **settings)
    return [answer for group in groups for answer in group]


def steps(model, rows, count):
    for number in range(count):
        model.forward_backward(rows[4 * number : 4 * number + 4])
        model.optim_step(lr=1e-2)


# ---- what it computes


def test_fine_tuning_equals_the_recipe(config, rows, tmp_path):
    recipe = trained(LoRAFinetune, config, f"output_dir={tmp_path / 'sft'}")
    per_step = recipe.trainer.steps.per_step
    epochs = recipe.cfg.epochs
    with training.fine_tune(config, rows, epochs=epochs, rows_per_step=per_step) as run:
        run.export(tmp_path / "adapter")
        assert run.step == recipe.trainer.total_steps
    ours = load_file(tmp_path / "adapter" / WEIGHTS)
    theirs = load_file(tmp_path / "sft" / "adapter" / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)
    assert max(value.abs().max() for value in theirs.values()) > 1e-2


def test_calls_add_up_to_one_step(model, rows):
    """Rows in two calls have the gradients and the loss of the same rows in one."""
    whole = model.forward_backward(rows[:8])
    together = gradients(model)
    line = model.optim_step(lr=0.0)
    parts = [model.forward_backward(rows[:3]), model.forward_backward(rows[3:8])]
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, together[name], rtol=1e-5, atol=1e-6)
    logprobs = np.concatenate([part for output in parts for part in output.logprobs])
    np.testing.assert_allclose(logprobs, np.concatenate(whole.logprobs), atol=1e-6)
    mean = -float(np.concatenate(whole.logprobs).mean(dtype=np.float64))
    assert whole.loss == pytest.approx(mean, abs=1e-6)
    assert line["loss"] == pytest.approx(whole.loss, abs=1e-6)
    assert model.optim_step(lr=0.0)["loss"] == pytest.approx(whole.loss, abs=1e-6)


def test_a_sum_is_not_divided(model, rows):
    whole = model.forward_backward(rows[:4])
    labels = sum(map(len, whole.logprobs))
    mean = model.optim_step(lr=0.0, clip_grad_norm=math.inf)["grad_norm"]
    model.forward_backward(rows[:4])
    total = model.optim_step(lr=0.0, clip_grad_norm=math.inf, normalize=False)["grad_norm"]
    assert total == pytest.approx(mean * labels, rel=1e-5)


def test_only_ratios_of_weights_matter(model, rows):
    plain = model.forward_backward(rows[:4])
    doubled = [{**row, "weight": 2.0} for row in rows[:4]]
    assert model.forward(doubled).loss == pytest.approx(plain.loss, rel=1e-6)
    mixed = [{**row, "weight": 1.0 + n} for n, row in enumerate(rows[:4])]
    sums = [-logprobs.sum(dtype=float) for logprobs in plain.logprobs]
    counts = [len(logprobs) for logprobs in plain.logprobs]
    weights = np.arange(1.0, 5.0)
    expected = weights @ sums / (weights @ counts)
    assert model.forward(mixed).loss == pytest.approx(expected, rel=1e-5)


def test_forward_leaves_no_gradients(model, rows):
    output = model.forward(rows[:4])
    assert output.loss == pytest.approx(model.forward_backward(rows[:4]).loss, abs=1e-6)
    model.optim_step(lr=0.0)
    model.forward(rows[:4])
    assert not gradients(model)
    np.testing.assert_allclose(
        np.concatenate(output.logprobs), np.concatenate(model.logprobs(rows[:4])), atol=1e-6
    )


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_policy_gradients_by_name_are_ours(model, loss):
    """A name and an object with the same columns have the same value and gradients; at ratio 1 it is REINFORCE."""
    settings = {"normalize": 8.0} if loss == "dr_grpo" else {}
    sampled = answers(model)
    rows = [answer.row(advantages=1.0 if n % 2 else -0.5) for n, answer in enumerate(sampled)]
    named = model.forward_backward(rows, loss, **settings)
    by_name = gradients(model)
    model.optim_step(lr=0.0)
    given = model.forward_backward(rows, PolicyGradient(loss, on_policy=False, **settings))
    assert named.loss == given.loss
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, by_name[name], rtol=0, atol=1e-6)
    assert named.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_losses_of_preferences_begin_at_ln_2(model):
    pairs = [{"prompt": f"What is {n}?", "chosen": "yes", "rejected": "no"} for n in range(4)]
    referenced = model.with_reference(pairs)
    assert model.forward_backward(referenced, "dpo").loss == pytest.approx(math.log(2), abs=1e-5)
    single = []
    for n, pair in enumerate(pairs):
        single.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": n % 2 == 0})
    part = model.with_reference(single).part([0, 1])
    assert model.forward_backward(part, "kto").loss == pytest.approx(0.5, abs=1e-5)


def training_from_base(model):
    """Context in which the model is its base."""
    from rocm_ext.train.scoring import without_adapter

    return without_adapter(model.learner)


@pytest.mark.parametrize("loss", ["jsd", "reverse_kl"])
def test_a_teacher_that_is_the_student_teaches_nothing(model, loss):
    rows = [answer.row() for answer in answers(model)]
    with training_from_base(model):
        output = model.forward_backward(rows, loss, teacher=model.teacher())
    assert output.loss == pytest.approx(0.0, abs=1e-5)


# ---- samples


def test_samples_have_the_trainers_logprobs(model):
    sampled = answers(model)
    scored = model.logprobs([answer.row() for answer in sampled])
    for answer, logprobs in zip(sampled, scored, strict=True):
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-4)
    assert [a.tokens for a in answers(model)] == [a.tokens for a in sampled]
    assert [
        a.tokens for a in model.sample([sampled[0].prompt], 2, max_new_tokens=8, seed=1)[0]
    ] == [a.tokens for a in sampled[:2]]


# ---- state


def test_a_loaded_state_continues_bit_for_bit(config, rows, tmp_path):
    """With its own samples and metrics, also in another process's model and output folder."""
    out = tmp_path / "run"

    def rest(model):
        steps(model, rows[8:], 2)
        sampled = model.sample(["Why?"], 2, max_new_tokens=8)
        return state(model), [answer.tokens for answer in sampled[0]]

    with training.open(config, "seed=null", output_dir=out) as model:
        steps(model, rows, 2)
        model.save(out / "state")
        expected = rest(model)
        model.load(out / "state")
        assert equal(rest(model), expected)
        model.export(out / "adapter")
    with training.open(config, "seed=null", output_dir=out, state=out / "state") as model:
        assert model.step == len((out / "metrics.jsonl").read_text().splitlines()) == 2
        assert equal(rest(model), expected)
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    with training.open(out) as model:  # a run's folder is its adapter
        assert equal((state(model), 0), (expected[0], 0))


def equal(one, other):
    return one[1] == other[1] and all(
        torch.equal(one[0][name], other[0][name]) for name in other[0]
    )


def test_ctrl_c_saves_the_state(config, rows, tmp_path):
    with training.open(config, output_dir=tmp_path / "run") as model:
        do = model.optim_step

        def step(**settings):
            if model.step == 1:
                signal.raise_signal(signal.SIGINT)
            return do(**settings)

        model.optim_step = step
        with pytest.raises(KeyboardInterrupt):
            model.train_on(rows, rows_per_step=4)
        expected = state(model)
    with training.open(
        config, output_dir=tmp_path / "run", state=tmp_path / "run" / "state"
    ) as model:
        assert model.step == 2
        assert equal((state(model), 0), (expected, 0))


def test_a_state_of_another_model_is_refused(model, rows, folder, tmp_path):
    with training.open(folder, "hardware=cpu", rank=4) as another:
        another.save(tmp_path / "state")
    with pytest.raises(UserError, match="base model"):
        model.load(tmp_path / "state")
    (tmp_path / "state" / "state.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="checksum"):
        model.load(tmp_path / "state")
    model.forward_backward(rows[:2])
    with pytest.raises(UserError, match="optim_step"):
        model.save(tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_exports_answer_alike(folder, rows, tmp_path):
    with training.open(folder, "hardware=cpu", rank=4, seed=0) as model:
        steps(model, rows, 2)
        expected = [answer.text for answer in answers(model, temperature=0)]
        for name in ("adapter", "merged"):
            model.export(tmp_path / name, merged=name == "merged")
            with pytest.raises(UserError, match="exists"):
                model.export(tmp_path / name)
        assert model.chat("Why?", temperature=0, max_new_tokens=8)
    for name, adapter in ((folder, tmp_path / "adapter"), (tmp_path / "merged", None)):
        with training.open(name, "hardware=cpu", adapter=adapter) as model:
            assert [answer.text for answer in answers(model, temperature=0)] == expected


# ---- mistakes

TOKENS = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
BAD_ROWS = {
    "none": [],
    "a text": "rows",
    "one row": TOKENS,
    "no schema": [{"a": 1}],
    "above the vocabulary": [{"tokens": [1, 10**6], "labels": [1, 2]}],
    "below 0": [{"tokens": [1, -2], "labels": [1, 2]}],
    "unequal lengths": [{"tokens": [1, 2, 3], "labels": [1, 2]}],
    "no label": [{"tokens": [1, 2], "labels": [-100, -100]}],
    "fractions": [{"tokens": [1.5, 2.0], "labels": [1, 2]}],
    "not finite": [{**TOKENS, "weight": math.nan}],
    "other columns": [TOKENS, {**TOKENS, "weight": 1.0}],
    "a short column": [{**TOKENS, "advantages": [1.0]}],
    "a weight by token": [{**TOKENS, "weight": [1.0, 2.0, 3.0]}],
    "a weight of 0": [{**TOKENS, "weight": 0}],
    "too long": [{"tokens": [1] * 10**4, "labels": [1] * 10**4}],
    "no messages": [{"messages": []}],
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named_and_change_nothing(model, rows, name):
    before = state(model)
    with pytest.raises(UserError) as error:
        model.forward_backward(BAD_ROWS[name])
    assert "\n" not in str(error.value)
    assert not gradients(model)
    model.forward_backward(rows[:2])
    model.optim_step(lr=0.0)
    assert all(torch.equal(before[key], value) for key, value in state(model).items())


@pytest.mark.parametrize("call", [
    lambda model, rows: model.optim_step(),
    lambda model, rows: model.forward_backward(rows, "gpro"),
    lambda model, rows: model.forward_backward(rows, "grpo"),
    lambda model, rows: model.forward_backward(rows, "jsd"),
    lambda model, rows: model.forward_backward(rows, "kto"),
    lambda model, rows: model.forward_backward(rows, "cross_entropy", clip=1),
    lambda model, rows: model.forward_backward(rows, CrossEntropy(), clip=1),
    lambda model, rows: model.sample("Why?"),
    lambda model, rows: model.sample(["Why?"], temperatur=1),
    lambda model, rows: model.sample(["Why?"], top_p=2),
    lambda model, rows: model.sample(["Why?"], max_new_tokens=10**6),
    lambda model, rows: model.sample([[{"role": "x"}]]),
    lambda model, rows: model.sample([[]]),
    lambda model, rows: model.sample([[10**6]]),
    lambda model, rows: model.load("nothing"),
    lambda model, rows: model.teacher("nothing"),
])  # fmt: skip
def test_mistakes_are_one_line(model, rows, call):
    with pytest.raises(UserError) as error:
        call(model, rows[:2])
    assert "\n" not in str(error.value)


def test_an_unknown_setting_of_the_optimiser(model, rows):
    model.forward_backward(rows[:2])
    with pytest.raises(UserError, match="betas"):
        model.optim_step(beta=1)
    for wrong in ({"lr": -1}, {"lr": math.nan}, {"lr": "fast"}):
        with pytest.raises(UserError, match="lr is"):
            model.optim_step(**wrong)
    assert gradients(model)
    before = state(model)
    with pytest.raises(UserError, match="optimiser cannot"):
        model.optim_step(betas=5)
    assert not gradients(model)
    model.forward_backward(rows[:2])
    model.optim_step(lr=0.0)
    assert all(torch.equal(before[key], value) for key, value in state(model).items())


@pytest.mark.parametrize(
    "more", ["loraplus_lr_ratio=4", "optimizer._component_=torchao.optim.AdamW8bit"]
)
def test_a_rate_reaches_every_group(config, rows, more):
    # torchao's compiles its step
    with torch.compiler.set_stance("force_eager"), training.open(config, more) as model:
        model.forward_backward(rows[:2])
        assert model.optim_step(lr=0.5)["lr"] == 0.5
        rates = [float(group["lr"]) for group in model._trainer.optimizer.param_groups]
        assert rates == ([0.5, 2.0] if "loraplus" in more else [0.5])


def test_a_loss_that_is_not_finite_changes_no_weight(model, rows):
    before = state(model)
    row = {**TOKENS, "old_logprobs": -20.0, "advantages": -3e38}
    with pytest.raises(UserError, match="loss"):
        model.forward_backward([row] * 4, "grpo")
    assert not gradients(model)
    assert all(torch.equal(before[key], value) for key, value in state(model).items())


def test_a_model_over_the_memory_budget_is_refused(config, monkeypatch):
    monkeypatch.setattr(Runtime, "budget_and_reason", lambda self, taken=0: (1000, "small"))
    with pytest.raises(UserError, match="memory plan needs"):
        training.open(config)
    training.open(config, "over_budget=try").close()


def test_importing_it_imports_no_torch():
    code = "import sys, rocm_ext.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_override_of_the_rank_is_kept(folder):
    """A folder's usual rank gives way to an override, and an override to the argument."""
    with training.open(folder, "model.lora_rank=3") as model:
        assert model.cfg.model.lora_rank == 3
    with training.open(folder, "model.lora_rank=3", rank=5) as model:
        assert model.cfg.model.lora_rank == 5
