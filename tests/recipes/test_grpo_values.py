"""Values of GRPO's keys that are taken, and others that are refused in one line."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from rocm_ext.recipes import grpo_rocm

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.config.algorithms import ALGORITHMS, KEYS, describe, filled
from rocm_ext.config.checks.rollouts import check_sampled_values
from rocm_ext.losses.policy_gradient import PolicyGradient, loss_config
from rocm_ext.plan.workload import old_logprobs
from tests.config.test_run_configs import CONFIGS
from tests.kit.grpo_runs import write_run
from tests.kit.tiny import exit_code, write_yaml
from tests.recipes.test_bad_input import ANY

check_grpo_values = partial(check_sampled_values, family="grpo_rocm")
DEFAULTS = config.defaults("grpo_rocm")
COMMON = {"recipe", "include", *OmegaConf.load(CONFIGS / "defaults" / "common.yaml")}
OWN = sorted(OmegaConf.load(CONFIGS / "defaults" / "grpo_rocm.yaml").keys() - COMMON)
OF_RAFT = (
    OmegaConf.load(CONFIGS / "defaults" / "raft_rocm.yaml").keys()
    - config.defaults("lora_finetune_rocm").keys()
)
SHARED = sorted(["samples_per_prompt", "max_new_tokens", "temperature", "eval_samples", "min_entropy", "verify_workers",
                 "verify_timeout", "max_error_share", "stop_strings"])  # fmt: skip
OWN_LOSS = {"_component_": "rocm_ext.losses.PolicyGradient", "loss": "dapo"}
SERVERS = {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": ["http://localhost:8000/v1"]}


def test_a_loss_is_a_name_or_a_component(tmp_path):
    component = {"_component_": "rocm_ext.losses.PolicyGradient", "loss": "cispo", "clip_high": 3.0}
    own = OmegaConf.to_container(OmegaConf.load(CONFIGS / "cpu_pocket_grpo.yaml"))
    path = write_yaml(tmp_path / "own.yaml", {**own, "loss": component, "clip_high": None})
    check_grpo_values(config.load("grpo_rocm", str(path), ["hardware=cpu"]))
    raft = OmegaConf.to_container(OmegaConf.load(CONFIGS / "cpu_pocket_raft.yaml")) | {
        "loss": "dapo"
    }
    with pytest.raises(UserError, match="expected a _component_"):
        config.load("raft_rocm", str(write_yaml(tmp_path / "raft.yaml", raft)), ["hardware=cpu"])


def values(**changes: Any) -> DictConfig:
    required = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}}
    return OmegaConf.create(copy.deepcopy(DEFAULTS) | required | changes)


@pytest.mark.parametrize("changes", [
    {},
    *[{"loss": name} for name in ALGORITHMS],
    {"loss": {"_component_": "my_module.MyLoss"}, "updates_per_step": 2},
    {"updates_per_step": 2, "groups_per_update": 1, "old_logprobs": "sampler"},
    {"max_staleness": 1, "engine": SERVERS},
    {"max_staleness": 1, "engine": SERVERS, "mismatch": "none", "updates_per_step": 2, "old_logprobs": "sampler"},
    {"keep_samples": 10, "stop_after_no_gain": 3, "max_length_share": 0.5, "min_entropy": 0.05},
    {"center": "leave_one_out", "scale": "none", "truncated": "penalize", "truncation_margin": 1024},
    {"center": "batch", "scale": "batch", "kl_in": "reward", "samples_per_prompt": 1},
    {"loss": "reinforce", "samples_per_prompt": 1},
    {"mismatch": "mask", "mismatch_level": "geometric", "kl_coef": 0.01, "refill": True},
    {"mismatch_limits": [0.5, 5], "clip_dual": "none"},
    {"loss": "gspo", "clip_dual": "none"},  # which has no such limit anyway
], ids=str)  # fmt: skip
def test_takes(changes):
    check_grpo_values(values(**changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"steps": 0}, "steps is 0; expected a whole number from 1 to"),
    ({"samples_per_prompt": 1}, "one answer alone has none"),
    ({"groups_per_update": 33}, "groups_per_update is 33, more than the 32 groups of a step"),
    ({"max_staleness": 1}, "LocalEngine samples with the weights in training; set max_staleness=0"),
    *[({"max_staleness": 1, "engine": SERVERS, "mismatch": "none", **more}, "set mismatch=truncate or mask, or max")
      for more in ({}, {"updates_per_step": 2}, {"old_logprobs": "sampler"})],
    ({"loss": "ppo"}, "loss is 'ppo'; expected grpo, dr_grpo"),
    ({"loss": "rloo", "groups_per_update": 16}, "loss rloo has no ratio, so it takes one update per step"),
    ({"loss": "reinforce", "updates_per_step": 2}, "set them to 1 and null, or loss to grpo, dr_grpo, dapo, gspo"),
    ({"center": "median"}, "center is 'median'; expected mean"),
    ({"scale": "group"}, "scale is 'group'; expected std"),
    ({"curriculum": "hard_first"}, "curriculum is 'hard_first'; expected none, informative"),
    ({"center": "none", "scale": "batch"}, "set scale=none, or center to mean or leave_one_out"),
    ({"loss": "reinforce", "scale": "std"}, "center=none gives advantages to groups of equal rewards"),
    ({"loss": "cispo", "clip_low": 0.2}, "clip_low is 0.2, and loss cispo has no such limit; set clip_low=null"),
    ({"loss": OWN_LOSS, "kl_in": "reward"}, "kl_in is 'reward', and loss is a component, which does not read it"),
    ({"mismatch": "none", "mismatch_limits": [0.5, 5]}, "mismatch_limits=[0.5, 5] needs mismatch=truncate or mask"),
    *[({key: value}, f"{key} is {value}, and GRPO samples from the full distribution")
      for key, value in (("top_k", 40), ("top_p", 0.9), ("min_p", 0.1))],
    ({"truncation_margin": 1025}, "truncation_margin is 1025; expected at most max_new_tokens, 1024"),
    ({"temperature": 0}, "temperature is 0; expected a number above 0, because a group needs different answers"),
    ({"max_length_share": 1.5}, "max_length_share is 1.5; expected a share above 0, at most 1, or null"),
    ({"keep_samples": 5}, "keep_samples is 5, less than save_every_n_steps, 10"),
], ids=str)  # fmt: skip
def test_one_line_for(changes, message):
    with pytest.raises(UserError) as found:
        check_grpo_values(values(**changes))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


TALKS = {"environment": {"_component_": "my_module.MyEnvironment"}}


@pytest.mark.parametrize(("changes", "unread"), [
    ({}, []),
    ({"max_turns": 4, "max_environment_tokens": 9}, ["max_turns=4", "max_environment_tokens=9"]),
    ({**TALKS, "max_turns": 4, "verify_workers": 2}, ["verify_workers=2"]),
    ({"max_refills": 5, "truncation_margin": 9, "truncation_penalty": 0.5},
     ["max_refills=5", "truncation_penalty=0.5", "truncation_margin=9"]),
    ({"refill": True, "max_refills": 5, "truncated": "penalize", "truncation_margin": 9}, []),
    ({"mismatch": "none", "mismatch_level": "sequence"}, ["mismatch_level=sequence"]),
    ({"kl_in": "reward"}, ["kl_in=reward"]),
], ids=str)  # fmt: skip
def test_a_key_that_is_set_and_not_read_is_named(changes, unread, caplog):
    with caplog.at_level("INFO", "rocm_ext"):
        check_grpo_values(values(**changes))
    said = [record.getMessage().rpartition(": ")[2].split(", ") for record in caplog.records]
    assert [key for keys in said for key in keys] == unread


def test_raft_names_them_too(caplog):
    with caplog.at_level("INFO", "rocm_ext"):
        changes = ["max_turns=4", "clip_high=0.1", "lr_decay=1.0", "lr_floor=1e-5"]
        check_sampled_values(config.load("raft_rocm", "cpu_pocket_raft", changes), "raft_rocm")
    assert [record.getMessage() for record in caplog.records] == [
        "not read without an environment: max_turns=4", "not read with objective=raft: clip_high=0.1",
        "not read with lr_decay=1: lr_floor=1e-05"
    ]  # fmt: skip


@pytest.mark.parametrize("key", OWN)
def test_every_key_of_its_own_is_checked(key):
    with pytest.raises(UserError, match=key):
        check_grpo_values(values(**{key: ["neither", "of", "them"]}))


@pytest.mark.parametrize("key", sorted(OF_RAFT - {"include"}))
def test_every_key_of_raft_is_checked(key):
    cfg = config.load("raft_rocm", "cpu_pocket_raft", ["hardware=cpu"]) | {key: [7]}
    with pytest.raises(UserError, match=f"^{key} is "):
        check_sampled_values(cfg, "raft_rocm")


PLAIN = ANY.filter(
    lambda value: "${" not in str(value)
)  # OmegaConf refuses others before a recipe sees them


@given(st.dictionaries(st.sampled_from([*OWN, *SHARED]), PLAIN, min_size=1, max_size=3))
def test_any_value_is_taken_or_refused_in_one_line(changes):
    if line := refused(lambda: check_grpo_values(values(**changes))):
        assert any(key in line for key in changes)
        assert "\n" not in line


@pytest.mark.parametrize("loss", ALGORITHMS)
def test_null_keys_are_those_of_the_loss_wherever_it_is_built(loss):
    cfg = filled(given := values(loss=loss))
    check_grpo_values(given)
    built = config.instantiate(OmegaConf.create(loss_config(given)), key="loss")
    own = PolicyGradient(loss, normalize=1024.0)
    names = ["clip_low", "clip_high", "clip_dual", "kl_in"]
    assert [getattr(built, name) for name in names] == [getattr(own, name) for name in names]
    assert built.normalize == (1024 if loss == "dr_grpo" else own.kind.normalize)
    assert [cfg.center, cfg.scale] == {
        "dr_grpo": ["mean", "none"], "rloo": ["leave_one_out", "none"], "reinforce": ["none", "none"]
    }.get(loss, ["mean", "std"])  # fmt: skip
    assert cfg.mismatch_limits == [0, 2]
    assert describe(cfg).startswith(f"loss {loss}: center {cfg.center}, scale {cfg.scale}")
    assert filled(cfg) == cfg
    assert given == values(loss=loss)  # what is saved and used again has nulls


def test_a_component_has_the_usual_advantages_and_its_own_limits():
    cfg = filled(values(loss=OWN_LOSS))
    assert [cfg[key] for key in KEYS] == ["mean", "std", None, None, None, None]
    assert describe(cfg) == "loss rocm_ext.losses.PolicyGradient: center mean, scale std"


def refused(call: Callable[[], Any]) -> str | None:
    """Return the line in which ``call`` refuses its values; None if it takes them."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def test_when_the_sampler_has_the_old_log_probs():
    servers = {"engine": SERVERS}
    assert old_logprobs(values(), torch.float32) == "sampler"
    assert old_logprobs(values(), torch.bfloat16) == "trainer"
    assert old_logprobs(values(**servers), torch.float32) == "trainer"
    assert old_logprobs(values(old_logprobs="trainer"), torch.float32) == "trainer"
    assert old_logprobs(values(old_logprobs="sampler", **servers), torch.bfloat16) == "sampler"


