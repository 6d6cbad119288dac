"""The protocol's losses: their definitions, derived by autograd, and the recipes' own where both have one."""

import pytest
import torch

from rocm_ext.base.errors import UserError
from rocm_ext.losses import PolicyGradient
from rocm_ext.serve.losses import loss_of

LABELS = 40
SEQUENCE = torch.arange(LABELS) // 10
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


@pytest.fixture
def columns():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(LABELS, generator=generator)
    return {
        "nll": -logprobs + 0.4 * torch.randn(LABELS, generator=generator),
        "logprobs": logprobs,
        "advantages": torch.randn(4, generator=generator)[SEQUENCE],
        "weights": torch.randn(LABELS, generator=generator),
        "sequence_ratio_mask": torch.ones(LABELS),
    }


def _gspo(p, c):
    log_ratio = torch.stack([(p.detach() - c["logprobs"])[s == SEQUENCE].mean() for s in range(4)])
    ratio = torch.exp(log_ratio[SEQUENCE] + p - p.detach())
    return _clipped(ratio, c["advantages"])


def _clipped(ratio, advantages):
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages)


DEFINITIONS = {
    "cross_entropy": lambda p, c: -c["weights"] * p,
    "importance_sampling": lambda p, c: -(p - c["logprobs"]).exp() * c["advantages"],
    "ppo": lambda p, c: _clipped((p - c["logprobs"]).exp(), c["advantages"]),
    "cispo": lambda p, c: -(p - c["logprobs"]).exp().clamp(0.9, 1.3).detach() * p * c["advantages"],
    "gspo": _gspo,
    "dro": lambda p, c: -(p * c["advantages"] - 0.05 * (p - c["logprobs"]).square()),
}
SETTINGS = {"ppo": CLIP, "cispo": CLIP, "gspo": CLIP, "dro": {"beta": 0.1}}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_loss_is_what_the_protocol_defines(name, columns):
    nll = columns["nll"].clone().requires_grad_()
    expected = DEFINITIONS[name](-nll, columns)
    (slope,) = torch.autograd.grad(expected.sum(), nll)
    value, derivative = loss_of(name, SETTINGS.get(name, {})).terms(
        columns["nll"], columns, SEQUENCE
    )
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(derivative, slope)


@pytest.mark.parametrize(("name", "ours"), [("ppo", "grpo"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_it_equals_the_recipes_loss(name, ours, columns):
    settings = dict(CLIP)
    limits = {"clip_low": 0.1, "clip_high": 0.3}
    if name == "cispo":
        settings["clip_low_threshold"] = 0.0
        limits.pop("clip_low")
    if name == "ppo":
        limits["clip_dual"] = "none"
    theirs = PolicyGradient(ours, normalize=1.0, on_policy=False, **limits)
    their_columns = columns | {"old_logprobs": columns["logprobs"]}
    value, derivative = loss_of(name, settings).terms(columns["nll"], columns, SEQUENCE)
    expected, slope = theirs.terms(columns["nll"], their_columns, SEQUENCE)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(derivative, slope)


def test_importance_sampling_is_reinforce_on_policy(columns):
    """With the log-probs of the same policy its gradient is REINFORCE's."""
    on_policy = columns | {"logprobs": -columns["nll"]}
    _, derivative = loss_of("importance_sampling", {}).terms(columns["nll"], on_policy, SEQUENCE)
    _, slope = PolicyGradient("reinforce").terms(columns["nll"], on_policy, SEQUENCE)
    torch.testing.assert_close(derivative, slope)


def test_gspo_takes_its_ratio_over_marked_tokens(columns):
    """A prompt's tokens, which the mask leaves out, do not change a sequence's ratio."""
    marked = columns | {"sequence_ratio_mask": (torch.arange(LABELS) % 10 >= 5).float()}
    other = {**marked, "logprobs": columns["logprobs"].clone()}
    other["logprobs"][torch.arange(LABELS) % 10 < 5] = -3.0
    loss = loss_of("gspo", CLIP)
    for one, two in zip(
        loss.terms(columns["nll"], marked, SEQUENCE),
        loss.terms(columns["nll"], other, SEQUENCE),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("name", "settings", "found"),
    [
        ("stable_reinforce", {}, "stable_reinforce"),
        ("custom", {}, "custom"),
        ("pppo", {}, "ppo"),
        ("ppo", {"beta": 1.0}, "beta"),
        ("ppo", {"clip_low_threshold": float("nan")}, "nan"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2"),
        ("dro", {"beta": "much"}, "much"),
    ],
)
def test_what_is_not_served_is_named(name, settings, found):
    with pytest.raises(UserError, match=found):
        loss_of(name, settings)
