"""Policy-gradient losses equal autograd on whole logits, and TRL's."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rocm_ext.base.errors import UserError
from rocm_ext.config.algorithms import ALGORITHMS
from rocm_ext.losses import PolicyGradient

WORDS, WIDTH, LENGTHS = 40, 12, (3, 1, 17, 9, 10)
LABELS = sum(LENGTHS)
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
RATIOS = [name for name, kind in ALGORITHMS.items() if kind.ratio != "none"]


def problem(spread: float = 0.3):
    """Return an output layer, hidden states, targets and the columns of five answers."""
    head, hidden, targets = layer(LABELS)
    with torch.no_grad():
        old = logprobs(head, hidden, targets) + spread * torch.randn(LABELS)
    columns = {
        "advantages": torch.tensor([1.5, -1.0, 0.7, -0.2, 0.0])[SEQUENCE],
        "old_logprobs": old,
        "sampler_logprobs": old + spread * torch.randn(LABELS),
        "reference_logprobs": old + spread * torch.randn(LABELS),
    }
    return head, hidden, targets, columns


def layer(labels: int):
    """Return an output layer, hidden states and targets."""
    torch.manual_seed(1)
    head, hidden = torch.nn.Linear(WIDTH, WORDS), torch.randn(labels, WIDTH, requires_grad=True)
    return head, hidden, torch.randint(0, WORDS, (labels,))


def logprobs(head, hidden, targets, temperature: float = 1.0):
    return (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


PAPERS = {  # limits of the ratio below and above; the divisor
    "grpo": (0.8, 1.2, "sequences"), "dr_grpo": (0.8, 1.2, 64), "dapo": (0.8, 1.28, "tokens"),
    "gspo": (1 - 3e-4, 1 + 4e-4, "sequences"), "cispo": (None, 5, "tokens"), "rloo": (None, None, 1),
    "reinforce": (None, None, 1),
}  # fmt: skip


def over(values, mean):
    parts = [values[s == SEQUENCE] for s in range(len(LENGTHS))]
    return torch.stack([part.mean() if mean else part.sum() for part in parts])[SEQUENCE]


def by_autograd(
    loss: str,
    now,
    columns,
    *,
    on_policy=False,
    kl=0.0,
    mismatch="none",
    level="token",
    limits=(0.7, 1.5),
    dual=True,
):
    """Return each label's loss [n] by the papers' formulas."""
    advantages = columns["advantages"]
    old = now.detach() if on_policy else columns["old_logprobs"]
    log_ratio = over(now - old, mean=True) if loss == "gspo" else now - old
    ratio = log_ratio.exp()
    low, high, _ = PAPERS[loss]
    if loss in ("rloo", "reinforce"):
        each = -advantages * now
    elif loss == "cispo":
        each = -ratio.detach().clamp(max=high) * advantages * now
    else:
        each = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if loss != "gspo" and dual:
            each = torch.where(
                advantages < 0, torch.minimum(each, -3 * advantages), each
            )  # dual clip
    if mismatch != "none":
        weight = old - columns["sampler_logprobs"]
        weight = weight if level == "token" else over(weight, mean=level == "geometric")
        weight = weight.exp().detach()
        inside = (weight >= limits[0]) & (weight <= limits[1])
        each = each * (weight.clamp(*limits) if mismatch == "truncate" else weight * inside)
    if kl:
        each = (
            each
            + kl
            * (now - old).exp().detach().clamp(max=3)
            * (columns["reference_logprobs"] - now) ** 2
            / 2
        )
    return each


def whole(each, normalize):
    if normalize == "tokens":
        return each.mean()
    if normalize == "sequences":
        return torch.stack([each[s == SEQUENCE].mean() for s in range(len(LENGTHS))]).mean()
    return each.sum() / normalize / len(LENGTHS)


def found(objective, head, hidden, targets, columns, sequence=SEQUENCE):
    """Return the normalised loss and its gradients for hidden states and output layer."""
    columns = {name: columns[name] for name in objective.columns}
    value = objective(head, hidden, targets, columns, sequence)
    value = value / objective.denominator(len(sequence), int(sequence[-1]) + 1)
    return value, torch.autograd.grad(value, [hidden, *head.parameters()])


def assert_equal(ours, value, parameters, rtol=1e-4):
    torch.testing.assert_close(ours[0], value, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ours[1], torch.autograd.grad(value, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)


def given(loss: str) -> dict:
    return {"normalize": 64} if loss == "dr_grpo" else {}


@pytest.mark.parametrize(("chunk", "dual"), [(1, None), (7, None), (40, None), (7, "none")])
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("loss", ALGORITHMS)
def test_losses_equal_their_papers(loss, on_policy, chunk, dual):
    """Some ratios are far from 1, where the limits hold."""
    if not on_policy and loss not in RATIOS:
        return
    head, hidden, targets, columns = problem(spread=1.0)
    objective = PolicyGradient(
        loss, on_policy=on_policy, chunk_tokens=chunk, clip_dual=dual, **given(loss)
    )
    each = by_autograd(
        loss, logprobs(head, hidden, targets), columns, on_policy=on_policy, dual=dual is None
    )
    ours = found(objective, head, hidden, targets, columns)
    assert_equal(ours, whole(each, PAPERS[loss][2]), [hidden, *head.parameters()])


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mismatch", ["truncate", "mask"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_mismatch_and_kl_equal_autograd(loss, mismatch, level, on_policy):
    head, hidden, targets, columns = problem()
    columns["old_logprobs"][2] -= 2  # a ratio above 3, the most that weighs the divergence
    limits = (0.7, 1.5) if level != "geometric" else (0.95, 1.05)
    objective = PolicyGradient(
        loss, kl_coef=0.1, mismatch=mismatch, mismatch_level=level, mismatch_limits=limits, on_policy=on_policy,
        chunk_tokens=7,
    )  # fmt: skip
    now = logprobs(head, hidden, targets)
    options = {"mismatch": mismatch, "level": level, "limits": limits, "on_policy": on_policy}
    each = by_autograd(loss, now, columns, kl=0.1, **options)
    ours = found(objective, head, hidden, targets, columns)
    assert_equal(ours, whole(each, objective.normalize), [hidden, *head.parameters()])


def test_kl_in_the_reward_is_only_measured():
    head, hidden, targets, columns = problem()
    objective = PolicyGradient("rloo", kl_coef=0.1)
    assert objective.columns == ("advantages", "reference_logprobs")
    each = by_autograd("rloo", logprobs(head, hidden, targets), columns, on_policy=True)
    assert_equal(
        found(objective, head, hidden, targets, columns),
        whole(each, 1),
        [hidden, *head.parameters()],
    )


@pytest.mark.parametrize("loss", ["grpo", "reinforce", "gspo", "dr_grpo"])
def test_temperature_and_entropy_equal_autograd(loss):
    """The entropy is a mean over labels, whatever divides the rest."""
    head, hidden, targets, columns = problem()
    on_policy = loss not in RATIOS
    objective = PolicyGradient(
        loss, on_policy=on_policy, temperature=0.7, entropy_coef=0.01, chunk_tokens=7, **given(loss)
    )
    each = by_autograd(loss, logprobs(head, hidden, targets, 0.7), columns, on_policy=on_policy)
    distribution = (head(hidden) / 0.7).log_softmax(-1)
    negative = (distribution.exp() * distribution).sum(-1).mean()
    objective.entropy_weight = (
        objective.denominator(LABELS, len(LENGTHS)) / LABELS
    )  # as a training step does
    ours = found(objective, head, hidden, targets, columns)
    assert_equal(
        ours, whole(each, objective.normalize) + 0.01 * negative, [hidden, *head.parameters()]
    )
    with torch.no_grad():
        assert objective(head, hidden, targets, columns, SEQUENCE).item() == pytest.approx(
            ours[0].item() * objective.denominator(LABELS, len(LENGTHS)), rel=1e-6
        )


@pytest.mark.parametrize("mismatch", ["truncate", "mask"])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_losses_equal_trl(loss, mismatch):
    """TRL's own method computes the loss from the same logits. Its CISPO names the limit, and not its distance to 1.

    Its value of the divergence is another one, with the same gradient; of GSPO's it weighs whole answers.
    """
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    head, hidden, targets, columns = problem()
    low, high, _ = PAPERS[loss]
    kl = 0.0 if loss == "gspo" else 0.1
    rows = [torch.nonzero(s == SEQUENCE)[:, 0] for s in range(len(LENGTHS))]

    def padded(values):
        return torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True)

    mask = padded(torch.ones(LABELS))
    now = padded(logprobs(head, hidden, targets))
    weight = (columns["old_logprobs"] - columns["sampler_logprobs"]).exp()
    weight = (
        weight.clamp(0.7, 1.5)
        if mismatch == "truncate"
        else weight * ((weight >= 0.7) & (weight <= 1.5))
    )
    itself = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (now, torch.zeros_like(now), None),
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=1.5, use_bias_correction_kl=True, steps_per_generation=1), aux_loss_enabled=False,
        beta=kl, current_gradient_accumulation_steps=1, epsilon_low=0.2 if low is None else 1 - low,
        epsilon_high=high if loss == "cispo" else high - 1,
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        loss_type="grpo" if loss == "gspo" else loss, max_completion_length=64, model=torch.nn.Linear(1, 1).train(),
        off_policy_mask_threshold=None, top_entropy_quantile=1.0, use_vllm=True,
        vllm_importance_sampling_correction=True,
    )  # fmt: skip
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.stack([columns["advantages"][row[0]] for row in rows]),
        "old_per_token_logps": padded(columns["old_logprobs"]),
        "ref_per_token_logps": padded(columns["reference_logprobs"]),
        "importance_sampling_ratio": padded(weight), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    theirs = trainer.GRPOTrainer._compute_loss(itself, None, inputs)
    dual = 1.5 if loss in ("grpo", "dr_grpo", "dapo") else None
    objective = PolicyGradient(
        loss,
        clip_dual=dual,
        kl_coef=kl,
        mismatch=mismatch,
        mismatch_limits=(0.7, 1.5),
        on_policy=False,
        **given(loss),
    )
    value, gradients = found(objective, head, hidden, targets, columns)
    assert_equal(
        (value if not kl else theirs.detach(), gradients), theirs, [hidden, *head.parameters()]
    )


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("loss", RATIOS)
def test_far_ratios_are_clamped_as_autograd_clamps(loss, advantage):
    """A sampler's log-prob of -9999 stands for the probability 0."""
    nll = torch.tensor([1.0, 25.0, 0.5, 100.0], requires_grad=True)
    sequence = torch.tensor([0, 0, 0, 1])
    columns = {
        "advantages": torch.full((4,), advantage),
        "old_logprobs": torch.tensor([-9999.0, -1.0, -0.6, -2.0]),
        "sampler_logprobs": torch.tensor([-9999.0, -9999.0, -0.5, -1e4]),
        "reference_logprobs": torch.tensor([-1.0, -1.0, -60.0, -1.0]),
    }
    objective = PolicyGradient(
        loss, on_policy=False, kl_coef=0.1, mismatch="truncate", **given(loss)
    )
    value, derivative = objective.terms(nll.detach(), columns, sequence)

    log_ratio = -nll - columns["old_logprobs"]
    if loss == "gspo":
        log_ratio = torch.stack([log_ratio[:3].mean(), log_ratio[3]])[sequence]
    ratio = log_ratio.clamp(max=20).exp()
    low, high, _ = PAPERS[loss]
    if loss == "cispo":
        each = ratio.detach().clamp(max=high) * advantage * nll
    else:
        each = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if advantage < 0 and loss != "gspo":
            each = each.clamp(max=3)
    each = each * (columns["old_logprobs"] - columns["sampler_logprobs"]).clamp(max=20).exp().clamp(
        max=2
    )
    weight = (-nll - columns["old_logprobs"]).clamp(max=20).exp().detach().clamp(max=3)
    each = each + 0.1 * weight * (columns["reference_logprobs"] + nll) ** 2 / 2
    torch.testing.assert_close(value, each.detach())
    torch.testing.assert_close(derivative, torch.autograd.grad(each.sum(), nll)[0])
    assert derivative.abs().max() < 15
    assert torch.isfinite(value).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mismatch", ["truncate", "mask"])
