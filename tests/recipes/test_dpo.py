"""Runs on pairs: equal to torchtune's recipe, the same for every cut and number of ranks, and resumed bit for bit."""

import contextlib
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from rocm_ext.recipes.dpo_rocm import DPO, main
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import row_sizes
from rocm_ext.model.adapters import peft_files
from rocm_ext.train.scoring import FILE, PARTS, reference, score, set_baseline
from tests.kit import parity
from tests.kit.forks import RESUME, forked, kill_before, several_ranks, succeed_on_ranks
from tests.kit.lines import one_line_has
from tests.kit.parity import WEIGHTS, run_stock
from tests.kit.tiny import TEXT, metrics, run_config, write_model, write_rows, write_yaml

pytest.importorskip("resource", reason="forks and POSIX signals")
DPO_LOSS = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
WIDE = pytest.mark.wide
KTO = {"_component_": "rocm_ext.losses.UnpairedPreference", "beta": 0.3}
PREFERENCE = {"_component_": "rocm_ext.losses.Preference"}
prepare, train = partial(parity.prepare, recipe=DPO), partial(parity.finetune, recipe=DPO)


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A base model, 24 pairs, as many good or bad answers, and an adapter with random weights."""
    top = tmp_path_factory.mktemp("dpo")
    write_model(top / "base", initializer_range=0.1)
    rows = []
    for i in range(24):
        words = " ".join(TEXT[i % 3].split()[: 4 + i * 7 % 13])
        asked = {"role": "user", "content": f"{words} {i}?"}
        good, bad = (
            f"It is {i * 37 % 101}. " + "So it is. " * (i % 4),
            f"She sold {i * 53 % 89} clips." * (1 + i % 3),
        )
        sides = [[asked, {"role": "assistant", "content": text}] for text in (good, bad)]
        rows.append(dict(zip(("chosen", "rejected"), sides, strict=True)))
    (top / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    single = [
        {"messages": row["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        for i, row in enumerate(rows)
    ]
    (top / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in single))
    recipe = prepare(dpo_config(top, top / "first"))
    generator = torch.Generator().manual_seed(3)
    state = peft_files.adapter_state(recipe.learner.decoder)
    torch.save(
        {k: torch.randn(v.shape, generator=generator) * 0.05 for k, v in state.items()},
        top / "start.pt",
    )
    return top


def dpo_config(top: Path, out: Path, **changes) -> dict:
    """Return the config of a run over the pairs, from the random adapter if there is one: 3 steps of an epoch.

    With KTO it is over the single answers.
    """
    rows = top / ("single.jsonl" if "Unpaired" in str(changes.get("loss")) else "pairs.jsonl")
    cfg = run_config(top / "base", rows, out)
    cfg["dataset"] = {"_component_": "rocm_ext.data.preference_dataset", "source": str(rows)}
    if (top / "start.pt").exists():
        cfg["checkpointer"]["adapter_checkpoint"] = str(top / "start.pt")
    return {**cfg, **changes}


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("loss", [{**DPO_LOSS, "beta": 0.3, "label_smoothing": 0.1},
                                  {"_component_": "torchtune.rlhf.loss.RSOLoss", "gamma": 0.2}])  # fmt: skip
def test_every_step_equals_stock_torchtune(top, tmp_path, loss):
    dataset = {"_component_": "torchtune.datasets.preference_dataset", "source": "json",
               "data_files": str(top / "pairs.jsonl"), "split": "train"}  # fmt: skip
    logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(tmp_path),
    }
    cfg = run_config(
        top / "base", top / "pairs.jsonl", tmp_path / "run", dataset=dataset, loss=loss, batch_size=8, epochs=2,
        gradient_accumulation_steps=1, shuffle=True, dtype="fp32", device="cpu", compile=False, metric_logger=logger,
        enable_activation_checkpointing=False, max_steps_per_epoch=None, resume_from_checkpoint=False,
        lr_scheduler={"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                      "num_warmup_steps": 1},
    )  # fmt: skip
    del cfg["sequences_per_step"]
    cfg["tokenizer"]["max_seq_len"] = None
    stock, adapter = run_stock(
        "lora_dpo", {k: v for k, v in cfg.items() if k != "hardware"}, tmp_path / "initial.pt"
    )
    cfg["checkpointer"]["adapter_checkpoint"] = str(tmp_path / "initial.pt")
    ours = train(cfg)
    assert len(stock) == 6
    tokens, rows = metrics(tmp_path / "run", "tokens"), ours.trainer.rows
    assert sum(tokens[:3]) == sum(row_sizes(rows, share=True)) < sum(map(len, rows.tokens))
    assert metrics(tmp_path / "run") == pytest.approx([step["loss"] for step in stock], rel=1e-5)
    torch.testing.assert_close(
        peft_files.adapter_state(ours.learner.decoder), adapter, rtol=1e-4, atol=1e-6
    )
    names = {"reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected", "margin": "rewards/margins",
             "accuracy": "rewards/accuracies", "logprobs_chosen": "log_probs/chosen",
             "logprobs_rejected": "log_probs/rejected"}  # fmt: skip
    for name, theirs in names.items():
        expected = pytest.approx([step[theirs] for step in stock], rel=1e-4, abs=1e-5)
        assert beyond_rounding(tmp_path / "run", name) == expected


@pytest.mark.wide
def test_every_step_of_kto_equals_trl(top, tmp_path, monkeypatch):
    """Steps in several micro-batches equal those in one of TRL's, which holds all rows, so that it pairs them alike."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    rows = (top / "single.jsonl").read_text().splitlines()[:8]
    (tmp_path / "single.jsonl").write_text("\n".join(rows))
    cfg = dpo_config(
        top, tmp_path / "run", loss={**KTO, "undesirable_weight": 0.7}, epochs=5, sequences_per_step=8, batch_size=2,
        shuffle=False, clip_grad_norm=None, lr_scheduler=None, validation_fraction=0.0,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 5e-3, "weight_decay": 0.0},
    )  # fmt: skip
    cfg["dataset"]["source"], cfg["checkpointer"]["adapter_checkpoint"] = (
        str(tmp_path / "single.jsonl"),
        None,
    )
    recipe = prepare(cfg)
    (tmp_path / "first").mkdir()
    recipe.learner.write_adapter(tmp_path / "first")
    recipe.train()
    ours = recipe.trainer.rows
    texts = []
    for tokens, labels, side in zip(ours.tokens, ours.labels, ours.columns["side"], strict=True):
        start = int((labels != -100).argmax())
        prompt, answer = tokens[:start].tolist(), tokens[start:].tolist()
        texts.append({"prompt_ids": prompt, "completion_ids": answer, "label": bool(side[0] > 0)})
    before = [texts[i - 1]["completion_ids"] for i in range(8)]  # as TRL rotates them
    data = datasets.Dataset.from_list(texts).add_column("KL_completion_ids", before)
    monkeypatch.setattr(trl.KTOTrainer, "_prepare_dataset", lambda self, dataset, *args: dataset)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(top / "base", dtype=torch.float32),
        tmp_path / "first",
        is_trainable=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(top / "base")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=8, num_train_epochs=5, learning_rate=5e-3,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", beta=0.3, max_grad_norm=0.0,
        undesirable_weight=0.7, use_cpu=True, gradient_checkpointing=False, bf16=False, max_length=None,
        train_sampling_strategy="sequential", optim="adamw_torch",
    )  # fmt: skip
    trainer = trl.KTOTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    stock = [step for step in trainer.state.log_history if "loss" in step]
    assert metrics(tmp_path / "run") == pytest.approx([step["loss"] for step in stock], rel=1e-5)
    baselines = metrics(tmp_path / "run", "baseline")
    assert baselines == pytest.approx([step["kl"] for step in stock], rel=1e-4, abs=1e-4)
    assert max(baselines) > 1


