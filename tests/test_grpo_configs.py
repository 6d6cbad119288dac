"""Values of GRPO's keys: those that cannot work are refused in one line that names the key."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config, registry
from rocm_ext.config.checks import check_grpo_values
from rocm_ext.errors import UserError
from rocm_ext.objectives.policy_gradient import LOSSES, PolicyGradient
from tests.test_bad_input import ANY
from tests.test_run_configs import CONFIGS

FILE = CONFIGS / "defaults" / "grpo_rocm.yaml"
DEFAULTS = config.defaults(registry.Recipe("grpo_rocm", CONFIGS.parent / "recipes" / "grpo_rocm.py", FILE))
OWN = sorted(OmegaConf.load(FILE).keys() - {"recipe", "extends", "without"})
SHARED = sorted(["samples_per_prompt", "max_new_tokens", "temperature", "eval_samples", "min_entropy", "verify_workers",
                 "verify_timeout", "max_error_share", "stop_strings"])  # fmt: skip
SERVERS = {"_component_": "rocm_ext.generation.OpenAIEngine", "urls": ["http://localhost:8000/v1"]}


def values(**changes: Any) -> DictConfig:
    required = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}}
    return OmegaConf.create(copy.deepcopy(DEFAULTS) | required | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *[{"loss": name} for name in LOSSES],
        {"loss": {"_component_": "my_module.MyLoss"}, "updates_per_step": 2},
        {"updates_per_step": 2, "minibatches": 32, "old_logprobs": "sampler"},
        {"max_staleness": 1, "engine": SERVERS},
        {"keep_samples": 10, "stop_after_no_gain": 3, "max_length_share": 0.5, "min_entropy": 0.05},
        {"center": "leave_one_out", "scale": "none", "truncated": "penalize", "truncation_margin": 1024},
        {"mismatch": "mask", "mismatch_level": "sequence", "kl_coef": 0.01, "refill": True},
    ],
    ids=str,
)
def test_takes(changes):
    check_grpo_values(values(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0; expected a whole number of at least 1"),
        ({"prompts_per_step": 2.5}, "prompts_per_step is 2.5"),
        ({"samples_per_prompt": 1}, "one answer alone has none"),
        ({"updates_per_step": None}, "updates_per_step is None"),
        ({"minibatches": 33}, "minibatches is 33, more than the 32 groups of a step"),
        ({"curriculum": "easy"}, "curriculum is 'easy'; expected none, informative or easy_to_hard"),
        ({"refill": 3}, "refill is 3; expected True or False"),
        ({"max_refills": 0}, "max_refills is 0"),
        ({"max_flat_steps": 0}, "max_flat_steps is 0"),
        ({"max_staleness": 2}, "max_staleness is 2; expected 0 or 1"),
        ({"max_staleness": True}, "max_staleness is True; expected 0 or 1"),
        ({"max_staleness": 1}, "LocalEngine samples with the weights in training; set max_staleness=0"),
        ({"max_staleness": 1, "engine": {"_component_": "rocm_ext.generation.TransformersEngine"}},
         "TransformersEngine samples with the weights in training; set max_staleness=0"),
        ({"loss": "ppo"}, "expected grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, or a _component_"),
        ({"loss": None}, "loss is None; expected grpo"),
        ({"loss": "rloo", "minibatches": 2}, "loss rloo has no ratio, so it takes one update per step"),
        ({"loss": "reinforce", "updates_per_step": 2}, "set both to 1, or loss to grpo, dr_grpo, dapo, gspo or cispo"),
        ({"center": "median"}, "center is 'median'; expected mean or leave_one_out"),
        ({"scale": None}, "scale is None; expected std, batch or none"),
        ({"clip_low": 0}, "clip_low is 0; expected a number above 0"),
        ({"clip_high": "wide"}, "clip_high is 'wide'; expected a number above 0"),
        ({"old_logprobs": "server"}, "old_logprobs is 'server'; expected trainer or sampler"),
        ({"kl_coef": -0.1}, "kl_coef is -0.1; expected a number of at least 0"),
        ({"entropy_coef": float("nan")}, "entropy_coef is nan"),
        ({"mismatch": False}, "mismatch is False; expected truncate, mask or none"),
        ({"mismatch_level": "word"}, "mismatch_level is 'word'; expected token or sequence"),
        ({"mismatch_limit": 1}, "mismatch_limit is 1; expected a number above 1"),
        ({"truncated": "drop"}, "truncated is 'drop'; expected mask, penalize or keep"),
        ({"truncation_penalty": 0}, "truncation_penalty is 0; expected a number above 0"),
        ({"truncation_margin": -1}, "truncation_margin is -1"),
        ({"truncation_margin": 1025}, "truncation_margin is 1025; expected at most max_new_tokens, 1024"),
        ({"temperature": 0}, "temperature is 0; expected a number above 0, because a group needs different answers"),
        ({"eval_every_n_steps": None}, "eval_every_n_steps is None"),
        ({"stop_after_no_gain": 0}, "stop_after_no_gain is 0; expected a whole number of at least 1, or null"),
        ({"max_length_share": 1.5}, "max_length_share is 1.5; expected a share above 0, at most 1, or null"),
        ({"min_entropy": 0}, "min_entropy is 0; expected a number above 0, or null"),
        ({"save_every_n_steps": None}, "save_every_n_steps is None; expected a whole number"),
        ({"keep_samples": None}, "keep_samples is None; expected all or a whole number of at least 1"),
        ({"keep_samples": 5}, "keep_samples is 5, less than save_every_n_steps, 10"),
        ({"max_error_share": 2}, "max_error_share is 2; expected a share from 0 to 1"),
        ({"verify_timeout": 0}, "verify_timeout is 0; expected seconds above 0"),
        ({"stop_strings": "end"}, "stop_strings is 'end'; expected a list of texts"),
        ({"optimizer": {"_component_": "torch.optim.AdamW"}}, "optimizer.lr is None; expected a number above 0"),
    ],
    ids=str,
)  # fmt: skip
def test_one_line_for(changes, message):
    with pytest.raises(UserError) as found:
        check_grpo_values(values(**changes))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("key", OWN)
def test_every_key_of_its_own_is_checked(key):
    with pytest.raises(UserError, match=key):
        check_grpo_values(values(**{key: ["neither", "of", "them"]}))


@given(st.dictionaries(st.sampled_from([*OWN, *SHARED]), ANY, min_size=1, max_size=3))
def test_any_value_is_taken_or_refused_in_one_line(changes):
    if line := refused(lambda: check_grpo_values(values(**changes))):
        assert any(key in line for key in changes)
        assert "\n" not in line


POSITIVE = st.floats(0, 5, exclude_min=True)
OF_LOSS = {
    "loss": st.sampled_from([*LOSSES, "ppo"]),
    "clip_low": POSITIVE,
    "clip_high": POSITIVE,
    "kl_coef": st.floats(-1, 1),
    "entropy_coef": st.floats(-1, 1),
    "mismatch": st.sampled_from(["truncate", "mask", "none", "clip"]),
    "mismatch_level": st.sampled_from(["token", "sequence", "step"]),
    "mismatch_limit": st.floats(0, 5),
    "temperature": st.floats(0, 2),
    "updates_per_step": st.integers(1, 2),
}


@settings(max_examples=300)
@given(st.fixed_dictionaries({}, optional=OF_LOSS))
def test_the_objective_takes_the_same_values(changes):
    """A value is refused before anything is loaded exactly where the objective would refuse it."""
    cfg = values(**changes)
    arguments = {key: cfg[key] for key in inspect.signature(PolicyGradient).parameters.keys() & OF_LOSS.keys()}
    arguments["on_policy"] = cfg.updates_per_step == 1
    before, later = refused(lambda: check_grpo_values(cfg)), refused(lambda: PolicyGradient(**arguments, normalize=1.0))
    assert bool(before) == bool(later), (before, later)


def refused(call: Callable[[], Any]) -> str | None:
    """Return the line in which ``call`` refuses its values; None if it takes them."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None
