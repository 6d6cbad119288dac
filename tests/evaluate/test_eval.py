"""`rocm-ext eval`: the recipes' own numbers on held-out rows, and verified answers, with an adapter and without."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import yaml
from rocm_ext.recipes.dpo_rocm import DPO
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from transformers import AutoModelForCausalLM

from rocm_ext import cli
from rocm_ext.runs.folder import RunFolder, held_out
from tests.kit.grpo_runs import lines
from tests.kit.parity import finetune, prepare
from tests.kit.run_folders import write_jsonl
from tests.kit.tiny import TEXT, metrics, run_config, write_model, write_rows, write_yaml

FAST = {"_component_": "torch.optim.AdamW", "lr": 1e-2}


def evaluate(capsys, *arguments) -> dict:
    code = cli.main(["eval", "--json", *map(str, arguments)])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


@pytest.fixture(scope="module", params=[LoRAFinetune, DPO])
def run(request, tmp_path_factory) -> Path:
    """A run of SFT or DPO that has validated before its end."""
    top = tmp_path_factory.mktemp("eval")
    rows = write_rows(top / "rows.jsonl", 24)
    cfg = run_config(
        write_model(top / "base", initializer_range=0.1), rows, top / "out", validation_fraction=0.3
    )
    cfg["optimizer"] = FAST
    if request.param is DPO:
        pairs = []
        for i in range(20):
            words = " ".join(TEXT[i % 3].split()[: 4 + i * 7 % 13])
            chosen, rejected = (
                f"It is {i * 37 % 101}." + " So it is." * (i % 3),
                f"She sold {i * 53 % 89} clips.",
            )
            pairs.append({"prompt": f"{words} {i}?", "chosen": chosen, "rejected": rejected})
        cfg["dataset"] = {
            "_component_": "rocm_ext.data.preference_dataset",
            "source": str(write_jsonl(rows, pairs)),
        }
    recipe = prepare(cfg, request.param)
    (top / "before").write_text(str(recipe.trainer.validate()))
    recipe.train()
    recipe.cleanup()
    return top / "out"


@pytest.mark.wide(always=1)
def test_the_loss_is_the_recipes_own(run, tmp_path, capsys):
    said = evaluate(capsys, run, "--base", "--output", tmp_path / "kept")
    expected = {
        name: metrics(run, f"val_{name}")[-1] for name in said if metrics(run, f"val_{name}")
    }
    assert {"loss", "tokens"} <= expected.keys()
    assert {name: said[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert said["base"]["loss"] == pytest.approx(
        float((run.parent / "before").read_text()), rel=1e-5
    )
    assert said["base"]["loss"] > said["loss"]
    rows, before = (
        lines(tmp_path / "kept" / "rows.jsonl"),
        lines(tmp_path / "kept" / "base" / "rows.jsonl"),
    )
    assert len(rows) == said["rows"] == len(before)
    if "loss" in rows[0]:
        nll, tokens = [row["loss"] * row["tokens"] for row in rows], [row["tokens"] for row in rows]
        assert sum(nll) / sum(tokens) == pytest.approx(said["loss"], rel=1e-5)
        assert said["perplexity"] == pytest.approx(math.exp(said["loss"]), rel=1e-4)
        assert said["paired"]["difference"] == pytest.approx(
            said["loss"] - said["base"]["loss"], rel=1e-4
        )
    else:
        assert "accuracy" in expected
        chosen = [row["logprob_chosen"] for row in rows]
        assert sum(chosen) / len(chosen) == pytest.approx(said["logprobs_chosen"], rel=1e-5)
        margins = [  # DPO's accuracy, from the rows and those of the reference
            row["logprob_chosen"]
            - row["logprob_rejected"]
            - old["logprob_chosen"]
            + old["logprob_rejected"]
            for row, old in zip(rows, before, strict=True)
        ]
        assert sum(margin > 0 for margin in margins) / len(margins) == pytest.approx(
            said["accuracy"]
        )
        prefers = [
            [row["logprob_chosen"] > row["logprob_rejected"] for row in each]
            for each in (rows, before)
        ]
        assert said["paired"]["gained"] - said["paired"]["lost"] == sum(prefers[0]) - sum(
            prefers[1]
        )
    low, high = said["paired"]["interval"]
    assert low < said["paired"]["difference"] < high


@pytest.mark.wide
def test_single_answers_are_measured_as_validations_are(tmp_path, capsys):
    """The perplexity is that of the good answers."""
    rows = [
        {"prompt": f"{i}?", "completion": f"It is {i * 37}.", "label": i % 3 == 0}
        for i in range(24)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    cfg = run_config(write_model(tmp_path / "base"), path, tmp_path / "out", optimizer=FAST)
    cfg |= {
        "loss": {"_component_": "rocm_ext.losses.UnpairedPreference"},
        "validation_fraction": 0.3,
    }
    cfg["dataset"] = {"_component_": "rocm_ext.data.preference_dataset", "source": str(path)}
    finetune(cfg, DPO)
    said = evaluate(capsys, tmp_path / "out", "--base", "--output", tmp_path / "kept")
    for name in ("loss", "accuracy", "margin", "baseline", "kl"):
        assert said[name] == pytest.approx(
            metrics(tmp_path / "out", f"val_{name}")[-1], rel=1e-5
        ), name
    rows = lines(tmp_path / "kept" / "rows.jsonl")
    good = [row for row in rows if row["good"]]
    assert 0 < len(good) < len(rows)
    nll = sum(row["loss"] * row["tokens"] for row in good) / sum(row["tokens"] for row in good)
    assert said["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)


@pytest.mark.wide(always=1)
def test_rows_of_the_users_own_need_trust(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "own_rows.py").write_text(
        "from rocm_ext.data import preference_dataset, sft_dataset\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)
    content = yaml.safe_load((run / "config.yaml").read_text())
    name = f"own_rows.{content['dataset']['_component_'].rpartition('.')[2]}"
    content["dataset"]["_component_"] = name
    copy = Path(shutil.copytree(run, tmp_path / "lr=1e-3" / "copy"))
    write_yaml(copy / "config.yaml", content)
    assert cli.main(["eval", str(copy)]) == 1
    assert f"dataset._component_ is '{name}'" in capsys.readouterr().err
    assert "own_rows" not in sys.modules
    assert evaluate(capsys, "--trust-config", copy) == evaluate(capsys, run)


VERIFIERS = "rocm_ext.verifiers"
TOUCH = {"_component_": f"{VERIFIERS}.Command", "command": ["touch", "MARK"]}


@pytest.mark.parametrize("changes", [
    {"verifier": {"_component_": f"{VERIFIERS}.All", "verifiers": [TOUCH]}},
    {"verifier": {"_component_": f"{VERIFIERS}.RewardFunction", "function": "os.abort"}},
    {"verifier": {"_component_": f"{VERIFIERS}.PythonTests", "sandbox": "rlimits"}},
    {"verifier": {"_component_": "llm_judge.LLMJudge", "base_url": "http://localhost", "api_key_env": "TOKEN"}},
    {"engine": {"_component_": "rocm_ext.sampling.OpenAIEngine", "api_key_env": "TOKEN"}},
    {"eval_prompts": {"_component_": "os.system", "command": "touch MARK"}},
])  # fmt: skip
def test_a_downloaded_run_runs_no_code(changes, tmp_path, capsys):
    mark, run = tmp_path / "mark", tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    content = {
        "recipe": "raft_rocm",
        "model": {"_component_": "rocm_ext.model.from_checkpoint"},
        **changes,
    }
    (run / "config.yaml").write_text(json.dumps(content).replace("MARK", str(mark)))
    assert cli.main(["eval", "--config", str(run)]) == 1
    error = capsys.readouterr().err
    assert f"{run}/config.yaml: {next(iter(changes))}." in error
    assert "--trust-config" in error
    assert error.count("\n") == 1
    assert not mark.exists()


@pytest.fixture
def few(pocket_dir, tmp_path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text(
        "".join(
            f"{line}\n" for line in (pocket_dir / "heldout.jsonl").read_text().splitlines()[:16]
        )
    )
    return path


@pytest.mark.wide
def test_a_model_alone_answers_for_a_verifier(pocket_dir, few, tmp_path, capsys):
    own = ["--data", few, "--samples", "2", "max_new_tokens=32", "verify_workers=1", "seed=0"]
    raft = evaluate(capsys, "--config", "cpu_pocket_raft", *own, f"pocket={pocket_dir}")
    judged = [*own, "--verifier", "MathAnswer"]
    assert evaluate(capsys, "--config", pocket_dir, *judged, "hardware=cpu") == raft
    assert raft["prompts"] == 16
    assert list(raft["pass_at_k"]) == ["1", "2"]


@pytest.mark.wide
@pytest.mark.usefixtures("any_torchao")
def test_adapter_and_base_are_compared_prompt_by_prompt(pocket_dir, few, tmp_path, capsys):
    """Answers of the same model with a large random adapter: it loses what the base gets right."""
    adapter, kept = tmp_path / "adapter", tmp_path / "kept"
    write_random_adapter(pocket_dir, adapter)
    chosen = right_rows(pocket_dir, few, tmp_path, capsys)
    arguments = [
        "--config",
        "cpu_pocket",
        "--verifier",
        "MathAnswer",
        "--data",
        chosen,
        "--adapter",
        adapter,
        "--base",
    ]
    arguments += [
        "max_new_tokens=32",
        "verify_workers=1",
        f"pocket={pocket_dir}",
        "model.lora_rank=2",
    ]
    arguments += ["model.target_modules=[q_proj]", "model.lora_alpha=32"]
    said = evaluate(capsys, *arguments, "--output", kept)
    assert said["base"]["correct"] == said["base"]["prompts"] == 16
    paired = said["paired"]
    assert (paired["gained"], paired["lost"]) == (0, 16 - said["correct"])
    assert paired["lost"] > 0
    assert paired["p"] == pytest.approx(min(1.0, 2 * 0.5 ** paired["lost"]))
    with_adapter, without = (lines(folder / "answers.jsonl") for folder in (kept, kept / "base"))
    assert [each["prompt_id"] for each in with_adapter] == [each["prompt_id"] for each in without]
    assert sum(each["verdict"] == "CORRECT" for each in with_adapter) == said["correct"]
    assert all(each["verdict"] == "CORRECT" for each in without)
    assert [scored.scores.correct for scored in held_out(RunFolder(kept))[""]] == [said["correct"]]
    code = cli.main(["compare", str(kept / "base"), str(kept), "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code
    assert cli.main(["eval", *map(str, arguments), "--show", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    wrong = next(each for each in with_adapter if each["verdict"] != "CORRECT")
    at = next(i for i, line in enumerate(out) if line.startswith("wrong greedy answers: "))
    assert out[at + 1].startswith(f"  {wrong['prompt_id']}: {wrong['verdict']} ")
    assert out[at + 2] == f"    asked: {wrong['prompt']}"
    assert any(line.startswith("the adapter gains 0 prompts and loses") for line in out)
    shown = next(i for i, line in enumerate(out) if line.startswith("  lost: "))
    both = [
        next(each for each in answers if each["prompt_id"] == wrong["prompt_id"])
        for answers in (without, with_adapter)
    ]
    assert out[shown] == f"  lost: {wrong['prompt']}"
    said = [" ⏎ ".join(each["text"].strip().splitlines()) for each in both]
    assert [line.partition(": ")[2].strip() for line in out[shown + 1 : shown + 3]] == said


def write_random_adapter(model: Path, folder: Path) -> None:
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = peft.LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(net, lora).save_pretrained(folder)


def right_rows(model: Path, rows: Path, folder: Path, capsys) -> Path:
    """Return rows whose answers are the last numbers that the model says greedily."""
    out = folder / "said"
    arguments = [
        "--config",
        model,
        "--data",
        rows,
        "--verifier",
        "MathAnswer",
        "--output",
        out,
        "hardware=cpu",
    ]
    evaluate(capsys, *arguments, "max_new_tokens=32", "verify_workers=1")
    said = lines(out / "answers.jsonl")
    return write_jsonl(
        folder / "right.jsonl",
        [
            {"prompt": each["prompt"], "answer": re.findall(r"\d+", each["text"])[-1]}
            for each in said
        ],
    )


@pytest.mark.parametrize(("arguments", "said"), [
    (["--config", "cpu_pocket", "--base"], "--base compares an adapter"),
    (["--config", "cpu_pocket", "--verifier", "MathAnswer"], "eval_prompts is not set"),
    (["--config", "cpu_pocket_raft", "--adapter", "tests"], "no adapter in tests"),
    (["--base"], "expected one MODEL, such as the output_dir of a run, and key=value; found none"),
    (["MODEL"], "a model alone has no prompts and no verifier"),
    (["--config", "cpu_pocket_raft", "--format", "gsm8k"], "--format describes the rows of --data; set --data"),
])  # fmt: skip
def test_what_is_missing_is_named(arguments, said, pocket_dir, capsys):
    arguments = [str(pocket_dir) if word == "MODEL" else word for word in arguments]
    assert cli.main(["eval", *arguments, f"pocket={pocket_dir}"]) in (1, 2)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_help_shows_single_percent_signs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "95 % intervals" in out
    assert "%%" not in out