@pytest.fixture
def run_line(folder, tmp_path, capsys, monkeypatch):
    """Run the recipe, which must fail before it has the base weights, and return the line that the user sees."""

    def read(self):
        raise UserError("the base weights were read")

    monkeypatch.setattr("rocm_ext.train.learner.Learner.read_weights", read)

    def run_line(changes: dict) -> str:
        capsys.readouterr()
        assert (
            exit_code(grpo_rocm.main, "--config", write_run(folder, tmp_path / "out", **changes))
            == 1
        )
        (found,) = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        return found

    return run_line


@pytest.mark.parametrize(("changes", "message"), [
    ({}, "the base weights were read"),
    ({"loss": {"_component_": "rocm_ext.losses.PolicyGradient"}}, "missing a required argument: 'loss'"),
    ({"loss": {**OWN_LOSS, "clip_hi": 1}}, "unknown key loss.clip_hi"),
    ({"loss": {**OWN_LOSS, "temperature": 0.5}}, "loss computes log-probs at temperature 0.5, and temperature 1"),
    ({"loss": OWN_LOSS, "groups_per_update": 1}, "set loss.on_policy=False"),
    ({"optimizer": None}, "optimizer is None; expected a _component_ with its lr"),
], ids=str)  # fmt: skip
def test_bad_input_ends_in_one_line_before_the_weights_are_read(run_line, changes, message):
    assert message in run_line(changes)


@pytest.mark.wide
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=ANY)
def test_any_value_anywhere_ends_in_one_line(run_line, data, value):
    """Reading the base weights ends the run here, so that each example ends in an error, of whatever kind."""
    key = data.draw(
        st.sampled_from(sorted(DEFAULTS.keys() - {"output_dir"}))
    )  # a text would be a folder here
    assert len(run_line({key: value})) > len("error: ")
