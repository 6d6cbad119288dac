"""`rocm-ext plan` and its planner, against measured memory, counted work and users' input."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.bench.probes import RandomWeights
from rocm_ext.cli import main
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import CrossEntropy
from rocm_ext.machine.bench_file import machine_key
from rocm_ext.machine.detect import detect
from rocm_ext.model.attention import choose_attention
from rocm_ext.model.build import Weights, build_model, load_weights
from rocm_ext.plan import costs, memory, speeds, workload
from rocm_ext.plan.costs import CostCounter, Kernels, Operation, simulate
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import Figures, measure_cpu
from rocm_ext.plan.workload import Workload
from tests.kit import hf_models
from tests.kit.plans import as_configured, measured_peak, plan, planned_and_measured_sampling
from tests.kit.tiny import run_config, write_model, write_yaml

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}


pytestmark = pytest.mark.usefixtures("cpu_of_known_speed")
also = partial(pytest.param, marks=pytest.mark.wide)  # what other cases hold together


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with models of several shapes and long rows; most tokens have a label."""
    root = tmp_path_factory.mktemp("plan")
    shapes = {
        "qwen": {},
        "tied": {"tie_word_embeddings": True},
        "wide": {"vocab": 32768},
        "llama": {"family": "llama"},
    }
    for name, shape in shapes.items():
        write_model(root / name, **{**SHAPE, **shape})
    answers = ["She sold half as many clips in May. " * (20 + i % 3) for i in range(64)]
    rows = [{"question": "How many?", "answer": answer} for answer in answers]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def write_config(root, name: str, out, lora: dict | None = None, **changes):
    changes = {"max_steps_per_epoch": 2, "sequences_per_step": 8, **changes}
    cfg = run_config(root / name, root / "rows.jsonl", out, **changes)
    cfg["tokenizer"]["max_seq_len"] = 256
    cfg["model"] |= lora or {}
    return write_yaml(out.with_suffix(".yaml"), cfg)


# --------------------------------------------------------------------------------------------------- memory
@pytest.mark.wide(always=1)
@as_configured
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen", {}),
        also("qwen", {"enable_activation_checkpointing": True}),
        also("qwen", {"attention": "eager"}),
        ("qwen", {"lora": {"lora_rank": 64, "lora_alpha": 64, "lora_dropout": 0.1}}),
        also("qwen", {"lora": {"use_dora": True}}),
        ("wide", {"enable_activation_checkpointing": True, "dtype": "bf16"}),
        also("llama", {"enable_activation_checkpointing": 3}),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items())[:50] if isinstance(value, dict) else value
    ),
)
def test_planned_peak_is_the_measured_one(name, changes, folders, tmp_path, capsys):
    path = write_config(folders, name, tmp_path / "run", startup_checks=False, **changes)
    peak, recipe = measured_peak(path)
    planned = plan(capsys, "--config", path)["configured"]["memory"]["peak"]
    assert planned == recipe.learner.planned_peak
    assert planned == pytest.approx(peak, rel=0.1)


def test_one_expert_is_computed_and_counts_for_all(tmp_path, monkeypatch):
    base = hf_models.write_theirs(tmp_path / "base", "gpt-oss")
    node = {
        "_component_": "rocm_ext.model.from_checkpoint",
        "checkpoint_dir": str(base),
        "lora_rank": 2,
    }
    node = OmegaConf.create(node | {"target_parameters": "all-experts"})
    decoder = build_model(node, torch.float32, 0, torch.device("meta"))

    def run() -> tuple:
        step = simulate(decoder, CrossEntropy(chunk_tokens=64), [128], 64, Kernels(True, True))
        return *step, costs.launches_of(decoder, None, torch.device("cpu"), Kernels(True, True))

    monkeypatch.setattr(costs, "remembered", lambda _, compute: compute())
    once = run()
    monkeypatch.setattr(CostCounter, "once", lambda _, parts: iter(parts))
    each = run()
    assert once == each
    products = sum(operation.flops > 0 for operation in each[0][0].forward)
    assert products > 2 * decoder.layers[0].mlp.experts.num_experts, (
        "each expert has products of its own"
    )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", ["qwen3.5", "gpt-oss"])
