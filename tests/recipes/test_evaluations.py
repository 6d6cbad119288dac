"""SFT and DPO that evaluate by answers: the training is the same, it stops by them, and no answer is repeated."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rocm_ext.recipes import dpo_rocm
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main

from rocm_ext.base import heartbeat
from rocm_ext.base.errors import UserError
from rocm_ext.rl.records import PhaseRecords
from rocm_ext.train.trainer import Trainer
from tests.kit import forks
from tests.kit.forks import RESUME, forked, kill_and_resume, signal_at, succeed
from tests.kit.grpo_runs import TIMING, lines
from tests.kit.raft_runs import WEIGHTS, kill_at_record, loaded, outcome, sampling_config
from tests.kit.tiny import metrics, read_records, run_config, write_yaml

pytest.importorskip("resource", reason="forks and POSIX signals")
ANSWERS = ("eval_prompts", "verifier", "verify_workers", "max_new_tokens")
BY_ANSWERS = {
    "early_stopping_metric": "eval_correct",
    "early_stopping_patience": 2,
    "eval_every_n_steps": 1,
}


@pytest.fixture(scope="session")
def make(folder) -> Callable[..., Path]:
    """Write the YAML of a run of SFT: 6 steps in 2 epochs with dropout; evaluations after 0, 2, 4 and 6 steps."""

    def make(out: Path, **changes) -> Path:
        cfg = run_config(
            folder / "base", folder / "prompts.jsonl", out, epochs=2, sequences_per_step=4
        )
        cfg["model"]["lora_dropout"] = 0.1
        cfg["optimizer"]["lr"] = 1e-2
        answers = {
            key: value
            for key, value in sampling_config(folder, out, "base").items()
            if key in ANSWERS
        }
        cfg |= {**answers, "eval_every_n_steps": 2, "save_every_n_steps": 3, **changes}
        return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)

    return make


@pytest.fixture(scope="session")
def undisturbed(make, folder) -> Path:
    out = folder / "evaluated"
    succeed(main, make(out))
    return out


def curves(out: Path) -> list[dict]:
    """Return the lines of ``metrics.jsonl`` without times."""
    return [
        {key: value for key, value in line.items() if key not in TIMING}
        for line in lines(out / "metrics.jsonl")
    ]


def equal(out: Path, reference: Path) -> None:
    """Compare adapter, records and curves, also the order of lines."""
    assert curves(out) == curves(reference)
    assert outcome(out) == outcome(reference)


def test_training_is_the_same(make, undisturbed, tmp_path):
    off = {"eval_prompts": None, "verifier": None, "eval_every_n_steps": None}
    succeed(main, make(tmp_path / "plain", **off))
    assert metrics(undisturbed) == metrics(tmp_path / "plain")
    assert (undisturbed / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    scores = {line["step"]: line["eval"] for line in curves(undisturbed) if "eval" in line}
    assert list(scores) == [0, 2, 4, 6]
    verdicts = read_records(undisturbed / "verdicts.jsonl")
    for step, score in scores.items():
        judged = [
            line["verdict"] for line in verdicts if (line["step"], line["phase"]) == (step, "eval")
        ]
        assert (
            (score["prompts"], score["correct"])
            == (6, judged.count("CORRECT"))
            == (len(judged), score["correct"])
        )
    assert (
        len({tuple(line["tokens"]) for line in read_records(undisturbed / "samples.jsonl")}) > 6
    )  # the adapter's


@pytest.mark.wide
def test_a_run_without_evaluations_imports_no_sampler(make, tmp_path):
    path = make(tmp_path / "out", eval_prompts=None, verifier=None, eval_every_n_steps=None)
    code = (
        "import sys; from rocm_ext.recipes.lora_finetune_rocm import main\n"
        f"sys.argv = ['tune', '--config', {str(path)!r}, 'validate_only=True']; main()\n"
        "assert not [name for name in sys.modules if name.startswith('rocm_ext.rl')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("name", "count"),
    [("verdicts.jsonl", 9), ("samples.jsonl", 2), ("samples.jsonl", 14), ("verdicts.jsonl", 24)],
)
def test_killed_in_an_evaluation(make, undisturbed, tmp_path, name, count):
    out, log = tmp_path / "out", tmp_path / "log"
    path = make(out, verifier={"_component_": "tests.kit.judges.Coin", "log": str(log)})
    kill_and_resume(main, path, kill_at_record(name, count))
    equal(out, undisturbed)
    # the check of each process judges an answer; of the evaluation that was killed, verdicts may have had no record
    assert len(log.read_text().splitlines()) <= 24 + 2 + 5


@pytest.mark.wide
@pytest.mark.parametrize("count", [8, 3])
def test_stopped_in_an_evaluation(make, undisturbed, tmp_path, count):
    """The step before it is saved, though no checkpoint was due."""

    calls = itertools.count(1)  # of samples and verdicts
    stop = signal_at(PhaseRecords, "append", lambda *_: next(calls) == 2 * count, signal.SIGTERM)
    out = tmp_path / "out"
    code, messages = forked(main, make(out), prepare=stop)
    step = 2 * (count // 6)
    assert (code, f"stopped in evaluation at step {step}, all saved" in messages) == (143, True), (
        messages
    )
    assert sorted(path.name for path in (out / "checkpoints").iterdir())[-1] == f"step_{step:08d}"
    succeed(main, make(out), RESUME)
    equal(out, undisturbed)


@forks.several_ranks
@pytest.mark.wide
def test_two_ranks_equal_one(make, tmp_path):
    """Without dropout, whose masks differ; in few steps, because rounding may change an answer."""
    found = []
    for name, start in (("one", succeed), ("two", forks.succeed_on_ranks)):
        changes = {
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
            "max_steps_per_epoch": 2,
        }
        start(main, make(tmp_path / name, **changes), "model.lora_dropout=0")
        samples = read_records(tmp_path / name / "samples.jsonl")
        found.append({(line["step"], line["prompt_id"]): line["text"] for line in samples})
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), rel=1e-5)
    assert found[0] == found[1]
    assert metrics(tmp_path / "two", "eval") == metrics(tmp_path / "one", "eval")


@pytest.mark.wide
def test_the_best_adapter_is_kept(make, folder, tmp_path):
    """From step 3 on nothing is right, so the run stops two evaluations after the best."""
    end = tmp_path / "end"
    verifier = {"_component_": "tests.kit.judges.Until", "end": str(end), "share": 0.7}
    out, changes = (
        tmp_path / "out",
        {**BY_ANSWERS, "epochs": 9, "keep_last_n_checkpoints": 99, "save_every_n_steps": 1},
    )

    def touch(trainer, update) -> None:
        if trainer.step == 2:
            end.touch()

    prepare = forks.hook(Trainer, "train_step", touch, before=True)
    messages = succeed(main, make(out, verifier=verifier, **changes), prepare=prepare)
    scores = {line["step"]: line["eval"]["pass_at_1"] for line in curves(out) if "eval" in line}
    best = max((1, 2), key=scores.__getitem__)
    assert scores[best] > 0 == scores[3]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["best_validation"] == {"step": best, "eval_correct": scores[best]}
    assert summary["adapter_is"] == "best by held-out score"
    assert (summary["steps"], max(scores)) == (best + 2, best + 2)
    assert (
        f"stopped early at step {best + 2}: 2 evaluations without a better held-out score"
        in messages
    )
    assert f"step {best} against the initial model: " in messages
    gained = f"as the best of {best + 2} evaluations (Bonferroni)" in messages
    assert gained == (scores[best] > scores[0])
    kept = out / "checkpoints" / f"step_{best:08d}" / "adapter_model.safetensors"
    assert (out / WEIGHTS).read_bytes() == kept.read_bytes()


@pytest.mark.wide
def test_apart(make, undisturbed, tmp_path, monkeypatch):
    """Where each process trains or evaluates, the run goes on in the next one."""
    out, notes = tmp_path / "out", tmp_path / "notes"
    monkeypatch.setenv(heartbeat.APART, "1")
    monkeypatch.setenv(heartbeat.NOTES, str(notes))
    notes.touch()
    for _ in range(12):
        before = notes.read_text()
        succeed(main, make(out), RESUME)
        if notes.read_text() == before:
            break
    assert "before the validation of step 2" in before
    equal(out, undisturbed)


@pytest.mark.wide
def test_dpo(make, folder, tmp_path):
    pairs, rejected = tmp_path / "pairs.jsonl", "She sold clips."
    rows = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": rejected}
        for row in lines(folder / "prompts.jsonl")
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "dataset": {"_component_": "rocm_ext.data.preference_dataset", "source": str(pairs)},
        "loss": {"_component_": "rocm_ext.losses.Preference"},
    }
    succeed(dpo_rocm.main, make(tmp_path / "out", **changes))
    succeed(
        dpo_rocm.main,
        make(
            tmp_path / "plain", **changes, eval_prompts=None, verifier=None, eval_every_n_steps=None
        ),
    )
    assert metrics(tmp_path / "out") == metrics(tmp_path / "plain")
    assert len(metrics(tmp_path / "out", "eval")) == 4
    kill_and_resume(
        dpo_rocm.main, make(tmp_path / "killed", **changes), kill_at_record("samples.jsonl", 15)
    )
    equal(tmp_path / "killed", tmp_path / "out")


@pytest.mark.parametrize(("changes", "message"), [
    ({"verifier": None}, "eval_prompts has prompts, and nothing judges the answers: set verifier"),
    ({"eval_prompts": None, **BY_ANSWERS}, "early_stopping_metric eval_correct needs held-out prompts"),
    ({"run_val_every_n_steps": 2}, "run_val_every_n_steps is set without rows to validate on: set dataset_val"),
    ({"engine": {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": ["http://localhost:1"], "model": "base"}},
     "engine rocm_ext.sampling.OpenAIEngine samples on servers.*set engine._component_=rocm_ext.sampling.Local"),
    ({"early_stopping_patience": 1}, "early_stopping_patience needs validation rows.*eval_correct"),
    ({"verifier": {"_component_": "rocm_ext.verifiers.PythonTests"}}, "heldout.jsonl"),
])  # fmt: skip
def test_bad_input(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        loaded(LoRAFinetune, make(tmp_path / "out", **changes)).check()
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_a_resumed_run_has_the_same_evaluations(make, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed, tmp_path / "out")
    for change, message in (("max_new_tokens=13", "max_new_tokens: was 12, is 13"),
                            ("eval_prompts.limit=3", "eval prompts changed")):  # fmt: skip
        assert message in forks.refused(main, make(out), RESUME, change)
    succeed(main, make(out), RESUME, "epochs=3", "eval_every_n_steps=4")
    assert [line["step"] for line in curves(out) if "eval" in line] == [0, 2, 4, 6, 8, 9]
    succeed(
        main,
        make(out),
        "overwrite_output_dir=True",
        "eval_prompts=null",
        "eval_every_n_steps=null",
        "verifier=null",
    )
    assert not (out / "samples.jsonl").exists()  # those of the earlier run
