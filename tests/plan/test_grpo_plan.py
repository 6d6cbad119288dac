"""`rocm-ext plan` of GRPO: memory that the sampler keeps, the time of a step, and which side waits for servers."""

import pytest

from rocm_ext import config
from rocm_ext.cli import main
from rocm_ext.plan import speeds
from rocm_ext.plan.workload import Questions, sampled_rows
from tests.kit.plans import as_configured, plan

pytestmark = pytest.mark.usefixtures("cpu_of_known_speed")


@as_configured
def test_a_step_shares_its_memory_with_the_sampler(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plan(capsys, "--config", "strix_halo_qwen3_4b_grpo")
    step, memory = found["rollout"], found["configured"]["memory"]
    assert (step["asked"]["prompts"], step["asked"]["held_out"], found["rows"]["count"]) == (
        32,
        200,
        256,
    )
    assert found["configured"]["step"]["tokens"] == 256 * found["rows"]["mean"]
    assert (found["steps"], step["servers"], step["waiting"]) == (1, 0, None)
    assert memory["kept_for_sampling"] == step["sampling"]["layout"] + step["sampling"]["cache"]
    parts = ("weights", "gathered", "adapter", "gradients", "optimizer", "kept_for_sampling")
    assert memory["peak"] > sum(memory[part] for part in parts) + memory["activations"]
    assert max(memory["peak"], step["peak"]) <= found["budget"]
    assert step["round_seconds"] == pytest.approx(
        step["sampling_seconds"] + found["training_seconds"]
    )
    assert step["evaluations"] == 1 + 100 // 20
    whole = 100 * step["round_seconds"] + 6 * step["evaluation_seconds"]
    assert step["run_seconds"] == pytest.approx(whole)


@pytest.mark.parametrize(("needed", "groups"), [("null", 64), (1, 1), (4, 7), (33, 64)])
def test_memory_is_planned_for_the_largest_update(needed, groups):
    changes = [f"groups_per_update={needed}", "prompts_per_step=64", "samples_per_prompt=8"]
    cfg = config.load("grpo_rocm", "cpu_pocket_grpo", changes)
    rows = sampled_rows(cfg, Questions(64, 0, 50, 40.0, 16.0, "a test"))
    assert (rows.count, rows.most) == (64 * 8, groups * 8)


POCKET = ("--config", "cpu_pocket_grpo", "prompts_per_step=64", "samples_per_prompt=8", "updates_per_step=1",
          "groups_per_update=null")  # fmt: skip
SERVERS = "engine={_component_: rocm_ext.sampling.OpenAIEngine, urls: [http://a/v1, http://b/v1]}"


@as_configured
@pytest.mark.wide
@pytest.mark.parametrize(
    ("hardware", "more", "gib"),
    [
        ("strix_halo", "", 64),
        ("strix_halo", ", at_once: 3", 3),
        ("strix_halo", ", memory_mb: 2048", 128),
        ("mi300x", "", 0),
    ],
)
def test_programs_take_memory_that_the_gpu_shares(capsys, hardware, more, gib):
    program = (
        f"environment={{_component_: rocm_ext.environments.Program, command: [python, -V]{more}}}"
    )
    found = plan(
        capsys,
        *POCKET,
        f"hardware={hardware}",
        "verifier=null",
        "max_environment_tokens=9",
        program,
    )
    assert found["programs"] == gib << 30


@as_configured
@pytest.mark.wide
def test_where_memory_is_short_the_sampler_keeps_less(capsys, monkeypatch):
    arguments = (
        *POCKET,
        "prompts_per_step=4",
        "engine.slots=16",
        "enable_activation_checkpointing=False",
    )
    found = plan(capsys, *arguments)
    peak, kept = (found["configured"]["memory"][key] for key in ("peak", "kept_for_sampling"))
    layout, cache = found["rollout"]["sampling"]["layout"], found["rollout"]["sampling"]["cache"]
    assert kept == layout + cache
    for short, expected in ((0, kept), (1, layout), (cache + 1, 0)):
        monkeypatch.setattr(
            speeds, "memory_budget", lambda *_, short=short: (peak - short, "a test")
        )
        found = plan(capsys, *arguments)
        assert found["configured"]["memory"]["kept_for_sampling"] == expected
        assert found["configured"]["memory"]["peak"] == peak - kept + expected


@as_configured
@pytest.mark.wide
def test_updates_and_log_probs_before_them_are_counted(capsys):
    def seconds(*changes: str) -> tuple[float, float, int]:
        found = plan(capsys, *POCKET, *changes)
        step = found["rollout"]
        return step["scoring_seconds"], step["updates_seconds"], found["steps"]

    _, once, _ = seconds()
    assert seconds("groups_per_update=16") == (0.0, pytest.approx(once, rel=0.1), 4)
    scoring, twice, updates = seconds("updates_per_step=2", "kl_coef=0.01", "old_logprobs=trainer")
    assert (twice, updates) == (pytest.approx(2 * once, rel=0.1), 2)
    assert 2 * 0.25 * once < scoring < 2 * 0.5 * once, "two forward passes"


@as_configured
@pytest.mark.wide
def test_the_side_that_waits_for_the_other(capsys):
    def step(*changes: str) -> dict:
        return plan(capsys, *POCKET, SERVERS, *changes)["rollout"]

    few = ["prompts_per_step=2", "samples_per_prompt=2", "max_new_tokens=128"]
    for changes, side in ((few, "the training GPUs"), (["updates_per_step=9"], "the servers")):
        found = step("max_staleness=1", *changes)
        sampling, training = (
            found["sampling_seconds"],
            found["scoring_seconds"] + found["updates_seconds"],
        )
        assert found["servers"] == 2
        assert found["waiting"] == [side, pytest.approx(abs(sampling - training))]
        assert (sampling > training) == (side == "the training GPUs")
        assert found["round_seconds"] == max(sampling, training)
    after = step("updates_per_step=9")
    assert after["waiting"] is None
    assert after["round_seconds"] == pytest.approx(sampling + training)
    assert (after["peak"], after["keeps"]) == (0, [])


@pytest.mark.wide
@as_configured
def test_the_table_for_people(capsys):
    assert (
        main(["plan", *POCKET, SERVERS, "max_staleness=1", "steps=40", "eval_every_n_steps=15"])
        == 0
    )
    said = capsys.readouterr().out
    for part in (
        "loss cispo: center mean",
        "if no group has equal rewards",
        "1 update",
        "wait",
        "a step",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["max_staleness=1"], "LocalEngine samples with the weights in training"),
        (["loss=ppo"], "loss is 'ppo'; expected grpo"),
        (["max_new_tokens=100000"], "the model takes"),
    ],
)
def test_a_plan_refuses_what_the_recipe_refuses(capsys, changes, message):
    assert main(["plan", "--config", "cpu_pocket_grpo", *changes]) == 1
    assert message in capsys.readouterr().err