def beyond_rounding(out: Path, name: str) -> list[float]:
    """Return a measurement of each step; an accuracy is 0 where the margin is rounding, as before the first update."""
    values = metrics(out, name)
    if name.endswith("accuracy"):
        margins = metrics(out, name.replace("accuracy", "margin"))
        values = [
            value * (abs(margin) > 1e-5) for value, margin in zip(values, margins, strict=True)
        ]
    return values


@pytest.mark.wide
def test_the_reference_is_scored_once_and_kept(top, tmp_path, monkeypatch):
    cfg = dpo_config(top, tmp_path / "run", validation_fraction=0.2)
    recipe = train(cfg)
    assert metrics(tmp_path / "run")[0] == pytest.approx(math.log(2), rel=1e-6)
    kept = load_file(tmp_path / "run" / FILE)
    assert {name: len(values) for name, values in kept.items()} == {
        "dataset": sum(
            int((batch_labels != -100).sum()) for batch_labels in recipe.trainer.rows.labels
        ),
        "dataset_val": sum(
            int((each != -100).sum()) for each in recipe.trainer.validation_rows.labels
        ),
    }
    again = prepare({**cfg, "output_dir": str(tmp_path / "again")})
    found = torch.from_numpy(score(again.learner, again.trainer.rows)[0])
    assert torch.equal(kept["dataset"][: len(found)], found), "the model with its first adapter"

    def fail(*args, **kwargs):
        raise AssertionError("the reference is kept")

    monkeypatch.setattr("rocm_ext.train.scoring.score", fail)
    prepare({**cfg, "resume_from_checkpoint": True, "epochs": 2})
    with pytest.raises(AssertionError, match="the reference is kept"):  # other rows have others
        prepare({**cfg, "overwrite_output_dir": True, "validation_fraction": 0.4})
    cfg["checkpointer"]["adapter_checkpoint"] = None
    with pytest.raises(AssertionError, match="the reference is kept"):  # and another first adapter
        prepare({**cfg, "overwrite_output_dir": True})


