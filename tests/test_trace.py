"""``profile_steps``: what runs record of their steps, and what they say of it."""

import gzip
import json
import logging
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes.grpo_rocm import GRPO
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from rocm_ext.recipes.raft_rocm import RAFT

from rocm_ext import config
from rocm_ext.machine import kernels, trace
from rocm_ext.machine.trace import Trace
from rocm_ext.train.lifecycle import run
from rocm_ext.train.loop import Training
from tests import grpo_runs, raft_runs
from tests.tiny import metrics, run_config, write_rows, write_yaml


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
        run(LoRAFinetune(config.load("lora_finetune_rocm", str(write_yaml(tmp_path / "run.yaml", cfg)), overrides)))
        return tmp_path / out

    return sft


def read(out: Path, kind: str, rank: int = 0) -> tuple[list[dict], dict]:
    """Return the events of a trace, and its summary."""
    file = out / "profile" / f"{kind}.rank{rank}"
    with gzip.open(f"{file}.trace.json.gz", "rt") as content:
        events = json.load(content)["traceEvents"]
    return events, json.loads(Path(f"{file}.json").read_text())


def names(events: list[dict], category: str) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == category]


def steps(events: list[dict]) -> list[str]:
    return [name for name in names(events, "user_annotation") if name.split()[0] in trace.WARM_UP]


def test_a_run_records_steps_after_its_warm_up(sft, messages):
    plain = sft("plain", epochs=2)
    assert not (plain / "profile").exists()
    messages.clear()
    out = sft("out", epochs=2, profile_steps=2)
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == (
        plain / "adapter/adapter_model.safetensors"
    ).read_bytes()
    assert metrics(out) == metrics(plain)
    events, summary = read(out, "training")
    assert steps(events) == ["training 4", "training 5"]
    operators = Counter(names(events, "cpu_op"))
    assert operators["aten::mm"] > 10
    assert any("Backward" in name for name in operators)
    arrows = Counter((event["ph"], event["id"]) for event in events if event.get("ph") in ("s", "f"))
    assert arrows
    assert set(arrows.values()) == {1}, "arrows of different steps must differ"
    assert (summary["steps"], summary["first"], summary["kernels"], summary["idle"]) == (2, 4, False, None)
    spans = [event["dur"] for event in events if event["name"] in ("training 4", "training 5")]
    assert summary["seconds"] == pytest.approx(sum(spans) / 1e6)
    assert len(summary["slowest"]) == 5
    assert summary["slowest"] == sorted(summary["slowest"], key=lambda each: -each["share"])
    assert sum(summary["kinds"].values()) == pytest.approx(summary["host"]["operators"], abs=0.01)
    (said,) = [line for line in messages if line.startswith("profile of training, steps 4 to 5, ")]
    assert f"{out}/profile/training.rank0.trace.json.gz in https://ui.perfetto.dev" in said
    assert "matrix product (fp32), " in said
    assert "host: " in said
    assert sorted(path.name for path in (out / "profile").iterdir()) == [
        "training.rank0.json", "training.rank0.trace.json.gz",
    ]  # fmt: skip


def test_short_and_resumed_runs(sft, messages):
    out = sft("out", profile_steps=2)
    assert any("nothing of training is recorded, because this run did 3 such steps" in line for line in messages)
    assert not (out / "profile").exists()
    sft("out", epochs=3, profile_steps=4, resume_from_checkpoint=True)
    events, summary = read(out, "training")
    assert steps(events) == ["training 4", "training 5", "training 6"], "those of this process"
    assert summary["steps"] == 3
    assert "profile_steps: 3 of 4 steps of training are recorded: the run ended" in messages
    theirs = {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False, "active_steps": 2}
    sft("out", overwrite_output_dir=True, profiler=theirs)
    assert not (out / "profile").exists(), "of another run"


def test_ctrl_c_in_a_recorded_step(sft, tmp_path, messages, monkeypatch):
    step, calls = Training._train_step, []

    def interrupted(self, batches):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batches)

    monkeypatch.setattr(Training, "_train_step", interrupted)
    with pytest.raises(SystemExit) as stopped:
        sft("out", epochs=2, profile_steps=3)
    assert stopped.value.code == 130
    assert (tmp_path / "out/checkpoints/step_00000004").is_dir()
    assert steps(read(tmp_path / "out", "training")[0]) == ["training 4"]
    assert "profile_steps: 1 of 3 steps of training are recorded: the run ended" in messages