def test_costs_are_those_of_torchs_own_fake_kernels(name, tmp_path, monkeypatch):
    base = hf_models.write_theirs(tmp_path / "base", name)
    node = {
        "_component_": "rocm_ext.model.from_checkpoint",
        "checkpoint_dir": str(base),
        "lora_rank": 2,
    }
    monkeypatch.setattr(
        torch.nn.init, "kaiming_uniform_", lambda *_, a: None
    )  # an adapter's values are not drawn
    decoder = build_model(OmegaConf.create(node), torch.bfloat16, 0, torch.device("meta"))
    monkeypatch.setattr(costs, "remembered", lambda _, compute: compute())

    def run() -> tuple:
        return simulate(
            decoder, CrossEntropy(chunk_tokens=32), [70, 64, 3], 64, Kernels(False, True)
        )

    shortcut = run()
    monkeypatch.setattr(
        costs, "_computed", lambda func, inputs, args, kwargs: func(*args, **kwargs)
    )
    assert shortcut == run()


@pytest.mark.parametrize("together", [True, False])
def test_a_plan_leaves_the_kernels_of_the_run(folders, tmp_path, together):
    cfg = config.load("lora_finetune_rocm", str(write_config(folders, "qwen", tmp_path / "run")))
    for kernel in ("flash", "auto"):
        decoder = build_model(cfg.model, torch.float32, 0, torch.device("meta"))
        choose_attention(decoder, kernel)
        simulate(
            decoder, CrossEntropy(chunk_tokens=64), [64, 60], 64, Kernels(True, True, together)
        )
        assert [layer.attn.kernel for layer in decoder.layers] == [kernel] * len(decoder.layers)


@as_configured
def test_ranks_share_weights_and_gather_layers(capsys):
    one, eight = (
        plan(capsys, "--config", "mi300x_qwen7b", "--ranks", str(n))["configured"] for n in (1, 8)
    )
    assert eight["memory"]["weights"] < one["memory"]["weights"] / 7
    assert one["memory"]["gathered"] == 0
    assert (
        0.1 < eight["memory"]["gathered"] / one["memory"]["weights"] < 0.3
    )  # embeddings, head, two layers
    assert eight["step"]["tokens"] == one["step"]["tokens"] / 8


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("vocabulary", "slots", "prompt", "dtype"),
    [
        (2048, 32, 200, torch.float32),
        also(30_000, 64, 60, torch.float32),
    ],
)
def test_planned_peak_of_sampling_is_the_measured_one(vocabulary, slots, prompt, dtype):
    node = {
        "_component_": "torchtune.models.qwen2.lora_qwen2", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": True,
        "vocab_size": vocabulary, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 256,
        "intermediate_dim": 704, "max_seq_len": 512, "lora_rank": 8, "lora_alpha": 16,
    }  # fmt: skip
    decoder = build_model(OmegaConf.create(node), dtype, 0, torch.device("cpu"))
    load_weights(
        decoder,
        Weights(RandomWeights(decoder, torch.device("cpu")), "random"),
        Ranks(torch.device("cpu")),
    )
    planned, peak = planned_and_measured_sampling(node, decoder, slots, prompt)
    assert planned == pytest.approx(peak, rel=0.1)


# ----------------------------------------------------------------------------------------------------- work
@pytest.mark.wide(always=1)
@as_configured
@pytest.mark.parametrize("name", ["wide", "llama"])
def test_work_is_what_a_real_step_does(name, folders, tmp_path, capsys):
    path = write_config(folders, name, tmp_path / "run", batch_size=64, startup_checks=False)
    recipe = LoRAFinetune(config.load("lora_finetune_rocm", str(path)))
    recipe.setup()
    update = next(recipe.trainer.loader.range(0, 1))
    with CostCounter() as tally:
        recipe.trainer.train_step(update)
    recipe.cleanup()
    step = plan(capsys, "--config", path)["configured"]["step"]
    assert step["tokens"] == pytest.approx(
        sum(batch.real_tokens for batch in update.batches), rel=0.02
    )
    assert step["flops"] == pytest.approx(sum(op.flops for op in tally.operations), rel=0.03)
    assert step["bytes"] == pytest.approx(sum(op.bytes for op in tally.operations), rel=0.2)