def test_scoring_the_reference_goes_on_where_it_was_killed(top, tmp_path, monkeypatch):
    """Each block is saved. Fresh adapters add nothing, so a start with another seed continues, too."""
    scored = []

    def scoring(learner, rows, fail_at: int = 0):
        scored.append(len(rows))
        if len(scored) == fail_at:
            raise KeyboardInterrupt
        return score(learner, rows)

    def prepared(out: str, seed: int):
        cfg = dpo_config(top, tmp_path / out, validation_fraction=0.25, seed=seed)
        cfg["checkpointer"]["adapter_checkpoint"] = None
        return prepare(cfg)

    monkeypatch.setattr("rocm_ext.train.scoring._BLOCK", 5)
    monkeypatch.setattr("rocm_ext.train.scoring.score", scoring)
    prepared("whole", 1)
    assert scored == [5, 5, 5, 3, 5, 1]
    for fail_at, seed in ((3, 2), (9, 3)):
        scored.clear()
        monkeypatch.setattr("rocm_ext.train.scoring.score", partial(scoring, fail_at=fail_at))
        with contextlib.suppress(KeyboardInterrupt):
            prepared("killed", seed)
        assert scored == {3: [5, 5, 5], 9: [5, 3, 5, 1]}[fail_at]
    whole, killed = (load_file(tmp_path / out / FILE) for out in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert not (tmp_path / "killed" / PARTS).exists()


def test_a_reference_that_is_not_finite_is_refused(top, tmp_path, monkeypatch):
    def broken(learner, rows):
        found = score(learner, rows)
        found[2][0] = math.nan
        return found

    monkeypatch.setattr("rocm_ext.train.scoring.score", broken)
    with pytest.raises(UserError, match=r"dataset: .* 1 rows are not finite, .* row 2"):
        prepare(dpo_config(top, tmp_path / "run"))
    assert not (tmp_path / "run" / FILE).exists()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("damage", [b"not safetensors", b""])
def test_a_damaged_reference_is_computed_again(top, tmp_path, damage, messages):
    whole = train(dpo_config(top, tmp_path / "run"))
    (tmp_path / "run" / FILE).write_bytes(damage)
    recipe = prepare(dpo_config(top, tmp_path / "run", resume_from_checkpoint=True, epochs=2))
    assert one_line_has(messages, "cannot read", "computed again")
    assert recipe.trainer.step == whole.trainer.step == 3


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_score_none(top, tmp_path, name):
    loss = {**PREFERENCE, "loss": name}
    train(
        dpo_config(
            top,
            tmp_path / "run",
            loss=loss,
            optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-2},
        )
    )
    first, *_, last = metrics(tmp_path / "run")
    assert last < first
    assert not (tmp_path / "run" / FILE).exists()


