"""Named validation data sets: each is measured as if it were alone, and the training does not depend on them."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.cli import main as rocm_ext
from rocm_ext.train.forgetting import Forgetting
from rocm_ext.train.scoring import Validation
from tests.kit.forks import RESUME, forked, refused, succeed
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml
from tests.recipes.test_resume import at

TIMING = ("seconds", "tokens_per_second", "peak_memory")
WEIGHTS = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model, rows to train on and similar ones, and rows of words that the training makes improbable."""
    top = tmp_path_factory.mktemp("named")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 41)
    write_rows(top / "target.jsonl", 20, start=41)
    words = ["the", "quick", "brown", "fox", "jumps"]
    with (top / "general.jsonl").open("w") as file:
        for i in range(40):
            row = {"question": f"{i}?", "answer": " ".join(words[: 2 + i % 4])}
            file.write(json.dumps(row) + "\n")
    return top


@pytest.fixture(scope="module")
def make(folder) -> Callable[..., Path]:
    """Write the YAML of a run: 18 steps in 3 epochs, validated on ``sets`` at the end of each, or on one set."""

    def make(out: Path, *sets: str, **changes) -> Path:
        cfg = run_config(folder / "base", folder / "rows.jsonl", out, epochs=3)
        parts = {name: {**cfg["dataset"], "source": str(folder / f"{name}.jsonl")} for name in sets}
        cfg["dataset_val"] = parts if len(sets) > 1 else parts.get("".join(sets))
        cfg["optimizer"]["lr"] = 1e-2
        cfg |= {"save_every_n_steps": 2, **changes}
        return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)

    return make


@pytest.fixture(scope="module")
def named(make, folder) -> Path:
    out = folder / "named"
    succeed(main, make(out, "target", "general"))
    return out


def lines(out: Path) -> list[dict]:
    """Return the lines of ``metrics.jsonl`` without times."""
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in TIMING} for line in found]


def validations(out: Path, name: str = "") -> dict[int, dict]:
    """Return the measurements of a data set, by step after the first."""
    found = {}
    for line in lines(out):
        values = {}
        for key, value in line.items():
            measured, _, of = key.partition("/")
            if measured.startswith("val_") and of == name:
                values[measured] = value
        if values and line["step"]:
            found[line["step"]] = values
    return found


@pytest.mark.parametrize("name", ["target", "general"])
def test_each_set_is_measured_as_if_alone(make, named, tmp_path, name):
    out = tmp_path / "alone"
    succeed(main, make(out, name))
    assert list(validations(out)) == [6, 12, 18]
    assert validations(named, name) == validations(out)
    steps = [line for line in lines(out) if "loss" in line]
    assert steps == [line for line in lines(named) if "loss" in line]
    assert (out / WEIGHTS).read_bytes() == (named / WEIGHTS).read_bytes()


def test_killed_and_resumed(make, named, folder, tmp_path):
    out = tmp_path / "out"
    path = make(out, "target", "general", metric_logger=at(13, signal.SIGKILL))
    assert forked(main, path)[0] == -signal.SIGKILL
    line = refused(main, make(out, "general", "target"), RESUME)
    assert "another run: validation data: was target " in line
    succeed(main, make(out, "target", "general"), RESUME)
    assert lines(out) == lines(named)
    assert (out / WEIGHTS).read_bytes() == (named / WEIGHTS).read_bytes()
    found, expected = (json.loads((o / "summary.json").read_text()) for o in (out, named))
    assert found["validation_sets"] == expected["validation_sets"]
    assert found["validation_sets"]["general"]["last"] > found["validation_sets"]["general"]["loss"]