@as_configured
def test_work_of_a_7b(capsys):
    """Each token takes 4 N FLOP for forward and activations' gradient; attention and LoRA add the rest."""
    found = plan(capsys, "--config", "strix_halo_qwen7b")
    embeddings = 152064 * 3584
    parameters = found["parameters"] - found["trainable_parameters"] - embeddings
    assert 1.0 < found["configured"]["step"]["flops"] / (4 * parameters * 65_536) < 1.1


def test_time_is_bound_by_compute_or_memory():
    figures = Figures("", True, {"bf16": 100.0}, 10.0, efficiency=0.5, attention=0.25, launch=0.5)
    product, copied, attention = (
        Operation(100, 1),
        Operation(0, 20),
        Operation(100, 1, attention=True),
    )
    assert figures.seconds([product, copied], "bf16") == pytest.approx((1 + 2) / 0.5)
    assert figures.seconds([product, copied], "bf16", compiled=True) == pytest.approx(
        (1 + 2 / 2) / 0.5
    )
    assert figures.seconds([attention], "bf16") == pytest.approx(4 / 0.5)
    short = [Operation(1, 1)] * 8  # the host takes longer to start them
    assert figures.seconds([*short, product], "bf16") == pytest.approx(9 * 0.5 / 0.5)
    with pytest.raises(Exception, match="no figure for fp16"):
        figures.rate("fp16")


# ------------------------------------------------------------------------------------------------ what fits
def planner(folders, tmp_path, rows: Workload | None = None, **changes) -> TrainingPlanner:
    cfg = config.load(
        "lora_finetune_rocm", str(write_config(folders, "qwen", tmp_path / "run", **changes))
    )
    decoder = build_model(cfg.model, torch.float32, 0, torch.device("meta"))
    figures = Figures("", True, {"fp32": 1e12}, 1e10)
    assert rows is None or decoder.packs
    return TrainingPlanner(
        cfg, decoder, CrossEntropy(), torch.float32, torch.device("cpu"),
        rows=rows or Workload(256, 200, 0.8, 100, "test"), ranks=1, speeds=lambda: figures,
        kernels=Kernels(True, False),
    )  # fmt: skip


@pytest.mark.wide
def test_the_best_fit_stays_within_any_budget(folders, tmp_path):
    planned = planner(folders, tmp_path, sequences_per_step=64)
    least = planned.memory(256).peak(range(3))
    chosen = [planned.fit(int(least * factor)) for factor in (1.0, 1.2, 3, 100)]
    assert all(c.peak <= least * f for c, f in zip(chosen, (1.0, 1.2, 3, 100), strict=True))
    times = [choice.step.seconds for choice in chosen]
    assert times == sorted(times, reverse=True)  # more memory is never slower
    assert len(chosen[0].checkpointed) == 3
    assert chosen[-1].checkpointed == []
    too_small = planned.fit(int(least * 0.5))
    assert (too_small.micro_batch, len(too_small.checkpointed)) == (256, 3)


@pytest.mark.wide
def test_memory_is_enough_for_every_micro_batch_of_pairs(folders, tmp_path):
    """Also for one with longer answers, and one whose long prompt attention computes twice."""
    pairs = ((120, 110), (0, 0), 200), ((170, 50), (0, 120), 100)
    work = [
        Workload(230, 225, 0.7, len(each), "test", each, 2, 60)
        for each in (pairs, pairs[:1], pairs[1:])
    ]
    peaks = [
        planner(folders, tmp_path, each, sequences_per_step=1).memory(230).peak(()) for each in work
    ]
    assert max(peaks[1:]) <= peaks[0] < 1.1 * max(peaks[1:])