@pytest.mark.parametrize(
    ("runs", "recipe", "changes"),
    [
        pytest.param(raft_runs, RAFT, {"cycles": 1, "seed": 1}, id="raft"),
        pytest.param(grpo_runs, GRPO, {"steps": 5, "eval_every_n_steps": 5}, id="grpo", marks=pytest.mark.slow),
    ],
)
def test_sampling(folder, tmp_path, messages, runs, recipe, changes):
    name = f"{recipe.__name__.lower()}_rocm"
    for out, count in (("plain", None), ("out", 2)):
        path = runs.write_run(folder, tmp_path / out, profile_steps=count, **changes)
        run(recipe(config.load(name, str(path))))
    runs.assert_equal(tmp_path / "out", tmp_path / "plain")
    out = tmp_path / "out"
    assert not list(out.glob("cycle_*/profile")), "a run has one profile"
    events, summary = read(out, "decoding")
    assert steps(events) == ["decoding 4", "decoding 5"]
    assert "aten::scaled_dot_product_attention" in names(events, "cpu_op")
    assert len(summary["slowest"]) == 5
    events, summary = read(out, "prefill")
    assert steps(events)[0] == "prefill 2"
    assert "aten::mm" in names(events, "cpu_op")
    assert steps(read(out, "training")[0]) == ["training 4", "training 5"]
    for kind in ("training", "prefill", "decoding"):
        assert any(line.startswith(f"profile of {kind}, step") for line in messages)


# ---- the recording


def product(size: int = 8) -> None:
    torch.ones(size, size) @ torch.ones(size, size)


def test_nothing_is_recorded_elsewhere(tmp_path):
    recorder = Trace()
    with recorder.on(tmp_path / "profile", 0, torch.device("cpu"), 0):
        for _ in range(5):
            with recorder.part(trace.TRAINING):
                product()
    with recorder.part(trace.TRAINING):
        product()
    assert not list(tmp_path.iterdir())


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
    assert "profile_steps: 1 of 5 steps of training are recorded: the trace would become too large" in messages


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
    assert read(tmp_path, "training")[1]["slowest"][0]["what"] == "matrix product (fp32)"


# ---- the words


def event(category: str, name: str, begin: float, length: float, **args) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "tid": 1, "args": args}


GEMM = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x128x32_MI16x16x1_SN"


def test_a_gpu_s_step_in_words():
    """Of 100 µs, 65 have a kernel: products, an addition partly beside one, a copy; the host waits for 30."""
    bf16 = {"Input type": ["c10::BFloat16", "c10::BFloat16"]}
    step = [
        event("user_annotation", "training 4", 1000, 100),
        event("cpu_op", "aten::linear", 1001, 9, **{"External id": 6}),
        event("cpu_op", "aten::mm", 1002, 8, **{"External id": 7, **bf16}),
        event("cuda_runtime", "hipExtModuleLaunchKernel", 1003, 2, **{"External id": 7}),
        event("kernel", GEMM, 1010, 40, **{"External id": 7}),
        event("kernel", GEMM, 1055, 10),
        event("kernel", "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", 1060, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Host)", 1080, 5),
        event("cuda_runtime", "hipStreamSynchronize", 1060, 30),
        event("cuda_runtime", "hipDeviceSynchronize", 1200, 30),
        {"ph": "i", "name": "Record Window End", "ts": 1230},
    ]
    found = kernels.summarize([step, step], "training")
    assert found["kernels"]
    assert found["seconds"] == pytest.approx(200e-6)
    assert found["idle"] == pytest.approx(1 - (40 + 15 + 5) / 100)
    assert found["host"] == pytest.approx({"operators": 0.39, "waiting": 0.3, "python": 0.61})
    assert [(each["what"], each["calls"], each["name"]) for each in found["slowest"]] == [
        ("matrix product (bf16)", 4, GEMM),
        ("elementwise operation (fp32)", 2, step[6]["name"]),
        ("copy between host and GPU", 2, "Memcpy DtoH (Device -> Host)"),
    ]
    assert [each["share"] for each in found["slowest"]] == pytest.approx([0.5, 0.1, 0.05])
    assert list(found["kinds"].values()) == pytest.approx([0.5, 0.1, 0.05])
    said = trace.describe("training", {"steps": 2, "first": 4, **found}, Path("trace.json.gz"))
    assert f"   50%  matrix product (bf16), 4 calls: {GEMM}" in said
    assert "   40%  no kernel ran" in said
    assert "39% in operators, 30% of the time waiting for the GPU; 61% in Python" in said