MEASURED = ("loss", "grad_norm", "margin", "accuracy", "logprobs_chosen", "kl", "val_loss", "val_margin",
            "val_accuracy")  # fmt: skip
LONG = {"epochs": 2, "validation_fraction": 0.2}


@pytest.fixture(scope="module", params=["sigmoid", "kto"])
def whole(request, top) -> tuple[Path, dict]:
    """A run of 6 steps with one micro-batch per step, and its loss."""
    loss = KTO if request.param == "kto" else PREFERENCE
    train(dpo_config(top, top / request.param, tokens_per_micro_batch=100_000, loss=loss, **LONG))
    return top / request.param, loss


def assert_same(out: Path, whole: Path) -> None:
    for key in (*MEASURED, "baseline", "val_baseline"):
        assert beyond_rounding(out, key) == pytest.approx(
            beyond_rounding(whole, key), rel=2e-5, abs=1e-6
        ), key
    torch.testing.assert_close(
        load_file(out / WEIGHTS), load_file(whole / WEIGHTS), rtol=1e-3, atol=1e-5
    )


@pytest.mark.wide
@several_ranks
def test_results_depend_neither_on_the_cut_nor_on_ranks(top, whole, tmp_path):
    out, loss = whole
    changes = {
        "batch_size": 1,
        "loss": {**loss, "chunk_tokens": 5},
        "enable_activation_checkpointing": True,
    }
    train(dpo_config(top, tmp_path / "cut", **changes, **LONG))
    assert_same(tmp_path / "cut", out)
    succeed_on_ranks(
        main,
        write_yaml(tmp_path / "two.yaml", dpo_config(top, tmp_path / "two", loss=loss, **LONG)),
    )
    assert_same(tmp_path / "two", out)


def test_the_baseline_is_that_of_the_whole_step(top, tmp_path):
    """It is the mean over the step's prompts with other answers, of this model's log-probs minus the reference's."""
    cfg = dpo_config(
        top, tmp_path / "run", loss=KTO, optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-2}
    )
    recipe = prepare(cfg)
    first = recipe.learner.adapter_state()
    recipe.train()
    rows, learner = recipe.trainer.rows, recipe.learner
    others = rows.mismatched().part([7, 3, 12])
    now = score(learner, others)
    with reference(learner, first):
        before = score(learner, others)
    distances = [float(a.sum() - b.sum()) for a, b in zip(now, before, strict=True)]
    set_baseline(learner, rows, [7, 3, 12])
    assert learner.objective.baseline == pytest.approx(max(0, sum(distances) / 3), rel=1e-4)
    assert (learner.objective.baseline > 0) == (sum(distances) > 0)
    baselines = metrics(tmp_path / "run", "baseline")
    assert baselines[0] == pytest.approx(0, abs=1e-5)
    assert max(baselines) > 0.01, "it counts"
    assert {"dataset", "dataset.mismatched"} == load_file(tmp_path / "run" / FILE).keys()


