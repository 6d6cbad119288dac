"""Secrets in the environment: what a run writes of its config has references, and resuming compares values."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import main as sft
from rocm_ext.recipes.raft_rocm import main as raft

from rocm_ext import cli
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import write_run, write_world
from tests.kit.tiny import metrics, run_config, write_yaml

SECRET, REFERENCE = "hunter2-of-the-test", "${oc.env:SECRET}"


class Resolves:
    """A metric logger that takes the resolved config, as those of Weights & Biases, Comet and MLflow do."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = Path(log_dir)

    def log_config(self, cfg) -> None:
        (self.log_dir / "logged.json").write_text(
            json.dumps(OmegaConf.to_container(cfg, resolve=True))
        )

    def log_dict(self, payload, step: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return write_world(tmp_path_factory.mktemp("references"))


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)


def call(main, monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["recipe", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def written(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


def without_secret(out: Path) -> dict[str, bytes]:
    """Return the files of a run, after a look for the secret in each."""
    files = written(out)
    assert [name for name, content in files.items() if SECRET.encode() in content] == []
    return files


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "logger", ["torchtune.training.metric_logging.TensorBoardLogger", f"{__name__}.Resolves"]
)
def test_a_run_writes_references(world, tmp_path, monkeypatch, capsys, logger):
    out = tmp_path / "out"
    cfg = run_config(world / "base", world / "prompts.jsonl", out, epochs=1, save_every_n_steps=1)
    cfg |= {
        "own": "note ${oc.env:SECRET}",
        "chat_template_args": {"note": "${own}", "number": "${oc.decode:'7'}"},
    }
    cfg |= {"metric_logger": {"_component_": logger, "log_dir": str(out)}}
    cfg["clip_grad_norm"] = "${oc.decode:${oc.env:CLIP,1.5}}"
    cfg["dataset"]["source"], cfg["checkpointer"]["checkpoint_dir"] = (
        "${oc.env:ROWS}",
        "${oc.env:MODEL}",
    )
    monkeypatch.setenv("ROWS", str(world / "prompts.jsonl"))
    monkeypatch.setenv("MODEL", str(world / "base"))
    start = write_yaml(tmp_path / "run.yaml", cfg)
    assert call(sft, monkeypatch, "--config", start) == 0
    assert cli.main(["report", str(out)]) == 0
    files = without_secret(out)
    assert {"config.yaml", "report.html", "summary.json"} <= files.keys()
    assert any(name.endswith("state.pt") for name in files)
    content = yaml.safe_load(files["config.yaml"])
    assert content["chat_template_args"] == {"note": f"note {REFERENCE}", "number": 7}
    assert content["clip_grad_norm"] == 1.5, "a number is no secret"
    assert content["checkpointer"]["checkpoint_dir"] == str(world / "base"), "nor is a folder"
    assert content["dataset"]["source"] == "${oc.env:ROWS}"
    assert f"note {REFERENCE}".encode() in files["report.html"]
    if "logged.json" in files:
        assert json.loads(files["logged.json"])["chat_template_args"]["note"] == f"note {REFERENCE}"
    # a run's config starts, and continues, the same run
    again = ["--config", out / "config.yaml", "resume_from_checkpoint=True", "epochs=2"]
    assert call(sft, monkeypatch, *again) == 0
    assert len(metrics(out, "step")) == 4
    without_secret(out)
    capsys.readouterr()
    monkeypatch.setenv("SECRET", "another")
    assert call(sft, monkeypatch, *again, "epochs=3") == 1
    error = capsys.readouterr().err
    assert f"chat_template_args.note: was another value, is note {REFERENCE}" in error
    # the value itself, in place of the reference
    assert call(sft, monkeypatch, *again, "epochs=3", f"chat_template_args.note=note {SECRET}") == 0
    assert len(metrics(out, "step")) == 6


@pytest.mark.wide
def test_the_records_of_raft_have_references(world, tmp_path, monkeypatch):
    out, log = tmp_path / "out", tmp_path / SECRET
    monkeypatch.setenv("SECRET", str(log))
    judge = {"_component_": "tests.kit.judges.Coin", "log": REFERENCE}
    start = write_run(world, out, verifier=judge, cycles=1)
    assert call(raft, monkeypatch, "--config", start) == 0
    files = without_secret(out)
    assert REFERENCE.encode() in files["config.yaml"]
    judged = len(log.read_text().splitlines())
    assert call(raft, monkeypatch, "--config", start, "resume_from_checkpoint=True") == 0
    assert len(log.read_text().splitlines()) == judged + 1, (
        "the trial before a run, and no answer again"
    )


def test_what_has_no_reference_is_refused(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "{a: b}")
    cfg = run_config(world / "base", world / "prompts.jsonl", tmp_path / "out")
    cfg["chat_template_args"] = "${oc.decode:${oc.env:SECRET}}"
    assert call(sft, monkeypatch, "--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    assert one_line_has(capsys.readouterr().err, "chat_template_args", "environment")