def test_an_operator_counts_without_those_inside_it():
    step = [
        event("user_annotation", "decoding 4", 0, 100),
        event("cpu_op", "aten::linear", 0, 50),
        event("cpu_op", "aten::t", 0, 10),
        event("cpu_op", "aten::addmm", 10, 35),
        event("cpu_op", "aten::mul", 50, 5),
        {**event("cpu_op", "aten::mul", 20, 10), "tid": 2},
    ]
    found = kernels.summarize([step], "decoding")
    times = {each["name"]: (each["calls"], round(each["seconds"] * 1e6)) for each in found["slowest"]}
    assert times == {"aten::addmm": (1, 35), "aten::mul": (2, 15), "aten::t": (1, 10), "aten::linear": (1, 5)}
    assert found["host"] == pytest.approx({"operators": 0.55, "waiting": 0, "python": 0.45})


def test_what_the_host_does_between_kernels_has_words():
    step = [event("user_annotation", "training 1", 0, 100), event("cpu_op", "_LoraFunctionBackward", 0, 60),
            event("cpu_op", "aten::mm", 10, 20), event("cpu_op", "aten::unflatten", 70, 10),
            event("cpu_op", "mine::step", 80, 5)]  # fmt: skip
    kinds = kernels.summarize([step], "training")["kinds"]
    assert kinds == pytest.approx(
        {"backward outside of operators": 0.4, "matrix product": 0.2, "view": 0.1, "other": 0.05}
    )


@pytest.mark.parametrize(
    ("name", "operator", "words"),
    [
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x64x32", "", "matrix product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "aten::addmm", "matrix product"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "", "matrix product"),
        ("void wvSplitK_hf_sml_<__hip_bfloat16, 64>", "", "matrix product"),
        ("aten::mm", "", "matrix product"),
        ("aten::_scaled_mm", "", "matrix product"),
        ("attn_fwd", "aten::_flash_attention_forward", "attention"),
        ("attn_fwd.kd", "", "attention"),
        ("bwd_kernel_dk_dv", "aten::_scaled_dot_product_flash_attention_backward", "attention backward"),
        ("void ck_tile::kentry<FmhaBwdDQDKDVKernel>", "", "attention backward"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", "attention backward"),
        ("aten::_softmax", "", "softmax"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>", "", "softmax"),
        ("aten::_log_softmax_backward_data", "", "softmax backward"),
        ("aten::_fused_rms_norm", "", "norm"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "", "exchange between ranks"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "aten::_fused_adamw_",
         "many small tensors at once (optimiser, clipping)"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "aten::copy_", "copy or conversion"),
        ("__amd_rocclr_copyBuffer.kd", "", "copy or conversion"),
        ("Memcpy HtoD (Pageable -> Device)", "", "copy between host and GPU"),
        ("Memset (Device)", "", "allocation and filling"),
        ("__amd_rocclr_fillBufferAligned.kd", "", "allocation and filling"),
        ("triton_poi_fused_add_mul_silu_3", "", "compiled elementwise operations"),
        ("triton_red_fused__to_copy_mean_1", "", "compiled reductions"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "aten::sum", "sum, maximum or other reduction"),
        ("aten::silu_backward", "", "elementwise operation"),
        ("aten::mul_", "", "elementwise operation"),
        ("aten::bmm", "", "matrix product"),
        ("aten::index_put_", "", "indexing"),
        ("void indexFuncLargeIndex", "aten::index_add_", "indexing"),
        ("aten::embedding", "", "embedding"),
        ("kDequantizeBlockwise<__hip_bfloat16, 512, 64, 8, 2>", "", "unpacking of 4-bit weights"),
        ("aten::view", "", "other"),
    ],
)  # fmt: skip
def test_words(name, operator, words):
    assert kernels.in_words(name, operator) == words