def test_where_a_reader_finds_them(make, named, folder, capsys):
    assert rocm_ext(["report", str(named)]) == 0
    page = (named / "report.html").read_text()
    for text in ("Best validation loss of target", "Best validation loss of general"):
        assert text in page
    assert '"name":"validation loss of general"' in page
    (warned,) = [line for line in lines(named) if "warnings" in line]
    assert "validation loss of general has risen" in page
    assert "validation loss of general has risen" in warned["warnings"][0]
    assert "validation.general: 40 of 40 rows" in page
    rocm_ext(["monitor", "--count", "1", "--root", str(folder), str(named)])
    last = validations(named, "general")[18]["val_loss"]
    assert f"validation loss of general {last:.4f}" in capsys.readouterr().out
    rocm_ext(
        [
            "rows",
            "--config",
            str(make(folder / "x", "target", "general")),
            "--set",
            "general",
            "--json",
        ]
    )
    assert json.loads(capsys.readouterr().out)["dataset"]["kept"] == 40
    assert rocm_ext(["eval", str(named), "--set", "general", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last, rel=1e-6)
    assert rocm_ext(["eval", str(named)]) == 1
    expected = "dataset_val has several data sets; choose one: --set target or general"
    assert expected in capsys.readouterr().err
    assert rocm_ext(["eval", str(named), "--set", "genral"]) == 1
    assert "did you mean general?" in capsys.readouterr().err


def test_compare_looks_at_each_set(make, named, tmp_path, capsys):
    """The other run forgets less, and learns less."""
    out = tmp_path / "slow"
    lr = {"_component_": "torch.optim.AdamW", "lr": 1e-3}
    succeed(main, make(out, "target", "general", optimizer=lr))
    rocm_ext(["compare", str(out), str(named), "--json"])
    measured = json.loads(capsys.readouterr().out)["measured"]
    for name in ("target", "general"):
        best = [
            min(line["val_loss"] for line in validations(o, name).values()) for o in (out, named)
        ]
        assert measured[f"best validation loss of {name}"] == pytest.approx(best)


def test_early_stopping_by_a_named_set(make, tmp_path):
    out = tmp_path / "out"
    stop = {"early_stopping_metric": "val_loss/general", "early_stopping_patience": 1}
    messages = succeed(main, make(out, "target", "general", run_val_every_n_steps=1, **stop))
    summary = json.loads((out / "summary.json").read_text())
    losses = {step: line["val_loss"] for step, line in validations(out, "general").items()}
    best = min(losses, key=losses.get)
    assert summary["best_validation"] == {
        "loss": losses[best],
        "step": best,
        "val_loss/general": losses[best],
    }
    assert summary["steps"] == best + 1 < 18
    assert summary["adapter_is"] == "best by val_loss/general"
    assert "1 validations without a better val_loss/general" in messages


@pytest.mark.parametrize(("changes", "message"), [
    (["early_stopping_metric=val_loss/genral"], "did you mean val_loss/general.*val_loss/target"),
    (["early_stopping_metric=val_margin/target"], "val_margin/target is unknown for loss CrossEntropy"),
    (["dataset_val.a+b.source=x"], r"dataset_val.a\+b: a data set's name has letters, digits, _ and - only"),
    (["dataset_val.general=null"], "dataset_val.general is None; expected a _component_ and its arguments"),
    (["dataset_val.general.sorce=x"], "unknown key dataset_val.general.sorce .*did you mean source"),
    (["dataset_val.general.source=no.jsonl"], "no.jsonl"),
])  # fmt: skip
def test_bad_input(make, tmp_path, changes, message):
    path = make(tmp_path / "out", "target", "general")
    with pytest.raises(UserError, match=message) as caught:
        LoRAFinetune(config.load("lora_finetune_rocm", str(path), changes)).check()
    assert "\n" not in str(caught.value)


def test_a_set_may_be_a_list_and_have_variables(make, folder, tmp_path):
    cfg = yaml.safe_load(make(tmp_path / "out", "target", "general").read_text())
    both = list(cfg["dataset_val"].values())
    cfg["dataset_val"] = {"both": both, "train": "${dataset}"}
    recipe = LoRAFinetune(
        config.load("lora_finetune_rocm", str(write_yaml(tmp_path / "x.yaml", cfg)))
    )
    recipe.check()
    assert {name: len(rows) for name, rows in recipe.validation_rows.items()} == {
        "both": 60,
        "train": 41,
    }


def result(losses: list[float]) -> Validation:
    sums = np.array(losses) * 10
    return Validation(
        float(np.mean(losses)), 10 * len(losses), {}, sums, np.full(len(losses), 10.0)
    )


def test_what_counts_as_forgetting():
    """Blocks differ far more than validations; what they have in common counts, above 1 % of the loss."""
    blocks = np.linspace(1, 3, 8)
    watch = Forgetting("target")
    found = {}
    for step, (target, rise) in enumerate([
        (3.0, 0.0), (2.9, 0.01), (2.8, 0.1), (2.7, 0.11), (2.8, 0.5), (2.6, 0.2), (2.5, -0.1), (2.4, 0.1)
    ]):  # fmt: skip
        noise = 0.01 * (-1) ** np.arange(8)
        general = result((blocks + rise + noise * (step % 2)).tolist())
        found[step] = watch.take(step, {"target": result([target] * 8), "general": general})
    # 1: within 1 %; 3: no worse than at the warning; 4: the target is not at its best; 6: the best so far
    assert [step for step, warnings in found.items() if warnings] == [2, 5, 7]
    assert "risen to 2.1000, from 1.9000 at step 6" in found[7][0]


def test_noise_and_single_blocks_are_no_forgetting():
    watch = Forgetting("target")
    random = np.random.default_rng(0)
    for step in range(20):
        general = result((2 + 0.05 * random.standard_normal(16)).tolist())
        alone = result([2 + 0.1 * step])
        results = {"target": result([3 - 0.1 * step] * 4), "general": general, "alone": alone}
        assert watch.take(step, results) == []