def test_a_plan_finds_keys_that_help(folders, tmp_path, capsys):
    path = write_config(folders, "qwen", tmp_path / "run", batch_size=1, sequences_per_step=32, dataset={
        "_component_": "rocm_ext.data.sft_dataset", "source": "not/here"})  # fmt: skip
    whole = OmegaConf.load(path)
    whole.tokenizer.max_seq_len = 32
    OmegaConf.save(whole, path)
    # on a machine with much compute per byte, reading the weights limits small micro-batches
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"date": "2026-01-01", "machine": machine_key(detect()), "settings": {},
                                 "figures": {"flops": {"fp32": 1e13}, "bandwidth": 1e10}}))  # fmt: skip
    measured = ["--config", path, "--bench", bench]
    keys = plan(capsys, *measured)["changes"]
    assert keys
    OmegaConf.save(OmegaConf.merge(whole, keys), path)
    assert plan(capsys, *measured)["changes"] == {}


@pytest.mark.wide
def test_auto_micro_batches_train_the_same(folders, tmp_path):
    losses = []
    for value in ("auto", 4096):
        path = write_config(
            folders,
            "qwen",
            tmp_path / str(value),
            tokens_per_micro_batch=value,
            startup_checks=False,
        )
        recipe = LoRAFinetune(config.load("lora_finetune_rocm", str(path)))
        recipe.setup()
        longest = max(sum(lengths) for lengths in recipe.trainer.rows.lengths)
        assert value != "auto" or recipe.learner.tokens_per_micro_batch % longest == 0
        recipe.train()
        lines = (tmp_path / str(value) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        summary = json.loads((tmp_path / str(value) / "summary.json").read_text())
        assert summary["planned_memory"] == recipe.learner.planned_peak
        assert summary["base_model"] == recipe.learner.base_fingerprint
        recipe.cleanup()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -------------------------------------------------------------------------------- data, machines, output
@pytest.mark.wide
@as_configured
def test_rows_that_are_here_are_counted(folders, tmp_path, capsys):
    path = write_config(folders, "qwen", tmp_path / "run", epochs=3, max_steps_per_epoch=None)
    found = plan(capsys, "--config", path)
    assert (found["rows"]["count"], found["steps"]) == (64, 3 * 8)
    assert found["rows"]["longest"] <= 256
    assert 0.5 < found["rows"]["supervised"] < 1
    said = plan(capsys, "--config", path, "--rows", "1000", "--row-tokens", "50")
    assert (said["rows"]["count"], said["rows"]["mean"], said["steps"]) == (1000, 50, 3 * 125)


@pytest.mark.wide
@as_configured
def test_rows_are_read_as_the_run_reads_them(folders, tmp_path, capsys, messages, monkeypatch):
    """Rows of a chat template that ends turns with a line end, as Qwen's does, keep their end of turn."""
    base = shutil.copytree(folders / "qwen", tmp_path / "base")
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    (base / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}")
    shutil.copy(folders / "rows.jsonl", tmp_path)
    path = write_config(tmp_path, "base", tmp_path / "run")
    monkeypatch.setattr(workload, "_LOOKED_AT", 20)
    found = plan(capsys, "--config", path)["rows"]
    assert (found["count"], found["source"]) == (64, "16 of 64 rows read")
    assert not [message for message in messages if "is masked" in message]
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"question": 4, "answer": "four"}\n' * 16)
    assert main(["plan", "--config", str(path)]) == 1
    assert "rows.jsonl:65" in capsys.readouterr().err


@as_configured
@pytest.mark.parametrize(
    "name", [also("llama3_2/1B_lora_single_device"), "gemma2/2B_lora_single_device"]
)
def test_configs_of_torchtune(name, capsys):
    """Gemma 2 has an attention, norms and an output layer of its own."""
    found = plan(capsys, "--config", name, "hardware=mi300x")
    assert 1e9 < found["parameters"] < 3.3e9
    assert found["configured"]["memory"]["peak"] > 2 * found["parameters"]