@pytest.mark.parametrize("loss", [PREFERENCE, pytest.param(KTO, marks=WIDE)])
def test_a_killed_run_goes_on_bit_for_bit(top, tmp_path, loss):
    """Kills land in the reference's file, in checkpoints and in the outputs; each start goes on where it can."""

    def run(out: str, *overrides: str, prepare=None):
        cfg = dpo_config(top, tmp_path / out, save_every_n_steps=1, batch_size=2, loss=loss, **LONG)
        cfg["model"]["lora_dropout"] = 0.1
        return forked(main, write_yaml(tmp_path / f"{out}.yaml", cfg), *overrides, prepare=prepare)

    assert run("whole")[0] == 0
    codes = [run("killed", RESUME, prepare=kill_before(count))[0] for count in (1, 11)]
    assert codes == [-9, -9]
    assert run("killed", RESUME)[0] == 0
    for name in (WEIGHTS, FILE):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for key in ("loss", "val_loss"):
        assert metrics(tmp_path / "killed", key) == metrics(tmp_path / "whole", key)


@pytest.fixture(scope="module")
def data(top) -> dict[str, dict]:
    """The configs of the data sets: pairs, single answers with a label, and answers alone."""
    answers = {"_component_": "rocm_ext.data.sft_dataset", "source": str(write_rows(top / "rows.jsonl", 8)),
               "column_map": {"prompt": "question", "completion": "answer"}}  # fmt: skip
    pairs, single = (dpo_config(top, top / "x", **more)["dataset"] for more in ({}, {"loss": KTO}))
    return {"pairs": pairs, "single": single, "answers": answers}


@pytest.mark.parametrize(("recipe", "rows", "changes", "message"), [
    (DPO, "answers", {}, "dataset has single answers, and dpo_rocm needs pairs"),
    (DPO, "single", {}, r"single answers with a label, and loss Preference is not .*Unpaired"),
    (DPO, "pairs", {"loss": KTO}, r"rows are pairs, and loss UnpairedPreference is not .*losses.Prefer"),
    (LoRAFinetune, "pairs", {}, r"pairs, .* CrossEntropy .* rejected"),
    (LoRAFinetune, "pairs", {"loss": DPO_LOSS, "recipe": "lora_finetune_rocm"},
     r"columns reference_logprobs, .* dpo_rocm"),
    (LoRAFinetune, "answers", {"early_stopping_metric": "val_margin"}, r"val_margin .* CrossEntropy; known: "),
    (DPO, "pairs", {"early_stopping_metric": "val_margins"}, r"val_margins .* did you mean val_margin\?.*val_kl"),
], ids=str)  # fmt: skip
def test_rows_losses_and_metrics_that_do_not_fit_are_refused(
    top, data, tmp_path, recipe, rows, changes, message
):
    changes = {
        key: data[value] if key == "dataset_val" else value for key, value in changes.items()
    }
    with pytest.raises(UserError, match=message):
        parity.prepare(
            {**dpo_config(top, tmp_path / "run"), "dataset": data[rows], **changes}, recipe
        )


def command(*args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_ext.cli", *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("loss", [{}, {"loss": KTO}])
def test_named_validation_sets(top, tmp_path, loss):
    """Each set has a reference, and with KTO a baseline, of its own."""
    cfg = dpo_config(top, tmp_path / "alone", **loss)
    alone = {**cfg, "dataset_val": {**cfg["dataset"], "split": "train[:10]"}}
    train(alone)
    name = "target_mismatched"  # KTO also mismatches the rows of target
    sets = {"target": cfg["dataset"], name: alone["dataset_val"]}
    stop = {"early_stopping_metric": f"val_accuracy/{name}", "early_stopping_patience": 9}
    train({**cfg, "output_dir": str(tmp_path / "named"), "dataset_val": sets, **stop})
    for key in ("val_loss", "val_margin", "val_accuracy", "val_logprobs_chosen"):
        _, after = metrics(
            tmp_path / "named", f"{key}/{name}"
        )  # before the first step, and after the last
        assert [after] == metrics(tmp_path / "alone", key)
    weights = "adapter/adapter_model.safetensors"
    assert (tmp_path / "named" / weights).read_bytes() == (
        tmp_path / "alone" / weights
    ).read_bytes()
