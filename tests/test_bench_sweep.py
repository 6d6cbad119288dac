"""The sweep of training settings in `rocm-ext bench`, and the config with the fastest that it writes."""

from pathlib import Path

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.bench.run_config import run_config
from rocm_ext.bench.runner import Measurement
from rocm_ext.bench.sweep import TUNABLE_OP, Sweep, Winner
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import check_locked, choose_profile, load_profile
from tests.test_bench import GIB, row, sweep


def speed_of(values: dict) -> float:
    """A machine where eager attention and fp16 are fast, compilation only together with them, and 4 rows suffice."""
    speed = {1: 60, 2: 90, 4: 100, 8: 101, 16: 102}[values["rows"]]
    speed *= {"fp16": 2.0, "fp32": 1.0, "bf16": 0.5}[values.get("dtype", "fp32")]
    speed *= {"eager": 1.5, "math": 0.7}.get(values.get("attention", "auto"), 1.0)
    speed *= {True: 0.6}.get(values.get("enable_activation_checkpointing", "auto"), 1.0)
    together = values.get("attention") == "eager" and values.get("dtype") == "fp16"
    return speed * ({True: 1.2, "max-autotune": 1.3} if together else {}).get(values["compile"], 1.0)


def simulate(swept: Sweep, fails: tuple = ()) -> list[Measurement]:
    """The measurements of a whole sweep on this machine; the values in ``fails`` crash."""
    done: list[Measurement] = []
    while items := swept.following(done):
        assert len(done) < swept.most
        for item in items:
            if item.skip:
                done.append(Measurement(item, "skipped", {}, item.skip))
            elif set(fails) & set(item.values.values()):
                done.append(Measurement(item, "crashed", {}, "signal 11"))
            else:
                speed = speed_of(item.values) * (1.1 if item.environ else 1.0)
                done.append(row("training", speed, environ=item.environ, **item.values))
                done[-1].result["dtype"] = item.values.get("dtype", "fp32")
    return done


def test_each_key_is_varied_around_the_fastest_so_far():
    mi300 = Machine("rocm", "Linux", "2.11.0", "rocm", 190 * GIB, True, arch="gfx942")
    swept = sweep(mi300)
    done = simulate(swept)
    assert len(done) < 25, "all combinations would be hundreds"
    sizes = [each.item.values["rows"] for each in simulate(sweep(mi300, quick=True, batch_size=2))]
    assert sizes[:3] == [1, 2, 4], "the configured size is measured, too"
    found = {winner.key: winner.value for winner in swept.winners(done)}
    assert found == {
        "batch_size": 4, "dtype": "fp16", "attention": "eager", "compile": "max-autotune", **TUNABLE_OP
    }  # fmt: skip
    best = {"rows": 4, "compile": "max-autotune", "dtype": "fp16", "attention": "eager"}
    assert [each.item.values for each in done if each.item.environ] == [best]
    assert [each.item.values for each in done if "quantize_base" in each.item.values] == [
        {**best, "compile": False, "quantize_base": True}
    ]
    strix = Machine("rocm", "Linux", "2.11.0", "rocm", 120 * GIB, True, arch="gfx1151", unified=True)
    assert not [each for each in simulate(sweep(strix)) if each.item.environ], "TunableOp is for CDNA"


def test_a_sweep_goes_on_past_what_is_locked_or_crashes():
    mi50 = Machine("rocm", "Linux", "2.9.1", "rocm", 30 * GIB, False, arch="gfx906")
    swept = sweep(mi50, locked=load_profile("mi50").locked)
    done = simulate(swept, fails=("flash", "efficient", 16))
    assert {each.item.values["compile"] for each in done if each.status == "skipped"} == {True, "max-autotune"}
    assert {winner.key: winner.value for winner in swept.winners(done)} == {
        "batch_size": 4, "dtype": "fp16", "attention": "eager"
    }  # fmt: skip
    assert simulate(swept, fails=(1, 2, 4, 8, 16))[-1].item.values == {"rows": 16, "compile": False}