def test_a_sampler_without_a_probability_gives_a_limited_weight(mismatch, level):
    columns = {"advantages": torch.ones(2), "sampler_logprobs": torch.tensor([-9999.0, -1.0])}
    objective = PolicyGradient(
        "dapo", mismatch=mismatch, mismatch_level=level, mismatch_limits=[0.5, 2]
    )
    value, derivative = objective.terms(torch.ones(2), columns, torch.zeros(2, dtype=torch.long))
    weight = 0.0 if mismatch == "mask" else 2.0
    expected = torch.tensor([weight, 1.0 if level == "token" else weight])
    torch.testing.assert_close((value, derivative), (-expected, expected))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"loss": "ppo"}, "loss.loss is 'ppo'; expected grpo, dr_grpo"), ({"loss": "dr_grpo"}, "set normalize"),
        ({"loss": "rloo", "on_policy": False}, "rloo has no ratio"),
        ({"kl_coef": -1}, "kl_coef is -1; expected a number of at least 0"),
        ({"mismatch": "clip"}, "expected truncate, mask"),
        ({"mismatch_limits": [2, 3]}, "mismatch_limits is .2, 3.; expected a list of two numbers"),
        ({"loss": "cispo", "clip_low": 0.2}, "clip_low is 0.2, and loss cispo has no such limit"),
        ({"kl_in": "prompt"}, "expected loss, reward"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        PolicyGradient(**{"loss": "grpo", **arguments})