@pytest.mark.wide
@as_configured
def test_a_cycle_of_raft(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plan(capsys, "--config", "strix_halo_qwen7b_raft")
    cycle, asked = found["rollout"], found["rollout"]["asked"]
    assert (asked["prompts"], asked["held_out"], asked["answer"]) == (500, 200, 256)
    assert found["rows"]["count"] == 2000  # four of eight answers, half of them right
    assert cycle["round_seconds"] == cycle["sampling_seconds"] + found["training_seconds"]
    seconds = cycle["round_seconds"] + cycle["evaluation_seconds"]
    assert 600 < seconds < 7200  # from the machine's roofline; others give 8 hours
    assert cycle["peak"] <= found["budget"]
    assert found["published"] == {kind: list(shares) for kind, shares in speeds.PUBLISHED.items()}
    longer = plan(
        capsys, "--config", "strix_halo_qwen7b_raft", "--answer-tokens", "512", "--rows", "1000"
    )["rollout"]
    assert longer["sampling_seconds"] == pytest.approx(4 * cycle["sampling_seconds"], rel=0.15)
    servers = "engine={_component_: rocm_ext.sampling.OpenAIEngine, urls: [http://a/v1]}"
    served = plan(capsys, "--config", "strix_halo_qwen7b_raft", servers)["rollout"]
    assert (served["servers"], served["peak"], served["waiting"]) == (1, 0, None)
    for name, count in (
        ("rows", 3),
        ("heldout", 2),
    ):  # own prompts are counted before the model is downloaded
        lines = [f'{{"prompt": "{name} {n}", "answer": "1"}}\n' for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    component = "{{_component_: rocm_ext.data.prompt_dataset, source: {}.jsonl}}".format
    own = f"prompts={component('rows')}", f"eval_prompts={component('heldout')}"
    asked = plan(capsys, "--config", "strix_halo_qwen7b_raft", *own)["rollout"]["asked"]
    assert (asked["prompts"], asked["held_out"]) == (3, 2)


@pytest.mark.wide
@as_configured
def test_what_does_not_fit_ends_with_1(capsys):
    arguments = (
        "--config",
        "strix_halo_qwen7b",
        "hardware=mi50",
    )  # in fp32 its weights alone are too much
    found = plan(capsys, *arguments, code=1)
    assert found["fits"] is False
    assert found["dtype"] == "fp32"
    half, packed = found["fits_with"]
    assert (half["change"], packed["change"]) == ("dtype=fp16", "model.quantize_base=nf4")
    assert packed["peak"] < half["peak"] <= found["budget"] < found["configured"]["memory"]["peak"]
    assert plan(capsys, *arguments, half["change"])["configured"]["memory"]["peak"] == half["peak"]
    assert main(["plan", *arguments]) == 1
    assert (
        "does not fit into 28.8 GiB: it fits with dtype=fp16 (plans 17.6 GiB) or"
        in capsys.readouterr().out
    )


@as_configured
def test_a_plan_says_what_compile_auto_chose(capsys):
    arguments = ["plan", "--config", "strix_halo_qwen0_5b"]
    for more, reason in (
        (["--machine=Strix Halo"], "only a run on that machine can try it"),
        (["hardware=cpu"], "the device is a CPU"),
        (["--machine=MI50"], "Dynamo is broken on gfx906"),
    ):
        main([*arguments, *more, "compile=auto"])
        assert f"compile off: {reason}" in capsys.readouterr().out
    assert plan(capsys, *arguments[1:], "compile=True")["compile"] is None


@as_configured
def test_tables_for_people(capsys):
    assert main(["plan", "--config", "mi50_qwen0_5b_raft", "--rows", "100"]) == 0
    said = capsys.readouterr().out
    for part in (
        "optimizer",
        "logits and loss",
        "peak",
        "keys and values",
        "computed, not measured",
    ):
        assert part in said
    words = " ".join(said.split())
    for kind, (low, high) in speeds.PUBLISHED.items():
        assert f"{low} to {high} in {kind}" in words
    for row in ("tokens/s", "answer tokens/s", "a cycle"):
        low, high = re.search(rf"^{row} +(.+) to (.+)$", said, re.MULTILINE).groups()
        assert low != high


@as_configured
def test_a_cpu_is_not_compared_with_runs_on_gpus(folders, tmp_path, capsys):
    arguments = [
        "plan",
        "--config",
        str(write_config(folders, "qwen", tmp_path / "run")),
        "--rows",
        "8",
    ]
    assert plan(capsys, *arguments[1:])["published"] is None
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "To measure: `rocm-ext bench`" in said
    assert not re.search(r"ublished| to \S+( s)?$", said, re.MULTILINE)


def test_this_cpu_is_measured():
    figures = measure_cpu()
    assert all(figures.rate(dtype) > 1e6 for dtype in ("fp32", "bf16"))
    assert figures.bandwidth > 1e6
    assert not figures.measured


CONFIGS = [path.stem for recipe in registry.recipes().values() for path in recipe.configs]
ONE_A_RECIPE = (
    "strix_halo_qwen7b",
    "strix_halo_qwen7b_raft",
    "strix_halo_qwen3_4b_grpo",
    "strix_halo_qwen3_4b_dpo",
)


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(
    "name", [*(name for name in CONFIGS if name.startswith("cpu_")), *ONE_A_RECIPE]
)
def test_a_config_fits_its_machine(name, capsys):
    """All others are planned where their heads are compared with their plans."""
    plan(capsys, "--config", name)


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--config", "cpu_pocket", "--bench", "{tmp}/torn.json"], "cannot read"),
        (["--config", "cpu_pocket", "--bench", "{tmp}/other.json"], "was measured on"),
        (["--config", "cpu_pocket", "tokens_per_micro_batch=3"], "the longest row has 256 tokens"),
        (["--config", "cpu_pocket", "checkpointer.model_type=PHI3_MINI"], "PHI3_MINI"),
        (["--config", "cpu_pocket_raft", "max_new_tokens=100000"], "the model takes"),
        (["--config", "cpu_pocket_raft", "hardware=strix_halo_windows"], "does not run on Windows"),
    ],
)
def test_bad_input_is_one_line(arguments, found, capsys, tmp_path):
    (tmp_path / "torn.json").write_text('{"figures": {"flops"')
    figures = {"flops": {"fp32": 1}, "bandwidth": 1}
    other = {"date": "", "machine": {"arch": "gfx906"}, "figures": figures, "settings": {}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert main(["plan", *[argument.format(tmp=tmp_path) for argument in arguments]]) != 0
    captured = capsys.readouterr()
    assert found in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_fewest_checkpointed_layers(folders, tmp_path):
    planned = planner(folders, tmp_path).memory(1024)
    for count in range(planned.layers + 1):
        layers = memory.spread(count, planned.layers)
        assert len(set(layers)) == count
        assert planned.fewest(planned.peak(layers)) == memory.spread(
            len(planned.fewest(planned.peak(layers))), 3
        )
        assert len(planned.fewest(planned.peak(layers))) <= count
    assert planned.fewest(10**15) == []


def test_further_adapters_are_counted(folders, tmp_path, capsys):
    """Each takes its values, gradients and optimiser; the weights are there once."""
    path = write_config(folders, "qwen", tmp_path / "out")
    parts = []
    for more in ([], ["--adapters", "3"]):
        main(["plan", "--config", str(path), "--json", *more])
        parts.append(json.loads(capsys.readouterr().out)["configured"]["memory"])
    one, three = parts
    own = one["adapter"] + one["gradients"] + one["optimizer"]
    assert three["other_adapters"] == 2 * own
    assert three["peak"] == one["peak"] + 2 * own