# ------------------------------------------------------------------------------------- a config that is the fastest
def written(path: Path, name: str, machine: Machine, overrides: list[str], *won: Winner) -> tuple[dict, dict, str]:
    """The config ``name`` and the one that bench writes, as recipes read them, and the file's text."""
    profile = load_profile(choose_profile(machine)[0])
    recipe = config.recipe_of(name)
    cfg = config.load(recipe, name, [f"hardware={profile.name}", *overrides])
    text = run_config(cfg, recipe, name, path, won, profile, machine)
    path.write_text(text)
    return OmegaConf.to_container(cfg), OmegaConf.to_container(config.load(recipe, str(path))), text


def test_a_config_with_the_fastest_settings(tmp_path):
    mi300 = Machine("rocm", "Linux", "2.11.0", "rocm", 190 * GIB, True, arch="gfx942", gpu_count=1)
    settings = {"batch_size": 8, "attention": "flash", "compile": "max-autotune", "engine.slots": 64, **TUNABLE_OP}
    won = [Winner(key, value, f"because {key}") for key, value in settings.items()]
    path = tmp_path / "bench.yaml"

    overrides = ["tokenizer.max_seq_len=4096", "sequences_per_step=null", "gradient_accumulation_steps=4",
                 "batch_size=2", "tokens_per_micro_batch=auto", "optimizer.lr=1e-5", "lr_scheduler=null",
                 "output_dir=outputs/other"]  # fmt: skip
    before, after, text = written(path, "strix_halo_qwen7b", mi300, overrides, *won)
    changed = {key: value for key, value in after.items() if value != before[key]}
    assert changed == {
        "batch_size": 4,  # of 4096 tokens, where 8 of 2048 were measured
        "sequences_per_step": 8,  # as before: 2 x 4
        "gradient_accumulation_steps": None,
        "tokens_per_micro_batch": None,  # as many as batch_size says
        "attention": "flash",
        "compile": "max-autotune",
    }
    assert (after["hardware"], after["optimizer"]["lr"], after["lr_scheduler"]) == ("mi300x", 1e-5, None)
    assert "# before it: export PYTORCH_TUNABLEOP_ENABLED=1  # because PYTORCH_TUNABLEOP_ENABLED" in text
    assert "# because attention\nattention: flash" in text
    assert f"tune run lora_finetune_rocm --config {path}" in text
    assert "tune download Qwen/" in text
    assert len(text.splitlines()) < 80, "values of the recipe and the profile are left out"
    moved = config.load("lora_finetune_rocm", str(path), ["output_dir=elsewhere"])
    assert moved.checkpointer.output_dir == "elsewhere"

    before, after, _ = written(path, "mi300x_qwen7b_raft", mi300, [], *won)
    assert after["engine"] == {**before["engine"], "slots": 64}
    assert after["prompts"] == before["prompts"]
    servers = "engine._component_=rocm_ext.sampling.OpenAIEngine"
    before, after, _ = written(path, "mi300x_qwen3_4b_grpo", mi300, [servers, "~engine.slots"], *won)
    assert after["engine"] == before["engine"]
    assert after["batch_size"] == 8


def test_a_locked_setting_that_was_measured_is_insisted_on(tmp_path):
    mi50 = Machine("rocm", "Linux", "2.9.1", "rocm", 30 * GIB, False, arch="gfx906", gpu_count=1)
    won = [Winner("compile", True, "faster"), Winner("dtype", "fp16", "faster")]
    _, after, _ = written(tmp_path / "bench.yaml", "mi50_qwen1_5b", mi50, [], *won)
    assert after["hardware_overrides"] == ["compile"]
    assert not check_locked(load_profile("mi50"), after, ["compile"])[1:]
    _, after, text = written(tmp_path / "bench.yaml", "mi50_qwen1_5b", mi50, [])
    assert "# No setting is faster than as configured." in text
    assert after["hardware_overrides"] == []
