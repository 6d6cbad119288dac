"""``profile_steps``: what runs record of their steps, and what they say of it."""

import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from rocm_ext.recipes.raft_rocm import RAFT

from rocm_ext import config
from rocm_ext.machine import trace
from rocm_ext.machine.trace import Trace
from rocm_ext.train.lifecycle import run
from tests.kit import raft_runs
from tests.kit.lines import one_line_has
from tests.kit.tiny import metrics, run_config, write_rows, write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return raft_runs.write_world(tmp_path_factory.mktemp("trace"))


@pytest.fixture(autouse=True)
def _info(caplog):
    caplog.set_level(logging.INFO, "rocm_ext")


@pytest.fixture
def sft(folder, tmp_path):
    """Run the SFT recipe on 24 rows, 3 steps an epoch; return the output folder."""
    rows = write_rows(tmp_path / "rows.jsonl", 24)

    def sft(out: str, *overrides: str, **changes) -> Path:
        cfg = run_config(folder / "base", rows, tmp_path / out) | changes
        run(
            LoRAFinetune(
                config.load(
                    "lora_finetune_rocm", str(write_yaml(tmp_path / "run.yaml", cfg)), overrides
                )
            )
        )
        return tmp_path / out

    return sft


def read(out: Path, kind: str, rank: int = 0) -> tuple[list[dict], str]:
    """Return the events of a trace, and the table of operators."""
    file = out / "profile" / f"{kind}.rank{rank}"
    with gzip.open(f"{file}.trace.json.gz", "rt") as content:
        events = json.load(content)["traceEvents"]
    return events, Path(f"{file}.txt").read_text()


def names(events: list[dict], category: str) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == category]


def steps(events: list[dict]) -> list[str]:
    return [name for name in names(events, "user_annotation") if name.split()[0] in trace.WARM_UP]


@pytest.mark.wide
def test_a_run_records_steps_after_its_warm_up(sft, messages):
    plain = sft("plain", epochs=2)
    assert not (plain / "profile").exists()
    messages.clear()
    out = sft("out", epochs=2, profile_steps=2)
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == (
        plain / "adapter/adapter_model.safetensors"
    ).read_bytes()
    assert metrics(out) == metrics(plain)
    events, operators_by_time = read(out, "training")
    assert steps(events) == ["training 4", "training 5"]
    operators = Counter(names(events, "cpu_op"))
    assert operators["aten::mm"] > 10
    assert any("Backward" in name for name in operators)
    arrows = Counter(
        (event["ph"], event["id"]) for event in events if event.get("ph") in ("s", "f")
    )
    assert arrows
    assert set(arrows.values()) == {1}, "arrows of different steps must differ"
    assert "aten::mm" in operators_by_time
    spans = [event["dur"] for event in events if event["name"] in ("training 4", "training 5")]
    (said,) = [line for line in messages if line.startswith("profile of training, steps 4 to 5, ")]
    assert (
        f", {sum(spans) / 1e6:.3g} s: open {out}/profile/training.rank0.trace.json.gz in https://ui"
        in said
    )
    assert sorted(path.name for path in (out / "profile").iterdir()) == [
        "training.rank0.trace.json.gz", "training.rank0.txt",
    ]  # fmt: skip


@pytest.mark.wide
def test_short_and_resumed_runs(sft, messages):
    out = sft("out", profile_steps=2)
    assert one_line_has(messages, "training", "did 3 such steps")
    assert not (out / "profile").exists()
    sft("out", epochs=3, profile_steps=4, resume_from_checkpoint=True)
    assert steps(read(out, "training")[0]) == ["training 4", "training 5", "training 6"], (
        "those of this process"
    )
    assert one_line_has(messages, "profile_steps", "3 of 4 steps", "the run ended")
    theirs = {
        "_component_": "torchtune.training.setup_torch_profiler",
        "enabled": False,
        "active_steps": 2,
    }
    sft("out", overwrite_output_dir=True, profiler=theirs)
    assert not (out / "profile").exists(), "of another run"


@pytest.mark.wide
def test_sampling(folder, tmp_path, messages):
    for out, count in (("plain", None), ("out", 2)):
        path = raft_runs.write_run(folder, tmp_path / out, profile_steps=count, cycles=1, seed=1)
        run(RAFT(config.load("raft_rocm", str(path))))
    raft_runs.assert_equal(tmp_path / "out", tmp_path / "plain")
    out = tmp_path / "out"
    assert not list(out.glob("cycle_*/profile")), "a run has one profile"
    events, operators = read(out, "decoding")
    assert steps(events) == ["decoding 4", "decoding 5"]
    assert "aten::scaled_dot_product_attention" in names(events, "cpu_op")
    assert "aten::mm" in operators
    events, _ = read(out, "prefill")
    assert steps(events)[0] == "prefill 2"
    assert "aten::mm" in names(events, "cpu_op")
    assert steps(read(out, "training")[0]) == ["training 4", "training 5"]
    for kind in ("training", "prefill", "decoding"):
        assert any(line.startswith(f"profile of {kind}, step") for line in messages)


# ---- the recording
def product(size: int = 8) -> None:
    torch.ones(size, size) @ torch.ones(size, size)


def record(folder: Path, steps: int, device: str = "cpu", rank: int = 0) -> None:
    recorder = Trace()
    with recorder.on(folder / "profile", steps, torch.device(device), rank):
        for _ in range(9):
            with recorder.part(trace.TRAINING):
                product()


def test_a_rank_s_own_files(tmp_path):
    for rank in (0, 1):
        record(tmp_path, 1, rank=rank)
    assert len(list((tmp_path / "profile").iterdir())) == 4
    assert steps(read(tmp_path, "training", 1)[0]) == ["training 4"]


def test_a_trace_has_a_limit(tmp_path, messages, monkeypatch):
    monkeypatch.setattr(trace, "_MOST_EVENTS", 10)
    record(tmp_path, 5)
    assert steps(read(tmp_path, "training")[0]) == ["training 4"]
    assert one_line_has(messages, "profile_steps", "1 of 5 steps", "too large")


def test_a_trace_that_cannot_be_written(tmp_path, messages):
    (tmp_path / "profile").write_text("")
    record(tmp_path, 1)
    (said,) = messages
    assert said.startswith("profile_steps: training is not recorded, the run continues: ")


@pytest.mark.filterwarnings("ignore")  # torch's, that there is no GPU
def test_a_gpu_whose_kernels_the_profiler_does_not_see(tmp_path, messages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    record(tmp_path, 1, "cuda")
    assert any("torch's profiler saw no kernel of the GPU" in line for line in messages)
    assert "aten::mm" in read(tmp_path, "training")[1]


# ---- the summary
def event(category: str, name: str, begin: float, length: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


def test_a_gpu_s_step():
    """Of 100 µs, 60 have a kernel: products, an addition partly beside one, a copy."""
    step = [
        event("user_annotation", "training 4", 1000, 100),
        event("cpu_op", "aten::mm", 1002, 8),
        event("kernel", "Cijk_Alik", 1010, 40),
        event("kernel", "Cijk_Alik", 1055, 10),
        event("kernel", "vectorized_elementwise_kernel", 1060, 10),
        event("gpu_memcpy", "Memcpy DtoH", 1080, 5),
        event("kernel", "after the step", 1150, 30),
        {"ph": "i", "name": "Record Window End", "ts": 1230},
    ]
    later = [{**event, "ts": event["ts"] + 1000} for event in step]
    assert trace.seconds([*step, *later], "training") == pytest.approx((200e-6, 120e-6))
